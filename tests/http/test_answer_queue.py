"""Answers leave in the order of their requests, and only so many are in the app at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from carpool.http.answer_writer import AnswerQueue
from carpool.http.exchange import HttpResponse
from carpool.http.server_state import Limits
from tests.effort import examples
from tests.support.http.front import Front, get, post
from tests.support.http.jump import on_a_jumping_loop, run, turns

MOST = 3
RESPONSE = HttpResponse(200, b"")


@dataclass(eq=False)
class Owed:
    """A request that is owed an answer."""

    n: int
    response: HttpResponse | None = None


def queue_of(*requests: Owed) -> AnswerQueue:
    """A queue in which these requests wait."""
    queue: AnswerQueue = AnswerQueue(MOST)
    for request in requests:
        queue.add(request)
    return queue


def give_all(queue: AnswerQueue) -> list[Owed]:
    """Give the app all requests that it may have, and return them."""
    given = []
    while (request := queue.next_to_give()) is not None:
        queue.give()
        given.append(request)
    return given


def test_the_app_gets_only_so_many_at_a_time() -> None:
    """The others wait, and one more gets its turn with each answer that is taken out."""
    requests = [Owed(n) for n in range(5)]
    queue = queue_of(*requests)
    assert give_all(queue) == requests[:MOST]
    assert queue.next_to_give() is None
    requests[0].response = RESPONSE
    assert give_all(queue) == []
    assert queue.pop_answered() is requests[0]
    assert give_all(queue) == [requests[3]]


def test_an_answer_waits_for_those_before_it() -> None:
    """Answers leave in the order of their requests, whichever is there first."""
    requests = [Owed(n) for n in range(3)]
    queue = queue_of(*requests)
    give_all(queue)
    requests[2].response = requests[1].response = RESPONSE
    assert queue.pop_answered() is None
    requests[0].response = RESPONSE
    assert [queue.pop_answered() for _ in range(4)] == [*requests, None]
    assert len(queue) == 0


def test_a_refused_request_waits_for_its_turn() -> None:
    """It has its response from the start, but does not leave before its predecessors."""
    request = Owed(0, RESPONSE)
    queue = queue_of(request)
    assert queue.pop_answered() is None
    assert queue.next_to_give() is request
    queue.give()
    assert queue.pop_answered() is request


def test_asking_for_the_next_one_gives_nothing() -> None:
    """A request whose turn has not come for another reason stays the next one."""
    requests = [Owed(0), Owed(1)]
    queue = queue_of(*requests)
    assert queue.next_to_give() is queue.next_to_give() is requests[0]
    assert list(queue.waiting) == requests


@pytest.mark.parametrize("n", range(7))
def test_room_is_for_one_more_than_the_app_may_have(n: int) -> None:
    """So that one is ready when the app has answered, and reading stops while it is."""
    assert queue_of(*map(Owed, range(n))).room == MOST + 1 - n


def test_a_queue_that_is_cleared_returns_everything_that_is_owed() -> None:
    """Given and waiting, in order: those whose client has gone are to be cancelled."""
    requests = [Owed(n) for n in range(5)]
    queue = queue_of(*requests)
    give_all(queue)
    assert queue.clear() == requests
    assert (len(queue), queue.next_to_give(), queue.pop_answered()) == (0, None, None)


class AnyOrder(RuleBasedStateMachine):
    """Requests arrive, are given and answered in any order; a list of all of them is the model."""

    unanswered = Bundle("unanswered")

    def __init__(self) -> None:
        super().__init__()
        self.queue: AnswerQueue = AnswerQueue(MOST)
        self.owed: list[Owed] = []
        self.given = 0
        self.n = 0

    def _new(self) -> Owed:
        self.n += 1
        self.owed.append(Owed(self.n))
        return self.owed[-1]

    @rule()
    def arrive(self) -> None:
        self.queue.add(self._new())

    @rule()
    def arrive_refused(self) -> None:
        request = self._new()
        request.response = RESPONSE
        self.queue.add(request)

    @precondition(lambda self: not self.owed)
    @rule(target=unanswered)
    def arrive_at_an_empty_queue(self) -> Owed:
        request = self._new()
        self.queue.given.append(request)
        self.given = 1
        return request

    @precondition(lambda self: self.queue.next_to_give() is not None)
    @rule(target=unanswered)
    def give(self) -> Owed:
        request = self.queue.next_to_give()
        assert request is not None
        assert request is self.owed[self.given]
        self.queue.give()
        self.given += 1
        return request

    @rule(request=consumes(unanswered))
    def answer(self, request: Owed) -> None:
        request.response = RESPONSE

    @rule()
    def pop(self) -> None:
        is_ready = self.given > 0 and self.owed[0].response is not None
        assert self.queue.pop_answered() is (self.owed[0] if is_ready else None)
        if is_ready:
            del self.owed[0]
            self.given -= 1

    @invariant()
    def holds_what_is_owed(self) -> None:
        assert [*self.queue.given, *self.queue.waiting] == self.owed
        assert len(self.queue.given) == self.given <= MOST
        assert (self.queue.next_to_give() is None) == (self.given in (len(self.owed), MOST))
        assert self.queue.room == MOST + 1 - len(self.owed)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = examples(200)


# -- on a connection


@on_a_jumping_loop
async def test_a_request_behind_a_page_that_waits_for_its_turn() -> None:
    """Regression: it was given to the app twice and the page never, which failed the service."""
    front = Front()
    first, other = front.connect(), front.connect()
    first.send(get("/metrics"))
    await turns()
    first.send(post(b"0"))
    await turns()
    assert len(front.state.heads) == 2
    first.send(get("/metrics"))
    other.send(get("/metrics") + post(b"1") + get("/livez"))  # in one turn with a long page
    await turns()
    assert [a.status for a in other.answers()] == [200, 200, 200]
    assert other.answers()[1].body == b"<1>"
    assert front.worker.seen == [b"0", b"1"]
    assert not front.driver.has_failed


STREAM = st.lists(st.sampled_from([get("/metrics"), get("/livez"), post(b"1"), get("/nowhere")]), max_size=6)


@examples(150)
@given(streams=st.lists(STREAM, min_size=2, max_size=4), pipelined=st.integers(1, 3), warm=st.booleans())
@example(streams=[[get("/metrics")], [get("/metrics"), post(b"1")]], pipelined=2, warm=True)
def test_each_request_is_answered_once(streams: list[list[bytes]], pipelined: int, warm: bool) -> None:
    """Pages in turns, predictions and refusals, known heads or not: one answer per request."""

    async def main() -> None:
        front = Front(Limits(pipelined=pipelined))
        if warm:
            for request in (get("/metrics"), get("/livez"), post(b"0")):
                front.connect().send(request)
                await turns()
        wires = [front.connect() for _ in streams]
        for wire, stream in zip(wires, streams, strict=True):
            wire.send(b"".join(stream))
        await turns(100)
        statuses = [[404 if b"/nowhere" in request else 200 for request in stream] for stream in streams]
        assert [[a.status for a in wire.answers()] for wire in wires] == statuses
        assert not front.driver.has_failed

    run(main())
