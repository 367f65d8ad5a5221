"""Millions of lines through one bulk request: what memory the server, its worker and the client
have at the end, beside what they had after the first 100,000 lines.

The client is `carpool.Client.predict_many` in this process, over numbers that are made as they are
sent. The model doubles them, in batches of up to 64, in one worker process. Each answer is checked.
Memory is what `/proc` shows as resident.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import carpool
from bench import PYTHONPATH, ROOT
from bench.peers.contestants import carpool as carpool_command
from bench.tools import options
from bench.tools.comparison import Comparison, compare, one_table, say
from bench.tools.figures import Facts, short
from bench.tools.server import HOST, Started, started

MODEL = "bench.peers.servers.carpool_models:double"
FIRST = 100_000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Row:
    """One process.

    Attributes:
        process: Which it is.
        lines: How many lines had come back at the end.
        after_first: Its bytes of memory after the first lines.
        at_end: Its bytes of memory after the last.
        most: The most that it was seen to have.
        cpu_s: The processor time that it took for a line.
        lines_per_s: How many lines came back in a second.
    """

    process: str
    lines: int
    after_first: int
    at_end: int
    most: int
    cpu_s: float
    lines_per_s: float


def resident(pid: int) -> int:
    """The bytes of memory that a process has now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def cpu_of(pid: int) -> float:
    """The processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processes(server: Started) -> dict[str, int]:
    """The processes that are watched, by what they are."""
    found = {"client": os.getpid(), "server": server.process.pid}
    for member in server.tree.members():
        line = Path(f"/proc/{member.pid}/cmdline").read_text()
        if line.rstrip("\0 ").endswith("/0"):
            found["worker"] = member.pid
    return found


def measured(lines: int) -> Iterator[Row]:
    """Send so many lines, and look at the memory now and then."""
    words = [*carpool_command(), "serve", MODEL, "--host", HOST, "--port", "{port}"]
    at_start = started(words, ROOT, {"PYTHONPATH": PYTHONPATH}, None)
    with at_start as server, carpool.Client(f"http://{HOST}:{server.port}", timeout_s=60) as client:
        client.wait_until_ready(timeout_s=60)
        watched = processes(server)
        seen: dict[str, list[int]] = {name: [] for name in watched}
        cpu = {name: cpu_of(pid) for name, pid in watched.items()}
        began = time.perf_counter()
        for number, answer in enumerate(client.predict_many(range(lines))):
            if answer != 2 * number:
                raise AssertionError(f"line {number} was answered {answer!r}")
            if (number + 1) % FIRST == 0:
                for name, pid in watched.items():
                    seen[name].append(resident(pid))
                if (number + 1) % (10 * FIRST) == 0:
                    say(f"  {number + 1:,} lines: " + ", ".join(f"{name} {of[-1]:,}" for name, of in seen.items()))
        took_s = time.perf_counter() - began
        for name, pid in watched.items():
            first, last, most = seen[name][0], resident(pid), max(seen[name])
            yield Row(name, lines, first, last, most, (cpu_of(pid) - cpu[name]) / lines, lines / took_s)


HEADER = ("process", "lines", "after 100,000, MB", "at the end, MB", "ratio", "most, MB", "CPU, µs/line", "lines/s")


def cells(row: Row) -> list[str]:
    return [
        row.process,
        f"{row.lines:,}",
        f"{row.after_first / 1e6:.1f}",
        f"{row.at_end / 1e6:.1f}",
        f"{row.at_end / row.after_first:.3f}",
        f"{row.most / 1e6:.1f}",
        f"{row.cpu_s * 1e6:.2f}",
        short(row.lines_per_s),
    ]


def entry(row: Row) -> Facts:
    return asdict(row)


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument("--lines", type=int, default=10_000_000, help="how many; default: %(default)s")
    options.add_measuring(parser, rounds=1, seconds=0)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    found: Comparison[Row] = compare([given.lines], measured, {}, 0)
    return found.report(given, "memory of a bulk request", one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
