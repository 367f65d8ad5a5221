"""How many threads BLAS and OpenMP get in worker processes: as many as the user has set, or a
worker's share of cores.

These libraries start a thread for every core unless an environment variable says otherwise. Several
workers then have more threads than there are cores, and so does a container that may use fewer
cores than it sees. Threads that spin while they wait for each other can make a service fifty times
slower. This module only decides; it reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FOR_ALL = "OMP_NUM_THREADS"
"""All these libraries read it if their own variable is not set; torch's own threads follow it as
well.
"""

VARIABLES = (
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


@dataclass(frozen=True, slots=True)
class Threads:
    """What the workers of a stage get.

    Attributes:
        variables: For each worker, the environment variables to add.
        why: The reason, for the log.
    """

    variables: tuple[Mapping[str, str], ...]
    why: str


def decide(
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
        stage: The name of the stage, for the log.
        exported: The environment of this process.
        env: The stage's own environment, which is added to that of this process.
        workers: How many workers the stage has.
        pinned: For each worker, the number of cores that it is tied to; None if workers are not
            tied to cores.
        cores: How many cores there are for all of them.
        all_workers: How many worker processes the service has in all its stages.
        limit: To how many cores' time the container is limited; None if it is not. Where workers
            are tied to more cores than their share of it, they get a thread for each of the share.
    """
    set_names = [name for name in VARIABLES if name in exported or name in env]
    ours = () if FOR_ALL in set_names else tuple(name for name in VARIABLES if name not in set_names)
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
    """Return how many threads each worker gets if the user has set nothing."""
    return max(1, cores // workers)


def _describe_threads(counts: Sequence[int]) -> str:
    different = sorted(set(counts))
    return f"{' or '.join(map(str, different))} BLAS thread{'' if different == [1] else 's'}"


def _describe_share(cores: int, workers: int) -> str:
    return f"{cores} core{'' if cores == 1 else 's'}, {workers} worker{'' if workers == 1 else 's'}"
