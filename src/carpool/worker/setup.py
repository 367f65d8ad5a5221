"""What parent and worker have agreed on, and what a worker is told before it loads its model: this travels pickled."""

from __future__ import annotations

import signal

import msgspec

from carpool.worker.affinity import Cores
from carpool.worker.program import Program

DUMP_SIGNAL = signal.SIGQUIT
"""Has a worker write the stacks of all its threads to stderr, whatever it is doing; as with a JVM."""


def process_name(stage: str, worker: int) -> str:
    """What a worker's process, thread or task is called."""
    return f"carpool {stage}/{worker}"


class Setup(msgspec.Struct, frozen=True):
    """A worker's stage, its place in it, and how to call the model.

    Attributes:
        model: the packed model, see `program.pack_model`.
        batched: whether `predict` takes lists.
        warm_up: numbers of examples to run at a time and to time, rising.
        allowed_batch_sizes: how long these lists may be; None for any length.
        isolate_errors, halve, oom_errors: what to do with calls that fail, see `retry.Retrier`.
        first, last: whether the stage decodes requests, and whether it encodes responses.
        cores: where the worker runs; None leaves the affinity alone.
        log_level: the parent's, if its program has set up logging; None otherwise.
    """

    program: Program
    model: bytes
    stage: str
    worker: int
    batched: bool
    allowed_batch_sizes: tuple[int, ...] | None
    warm_up: tuple[int, ...]
    first: bool
    last: bool
    isolate_errors: bool
    halve: bool
    oom_errors: tuple[str, ...] | None
    cores: Cores | None
    log_level: int | None
