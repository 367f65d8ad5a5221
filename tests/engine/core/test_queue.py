"""The queue: its order, its bounds, and that leaving it early is cheap and final."""

from __future__ import annotations

import weakref
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.lane_order import Suspect
from carpool.engine.core.queue import Queue
from carpool.engine.request import DONE, QUEUED, RUNNING, Lane, Request
from tests.support.pipelines import ask, asks, expire, items
from tests.support.properties import PROPERTY


def queue_of(*requests: Request) -> Queue:
    queue = Queue()
    queue.push(requests)
    return queue


def test_higher_priority_goes_first() -> None:
    """Of all that waits, the request with the larger priority goes first, whatever the order of
    arrival and the deadlines.
    """
    queue = queue_of(ask("low", 1, priority=-1), ask("normal", 2), ask("high", 3, priority=5), ask("normal 2", 9))

    assert items(queue.take(4)) == ["high", "normal", "normal 2", "low"]


def test_the_earliest_deadline_goes_first_within_a_priority() -> None:
    """Within a priority, requests are handed out from the earliest deadline to the latest, whatever
    order they came in.
    """
    queue = queue_of(*[ask(deadline, deadline) for deadline in (5, 9, 1, 7, 3, 8)])

    assert items(queue.take(6)) == [1, 3, 5, 7, 8, 9]


def test_equal_deadlines_go_in_order_of_arrival() -> None:
    """Requests of equal deadlines go in the order of their arrival, also where an earlier deadline
    was put in before them.
    """
    queue = queue_of(ask("a", 5), ask("b", 5), ask("early", 1), ask("c", 5), ask("late", 6), ask("d", 5))

    assert items(queue.take(6)) == ["early", "a", "b", "c", "d", "late"]


@pytest.mark.parametrize("n", range(8))
def test_peek_shows_what_take_hands_out(n: int) -> None:
    """`peek(n)` and `take(n)` name the same requests, also beyond cancelled ones; peeking changes nothing."""
    requests = [ask(i, deadline=10 - i, priority=i % 2) for i in range(7)]
    queue = queue_of(*requests)
    queue.remove(requests[4])
    queue.remove(requests[1])

    peeked = queue.peek(n)

    assert [r.state for r in peeked] == [QUEUED] * min(n, 5)
    assert queue.take(n) == peeked
    assert items(peeked) == [5, 3, 6, 2, 0][:n]
    assert [r.state for r in peeked] == [RUNNING] * min(n, 5)


def test_a_batch_spans_priorities_but_never_keys_or_buckets() -> None:
    """A batch takes requests of several priorities, but only those of the key and bucket of the
    first in line.
    """
    queue = queue_of(
        ask("a", key="A"),
        ask("b", key="B"),
        ask("a long", key="A", bucket=1),
        ask("urgent a", key="A", priority=1),
        ask("a 2", key="A"),
    )

    batches = [items(queue.take(9)) for _ in range(4)]

    assert batches == [["urgent a", "a", "a 2"], ["b"], ["a long"], []]


def test_an_emptied_lane_does_not_hide_another() -> None:
    """When a lane has been emptied, the next lane is the first in line."""
    queue = queue_of(ask("a", key="A", priority=3))
    queue.take(1)
    queue.push([ask("b", key="B")])

    assert items(queue.peek(1)) == ["b"]
    assert items(queue.take(1)) == ["b"]


# -- ageing


def flood(queue: Queue, now: float, priority: int, waiting: int = 8) -> None:
    """As many of this priority wait as before; they never get fewer."""
    missing = waiting - sum(request.lane.priority == priority for request in queue)
    queue.push([ask(f"p{priority}", priority=priority, arrived=now) for _ in range(missing)])


def takes_until(queue: Queue, wanted: Request, batch_s: int, floods: list[int], n: int = 4) -> float:
    """Seconds until `wanted` is taken, with a batch of `n` every `batch_s` and floods of some priorities."""
    now = wanted.arrived
    while wanted.state == QUEUED:
        for priority in floods:
            flood(queue, now, priority)
        queue.take(n, now)
        now += batch_s
        assert now < 1000, "it starves"
    return now - batch_s - wanted.arrived


