"""What is sent ahead to a worker on a network: nothing large until it answers, as a busy worker does not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from carpool import Service, Stage
from carpool.engine.core.batch import Batch
from carpool.engine.core.core import Core
from carpool.engine.core.roster import Roster, Starts
from carpool.engine.drive import worker_pool
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.framesocket import FrameSocket
from carpool.engine.drive.pools import BatchPool
from carpool.engine.observe.stats import Stats
from carpool.engine.request import DONE, Request
from carpool.engine.wire.frame import Frame, FrameError, FrameKind, encode
from carpool.engine.wire.payload import LARGE
from carpool.service import assemble
from tests.support import models


class Recorder:
    """A worker that keeps what it is sent, and is told what to say."""

    pid = None
    hello = None
    where = ""
    broke_protocol = fell_silent = has_unread_batch = False
    largest = 2**30

    def __init__(self, launch: Any, place: int, heard: Callable[[Frame], None], lost: Any, sink: Any) -> None:
        self.heard = heard
        self.lost = lost
        self.sent: list[int] = []
        self.sent_ahead: list[int] = []

    def send(self, frame: Frame) -> None:
        self._send(frame, self.sent)

    def send_ahead(self, frame: Frame) -> None:
        self._send(frame, self.sent_ahead)

    def _send(self, frame: Frame, sent: list[int]) -> None:
        if sum(map(len, frame.payloads)) > self.largest:  # type: ignore[arg-type]
            raise FrameError("it is too large")
        sent.append(frame.batch_id)

    def reply(self, batch_id: int, ids: list[int]) -> None:
        self.heard(Frame(FrameKind.REPLY, batch_id, ids, bytes(len(ids)), payloads=[b"x"] * len(ids)))


def ready(worker: Recorder) -> None:
    for name in (b"loading", b"ready"):
        worker.heard(Frame(FrameKind.STATE, 0, [0], b"\0", payloads=[name]))


def pool(idempotent: bool = True) -> tuple[BatchPool, Driver, Recorder]:
    """A stage of one worker, which is ready."""
    service = Service(Stage(models.scale, max_batch_size=1, policy="greedy", idempotent=idempotent))
    core = Core([assemble._crew(service, service.stages[0], None)])
    roster = Roster(1, lambda: 0.0)
    driver = Driver(core, Stats("ahead", core, [roster], [False]), clock=lambda: 0.0)
    launch = assemble.launch(service, 0, None, 1)
    made = BatchPool(0, launch, driver, roster, Starts([roster], 1), lambda *line: None)
    driver.executors = [made]
    made.start()
    worker: Any = made._workers[0]
    ready(worker)
    return made, driver, worker


def asked(driver: Driver, nbytes: int) -> Request:
    request = Request(b"x" * nbytes, float("inf"), nbytes=nbytes)
    driver.submit(request)
    driver.poll()
    return request


def ahead(made: BatchPool, driver: Driver) -> Batch:
    """Send the request that waits ahead, whatever the batcher thinks of it."""
    batcher = driver.core.batchers[0]
    batch = batcher._make(0.0, 1, "full", 0, ahead=True)
    batcher.ahead.setdefault(0, []).append(batch)
    batcher._n_ahead += 1
    made.run(batch)
    return batch


@pytest.mark.parametrize(
    ("nbytes", "takes_large", "sent", "sent_ahead"),
    [(LARGE, False, [1], [2]), (LARGE, True, [1, 2], []), (9, False, [1, 2], [])],
)
def test_a_large_batch_goes_ahead_only_where_it_harms_nobody(
    nbytes: int, takes_large: bool, sent: list[int], sent_ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on a network is told which large batch finds it busy, and sees to it when that goes."""
    monkeypatch.setitem(worker_pool._KINDS, "process", Recorder)
    if takes_large:
        monkeypatch.setattr(Recorder, "send_ahead", None)

    async def test() -> None:
        made, driver, worker = pool()
        first, second = asked(driver, 9), asked(driver, nbytes)
        batch = ahead(made, driver)
        assert (worker.sent, worker.sent_ahead) == (sent, sent_ahead)
        worker.reply(1, [first.id])
        worker.reply(2, batch.ids)
        assert (worker.sent, worker.sent_ahead) == (sent, sent_ahead)
        assert first.state == second.state == DONE

    asyncio.run(test())


