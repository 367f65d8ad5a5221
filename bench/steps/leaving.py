"""Clients that leave, and clients that do not read: what they cost the others.

carpool alone, over HTTP with server-sent events; steps of 5 ms (asleep) in a worker process.

* `leaving`: a stage with room for a single stream. A client asks for a stream of 10 s and closes
  its connection after 0.3 s; at the same moment another one asks, and what counts is how long its
  first part takes. Parts made for a client that has left are `stray`, counted by the server. At
  the end the server is left alone for a second, and its processor time is told.
* `not reading`: 15 clients read parts of 4 kB in a closed loop, without and then with four more
  that never read. Both have the same set of rows. What counts are the rate of the 15, and the
  memory of the server and its worker (their own pages, after the round).
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from bench.steps.client import Client, Dialect
from bench.steps.sse import OURS, launch
from bench.tools import options
from bench.tools.comparison import Comparison, compare, one_table, say
from bench.tools.figures import Facts, Spread
from bench.tools.server import HOST, Server, running

STEP_S, LONG, STAYS_S = 5e-3, 2000, 0.3
READERS, SLEEPERS, PART_BYTES = 15, 4, 4096


@dataclass(frozen=True, slots=True)
class Row:
    """A figure over all turns, and what it should not pass."""

    what: str
    unit: str
    values: list[float]
    limit: str


def ask(port: int, n: int) -> socket.socket:
    """A connection on which a stream of n parts has been asked for."""
    connection = socket.create_connection((HOST, port), timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(Dialect().request(n))
    return connection


def until(mark: bytes, connection: socket.socket, got: bytes = b"") -> bytes:
    """Read on until something has come, and return all that has."""
    while mark not in got:
        data = connection.recv(65536)
        assert data, f"the stream broke: {got[:200]!r}"
        got += data
    return got


def until_first(connection: socket.socket) -> bytes:
    """Wait for the first part."""
    return until(b"data: ", connection)


def first_after_leaving(port: int) -> float:
    """Seconds from the leaving of one client to the first part of the next one."""
    leaver = ask(port, LONG)
    until_first(leaver)
    until_s = time.perf_counter() + STAYS_S
    while time.perf_counter() < until_s:
        leaver.recv(65536)
    began = time.perf_counter()
    leaver.close()
    with ask(port, 3) as follower:
        got = until_first(follower)  # after the step under way, which made a part of the one who left
        taken = time.perf_counter() - began
        until(b"event: end", follower, got)  # if it left, too, its stray parts would be counted
        return taken


def stray_parts(port: int) -> float:
    """How many parts were made for clients that had left, by the server's metrics."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=30) as answer:
        found = re.findall(r"^carpool_stray_parts_total\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def leaving(rounds: int) -> Iterator[Row]:
    """What one who leaves costs the next one."""
    with running(started("one", 0)) as server:
        warm_s = time.monotonic() + 1
        while time.monotonic() < warm_s:
            with ask(server.port, 3) as warming:
                until(b"event: end", warming)
        taken, strays = [], []
        for _ in range(rounds):
            before = stray_parts(server.port)
            taken.append(first_after_leaving(server.port))
            strays.append(stray_parts(server.port) - before)
        idle = server.idle_share(1)
    yield Row("the next one's first part", "ms", [each * 1e3 for each in taken], "2 steps + 3 ms = 13")
    yield Row("the most stray parts of one who has left", "parts", [max(strays)], "at most 2")
    yield Row("stray parts of one who has left", "parts", strays, "1")
    yield Row("processor time afterwards", "% of a core", [idle * 100], "0")


def started(service: str, part_bytes: int) -> Any:
    """How to start carpool."""
    ours = launch("carpool", STEP_S)
    words = [word.replace(":steps", f":{service}") for word in ours.command]
    return replace(
        ours,
        command=words,
        exchange=replace(ours.exchange, answer=[text(i, part_bytes) for i in (1, 2)] if part_bytes else [1, 2]),
        env={**ours.env, "BENCH_PART_BYTES": str(part_bytes)},
    )


def text(i: int, nbytes: int) -> str:
    return f"{i} {'x' * nbytes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Long(Dialect):
    """Parts of some kilobytes."""

    def right(self, n: int) -> bytes:
        events = [b'data: "%s"\n\n' % text(i, PART_BYTES).encode() for i in range(1, n + 1)]
        return b"".join(events) + OURS.end % n


def memory_mb(server: Server) -> float:
    """What the processes of the server have for themselves."""
    total = 0
    for process in server._tree.members():
        try:
            with open(f"/proc/{process.pid}/smaps_rollup", "rb") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith(b"Private_"))
        except OSError:
            continue
    return total / 1024


def not_reading(rounds: int, seconds: float) -> Iterator[Row]:
    """What four who never read cost the others, and the server."""
    ratios, gaps, more = [], [], []
    dialect = Long(end=OURS.end, ends=OURS.ends)
    with running(started("steps", PART_BYTES)) as server:
        for number in range(rounds):
            with ExitStack() as stack:
                client = Client(server.port, dialect, READERS, number)
                stack.callback(client.close)
                alone = client.measured(0.5, seconds)
                before = memory_mb(server)
                for _ in range(SLEEPERS):
                    stack.enter_context(ask(server.port, 10**6))
                # their sockets are full after some megabytes, and only then are they paused
                beside = client.measured(2.5, seconds)
                more.append(memory_mb(server) - before)
                assert not client.wrong, f"{client.wrong} answers were wrong"
                ratios.append(beside.events_per_s / alone.events_per_s)
                gaps.append(beside.between_s / alone.between_s)
                say(f"  not reading, round {number + 1} of {rounds}: {ratios[-1]:.3f} of the rate, {more[-1]:+.1f} MB")
    yield Row("the others' events/s beside four who do not read / without", "", ratios, "at least 0.98")
    yield Row("the others' time between parts, likewise", "", gaps, "1.02")
    yield Row("more memory", "MB", more, f"5 + {SLEEPERS} MiB")


HEADER = ("what", "median (lowest-highest)", "unit", "turns", "should be")


def cells(row: Row) -> list[str]:
    return [
        row.what,
        Spread.of(row.values).text(lambda value: f"{value:.3g}"),
        row.unit,
        str(len(row.values)),
        row.limit,
    ]


def entry(row: Row) -> Facts:
    return {**asdict(row), "median": median(row.values)}


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument("--leavers", type=int, default=50, help="how many leave; default: %(default)s")
    options.add_measuring(parser, rounds=3, seconds=4)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    parts = {
        "leaving": lambda: leaving(given.leavers),
        "not reading": lambda: not_reading(given.rounds, given.seconds),
    }
    found: Comparison[Row] = compare(parts, lambda part: parts[part](), {}, given.seconds)
    return found.report(given, "clients that leave or do not read", one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
