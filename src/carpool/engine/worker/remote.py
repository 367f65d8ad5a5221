"""A worker that comes by itself: it connects to a service, proves itself, and answers batches.

`carpool worker` runs it in a process that the user has started, and on a Ray cluster an actor does.
The process ends when the connection does; a thread that watches the connection ends it if user code
hangs then. What its model counts in metrics of its own goes over the connection, from the thread
that answers: TLS does not let another one write while that one reads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import secrets
import select
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Final

from carpool.engine.call.results import run_now
from carpool.engine.logger import logger
from carpool.engine.wire import handshake
from carpool.engine.wire.frame import MAX_METRICS_BYTES, Frame, FrameKind
from carpool.engine.wire.handshake import Hello
from carpool.engine.wire.outcome import FailureReport, read_report
from carpool.engine.worker.address import JoinAddress, Tls, tune
from carpool.engine.worker.main import ANSWERS, ParentSocket
from carpool.engine.worker.own_metrics import EVERY_S, FOLDER_VARIABLE, OwnMetrics, own_metrics
from carpool.engine.worker.place import INDEX_VARIABLE
from carpool.engine.worker.program import LEAVING, Setup
from carpool.engine.worker.serve import FindModel, serve

ReadSetup = Callable[[Frame], tuple[Setup, FindModel]]
"""Returns what the first frame says, and what finds the model."""

_TRY_EVERY_S: Final = 0.2
_ANSWER_S: Final = 20.0  # for a service that has many strangers before its gate
_SILENCE_S: Final = 60.0  # a service may stand still for a while, and its machine may be slow to come back
_TEARDOWN_GRACE_S: Final = 5.0


class Refused(Exception):
    """The service, which has proven itself, does not admit this worker; the text says why."""


@dataclass(frozen=True, slots=True)
class Way:
    """How to reach a service and be admitted: the address of its gate, the secret of both sides,
    the files for TLS if any, and the address of this machine to connect from, empty for any.
    """

    address: JoinAddress
    token: bytes
    tls: Tls | None = None
    source: str = ""


def admitted(way: Way, me: Hello, wait_s: float = 0.0) -> socket.socket:
    """Return a connection to a service that has admitted this worker; try for so long while nothing
    listens there.

    Raises:
        OSError: It cannot be reached, or its certificate is not trusted.
        HandshakeError: What listens there is not the service, or does not take the token.
        Refused: The service does not admit this worker.
    """
    sock = _connected(way, wait_s)
    try:
        sock.settimeout(_ANSWER_S)
        if way.tls is not None and not way.address.path:
            sock = way.tls.for_worker().wrap_socket(sock, server_hostname=way.address.host or "localhost")
        _introduce(sock, way.token, me)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def live(sock: socket.socket, read_setup: ReadSetup, *, leaves_on_signals: bool) -> FailureReport | None:
    """Be the worker that the first frame describes until the connection ends.

    Args:
        read_setup: Returns what the first frame says, and what finds the model.
        leaves_on_signals: Whether SIGTERM and Ctrl-C have the worker leave in good order; for the
            main thread only.

    Returns:
        Why the model could not be loaded; None if it was.
    """
    link = RemoteSocket(sock)
    has_ended = threading.Event()
    threading.Thread(target=_watch, args=(sock.fileno(), has_ended), name="carpool-watch", daemon=True).start()
    try:
        with _leaving_on_signals(link) if leaves_on_signals else contextlib.nullcontext():
            run_now(_live(link, read_setup))
    except (BrokenPipeError, ConnectionResetError, TimeoutError, ssl.SSLError):
        pass  # the service has ended, or its machine has, or it has given this worker up
    finally:
        has_ended.set()
        sock.close()
    return link.failure


class RemoteSocket(ParentSocket):
    """The connection to the service, on which the worker can also say that it wants to leave;
    `failure` is why the model could not be loaded.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.failure: FailureReport | None = None
        self.sends_metrics = False
        self._metrics: OwnMetrics | None = None
        self._metrics_due_at = inf
        self._is_too_much = False  # what the model counts is more than may be sent
        self._is_ready = False
        self._is_sending = False
        self._is_leaving = False
        self._clocks = ClockOffset()
        self._comes = select.poll()
        self._comes.register(sock, select.POLLIN)
        self._signals = -1

    def wake_by(self, signals: int) -> None:
        """Have `receive` look for signals, too, in a descriptor that each of them makes readable.

        One that comes after the interpreter has looked for signals, and before the system call that
        waits, would else be handled once the next frame has come.
        """
        self._signals = signals
        self._comes.register(signals, select.POLLIN)

    async def receive(self) -> Frame | None:
        """Return the next frame, with deadlines by the clock of this machine; None for the end."""
        while self._nothing_comes():
            self.send_metrics()
        frame = await super().receive()
        if frame is not None:
            if frame.made_at:
                self._clocks.learn(frame.made_at, self.came_at)
            if frame.deadlines and self._clocks.offset_s is not None:
                offset_s = self._clocks.offset_s
                frame.deadlines = [deadline + offset_s for deadline in frame.deadlines]
        return frame

    def send(self, frame: Frame) -> None:
        self._is_sending = True
        try:
            super().send(frame)
        finally:
            self._is_sending = False
        if frame.kind == FrameKind.FAILED:
            self.failure = read_report(frame.payloads[0])
        if frame.kind == FrameKind.STATE and bytes(frame.payloads[0]) == b"ready":  # type: ignore[arg-type]
            self._is_ready = True
            if self.sends_metrics:
                self._metrics = own_metrics(self._send_metrics)
        if self._is_leaving and self._is_ready:
            self._say_so()
        if self._metrics is not None and frame.kind in ANSWERS:
            now = time.monotonic()
            self._metrics_due_at = min(self._metrics_due_at, now + EVERY_S)
            if now >= self._metrics_due_at:
                self.send_metrics()

    def send_metrics(self) -> None:
        self._metrics_due_at = inf
        if self._metrics is not None:
            self._metrics.write()

    def leave(self) -> None:
        if not self._is_ready:
            os._exit(0)  # it is loading its model, and has nothing to finish
        self._is_leaving = True
        if not self._is_sending:
            with contextlib.suppress(OSError):
                self._say_so()

    def _nothing_comes(self) -> bool:
        if self._received or (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending()):
            return False
        while True:
            due_at = self._metrics_due_at
            left_ms = None if due_at == inf else max(0.0, due_at - time.monotonic()) * 1000
            ready = [fd for fd, _ in self._comes.poll(left_ms)]
            if ready != [self._signals]:
                return not ready
            os.read(self._signals, 64)  # the signal has been handled since

    def _send_metrics(self, data: bytes) -> None:
        if len(data) <= MAX_METRICS_BYTES:
            self.send(Frame(FrameKind.METRICS, ids=[0], formats=b"\0", payloads=[data]))
        elif not self._is_too_much:
            self._is_too_much = True
            text = "the model's metrics take %d bytes, and at most %d are sent: use fewer labels"
            logger.warning(text, len(data), MAX_METRICS_BYTES)

    def _say_so(self) -> None:
        self._is_leaving = False
        super().send(Frame(FrameKind.STATE, ids=[0], formats=b"\0", payloads=[LEAVING]))