def test_of_large_batches_ahead_each_is_handed_over_when_it_is_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reads one batch when it answers, so the one behind that would close its window."""
    monkeypatch.setitem(worker_pool._KINDS, "process", Recorder)

    async def test() -> None:
        made, driver, worker = pool()
        requests = [asked(driver, 9), *[asked(driver, LARGE) for _ in range(3)]]
        batches = [driver.core.batchers[0].in_flight[0], *[ahead(made, driver) for _ in range(3)]]
        for number, batch in enumerate(batches, 1):
            assert (worker.sent, worker.sent_ahead) == ([1], [2, 3, 4][:number])
            worker.reply(number, batch.ids)
        assert all(request.state == DONE for request in requests)

    asyncio.run(test())


def test_a_batch_that_is_too_large_to_go_ahead_goes_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it fails alone, if its one item is too large."""
    monkeypatch.setitem(worker_pool._KINDS, "process", Recorder)
    monkeypatch.setattr(Recorder, "largest", LARGE)

    async def test() -> None:
        made, driver, worker = pool()
        first, second = asked(driver, 9), asked(driver, 2 * LARGE)
        ahead(made, driver)
        assert (worker.sent, worker.sent_ahead, second.state == DONE) == ([1], [], False)
        worker.reply(1, [first.id])
        assert (worker.sent, worker.sent_ahead, second.state == DONE) == ([1], [], True)

    asyncio.run(test())


