"""The items of a bulk request, without sockets: a core, and turns of a loop that are numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.batch import Batch
from carpool.engine.drive.streams import StreamWindow
from carpool.engine.request import DONE, Lane, Request
from carpool.errors import ModelError
from carpool.http import bulk
from carpool.http.bulk import BulkItem, BulkItems
from carpool.http.exchange import HttpResponse
from tests.support.pipelines import pipeline_of, reply, stage
from tests.support.properties import PROPERTY

ERROR = b'{"error":{"code":"model_error","status":500}}'


class Responder:
    """Words each error in the same way."""

    def error(self, head: object, error: Exception) -> HttpResponse:
        return HttpResponse(500, b'{"error":{"code":"model_error"}}')


@dataclass
class World:
    """A bulk request, its client, and a driver that only does what it is told."""

    limit: int = 4
    max_size: float = inf
    batch_s: float = 1.0
    workers: int = 1
    now: float = 0.0
    written: bytes = b""
    is_ended: bool = False
    n_made: int = 0
    running: list[Batch] = field(default_factory=list)
    due: list[Callable[[], None]] = field(default_factory=list)
    timed: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.core = pipeline_of(stage(self.limit, max_size=self.max_size), workers=self.workers)
        self.core.crews[0].times.learn_usual(self.batch_s)
        exchange: Any = SimpleNamespace(
            head=None,
            stream=None,
            watch_silence=lambda: None,
            write_part=self.write,
            end_parts=self.end,
            want_more=lambda: None,
            hold=lambda nbytes: None,
            leave_body_unread=lambda: None,
        )
        endpoint = SimpleNamespace(weigher=None)
        ask: Any = SimpleNamespace(
            endpoint=endpoint, responder=Responder(), format=1, accept=1, timeout_s=inf, lane=Lane(-1, None, 0)
        )
        loop = SimpleNamespace(call_later=lambda after_s, what: self.timed.append(what))
        driver: Any = SimpleNamespace(
            core=self.core,
            loop=loop,
            clock=lambda: self.now,
            submit_all=lambda requests, alike: self.core.flow.submit(self.now, requests, alike),
            cancel=lambda request: self.core.cancel(self.now, request),
        )
        self.items = BulkItems(exchange, ask, driver, StreamWindow(8, 8), 1000, self.due.append)
        made = self.items._new_item

        def count() -> BulkItem:
            self.n_made += 1
            return made()

        self.items._new_item = count  # type: ignore[method-assign]

    def write(self, data: bytes) -> None:
        self.written += data

    def end(self, data: bytes) -> None:
        assert not data and not self.is_ended
        self.is_ended = True

    def turn(self) -> bool:
        """What is due in a turn of the loop: the driver's poll, then the flush.

        Returns:
            Whether there was a flush, which may have submitted items for the next poll.
        """
        todo = self.core.poll(self.now)
        self.running += todo.run
        for request in todo.answer:
            request.tell()
        due, self.due[:] = self.due[:], []
        for each in due:
            each()
        return bool(due)

    def answer(self, which: int, guilty: frozenset[int] = frozenset()) -> None:
        """Have a worker answer its batch, some of it with errors."""
        batch = self.running.pop(which % len(self.running))
        errors = {i: ModelError("no") for i, request in enumerate(batch.requests) if number(request) in guilty}
        self.now += self.batch_s
        reply(self.core, self.now, batch, compute=lambda line: b"<%b>" % line.strip(), errors=errors or None)

    def finish(self, guilty: frozenset[int] = frozenset()) -> None:
        """Answer all that is still inside."""
        for _ in range(10_000):
            was_due = self.turn()
            if self.running:
                self.answer(0, guilty)
            elif self.timed:
                self.timed.pop()()
            elif not was_due:
                return


def number(request: Request) -> int:
    """What a line says."""
    return int(request.item)  # type: ignore[call-overload,no-any-return]


def expected(body: bytes, guilty: frozenset[int] = frozenset()) -> bytes:
    """The answers to a body."""
    lines = [line.strip() for line in body.split(b"\n") if line.strip()]
    return b"".join(ERROR + b"\n" if int(line) in guilty else b"<%b>\n" % line for line in lines)


lines = st.lists(st.sampled_from([b"%d", b"%d", b"%d", b"%d", b"", b"  ", b" %d", b"%d\r"]), max_size=60).map(
    lambda forms: b"\n".join(form % i if b"%" in form else form for i, form in enumerate(forms))
)
moves = st.lists(st.tuples(st.sampled_from(["feed", "feed", "answer", "answer", "turn", "timer"]), st.integers(0, 40)))


@PROPERTY
@given(
    body=lines,
    moves=moves,
    guilty=st.frozensets(st.integers(0, 60), max_size=5),
    batch_s=st.sampled_from([1.0, 0.001]),
    workers=st.integers(1, 2),
    max_size=st.sampled_from([inf, 6, 20]),
)
def test_each_line_has_its_answer_in_its_place(
    body: bytes, moves: list[tuple[str, int]], guilty: frozenset[int], batch_s: float, workers: int, max_size: float
) -> None:
    """Items that are used again, and answers that wait for others, change no answer and no order."""
    world, at = World(batch_s=batch_s, workers=workers, max_size=max_size), 0
    for move, n in moves:
        if move == "feed":
            world.items.feed(body[at : at + n])
            at += n
        elif move == "answer" and world.running:
            world.answer(n, guilty)
        elif move == "turn":
            world.turn()
        elif move == "timer" and world.timed:
            world.timed.pop()()
    world.items.feed(body[at:])
    world.finish(guilty)
    world.items.end()
    world.finish(guilty)

    assert world.written == expected(body, guilty) and world.is_ended
    assert not world.items._spare and not world.items.inside  # which would refer to it in a circle
    assert (world.core.flow.answered, world.core.unanswered) == (len(expected(body).split(b"\n")) - 1, 0)


@PROPERTY
@given(body=lines, room=st.integers(1, 20))
def test_usual_lines_are_taken_like_unusual_ones(body: bytes, room: int) -> None:
    """Lines that are looked at together are those that would have been taken one by one."""
    taken = []
    for is_quick in (True, False):
        items = World().items
        items._lines = body.split(b"\n")
        items._window.limit = room
        take = items._take_lines if is_quick else items._take_unusual_lines
        taken.append([take() for _ in range(4)] + [items._lines[items._n_taken :]])

    assert taken[0] == taken[1]


def test_items_are_used_again() -> None:
    """However many lines come, no more requests are made than may be inside at a time."""
    world = World()
    for i in range(500):
        world.items.feed(b"%d\n" % i)
        world.finish()

    assert world.written == expected(b"\n".join(b"%d" % i for i in range(500)))
    assert world.n_made <= 8


def test_an_item_that_fails_has_not_the_answer_of_the_line_before() -> None:
    """The error of a line stands in its place, also where its request has had a good answer."""
    world = World()
    for line in (b"1\n", b"2\n"):
        world.items.feed(line)
        world.finish(frozenset({2}))

    assert world.written == b"<1>\n" + ERROR + b"\n" and world.n_made == 1


def test_an_answer_that_was_not_told_yet_keeps_its_item() -> None:
    """Who counts answers when they are told must find the request as it was answered."""
    world = World()
    world.items.feed(b"1\n2\n")
    world.turn()
    world.answer(0)
    world.items.flush_soon()
    world.due.pop()()  # before the poll that tells
    world.items.feed(b"3\n")

    assert [number(request) for request in world.core.poll(world.now).answer] == [1, 2]
    assert all(item.state != DONE for item in world.items.inside)


def test_a_line_that_has_cost_a_worker_leaves_no_trace() -> None:
    """The next line in the same request is no suspect."""
    world = World(limit=1)
    world.items.feed(b"1\n")
    world.turn()
    world.core.worker_lost(world.now, 0, world.running.pop().place)
    world.core.worker_ready(0, 0)
    world.finish()
    world.items.feed(b"2\n")

    (item,) = world.items.inside
    assert (item.losses, item.lane, world.n_made) == (0, Lane(-1, None, 0), 1)


@pytest.mark.parametrize(("batch_s", "flushes"), [(0.001, 1), (1.0, 4)])
def test_answers_of_quick_batches_are_written_together(batch_s: float, flushes: int) -> None:
    """While enough waits for the workers they wait for the next batch; but not where batches take long."""
    world = World(batch_s=batch_s)
    world.items.feed(b"".join(b"%d\n" % i for i in range(100)))
    seen = set()
    for _ in range(4):
        world.turn()
        world.answer(0)
        world.turn()
        seen.add(world.written)

    assert len(seen - {b""}) == flushes


def test_answers_do_not_wait_for_a_batch_that_does_not_come() -> None:
    """A timer has them written where the worker hangs with the next batch."""
    world = World(batch_s=0.001)
    world.items.feed(b"".join(b"%d\n" % i for i in range(100)))
    world.turn()
    world.answer(0)
    world.turn()
    assert world.written == b"" and len(world.timed) == 1
    world.timed.pop()()

    assert world.written == b"<0>\n<1>\n<2>\n<3>\n" and bulk._LONGEST_WAIT_S < 0.1


def test_answers_that_a_timer_has_written_are_told_in_vain() -> None:
    """A timer may write answers before their requests are told of them; then nothing is left to do."""
    world = World(batch_s=0.001, limit=4)
    world.items.feed(b"".join(b"%d\n" % i for i in range(50)))
    world.turn()
    while not world.timed:  # the answers of the first batch wait for those of the next one
        world.answer(0)
        world.turn()
    while world.running or world.core.waiting:
        world.answer(0)
        if world.core.waiting:
            world.turn()
    world.timed.pop()()
    world.turn()

    world.items.end()
    world.finish()
    assert world.written == b"".join(b"<%d>\n" % i for i in range(50))
    assert world.is_ended


def test_a_client_that_has_left_is_told_nothing() -> None:
    """What is answered in the turn in which the client leaves is told to nobody, and hurts nobody."""
    world = World()
    world.items.feed(b"1\n2\n")
    world.turn()
    world.answer(0)
    world.items.cancel()
    world.turn()
    assert not world.written
    assert not world.core.unanswered
