"""Checks of the settings of a stage against one another and against its model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from carpool.engine.call.invoke import is_async
from carpool.engine.wire.frame import MAX_ITEMS
from carpool.engine.worker.place import count_entries, parse_devices
from carpool.model import AnyModel, Traits, name_of
from carpool.service.checks import check_callable, count_environments

_ONLY_FOR_PROCESSES = {
    "join": "workers that join are processes: a stage with join=True cannot have {run_in}, so leave out one of them",
    "env": 'env is for worker processes: a stage with run_in="thread" or "loop" has the environment of this process',
    "devices": (
        "devices is for worker processes, and workers with {run_in} share what this process sees: choose in the"
        ' model\'s setup, such as f"cuda:{{carpool.worker_index()}}"'
    ),
    "max_memory_mb": "max_memory_mb is for worker processes: workers with {run_in} share the memory of this process",
}
"""Why a setting has no meaning for workers that are threads or tasks of this process."""


def default_workers(cpus: Any, env: Any, devices: Any) -> int:
    """Return how many workers the settings suggest that have an entry for each."""
    if cpus is not None:
        return count_entries(cpus) or 1
    if devices is not None and count_environments(env) is None:
        return len(parse_devices(devices))
    return count_environments(env) or 1


def check_run_in(run_in: str, model: AnyModel, given: Collection[str]) -> None:
    """Check where workers run against the model, and against settings that say more of it.

    Args:
        run_in: What was given.
        model: The stage's.
        given: The settings of the workers that are not left out.

    Raises:
        ValueError: There is no such place, or a setting has no meaning there.
        TypeError: The model cannot run there.
    """
    if run_in not in ("process", "thread", "loop"):
        raise ValueError(f'run_in must be "process", "thread" or "loop", not {run_in!r}')
    if is_async(model) and run_in != "loop":
        raise TypeError(f'{name_of(model)} is async: run it with run_in="loop", or write it with plain def')
    if run_in == "loop" and not is_async(model):
        raise TypeError(
            f'{name_of(model)} is a plain function and would block the loop: run it with run_in="thread", or write it'
            " with async def"
        )
    if run_in != "process":
        for name, why in _ONLY_FOR_PROCESSES.items():
            if name in given:
                raise ValueError(why.format(run_in=f'run_in="{run_in}"'))
    if run_in == "loop" and "cpus" in given:
        raise ValueError(
            'cpus ties processes and threads to cores; a stage with run_in="loop" runs where its loop does'
        )


def check_fits_frame(max_batch_size: int, max_queue_size: int, *, is_weighed: bool) -> None:
    """Check that one message to a worker process can hold a batch.

    Where batches are limited by the sizes of items, their number is limited by the queue only.
    """
    setting, most = ("max_queue_size", max_queue_size) if is_weighed else ("max_batch_size", max_batch_size)
    if min(max_batch_size, most) > MAX_ITEMS:
        raise ValueError(
            f"{setting} ({most}) must be at most {MAX_ITEMS}, which is what one message to a worker process holds;"
            ' a stage with run_in="thread" has no such limit'
        )


def check_allowed_sizes(sizes: Sequence[int], max_batch_size: int | None, *, has_size: bool) -> None:
    """Check the numbers of items that a model may be called with. Raises ValueError."""
    if max_batch_size is None:
        raise ValueError("allowed_batch_sizes is for stages that take batches: give max_batch_size, too")
    if has_size:
        raise ValueError("allowed_batch_sizes counts items, and size= does not: leave out one of them")
    if sizes[-1] != max_batch_size:
        raise ValueError(f"the last of allowed_batch_sizes ({sizes[-1]}) must be max_batch_size ({max_batch_size})")


def check_size(size: Callable[[Any], int], max_batch_size: int | None, traits: Traits) -> None:
    """Check a function that weighs items. Raises ValueError or TypeError."""
    check_callable("size", size, "an item")
    if max_batch_size is None:
        raise ValueError("size is for stages that take batches: give max_batch_size, the largest sum of sizes, too")
    if traits.accepts:
        raise ValueError(
            f"size cannot weigh bodies that only {traits.name}.decode can read: leave out size= or accepts"
        )
