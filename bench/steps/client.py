"""A client of server-sent events that counts and checks every one, over raw sockets.

It is a closed loop: a connection asks again once it has its answer. An answer is checked when it is
complete, and as a whole: the chunked coding is undone, and the body compared with the only right
one. So an event costs it less than it costs any server.
"""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass
from random import Random
from statistics import median

HOST = "127.0.0.1"
LEAST, MOST = 20, 60  # events of an answer
SILENCE_S = 20.0  # a connection from which nothing comes any longer has failed
_END = b"\r\n0\r\n\r\n"
_LENGTHS = {b"%x" % n: n for n in range(1 << 17)} | {b"%X" % n: n for n in range(1 << 17)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one server is asked, and how it answers.

    Attributes:
        path: Where.
        end: What follows the last event; `%d` is their number.
        ends: How many lines of data that end has.
    """

    path: str = "/predict"
    end: bytes = b""
    ends: int = 0

    def request(self, n: int) -> bytes:
        body = b'{"n": %d}' % n
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def right(self, n: int) -> bytes:
        """The only right body."""
        return b"".join(b"data: %d\n\n" % i for i in range(1, n + 1)) + (self.end % n if self.end else b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run showed.

    Attributes:
        events: That came in the time that was measured.
        wrong: Answers that were not as they should be, and connections that broke or fell silent.
        first_s: The median time to the first event; between_s: that of the mean distances.
        client_cpu_s: That of the client; it must stay below the time by far.
    """

    events: int
    answers: int
    wrong: int
    seconds: float
    first_s: float
    between_s: float
    client_cpu_s: float
    cpu_s: float = 0.0

    @property
    def events_per_s(self) -> float:
        return self.events / self.seconds

    @property
    def cpu_per_event_s(self) -> float:
        return self.cpu_s / self.events if self.events else float("nan")


class _Connection:
    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection((HOST, port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.parts: list[bytes] = []
        self.n = 0
        self.asked = self.first = self.heard = 0.0


class Client:
    """Some connections to one server."""

    def __init__(self, port: int, dialect: Dialect, connections: int, seed: int = 0) -> None:
        self._port = port
        self._dialect = dialect
        self._chance = Random(seed)
        self._questions = {n: (dialect.request(n), dialect.right(n)) for n in range(LEAST, MOST + 1)}
        self._poll = select.epoll()
        self._open: dict[int, _Connection] = {}
        self.wrong = self.events = self.answers = 0
        self.firsts: list[float] = []
        self.distances: list[float] = []
        for _ in range(connections):
            self._connect()

    def _connect(self) -> None:
        connection = _Connection(self._port)
        self._open[connection.sock.fileno()] = connection
        self._poll.register(connection.sock, select.EPOLLIN)
        self._ask(connection)

    def _ask(self, connection: _Connection) -> None:
        connection.n = self._chance.randint(LEAST, MOST)
        connection.parts.clear()
        connection.first = 0.0
        connection.asked = connection.heard = time.perf_counter()
        connection.sock.send(self._questions[connection.n][0])

    def _drop(self, fd: int) -> None:
        connection = self._open.pop(fd)
        self._poll.unregister(fd)
        connection.sock.close()
        self.wrong += 1
        self._connect()

    def run(self, seconds: float) -> None:
        """Ask and check for so long."""
        until = (now := time.perf_counter()) + seconds
        while now < until:
            for fd, _ in self._poll.poll(0.1):
                self._receive(fd)
            now = time.perf_counter()
        for fd in [fd for fd, each in self._open.items() if now - each.heard > SILENCE_S]:
            self._drop(fd)

    def _receive(self, fd: int) -> None:
        connection = self._open[fd]
        try:
            data = connection.sock.recv(262_144)
        except OSError:
            data = b""
        if not data:
            self._drop(fd)
            return
        connection.heard = now = time.perf_counter()
        if count := data.count(b"data: "):
            self.events += count
            connection.first = connection.first or now
        connection.parts.append(data)
        if data.endswith(b"0\r\n\r\n"):
            whole = b"".join(connection.parts)
            if whole.endswith(_END):
                self._check(connection, whole, now)
                self._ask(connection)

    def _check(self, connection: _Connection, whole: bytes, now: float) -> None:
        head, _, chunks = whole.partition(b"\r\n\r\n")
        pieces = chunks[: -len(_END)].split(b"\r\n")
        bodies = pieces[1::2]
        lengths = [_LENGTHS.get(size.lstrip(b"0")) for size in pieces[::2]]
        body = b"".join(bodies)
        if (
            head.startswith(b"HTTP/1.1 200 ")
            and lengths == list(map(len, bodies))
            and body == self._questions[connection.n][1]
        ):
            self.answers += 1
            self.events -= self._dialect.ends
            self.firsts.append(connection.first - connection.asked)
            self.distances.append((now - connection.first) / (connection.n - 1))
        else:
            self.wrong += 1

    def measured(self, warm_up_s: float, seconds: float) -> Run:
        """Ask for so long, and count what came after the warm-up."""
        self.run(warm_up_s)
        self.events = self.answers = 0
        self.firsts.clear()
        self.distances.clear()
        cpu, began = time.process_time(), time.perf_counter()
        self.run(seconds)
        taken = time.perf_counter() - began
        return Run(
            events=self.events,
            answers=self.answers,
            wrong=self.wrong,
            seconds=taken,
            first_s=median(self.firsts or [float("nan")]),
            between_s=median(self.distances or [float("nan")]),
            client_cpu_s=time.process_time() - cpu,
        )

    def close(self) -> None:
        """Leave, whatever is still to come."""
        for connection in self._open.values():
            connection.sock.close()
        self._poll.close()
