"""Which worker of its stage runs the present code, so that a model can ask.

Threads and tasks of one process each have their own answer. In a worker process there is one answer
for all of its threads, those that the model starts included.
"""

from __future__ import annotations

import contextvars

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
    """Take note of the worker that this process is."""
    global _of_process
    _of_process = place