# -- inside


def _connected(way: Way, wait_s: float) -> socket.socket:
    until = time.monotonic() + wait_s
    while True:
        try:
            return _connect(way)
        except (PermissionError, ssl.SSLError):
            raise
        except OSError as error:
            if time.monotonic() >= until:
                raise
            logger.debug("%s cannot be reached yet: %s", way.address, error)
            time.sleep(_TRY_EVERY_S)


def _connect(way: Way) -> socket.socket:
    address = way.address
    if address.path:
        sock = socket.socket(socket.AF_UNIX)
        try:
            tune(sock, _SILENCE_S)
            sock.settimeout(_ANSWER_S)
            sock.connect(address.path)
        except BaseException:
            sock.close()
            raise
        return sock
    source = (way.source, 0) if way.source else None
    sock = socket.create_connection((address.host, address.port), timeout=_ANSWER_S, source_address=source)
    tune(sock, _SILENCE_S)
    return sock


def _introduce(sock: socket.socket, token: bytes, me: Hello) -> None:
    nonce = handshake.read_greeting(_exactly(sock, handshake.GREETING_BYTES))
    own_nonce = secrets.token_bytes(handshake.NONCE_BYTES)
    sock.sendall(handshake.hello(me, token, nonce, own_nonce))
    head = _exactly(sock, handshake.VERDICT_HEAD_BYTES)
    text = _exactly(sock, handshake.verdict_rest(head))
    refusal = handshake.read_verdict(head, text, token, nonce, own_nonce)
    if refusal:
        raise Refused(refusal)


def _exactly(sock: socket.socket, n: int) -> bytes:
    """Read so many bytes. Raises HandshakeError if the connection ends before."""
    data = b""
    while len(data) < n:
        try:
            more = sock.recv(n - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            raise handshake.HandshakeError(
                "it was closed from the other side before the handshake was done: the service has another token,"
                " expects TLS, or is not a carpool service"
            )
        data += more
    return data


async def _live(link: RemoteSocket, read_setup: ReadSetup) -> None:
    frame = await link.receive()
    if frame is None:
        return
    setup, find_model = read_setup(frame)
    link.take_place(setup)
    os.environ[INDEX_VARIABLE] = str(setup.place)
    os.environ.pop(FOLDER_VARIABLE, None)  # of an actor that has inherited it
    link.sends_metrics = setup.sends_metrics
    await serve(link, setup, find_model)
    link.send_metrics()


@contextlib.contextmanager
def _leaving_on_signals(link: RemoteSocket) -> Iterator[None]:
    def leave(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        link.leave()

    readable, written = os.pipe()
    os.set_blocking(written, False)
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    woken = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    link.wake_by(readable)
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(readable)
        os.close(written)


def _watch(fd: int, has_ended: threading.Event) -> None:
    """End the process if its worker does not end by itself some time after the connection."""
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    poll.poll()
    if has_ended.wait(_TEARDOWN_GRACE_S):
        return
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    leads_group = os.getpgrp() == os.getpid()
    (os.killpg if leads_group else os.kill)(0 if leads_group else os.getpid(), signal.SIGKILL)


_DRIFT: Final = 2e-4  # seconds a second: more than two quartz clocks do


class ClockOffset:
    """How far the clock of this machine is ahead of the service's.

    Attributes:
        offset_s: The best estimate, in seconds; never less than the truth at the time.
    """

    __slots__ = ("_at", "offset_s")

    def __init__(self) -> None:
        self.offset_s: float | None = None
        self._at = 0.0

    def learn(self, sent: float, now: float) -> None:
        """Learn from a message that was made and came at these times, each by the clock of its
        side.
        """
        seen_s = now - sent
        if self.offset_s is None:
            self.offset_s = seen_s
        else:
            self.offset_s = min(seen_s, self.offset_s + _DRIFT * max(0.0, now - self._at))
        self._at = now
