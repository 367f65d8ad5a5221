"""`@carpool.batch` over an `async def`: callers are tasks, and so are the batches."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import carpool
from tests.support import models
from tests.support.loops import cancel_unbegun, on_a_loop


class Gated:
    """An async batch function that waits inside until it is let go, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.gate = asyncio.Semaphore(0)

    async def __call__(self, xs: list[Any]) -> list[Any]:
        self.batches.append(xs)
        await self.gate.acquire()
        if "raise" in xs:
            raise LookupError("no such thing")
        return [(x, len(xs)) for x in xs]

    def let(self, n: int = 1) -> None:
        for _ in range(n):
            self.gate.release()


async def turns(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def test_arrivals_of_one_turn_share_a_batch() -> None:
    """Calls of one turn of the loop share a batch, and a lone call does not wait for company."""
    sizes = []

    @carpool.batch
    async def double(xs: list[int]) -> list[int]:
        sizes.append(len(xs))
        return [2 * x for x in xs]

    async def main() -> None:
        assert await asyncio.gather(*[double(x) for x in range(10)]) == [2 * x for x in range(10)]
        assert await double(7) == 14

    asyncio.run(main())

    assert sizes == [10, 1]
    assert double.__name__ == "double"


@on_a_loop
async def test_five_hundred_tasks_of_five_hundred_calls() -> None:
    """Of 500 tasks with 500 calls each all get the right answers, and there is no thread of ours."""

    @carpool.batch
    async def double(xs: list[int]) -> list[int]:
        return [2 * x for x in xs]

    async def caller(k: int) -> int:
        return sum([await double(i) == 2 * i for i in range(k * 500, k * 500 + 500)])

    before = threading.active_count()
    assert await asyncio.gather(*[caller(k) for k in range(500)]) == [500] * 500
    assert threading.active_count() == before


@on_a_loop
async def test_several_batches_in_flight() -> None:
    """As many batches run at a time as `max_in_flight_batches` says, and the next line forms
    meanwhile.
    """
    function = Gated()
    f = carpool.batch(max_batch_size=2, max_in_flight_batches=2)(function)
    calls = [asyncio.ensure_future(f(x)) for x in range(6)]
    await turns()
    assert function.batches == [[0, 1], [2, 3]]
    function.let(3)
    assert await asyncio.gather(*calls) == [(x, 2) for x in range(6)]


@on_a_loop
async def test_cancelling_one_never_touches_another() -> None:
    """A call that is cancelled while it waits is taken out; while it runs only its answer is
    dropped, and no other call notices.
    """
    function = Gated()
    f = carpool.batch(function)
    first = [asyncio.ensure_future(f(x)) for x in range(3)]
    await turns()
    behind = [asyncio.ensure_future(f(x)) for x in range(3, 6)]
    await turns()
    first[0].cancel()
    behind[1].cancel()
    function.let(2)
    answers = await asyncio.gather(*first, *behind, return_exceptions=True)
    assert [type(answer) for answer in answers].count(asyncio.CancelledError) == 2
    assert [answers[i] for i in (1, 2, 3, 5)] == [(1, 3), (2, 3), (3, 2), (5, 2)]
    assert function.batches == [[0, 1, 2], [3, 5]]


@on_a_loop
async def test_an_exception_reaches_every_caller_of_the_batch() -> None:
    """An exception of a function that may not be called again reaches every caller of its batch,
    and nobody of the next one.
    """
    function = Gated()
    function.let(9)
    f = carpool.batch(max_batch_size=3, idempotent=False)(function)
    calls = [f(x) for x in (1, "raise", 2, 3)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers[:3]] == [LookupError] * 3
    assert len(set(map(id, answers[:3]))) == 3
    assert answers[3] == (3, 1)


@on_a_loop
async def test_a_time_out() -> None:
    """A caller hears at its deadline, and the loop is not held up by its call."""
    function = Gated()
    f = carpool.batch(timeout_s=0.02)(function)
    with pytest.raises(carpool.DeadlineExceeded):
        await f(1)
    function.let(2)
    await turns(20)
    f._timeout_s = None  # type: ignore[attr-defined]
    assert await f(2) == (2, 1)


@on_a_loop
async def test_many_items_of_one_caller() -> None:
    """The answers to many items of one caller are in order, whatever the batches; if one fails its
    error is raised.
    """
    function = Gated()
    function.let(99)
    f = carpool.batch(max_batch_size=4)(function)
    assert [x for x, _ in await f.many(range(10))] == list(range(10))
    with pytest.raises(LookupError):
        await f.many([1, "raise"])
    assert await f.many([]) == []


@on_a_loop
async def test_a_call_from_inside_is_an_error_at_once() -> None:
    """A call of a function from inside itself would wait for the batch that makes it, and is an
    error at once; a call of another function is none.
    """

    @carpool.batch
    async def other(xs: list[int]) -> list[int]:
        return [x + 1 for x in xs]

    @carpool.batch
    async def again(xs: list[int]) -> list[int]:
        return [await again(await other(x)) for x in xs]

    with pytest.raises(RuntimeError, match="again was called from inside itself"):
        await again(1)
    assert await other(1) == 2


def test_each_loop_has_a_line_of_its_own() -> None:
    """Each loop has a line of its own, whether two run in two threads or one after the other."""
    sizes: list[int] = []

    @carpool.batch
    async def double(xs: list[int]) -> list[int]:
        sizes.append(len(xs))
        return [2 * x for x in xs]

    async def main() -> list[int]:
        return list(await asyncio.gather(*[double(x) for x in range(50)]))

    answers: list[list[int]] = []
    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(main()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.append(asyncio.run(main()))

    assert answers == [[2 * x for x in range(50)]] * 5
    assert sizes == [50] * 5
    assert len(double._drivers.by_loop) <= 4  # the last call has let go of the loops that are gone


def test_callers_whose_loop_is_gone_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """When a loop has gone its callers can never be answered; the next loop says in the log how
    many they were.
    """

    async def never(xs: list[int]) -> list[int]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    f = carpool.batch(never)
    loop = asyncio.new_event_loop()
    left = [loop.create_task(f(x)) for x in range(3)]
    loop.run_until_complete(turns())
    loop.close()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(f(1), 0.01)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())

    assert "3 calls of never were never answered: their event loop is closed" in caplog.text
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    del left
    gc.collect()


def test_callers_contexts_do_not_leak_into_the_batch() -> None:
    """A batch belongs to many callers, so it runs in the context of none of them."""
    user = contextvars.ContextVar("user", default="nobody")

    @carpool.batch
    async def who(xs: list[int]) -> list[str]:
        return [user.get() for _ in xs]

    async def main() -> str:
        user.set("ann")
        return await who(1)

    assert asyncio.run(main()) == "nobody"


@on_a_loop
async def test_a_shared_lock_lets_one_function_run_at_a_time() -> None:
    """Two functions that share an asyncio.Lock never run at the same time."""
    lock = asyncio.Lock()
    inside = 0

    async def alone(xs: list[int]) -> list[int]:
        nonlocal inside
        inside += 1
        await turns()
        assert inside == 1
        inside -= 1
        return xs

    f = carpool.batch(execution_lock=lock)(alone)
    g = carpool.batch(execution_lock=lock)(alone)
    assert await asyncio.gather(*[(f, g)[x % 2](x) for x in range(20)]) == list(range(20))


class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.sizes: list[int] = []

    @carpool.batch(max_batch_size=8)
    async def scale(self, xs: list[int]) -> list[int]:
        self.sizes.append(len(xs))
        return [self.factor * x for x in xs]


@on_a_loop
async def test_a_method_has_a_line_for_each_instance() -> None:
    """A batched method has a line for each instance, so that instances never share a batch."""
    two, three = Scaled(2), Scaled(3)
    answers = await asyncio.gather(*[(two, three)[x % 2].scale(x) for x in range(8)])
    assert answers == [(2, 3)[x % 2] * x for x in range(8)]
    assert two.sizes == three.sizes == [4]


def test_the_line_of_a_method_dies_with_its_instance() -> None:
    """The line of a batched method dies with its instance, which nothing keeps alive, not even the
    line that its calls have opened.
    """

    async def main() -> None:
        scaled = Scaled(2)
        assert await scaled.scale(1) == 2
        gone = weakref.ref(scaled)
        del scaled
        gc.collect()
        assert gone() is None

    asyncio.run(main())
    assert Scaled.scale._bound == {}


class Polite(carpool.Model):
    async def preprocess(self, name: str) -> str:
        return name.strip()

    async def predict(self, names: list[str]) -> list[str]:  # type: ignore[override]
        await asyncio.sleep(0)
        return [f"hello {name}" for name in names]


@on_a_loop
async def test_a_model_with_async_hooks() -> None:
    """A model with `async` hooks can be given as a class or as an instance."""
    f: Any = carpool.batch(Polite)
    assert await f(" Ann ") == "hello Ann"


def test_merged_arrays() -> None:
    """A caller with more rows than a batch holds is split, and all callers get their own rows."""
    rows = []

    @carpool.batch(merge=True, max_batch_size=8)
    async def halve(xs: np.ndarray) -> np.ndarray:
        rows.append(len(xs))
        return xs / 2

    async def main() -> None:
        chunks = [np.arange(float(n)) for n in (3, 20, 1, 5)]
        answers = await asyncio.gather(*[halve(chunk) for chunk in chunks])
        for answer, chunk in zip(answers, chunks, strict=True):
            assert np.array_equal(answer, chunk / 2)

    asyncio.run(main())

    assert max(rows) <= 8
    assert sum(rows) == 29


@on_a_loop
async def test_items_may_count_for_more_than_one() -> None:
    """`size` says how much of a batch an item takes up."""
    function = Gated()
    function.let(9)
    f = carpool.batch(max_batch_size=10, size=len)(function)
    await asyncio.gather(*[f("x" * n) for n in (4, 4, 4, 25, 1)])
    assert [[len(x) for x in batch] for batch in function.batches] == [[4, 4], [4], [25], [1]]


@on_a_loop
async def test_an_item_of_no_size_counts_for_one() -> None:
    """An item of size 0 counts for one: else a line of such items would look empty, and they would
    wait for ever.
    """
    function = Gated()
    function.let(9)
    f = carpool.batch(size=len)(function)
    assert await asyncio.wait_for(f(""), 10) == ("", 1)


@on_a_loop
async def test_a_function_that_is_cancelled_fails_its_batch() -> None:
    """If the function is cancelled, the callers of its batch hear of it instead of waiting for
    ever.
    """

    @carpool.batch
    async def gives_up(xs: list[int]) -> list[int]:
        raise asyncio.CancelledError

    with pytest.raises(carpool.ModelError, match="the batch was broken off: CancelledError"):
        await gives_up(1)


@on_a_loop
async def test_a_batch_that_is_cancelled_before_it_begins_fails() -> None:
    """If all tasks of a loop are cancelled, as at its end, a batch whose task has not begun answers
    its callers, and does not keep its place.
    """

    @carpool.batch
    async def same(xs: list[int]) -> list[int]:
        return xs

    calls = [asyncio.ensure_future(same(1)), asyncio.ensure_future(same(2))]
    await cancel_unbegun("TaskPool._answer")
    told = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert [type(error) for error in told] == [carpool.ModelError] * 2
    assert await asyncio.wait_for(same(3), 10) == 3


@on_a_loop
async def test_a_setup_that_is_cancelled_before_it_begins_is_begun_anew() -> None:
    """If the task of a model's `setup` is cancelled before its first step, its batch fails, and the
    next one sets the model up.
    """

    class Model(carpool.Model):
        async def setup(self) -> None:  # type: ignore[override]
            self.ready = True

        async def predict(self, xs: list[int]) -> list[bool]:  # type: ignore[override]
            return [self.ready] * len(xs)

    f: Any = carpool.batch(Model)
    call = asyncio.ensure_future(f(1))
    await cancel_unbegun("_failure_of")
    with pytest.raises(carpool.ModelError, match="the batch was broken off"):
        await asyncio.wait_for(call, 10)
    assert await asyncio.wait_for(f(2), 10) is True


class Connected(carpool.Model):
    """Has to wait for its own set-up, which fails at first."""

    attempts = 0
    ready = False

    async def setup(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        Connected.attempts += 1
        if Connected.attempts == 1:
            raise ConnectionError("not yet")
        self.ready = True

    async def predict(self, xs: list[int]) -> list[int]:  # type: ignore[override]
        assert self.ready
        return xs


@on_a_loop
async def test_an_async_setup_is_awaited_before_the_first_batch() -> None:
    """An `async` setup is awaited before the first batch; its failure reaches the callers of that
    batch, the next one tries again, and then it is done once and for all.
    """
    f: Any = carpool.batch(max_batch_size=2, max_in_flight_batches=2)(Connected)
    answers = await asyncio.gather(f(1), f(2), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["not yet", "not yet"]
    assert await asyncio.gather(*[f(x) for x in range(6)]) == list(range(6))
    assert Connected.attempts == 2


@pytest.mark.fault("F52")
def test_close_waits_for_the_calls_inside_and_tears_down() -> None:
    """`close` waits until all earlier callers have their answers, also those of methods, and tears
    the model down; later callers are told, in other loops too.
    """
    torn_down: list[str] = []

    class Slow(carpool.Model):
        async def setup(self) -> None:  # type: ignore[override]
            self.gate = asyncio.Event()

        async def predict(self, xs: list[int]) -> list[int]:  # type: ignore[override]
            await asyncio.sleep(0.01)
            return xs

        async def teardown(self) -> None:  # type: ignore[override]
            torn_down.append("Slow")

    f: Any = carpool.batch(max_batch_size=2)(Slow)

    async def call_later() -> None:
        with pytest.raises(carpool.Unavailable, match="Slow is closed"):
            await f(9)

    async def main() -> None:
        calls = [asyncio.ensure_future(f(x)) for x in range(5)]
        await asyncio.sleep(0)
        await f.close()
        assert [call.result() for call in calls] == list(range(5))
        assert torn_down == ["Slow"]
        await call_later()
        await f.close()

    asyncio.run(main())
    asyncio.run(call_later())
    assert torn_down == ["Slow"]


@on_a_loop
async def test_closing_a_function_that_nobody_called() -> None:
    """Closing a function that nobody has called waits for nothing and tears nothing down."""

    @carpool.batch
    async def same(xs: list[int]) -> list[int]:
        return xs

    await same.close()
    with pytest.raises(carpool.Unavailable, match="same is closed"):
        await same(1)


@on_a_loop
async def test_slo_s_is_what_a_policy_may_plan_for() -> None:
    """Without `slo_s` calls are never due for a policy; a call that the policy refuses raises
    `Overloaded`.
    """

    async def same(xs: list[int]) -> list[int]:
        return xs

    policy = models.RefusesWhatIsDue(4)
    assert await carpool.batch(policy=policy)(same)(1) == 1
    with pytest.raises(carpool.Overloaded, match="would not be answered within"):
        await carpool.batch(policy=policy, slo_s=60.0)(same)(1)


class Closing(carpool.Model):
    def predict(self, xs: list[int]) -> list[int]:
        return xs

    def close(self) -> None:
        raise AssertionError("this is the model's own")


def test_a_models_attributes_do_not_replace_ours() -> None:
    """Attributes of a model whose names are those of ours, such as `close`, do not replace ours."""
    f = carpool.batch(Closing)
    assert f(1) == 1
    f.close()
    with pytest.raises(carpool.Unavailable):
        f(2)


def test_a_loop_that_ends_before_a_close_has_begun_says_nothing() -> None:
    """If a loop ends before a close has begun, no coroutine is left that Python would complain of."""

    @carpool.batch
    async def call(xs: list[int]) -> list[int]:
        return xs

    async def begin_to_close() -> None:
        await call(1)
        closing = asyncio.ensure_future(call.close())
        await asyncio.sleep(0)
        assert not closing.done()
        raise SystemExit  # at once, where a return would let the loop take one turn more

    with pytest.raises(SystemExit):
        asyncio.run(begin_to_close())
    gc.collect()