@PROPERTY
@given(st.integers(-3, 3), st.integers(0, 4), st.integers(1, 5), st.integers(1, 12))
def test_no_crowd_of_high_priority_starves_a_low_one(low: int, levels: int, ageing_s: int, batch_s: int) -> None:
    """A request of low priority is passed over for at most `ageing_s` per level, and for the batch
    that is running then.
    """
    queue = Queue(ageing_s=ageing_s)
    flood(queue, 0, low + levels)
    queue.take(4, 0)
    request = ask("late", priority=low, arrived=1)
    queue.push([request])

    assert takes_until(queue, request, batch_s, [low + levels]) <= levels * ageing_s + 2 * batch_s


@PROPERTY
@given(st.integers(-3, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.integers(0, 50))
def test_no_crowd_of_low_priority_delays_a_high_one(
    low: int, levels: int, ageing_s: int, batch_s: int, before: int
) -> None:
    """However long requests of low priority have waited, a newcomer of higher priority goes next,
    or after one batch where batches are long.
    """
    queue = Queue(ageing_s=ageing_s)
    flood(queue, 0, low, waiting=50 + 4 * before)
    now = 0
    for _ in range(before):
        now += batch_s
        queue.take(4, now)
    now += batch_s
    request = ask("high", priority=low + levels, arrived=now)
    queue.push([request])
    waited_s = takes_until(queue, request, batch_s, [low])

    assert waited_s <= (0 if before and batch_s < levels * ageing_s else batch_s)


def test_lanes_of_one_priority_take_turns() -> None:
    """Lanes of one priority that cannot share a batch are served in turn: those of one key do not
    keep another one's out.
    """
    queue = Queue()
    served = []
    for now in range(6):
        queue.push([ask("a", key="A", arrived=now), ask("a", key="A", arrived=now)])
        queue.push([ask("b", key="B", arrived=now)])
        served += [request.item for request in queue.take(1, now + 1)]

    assert served == ["a", "b", "a", "b", "a", "b"]


def test_a_lane_that_was_empty_is_not_old() -> None:
    """The age of a lane is that of what waits in it, not of what was served long ago."""
    queue = Queue(ageing_s=1)
    queue.push([ask("low", priority=0, arrived=0)])
    queue.take(1, 0)
    queue.push([ask("low again", priority=0, arrived=100)])
    queue.push([ask("high", priority=1, arrived=100)])

    assert items(queue.take(1, 100)) == ["high"]


class Untouchable(Request):
    """A request that notices being looked at."""

    looked_at = 0

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared with another request")

    __hash__ = Request.__hash__

    @property
    def deadline(self) -> float:
        type(self).looked_at += 1
        return inf

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        pass


def test_leaving_looks_at_no_other_request() -> None:
    """A cancelled request is only marked, so leaving costs the same from a long queue as from a short one."""
    requests: list[Request] = [Untouchable(i, inf) for i in range(1000)]
    for request in requests:
        request.arrived = 0.0
    queue = queue_of(*requests)
    Untouchable.looked_at = 0

    for request in requests[250:750]:
        queue.remove(request)

    assert Untouchable.looked_at == 0
    assert items(queue.take(1000)) == [*range(250), *range(750, 1000)]


def test_who_has_left_is_never_handed_out() -> None:
    """Requests that were removed are shown neither by `take` nor by `peek` nor by iteration."""
    requests = asks(range(6))
    queue = queue_of(*requests)

    for request in requests[::2]:
        queue.remove(request)

    assert [r.state for r in requests[::2]] == [DONE] * 3
    assert items(list(queue)) == [1, 3, 5]
    assert items(queue.peek(6)) == [1, 3, 5]
    assert items(queue.take(6)) == [1, 3, 5]


def test_removing_what_is_not_queued_changes_nothing() -> None:
    """Removing a request that was never queued, is running or has left changes nothing."""
    requests = asks(range(4), nbytes=3)
    queue = queue_of(*requests)
    (running,) = queue.take(1)
    queue.remove(requests[1])

    for request in (running, requests[1], ask("stranger")):
        with pytest.raises(ValueError, match="is not queued"):
            queue.remove(request)

    assert (len(queue), queue.nbytes, queue.size) == (2, 6, 2)
    assert items(queue.take(4)) == [2, 3]


def test_expire_takes_out_those_whose_deadline_has_come() -> None:
    """`expire` takes out all requests whose deadline is now or earlier, and leaves later ones in
    every lane.
    """
    queue = queue_of(
        ask("a4", 4), ask("b5", 5, key="B"), ask("a6", 6), ask("high 5", 5, priority=1), ask("b4", 4, key="B")
    )

    expired = expire(queue, 5)

    assert sorted(items(expired)) == ["a4", "b4", "b5", "high 5"]
    assert {r.state for r in expired} == {DONE}
    assert items(list(queue)) == ["a6"]
    assert expire(queue, 5) == []


@pytest.mark.fault("F30")
def test_the_bounds_are_exact() -> None:
    """There is room for requests up to the bounds by count and by bytes, and not beyond."""
    queue = Queue(max_size=3, max_bytes=10)
    queue.push(asks("ab", nbytes=2))

    assert queue.has_room(6)
    assert not queue.has_room(7)
    assert not queue.has_room(2, requests=2)

    queue.push([ask("c", nbytes=6)])

    assert not queue.has_room(0)


@pytest.mark.fault("F30")
def test_counts_bytes_and_sizes_follow_every_change() -> None:
    """Count, bytes and sizes are those of what was pushed, less what was taken, removed and
    expired.
    """
    queue = Queue()
    requests = [ask(i, deadline=i, nbytes=10**i) for i in range(1, 6)]
    for i, request in enumerate(requests):
        request.size = i + 1
    queue.push(requests)
    seen = [(len(queue), queue.nbytes, queue.size)]
    queue.take(1)
    seen.append((len(queue), queue.nbytes, queue.size))
    queue.remove(requests[3])
    seen.append((len(queue), queue.nbytes, queue.size))
    expire(queue, 2)
    seen.append((len(queue), queue.nbytes, queue.size))
    queue.put_back([requests[0]])
    seen.append((len(queue), queue.nbytes, queue.size))

    assert seen == [(5, 111110, 15), (4, 111100, 14), (3, 101100, 10), (2, 101000, 8), (3, 101010, 9)]


def test_an_empty_queue_waits_for_nothing() -> None:
    """The earliest deadline and the oldest arrival of an empty queue are infinitely far away."""
    queue = queue_of(ask())
    queue.take(1)

    assert (queue.earliest_deadline, queue.oldest_arrival) == (inf, inf)


def test_the_earliest_deadline_and_the_oldest_arrival_are_exact() -> None:
    """`earliest_deadline` and `oldest_arrival` are exact over all lanes, whatever the order of
    deadlines, and do not count those that have left.
    """
    requests = [
        ask(deadline=20, arrived=1),
        ask(deadline=10, arrived=2),
        ask(deadline=15, arrived=3, key="B"),
        ask(deadline=12, arrived=4, priority=2),
    ]
    queue = queue_of(*requests)
    seen = []
    for request in (requests[1], requests[0], requests[3], requests[2]):
        seen.append((queue.earliest_deadline, queue.oldest_arrival))
        queue.remove(request)

    assert seen == [(10, 1), (12, 1), (12, 3), (15, 3)]


def test_requests_put_back_wait_where_they_waited_before() -> None:
    """Requests that are put back wait ahead of equals that arrived with them or later, behind
    earlier deadlines, and in their old order.
    """
    requests = [
        ask("a", 9, arrived=1),
        ask("b", 9, arrived=1),
        ask("c", 9, arrived=1),
        ask("d", 9, arrived=2),
    ]
    queue = queue_of(*requests)
    taken = queue.take(2)
    queue.push([ask("early", 5, arrived=3), ask("late", 9, arrived=3)])
    queue.put_back(taken)

    assert (len(queue), queue.oldest_arrival) == (6, 1)
    assert items(queue.take(6)) == ["early", "a", "b", "c", "d", "late"]


def test_a_request_put_back_is_the_oldest_again() -> None:
    """A request that is put back counts as the oldest arrival again, also where its deadline is not
    the first.
    """
    queue = queue_of(ask("old", 9, arrived=1))
    taken = queue.take(1)
    queue.push([ask("new", 5, arrived=2)])
    queue.put_back(taken)

    assert (queue.oldest_arrival, queue.earliest_deadline) == (1, 5)


def test_empty_lanes_are_forgotten() -> None:
    """Lanes that are empty are forgotten: clients choose priorities and keys, and a thousand
    different ones leave nothing behind.
    """
    queue = Queue()
    for i in range(1000):
        queue.push([ask(i, priority=i, key=i), ask(i, priority=-i, bucket=i)])
        queue.remove(queue.peek(1)[0]) if i % 2 else queue.take(1)
        queue.take(1)

    assert len(queue) == 0
    assert len(queue._lanes) == len(queue.order) == 1


class Item:
    """Something that tells whether it is still alive."""


def test_what_has_left_is_not_kept_alive() -> None:
    """A queue keeps at most as many requests alive after they have left as are waiting in it: a
    queue of large items must not hold a second one of served items.
    """
    queue = Queue()
    alive: weakref.WeakSet[Item] = weakref.WeakSet()
    for _ in range(100):
        item = Item()
        alive.add(item)
        queue.push([ask(item)])
    del item
    most_held = 0.0
    while len(queue):
        queue.take(1)
        if len(queue) > 1:
            queue.remove(list(queue)[len(queue) // 2])
        most_held = max(most_held, len(alive) - 2 * len(queue))

    assert most_held == 0
    assert len(alive) == 0


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(["pushed", "back", "cancelled"]))
    ),
    now=st.integers(0, 9),
)
def test_what_is_due_first_goes_first_and_what_has_expired_is_found(
    requests: list[tuple[int, int, str]], now: int
) -> None:
    """Requests go by their due times and expire by their deadlines, in whatever relation the two
    are to each other.
    """
    queue = Queue()
    made = []
    for due, deadline, fate in requests:
        request = ask(f"{due} {deadline}", deadline)
        request.due = min(due, deadline)
        made.append(request)
        queue.push([request])
        if fate == "back":
            queue.put_back(queue.take(1))
        elif fate == "cancelled":
            queue.remove(request) if request.state == QUEUED else None
    waiting = [request for request in made if request.state == QUEUED]

    assert queue.earliest_deadline == min((r.deadline for r in waiting), default=inf)
    assert queue.earliest_due == min((r.due for r in waiting), default=inf)
    assert set(expire(queue, now)) == {r for r in waiting if r.deadline <= now}
    left = [r for r in waiting if r.deadline > now]
    assert [r.due for r in queue.take(len(made))] == sorted(r.due for r in left)
    assert not queue.count


