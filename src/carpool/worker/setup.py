"""What a worker is told before it loads its model (pickled), and what parent and worker have agreed
on.
"""

from __future__ import annotations

import signal
from typing import Final

import msgspec

from carpool.worker.affinity import Cores
from carpool.worker.program import Program

DUMP_SIGNAL = signal.SIGQUIT
"""Makes a worker write the stacks of all its threads to stderr, whatever it is doing; the same
signal as a JVM's.
"""


def process_name(stage: str, place: int) -> str:
    """Return the name of a worker's process, thread or task."""
    return f"carpool {stage}/{place}"


LEAVING: Final = b"leaving"
"""The state that a worker reports which has come by itself and is about to go."""

NOWHERE = Program([], "", None, None)
"""For workers that come by themselves, and have the program already."""


class Setup(msgspec.Struct, frozen=True):
    """A worker's stage, its place in it, and how to call the model.

    Attributes:
        program: Where the parent finds its modules.
        model: The packed model, see `program.pack_model`.
        stage: The name of the stage.
        place: The worker's place in the stage.
        batched: Whether `predict` takes lists.
        allowed_batch_sizes: How long these lists may be; None for any length.
        warm_up: Numbers of examples to run at a time and to time, rising.
        is_first: Whether the stage is the first one, which decodes requests.
        is_last: Whether the stage is the last one, which encodes responses.
        isolate_errors: Whether a batch that raises is halved to find the guilty items.
        retry_on_oom: Whether a batch that runs out of memory is run again in smaller calls.
        oom_errors: Full names of exceptions that mean out of memory, see `retry.Retrier`.
        cores: Where the worker runs; None leaves the affinity alone.
        log_level: The parent's log level if its program has set up logging, else None.
        warm_up_shapes: Calls with one example over and over that are run and timed, too: the
            example's position, and how often it is in the call.
        most_examples: How many examples of a model that answers in parts may run together.
        sends_metrics: Whether the worker sends the metrics of its model's own over its connection.
    """

    program: Program
    model: bytes
    stage: str
    place: int
    batched: bool
    allowed_batch_sizes: tuple[int, ...] | None
    warm_up: tuple[int, ...]
    is_first: bool
    is_last: bool
    isolate_errors: bool
    retry_on_oom: bool
    oom_errors: tuple[str, ...] | None
    cores: Cores | None
    log_level: int | None
    most_examples: int = 1
    warm_up_shapes: tuple[tuple[int, int], ...] = ()
    sends_metrics: bool = False
