"""What a server holds before and after: memory, descriptors, threads, processes and files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.tools.process_tree import ProcessTree

RSS_SHARE, RSS_BYTES = 0.05, 16 * 2**20
"""Memory may grow by 5 %, or by what a few allocators keep after larger bodies than before."""

RSS_BYTES_WITH_RAY = 64 * 2**20

_SHARED = "/dev/shm"

Member = tuple[int, int]
"""A process: its number and its start time."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What is held.

    Attributes:
        rss, fds, threads: of each process.
        zombies: Processes that have ended and that nobody has collected.
        shared, temporary: names in /dev/shm, and in the folder for temporary files that the server
            was given.
    """

    rss: dict[Member, int]
    fds: dict[Member, int]
    threads: dict[Member, int]
    zombies: int
    shared: frozenset[str]
    temporary: frozenset[str]


def look(tree: ProcessTree, scratch: Path) -> Holdings:
    """What the server and its processes hold now."""
    rss: dict[Member, int] = {}
    fds: dict[Member, int] = {}
    threads: dict[Member, int] = {}
    members = tree.members()
    for process in members:
        member = process.pid, process.started
        with suppress(OSError, KeyError):
            if not process.zombie:
                status = _status(process.pid)
                held = len(os.listdir(f"/proc/{process.pid}/fd"))
                rss[member] = int(status["VmRSS"].split()[0]) * 1024
                fds[member], threads[member] = held, int(status["Threads"])
    return Holdings(
        rss,
        fds,
        threads,
        sum(process.zombie for process in members),
        _shared_names({process.pid for process in members}),
        frozenset(str(path.relative_to(scratch)) for path in scratch.rglob("*")),
    )


def leaked(before: Holdings, after: Holdings, *, with_ray: bool = False) -> list[str]:
    """What is held after that was not held before, in words; empty if all is well.

    Args:
        before: What was held.
        after: What is held.
        with_ray: Whether Ray runs in the process, which remembers each node and actor and starts
            threads as it likes: then only memory counts, and much of it.

    Memory, descriptors and threads are compared for the processes that lived all the time; workers
    come and go, and of them only the number counts.
    """
    found = []
    lived = before.rss.keys() & after.rss.keys()
    rss_before, rss_after = (sum(held.rss[member] for member in lived) for held in (before, after))
    if rss_after - rss_before > max(RSS_SHARE * rss_before, RSS_BYTES_WITH_RAY if with_ray else RSS_BYTES):
        found.append(f"memory: {rss_before / 2**20:.0f} MiB before, {rss_after / 2**20:.0f} MiB after")
    for what, was, now in (("descriptors", before.fds, after.fds), ("threads", before.threads, after.threads)):
        first, last = (sum(count[member] for member in lived) for count in (was, now))
        if last > first and not with_ray:
            found.append(f"{what}: {first} before, {last} after")
    if len(after.rss) > len(before.rss):
        found.append(f"processes: {len(before.rss)} before, {len(after.rss)} after")
    if after.zombies > before.zombies:
        found.append(f"zombies: {after.zombies}")
    for what, names in (("/dev/shm", after.shared - before.shared), ("files", after.temporary - before.temporary)):
        if names:
            found.append(f"{what}: {', '.join(sorted(names)[:5])}")
    return found


def settle(
    look_now: Callable[[], Holdings], before: Holdings, timeout_s: float = 30.0, *, with_ray: bool = False
) -> Holdings:
    """What is held once nothing is leaked and all processes are back, or after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while True:
        after = look_now()
        if time.monotonic() > end or (
            len(after.rss) == len(before.rss) and not leaked(before, after, with_ray=with_ray)
        ):
            return after
        time.sleep(0.5)


def _shared_names(ours: set[int]) -> frozenset[str]:
    """Names in /dev/shm, but for those that processes of somebody else have mapped."""
    if not os.path.isdir(_SHARED):
        return frozenset()
    names = set(os.listdir(_SHARED))
    for entry in os.listdir("/proc") if names else ():
        if entry.isdigit() and int(entry) not in ours:
            with suppress(OSError):
                lines = Path(f"/proc/{entry}/maps").read_text().splitlines()
                names -= {line.rpartition(f"{_SHARED}/")[2] for line in lines if f"{_SHARED}/" in line}
    return frozenset(names)


def _status(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
