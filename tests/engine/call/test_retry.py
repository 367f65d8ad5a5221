"""Batch calls that fail: guilty items do so alone, batches that are too large go in smaller calls; both are bounded."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import random
import weakref
from collections import UserList
from collections.abc import Callable, Sequence
from itertools import combinations, count, repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.call import retry
from carpool.engine.call.results import (
    OF_A_CALL,
    OF_A_YIELD,
    OF_RESUME,
    OF_START,
    OF_STEP,
    Asked,
    Failed,
    Miscount,
    Trouble,
    as_it_is,
    as_results,
    doubted,
    is_bad_result,
    run_now,
)
from carpool.engine.call.retry import Retrier, padding_to
from carpool.engine.clock import VirtualClock
from carpool.errors import ModelError
from tests.effort import slow_where
from tests.support.properties import PROPERTY


class Poisoned:
    """Raises for a batch with a guilty item; counts its calls and the items in them."""

    def __init__(self, *guilty: int) -> None:
        self.guilty = set(guilty)
        self.calls: list[int] = []

    def __call__(self, xs: list[int]) -> list[int]:
        self.calls.append(len(xs))
        if bad := self.guilty.intersection(xs):
            raise ValueError(f"{min(bad)}")
        return [10 * x for x in xs]


class Small:
    """Runs out of memory with more than `most` items, or with one that is too large by itself; counts its calls."""

    def __init__(self, most: int, *giants: int, error: Callable[[], BaseException] = MemoryError) -> None:
        self.most = most
        self.giants = set(giants)
        self.error = error
        self.calls: list[int] = []

    def __call__(self, xs: list[int]) -> list[int]:
        self.calls.append(len(xs))
        if len(xs) > self.most or self.giants.intersection(xs):
            raise self.error()
        return [10 * x for x in xs]


def call(
    function: Callable[[list[int]], Any], n: int, caller: Retrier | None = None, **more: Any
) -> tuple[list[Any], list[Trouble]]:
    """The results for items 0 to n - 1, errors in their positions; and what was told."""
    trouble: list[Trouble] = []
    caller = caller or Retrier(isolate_errors=True)
    results = run_now(caller.call(function, list(range(n)), trouble, **more))
    return [r.error if isinstance(r, Failed) else r for r in results], trouble


def failed(results: list[Any]) -> list[int]:
    """The positions of errors; all others must be right."""
    for i, result in enumerate(results):
        assert result == 10 * i or isinstance(result, BaseException)
    return [i for i, result in enumerate(results) if isinstance(result, BaseException)]


# -- guilty items


@pytest.mark.fault("F80")
@pytest.mark.parametrize("guilty", [(0,), (31,), (13,), (0, 31), (0, 1), (5, 21), (0, 1, 2), (7, 8, 24), (0, 15, 31)])
def test_up_to_three_guilty_items_of_32_fail_alone(guilty: tuple[int, ...]) -> None:
    """Up to three guilty items of 32 fail, each with its own error, and all others are answered."""
    results, trouble = call(Poisoned(*guilty), 32)

    assert failed(results) == list(guilty)
    assert [str(results[i]) for i in guilty] == [str(i) for i in guilty]
    assert trouble == [Trouble(split=True)]


def test_any_three_of_32() -> None:
    """All 4960 sets of three guilty items of 32 are found in at most 27 calls."""
    most = 0
    for guilty in combinations(range(32), 3):
        model = Poisoned(*guilty)
        assert failed(call(model, 32)[0]) == list(guilty)
        most = max(most, len(model.calls))
    assert most <= 27


@pytest.mark.parametrize("position", range(32))
def test_one_guilty_item_of_32_takes_eleven_calls(position: int) -> None:
    """One guilty item of 32 is found in eleven calls, twice the logarithm and the first."""
    model = Poisoned(position)
    call(model, 32)
    assert len(model.calls) == 11


@pytest.mark.parametrize("n", [2, 3, 7, 8, 32, 64, 1000])
def test_a_model_that_is_broken_is_given_up_ever_sooner(n: int) -> None:
    """If a model is broken every caller gets the error, and each batch tries half as many items by
    themselves as the one before.
    """
    caller = Retrier(isolate_errors=True)
    costs = []
    for _ in range(8):
        model = Poisoned(*range(n))
        results, _ = call(model, n, caller)
        assert failed(results) == list(range(n))
        costs.append(len(model.calls))

    assert costs[0] <= min(2 * n - 1, 7 + retry.MOST_PROBES)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] <= 7 + retry.SUSPECT_PARTS


def test_one_success_and_a_broken_model_is_given_its_chance_again() -> None:
    """After an outage, too, the single good item of a batch is found: one success gives the model
    its chance again.
    """
    caller = Retrier(isolate_errors=True)
    for _ in range(8):
        call(Poisoned(*range(32)), 32, caller)
    assert caller.most_probes == retry.SUSPECT_PARTS
    assert failed(call(Poisoned(*range(1, 32)), 32, caller)[0]) == list(range(1, 32))
    assert caller.most_probes == retry.MOST_PROBES
    for position in range(32):
        guilty = [i for i in range(32) if i != position]
        assert failed(call(Poisoned(*guilty), 32, caller)[0]) == guilty


@pytest.mark.parametrize("n", [2, 3, 7, 8, 32, 64])
def test_every_second_item_is_guilty(n: int) -> None:
    """If every second item is guilty the good ones are answered all the same, and the items are run
    one by one before long.
    """
    guilty = tuple(range(0, n, 2))
    model = Poisoned(*guilty)
    results, _ = call(model, n)

    assert failed(results) == list(guilty)
    assert len(model.calls) <= min(2 * n - 1, n + 7)


def test_a_batch_that_raises_fails_as_a_whole_without_isolation() -> None:
    """Without isolation a batch that raises is one call and one error for all."""
    model = Poisoned(3)
    results, trouble = call(model, 8, Retrier(isolate_errors=False))

    assert failed(results) == list(range(8))
    assert model.calls == [8]
    assert trouble == []


@pytest.mark.fault("F38")
def test_the_wrong_number_of_results_is_not_tried_again() -> None:
    """A wrong number of results is not tried again: a model that cannot count will not count better
    with less.
    """
    calls: list[int] = []

    def short(xs: list[int]) -> list[int]:
        calls.append(len(xs))
        return xs[1:]

    results, _ = call(short, 8)
    assert {r.code for r in results} == {"bad_result"}
    assert calls == [8]


def test_an_async_model_is_no_different() -> None:
    """The calls of an async model are awaited one after the other, with the same outcome."""
    model = Poisoned(3)

    async def predict(xs: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return model(xs)

    results = asyncio.run(Retrier(isolate_errors=True, may_wait=True).call(predict, list(range(8)), []))
    assert [isinstance(r, Failed) for r in results] == [i == 3 for i in range(8)]


class Ends(BaseException):
    """An exception that is let through."""


def test_what_goes_through_ends_the_call_at_any_depth() -> None:
    """Exceptions that are let through end the batch from its first call as from those for its
    parts.
    """
    caller = Retrier(isolate_errors=True, fatal_errors=(Ends,))
    for most in (100, 3):

        def predict(xs: list[int], most: int = most) -> list[int]:
            raise Ends if len(xs) <= most else ValueError

        with pytest.raises(Ends):
            call(predict, 8, caller)


class Nasty(Exception):
    """Whoever asks it anything is sorry."""

    @property
    def code(self) -> str:
        raise RuntimeError("no code")

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_an_exception_is_asked_nothing() -> None:
    """No attribute of an exception is read, since that may be a trap."""

    def predict(xs: list[int]) -> list[int]:
        raise Nasty

    results, _ = call(predict, 8)
    assert {type(r) for r in results} == {Nasty}


# -- what running again may cost


class Timed:
    """A model on a clock of its own, whose batches have bad items at random; it has no rest between them."""

    def __init__(self, bad: float, n: int, *, call_s: float, item_s: float) -> None:
        self.bad, self.n, self.call_s, self.item_s = bad, n, call_s, item_s
        self.clock = VirtualClock()
        self.caller = Retrier(isolate_errors=True, clock=self.clock)
        self.dice = random.Random(n)
        self.calls = self.items = self.good = self.harmed = self.unsplit = 0

    def __call__(self, xs: list[bool]) -> list[bool]:
        self.calls += 1
        self.items += len(xs)
        self.clock.now += self.call_s + self.item_s * len(xs)
        if True in xs:
            raise ValueError
        return xs

    def serve(self, batches: int) -> None:
        for _ in range(batches):
            xs = [self.dice.random() < self.bad for _ in range(self.n)]
            trouble: list[Trouble] = []
            results = run_now(self.caller.call(self, xs, trouble))
            harmed = [isinstance(result, Failed) for result, bad in zip(results, xs, strict=True) if not bad]
            self.good += len(harmed)
            self.harmed += sum(harmed)
            self.unsplit += sum(each.unsplit for each in trouble)


COSTS = {"by the call": (0.01, 0.0), "by the item": (0.0, 0.001)}


@pytest.mark.fault("F80")
@slow_where(lambda bad: bad in (0.02, 0.05))
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(
    ("n", "bad", "calls", "items"),
    [
        *((8, 0.01, 2, 1.3), (8, 0.05, 4, 1.8), (8, 0.2, 9, 3.0), (8, 0.5, 14, 3.9)),
        *((64, 0.01, 9, 2.2), (64, 0.02, 15, 2.9), (64, 0.05, 30, 4.1), (64, 0.1, 50, 5), (64, 0.2, 75, 5.5)),
        *((64, 0.5, 85, 5), (256, 0.01, 37, 3.9), (256, 0.02, 65, 4.9)),
    ],
)
def test_less_than_one_in_a_hundred_of_the_good_fail(n: int, bad: float, calls: float, items: float, cost: str) -> None:
    """Up to every second item being bad, and however calls cost, fewer than one in a hundred good
    items fail; and the calls for a batch are at most so many times its items.
    """
    call_s, item_s = COSTS[cost]
    model = Timed(bad, n, call_s=call_s, item_s=item_s)
    model.serve(600)

    assert model.harmed < 0.01 * model.good
    assert model.calls <= calls * 600
    assert model.items <= items * 600 * n


@pytest.mark.parametrize("cost", COSTS)
def test_a_worker_that_is_never_free_keeps_a_share_of_its_time(cost: str) -> None:
    """Whatever comes, batches are run again for no more than so many seconds to each other one; a
    batch for which there is no time fails as a whole, after one call.
    """
    call_s, item_s = COSTS[cost]
    model = Timed(0.5, 256, call_s=call_s, item_s=item_s)
    model.serve(400)

    first_s = 400 * (call_s + 256 * item_s)
    longest_s = 2 * 256 * (call_s + item_s)  # it may be overdrawn by one batch
    assert model.clock.now <= first_s * (1 + retry.RERUN_PER_S) + retry.MOST_RERUN_S + longest_s
    assert (model.unsplit > 0) == (cost == "by the call")
    assert model.harmed >= model.unsplit


def test_a_rest_earns_time() -> None:
    """After less than a second in which nothing was run again, all the time is there that can be
    saved up.
    """
    model = Timed(0.5, 256, call_s=0.01, item_s=0.0)
    while not model.unsplit:
        model.serve(1)
    harmed = model.harmed
    model.clock.now += retry.MOST_RERUN_S / retry.RERUN_PER_S
    model.serve(2)
    assert model.harmed == harmed


def test_nothing_is_run_again_for_those_who_wait_no_longer() -> None:
    """The search for guilty items ends at the batch's last deadline."""
    model = Timed(0.0, 64, call_s=1.0, item_s=0.0)
    for bad in (range(63, 64), range(64), range(0, 64, 2)):
        model.clock.now, model.calls = 0.0, 0
        trouble: list[Trouble] = []
        results = run_now(model.caller.call(model, [i in bad for i in range(64)], trouble, until=5.0))
        assert model.clock.now <= 8.0  # a round of items by themselves is finished
        assert isinstance(results[63], Failed)
        assert len(results) == 64


