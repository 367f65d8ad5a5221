"""What is noted of one request while it is inside, for the log and for traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carpool.engine.observe.picture import Branch


@dataclass(slots=True)
class InStage:
    """How a request fared in one stage; in a graph, at one place.

    Attributes:
        stage: The name of the stage, or of the place.
        arrived: When it entered the stage.
        started: When a worker got to its batch.
        batch: The id of the batch, unique in its stage.
        n: How many requests the batch had.
        left: When it left the stage; None if that is not known, as in a row of stages, where it
            came to the next one then, or while it is there.
        branches: In which branches of a graph the place is, the outermost first.
        items: How many of its items came there, where it has become several; the times are from the
            first to the last of them, and the batch is that of the latest.
    """

    stage: str
    arrived: float
    started: float
    batch: int
    n: int
    left: float | None = None
    branches: tuple[Branch, ...] = ()
    items: int = 1


class Notes:
    """What is noted of one request while it is inside.

    Attributes:
        began: When the app got it.
        request_id: Its id, once it is known.
        stages: How it fared in each stage.
        trace: The id of its trace, as W3C has it.
        span: The id of our span in it.
        tracing: The span itself, where spans are made.
    """

    __slots__ = ("began", "request_id", "span", "stages", "trace", "tracing")

    def __init__(self, began: float, trace: bytes, span: bytes) -> None:
        self.began = began
        self.stages: list[InStage] = []
        self.trace = trace
        self.span = span
        self.tracing: Any = None
        self.request_id = b""

    def with_ends(self, now: float) -> list[tuple[InStage, float]]:
        """Return what was noted of each stage, and when the request left it."""
        arrivals = [each.arrived for each in self.stages[1:]] + [now]
        return [
            (each, arrival if each.left is None else each.left)
            for each, arrival in zip(self.stages, arrivals, strict=False)
        ]
