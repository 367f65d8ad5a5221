"""An open-loop HTTP load generator: requests leave in time, whatever became of earlier ones.

One thread, raw sockets. A request takes a connection on which nothing is under way; where none is
left it follows the others on one that is busy (pipelining), so that it always leaves. Latency
counts from when a request *should have left*, so a generator that is late, or a server that does
not read, cannot make a server look better. How late it was itself is a part of the report: a run in
which it often was says nothing about the server.

    python -m bench.reality.open_loop 8000 --rate 2400 --seconds 10 --path /predict --body '{"x":
    1.5}'
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import select
import socket
import subprocess
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from unittest.mock import ANY

from bench import ROOT
from bench.tools import options
from bench.tools.server import HOST, Server

CONNECTIONS = 900  # carpool takes 1024, mosec and BentoML more
GRACE_S = 5.0  # after the last request; what is not answered by then is not answered
BROKEN = 0  # the status of a request whose connection was closed
HEAD_START_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one run showed. Requests of the warm-up do not count; the others all do.

    Attributes:
        requests: How many left in `seconds`; ok: answered rightly; good: within the SLO besides.
        refused: Other answers, by status; wrong, broken, unanswered: what else became of requests.
        mean_s, p50_s, p99_s: latency of those that are ok.
        late_mean_s, late_p99_s, late_max_s: how much after their times requests left.
        pipelined: Left on a connection on which others were under way.
        sent: With the warm-up; span_s: from the first request to the last answer.
        own_cpu: Cores that the generator took.
    """

    rate: float
    seconds: float
    requests: int
    ok: int
    good: int
    refused: dict[str, int]
    wrong: int
    broken: int
    unanswered: int
    mean_s: float
    p50_s: float
    p99_s: float
    late_mean_s: float
    late_p99_s: float
    late_max_s: float
    pipelined: int
    sent: int
    span_s: float
    own_cpu: float

    @property
    def goodput(self) -> float:
        """Right answers within the SLO, per second."""
        return self.good / self.seconds

    @property
    def refusals(self) -> int:
        """Requests that got another answer than the right one."""
        return sum(self.refused.values())


def poisson_times(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests leave, in [0, seconds)."""
    dice = Random(f"{seed}/open loop")
    times = []
    when = dice.expovariate(rate)
    while when < seconds:
        times.append(when)
        when += dice.expovariate(rate)
    return times


def run(
    server: Server,
    *,
    rate: float,
    seconds: float,
    warm_up_s: float,
    slo_s: float,
    seed: int,
    bodies: Path | None = None,
) -> Load:
    """Load a server, from a process of its own, with the lines of a file in turn if it is given.

    Raises:
        NoLoad: The generator could not do it: say, the server refuses connections.
    """
    exchange = server.launch.exchange
    command = [sys.executable, "-m", "bench.reality.open_loop", str(server.port), "--rate", str(rate)]
    command += ["--seconds", str(seconds), "--warm-up", str(warm_up_s), "--slo", str(slo_s), "--seed", str(seed)]
    command += ["--path", exchange.path]
    if bodies is None:
        command += ["--body", exchange.body.decode(), "--answer", json.dumps(exchange.answer)]
    else:
        command += ["--bodies", str(bodies)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise NoLoad(f"the generator ended with status {done.returncode}: {done.stderr[-500:]}")
    return Load(**json.loads(done.stdout))


class NoLoad(Exception):
    """A server could not be loaded, and why."""


class Link:
    """One connection."""

    __slots__ = ("received", "sock", "under_way", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.under_way: deque[int] = deque()  # requests, in the order in which their answers must come
        self.received = b""
        self.unsent = b""


class Timer:
    """A descriptor that becomes readable at a time, to the microsecond, as no time-out of epoll."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._when = (ctypes.c_long * 4)()  # interval and time, each in seconds and nanoseconds
        self.fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "no timerfd")

    def set(self, when: float) -> None:
        """At `when` of the monotonic clock; earlier settings are forgotten."""
        seconds = int(when)
        self._when[2], self._when[3] = seconds, int((when - seconds) * 1e9) + 1
        self._libc.timerfd_settime(self.fd, 1, self._when, None)

    def close(self) -> None:
        os.close(self.fd)