# -- memory


@pytest.mark.fault("F31")
def test_a_batch_that_is_too_large_is_run_in_smaller_calls() -> None:
    """A batch that is too large is run in smaller calls, and no caller notices; what was too much
    is tried once, not in every part.
    """
    model = Small(12)
    results, (trouble,) = call(model, 64)

    assert failed(results) == []
    assert model.calls == [64, 32, 16] + [8] * 8
    assert [len(part) for part in trouble.ran_out] == [64, 32, 16]
    assert [part[0] for part in trouble.fitted] == [8 * i for i in range(8)]
    assert (trouble.out_of_memory, trouble.split) == (True, False)


def test_memory_needs_no_isolation_and_costs_no_budget() -> None:
    """Smaller calls for want of memory need no isolation and cost no budget: it is nobody's fault,
    and the next batch will be smaller.
    """
    model = Small(3)
    caller = Retrier(isolate_errors=False)
    for _ in range(100):
        assert failed(call(model, 16, caller)[0]) == []


def test_what_must_not_run_twice_fails() -> None:
    """What must not run twice fails when memory runs out, and its size is reported all the same."""
    model = Small(12)
    results, (trouble,) = call(model, 64, Retrier(isolate_errors=False, retry_on_oom=False))

    assert failed(results) == list(range(64))
    assert model.calls == [64]
    assert trouble == Trouble(out_of_memory=True, ran_out=[[*range(64)]])


