"""What is noted of one request while it is inside, for the log and for traces."""

from __future__ import annotations

from typing import Any, NamedTuple


class InStage(NamedTuple):
    """How a request fared in one stage.

    Attributes:
        stage: The name of the stage.
        arrived: When it entered the stage.
        started: When a worker got to its batch.
        batch: The id of the batch, unique in its stage.
        n: How many requests the batch had.
    """

    stage: str
    arrived: float
    started: float
    batch: int
    n: int


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
