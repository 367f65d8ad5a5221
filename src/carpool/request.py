"""One caller's ask on its way through the stages: the noun that every other file speaks of.

The core moves requests between states and never looks into `item`; `format` and `accept` belong to the wire
(see `wire/payload.py`). All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Protocol

# States. A request is answered exactly once: whoever moves it to DONE owns the answer.
NEW: Final = 0
QUEUED: Final = 1
RUNNING: Final = 2
DONE: Final = 3

Lane = tuple[int, Hashable, int]
"""(priority, key, bucket): requests of one lane are interchangeable but for their deadlines."""

DEFAULT_LANE: Final[Lane] = (0, None, 0)

Trail = tuple["Trail | None", float, float]
"""(trail of the stages before, when it was handed to a worker of this one, and left)."""


class Caller(Protocol):
    """Whoever waits for a request's answer: a future, a place in a stream, an HTTP connection."""

    def answered(self, request: Request) -> None:
        """Take the answer: `request.error` if it is not None, else `request.result`. Must not raise."""


class Request:
    """One caller's ask.

    Attributes:
        id: unique within its service; pairs answers with callers.
        item: what the next stage gets; opaque to the core.
        deadline: absolute time after which nobody waits for it any more.
        due: absolute time by which it should be answered: its SLO, or its deadline where that is earlier.
        caller: told of the answer; None once the caller has gone.
        nbytes: bytes it holds in memory while queued; size: how much of a batch it takes up.
        lane: priority, key and bucket: its place in the queue.
        bulk: whether it is one of many that only should be done in the end: no SLO counts for it.
        patient: whether it waits while the queue is full, instead of being refused.
        format: how `item` is to be decoded; accept: how the last stage is to encode the result.
        admitted: when it entered the service; arrived: when it entered its present stage.
        losses: how many workers of its present stage were lost while they had it.
        trail: times in the stages before the present one (see `core/trail.py`); not set in the first.
        result, error: the answer, once the state is DONE.
    """

    __slots__ = (
        "accept",
        "admitted",
        "arrived",
        "bulk",
        "caller",
        "deadline",
        "due",
        "error",
        "format",
        "id",
        "item",
        "lane",
        "losses",
        "nbytes",
        "patient",
        "result",
        "size",
        "stage",
        "state",
        "trail",
    )

    trail: Trail

    def __init__(self, item: object, deadline: float, caller: Caller | None = None, nbytes: int = 0) -> None:
        self.item = item
        self.deadline = self.due = deadline
        self.caller = caller
        self.nbytes = nbytes
        self.size = 1
        self.lane = DEFAULT_LANE
        self.bulk = self.patient = False
        self.format = 0
        self.accept = 0
        self.id = 0
        self.admitted = 0.0
        self.arrived = 0.0
        self.losses = 0
        self.stage = 0
        self.state = NEW
        self.result: object = None
        self.error: Exception | None = None

    def tell(self) -> None:
        """Give the answer, which is there, to whoever waits for it."""
        if self.caller is not None:
            self.caller.answered(self)

    def __repr__(self) -> str:
        state = ("new", "queued", "running", "done")[self.state]
        return f"<Request {self.id} {state} stage={self.stage} deadline={self.deadline:.3f}>"
