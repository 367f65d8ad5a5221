"""Many runs: policies side by side, over several seeds and loads, on as many cores as there are.

All policies meet the same arrivals, seed by seed, so that they are compared in pairs.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from carpool.engine.worker.place import usable_cores
from carpool.simulate.arrivals import USUAL_ARRIVALS, Arrivals, Closed, arrivals_of
from carpool.simulate.costs import USUAL_COST
from carpool.simulate.engine import run
from carpool.simulate.features import Features
from carpool.simulate.graphs import graph_from
from carpool.simulate.policies import PolicyLike
from carpool.simulate.report import Report, mean_of
from carpool.simulate.servers import Servers
from carpool.simulate.traffic import Traffic

LOADS = tuple(n / 10 for n in range(1, 16))

Progress = Callable[[int, int], None]
"""Called with the number of runs that are done and the number of all runs."""


def compare(
    policies: Sequence[PolicyLike],
    arrivals: Any = USUAL_ARRIVALS,
    cost: Any = USUAL_COST,
    *,
    seeds: int = 5,
    seed: int = 0,
    jobs: int = 1,
    progress: Progress | None = None,
    **settings: Any,
) -> list[Report]:
    """Return one report for each policy, with the means over several seeds.

    Args:
        policies: The policies, each as in `run`.
        arrivals: As in `run`.
        cost: As in `run`.
        seeds: How many runs are made for each policy, each with a seed of its own.
        seed: The first seed.
        jobs: How many processes make the runs; 0 for one per core. With more than one, everything
            that is given must be picklable, as specs are.
        progress: Called at the beginning and after every run.
        settings: Further settings of `run`.

    Raises:
        ValueError: A setting makes no sense.
    """
    processes = arrivals_of(arrivals)
    runs = [
        {**settings, "policy": policy, "arrivals": processes, "cost": cost, "seed": each}
        for policy in policies
        for each in _seeds(seeds, seed)
    ]
    return _means(_run_all(runs, jobs, progress), seeds)


def sweep(
    policies: Sequence[PolicyLike],
    arrivals: Any = "poisson:rho=1",
    cost: Any = USUAL_COST,
    loads: Iterable[float] = LOADS,
    *,
    seeds: int = 1,
    seed: int = 0,
    jobs: int = 1,
    progress: Progress | None = None,
    **settings: Any,
) -> list[Report]:
    """Return one report for each policy and load, in this order; `Report.load` says which load.

    The arrivals keep their kind and are scaled to each load, which is their mean rate as a share of
    capacity. With clients in a closed loop everything is scaled, the number of clients too, and a
    load of 1 stands for the arrivals as they are given.

    Args:
        policies: As in `compare`.
        arrivals: As in `run`.
        cost: As in `run`.
        loads: The loads, as shares of capacity.
        seeds: How many runs are made for each policy and load, each with a seed of its own.
        seed: The first seed.
        jobs: As in `compare`.
        progress: As in `compare`.
        settings: Further settings of `run`.

    Raises:
        ValueError: A setting makes no sense.
    """
    loads = list(loads)
    processes = arrivals_of(arrivals)
    given = _load_of(processes, cost, settings)
    runs = [
        {**settings, "policy": policy, "arrivals": _scaled(processes, load / given), "cost": cost, "seed": each}
        for policy in policies
        for load in loads
        for each in _seeds(seeds, seed)
    ]
    means = _means(_run_all(runs, jobs, progress), seeds)
    return [replace(report, load=load) for report, load in zip(means, loads * len(policies), strict=True)]


def _seeds(seeds: int, seed: int) -> range:
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, not {seeds!r}")
    return range(seed, seed + seeds)


def _means(reports: Sequence[Report], seeds: int) -> list[Report]:
    return [mean_of(reports[i : i + seeds]) for i in range(0, len(reports), seeds)]


def _load_of(processes: Sequence[Arrivals], cost: Any, settings: dict[str, Any]) -> float:
    """Return the load that the arrivals make as given; 1 with a closed loop. Raises ValueError."""
    if any(isinstance(process, Closed) for process in processes):
        return 1.0
    servers = Servers.of(cost, settings.get("max_batch_size", 64), settings.get("workers", 1), graph_from(settings))
    traffic = Traffic(processes, servers, duration_s=settings.get("duration_s", 30), features=Features.of(settings))
    if not traffic.load:
        raise ValueError("these arrivals bring no requests, so they cannot be scaled to a load: give a rate above 0")
    return traffic.load


def _scaled(processes: Sequence[Arrivals], factor: float) -> list[Arrivals]:
    return [process.scaled(factor) for process in processes]


def _run_all(runs: Sequence[dict[str, Any]], jobs: int, progress: Progress | None) -> list[Report]:
    if jobs < 0:
        raise ValueError(f"jobs must be at least 1, or 0 for one per core, not {jobs!r}")
    jobs = min(jobs or usable_cores(), len(runs))
    report_progress = progress or (lambda done, of: None)
    report_progress(0, len(runs))
    if jobs <= 1:
        return [_run_one(settings, i, len(runs), report_progress) for i, settings in enumerate(runs)]
    _check_picklable(runs)
    with processes(jobs) as pool:
        futures = [pool.submit(run, **settings) for settings in runs]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                report_progress(done, len(runs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def processes(jobs: int) -> ProcessPoolExecutor:
    """Return processes for so many runs at a time; 0 means one for each core that may be used.

    Raises:
        ValueError: The system has no shared memory for them.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would copy locks that another thread holds
    try:
        return ProcessPoolExecutor(jobs or usable_cores(), spawn)
    except OSError as error:
        text = f"several runs at a time need shared memory, and there is none ({error.strerror})"
        raise ValueError(f"{text}: make /dev/shm writable, or set jobs to 1 (--jobs 1)") from None


def _run_one(settings: dict[str, Any], index: int, runs: int, report_progress: Progress) -> Report:
    """Make the run number `index`, counted from 0, of `runs`."""
    report = run(**settings)
    report_progress(index + 1, runs)
    return report


def _check_picklable(runs: Sequence[dict[str, Any]]) -> None:
    try:
        pickle.dumps(runs)
    except Exception as error:
        raise ValueError(
            f"with several jobs, give specs, or functions that a module defines at its top: {error}"
        ) from None
