"""Requests by their lengths: what waits in a queue that knows lengths, and what is picked out of it."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.levels import BY_LENGTH, Levels, by_allowed_lengths, level_of
from carpool.engine.core.queue import Queue
from carpool.engine.request import QUEUED, Lane, Request
from tests.support.properties import PROPERTY


def request(length: int, arrived: float = 0.0, key: object = None, priority: int = 0) -> Request:
    """A request of this length."""
    made = Request(length, inf)
    made.length = length
    made.arrived = made.admitted = arrived
    made.lane = Lane(priority, key, 0)
    return made


def lengths_of(queue: Queue) -> list[list[int]]:
    """The lengths that wait by lane and level."""
    return [[r.length for _, of_level, _ in levels.rising() for r in of_level] for levels in queue.levels]


@given(st.integers(1, 2**53), st.integers(1, 2**53))
@PROPERTY
def test_levels_rise_with_lengths_and_are_narrow(a: int, b: int) -> None:
    """A longer item is never in a lower level, and two of one level differ by 9.1 % at most."""
    a, b = sorted([a, b])
    assert level_of(a) <= level_of(b)
    if level_of(a) == level_of(b):
        assert b <= 1.0906 * a


def test_allowed_lengths_are_the_levels() -> None:
    """Where a model pads to certain lengths, all that are padded to one of them are one level, and
    what is longer than the last belongs to it.
    """
    level = by_allowed_lengths([32, 64, 128]).level_of
    assert [level(length) for length in (1, 32, 33, 64, 65, 128, 500)] == [0, 0, 1, 1, 2, 2, 2]


def test_a_level_tells_its_longest_and_forgets_it_when_empty() -> None:
    """A level is as long as the longest request seen in it, and is forgotten with its last one."""
    levels = Levels(level_of)
    short, long = request(100), request(104)
    levels.add(short)
    levels.add(long)
    ((length, of_level, count),) = levels.rising()
    assert (length, list(of_level), count) == (104, [short, long], 2)
    levels.discard([short, long])
    assert not levels
    levels.add(short)
    assert levels.rising()[0][0] == 100


def test_a_queue_without_lengths_has_no_levels() -> None:
    """A queue that was not told how to tell levels keeps none."""
    queue = Queue()
    queue.push([request(3), request(5)])
    assert not queue.by_length and not queue.lengths_vary and not queue.levels


def test_lengths_vary_from_the_first_other_length_on() -> None:
    """Lengths vary once two requests have had different ones, also if both have gone."""
    queue = Queue(levels=BY_LENGTH)
    queue.push([request(7), request(7)])
    assert not queue.lengths_vary
    queue.take(2)
    queue.push([request(8)])
    assert queue.lengths_vary


def test_what_is_picked_leaves_no_trace() -> None:
    """Requests may be picked from anywhere in the queue; those left keep their order, and one that
    was picked and waits elsewhere does not count as waiting here.
    """
    queue, other = Queue(levels=BY_LENGTH), Queue()
    requests = [request(length) for length in (10, 200, 11, 300, 10)]
    queue.push(requests)
    assert queue.pick([requests[0], requests[2], requests[4]], 1.0) == [requests[0], requests[2], requests[4]]
    assert (len(queue), queue.size, list(queue)) == (2, 2, [requests[1], requests[3]])
    assert lengths_of(queue) == [[200, 300]]
    other.push([requests[0]])
    assert requests[0].state == QUEUED
    assert list(queue) == [requests[1], requests[3]] == queue.peek(5) == queue.take(5)


def test_only_keys_of_the_first_priority_may_come_next() -> None:
    """The next batch may come from each key of the priority that is at the head."""
    queue = Queue(levels=BY_LENGTH)
    queue.push(
        [request(5, key="a"), request(6, key="b"), request(7, key="a", priority=1), request(8, key="c", priority=1)]
    )
    assert lengths_of(queue) == [[7], [8]]


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "take", "pick", "remove", "back", "evict"]), st.integers(0, 10**6)),
        max_size=40,
    )
)
@PROPERTY
def test_levels_hold_what_waits(steps: list[tuple[str, int]]) -> None:
    """Whatever comes and goes, the levels of all lanes hold the requests that wait and no others."""
    queue = Queue(levels=BY_LENGTH)
    gone: list[Request] = []
    for step, (what, n) in enumerate(steps):
        waiting = list(queue)
        if what == "push":
            queue.push([request(1 + n % (1 + i * 37), step, key=n % 3) for i in range(1 + n % 5)])
        elif what == "take":
            gone += queue.take(1 + n % 4, step)
        elif what == "back" and gone:
            queue.put_back([gone.pop(n % len(gone))])
        elif waiting:
            one = waiting[n % len(waiting)]
            if what == "pick":
                gone += queue.pick([r for r in waiting if r.lane == one.lane][:: 1 + n % 3], step)
            elif what == "remove":
                queue.remove(one)
            elif len(waiting) > 1 and sum(r.lane == one.lane for r in waiting) > 1:
                queue.evict([r for r in waiting if r.lane == one.lane][-1])
        held = {r for levels in queue.levels for _, of_level, _ in levels.rising() for r in of_level}
        assert held == set(queue) and len(held) == len(queue) == queue.size
        for levels in queue.levels:
            rising = [length for length, _, _ in levels.rising()]
            assert rising == sorted(set(rising))


def test_a_request_longer_than_any_other_may_go() -> None:
    """Lengths are whole numbers up to 2**53."""
    queue = Queue(levels=BY_LENGTH)
    queue.push([request(1), request(2**53)])
    assert lengths_of(queue) == [[1, 2**53]]


def test_picked_lanes_age_as_those_that_are_taken_from() -> None:
    """A lane from which requests were picked goes behind another one of its priority."""
    queue = Queue(levels=BY_LENGTH)
    first = [request(5, key="a") for _ in range(2)]
    queue.push([*first, request(6, key="b")])
    queue.pick(first[:1], 1.0)
    assert [r.length for r in queue.peek(1)] == [6]
