"""CPU cores for processes: which exist, which worker gets which, and how many can be used."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Sequence
from typing import Any

from carpool.worker import cgroup

Cores = frozenset[int]


def can_pin() -> bool:
    """Report whether this system can tie a process to cores."""
    return hasattr(os, "sched_setaffinity")


def current() -> Cores | None:
    """Return the cores on which this thread may run; None where the system cannot tell."""
    return frozenset(os.sched_getaffinity(0)) if can_pin() else None


def available() -> int:
    """Return on how many cores this thread may run."""
    return len(current() or ()) or os.cpu_count() or 1


def usable() -> int:
    """Return how many cores' time this process has: the cores it may run on, or fewer if its
    container is limited.
    """
    return min(available(), limit() or available())


def limit() -> int | None:
    """Return how many cores' time the container has, at least one; None if nothing limits it."""
    cores = cgroup.cpu_limit()
    return None if cores is None else max(1, int(cores))


def parse(cpus: int | Collection[int]) -> Cores:
    """Return the cores of one entry of `cpus=`, which is a core or a set of cores.

    Raises:
        ValueError: A core does not exist here; the text names those that do.
    """
    entries = frozenset(cpus if isinstance(cpus, Collection) else {cpus})
    existing = frozenset(range(os.cpu_count() or 1)) | (current() or frozenset())
    cores = {entry: _number(entry) for entry in entries}
    unknown = sorted([entry for entry, core in cores.items() if core not in existing], key=str)
    if unknown or not cores:
        names = ", ".join(map(repr, unknown)) or "no core at all"
        raise ValueError(f"cpus: {names} cannot be used; this machine has cores {_span(existing)}")
    return frozenset(core for core in cores.values() if core is not None)


def parse_all(cpus: Sequence[int | Collection[int]], workers: int) -> tuple[Cores, ...]:
    """Return the cores of each worker of a stage, from its `cpus=` with one entry for each worker.

    Raises:
        ValueError: There are more or fewer entries than workers, or a core does not exist.
        TypeError: `cpus` is not a list.
    """
    n = count_entries(cpus)
    if n != workers:
        raise ValueError(
            f"cpus has {n} {'entry' if n == 1 else 'entries'} for {workers} {'worker' if workers == 1 else 'workers'}:"
            " give one core or one set of cores for each worker"
        )
    return tuple(parse(entry) for entry in cpus)


def count_entries(cpus: Any) -> int:
    """Return the number of entries in `cpus=` of a stage, which is one for each worker.

    Raises:
        TypeError: `cpus` is not a list.
    """
    if isinstance(cpus, str) or not isinstance(cpus, Sequence):
        raise TypeError(f"cpus must be a list with one core or one set of cores for each worker, not {cpus!r}")
    return len(cpus)


def _number(core: object) -> int | None:
    """Return a core's number; None if `core` is not a whole number."""
    try:
        return None if isinstance(core, bool) else operator.index(core)  # type: ignore[arg-type]
    except TypeError:
        return None


def pin(cores: Cores | None) -> None:
    """Tie this thread, and what it starts from now on, to `cores`; do nothing where the system
    cannot.
    """
    if cores and can_pin():
        os.sched_setaffinity(0, cores)


def _span(cores: Cores) -> str:
    ordered = sorted(cores)
    if ordered == list(range(ordered[0], ordered[-1] + 1)) and len(ordered) > 1:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))