# -- making room for a higher priority


@pytest.mark.parametrize(
    ("priority", "nbytes", "gone"),
    [(0, 0, ""), (1, 0, "c"), (2, 0, "c"), (2, 1, "cb"), (2, 3, "cbfe"), (2, 4, ""), (1, 3, "")],
)
def test_who_makes_room(priority: int, nbytes: int, gone: str) -> None:
    """In the way of a new request are the last ones of the lowest priority, as few as will do, and
    never the next of a lane; nobody if all of them would not be enough. Asking removes nothing.
    """
    queue = Queue(max_size=7, max_bytes=12)
    left = ask("left early")
    queue.push([ask("a", nbytes=2), ask("b", nbytes=1), left, ask("c")])
    queue.push([ask(item, priority=1, nbytes=n) for item, n in (("d", 4), ("e", 1), ("f", 1))])
    queue.push([ask("x", priority=2, nbytes=3)])
    queue.remove(left)

    assert "".join(items(queue.in_the_way(ask("new", priority=priority, nbytes=nbytes), 1))) == gone
    assert "".join(items(list(queue))) == "xdefabc"


@pytest.mark.parametrize(("spared", "gone"), [(1, "edc"), (2, "ed"), (3, "e"), (4, ""), (9, "")])
def test_some_of_each_lane_are_spared(spared: int, gone: str) -> None:
    """The next requests of each lane never make room for others, whether some before or between
    them have left or not.
    """
    queue = Queue(max_bytes=3)
    requests = [ask(item, nbytes=item in "cde") for item in "axbycdez"]
    queue.push(requests)
    for request in requests:
        if request.item in "xyz":
            queue.remove(request)
    assert queue.take(1) == requests[:1]

    assert "".join(items(queue.in_the_way(ask("new", priority=1, nbytes=len(gone) or 1), spared))) == gone


def test_who_has_to_go_alone_stays() -> None:
    """A request that has to run alone, after a crash, never makes room for others."""
    queue = Queue(max_size=2)
    for item in "ab":
        request = ask(item)
        request.lane = Lane(0, Suspect(None), 0)
        queue.push([request])

    assert queue.in_the_way(ask("new", priority=1), 1) == []
