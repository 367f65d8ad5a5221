"""The streams of a stage of steps: which running set each is in, as they come and go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import NamedTuple

from carpool.core.batch import Attention, Expiry
from carpool.core.batcher import Batcher
from carpool.core.queue import Queue
from carpool.core.running_set import Order, RunningSet, stream_of
from carpool.policy.steps import GreedySteps, Stepped, StepPolicy
from carpool.request import DONE, RUNNING, Request, Stream


class Lost(NamedTuple):
    """The streams of a worker that has gone.

    Attributes:
        blamed: Those that it may have been stepping or starting.
        resting: Those that it had been told not to step.
        untold: Those of which it had not been told.
        suspect: The one that it ran alone, if it did.
        given_up: Why the worker was taken to hang; empty if it was not.
    """

    blamed: list[Request]
    resting: list[Request]
    untold: list[Request]
    suspect: Request | None
    given_up: str


class StageStreams(Batcher):
    """The running sets of a stage, by its workers, and the streams in them and in the queue.

    Args:
        name: The stage's name.
        policy: Decides who joins; owned by this stepper alone.
        queue: Where requests wait.
        rows: Most streams in a running set.
        limit: Most units that the streams of a set may come to hold.
        resumable: Whether the model can go on from the parts that it has made.
        silence_s: How long a stream may be silent: before its first part, and between parts.
        max_stream_s: How long a stream may take in all.
        max_batch_time_s: As for every batcher; a call is one of `start` or `step`.
        patience_s: As for every batcher.
        idempotent: Whether a stream may be started once more.
        weigh: Writes on a request how many units a stream may come to hold that gets this result of
            the stage before; may raise a `CarpoolError`. By default it is 1.
        measure: Returns the bytes that a part holds while it is kept.

    Attributes:
        rows: Most streams in a running set.
        limit: Most units that they may come to hold.
        resumable: Whether the model can go on from the parts that it has made.
        sets: The running set of each worker, by its place.
        orders: Those that are to be sent.
        steps: How many steps were reported.
        parts: How many parts were handed on.
        resumed: How often a stream went on from its parts.
        stray_parts: How many parts came of streams that had left.
        step_s: Smoothed seconds of a step.
    """

    policy: StepPolicy

    def __init__(
        self,
        name: str,
        policy: StepPolicy,
        queue: Queue,
        *,
        rows: int,
        limit: float = inf,
        resumable: bool = False,
        silence_s: float = inf,
        max_stream_s: float = inf,
        max_batch_time_s: float = inf,
        patience_s: float = inf,
        idempotent: bool = True,
        weigh: Callable[[Request, object], None] | None = None,
        measure: Callable[[object], int] | None = None,
    ) -> None:
        super().__init__(
            name,
            policy,
            queue,
            max_batch_time_s=max_batch_time_s,
            patience_s=patience_s,
            idempotent=idempotent,
            weigh=weigh,
        )
        self.rows = rows
        self.limit = limit
        self.resumable = resumable
        self.sets: dict[int, RunningSet] = {}
        self.orders: list[Order] = []
        self.steps = self.parts = self.resumed = self.stray_parts = 0
        self.step_s = 0.0
        self._silence_s = silence_s
        self._max_stream_s = max_stream_s
        self._measure = measure
        self._longest = 1  # the greatest length of a request so far
        self._stay_s = 0.0  # smoothed seconds that a stream spends in a set
        self._ends = 0  # how many streams have left sets
        self._judged_ends = -1  # at which of these it was last judged whether more would fit

    @property
    def idle(self) -> int:
        """How many workers a request could join now."""
        return sum([running.is_open and len(running) < self.rows for running in self.sets.values()])

    @property
    def has_worker(self) -> bool:
        """Whether there is a worker."""
        return bool(self.sets)

    @property
    def is_wanted(self) -> bool:
        """Whether a caller waits for what workers have."""
        return self._running > 0

    @property
    def owed(self) -> list[Request]:
        """The requests that workers have and whose callers wait."""
        return [request for running in self.sets.values() for request in running]

    # -- requests come and go

    def enter(
        self, now: float, requests: Sequence[Request], soonest: float | None = None, nbytes: int | None = None
    ) -> None:
        """Put requests in the queue of this stage; `node` and `arrived` must be set already."""
        for request in requests:
            stream = request.stream
            if stream is None:
                stream = request.stream = Stream(is_collected=True)
            stream.until = min(stream.until, request.admitted + self._max_stream_s)
            stream.heard = request.admitted
            silence_s = inf if stream.is_collected else self._silence_s
            request.deadline = min(request.deadline, stream.until, now + silence_s)
            request.due = min(request.due, request.deadline)
            if stream.length > self._longest:
                self._longest = stream.length
        super().enter(now, requests)

    def put_back(self, now: float, requests: Sequence[Request]) -> None:
        """Let streams wait again, in their old places; they go on from their parts."""
        _detach(requests)
        super().put_back(now, requests)

    def quarantine(self, requests: Sequence[Request]) -> None:
        """Let streams wait again, each to run on probation, as one may have killed its worker."""
        _detach(requests)
        super().quarantine(requests)

    def shorten_probations(self) -> None:
        """Have all that wait to run on probation make one step alone.

        One that had to make many of them was found guilty, so the others that were lost with it are
        most likely innocent.
        """
        for request in self.queue:
            stream_of(request).probation = 1

    def leave(self, now: float, request: Request) -> None:
        """Remove a queued request whose caller has gone; it is now done."""
        self.forget(stream_of(request))
        super().leave(now, request)

    def in_the_way(self, request: Request) -> list[Request]:
        """Return the requests that must give up their places to a new one, if the queue is full.

        Streams that have had parts stay, since their callers have been promised the rest.
        """
        found = super().in_the_way(request)
        return [] if any(stream_of(other).parts for other in found) else found

    def late_unserved(self, now: float, since: float) -> tuple[list[Request], float]:
        """Return the queued requests that are late as no worker has been there `since`.

        Streams that have had parts stay, since their callers have been promised the rest.
        """
        late, next_due = super().late_unserved(now, since)
        return [request for request in late if not stream_of(request).parts], next_due

    def abandon(self, now: float, request: Request) -> None:
        """Note that the caller of a stream in a running set is gone; it is now done.

        The next order sends it away.
        """
        request.state = DONE
        self._send_away(now, self.sets[stream_of(request).place], request)

    def pause(self, now: float, request: Request, is_paused: bool) -> None:
        """Note that a caller wants no more parts for now, or wants them again.

        Meanwhile its stream keeps its place in the set and is not stepped, and no silence counts.
        """
        stream = request.stream
        if stream is None or stream.is_paused == is_paused:
            return
        stream.is_paused = is_paused
        if request.state != RUNNING:
            return
        stream.next_due = inf
        request.deadline = stream.until if is_paused else min(stream.until, now + self._silence_s)
        self.attention_at = min(self.attention_at, request.deadline)
        self.sets[stream.place].is_restless = True

    def may_run_again(self, request: Request) -> bool:
        """Report whether a stream may be started once more, or can go on from its parts."""
        return self.idempotent and (self.resumable or not stream_of(request).parts)

    def _send_away(self, now: float, running: RunningSet, request: Request) -> None:
        """Have the next order tell a worker that a stream has left."""
        if request in running.to_join:
            running.to_join.remove(request)
        else:
            running.to_leave.append(request.id)
            running.gone[request.id] = running.number + 1
        self._take_out(now, running, request)

    def _take_out(self, now: float, running: RunningSet, request: Request, *, is_over: bool = True) -> None:
        """Take a stream out of a running set; its place is free.

        Args:
            now: The time.
            running: The set.
            request: One of its members.
            is_over: Whether it will not run again, so that its parts need not be kept.
        """
        stream = stream_of(request)
        del running.members[request.id]
        running.size -= request.size
        running.resting -= stream.is_resting
        self._running -= 1
        self._ends += 1
        if running.suspect is request:
            running.suspect = None
            running.is_restless = True
        if running.unwanted_since == inf and not running.is_wanted:
            running.unwanted_since = now
        stay_s = now - stream.joined
        self._stay_s += (stay_s - self._stay_s) * (0.1 if self._stay_s else 1.0)
        if is_over:
            self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """Let go of the parts that were kept of a stream which will not run again."""
        if stream.kept:
            self.queue.nbytes -= stream.kept_bytes
            stream.kept_bytes = 0
            stream.kept = []

    # -- workers come and go

    def trained_steps(self, now: float, rows: int, step_s: float, length: int, start_s: float) -> None:
        """Tell the policy of a warm-up, unless steps have been made already: those teach better."""
        if not self.steps:
            self._tell(self.policy.learn, now, Stepped(rows, step_s, length, start_s))

    def _substitute(self) -> StepPolicy:
        return GreedySteps(self.rows, self.policy.part_slo_s)

    def worker_ready(self, place: int) -> None:
        """Note that a worker can take orders from now on."""
        if place in self.sets:
            raise ValueError(f"worker {place} of stage {self.name} is ready already")
        self.sets[place] = RunningSet(place)

    def worker_gone(self, place: int, unsent: Collection[int] = ()) -> Lost | None:
        """Note that a worker is gone, and return its streams, if it was ready.

        Args:
            place: The position of the worker.
            unsent: Streams of which the worker had not been told yet.
        """
        self._places.gone(place)
        running = self.sets.pop(place, None)
        if running is None:
            return None
        lost = Lost([], [], [], running.suspect, running.given_up)
        for request in running:
            if request.id in unsent or request in running.to_join:
                lost.untold.append(request)
            elif stream_of(request).is_resting:
                lost.resting.append(request)
            else:
                lost.blamed.append(request)
                running.note_loss(stream_of(request))
        self._running -= len(running)
        self._ends += len(running)
        return lost

    def members_of(self, place: int, ids: Collection[int]) -> list[Request]:
        """Return those of the streams `ids` that are in the set of a worker."""
        running = self.sets.get(place)
        return [] if running is None else [request for request in running if request.id in ids]

    def drain(self, place: int) -> None:
        """Let no stream join a worker's set any more; those that it has go on."""
        self._places.drain(place)
        if place in self.sets:
            self.sets[place].is_draining = True

    def take_drained(self) -> list[int]:
        """Return, once, the places of workers that were to go and have no streams left."""
        drained = self._places.take_drained([place for place in self.leaving if not self.is_empty(place)])
        for place in drained:
            self.sets.pop(place, None)
        return drained

    def is_empty(self, place: int) -> bool:
        """Report whether a worker has no streams, and has followed all orders."""
        running = self.sets.get(place)
        return running is None or not (running.members or running.owes_report)

    def call_started(self, now: float, place: int, batch_id: int) -> None:
        """Note that a worker has entered user code once more since it last reported."""
        running = self.sets.get(place)
        if running is not None and not running.given_up:
            running.hear(now)

    def spare(self, now: float, place: int) -> None:
        """Count the time of a worker anew that seemed to hang and does not."""
        running = self.sets.get(place)
        if running is not None:
            running.hear(now)
            running.given_up = ""
            self.attention_at = min(self.attention_at, now + self.times.least_s)

    # -- what takes too long

    def attend(self, now: float) -> Attention:
        """Expire requests and find workers that hang; call it once `attention_at` has passed."""
        expired = self._expire_queued(now)
        for request, _ in expired:
            self.forget(stream_of(request))
        hung = []
        self.attention_at = self.queue.earliest_deadline
        for running in self.sets.values():
            for request in [request for request in running if request.deadline <= now]:
                started = stream_of(request).joined
                self.abandon(now, request)
                expired.append(Expiry(request, started))
            for request in running:
                if request.deadline < self.attention_at:
                    self.attention_at = request.deadline
            if running.owes_report and not running.given_up:
                size = max(1, len(running))
                running.given_up = self._why_given_up(now, running.heard, running.unwanted_since, size)
                if running.given_up:
                    hung.append(running.place)
        return Attention(expired, hung)

    def hint(self, now: float, request: Request, started: float | None) -> str:
        """Return what else to tell a caller whose time is up."""
        stream = stream_of(request)
        if not stream.parts:
            return ""
        return f"; of {stream.parts} parts the last one came {now - stream.heard:.3f} s ago"

    # -- how long requests wait

    def predicted_wait_s(self, now: float, ahead: float) -> float:
        """Return how long a request waits that has `ahead` queued ahead of it.

        It goes by how long streams have stayed, and is rather too short than too long.
        """
        most = self.rows if self.limit == inf else min(self.rows, self.limit)
        free = sum([most - (len(running) if self.limit == inf else running.size) for running in self.sets.values()])
        if ahead < free:
            return 0.0
        return (ahead - free + 1) * self._stay_s / (most * max(1, len(self.sets)))

    def longest_wait_s(self, more: int) -> float:
        """Return a bound on a wait and the first part after it, if `more` units came now."""
        return self.predicted_wait_s(0.0, self.queue.size + more) + self.times.usual_s

    def expected_s(self, now: float) -> float:
        """Return how long a request that came now would wait for its first part."""
        return self.predicted_wait_s(now, self.queue.size) + self.times.usual_s


def _detach(requests: Sequence[Request]) -> None:
    """Note that streams are in no running set any more, and may join one again."""
    for request in requests:
        stream = stream_of(request)
        stream.is_resting = False
        stream.next_due = inf
        stream.place = -1