class Generator:
    """Sends one request over and over, or several in turn.

    Args:
        port: Of the server, on this machine.
        requests: The whole of each; answer: the JSON value of its right answer, ANY for all.
        times: When each leaves, in seconds from the begin.
        connections: How many to open before that.

    Attributes:
        sent, finished: when each left and was answered, in the time of `times`; status: of its
            answer, or BROKEN.
    """

    def __init__(
        self, port: int, requests: Sequence[bytes], answer: object, times: Sequence[float], connections: int
    ) -> None:
        n = len(times)
        self._port, self._requests, self._answer = port, requests, answer
        self._times = times
        self.sent = array("d", bytes(8 * n))
        self.finished = array("d", [-1.0]) * n
        self.status = array("h", [-1]) * n
        self.wrong = self.pipelined = 0
        self._left = n  # requests without an answer
        self._next = 0  # request to leave
        self._begin = 0.0
        self._poll = select.epoll()
        self._links: dict[int, Link] = {}
        self._idle: list[Link] = []
        self._heads: dict[bytes, tuple[int, int]] = {}  # status and length of the body
        self._right: set[bytes] = set()  # bodies
        for _ in range(connections):
            self._open()

    def run(self) -> None:
        """Send all; returns when everything is answered, or GRACE_S after the last request left."""
        timer = Timer()
        self._poll.register(timer.fd, select.EPOLLIN)
        times, n = self._times, len(self._times)
        self._begin = begin = time.monotonic() + HEAD_START_S
        end = begin + times[-1] + GRACE_S
        while self._left and time.monotonic() < end:
            self._send_due()
            timer.set(begin + times[self._next] if self._next < n else end)
            for fd, event in self._poll.poll():
                if fd != timer.fd:
                    self._serve(fd, event)
                    self._send_due()  # a batch's answers come all at once, and take their time
        timer.close()

    def close(self) -> None:
        """Close all connections."""
        self._poll.close()
        for link in self._links.values():
            link.sock.close()

    def _send_due(self) -> None:
        times, n = self._times, len(self._times)
        i = self._next
        while i < n and times[i] <= (now := time.monotonic() - self._begin):
            self.sent[i] = now
            self._send(i)
            i += 1
        self._next = i

    def _send(self, i: int) -> None:
        if self._idle:
            link = self._idle.pop()
        else:
            fd, link = next(iter(self._links.items()))  # the one that was given a request longest ago
            del self._links[fd]
            self._links[fd] = link
            self.pipelined += 1
        link.under_way.append(i)
        request = self._requests[i % len(self._requests)]
        if link.unsent:
            link.unsent += request
            return
        try:
            done = link.sock.send(request)
        except BlockingIOError:
            done = 0
        except OSError:
            return  # it is broken, which epoll will tell
        if done < len(request):
            link.unsent = request[done:]
            self._poll.modify(link.sock, select.EPOLLIN | select.EPOLLOUT)

    def _serve(self, fd: int, event: int) -> None:
        link = self._links.get(fd)
        if link is None:
            return  # closed in this turn
        if event & select.EPOLLOUT and link.unsent:
            self._send_rest(link)
        if event & ~select.EPOLLOUT:
            self._receive(link)

    def _send_rest(self, link: Link) -> None:
        try:
            link.unsent = link.unsent[link.sock.send(link.unsent) :]
        except OSError:
            return
        if not link.unsent:
            self._poll.modify(link.sock, select.EPOLLIN)

    def _receive(self, link: Link) -> None:
        try:
            data = link.sock.recv(262_144)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._broken(link)
            return
        now = time.monotonic() - self._begin
        if link.received:
            data = link.received + data
        at = 0
        while at < len(data):
            body = data.find(b"\r\n\r\n", at) + 4
            if body < 4:
                break
            status, length = self._read_head(data[at:body])
            if len(data) < body + length:
                break
            at = body + length
            self._answered(link, now, status, data[body:at])
        link.received = data[at:]

    def _answered(self, link: Link, now: float, status: int, body: bytes) -> None:
        i = link.under_way.popleft()
        self.finished[i] = now
        self.status[i] = status
        self._left -= 1
        if not link.under_way:
            self._idle.append(link)
        if status == 200 and body not in self._right:
            if json.loads(body) == self._answer:
                self._right.add(body)
            else:
                self.wrong += 1
                self.status[i] = -2

    def _read_head(self, head: bytes) -> tuple[int, int]:
        known = self._heads.get(head)
        if known is None:
            lines = head.lower().split(b"\r\n")
            lengths = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
            if not lengths:
                raise ValueError(f"an answer without a length: {head!r}")
            if len(self._heads) > 10_000:
                self._heads.clear()
            known = self._heads[head] = int(head[9:12]), lengths[0]
        return known

    def _open(self) -> None:
        sock = socket.create_connection((HOST, self._port), timeout=10)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = self._links[sock.fileno()] = Link(sock)
        self._poll.register(sock, select.EPOLLIN)
        self._idle.append(link)

    def _broken(self, link: Link) -> None:
        """The server has closed it: what was under way is lost, and a new one takes its place."""
        for i in link.under_way:
            self.status[i] = BROKEN
        self._left -= len(link.under_way)
        del self._links[link.sock.fileno()]
        if not link.under_way:
            self._idle.remove(link)
        link.sock.close()
        self._open()


