"""carpool's side of `bench.peers.inprocess`, and those that need no package.

    python -m bench.peers.servers.carpool_function SIDE CASE SECONDS

prints seconds per item as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import carpool
from bench.alone.bare_loop import BareLoop
from bench.peers.servers.thread_batchers import Cooperative, OneAtATime, QueueAndWorker
from bench.tools.closed_loop import (
    MAX_BATCH_SIZE,
    Ask,
    AskAsync,
    Function,
    double_async,
    main_of_tasks,
    main_of_threads,
)

FOR_TASKS: dict[str, Callable[[], AskAsync]] = {
    "carpool": lambda: carpool.batch(max_batch_size=MAX_BATCH_SIZE)(double_async),
    "bare_loop": lambda: BareLoop().ask,
}
FOR_THREADS: dict[str, Callable[[Function], Ask]] = {
    "carpool": lambda function: carpool.batch(max_batch_size=MAX_BATCH_SIZE)(function),
    "carpool:greedy": lambda function: carpool.batch(max_batch_size=MAX_BATCH_SIZE, policy="greedy")(function),
    "cooperative": Cooperative,
    "queue": QueueAndWorker,
    "lock": OneAtATime,
}


def main(side: str, case: str, seconds: float) -> None:
    if case.startswith("task"):
        main_of_tasks(FOR_TASKS[side], case, seconds)
    else:
        main_of_threads(FOR_THREADS[side], case, seconds)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
