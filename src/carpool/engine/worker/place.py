"""Where a worker runs: which one of its stage it is, on which cores, with how many threads of BLAS
and OpenMP, and which accelerators it sees.

A model can ask which worker it runs in: threads and tasks of one process each have their own
answer, and all threads of a worker process have one.

BLAS and OpenMP start a thread for every core unless an environment variable says otherwise. Too
many threads can make a service fifty times slower, so workers get as many as the user has set, or
their share of the cores.

CUDA counts only the devices that `CUDA_VISIBLE_DEVICES` names, and counts them anew from 0. So a
worker that sees one device finds it as `cuda:0`, whatever its number is on the machine.
"""

from __future__ import annotations

import contextvars
import itertools
import operator
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

INDEX_VARIABLE = "CARPOOL_WORKER"
"""In the environment of a worker process: which worker of its stage it is, from 0."""

COUNT_VARIABLE = "CARPOOL_WORKERS"
"""In the environment of a worker process: how many workers its stage has at most."""

_of_context: contextvars.ContextVar[int | None] = contextvars.ContextVar("carpool_worker", default=None)
_of_process: int | None = None


def worker_index() -> int:
    """Return the index of the worker that runs the calling code, from 0 to `workers` - 1.

    A worker that succeeds one that has died, or was replaced, has the same index. It is known in
    `__init__`, `setup`, `predict`, all hooks and `teardown` of a model in a process, a thread or on
    the loop; in a process also while its module is imported.

    Raises:
        RuntimeError: The calling code does not run in a worker of a service.
    """
    place = _of_context.get()
    if place is None:
        place = _of_process
    if place is None:
        raise RuntimeError(
            "worker_index() is for code that runs in a worker of a service, such as a model's setup and predict."
            " Call it there and keep the number; in threads that the model of a thread or loop stage starts, in"
            " functions of @carpool.batch and in the program itself there is no worker"
        )
    return place


def enter_context(place: int) -> None:
    """Take note of the worker that runs in the present thread or task."""
    _of_context.set(place)


def enter_process(place: int) -> None:
    global _of_process
    _of_process = place


# -- cores

Cores = frozenset[int]


def can_pin() -> bool:
    return hasattr(os, "sched_setaffinity")


def current_cores() -> Cores | None:
    """Return the cores on which this thread may run; None where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if can_pin() else None


def available_cores() -> int:
    return len(current_cores() or ()) or os.cpu_count() or 1


def usable_cores() -> int:
    """Return how many cores' time this process has: the cores it may run on, or fewer if its
    container is limited.
    """
    return min(available_cores(), core_limit() or available_cores())


def core_limit() -> int | None:
    """Return how many cores' time the container has, at least one; None if nothing limits it."""
    cores = cpu_limit()
    return None if cores is None else max(1, int(cores))


def parse_cores(cpus: int | Collection[int]) -> Cores:
    """Return the cores of one entry of `cpus=`, which is a core or a set of cores.

    Raises:
        ValueError: A core does not exist here; the text names those that do.
    """
    entries = frozenset(cpus if isinstance(cpus, Collection) else {cpus})
    existing = frozenset(range(os.cpu_count() or 1)) | (current_cores() or frozenset())
    cores = {entry: _whole(entry) for entry in entries}
    unknown = sorted([entry for entry, core in cores.items() if core not in existing], key=str)
    if unknown or not cores:
        names = ", ".join(map(repr, unknown)) or "no core at all"
        raise ValueError(f"cpus: {names} cannot be used; this machine has cores {_span(existing)}")
    return frozenset(core for core in cores.values() if core is not None)


def parse_cpus(cpus: Sequence[int | Collection[int]], workers: int) -> tuple[Cores, ...]:
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
    return tuple(parse_cores(entry) for entry in cpus)


def count_entries(cpus: Any) -> int:
    """Return the number of entries in `cpus=` of a stage, which is one for each worker.

    Raises:
        TypeError: `cpus` is not a list.
    """
    if isinstance(cpus, str) or not isinstance(cpus, Sequence):
        raise TypeError(f"cpus must be a list with one core or one set of cores for each worker, not {cpus!r}")
    return len(cpus)


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


# -- the limit of a container

_ROOT = Path("/")
_COLONS = 2  # a line has three fields: a hierarchy's number, its controllers, and the group


