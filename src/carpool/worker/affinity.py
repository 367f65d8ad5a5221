"""CPU cores for processes: which exist, who gets which, and how many can really be used."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Sequence
from typing import Any

from carpool.worker import cgroup

Cores = frozenset[int]


def can_pin() -> bool:
    """Whether this system can tie a process to cores."""
    return hasattr(os, "sched_setaffinity")


def current() -> Cores | None:
    """The cores this thread may run on; None where the system cannot tell."""
    return frozenset(os.sched_getaffinity(0)) if can_pin() else None


def available() -> int:
    """How many cores this thread may run on."""
    return len(current() or ()) or os.cpu_count() or 1


def usable() -> int:
    """How many cores' worth of time this process has: what it may run on, or less where its container is limited."""
    limit = cgroup.cpu_limit()
    return available() if limit is None else max(1, min(available(), int(limit)))


def parse(cpus: int | Collection[int]) -> Cores:
    """One entry of `cpus=`: a core or a set of cores.

    Raises:
        ValueError: a core that does not exist here; the text names those that do.
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
    """`cpus=` of a stage: one entry per worker.

    Raises:
        ValueError: wrong length, or a core that does not exist.
        TypeError: it has no entries.
    """
    if entries(cpus) != workers:
        raise ValueError(
            f"cpus has {len(cpus)} entries for {workers} workers: give one core or one set of cores per worker"
        )
    return tuple(parse(entry) for entry in cpus)


def entries(cpus: Any) -> int:
    """For how many workers `cpus=` of a stage speaks. Raises TypeError."""
    if isinstance(cpus, str) or not isinstance(cpus, Sequence):
        raise TypeError(f"cpus must be a list with one core or one set of cores per worker, not {cpus!r}")
    return len(cpus)


def _number(core: object) -> int | None:
    """A core's number; None for what is no whole number."""
    try:
        return None if isinstance(core, bool) else operator.index(core)  # type: ignore[arg-type]
    except TypeError:
        return None


def pin(cores: Cores | None) -> None:
    """Tie this thread, and what it starts from now on, to `cores`. Does nothing where the system cannot."""
    if cores and can_pin():
        os.sched_setaffinity(0, cores)


def _span(cores: Cores) -> str:
    ordered = sorted(cores)
    if ordered == list(range(ordered[0], ordered[-1] + 1)) and len(ordered) > 1:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))
