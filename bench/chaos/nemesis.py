"""What goes wrong: a fault every 0.2 to 2 s, most often a SIGKILL of a worker in a call.

All faults come from outside, so every server can be given the same: signals to its workers,
requests that hurt, and clients that behave badly. The schedule follows from the seed; which worker
is busy at that moment does not.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.chaos.asks import HOST, Answer, AnswerReader, Ask, Asks
from bench.chaos.journal import GONE, RESET, SILENCE, Journal
from bench.chaos.nodes import Nodes
from bench.tools.process_tree import TICK_S, read_process

SHORTEST_S, LONGEST_S = 0.2, 2.0
WAIT_FOR_BUSY_S = 0.15
STOPPED_S = 5.0  # then SIGCONT, for servers that do not see that a worker stands still
ANSWER_S = 30.0  # longest wait for the answer to a request of the nemesis

WEIGHTS = {
    "kill": 60,
    "stop": 7,
    "hang": 5,
    "raise": 8,
    "poison": 6,
    "disconnect": 6,
    "slow": 4,
    "oversize": 4,
}
"""How often each fault comes, in parts of a hundred."""

ON_RAY = {**WEIGHTS, "raylet": 6, "silent": 8}
"""The same on a Ray cluster, where nodes can be killed and fall silent, too."""


class Nemesis:
    """A thread that makes faults until it is stopped.

    Args:
        port: Of the server.
        folder: Where the workers' journals are.
        seed: Of the schedule.
        asks: Makes the requests that hurt.
        max_body_bytes: The server's limit.
        journal: Where faults and these requests are written down.
        nodes: Of a Ray cluster; None where there is none.
        pace: How many times as long as usual the pauses between faults are.
    """

    def __init__(
        self,
        port: int,
        folder: Path,
        seed: str,
        asks: Asks,
        max_body_bytes: int,
        journal: Journal,
        nodes: Nodes | None = None,
        pace: float = 1.0,
    ) -> None:
        self._pace = pace
        self._weights = WEIGHTS if nodes is None else ON_RAY
        self._nodes = nodes
        self.counts = dict.fromkeys(self._weights, 0)
        self._port = port
        self._workers = Workers(folder)
        self._random = random.Random(seed)
        self._asks = asks
        self._too_large = max_body_bytes + 1
        self._journal = journal
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._main = threading.Thread(target=self._run, name="nemesis")

    def start(self) -> None:
        """Begin."""
        self._main.start()

    def stop(self) -> None:
        """No more faults; returns when the last one is over."""
        self._stopping.set()
        self._main.join()
        for thread in self._threads:
            thread.join()

    def healthy(self) -> bool:
        """Whether one ordinary request is answered right; tried for half a minute."""
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            ask = self._asks.make("healthy", 64)
            try:
                answer = self._exchange(ask)
            except OSError:
                answer = None
            if answer and (answer.status, answer.id, answer.sha) == ("200", ask.id, ask.sha):
                return True
            time.sleep(0.2)
        return False

    def _run(self) -> None:
        next_at = time.monotonic()
        names, weights = list(self._weights), list(self._weights.values())
        while True:
            next_at += self._pace * SHORTEST_S * (LONGEST_S / SHORTEST_S) ** self._random.random()
            if self._stopping.wait(max(0.0, next_at - time.monotonic())):
                return
            name = self._random.choices(names, weights)[0]
            self.counts[name] += 1
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            act: Callable[[], None] = getattr(self, f"_{name}")
            if name == "kill":
                act()
            else:  # these may take a while
                thread = threading.Thread(target=act, name=f"nemesis-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    # -- workers

    def _kill(self) -> None:
        worker = self._workers.busy(self._random)
        if worker is not None:
            self._journal.fault("kill", worker.pid)
            worker.signal(signal.SIGKILL)

    def _stop(self) -> None:
        worker = self._workers.busy(self._random)
        if worker is not None:
            self._journal.fault("stop", worker.pid)
            worker.signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)
            worker.signal(signal.SIGCONT)

    # -- nodes

    def _raylet(self) -> None:
        assert self._nodes is not None
        with contextlib.suppress(LookupError):  # others have not come back yet
            self._nodes.kill(self._random, lambda: self._journal.fault("raylet"))

    def _silent(self) -> None:
        assert self._nodes is not None
        with contextlib.suppress(LookupError):
            self._nodes.silence(self._random, lambda: self._journal.fault("silent"))

    # -- requests that hurt

    def _hang(self) -> None:
        self._bad("hang")

    def _raise(self) -> None:
        self._bad("raise")

    def _poison(self) -> None:
        self._bad("poison")

    def _bad(self, kind: str) -> None:
        self._journal.fault(kind)
        with contextlib.suppress(OSError):
            self._exchange(self._asks.make(kind, 64))

    def _oversize(self) -> None:
        """More than the limit, half of the times in chunks, so that nobody can know before."""
        self._journal.fault("oversize")
        ask = self._asks.make("oversize", 0)
        head, _, _ = ask.message.partition(b"Content-Length: ")
        with self._connection() as sock:
            self._asked(ask)
            with contextlib.suppress(OSError):
                if self._random.random() < 0.5:
                    sock.sendall(b"%bContent-Length: %d\r\n\r\n" % (head, self._too_large))
                    sock.sendall(bytes(self._too_large))
                else:
                    sock.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
                    for _ in range(self._too_large // 65_536 + 1):
                        sock.sendall(b"10000\r\n" + bytes(65_536) + b"\r\n")
            self._hear(sock, ask)

    # -- clients that behave badly

    def _disconnect(self) -> None:
        """Twenty clients go: with a request sent or half sent, by FIN or RST, at once or later."""
        self._journal.fault("disconnect")
        for i in range(20):
            ask = self._asks.make("gone", 256)
            with contextlib.suppress(OSError), self._connection() as sock:
                self._asked(ask)
                sock.sendall(ask.message[: len(ask.message) // 2] if i % 4 == 0 else ask.message)
                if i % 2:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if i % 3:
                    time.sleep(0.003)
            self._journal.ended(ask.id, GONE)

    def _slow(self) -> None:
        """A request in small pieces over three seconds, and its answer read byte by byte."""
        self._journal.fault("slow")
        ask = self._asks.make("slow", 128)
        with contextlib.suppress(OSError), self._connection() as sock:
            size = len(ask.message) // 30 + 1
            for begin in range(0, len(ask.message), size):
                if begin + size >= len(ask.message):
                    self._asked(ask)  # with its last byte: before that it is no request
                sock.sendall(ask.message[begin : begin + size])
                time.sleep(0.1)
            self._hear(sock, ask, at_most=1)

    # -- talking

    def _exchange(self, ask: Ask) -> Answer | None:
        with self._connection() as sock:
            self._asked(ask)
            try:
                sock.sendall(ask.message)
            except OSError:
                self._journal.ended(ask.id, RESET)
                return None
            return self._hear(sock, ask)

    def _hear(self, sock: socket.socket, ask: Ask, at_most: int = 65_536) -> Answer | None:
        """Read the answer and write down how the request has ended."""
        reader = AnswerReader()
        status = RESET
        try:
            while data := sock.recv(at_most):
                for answer in reader.received(data):
                    self._journal.ended(ask.id, answer.status, answer.id, answer.sha)
                    return answer
        except TimeoutError:
            status = SILENCE
        except (OSError, ValueError):
            pass
        self._journal.ended(ask.id, status)
        return None

    def _asked(self, ask: Ask) -> None:
        self._journal.asked(ask.id, ask.kind, ask.timeout_s, ask.sha)

    def _connection(self) -> socket.socket:
        return socket.create_connection((HOST, self._port), timeout=ANSWER_S)


class Workers:
    """The worker processes that have begun a journal.

    Numbers of processes are used again, so each is held
    by a pidfd, and no other process can be hit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._alive: list[_Worker] = []
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def busy(self, dice: random.Random) -> _Worker | None:
        """One that is in a call now; any that lives if none is for a while; None if none lives."""
        end = time.monotonic() + WAIT_FOR_BUSY_S
        with self._lock:
            while True:
                self._look()
                dice.shuffle(self._alive)
                for worker in self._alive:
                    if worker.busy[0]:
                        return worker
                if time.monotonic() > end:
                    return self._alive[0] if self._alive else None
                time.sleep(0.0005)

    def _look(self) -> None:
        """Find the new ones and forget the dead."""
        for name in os.listdir(self._folder):
            if name.startswith("busy-") and name not in self._seen:
                path = self._folder / name
                if path.stat().st_size:  # else it is being made
                    self._seen.add(name)
                    self._alive += _find(path)
        for worker in [worker for worker in self._alive if worker.has_ended()]:
            self._alive.remove(worker)
            worker.forget()


class _Worker:
    """One process; a signal can reach only it."""

    def __init__(self, pid: int, pidfd: int, busy: mmap.mmap) -> None:
        self.pid = pid
        self.busy = busy
        self._pidfd = pidfd

    def has_ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, number)

    def forget(self) -> None:
        self.busy.close()


def _find(path: Path) -> list[_Worker]:
    """The process that made this file, if it still runs."""
    _, pid, made_ns = path.name.split("-")
    process = read_process(int(pid))
    if process is None or process.zombie or process.started * TICK_S > int(made_ns) / 1e9:
        return []
    with contextlib.suppress(OSError), path.open("r+b") as file:
        return [_Worker(process.pid, os.pidfd_open(process.pid), mmap.mmap(file.fileno(), 1))]
    return []