def cpu_limit(root: Path = _ROOT) -> float | None:
    """Return how many cores' time there is; None if nothing limits it, or that cannot be read."""
    try:
        groups = (root / "proc/self/cgroup").read_text()
    except (OSError, ValueError):
        return None
    limits = []
    for _, controllers, group in [line.split(":", 2) for line in groups.splitlines() if line.count(":") >= _COLONS]:
        if not controllers:
            limits += [_limit_v2(folder) for folder in _folders(root / "sys/fs/cgroup", group)]
        elif "cpu" in controllers.split(","):
            mounts = [
                root / "sys/fs/cgroup" / name for name in (controllers, "cpu")
            ]  # the kernel's order may be another
            limits += [_limit_v1(folder) for mount in mounts for folder in _folders(mount, group)]
    return min((limit for limit in limits if limit is not None), default=None)


def _folders(mount: Path, group: str) -> Iterator[Path]:
    """Return the folders of a group and of those around it, each of which may have a limit.

    In a container the mount itself is often the container's own group.
    """
    inner = PurePosixPath(group.lstrip("/"))
    return (mount / each for each in (inner, *inner.parents))


def _limit_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _limit_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None


# -- threads of BLAS and OpenMP

FOR_ALL = "OMP_NUM_THREADS"
"""All these libraries read it if their own variable is not set; torch's own threads follow it as
well.
"""

THREAD_VARIABLES = (
    FOR_ALL,
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
)

SPIN_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"
"""How long OpenBLAS's threads spin after their work before they sleep: 2 to the power of this, in
cycles.

The default of 26 means some 20 ms. Where the threads of all workers take all cores, they spin on
cores that the service's own process needs, so they get the least value that OpenBLAS takes.
"""


class Threads(NamedTuple):
    """The threads that the workers of a stage get.

    Attributes:
        variables: For each worker, the environment variables to add.
        why: The reason, for the log.
    """

    variables: tuple[Mapping[str, str], ...]
    why: str


def decide_threads(
    stage: str,
    exported: Mapping[str, str],
    env: Mapping[str, str],
    *,
    workers: int,
    pinned: Sequence[int] | None,
    cores: int,
    all_workers: int,
    limit: int | None = None,
) -> Threads:
    """Decide the environment variables for each worker of a stage.

    Each variable that the user has set is kept. If `OMP_NUM_THREADS` is one of them, no other
    variable is added.

    Args:
        pinned: For each worker, the number of cores that it is tied to; None if workers are not
            tied to cores.
        cores: How many cores there are for all of them.
        limit: To how many cores' time the container is limited; None if it is not. Where workers
            are tied to more cores than their share of it, they get a thread for each of the share.
    """
    set_names = [name for name in THREAD_VARIABLES if name in exported or name in env]
    ours = () if FOR_ALL in set_names else tuple(name for name in THREAD_VARIABLES if name not in set_names)
    counts = (_share(cores, all_workers),) * workers
    if pinned is not None:
        counts = tuple(pinned) if limit is None else tuple(min(n, _share(limit, all_workers)) for n in pinned)
    settings = [f"{name}={env[name]} (env=)" if name in env else f"{name}={exported[name]}" for name in set_names]
    set_text = ", ".join(settings)
    if not ours:
        return Threads(({},) * workers, f"workers of stage {stage} get BLAS threads as you have set them: {set_text}")
    reason = _describe_share(cores, all_workers)
    if pinned is not None and counts == tuple(pinned):
        reason = "as many as the cores that each is tied to"
    elif pinned is not None and limit is not None:
        reason = f"their container is limited to {_describe_share(limit, all_workers)}"
    more = f"{set_text} is kept as you have set it" if set_text else f"set {FOR_ALL} or env= to choose"
    why = f"workers of stage {stage} get {_describe_threads(counts)} each: {reason}; {more}"
    may_spin = pinned is None and counts[0] > 1 and SPIN_TIMEOUT not in exported and SPIN_TIMEOUT not in env
    spin_timeout = {SPIN_TIMEOUT: "4"} if may_spin else {}
    return Threads(tuple(dict.fromkeys(ours, str(n)) | spin_timeout for n in counts), why)


