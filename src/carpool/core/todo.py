"""What a pipeline tells its driver to do: what each poll returns."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from carpool.core.batch import Batch
from carpool.core.running_set import Order
from carpool.request import Request


class Todo:
    """What a driver must do now.

    Attributes:
        run: Batches to send to their workers; do this first, the workers are idle, or nearly so.
        answer: Requests whose callers are to be told.
        kill: (stage, place) of each worker that hangs.
        wake_at: When to poll again although nothing happens; infinity for never.
        drained: (stage, place) of each worker that was to go and has nothing left: it is to be
            ended.
        orders: What to tell workers of a stage of steps; do this first, too.
        parts: Requests, each with a part of its answer to hand on: do this after `orders`, and
            before `answer`, where those follow that have ended.
    """

    __slots__ = ("answer", "drained", "kill", "run", "wake_at")
    orders: Sequence[Order] = ()
    parts: Sequence[tuple[Request, object]] = ()

    def __init__(self) -> None:
        self.run: list[Batch] = []
        self.answer: list[Request] = []
        self.kill: list[tuple[int, int]] = []
        self.drained: Sequence[tuple[int, int]] = ()
        self.wake_at = inf


class StepTodo(Todo):
    """What a driver must do now where the last stage is one of steps."""

    __slots__ = ("orders", "parts")

    def __init__(self) -> None:
        super().__init__()
        self.orders: Sequence[Order] = ()
        self.parts: Sequence[tuple[Request, object]] = ()
