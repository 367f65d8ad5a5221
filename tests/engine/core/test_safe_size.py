"""How much fits into memory: found in a few failures, kept, and tried again ever more rarely."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.levels import BY_LENGTH
from carpool.engine.core.queue import Queue
from carpool.engine.core.safe_size import SafeSize
from carpool.engine.policy import Adaptive, DoneBatch, Greedy, Policy
from tests.support.pipelines import ask, asks, pipeline_of, reply, stage
from tests.support.properties import PROPERTY


class Memory:
    """A model that a call of more than `most` is too much for; the worker halves it, as `call/retry.py` does."""

    def __init__(self, most: int, sizes: tuple[int, ...] | None = None) -> None:
        self.most = most
        self.safe = SafeSize(sizes)
        self.sizes = sizes or range(2**40)
        self.events = 0
        self.batches: list[int] = []

    def _padded(self, n: int) -> int:
        return next(size for size in self.sizes if size >= n)

    def batch(self, wanted: int) -> int:
        """The size that a batch has for which so much is waiting."""
        n = self.safe.allowed(wanted) if wanted > self.safe.limit else wanted
        self.batches.append(n)
        if self._padded(n) > self.most:
            self.events += 1
            tried, fitted = n, n // 2
            while self._padded(fitted) > self.most:
                tried, fitted = fitted, fitted // 2
            self.safe.ran_out(tried, fitted)
        elif n > self.safe.limit:
            self.safe.fitted(n)
        return n

    def run(self, times: int, wanted: int = 64) -> list[int]:
        return [self.batch(wanted) for _ in range(times)]


def test_nothing_is_limited_until_memory_runs_out() -> None:
    """As long as memory has not run out, no size is limited, whatever goes through."""
    memory = Memory(64)
    assert memory.run(100) == [64] * 100
    assert memory.safe.limit == inf


@pytest.mark.fault("F31")
@pytest.mark.parametrize("most", range(1, 64))
def test_what_fits_is_found_in_a_few_failures(most: int) -> None:
    """A few failures find the largest size that fits, exactly or so nearly that one more failure
    would gain less than an eighth; nothing larger goes for long.
    """
    memory = Memory(most)
    memory.run(100)
    assert memory.events <= 5
    assert memory.safe.limit <= most
    assert most - memory.safe.limit <= memory.safe.limit / 8

    assert set(memory.run(128)) == {memory.safe.limit}


def test_twelve_of_64() -> None:
    """Where twelve of 64 fit, the limit is safe from the first failure on, and exact after the
    third.
    """
    memory = Memory(12)
    assert memory.run(5) == [64, 8, 8, 8, 12]
    assert (memory.safe.limit, memory.events) == (12, 1)

    memory.run(30)
    assert (memory.safe.limit, memory.events) == (12, 3)
    assert set(memory.run(200)) == {12}


def test_each_retry_comes_after_twice_as_many_batches() -> None:
    """Each time that a larger size has failed again, the next try comes after twice as many
    batches.
    """
    memory = Memory(12)
    memory.run(10_000)
    retries = [i for i, n in enumerate(memory.batches) if n > 12 and i > 100]
    gaps = [b - a for a, b in pairwise(retries)]

    assert memory.events < 3 + 6
    assert len(gaps) >= 3
    assert all(b == 2 * a for a, b in pairwise(gaps))


def test_memory_that_is_given_back_is_found() -> None:
    """When memory is given back, the limit doubles step by step up to what is wanted."""
    memory = Memory(12)
    memory.run(100)
    memory.most = 64
    memory.run(600)

    assert memory.batches[-1] == 64
    assert memory.events == 3


def test_memory_that_becomes_shorter_is_noticed() -> None:
    """When a batch within the limit runs out of memory, the limit becomes smaller at once."""
    memory = Memory(40)
    memory.run(100)
    memory.most = 10
    found = memory.run(3)

    assert found[0] > 10
    assert found[1] == found[2] <= 10


def test_only_batches_that_would_be_larger_are_counted() -> None:
    """The way to the next try counts only batches that would be larger without the limit: with less
    waiting there is nothing to find out.
    """
    memory = Memory(12)
    memory.run(1)

    assert memory.run(1000, wanted=8) == [8] * 1000
    assert memory.events == 1


def test_a_smaller_demand_is_tried_as_it_is() -> None:
    """A try is no larger than what is wanted."""
    memory = Memory(40)
    memory.run(1)
    assert memory.safe.limit == 32
    assert memory.run(4, wanted=33)[-1] == 33


def test_a_failure_without_smaller_calls_halves() -> None:
    """A failure of a batch that may not be run again in smaller calls halves the limit, since it
    only tells that its size was too much.
    """
    safe = SafeSize()
    safe.ran_out(64, 0)
    assert safe.limit == 32
    safe.ran_out(32, 0)
    assert safe.limit == 16


def test_one_is_the_least() -> None:
    """The limit is never below one item, however short memory is: what does not fit alone fails
    alone.
    """
    safe = SafeSize()
    for _ in range(5):
        safe.ran_out(1, 0)
    assert safe.limit == 1
    assert safe.allowed(5) == 1


def test_allowed_sizes_are_the_only_steps() -> None:
    """With allowed sizes the limit is one of them, because batches in between are padded to the
    next.
    """
    memory = Memory(16, sizes=(1, 2, 4, 8, 16, 32, 64))
    memory.run(200)
    assert (memory.safe.limit, memory.events) == (16, 1)

    memory = Memory(17, sizes=(8, 16, 24, 32, 64))
    memory.run(200)
    assert (memory.safe.limit, memory.events) == (16, 2)


@PROPERTY
@given(st.integers(1, 200), st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=60))
def test_a_batch_is_never_more_than_is_wanted_and_the_limit_below_what_failed(
    most: int, batches: list[tuple[int, int]]
) -> None:
    """Whatever is asked for, and however memory changes, a batch is never more than is wanted, and
    the limit is below what has failed.
    """
    memory = Memory(most)
    for wanted, now in batches:
        memory.most = now
        before = memory.safe.limit
        n = memory.batch(wanted)
        assert 1 <= n <= wanted
        assert memory.safe.limit >= 1
        if n > now:
            assert memory.safe.limit < n
            if n <= before:  # else it was a probe, which says nothing of what fitted before
                assert memory.safe.limit <= now


# -- in the batcher


def out_of_memory(batcher: Batcher, worker: int, calls: list[list[int]], fitted: list[list[int]]) -> None:
    batcher.ran_out_of_memory(worker, batcher.in_flight[worker].id, calls, fitted)


def test_a_batch_is_held_to_the_limit_whatever_the_policy_says() -> None:
    """All workers of a stage share its limit, which holds whatever the policy says."""
    core = pipeline_of(stage(64), workers=2)
    core.flow.submit(0, asks(range(200)))
    first, second = core.poll(0).run
    assert (first.n, second.n) == (64, 64)
    out_of_memory(core.crews[0], first.place, [[*range(64)], [*range(32)]], [[*range(16)], [*range(16, 32)]])
    reply(core, 1, first)
    reply(core, 1, second)

    assert [batch.n for batch in core.poll(1).run] == [16, 16]


def test_the_limit_is_one_of_sizes() -> None:
    """Where requests have sizes, such as rows or tokens, the limit is one of sizes."""
    core = pipeline_of(stage(64))
    requests = asks(range(20))
    for request in requests:
        request.size = 10
    core.flow.submit(0, requests)
    (batch,) = core.poll(0).run
    assert (batch.n, batch.size) == (6, 60)
    out_of_memory(core.crews[0], 0, [[*range(6)]], [[0, 1, 2], [3, 4, 5]])
    reply(core, 1, batch)

    assert core.crews[0].safe_size.limit == 30
    (batch,) = core.poll(1).run
    assert (batch.n, batch.size) == (3, 30)


def test_a_batch_that_had_to_be_repeated_teaches_the_policy_nothing() -> None:
    """The policy learns nothing from a batch that was run in several calls, whose time is not that
    of one call.
    """
    heard: list[bool] = []

    class Listening(Greedy):
        def learn(self, now: float, done: DoneBatch) -> None:
            heard.append(done.ok)

    one = stage(policy=Listening(4))
    core = pipeline_of(one)
    core.flow.submit(0, asks(range(8)))
    (batch,) = core.poll(0).run
    out_of_memory(one, 0, [[0, 1, 2, 3]], [[0, 1], [2, 3]])
    reply(core, 1, batch)
    (batch,) = core.poll(1).run
    reply(core, 2, batch)

    assert heard == [False, True]


def test_what_was_too_much_is_tried_again_and_learned_from() -> None:
    """Now and then a batch over the limit is let out, and if it goes through the limit rises."""
    core = pipeline_of(stage(4))
    core.flow.submit(0, asks(range(1000)))
    (batch,) = core.poll(0).run
    out_of_memory(core.crews[0], 0, [[0, 1, 2, 3]], [[0, 1], [2, 3]])
    sizes = []
    for now in range(1, 10):
        reply(core, now, batch)
        (batch,) = core.poll(now).run
        sizes.append(batch.n)

    assert sizes[:4] == [2, 2, 2, 3]
    assert core.crews[0].safe_size.limit == 3


def test_one_batch_at_a_time_tries_whether_more_fits() -> None:
    """Only one batch at a time tries whether more fits; the others keep to the limit until its
    result is known.
    """
    core = pipeline_of(stage(4), workers=2)
    core.crews[0].safe_size.ran_out(4, 2)
    core.flow.submit(0, asks(range(1000)))
    first, second = core.poll(0).run
    sizes = []
    for now in range(1, 40):
        reply(core, now, second)
        (second,) = core.poll(now).run
        sizes.append(second.n)
        if second.n > 2:
            first, second = second, first

    assert sizes.count(3) == 1


def test_waits_are_predicted_with_what_fits() -> None:
    """Predicted waits count batches of the size that fits, or callers would be promised what cannot
    be held.
    """
    core = pipeline_of(stage(8))
    core.flow.submit(0, asks(range(8)))
    (batch,) = core.poll(0).run
    out_of_memory(core.crews[0], 0, [[*range(8)]], [[0, 1], [2, 3]])
    reply(core, 1, batch)
    core.flow.submit(1, asks(range(9)))
    core.poll(1)

    assert core.crews[0].predicted_wait_s(1, 8) == 4 + 1


@pytest.mark.parametrize("positions", [[[4]], [[-1]], [[0, 1], [2, 99]]])
def test_a_report_of_what_is_not_in_the_batch_is_refused(positions: list[list[int]]) -> None:
    """Nothing is learned from a report about more than the batch holds."""
    core = pipeline_of(stage(4))
    core.flow.submit(0, asks(range(4)))
    core.poll(0)
    batcher = core.crews[0]
    with pytest.raises(ValueError, match="4 items"):
        out_of_memory(batcher, 0, positions, [])
    with pytest.raises(ValueError, match="no batch"):
        batcher.ran_out_of_memory(0, 77, [[0, 1]], [])
    with pytest.raises(ValueError, match="no batch"):
        batcher.ran_out_of_memory(5, 1, [[0, 1]], [])

    assert batcher.safe_size.limit == inf


def test_an_item_that_is_larger_by_itself_still_goes_alone() -> None:
    """An item that is by itself larger than the limit still goes alone: the limit is for what is
    put together.
    """
    core = pipeline_of(stage(64))
    core.crews[0].safe_size.ran_out(20, 10)
    large = ask("large")
    large.size = 50
    core.flow.submit(0, [large, *asks(range(3))])
    (batch,) = core.poll(0).run

    assert (batch.n, batch.size) == (1, 50)


@pytest.mark.parametrize("policy", [Greedy(64), Adaptive(64)])
def test_padded_batches_fit_by_their_count_times_their_longest(policy: Policy) -> None:
    """Where a batch is padded, what fits into memory is its count times its longest length: after a
    few failures many short ones still go together, and no more long ones than fit.
    """
    memory = 1000
    batcher = Batcher("stage", policy, Queue(levels=BY_LENGTH))
    core = Core([batcher])
    core.worker_ready(0, 0)
    failures, later = 0, []
    for turn in range(150):
        requests = asks(range(80))
        for i, request in enumerate(requests):
            request.length = 100 if i % 5 == 0 else 5
        core.flow.submit(turn, requests)
        for batch in iter_batches(core, turn):
            padded = batch.n * batch.longest
            if padded > memory:
                failures += 1
                calls, fitted = in_halves([r.length for r in batch.requests], memory)
                out_of_memory(batcher, 0, calls, fitted)
            elif turn > 20:
                later.append((batch.longest, batch.n))
            reply(core, turn, batch)
    assert failures < 12
    assert max(n for longest, n in later if longest == 5) == 64
    assert max(n for longest, n in later if longest == 100) in (8, 9, 10)


def in_halves(lengths: list[int], memory: int) -> tuple[list[list[int]], list[list[int]]]:
    """The calls for a batch that run out of memory, and those that fit, by halves."""
    calls: list[list[int]] = []
    fitted: list[list[int]] = []
    left = [list(range(len(lengths)))]
    while left:
        call = left.pop()
        if len(call) * max(lengths[i] for i in call) <= memory:
            fitted.append(call)
        else:
            calls.append(call)
            left += [call[: len(call) // 2], call[len(call) // 2 :]]
    return calls, fitted


def iter_batches(core: Core, now: float) -> Iterator[Batch]:
    """Each batch in turn, until nothing waits."""
    while (todo := core.poll(now)).run:
        yield from todo.run