def test_an_item_that_is_too_large_by_itself_fails_alone() -> None:
    """An item that is too large by itself fails alone, and says nothing about how many of the
    others fit.
    """
    model = Small(100, 5)
    results, (trouble,) = call(model, 32)

    assert failed(results) == [5]
    assert len(model.calls) <= 1 + 2 * 6
    assert trouble == Trouble(out_of_memory=True)


def test_items_that_are_too_large_have_no_more_time_than_others() -> None:
    """The time for items that are too large by themselves is bounded as it is for any guilty items."""
    model = Small(100, 5)
    clock = VirtualClock()

    def predict(xs: list[int]) -> list[int]:
        clock.now += 0.1
        return model(xs)

    caller = Retrier(isolate_errors=True, clock=clock)
    for _ in range(300):
        call(predict, 32, caller)

    assert clock.now <= 0.1 * 300 * (1 + retry.RERUN_PER_S) + retry.MOST_RERUN_S


def test_when_nothing_fits_it_is_given_up_soon() -> None:
    """If memory is gone altogether the batch is given up soon, and every caller hears of it."""
    model = Small(0)
    results, (trouble,) = call(model, 64)

    assert failed(results) == list(range(64))
    assert len(model.calls) <= 9
    assert trouble.out_of_memory


def test_guilty_items_and_too_large_a_batch() -> None:
    """If a batch is too large and has guilty items, parts that fit are still halved for these."""
    small, poisoned = Small(12), Poisoned(20)

    def predict(xs: list[int]) -> list[int]:
        small(xs)
        return poisoned(xs)

    results, (trouble,) = call(predict, 64)
    assert failed(results) == [20]
    assert trouble.split
    assert [len(part) for part in trouble.ran_out] == [64, 32, 16]


