"""What a queue of very many lanes costs: nothing grows with their number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from math import inf
from random import Random
from types import FrameType

import pytest

from carpool.core.lane_queue import LaneQueue
from carpool.core.queue import Queue
from carpool.request import QUEUED, Lane, Request


def _filled(n: int) -> Queue:
    """Return a queue in which each of `n` requests has a key of its own."""
    queue = Queue()
    for i in range(n):
        request = Request(i, 1.0 + i, None, 1)
        request.lane, request.arrived, request.due = Lane(0, i, 0), float(i), 1.0 + i
        queue.push([request])
    return queue


def _take_all(queue: Queue) -> None:
    for now in count():
        if queue.earliest_due == inf:
            return
        assert queue.earliest_deadline < inf and queue.oldest_arrival < inf
        queue.peek(8)
        queue.take(8, float(now))


def _expire_all(queue: Queue) -> None:
    for now in count():
        if queue.earliest_deadline == inf:
            return
        queue.expire(float(now))


def _leave_all(queue: Queue) -> None:
    for request in list(queue):
        queue.remove(request)
        assert queue.earliest_due >= 1.0


def _looks(work: Callable[[], None], of: type[LaneQueue] = LaneQueue) -> int:
    """Return how many times code of a lane is called while `work` runs."""
    calls = 0
    names = {code.__code__ for code in vars(of).values() if hasattr(code, "__code__")}
    names |= {each.fget.__code__ for each in vars(of).values() if isinstance(each, property) and each.fget}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code in names

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("way", [_take_all, _expire_all, _leave_all])
def test_twice_as_many_keys_are_twice_the_work(way: Callable[[Queue], None]) -> None:
    """However requests leave, twice as many keys make a queue look at lanes twice as often."""
    few, many = _filled(400), _filled(800)
    small, large = _looks(lambda: way(few)), _looks(lambda: way(many))
    assert not few.count and not many.count
    assert large < 2.5 * small


@pytest.mark.parametrize("seed", range(20))
def test_many_lanes_have_the_times_of_their_requests(seed: int) -> None:
    """With any number of lanes the earliest times are those of the requests that wait."""
    random, queue, waiting = Random(seed), Queue(), []
    for now in range(300):
        for _ in range(random.randrange(4)):
            request = Request(now, now + random.uniform(1, 40), None, 1)
            request.lane, request.arrived = Lane(random.randrange(2), random.randrange(60), 0), float(now)
            request.due = min(request.deadline, now + random.uniform(1, 30))
            queue.push([request])
            waiting.append(request)
        if random.random() < 0.3:
            taken = queue.take(random.randrange(1, 4), float(now))
            if taken and random.random() < 0.3:
                queue.put_back(taken)
        if random.random() < 0.1:
            late = {id(each) for each in waiting if each.state == QUEUED and each.deadline <= now}
            assert {id(each) for each in queue.expire(float(now))} == late
        waiting = [each for each in waiting if each.state == QUEUED]
        if random.random() < 0.2 and waiting:
            queue.remove(waiting.pop(random.randrange(len(waiting))))
        assert queue.count == len(waiting)
        assert queue.earliest_due == min((each.due for each in waiting), default=inf)
        assert queue.earliest_deadline == min((each.deadline for each in waiting), default=inf)
        assert queue.oldest_arrival == min((each.arrived for each in waiting), default=inf)
