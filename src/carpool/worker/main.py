"""A worker process: what `worker/serve.py` does, over a socketpair, until the socket ends.

Started by `drive/process.py` as a fresh interpreter, `python -m carpool.worker.main FD PARENT NAME`, with one end of a
socketpair as file descriptor FD; NAME is for `ps`. Nothing else is shared with the parent. The process ends when the
socket ends; should user code hang then, a thread that watches the socket ends it, and should even that thread get no
turn, the kernel does when the parent dies.
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

from carpool import faults
from carpool.batch_hints import HintWarning
from carpool.call.retry import run_now
from carpool.clock import monotonic
from carpool.wire.frame import Frame, FrameKind, FrameReader, encode
from carpool.worker import affinity, program
from carpool.worker.serve import serve
from carpool.worker.setup import DUMP_SIGNAL, Setup, process_name

_TEARDOWN_GRACE_S = 5.0
_THREADS_GRACE_S = 1.0
_IOV_MAX = 1024


class ParentSocket:
    """The worker's end of the socketpair, blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.faulty: faults.Send | None = None
        self.half_received: faults.Hook | None = None
        self.heard_at = 0.0
        self._parent_ends = select.poll()
        self._parent_ends.register(sock, getattr(select, "POLLRDHUP", 0))  # where it is unknown, an error or a reset
        self._reader = FrameReader()
        self._received: deque[Frame] = deque()  # the next batch may come with this one, ahead of time
        self._pid = os.getpid()

    async def receive(self) -> Frame | None:
        """The next frame; None once the parent has closed its end."""
        while not self._received:
            begins = self._reader.idle
            n = self.sock.recv_into(self._reader.get_buffer())
            if begins:
                self.heard_at = monotonic()
            if n == 0:
                return None
            self._received += self._reader.received(n)
            if not self._received and self.half_received is not None:
                self.half_received()
        frame = self._received.popleft()
        if frame.kind == FrameKind.BATCH and self._parent_ends.poll(0):
            return None  # it lay ahead when the service was closed without more ado
        if frame.dropped:
            raise MemoryError("there is no memory to receive what was sent")
        return frame

    def send(self, frame: Frame) -> None:
        """Write one frame as a whole."""
        if os.getpid() != self._pid:
            _end_fork()
        buffers = [memoryview(part).cast("B") for part in encode(frame) if len(part)]
        if self.faulty is not None and frame.kind == FrameKind.REPLY:
            buffers = self.faulty(self.sock, buffers)
        while buffers:
            sent = self.sock.sendmsg(buffers[:_IOV_MAX])
            while sent:
                if sent < len(buffers[0]):
                    buffers[0] = buffers[0][sent:]
                    break
                sent -= len(buffers.pop(0))


def main() -> None:
    """Entry point of the process."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    _prepare(parent)
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    threading.Thread(target=_watch, args=(fd, parent), name="carpool-watch", daemon=True).start()
    try:
        run_now(_live(ParentSocket(sock)))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent has gone or given up on us
    finally:
        _flush()
        threading.Thread(target=_end_soon, name="carpool-end", daemon=True).start()


def _prepare(parent: int) -> None:
    """Signals, output and end of life, before any user code runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which decides
    # so does SIGTERM, and some supervisors send it to all processes; what user code starts must not inherit that
    signal.signal(signal.SIGTERM, _leave_to_parent)
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    warnings.simplefilter("ignore", HintWarning)  # where the stage was declared it has been said
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _die_with_parent(parent)


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before we could ask


def _leave_to_parent(number: int, frame: object) -> None:
    """The parent decides when the worker stops: it may have requests to finish."""


def _end_fork() -> NoReturn:
    """This is a child that user code has forked and let return: it must never answer in the worker's name."""
    with contextlib.suppress(OSError):
        os.write(2, b"a process that the model has forked returned from the model's code; it is ended\n")
    os._exit(1)


def _end_soon() -> None:
    """Threads that user code has left running would keep the process; end it without them."""
    time.sleep(_THREADS_GRACE_S)
    names = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    if names:
        with contextlib.suppress(OSError):
            os.write(2, f"ended although threads of the model are still running: {', '.join(names)}\n".encode())
        os._exit(0)


def _watch(fd: int, parent: int) -> None:
    """End the process when the parent's end of the socket is closed, also while user code is running."""
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    poll.poll()
    if os.getppid() == parent:
        time.sleep(_TEARDOWN_GRACE_S)  # an orderly stop: the main thread sees it too and tears down
    os.killpg(0, signal.SIGKILL)  # whatever user code has started goes as well


async def _live(connection: ParentSocket) -> None:
    """Become the worker that the first frame describes."""
    frame = await connection.receive()
    if frame is None:
        return
    setup: Setup = pickle.loads(frame.payloads[0])  # type: ignore[arg-type]
    multiprocessing.process.current_process().name = process_name(setup.stage, setup.worker)
    faults.connection, connection.faulty = connection.sock, faults.sending(setup.worker)
    connection.half_received = faults.at("worker.mid_recv", setup.worker)
    affinity.pin(setup.cores)
    program.restore(setup.program)
    if setup.log_level is not None:
        logging.basicConfig(level=setup.log_level, format="%(levelname)s %(name)s: %(message)s")
    await serve(connection, setup, lambda: program.unpack_model(setup.program, setup.model))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the parent closed the pipe; nobody reads it any more
            stream.flush()


if __name__ == "__main__":
    main()