def test_positions_are_those_in_the_batch() -> None:
    """Where the call is not for all of the batch, positions are still those in the batch."""
    _, (trouble,) = call(Small(2), 4, positions=[3, 5, 7, 9])
    assert trouble.ran_out == [[3, 5, 7, 9]]
    assert trouble.fitted == [[3, 5], [7, 9]]


def test_smaller_calls_are_padded_too() -> None:
    """Smaller calls are padded, too, so that the model never sees another size."""
    model = Small(4)
    results, _ = call(model, 7, pad=padding_to((1, 2, 4, 8), as_it_is))
    assert failed(results) == []
    assert model.calls == [8, 4, 4]


def test_nothing_means_out_of_memory_if_it_is_turned_off() -> None:
    """If `oom_errors` is turned off a MemoryError is as any other error."""
    model = Small(2)
    results, trouble = call(model, 4, Retrier(isolate_errors=False, oom_errors=None))
    assert failed(results) == [0, 1, 2, 3]
    assert trouble == []


class Tensor:
    """Something whose memory matters."""


def test_what_the_failed_call_held_is_let_go_before_the_next() -> None:
    """The variables of a failed call are let go before the next one, and so is a result that could
    not be read: tensors would fill the memory.
    """
    alive: list[weakref.ref[Tensor]] = []

    class Unreadable(UserList[int]):
        def __len__(self) -> int:
            raise MemoryError

    def predict(xs: list[int]) -> Any:
        assert all(ref() is None for ref in alive)
        tensor = Tensor()
        tensor.self = tensor  # type: ignore[attr-defined]
        alive.append(weakref.ref(tensor))
        if len(xs) == 4:
            raise MemoryError
        if len(xs) > 2:
            result = Unreadable()
            result.tensor = tensor  # type: ignore[attr-defined]
            return result
        del tensor.self  # type: ignore[attr-defined]
        return [10 * x for x in xs]

    gc.disable()
    try:
        results, _ = call(predict, 8)
    finally:
        gc.enable()
    assert failed(results) == []
    assert len(alive) == 2 + 4