def summary(generator: Generator, times: Sequence[float], given: argparse.Namespace, own_cpu: float) -> Load:
    """The figures, without the warm-up."""
    first = next((i for i, when in enumerate(times) if when >= given.warm_up), len(times))
    counted = range(first, len(times))
    status, finished, sent = generator.status, generator.finished, generator.sent
    latencies = sorted(finished[i] - times[i] for i in counted if status[i] == 200)
    late = sorted(max(0.0, sent[i] - times[i]) for i in counted)
    outcomes = Counter(status[i] for i in counted)
    span_s = max(finished)
    return Load(
        rate=given.rate,
        seconds=given.seconds,
        requests=len(counted),
        ok=outcomes[200],
        good=sum(latency <= given.slo for latency in latencies),
        refused={str(code): outcomes[code] for code in sorted(outcomes) if code > 0 and code != 200},
        wrong=outcomes[-2],
        broken=outcomes[BROKEN],
        unanswered=outcomes[-1],
        mean_s=sum(latencies) / len(latencies) if latencies else float("nan"),
        p50_s=quantile(latencies, 0.5),
        p99_s=quantile(latencies, 0.99),
        late_mean_s=sum(late) / len(late) if late else 0.0,
        late_p99_s=quantile(late, 0.99),
        late_max_s=late[-1] if late else 0.0,
        pipelined=generator.pipelined,
        sent=len(times),
        span_s=span_s,
        own_cpu=own_cpu / span_s if span_s > 0 else 0.0,
    )


def quantile(ordered: Sequence[float], q: float) -> float:
    """The smallest value that at least the share q does not exceed: as the simulator's."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else float("nan")


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("port", type=int, help="of the server, on this machine")
    parser.add_argument("--rate", type=float, required=True, help="requests per second, on the mean")
    parser.add_argument("--seconds", type=float, default=10.0, help="that count; default: %(default)s")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before that; default: %(default)s")
    parser.add_argument("--slo", type=float, default=0.06, help="seconds; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the times; default: %(default)s")
    parser.add_argument("--path", default="/predict", help="default: %(default)s")
    parser.add_argument("--body", default='{"x": 1.5}', help="default: %(default)s")
    parser.add_argument("--answer", default='{"y": 3.0}', help="JSON; default: %(default)s")
    parser.add_argument(
        "--bodies", type=Path, help="a file with a body in each line, sent in turn; any answer is right"
    )
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="default: %(default)s")
    given = parser.parse_args()
    head = f"POST {given.path} HTTP/1.1\r\nHost: {HOST}:{given.port}\r\nContent-Type: application/json\r\n"
    bodies = [given.body] if given.bodies is None else given.bodies.read_text().splitlines()
    answer = json.loads(given.answer) if given.bodies is None else ANY
    requests = [
        f"{head}Accept: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode() for body in bodies
    ]
    times = departures(given.rate, given.seconds, given.warm_up, given.seed)
    generator = Generator(given.port, requests, answer, times, given.connections)
    gc.disable()  # a collection is a pause, and here is nothing to collect
    cpu_s = time.process_time()
    generator.run()
    print(json.dumps(asdict(summary(generator, times, given, time.process_time() - cpu_s))))
    return 0


def departures(rate: float, seconds: float, warm_up_s: float, seed: int) -> list[float]:
    """A warm-up, and then the times that count, which are those of `poisson_times` moved by it."""
    warm_up = poisson_times(rate, warm_up_s, seed + 1_000_000) if warm_up_s else []
    return warm_up + [warm_up_s + when for when in poisson_times(rate, seconds, seed)]


if __name__ == "__main__":
    sys.exit(main())
