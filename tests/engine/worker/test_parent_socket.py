"""The worker's end of its socket, where a worker that steps looks for orders without waiting."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from carpool.engine.call.retry import run_now
from carpool.engine.wire import order as wire
from carpool.engine.wire.frame import FrameReader, encode
from carpool.engine.worker.main import ParentSocket
from carpool.engine.worker.program import LEAVING
from carpool.engine.worker.remote import RemoteSocket, _leaving_on_signals
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, ParentSocket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, ParentSocket(theirs)


def order(number: int, nbytes: int = 3) -> bytes:
    joining = wire.Joining(1, 0, 0, wire.TAKES_PARTS, 1.0, b"x" * nbytes)
    return b"".join(bytes(part) for part in encode(wire.order_frame(number, wire.OrderHead(), [joining])))


def test_an_order_that_is_half_here_holds_nothing_up(ends: tuple[socket.socket, ParentSocket]) -> None:
    """There is news once a frame is whole, however its bytes come; till then the worker steps on."""
    parent, link = ends
    assert not run_now(link.has_news())
    data = order(7, 200_000)
    for begin in range(0, len(data), 50_000):
        assert not run_now(link.has_news())
        parent.sendall(data[begin : begin + 50_000])
    assert run_now(link.has_news()) and run_now(link.has_news())
    frame = run_now(link.receive())
    assert frame is not None and frame.batch_id == 7
    assert not run_now(link.has_news())


def test_orders_that_come_together_are_told_one_by_one(ends: tuple[socket.socket, ParentSocket]) -> None:
    """Several orders in one read are all there."""
    parent, link = ends
    parent.sendall(order(1) + order(2) + order(3))
    for number in (1, 2, 3):
        assert run_now(link.has_news())
        frame = run_now(link.receive())
        assert frame is not None and frame.batch_id == number
    assert not run_now(link.has_news())


def test_the_end_is_news(ends: tuple[socket.socket, ParentSocket]) -> None:
    """A worker in the midst of its steps notices that its parent has closed."""
    parent, link = ends
    parent.shutdown(socket.SHUT_WR)
    assert run_now(link.has_news())
    assert run_now(link.receive()) is None


def test_a_signal_that_interrupts_no_system_call_is_handled_all_the_same() -> None:
    """A worker that waits for a frame leaves on SIGTERM, also where the signal has come between the interpreter's look
    for signals and the call that waits. Here another thread gets it, which does not end that call either.
    """
    ours, theirs = socket.socketpair()
    told: list[bytes] = []
    may_kill = threading.Event()

    def service() -> None:
        may_kill.wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGTERM)
        theirs.settimeout(PATIENCE_S)
        reader = FrameReader()
        with suppress(TimeoutError):
            n = theirs.recv_into(reader.get_buffer())
            told.extend(bytes(frame.payloads[0]) for frame in reader.received(n))  # type: ignore[arg-type]
        theirs.close()

    thread = threading.Thread(target=service)
    thread.start()
    link = RemoteSocket(ours)
    link._is_ready = True
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with ours, _leaving_on_signals(link):
            may_kill.set()
            assert run_now(link.receive()) is None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        thread.join()
    assert told == [LEAVING]
