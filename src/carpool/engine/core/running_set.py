"""The running set of a worker of a stage of steps, and the messages between it and the coordinator:
an `Order`, which takes effect between two steps, and a `SetReport`, which follows each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Final, NamedTuple

from carpool.engine.request import Request, Stream

# What a worker does after a step, as the last order that it has seen says.
GO_ON: Final = 0  # it makes the next step at once, unless an order has come
ON_LEAVING: Final = 1  # it stops for the next order if a stream has ended in this step
EVERY_STEP: Final = 2  # it always stops for the next order

# What a worker says of a stream after a step.
MORE: Final = 0  # a part, and more will come
LAST: Final = 32  # a part, or the whole answer of a caller that takes it; then nothing
END: Final = 33  # nothing more comes
BACK: Final = 34  # memory ran out: the worker has stopped the stream, which waits to join again
FAILED: Final = 35  # the stream has failed


class Order(NamedTuple):
    """What a worker is to do from its next boundary on, in the order of the attributes.

    Attributes:
        number: 1 for the first order to this worker, and one more for each further one.
        join: Requests to start, or to resume where `stream.kept` is not empty.
        pause: Ids of streams, perhaps just joined, that keep their places and are not stepped.
        resume: Ids of those that are stepped again.
        stop_when: After which steps it stops for the next order: GO_ON, ON_LEAVING or EVERY_STEP.
    """

    stage: int
    place: int
    number: int
    leave: Sequence[int]
    join: Sequence[Request]
    pause: Sequence[int]
    resume: Sequence[int]
    stop_when: int


class Parts(NamedTuple):
    """A worker's report of its streams after a step, in columns of one length.

    A stream is in them once, or twice: with a part, and then with its end.

    Attributes:
        kinds: What is said of each: MORE, LAST, END, BACK or FAILED.
        values: The part of each, its whole answer if its caller takes that, or the exception with
            which it has failed.
        kept: What is kept of each part, where the model can resume and callers get something else;
            else empty.
    """

    ids: Sequence[int] = ()
    kinds: Sequence[int] = b""
    values: Sequence[object] = ()
    kept: Sequence[object] = ()

    @property
    def names_twice(self) -> bool:
        """Whether a stream is there twice otherwise than with a part and its end."""
        began: set[int] = set()
        ended: set[int] = set()
        for id, kind in zip(self.ids, self.kinds, strict=True):
            if id in ended or (kind == MORE and id in began):
                return True
            (began if kind == MORE else ended).add(id)
        return False


NOTHING: Final = Parts()


class SetReport(NamedTuple):
    """What a worker says after each step, and after an order that leaves it nothing to step.

    Attributes:
        seen: The number of the last order that it has followed.
        parts: What has come of its streams; those that made no part are left out.
        rows: How many streams were stepped; 0 if there was no step.
        step_s: Seconds that the step took, with what lies between it and the one before.
        length: Units of work of the streams that were started before it; 0 if none was.
        start_s: Seconds that starting them took.
    """

    stage: int
    place: int
    seen: int
    stopped: bool
    parts: Parts = NOTHING
    rows: int = 0
    step_s: float = 0.0
    length: int = 0
    start_s: float = 0.0


def stream_of(request: Request) -> Stream:
    stream = request.stream
    assert stream is not None
    return stream


class RunningSet:
    """The streams of one worker, as the coordinator sees them: those that no order has sent away.

    Attributes:
        members: Its streams, by id, in the order in which they joined.
        starting: The sum of the lengths of those that have joined since the last order that the
            worker has followed.
        resting: How many members it has the order not to step.
        unfollowed: The orders by which streams join, rest or go on, and which the worker has not
            followed yet.
        gone: For each stream that an order sends away, the number of this order, until the worker
            has followed it.
        pauses_changed: Whether pauses have changed since the last order.
        awaits_suspect: Whether all members are to rest, as a suspect is about to join, once the
            worker has followed that order.
        suspect: The member that runs alone on probation, while the others rest; None if none does.
        suspect_order: The number of the order by which it joined: it had no part in steps that were
            reported before this was followed.
        untested: The size that the set has grown to beyond the limit, to see whether it fits; else
            0.
        reported_at: The time of the last report of the worker, or of the last order to it.
        unwanted_since: Since when no caller waits for the call under way, as all streams that had
            joined before it have gone; infinity while one is there. Those that have joined since do
            not count: they wait for the call's end, whatever it makes.
        given_up: Why the worker is taken to hang; empty if it is not.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self.members: dict[int, Request] = {}
        self.size = self.number = self.seen = self.stop_when = self.starting = self.resting = self.untested = 0
        self.is_stopped = True
        self.steps = 0
        self.unfollowed: list[Order] = []
        self.to_join: list[Request] = []
        self.to_leave: list[int] = []
        self.gone: dict[int, int] = {}
        self.pauses_changed = self.awaits_suspect = False
        self.suspect: Request | None = None
        self.suspect_order = 0
        self.reported_at = -inf
        self.unwanted_since = -inf
        self.given_up = ""

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.members.values())

    def __repr__(self) -> str:
        return f"<RunningSet place={self.place} rows={len(self)} size={self.size} order={self.number}/{self.seen}>"

    @property
    def active(self) -> int:
        """How many streams its next step makes parts for."""
        return len(self.members) - self.resting

    @property
    def is_stepping(self) -> bool:
        return not self.is_stopped

    @property
    def has_newcomers(self) -> bool:
        """Whether the step under way may make the first part of a stream."""
        if self.is_stopped:
            return False
        return any(not (s := stream_of(r)).parts and not s.is_collected for r in self.members.values())

    @property
    def owes_report(self) -> bool:
        """Whether the worker owes a report without a further order."""
        return self.seen < self.number or not self.is_stopped

    @property
    def is_wanted(self) -> bool:
        """Whether a member waits for the call under way, having joined before it."""
        return any(stream_of(request).joined <= self.reported_at for request in self.members.values())

    def note_report(self, now: float) -> None:
        """Note that a report has come: from now on the worker's call is for all members."""
        self.reported_at = now
        if self.members:
            self.unwanted_since = inf

    def note_step(self, report: SetReport) -> None:
        while self.unfollowed and self.unfollowed[0].number <= report.seen:
            self._note_followed(self.unfollowed.pop(0))
        if report.rows:
            self.steps += 1

    def _note_followed(self, order: Order) -> None:
        for request in order.join:
            stream = stream_of(request)
            stream.first_step, stream.rests_since = self.steps, -1
        for id in order.pause:
            if id in self.members:
                stream_of(self.members[id]).rests_since = self.steps
        for id in order.resume:
            if id in self.members:
                stream = stream_of(self.members[id])
                stream.first_step += self.steps - stream.rests_since
                stream.rests_since = -1

    def note_loss(self, stream: Stream) -> None:
        """Note what a stream has lost with its worker, and for how many steps it is on probation.

        The stream makes the steps again that no part came from, as all those of a collected one. If
        a second worker dies within one step of where the first died, it repeats those steps alone.
        Else it makes one step alone, as more would take too long after kills from outside.
        """
        made = self._steps_of(stream)
        lost = max(0, made - (stream.parts - stream.first_parts))
        stream.probation = lost + 1 if stream.redo > 0 and abs(made - stream.redo) <= 1 else 1
        stream.redo = lost

    def _steps_of(self, stream: Stream) -> int:
        """Return how many steps a stream has made in this set; those in which it rests are none."""
        if stream.first_step < 0:
            return 0
        return (self.steps if stream.rests_since < 0 else stream.rests_since) - stream.first_step

    def spare_s(self, now: float) -> float:
        """Return for how long all may stand still before a part is late; infinity for ever."""
        return min([stream_of(request).next_due for request in self.members.values()], default=inf) - now

    def await_suspect(self, awaits: bool) -> None:
        """Have all members rest from the next order on, or no longer."""
        if awaits != self.awaits_suspect:
            self.awaits_suspect = awaits
            self.pauses_changed = True

    def change_rests(self, pause: list[int], resume: list[int]) -> None:
        """Put the ids of those that are to rest from the next order on into `pause`, and of those
        that are to run again into `resume`.

        A stream rests while its caller does not want parts, or while another one is on probation.
        """
        self.pauses_changed = False
        is_suspect_time = self.suspect is not None or self.awaits_suspect
        for request in self.members.values():
            stream = stream_of(request)
            rests = request is not self.suspect if is_suspect_time else stream.is_paused
            if rests != stream.is_resting:
                stream.is_resting = rests
                self.resting += 1 if rests else -1
                (pause if rests else resume).append(request.id)
