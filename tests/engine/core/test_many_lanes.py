"""What a queue of very many lanes costs: nothing grows with their number."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import inf
from random import Random
from typing import NamedTuple

import pytest

from carpool.engine.core.levels import BY_KEY
from carpool.engine.core.queue import Queue, WithoutLanes
from carpool.engine.request import QUEUED, Lane, Request
from tests.effort import slow_where
from tests.support.opcodes import opcodes
from tests.support.pipelines import expire

PRIORITIES = 3


class Key(NamedTuple):
    """A key of which each comparison is code of Python, and so counted."""

    number: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.number == other.number

    def __hash__(self) -> int:
        return self.number


def _request(i: int, key: int, priority: int = 0) -> Request:
    request = Request(i, 1.0 + i, None, 1)
    request.lane, request.due = Lane(priority, Key(key), 0), 1.0 + i
    request.admitted = request.arrived = float(i)
    return request


def _filled(n: int) -> Queue:
    """Return a queue with `n` keys, each in a lane of each priority with one request."""
    queue = Queue(max_size=n * PRIORITIES, levels=BY_KEY)
    for i in range(n * PRIORITIES):
        queue.push([_request(i, i // PRIORITIES, i % PRIORITIES)])
    return queue


# -- until nothing waits


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
        expire(queue, float(now))


def _leave_all(queue: Queue) -> None:
    for request in list(queue):
        queue.remove(request)
        assert queue.earliest_due >= 1.0


def _pick_all(queue: Queue) -> None:
    while queue.count:
        queue.pick([next(iter(level)) for level in queue.levels[0].rising()[0][1:2]], 1e6)


@pytest.mark.parametrize("way", [_take_all, _expire_all, _leave_all, _pick_all])
def test_twice_as_many_keys_are_twice_the_work(way: Callable[[Queue], None]) -> None:
    """However requests leave, of several priorities, twice as many keys are twice the work."""
    few, many = _filled(100), _filled(200)
    small, large = opcodes(lambda: way(few)), opcodes(lambda: way(many))
    assert not few.count and not many.count
    assert large < 2.5 * small


# -- one request, while many wait


def _one_comes_and_goes(queue: Queue) -> None:
    request = _request(10**6, -1, 1)
    queue.push([request])
    queue.remove(request)


def _one_is_run_again(queue: Queue) -> None:
    queue.put_back(queue.take(1, 10.0))


def _ahead_of_one(queue: Queue) -> None:
    """Asks for newcomers with an own lane and in one that waits, while others come and go."""
    for priority in range(PRIORITIES):
        assert queue.ahead_of(_request(10**6, -1, priority), 1e6) <= queue.count
        assert queue.ahead_of(_request(10**6, 7, priority), 1e6) <= queue.count
    _one_is_run_again(queue)


def _makes_room(queue: Queue) -> None:
    """Asks who gives way: nobody where one request of each lane stays, else the last of the fullest."""
    assert not queue.in_the_way(_request(10**6, -1, 9), 1)
    more = _request(10**6, 7)
    queue.push([more])
    queue.max_size = queue.count
    assert queue.in_the_way(_request(10**6, -1, 9), 1)[:1] == [more]
    queue.evict(more)


def _with_held_keys(queue: Queue) -> None:
    held = {each.lane.key for each in queue.peek(1)} | {Key(3)}
    view = WithoutLanes(queue, queue.order.of_keys(held))
    assert len(view) == view.size == queue.count - 2 * PRIORITIES
    assert view.lanes == queue.lanes - 2 * PRIORITIES
    assert view.earliest_due > 0 and view.earliest_deadline > 0 and view.oldest_arrival > 0
    assert view.levels and view.peek(8)[0].lane.key not in held


@pytest.mark.parametrize(
    "way",
    [_one_comes_and_goes, _one_is_run_again, _ahead_of_one, _makes_room, _with_held_keys],
)
def test_a_request_costs_the_same_however_many_keys_wait(way: Callable[[Queue], None]) -> None:
    """What is done for one request while keys wait costs the same for eight times as many keys."""
    few, many = _filled(100), _filled(800)
    for queue in (few, many):
        for _ in range(3):
            way(queue)  # the first question about many lanes makes what answers the next ones
    small, large = opcodes(lambda: way(few)), opcodes(lambda: way(many))
    assert large < 1.7 * small  # a few more, as a tree and a heap become deeper


class Naive:
    """What a queue should answer about those that wait, as plainly as it can be written down."""

    def __init__(self, queue: Queue) -> None:
        self.lanes: dict[Lane, list[Request]] = {}
        for request in queue:
            self.lanes.setdefault(request.lane, []).append(request)
        self.ages_from = {each.lane: each.ages_from for each in queue.order}

    def rank(self, lane: Lane, now: float) -> float:
        return self.ages_from.get(lane, now) - lane.priority

    def ahead_of(self, request: Request, now: float) -> int:
        rank = self.rank(request.lane, now)
        ahead = [each for lane in self.lanes if self.rank(lane, now) <= rank for each in self.lanes[lane]]
        return len([each for each in ahead if each.lane != request.lane or each.due <= request.due])

    def in_the_way(self, request: Request, spared: int) -> list[Request]:
        lower = [lane for lane in self.lanes if lane.priority < request.lane.priority]
        lower.sort(key=lambda lane: (lane.priority, -len(self.lanes[lane])))
        return [each for lane in lower for each in reversed(self.lanes[lane][spared:])]


def _check_view(queue: Queue, waiting: list[Request], held: set[Key]) -> None:
    """Compare what is seen without some keys with the requests of the others."""
    view = WithoutLanes(queue, queue.order.of_keys(held))
    others = [each for each in queue if each.lane.key not in held]
    assert list(view) == others and len(view) == len(others)
    assert view.size == sum(each.size for each in others)
    assert view.lanes == len({each.lane for each in others}) or not waiting
    assert view.earliest_due == min((each.due for each in others), default=inf)
    assert view.earliest_deadline == min((each.deadline for each in others), default=inf)
    assert view.oldest_arrival == min((each.arrived for each in others), default=inf)
    assert view.peek(9) == [each for each in others if each.lane[1:3] == others[0].lane[1:3]][:9]


@slow_where(lambda seed: seed > 3)
@pytest.mark.parametrize("keys", [5, 60])
@pytest.mark.parametrize("seed", range(10))
def test_many_lanes_answer_as_their_requests_do(seed: int, keys: int) -> None:
    """With any number of lanes the earliest times, the number of those ahead, who makes room, and
    the view without some keys are those of the requests that wait.
    """
    random, queue, waiting = Random(seed), Queue(max_size=1, levels=BY_KEY), []
    for now in range(300):
        for _ in range(random.randrange(5)):
            request = _request(now, random.randrange(keys), random.randrange(PRIORITIES))
            request.arrived, request.size = float(now), random.choice([1, 1, 1, 4])
            request.deadline = now + random.uniform(1, 40)
            request.due = min(request.deadline, now + random.uniform(1, 30))
            queue.push([request])
            waiting.append(request)
        if random.random() < 0.3:
            taken = queue.take(random.randrange(1, 4), float(now))
            if taken and random.random() < 0.3:
                queue.put_back(taken)
        if random.random() < 0.1:
            late = {id(each) for each in waiting if each.state == QUEUED and each.deadline <= now}
            assert {id(each) for each in expire(queue, float(now))} == late
        waiting = [each for each in waiting if each.state == QUEUED]
        for _ in range(random.randrange(3)):
            if waiting:
                queue.remove(waiting.pop(random.randrange(len(waiting))))
        assert queue.count == len(waiting) == len(list(queue))
        assert queue.size == sum(each.size for each in waiting)
        assert queue.earliest_due == min((each.due for each in waiting), default=inf)
        assert queue.earliest_deadline == min((each.deadline for each in waiting), default=inf)
        assert queue.oldest_arrival == min((each.arrived for each in waiting), default=inf)
        naive = Naive(queue)
        new = _request(now, random.randrange(keys + 2), random.randrange(PRIORITIES + 1))
        new.due = now + random.uniform(0, 30)
        ahead, exact = queue.ahead_of(new, float(now)), naive.ahead_of(new, float(now))
        own = queue.order.of_keys([new.lane.key])
        assert exact - sum(each.dead for each in own) <= ahead <= exact
        in_the_way = naive.in_the_way(new, 1)
        queue.max_size = queue.count - len(in_the_way) + 1  # so that all of them have to go
        found = queue.in_the_way(new, 1)
        assert sorted(map(id, found)) == sorted(map(id, in_the_way))
        assert [each.lane.priority for each in found] == [each.lane.priority for each in in_the_way]
        _check_view(queue, waiting, {Key(random.randrange(keys)) for _ in range(random.randrange(1, 4))})