@PROPERTY
@given(
    st.integers(1, 70),
    st.sets(st.integers(0, 69), max_size=6),
    st.sets(st.integers(0, 69), max_size=3),
    st.integers(1, 70),
)
def test_every_item_has_its_own_answer(n: int, guilty: set[int], giants: set[int], most: int) -> None:
    """Whatever fails, an innocent item is answered right or, where memory is gone altogether, with
    an error, and the number of calls is bounded.
    """
    small, poisoned = Small(most, *giants), Poisoned(*guilty)

    def predict(xs: list[int]) -> list[int]:
        small(xs)
        return poisoned(xs)

    results, _ = call(predict, n)
    wrong = failed(results)

    assert {i for i in guilty | giants if i < n} <= set(wrong)
    assert len(small.calls) <= 2 * n + 20
    if not giants:
        assert set(wrong) <= guilty


# -- what a batch returns


class Endless(Sequence[int]):
    """Says that it has three elements, and has no end."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: Any) -> Any:
        return i

    def __iter__(self) -> Any:
        return count()


class Huge(Sequence[int]):
    """A result that says it has very many items."""

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, i: Any) -> Any:
        return i


@pytest.mark.fault("F39")
@pytest.mark.parametrize(
    "returned",
    [
        *(None, 3, "abc", b"abc", {1: 2, 3: 4, 5: 6}, {1, 2, 3}, object(), ValueError("returned")),
        *(iter([1, 2, 3]), repeat(1), count(), Endless(), Huge()),
        *([], [1, 2], [1, 2, 3, 4], (1, 2), range(4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_sequence_of_as_many_results(returned: Any) -> None:
    """What is no sequence of as many results is one clear error at once, with both numbers or the
    kind; nothing is iterated that may have no end.
    """
    with pytest.raises(ModelError, match="a call with 3 items must return ") as caught:
        as_results(returned, 3)
    assert caught.value.code == "bad_result"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (OF_A_CALL, "a call with 3 items must return 3 results, but the model returned 0"),
        (OF_START, "start of 3 items must return 3 states, but the model returned 0"),
        (OF_RESUME, "resume of 3 items must return 3 states, but the model returned 0"),
        (OF_STEP, "step of 3 streams must return 3 parts, None for each that has made none, but the model returned 0"),
        (
            OF_A_YIELD,
            "a generator for 3 items must yield 3 parts, None for each that has made none, but the model returned 0",
        ),
    ],
)
def test_a_wrong_number_is_told_in_the_words_of_the_call(asked: Asked, text: str) -> None:
    """The error names the method, what it gets and what it must return; it can be copied and
    pickled as callers' errors are.
    """
    with pytest.raises(Miscount) as caught:
        as_results([], 3, asked)
    for error in (caught.value, copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert (str(error), error.code, error.n, error.is_doubted) == (text, "bad_result", 0, False)
    assert is_bad_result(caught.value)
    assert not is_bad_result(doubted(3, 5))


class Scalar:
    """What `squeeze` makes of a batch of one: an array, or a torch tensor, without axes."""

    ndim = 0

    def detach(self) -> Scalar:
        return self

    cpu = unbind = detach

    def tolist(self) -> float:
        return 1.0


@pytest.mark.parametrize("returned", [np.asarray(1.0), Scalar()])
def test_what_has_no_axes_is_no_result_of_one_item(returned: Any) -> None:
    """An array or a tensor without axes is one clear error, as any single value is."""
    with pytest.raises(ModelError, match="a single value") as caught:
        as_results(returned, 1)
    assert caught.value.code == "bad_result"


@pytest.mark.parametrize("returned", [[1, 2, 3], (1, 2, 3), range(1, 4), UserList([1, 2, 3])])
def test_any_sequence_of_as_many_results_will_do(returned: Any) -> None:
    """Results may be any sequence: a list, a tuple, a range, or one of the user's own."""
    assert list(as_results(returned, 3)) == [1, 2, 3]


