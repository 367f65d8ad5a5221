"""The queue against a list that is sorted anew for every question."""

from __future__ import annotations

from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.queue import AGEING_S, Queue
from carpool.engine.request import DONE, Lane, Request
from tests.support.pipelines import ask, expire
from tests.support.properties import PROPERTY


class NaiveQueue:
    """What a queue should do, as plainly as it can be written down."""

    def __init__(self) -> None:
        self.lanes: dict[Lane, list[Request]] = {}
        self.since: dict[Lane, float] = {}  # when each was last served or, before that, opened
        self.order: list[Lane] = []

    def push(self, request: Request) -> None:
        lane = self.open(request)
        lane.append(request)
        lane.sort(key=lambda r: r.deadline)

    def open(self, request: Request) -> list[Request]:
        if request.lane not in self.lanes:
            self.lanes[request.lane] = []
            self.since[request.lane] = request.arrived
            self.order.append(request.lane)
        self.order.sort(key=self.rank)
        return self.lanes[request.lane]

    def rank(self, lane: Lane) -> float:
        return self.since[lane] - lane.priority * AGEING_S

    def put_back(self, requests: list[Request]) -> None:
        for request in reversed(requests):
            lane = self.open(request)
            lane.append(request)
        for lane in self.lanes.values():
            lane.sort(key=lambda r: (r.deadline, r.arrived, r.id))

    def line(self) -> list[Request]:
        return [request for lane in self.order for request in self.lanes[lane]]

    def peek(self, n: int) -> list[Request]:
        line = self.line()
        return [r for r in line if r.lane[1:3] == line[0].lane[1:3]][:n]

    def remove(self, request: Request) -> None:
        self.lanes[request.lane].remove(request)
        if not self.lanes[request.lane]:
            del self.lanes[request.lane]
            self.order.remove(request.lane)

    def take(self, n: int, now: float) -> list[Request]:
        taken = self.peek(n)
        for request in taken:
            self.since[request.lane] = now
            self.remove(request)
        self.order.sort(key=self.rank)
        return taken

    def expire(self, now: float) -> list[Request]:
        expired = [r for r in self.line() if r.deadline <= now]
        for request in expired:
            self.remove(request)
        return expired


priorities = st.sampled_from([0, 0, 0, 1, -1])
keys = st.sampled_from([None, None, "A", "B"])
buckets = st.sampled_from([0, 0, 1])
deadlines = st.one_of(st.integers(0, 20).map(float), st.just(inf))
specs = st.tuples(priorities, keys, buckets, deadlines, st.integers(0, 5), st.integers(1, 3))
steps = st.one_of(
    st.tuples(st.just("push"), st.lists(specs, min_size=1, max_size=6)),
    st.tuples(st.just("take"), st.integers(1, 8)),
    st.tuples(st.just("remove"), st.integers(0, 1000)),
    st.tuples(st.just("expire"), st.integers(0, 3)),
    st.tuples(st.just("put back"), st.none()),
)


@PROPERTY
@given(st.lists(steps, max_size=40))
def test_the_queue_does_what_a_sorted_list_does(script: list[tuple[str, Any]]) -> None:
    """For any script of pushes, takes, removals, expiries and returns the queue gives the same
    answers, order and numbers as a list that is sorted each time.
    """
    queue, naive = Queue(), NaiveQueue()
    now, ids = 0.0, 0
    taken: list[Request] = []
    for step, argument in script:
        now += 1
        if step == "push":
            requests = []
            for priority, key, bucket, deadline, nbytes, size in argument:
                request = ask(now, now + deadline, priority=priority, key=key, bucket=bucket, arrived=now)
                ids += 1
                request.id, request.nbytes, request.size = ids, nbytes, size
                requests.append(request)
                naive.push(request)
            queue.push(requests)
        elif step == "take":
            peeked = queue.peek(argument)
            expected = naive.take(argument, now) if len(naive.line()) else []
            taken = queue.take(argument, now)
            assert peeked == taken == expected
        elif step == "remove" and naive.line():
            request = naive.line()[argument % len(naive.line())]
            naive.remove(request)
            queue.remove(request)
            assert request.state == DONE
        elif step == "expire":
            now += argument
            assert sorted(r.id for r in expire(queue, now)) == sorted(r.id for r in naive.expire(now))
        elif step == "put back":
            queue.put_back(taken)
            naive.put_back(taken)
            taken = []
        line = naive.line()
        assert list(queue) == line
        assert (len(queue), queue.count) == (len(line), len(line))
        assert queue.nbytes == sum(r.nbytes for r in line)
        assert queue.size == sum(r.size for r in line)
        assert queue.earliest_deadline == min([r.deadline for r in line], default=inf)
        assert queue.oldest_arrival == min([r.arrived for r in line], default=inf)
