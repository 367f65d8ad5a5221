"""How many threads BLAS and OpenMP get in worker processes: what the user has set, or each worker its share of cores.

These libraries start a thread for every core unless a variable of the environment tells them otherwise. Several workers
then have more threads than there are cores (and so has a container that may use fewer cores than it sees), and threads
that spin while they wait for each other can make a service fifty times slower. Only decides; reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FOR_ALL = "OMP_NUM_THREADS"
"""Read by all of these libraries where their own variable is not set; torch's own threads follow it as well."""

VARIABLES = (
    FOR_ALL,
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
)

PATIENCE = "OPENBLAS_THREAD_TIMEOUT"
"""How long OpenBLAS's threads spin after their work, before they sleep: 2 to the power of this, in cycles.

Its own 26 is some 20 ms. Where the threads of all workers take all cores there are, they spin on those that the
service's own process needs, so they get the least there is.
"""


@dataclass(frozen=True, slots=True)
class Threads:
    """What the workers of a stage get.

    Attributes:
        variables: per worker, the environment variables to add.
        why: the reason, for the log.
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
    of_all: int,
) -> Threads:
    """The variables for each worker of a stage.

    What the user has said stands, variable by variable; and where `OMP_NUM_THREADS` is among it, it stands for all.

    Args:
        stage: its name, for the log.
        exported: the environment of this process.
        env: the stage's own, which is added to it.
        workers: how many the stage has.
        pinned: per worker the number of cores that it is tied to, if they are.
        cores: how many cores there are for all of them.
        of_all: how many worker processes the service has in all its stages.
    """
    said = [name for name in VARIABLES if name in exported or name in env]
    ours = () if FOR_ALL in said else tuple(name for name in VARIABLES if name not in said)
    counts = tuple(pinned) if pinned is not None else (_share(cores, of_all),) * workers
    told = ", ".join(f"{name}={env[name]} (env=)" if name in env else f"{name}={exported[name]}" for name in said)
    if not ours:
        return Threads(({},) * workers, f"workers of stage {stage} get BLAS threads as you have set them: {told}")
    reason = "as many as the cores that each is tied to" if pinned is not None else _shared(cores, of_all)
    more = f"{told} stands as you have set it" if told else f"set {FOR_ALL} or env= to choose"
    why = f"workers of stage {stage} get {_threads(counts)} each: {reason}; {more}"
    spins = pinned is None and counts[0] > 1 and PATIENCE not in exported and PATIENCE not in env
    patience = {PATIENCE: "4"} if spins else {}
    return Threads(tuple(dict.fromkeys(ours, str(n)) | patience for n in counts), why)


def _share(cores: int, workers: int) -> int:
    """How many threads each worker gets where nobody has said anything."""
    return max(1, cores // workers)


def _threads(counts: Sequence[int]) -> str:
    different = sorted(set(counts))
    return f"{' or '.join(map(str, different))} BLAS thread{'' if different == [1] else 's'}"


def _shared(cores: int, workers: int) -> str:
    return f"{cores} core{'' if cores == 1 else 's'}, {workers} worker{'' if workers == 1 else 's'}"