def _share(cores: int, workers: int) -> int:
    return max(1, cores // workers)


def _describe_threads(counts: Sequence[int]) -> str:
    different = sorted(set(counts))
    return f"{' or '.join(map(str, different))} BLAS thread{'' if different == [1] else 's'}"


def _describe_share(cores: int, workers: int) -> str:
    return f"{cores} core{'' if cores == 1 else 's'}, {workers} worker{'' if workers == 1 else 's'}"


# -- accelerators

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

Devices = int | Sequence[int | str | Sequence[int | str]]
"""What `devices=` of a stage takes: how many there are, or a list with one device, or a list of
devices, for each worker.
"""

_NUMBER_OR_UUID = re.compile("[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")


def parse_devices(devices: Any) -> tuple[str, ...]:
    """Return the entries of `devices=`, each as `CUDA_VISIBLE_DEVICES` names it.

    Raises:
        ValueError: There is none, or one of them cannot be a device.
        TypeError: It is neither a number nor a list.
    """
    if (count := _whole(devices)) is not None:
        if count < 1:
            raise ValueError(f"devices must be at least 1, not {count}: leave it out where there is none")
        return tuple(map(str, range(count)))
    if isinstance(devices, str | bytes) or not isinstance(devices, Sequence):
        raise TypeError(f'devices must be how many there are, or a list such as ["cuda:0", "cuda:1"], not {devices!r}')
    if not devices:
        raise ValueError("devices is an empty list: leave it out where there is none")
    return tuple(_parse(entry) for entry in devices)


def share_devices(devices: Sequence[str], workers: int) -> tuple[str, ...]:
    """Return the device of each worker, one after the other and from the first one again.

    Raises:
        ValueError: There are more devices than workers.
    """
    if len(devices) > workers:
        raise ValueError(
            f"devices has {len(devices)} entries for {workers} {'worker' if workers == 1 else 'workers'}, so some would"
            " never be used: have a worker for each device, or give a worker several devices as a list, such as"
            ' devices=[["cuda:0", "cuda:1"]]'
        )
    return tuple(itertools.islice(itertools.cycle(devices), workers))


def among_visible(devices: Sequence[str], exported: str | None) -> tuple[str, ...]:
    """Return the devices of each worker as the machine numbers them.

    Args:
        devices: For each worker, what it is to see of the devices that this process sees.
        exported: `CUDA_VISIBLE_DEVICES` of this process; None if it sees all that there are.

    Raises:
        ValueError: This process does not see one of them.
    """
    if exported is None:
        return tuple(devices)
    visible = [name.strip() for name in exported.split(",")]
    visible = list(itertools.takewhile(_can_be_device, visible))  # as CUDA does: what follows a wrong name is hidden
    return tuple(",".join(_mapped(name, visible, exported) for name in each.split(",")) for each in devices)


def _mapped(name: str, visible: Sequence[str], exported: str) -> str:
    if not name.isdigit():
        return name  # a UUID is the same everywhere
    if int(name) >= len(visible):
        seen = {0: "no device", 1: "one device, cuda:0"}.get(len(visible), f"cuda:0 to cuda:{len(visible) - 1}")
        raise ValueError(
            f"devices asks for cuda:{name}, but {VISIBLE_DEVICES}={exported!r} is exported, so that this process"
            f" sees {seen}"
        )
    return visible[int(name)]


def _parse(entry: Any) -> str:
    if isinstance(entry, Sequence) and not isinstance(entry, str | bytes):
        if not entry:
            raise ValueError("devices gives a worker an empty list: name at least one device for each")
        return ",".join(_parse_one(each) for each in entry)
    if isinstance(entry, str):
        return ",".join(map(_parse_one, entry.split(",")))
    return _parse_one(entry)


def _parse_one(device: Any) -> str:
    number = _whole(device)
    name = device.removeprefix("cuda:") if isinstance(device, str) else str(number)
    if not _can_be_device(name):
        raise ValueError(
            f'devices: {device!r} is no device: give its number, "cuda:0" or a UUID such as "GPU-8932f937"'
        )
    return str(int(name)) if name.isdigit() else name


def _can_be_device(name: str) -> bool:
    return _NUMBER_OR_UUID.fullmatch(name) is not None


def _whole(value: Any) -> int | None:
    """Return a whole number as an int; None for anything else, True and False included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
