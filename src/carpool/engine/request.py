"""A request is one item of one caller on its way through the stages.

The core moves requests between states and never looks into `item`; `format` and `accept` belong to
the wire (see `wire/payload.py`). All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf
from typing import Any, Final, NamedTuple, Protocol

# States. A request is answered exactly once: whichever code moves it to DONE owns the answer.
NEW: Final = 0
QUEUED: Final = 1
RUNNING: Final = 2
DONE: Final = 3


class Lane(NamedTuple):
    """A part of a queue: requests of one lane differ by their deadlines only.

    Attributes:
        priority: Lanes of higher priority go first.
        bucket: Only requests of one bucket, and with equal keys, may share a batch.
        source: The node of a graph at which they wait, in a stage that has several; else None.
    """

    priority: int
    key: Hashable
    bucket: int
    source: Hashable = None


DEFAULT_LANE: Final = Lane(0, None, 0)

Trail = tuple["Trail | None", str, float, float]
"""The trail of the stages before, then the name of this stage, when the request was handed to a
worker of it, and when it left."""


class Caller(Protocol):
    """Whatever waits for a request's answer: a future, a thread, a place in a stream.

    HTTP exchanges and awaited requests have none: they override `Request.tell`.
    """

    def answered(self, request: Request) -> None:
        """Take the answer: `request.error` if it is not None, else `request.result`.

        Must not raise.
        """


class PartTaker(Caller, Protocol):
    """A caller that takes the answer part by part; `answered` is called at the end."""

    def take_part(self, request: Request, part: object) -> None:
        """Take the next part of the answer. Must not raise."""


class Stream:
    """How far the answer of a request has come that is made step by step.

    Whoever makes the request sets the first four. The last four belong to `observe/snapshot.py`,
    `is_paused` to `core/core.py`, and all else to `core/stepper.py`.

    Attributes:
        length: Units of work before the first part.
        is_collected: Whether the worker collects the parts, so that the caller gets the whole
            answer at once.
        until: Absolute time at which the answer must be complete; infinity if the caller has set no
            time-out of its own.
        is_told_both: Whether the caller takes parts, and the whole answer as well.
        parts: How many parts were handed on.
        kept: These parts, where the model can resume; else empty.
        next_due: When the next part should be there; infinity before the first part and while the
            stream pauses.
        first_step: How many steps the worker had made when the stream joined, and those since in
            which it has rested; -1 until then.
        first_parts: How many parts had been handed on when it joined.
        redo: How many steps it had lost when its worker was lost last, that no part came from.
        probation: How many steps it is to make alone after that.
        part_at: When its last part came; before that, when it was admitted.
        is_paused: Whether its caller has asked for no more parts for now.
        is_resting: Whether its worker has the order not to step it.
        rests_since: How many steps the worker had made when it followed that; -1 unless it rests.
        first_at: When its first part came, put off by its pauses since; infinity before.
        last_at: When the last part came, or the stream went on after a pause; minus infinity before
            the first.
        longest_gap_s: The longest distance of two parts so far, without pauses.
        paused_at: Since when its caller has wanted none; infinity while it does.
    """

    __slots__ = (
        "first_at",
        "first_parts",
        "first_step",
        "is_collected",
        "is_paused",
        "is_resting",
        "is_told_both",
        "joined",
        "kept",
        "kept_bytes",
        "last_at",
        "length",
        "longest_gap_s",
        "next_due",
        "part_at",
        "parts",
        "paused_at",
        "place",
        "probation",
        "redo",
        "rests_since",
        "until",
    )

    def __init__(self, length: int = 1, is_collected: bool = False, until: float = inf) -> None:
        self.length = length
        self.is_collected = is_collected
        self.until = until
        self.is_told_both = False
        self.parts = 0
        self.kept: list[object] = []
        self.kept_bytes = 0
        self.next_due = inf
        self.place = self.first_step = self.rests_since = -1
        self.first_parts = self.redo = 0
        self.probation = 1
        self.joined = 0.0
        self.part_at = 0.0
        self.is_paused = self.is_resting = False
        self.first_at = self.paused_at = inf
        self.last_at = -inf
        self.longest_gap_s = 0.0

    def __repr__(self) -> str:
        paused = " paused" if self.is_paused else ""
        return f"<Stream place={self.place} parts={self.parts}{paused}>"


class Request:
    """One item of one caller, and what becomes of it.

    Attributes:
        id: Unique within its service; 0 until the request is admitted.
        item: What the next stage gets; opaque to the core.
        deadline: Absolute time after which nobody waits for the answer any more. In a stage that
            answers in parts the stepper moves it with each part, up to `stream.until`.
        due: Absolute time by which the request should be answered: by its SLO, or by its deadline
            where that is earlier.
        caller: Gets the answer; None if it has gone, or where the request takes it itself.
        nbytes: How many bytes it holds in memory while it is queued.
        size: How much of a batch it takes up.
        length: How long its item is, as `length=` of its present stage says; 1 where there is none.
        lane: Its priority, key and bucket, which give its place in the queue.
        bulk: Whether it only has to be done in the end, without the service's SLO.
        patient: Whether it waits while the queue is full, instead of being refused.
        format: How `item` is to be decoded.
        accept: How the last stage is to encode the result.
        admitted: When it came to the service; not set before.
        arrived: When it came to its present stage; not set before.
        losses: How many workers of its present stage were lost while they had it.
        node: Where in the graph of its service it is (see `core/graph.py`); None before it is
            admitted.
        state: NEW, QUEUED, RUNNING or DONE.
        stream: How far its answer has come, where the last stage makes it step by step; None
            elsewhere.
        trail: Times in the stages before the present one (see `core/journal.py`); not set while the
            request is in the stage with which its service begins.
        result: The answer, once the state is DONE and there is no error.
        error: Why there is no result; None if there is one.
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
        "length",
        "losses",
        "nbytes",
        "node",
        "patient",
        "result",
        "size",
        "state",
        "stream",
        "trail",
    )

    admitted: float
    arrived: float
    trail: Trail

    def __init__(self, item: object, deadline: float, caller: Caller | None = None, nbytes: int = 0) -> None:
        # one assignment a line: chained ones take longer
        self.item = item
        self.deadline = deadline
        self.due = deadline
        self.caller = caller
        self.nbytes = nbytes
        self.size = 1
        self.length = 1
        self.lane = DEFAULT_LANE
        self.bulk = False
        self.patient = False
        self.format = 0
        self.accept = 0
        self.id = 0
        self.losses = 0
        self.node: Any = None
        self.state = NEW
        self.stream: Stream | None = None
        self.result: object = None
        self.error: Exception | None = None

    def tell(self) -> None:
        """Give the answer, which must be there, to the caller if it has not gone."""
        if self.caller is not None:
            self.caller.answered(self)

    def tell_part(self, part: object) -> None:
        """Hand a part of the answer to the caller, if it has not gone."""
        if self.caller is not None:
            self.caller.take_part(self, part)  # type: ignore[attr-defined] # only a `PartTaker` asks for parts

    @property
    def companions(self) -> Sequence[Request]:
        """The requests that are admitted together or not at all, if this is one of several."""
        return ()

    def __repr__(self) -> str:
        state = ("new", "queued", "running", "done")[self.state]
        at = "" if self.node is None else f" at {self.node.name}"
        return f"<Request {self.id} {state}{at} deadline={self.deadline:.3f}>"