def test_small_batches_ahead_that_are_large_together_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a worker on a network no more goes ahead than it takes without reading, however small the
    batches are: what is over that is handed over in its order, each once it is the next.
    """
    monkeypatch.setitem(worker_pool._KINDS, "process", Recorder)

    async def test() -> None:
        made, driver, worker = pool()
        requests = [asked(driver, 9), *[asked(driver, LARGE // 2) for _ in range(3)]]
        batches = [ahead(made, driver) for _ in range(3)]
        assert worker.sent == [1, 2]
        for number, batch in enumerate([driver.core.batchers[0].in_flight[0], *batches], 1):
            worker.reply(number, batch.ids)
        assert (worker.sent, worker.sent_ahead) == ([1, 2], [3, 4])
        assert all(request.state == DONE for request in requests)

    asyncio.run(test())


@pytest.mark.parametrize("begun", ["reply", "whole reply", "small reply"])
def test_on_a_network_a_large_frame_goes_once_the_worker_begins_to_answer(begun: str) -> None:
    """It goes while the rest of a large reply is still to come, but not while the worker calls the model."""
    small, large = batch_frame(1, 9), batch_frame(2, LARGE)

    async def test() -> None:
        with network() as (ours, theirs):
            heard: list[Frame] = []
            connection = FrameSocket(ours, heard.append, print)
            connection.send(small)
            assert received(theirs) == as_bytes(small)
            connection.send_behind_reply(large)
            theirs.sendall(as_bytes(Frame(FrameKind.CALL, 1)))
            await heard_by(lambda: bool(heard))
            assert received(theirs) == b""
            reply = as_bytes(reply_frame(1, 9 if begun == "small reply" else LARGE))
            theirs.sendall(reply[:1000] if begun == "reply" else reply)
            got = bytearray()
            await heard_by(lambda: bool(got.extend(received(theirs))) or len(got) >= len(as_bytes(large)))
            assert got == as_bytes(large)
            theirs.sendall(reply[1000:] if begun == "reply" else b"")
            await heard_by(lambda: len(heard) == 2)
            connection.abandon()

    asyncio.run(test())


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_overtakes_a_frame_that_waits_for_the_reply(ahead: bool) -> None:
    """Batches that come later are small, and would go at once; the worker is to have them in their order."""
    small, large, later = batch_frame(1, 9), batch_frame(2, LARGE), [batch_frame(3, 9), batch_frame(4, 9)]

    async def test() -> None:
        with network() as (ours, theirs):
            connection = FrameSocket(ours, lambda _: None, print)
            connection.send(small)
            assert received(theirs) == as_bytes(small)
            connection.send_behind_reply(large)
            for frame in later:
                (connection.send_behind_reply if ahead else connection.send)(frame)
            assert received(theirs) == b""
            theirs.sendall(as_bytes(reply_frame(1, 9)))
            wanted = b"".join(map(as_bytes, [large, *later]))
            got = bytearray()
            await heard_by(lambda: bool(got.extend(received(theirs))) or len(got) >= len(wanted))
            assert got == wanted
            connection.abandon()

    asyncio.run(test())


def test_a_frame_goes_ahead_at_once_to_a_worker_that_is_answering() -> None:
    """Its worker reads again as soon as the reply is sent, of which a part has come already."""
    large = batch_frame(2, LARGE)

    async def test() -> None:
        with network() as (ours, theirs):
            connection = FrameSocket(ours, print, print)
            theirs.sendall(as_bytes(reply_frame(1, LARGE))[:1000])
            await heard_by(lambda: not connection._reader.idle)
            connection.send_behind_reply(large)
            got = bytearray()
            await heard_by(lambda: bool(got.extend(received(theirs))) or len(got) >= len(as_bytes(large)))
            assert got == as_bytes(large)
            connection.abandon()

    asyncio.run(test())


def test_a_frame_that_is_too_large_is_refused_when_it_is_to_go_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends it must hear that at once, to cut it; once the worker answers it is too late."""
    monkeypatch.setattr("carpool.engine.wire.frame.MAX_FRAME_BYTES", LARGE)

    async def test() -> None:
        with network() as (ours, _):
            connection = FrameSocket(ours, print, print)
            with pytest.raises(FrameError):
                connection.send_behind_reply(batch_frame(1, LARGE + 1))
            connection.abandon()

    asyncio.run(test())


def batch_frame(batch_id: int, nbytes: int) -> Frame:
    return Frame(FrameKind.BATCH, batch_id, [7], b"\3", b"\3", [float("inf")], [b"x" * nbytes])


def reply_frame(batch_id: int, nbytes: int) -> Frame:
    return Frame(FrameKind.REPLY, batch_id, [7], b"\0", payloads=[b"y" * nbytes])


def as_bytes(frame: Frame) -> bytes:
    return b"".join(map(bytes, encode(frame)))


@contextlib.contextmanager
def network() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over TCP, which do not block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


def received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(2 * LARGE)
    except BlockingIOError:
        return b""


async def heard_by(is_done: Callable[[], bool]) -> None:
    """Let the loop turn until something has happened."""
    async with asyncio.timeout(10):
        while not is_done():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_second_silence_is_held_against_a_request(idempotent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose worker fell silent waits again like any other. If that happens once more it is
    a suspect. One that must not run twice fails at once.
    """
    monkeypatch.setitem(worker_pool._KINDS, "process", Recorder)
    monkeypatch.setattr(Recorder, "fell_silent", True)

    async def test() -> None:
        made, driver, worker = pool(idempotent)
        request = asked(driver, 9)
        worker.lost("nothing has been heard of its machine")
        assert (request.state == DONE, request.losses) == ((False, 0) if idempotent else (True, 1))
        if idempotent:
            successor: Any = made._workers[0]
            ready(successor)
            assert len(successor.sent) == 1
            successor.lost("nothing has been heard of its machine")
            assert (request.state == DONE, request.losses) == (False, 1)

    asyncio.run(test())
