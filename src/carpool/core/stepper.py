"""The stepper of a stage that answers in parts: a queue, a policy, a running set for each worker.

A worker steps its set without being asked; each step makes a part for every stream of the set, or
for some. An `Order` (who leaves, joins, pauses, goes on) takes effect at the worker's next
boundary, which lies between two steps, and a `SetReport` follows each step. A stream is a `Request`
whose slot `stream` holds a `Stream`; ids are those of requests, `place` is that of the worker.

Promises, whatever the policy says:

* no set is above its limits (`rows` streams, `limit` units that they may come to hold), from the
  order that joins to the report that ends; one that is larger than the limit runs alone;
* a part counts only for a stream of that worker's set, and nothing comes after an end;
* no stream joins after its deadline;
* a stream that has left is out before the next step that has not begun;
* a stream that has had parts runs again only where the model can resume it.

The calls, which `core/pipeline.py` makes for drivers (events first, then what to do):

    Stepper(name, policy, queue, *, rows, limit=inf, resumable=False, silence_s=inf,
            max_stream_s=inf, max_batch_time_s=inf, patience_s=inf, idempotent=True, weigh=None,
            measure=None)
    enter(now, requests)                          # Pipeline.submit(now, requests)
    leave(now, request), abandon(now, request)    # Pipeline.cancel(now, request)
    pause(now, request, is_paused)                # Pipeline.pause(now, request, is_paused)
    reported(now, report) -> (parts, ended)       # Pipeline.reported(now, report)
    worker_ready(place)                           # Pipeline.worker_ready(stage, place)
    worker_gone(now, place, unsent) -> Lost       # Pipeline.worker_lost, Pipeline.worker_left
    drain(place), is_empty(place)                 # Pipeline.drain(stage, place); see `Todo.drained`
    trained_steps(rows, step_s, length, start_s)  # Pipeline.trained_steps(...); a warm-up
    poll(now, refuse)                             # Pipeline.poll(now); see `Todo`

    Order(stage, place, number, join, leave, pause, resume, ask)
    SetReport(stage, place, seen, stopped, parts, rows, step_s, length, start_s, returned)
    Part(id, value, last, error)

What a worker does with an order: those that leave are stopped, those that join are started
(`start`, or `resume` with `request.stream.kept` where that is not empty) in one call, then pauses
and resumptions are noted, then it steps all that do not pause. It reports after each step. An
order that leaves it nothing to step is reported too, with `rows` = 0 and `stopped`. What it does
after a step depends on the `ask` of the last order that it has seen: `GO_ON` (run ahead),
`ON_LEAVING` (stop for the next order if a stream has ended in this step) or `EVERY_STEP` (always
stop). It also stops when it has nothing to step. A worker that has stopped reads orders until it
has something to step; the coordinator answers a report with `stopped` at once.

When memory runs out, a worker stops the newest half of its streams (where it cannot resume, those
without parts first) and names them as `returned`; a stream that runs out alone fails instead.

A stream with `is_collected` hands on no parts: its worker keeps them and sends the whole answer as
the value of one `Part` with `last`. If its worker is lost it starts again, as nothing of it has
been told.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Final, NamedTuple

from carpool.core.batch import Attention, Expiry
from carpool.core.batcher import Batcher
from carpool.core.quarantine import acquit
from carpool.core.queue import Queue, Suspect
from carpool.core.running_set import (
    EVERY_STEP,
    GO_ON,
    ON_LEAVING,
    Order,
    Part,
    RunningSet,
    SetReport,
    stream_of,
)
from carpool.errors import ModelError
from carpool.policy.base import TOO_LATE
from carpool.policy.steps import StepPolicy
from carpool.request import DONE, RUNNING, Lane, Request, Stream

__all__ = ["EVERY_STEP", "GO_ON", "ON_LEAVING", "Lost", "Order", "Part", "RunningSet", "SetReport", "Stepper"]

_STOP_S: Final = 150e-6  # what it costs that a worker stops for its next order
_STOP_SHARE: Final = 0.05  # of a step, which a stop may cost
_LATEST: Final = 5.0  # paces; where a stream further behind its goal is counted from anew, as nothing can save it


class Lost(NamedTuple):
    """The streams of a worker that has gone.

    Attributes:
        blamed: those that it may have been stepping or starting.
        resting: those that it had been told not to step.
        untold: those of which it had not been told.
        suspect: the one that it ran alone, if it did.
        given_up: why the worker was taken to hang; empty if it was not.
    """

    blamed: list[Request]
    resting: list[Request]
    untold: list[Request]
    suspect: Request | None
    given_up: str


class Stepper(Batcher):
    """One stage's decisions, where requests join and leave a running set at every step.

    It is a batcher for the pipeline, and has no batches: `next_batch` writes orders.

    A stream whose worker was lost runs again on probation: alone, for its start and one step, while
    all others of the set rest. So only that stream is to blame if a second worker is lost. If it
    has to make steps again of which no part tells, and a second worker is lost with it in company
    before it has made them, it makes all of them alone (`RunningSet.note_loss`).

    Args:
        name: the stage's name.
        policy: decides who joins; owned by this stepper alone.
        queue: where requests wait.
        rows: most streams in a running set.
        limit: most units that the streams of a set may come to hold.
        resumable: whether the model can go on from the parts that it has made.
        silence_s: how long a stream may be silent: before its first part, and between parts.
        max_stream_s: how long a stream may take in all.
        max_batch_time_s: as for every batcher; a call is one of `start` or `step`.
        patience_s: as for every batcher.
        idempotent: whether a stream may be started once more.
        weigh: writes on a request how many units a stream may come to hold that gets this result of
            the stage before; may raise a `CarpoolError`. By default it is 1.
        measure: returns the bytes that a part holds while it is kept.

    Attributes:
        rows: most streams in a running set.
        limit: most units that they may come to hold.
        resumable: whether the model can go on from the parts that it has made.
        sets: the running set of each worker, by its place.
        orders: those that are to be sent.
        steps: how many steps were reported.
        parts: how many parts were handed on.
        resumed: how often a stream went on from its parts.
        stray_parts: how many parts came of streams that had left.
        step_s: smoothed seconds of a step.
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

    def __repr__(self) -> str:
        return f"<Stepper {self.name} queued={len(self.queue)} running={self._running} sets={len(self.sets)}>"

    @property
    def idle(self) -> int:
        """How many workers a request could join now."""
        return sum([running.is_open and len(running) < self.rows for running in self.sets.values()])

    @property
    def is_wanted(self) -> bool:
        """Whether a caller waits for what workers have."""
        return self._running > 0

    @property
    def owed(self) -> list[Request]:
        """The requests that workers have and whose callers wait."""
        return [request for running in self.sets.values() for request in running]

    # -- requests come and go

    def enter(self, now: float, requests: Sequence[Request], soonest: float | None = None) -> None:
        """Put requests in the queue of this stage; `stage` and `arrived` must be set already."""
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

    # -- workers come and go

    def trained_steps(self, rows: int, step_s: float, length: int, start_s: float) -> None:
        """Tell the policy of a warm-up, unless steps have been made already: those teach better."""
        if not self.steps:
            self.policy.started(length, start_s)
            self.policy.stepped(rows, step_s)

    def worker_ready(self, place: int) -> None:
        """Note that a worker can take orders from now on."""
        if place in self.sets:
            raise ValueError(f"worker {place} of stage {self.name} is ready already")
        self.sets[place] = RunningSet(place)

    def worker_gone(self, place: int, unsent: Collection[int] = ()) -> Lost | None:
        """Note that a worker is gone, and return its streams, if it was ready.

        Args:
            place: the position of the worker.
            unsent: streams of which the worker had not been told yet.
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
            self.attention_at = min(self.attention_at, now + self.patience.least_s)

    # -- workers report

    def reported(
        self, now: float, report: SetReport
    ) -> tuple[list[tuple[Request, object]], list[tuple[Request, Part]]]:
        """Take what a worker says after a step.

        Returns:
            The parts to hand on, each with its request, and the ends: the requests are not done
            yet, and the value of such a part has not been handed on only if the stream is
            collected.

        Raises:
            ValueError: the worker breaks the protocol: it is not known, has seen an order that was
                not sent, has stepped more streams than a set may have, or names a stream
                twice, or one that it was not given or that has ended. Nothing was done.
        """
        running = self._checked(report)
        if not self.retired:
            self._learn(report)
        parts: list[tuple[Request, object]] = []
        ended: list[tuple[Request, Part]] = []
        self._take_parts(now, running, report.parts, parts, ended)
        if report.returned:
            self._take_back(now, running, report.returned, ended)
        self._note_progress(now, running, report)
        self.parts += len(parts)
        return parts, ended

    def _checked(self, report: SetReport) -> RunningSet:
        """Return the set that a report is about. Raises what `reported` does."""
        running = self.sets.get(report.place)
        if running is None or not running.seen <= report.seen <= running.number:
            raise ValueError(f"worker {report.place} of stage {self.name} reports on order {report.seen}")
        if report.rows > self.rows:
            raise ValueError(
                f"worker {report.place} of stage {self.name} has stepped {report.rows} of {self.rows} streams"
            )
        ids = {part.id for part in report.parts}
        if len(ids) < len(report.parts):
            raise ValueError(f"worker {report.place} of stage {self.name} names a stream twice in one report")
        strangers = ids.union(report.returned) - running.members.keys() - running.gone.keys()
        if strangers:
            raise ValueError(f"worker {report.place} of stage {self.name} has no streams {sorted(strangers)}")
        return running

    def _learn(self, report: SetReport) -> None:
        """Learn from the times of a report, and have the policy do so."""
        if report.length:
            self.policy.started(report.length, report.start_s)
        if report.rows:
            self.policy.stepped(report.rows, report.step_s)
            self.steps += 1
            self.step_s += (report.step_s - self.step_s) * (0.2 if self.step_s else 1.0)

    def _take_parts(
        self,
        now: float,
        running: RunningSet,
        said: Sequence[Part],
        parts: list[tuple[Request, object]],
        ended: list[tuple[Request, Part]],
    ) -> None:
        """Sort out what a worker says of its streams, and move on the times of those that go on."""
        members = running.members
        pace_s = 0.0 if self.retired else self.policy.pace_s
        # without a goal, newcomers need not wait until a stream has caught up with what it has lost
        latest_s = _LATEST * pace_s if self.policy.part_slo_s else 0.0
        silence_until = now + self._silence_s
        for part in said:
            id, value, last, error = part
            request = members.get(id)
            if request is None:  # it has left meanwhile
                self.stray_parts += 1
                continue
            stream = request.stream
            assert stream is not None
            if value is not None and not stream.is_collected:
                parts.append((request, value))
                stream.parts += 1
                if stream.parts == 1:
                    self.times.learn(now - stream.joined)
                stream.heard = now
                if not stream.is_paused:
                    due = stream.next_due
                    stream.next_due = (now if due == inf or now - due > latest_s else due) + pace_s
                    deadline = request.deadline = silence_until if silence_until < stream.until else stream.until
                    if deadline < self.attention_at:
                        self.attention_at = deadline
                if self.resumable:
                    self._keep(request, stream, value)
            if last or error is not None:
                self._take_out(now, running, request)
                ended.append((request, part))

    def _keep(self, request: Request, stream: Stream, value: object) -> None:
        """Keep a part, so that the stream can go on from there."""
        stream.kept.append(value)
        if self._measure is not None:
            nbytes = self._measure(value)
            stream.kept_bytes += nbytes
            self.queue.nbytes += nbytes

    def _take_back(
        self, now: float, running: RunningSet, returned: Sequence[int], ended: list[tuple[Request, Part]]
    ) -> None:
        """Let streams wait again that were stopped as memory ran out, and remember what fits."""
        tried = running.size
        again = []
        for id in returned:
            request = running.members.get(id)
            if request is None:
                continue
            if self.may_run_again(request):
                self._take_out(now, running, request, is_over=False)
                again.append(request)
            else:
                self._take_out(now, running, request)
                text = "MemoryError: memory ran out in a step, and this stream must not or cannot be started again"
                ended.append((request, Part(id, error=ModelError(text, type_name="MemoryError"))))
        running.untested = 0
        if running.size < tried:
            self.safe_size.ran_out(tried, running.size)
        self.put_back(now, again)

    def _note_progress(self, now: float, running: RunningSet, report: SetReport) -> None:
        """Note which orders a worker has followed, and what follows from a step without a fault."""
        if self.patience.learns and report.rows:
            self.patience.learn(report.rows, now - running.heard)
        running.hear(now)
        running.seen = report.seen
        running.note_step(report)
        is_up_to_date = report.seen == running.number
        running.is_stopped = report.stopped and is_up_to_date
        if is_up_to_date:
            running.starting = 0
        if running.gone and is_up_to_date:
            running.gone = {id: number for id, number in running.gone.items() if number > report.seen}
        if running.suspect is not None and report.rows and report.seen >= running.suspected_by:
            self._note_probation(running, running.suspect)
        if running.untested and report.rows and is_up_to_date:
            if running.untested > self.safe_size.limit:
                self.safe_size.fitted(running.untested)
            running.untested = 0

    def _note_probation(self, running: RunningSet, suspect: Request) -> None:
        """Note that a suspect has made a step alone; once it has made enough, it is acquitted."""
        stream_of(suspect).probation -= 1
        if stream_of(suspect).probation <= 0:
            acquit(suspect)
            running.suspect = None
            running.is_restless = True

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
            now: the time.
            running: the set.
            request: one of its members.
            is_over: whether it will not run again, so that its parts need not be kept.
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

    # -- what to do

    def next_batch(self, now: float, room: float, refuse: list[tuple[Request, str]]) -> None:
        """Write the orders of this poll, which `take_orders` returns; there are no batches."""
        self.poll(now, refuse)

    def poll(self, now: float, refuse: list[tuple[Request, str]]) -> None:
        """Let requests join, and write the orders that are to be sent.

        Args:
            now: the time.
            refuse: the requests that cannot be in time are appended here, and why.

        Raises:
            RuntimeError: the policy asked for what is not possible.
        """
        self.wake_at = None
        if not self.retired and self.queue.count:
            self._refuse_late(now, refuse)
            self._let_in(now)
            due = self.queue.earliest_due
            self.wake_at = due if now < due < inf else None
        for running in self.sets.values():
            if running.is_clearing and not self._has_suspect_waiting:
                running.is_clearing = False
                running.is_restless = True
            self._write_order(now, running)

    def take_orders(self) -> list[Order]:
        """Return the orders that are to be sent, once."""
        orders, self.orders = self.orders, []
        return orders

    def _refuse_late(self, now: float, refuse: list[tuple[Request, str]]) -> None:
        """Drop the queued requests whose first parts cannot come in time any more.

        Where nothing runs, one is let through all the same: what it takes may have been learned
        wrongly, and this is how that is noticed.
        """
        queue, policy = self.queue, self.policy
        horizon = now + policy.first_part_s(self._longest)
        if queue.earliest_due >= horizon:
            return
        late: list[Request] = []
        has_one_lane = queue.lanes == 1
        for request in queue:
            if request.due >= horizon:
                if has_one_lane:
                    break
            elif not stream_of(request).parts and policy.is_late(now, request):
                late.append(request)
        if late and not self._running:
            del late[0]
        if late:
            self._drop(now, late)
            refuse += [(request, TOO_LATE) for request in late]

    @property
    def _has_suspect_waiting(self) -> bool:
        return self.queue.suspect_lanes > 0 and self.queue.next_is_suspect

    def _let_in(self, now: float) -> None:
        """Have requests join running sets, the emptiest set first."""
        open_sets = [running for running in self.sets.values() if running.is_open]
        if len(open_sets) > 1:
            open_sets.sort(key=_by_room)
        for running in open_sets:
            if not self.queue.count:
                break
            if self._has_suspect_waiting:
                self._try_suspect(now, running)
            elif not running.is_clearing:
                self._join(now, running, self._ask_policy(now, running))

    def _ask_policy(self, now: float, running: RunningSet) -> int:
        """Return how many requests join a set."""
        heads = self._heads(running)
        if not heads:
            return 0
        n = operator.index(self.policy.join(now, heads, running))
        if not 0 <= n <= len(heads):
            policy = type(self.policy).__name__
            raise RuntimeError(f"policy {policy} of stage {self.name} has {n} of {len(heads)} requests join a set")
        if not n and self.closing and not running.members:
            return len(heads)
        return n

    def _heads(self, running: RunningSet) -> list[Request]:
        """Return as many of the next requests as a set has room for."""
        room = self.rows - len(running.members)
        if room <= 0:
            return []
        heads = self.queue.peek(room)
        if running.members and not _may_share(running, heads[0].lane):
            return []
        if self.limit == inf and self.safe_size.limit == inf:
            return heads
        n = _fitting(running, heads, self.limit)
        size = running.size + sum([request.size for request in heads[:n]])
        if n and size > self.safe_size.limit:
            n = _fitting(running, heads[:n], self._safe_limit(size))
        return heads[:n]

    def _safe_limit(self, size: int) -> float:
        """Return how large a set may become that would become `size`, above what is known to fit.

        Now and then it may grow further than that; this is judged once for each stream that ends.
        """
        if self._judged_ends == self._ends or any(running.untested for running in self.sets.values()):
            return self.safe_size.limit
        self._judged_ends = self._ends
        return self.safe_size.allowed(size)

    def _try_suspect(self, now: float, running: RunningSet) -> None:
        """Have the next request, which is under suspicion, join a set on probation.

        No other stream of the set may be running then, so the set is cleared first: an order has
        all others rest, and once the worker has followed it the suspect joins.
        """
        (suspect,) = self.queue.peek(1)
        members = running.members
        if members:
            size = running.size + suspect.size
            is_full = len(members) >= self.rows or size > min(self.limit, self.safe_size.limit)
            if is_full or not _may_share(running, suspect.lane):
                running.is_restless = running.is_restless or running.is_clearing
                running.is_clearing = False
                return
        if running.owes_report:
            running.is_restless = running.is_restless or not running.is_clearing
            running.is_clearing = True
            return
        running.is_clearing = False
        running.is_restless = True
        self._join(now, running, 1)
        running.suspect = suspect
        running.suspected_by = running.number + 1

    def _join(self, now: float, running: RunningSet, n: int) -> None:
        """Have the next `n` requests of the queue join a set."""
        if not n:
            return
        for request in self.queue.take(n, now):
            stream = stream_of(request)
            stream.place = running.place
            stream.joined = now
            stream.first_step, stream.first_parts = -1, stream.parts
            running.members[request.id] = request
            running.size += request.size
            running.starting += stream.length + stream.parts
            running.to_join.append(request)
            if stream.kept:
                self.resumed += 1
            if stream.is_paused:
                running.is_restless = True
                request.deadline = stream.until
        self._running += n
        if not running.owes_report:
            running.unwanted_since = inf
        if running.size > self.safe_size.limit:
            running.untested = running.size

    def _write_order(self, now: float, running: RunningSet) -> None:
        """Write the order to a worker, if there is something to tell it."""
        pause: list[int] = []
        resume: list[int] = []
        if running.is_restless:
            running.change_rests(pause, resume)
        ask = self._ask_for(running)
        has_news = running.to_join or running.to_leave or pause or resume
        if not has_news and not (running.active and (running.is_stopped or ask != running.ask)):
            return
        if not running.owes_report:
            running.heard = now
        running.number += 1
        running.is_stopped = False
        running.ask = ask
        leave, join = running.to_leave, running.to_join
        if join:
            running.unfollowed.append((running.number, join))
        self.orders.append(Order(self.stage, running.place, running.number, leave, join, pause, resume, ask))
        running.to_leave, running.to_join = [], []
        look_at = now + self.patience.least_s
        if look_at < self.attention_at:
            self.attention_at = look_at

    def _ask_for(self, running: RunningSet) -> int:
        """Return what a worker is to do after its next step: see `Order.ask`.

        While others wait it stops, so that they can join one step earlier, if a stop costs little
        of a step; where no row is free, they have to wait until a stream has ended.
        """
        if running.suspect is not None:
            return EVERY_STEP
        if not self.queue.count or self.retired or not running.is_open:
            return GO_ON
        if len(running.members) >= self.rows or self.step_s * _STOP_SHARE < _STOP_S:
            return ON_LEAVING
        return EVERY_STEP

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
            if running.owes_report and not running.given_up and self._is_given_up(now, running):
                hung.append(running.place)
        return Attention(expired, hung)

    def _is_given_up(self, now: float, running: RunningSet) -> bool:
        """Report whether a worker has said nothing for too long; if not, look again in time."""
        times = running.heard, running.unwanted_since, max(1, len(running))
        until = self.patience.until(*times)
        if until <= now:
            running.given_up = self.patience.why(*times)
            return True
        self.attention_at = min(self.attention_at, until)
        return False

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


def _by_room(running: RunningSet) -> tuple[bool, int, int]:
    """Return the key by which the emptiest set comes first, after one that is being cleared."""
    return not running.is_clearing, running.size, len(running)


def _fitting(running: RunningSet, heads: Sequence[Request], limit: float) -> int:
    """Return how many requests fit into a set; the first one always does into an empty set."""
    n, size = 0, running.size
    for request in heads:
        size += request.size
        if size > limit and (n or running.members):
            break
        n += 1
    return n


def _may_share(running: RunningSet, lane: Lane) -> bool:
    """Report whether requests of a lane may share a set with those that it has."""
    own = next(iter(running)).lane
    return _key_of(own) == _key_of(lane) and own.bucket == lane.bucket


def _key_of(lane: Lane) -> object:
    """Return a lane's key, and for lanes of suspects the one that these had before."""
    return lane.key.former_key if isinstance(lane.key, Suspect) else lane.key