# -- numbers of results that fit by chance


def top(k: int) -> Callable[[list[Any]], list[int]]:
    """A model that is written for one item, and returns so many results whatever it gets."""
    return lambda xs: list(range(k))


WAYS: dict[str, Callable[[Retrier, Callable[[list[Any]], Any], int], list[Any]]] = {
    "call": lambda retrier, function, n: run_now(retrier.call(function, list(range(n)), [])),
    "call_now": lambda retrier, function, n: retrier.call_now(function, list(range(n)), []),
    "padded": lambda retrier, function, n: run_now(
        retrier.call(function, list(range(n)), [], pad=padding_to((1, 2, 3, 4, 5), as_it_is))
    ),
}


def outcomes(way: str, retrier: Retrier, function: Callable[[list[Any]], Any], n: int) -> list[Any]:
    """The results of one call, with the texts of errors in their places."""
    results = WAYS[way](retrier, function, n)
    return [str(each.error) if type(each) is Failed else each for each in results]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("isolates", [True, False])
@pytest.mark.parametrize("k", [2, 3, 4, 5])
@pytest.mark.parametrize("seen", [1, 2, 3, 5])
def test_so_many_results_for_one_are_not_taken_for_those_of_as_many(
    seen: int, k: int, isolates: bool, way: str
) -> None:
    """Once a model has returned five results for another number of items, five items do not get one of them each,
    whether the batch may be run again or not.
    """
    if seen == k:
        return
    retrier = Retrier(isolate_errors=isolates)
    (text,) = set(outcomes(way, retrier, top(k), seen))
    assert f"but the model returned {k}: did you mean `[[…]" in text
    for _ in range(3):
        (text,) = set(outcomes(way, retrier, top(k), k))
        assert "result" in text
    assert retrier.odd_count == k


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_depends_on_the_first_item_is_doubted_too(way: str) -> None:
    """Whatever number of results was wrong, the next one that fits is not trusted."""
    retrier = Retrier(isolate_errors=True)

    def labels(xs: list[int]) -> list[int]:
        return [7] * next(counts)

    counts = iter([3, 4, 3, 1, 1, 1])
    assert "returned 3" in outcomes(way, retrier, labels, 1)[0]
    assert all("but the model returned" in str(each) for each in outcomes(way, retrier, labels, 4))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("isolates", [True, False])
def test_a_model_that_has_once_returned_too_few_is_trusted_again(isolates: bool, way: str) -> None:
    """One batch of several that fits in halves, too, shows that the model returns one result for each item; all are
    answered, and nothing is run again from then on.
    """
    retrier = Retrier(isolate_errors=isolates)
    sizes: list[int] = []

    def doubled(xs: list[int]) -> list[int]:
        sizes.append(len(xs))
        return [2 * x for x in xs if x != 4]

    assert all("returned 4" in str(each) for each in outcomes(way, retrier, doubled, 5))
    assert outcomes(way, retrier, doubled, 1) == [0]
    assert outcomes(way, retrier, doubled, 3) == [0, 2, 4]
    assert outcomes(way, retrier, doubled, 4) == [0, 2, 4, 6]
    assert sizes == ([5, 1, 3, 1, 2, 4] if isolates else [5, 1, 3, 4])


def test_a_guilty_item_of_a_doubted_batch_fails_alone() -> None:
    """While a number is doubted, items that raise are found as ever, and the others are answered."""
    retrier = Retrier(isolate_errors=True)
    assert "returned 9" in outcomes("call", retrier, top(9), 8)[0]
    results, _ = call(Poisoned(3), 8, retrier)
    assert failed(results) == [3]
    results, _ = call(Poisoned(), 8, retrier)
    assert failed(results) == []
    assert retrier.odd_count is None


def test_a_doubted_batch_that_nobody_waits_for_is_not_run_again() -> None:
    """Where there is no time to run a doubted batch in halves, it fails and says why."""
    retrier = Retrier(isolate_errors=True)
    outcomes("call", retrier, top(5), 1)
    results, _ = call(top(5), 5, retrier, until=retrier.clock())
    assert {str(error) for error in results} == {
        "the model has returned 5 results for another number of items, so that its 5 results for 5 items may not be"
        " one for each"
    }
    assert {error.code for error in results} == {"bad_result"}
