"""The program of a worker process, which runs `worker/serve.py` over a socketpair until the socket
ends.

`drive/process.py` starts it as a fresh interpreter, `python -m carpool.engine.worker.main FD PARENT
NAME`, with one end of a socketpair as file descriptor FD; NAME is for `ps`. If user code hangs as
the socket ends, a thread that watches the socket ends the process. If even that thread does not get
to run, the kernel ends the process when the parent dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing.process
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections import deque
from functools import partial
from typing import NoReturn

from carpool.engine import faults
from carpool.engine.call.results import run_now
from carpool.engine.clock import monotonic
from carpool.engine.type_hints import HintWarning
from carpool.engine.wire.frame import Frame, FrameKind, FrameReader, encode
from carpool.engine.worker import program
from carpool.engine.worker.place import enter_process, pin
from carpool.engine.worker.program import DUMP_SIGNAL, Setup, process_name
from carpool.engine.worker.serve import serve

_TEARDOWN_GRACE_S = 5.0
_THREADS_GRACE_S = 1.0
_IOV_MAX = 1024
_WORK = (FrameKind.BATCH, FrameKind.ORDER)
ANSWERS = (FrameKind.REPLY, FrameKind.PARTS)


class ParentSocket:
    """The worker's end of the socketpair, blocking.

    Attributes:
        send_fault: A planned fault of sending replies, for tests, as is `receive_fault` after a
            part of a frame has come; None if there is none.
        came_at: When the first byte of the last frame came.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.send_fault: faults.Send | None = None
        self.receive_fault: faults.Hook | None = None
        self.came_at = 0.0
        self._parent_ends = select.poll()
        # without POLLRDHUP only errors and hang-ups are reported
        self._parent_ends.register(sock, getattr(select, "POLLRDHUP", 0))
        self._reader = FrameReader()
        self._received: deque[Frame] = deque()  # the next batch may come together with this one
        self._has_ended = False  # the parent has closed its end, which `has_news` has seen
        self._pid = os.getpid()

    def take_place(self, setup: Setup) -> None:
        multiprocessing.process.current_process().name = process_name(setup.stage, setup.place)
        faults.connection, self.send_fault = self.sock, faults.sending(setup.place)
        self.receive_fault = faults.at("worker.mid_recv", setup.place)
        enter_process(setup.place)

    async def receive(self) -> Frame | None:
        received, reader = self._received, self._reader
        while not received:
            if self._has_ended:
                return None
            was_idle = reader.idle
            n = self.sock.recv_into(reader.get_buffer())
            if was_idle:
                self.came_at = monotonic()
            if n == 0:
                return None
            received += reader.received(n)
            if not received and self.receive_fault is not None:
                self.receive_fault()
        frame = received.popleft()
        if frame.kind in _WORK and self._parent_ends.poll(0):
            return None  # it had come ahead of time when the service was closed at once
        if frame.no_memory:
            raise MemoryError("there is not enough memory to receive the batch")
        return frame

    async def has_news(self) -> bool:
        while not self._received and not self._has_ended:
            was_idle = self._reader.idle
            try:
                n = self.sock.recv_into(self._reader.get_buffer(), 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            if was_idle:
                self.came_at = monotonic()
            self._has_ended = n == 0
            self._received += self._reader.received(n) if n else ()
        return True

    def send(self, frame: Frame) -> None:
        if os.getpid() != self._pid:
            _end_fork()
        encoded = encode(frame)
        if len(encoded) == 1 and self.send_fault is None:
            sent = self.sock.send(encoded[0])  # all of it, unless a signal comes
            if sent == len(encoded[0]):
                return
            encoded = [memoryview(encoded[0])[sent:]]
        buffers = [memoryview(part).cast("B") for part in encoded if len(part)]
        if self.send_fault is not None and frame.kind in ANSWERS:
            buffers = self.send_fault(self.sock, buffers)
        while buffers:
            sent = self.sock.sendmsg(buffers[:_IOV_MAX])
            while sent:
                if sent < len(buffers[0]):
                    buffers[0] = buffers[0][sent:]
                    break
                sent -= len(buffers.pop(0))


def main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    _prepare(parent)
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    threading.Thread(target=_watch, args=(fd, parent), name="carpool-watch", daemon=True).start()
    try:
        run_now(_live(ParentSocket(sock)))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent has ended, or has given this worker up
    finally:
        _flush()
        threading.Thread(target=end_soon, name="carpool-end", daemon=True).start()


def _prepare(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which decides
    # SIGTERM reaches the parent as well, since some supervisors send it to all processes; what user
    # code starts must not inherit that it is ignored
    signal.signal(signal.SIGTERM, _leave_to_parent)
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    warnings.simplefilter("ignore", HintWarning)  # they were given where the stage was declared
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    for stream in (sys.stdout, sys.stderr):
        # a model may print what the encoding does not have, and no request fails for it
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    _die_with_parent(parent)


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the kernel was asked


def _leave_to_parent(number: int, frame: object) -> None:
    """Ignore a signal: the parent decides when the worker stops, since it may have requests to
    finish.
    """


def _end_fork() -> NoReturn:
    """End a child that user code has forked and let return: it must never answer in the worker's
    name.
    """
    with contextlib.suppress(OSError):
        os.write(
            2, b"carpool ends a process that the model has forked, because it has returned from the model's code\n"
        )
    os._exit(1)


def end_soon() -> None:
    """End the process although user code has left threads running, which would keep it alive."""
    time.sleep(_THREADS_GRACE_S)
    names = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    if names:
        with contextlib.suppress(OSError):
            os.write(
                2,
                f"carpool ends a worker although threads of its model are still running: {', '.join(names)}\n".encode(),
            )
        os._exit(0)


def _watch(fd: int, parent: int) -> None:
    """End the process when the parent's end of the socket is closed, even while user code is
    running.
    """
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    poll.poll()
    if os.getppid() == parent:
        # an orderly stop: the main thread sees it too, and tears the model down
        time.sleep(_TEARDOWN_GRACE_S)
    os.killpg(0, signal.SIGKILL)  # with everything that user code has started


async def _live(connection: ParentSocket) -> None:
    frame = await connection.receive()
    if frame is None:
        return
    setup: Setup = pickle.loads(frame.payloads[0])  # type: ignore[arg-type]
    connection.take_place(setup)
    pin(setup.cores)
    program.restore(setup.program)
    if setup.log_level is not None:
        logging.basicConfig(level=setup.log_level, format="%(levelname)s %(name)s: %(message)s")
    await serve(connection, setup, lambda: program.unpack_model(setup.program, setup.model))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # the parent has closed the pipe, so nobody reads it any more
        with contextlib.suppress(Exception):
            stream.flush()


if __name__ == "__main__":
    main()
