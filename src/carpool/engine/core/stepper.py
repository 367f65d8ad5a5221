"""The stepper of a stage that answers in parts: its workers, of which each has a running set.

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

What a worker does with an order: those that leave are stopped, those that join are started
(`start`, or `resume` with `request.stream.kept` where that is not empty) in one call, then pauses
and resumptions are noted, then it steps all that do not pause. It reports after each step. An order
that leaves it nothing to step is reported too, with `rows` = 0 and `stopped`. After a step it does
as the `stop_when` of the last order that it has seen says. It also stops when it has nothing to
step, and then reads orders until it has; the coordinator answers a report with `stopped` at once.

When memory runs out, a worker stops the newest half of its streams (where it cannot resume, those
without parts first) and says `BACK` of each; a stream that runs out alone fails instead.

A stream with `is_collected` hands on no parts: its worker keeps them and sends the whole answer as
its `LAST` value. If its worker is lost it starts again, as its caller has had nothing of it.

Orders take effect at boundaries and name only changes, since an order a step would cost more than
many steps take. A report of a stream that has left meanwhile is dropped; a report of a stream that
the worker never had breaks the protocol.

Probation: a stream whose worker was lost starts again in a set of which all others rest. A first
order pauses them, and the suspect joins, for its start and one step, only when the worker has
followed it. So no other stream can be to blame for a second loss, and the others lose only some
steps. A suspect none of whose parts arrived reaches the deadly step later, in company; if a second
worker is lost with it in the same step of its own, it makes all of these steps alone
(`RunningSet.note_loss`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Any, Final, TypeAlias, cast

from carpool.engine.core.batch import Attention, Batch, Expiry, Gone, Todo
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.lane_order import key_of
from carpool.engine.core.lobby import MOST_LOSSES, Lobby, acquit
from carpool.engine.core.places import Places
from carpool.engine.core.queue import Queue
from carpool.engine.core.running_set import (
    BACK,
    EVERY_STEP,
    FAILED,
    GO_ON,
    LAST,
    MORE,
    ON_LEAVING,
    Order,
    Parts,
    RunningSet,
    SetReport,
    stream_of,
)
from carpool.engine.core.safe_size import SafeSize
from carpool.engine.core.times import Times
from carpool.engine.policy.base import TOO_LATE
from carpool.engine.policy.cost import Knots
from carpool.engine.policy.steps import GreedySteps, Stepped, StepPolicy
from carpool.engine.request import DONE, Lane, Request, Stream
from carpool.errors import ModelError

_STOP_S: Final = 150e-6  # what it costs that a worker stops for its next order
_STOP_SHARE: Final = 0.05  # of a step, which a stop may cost
_LATEST: Final = 5.0  # paces; a stream that is later than this is rescheduled from now


class Stepper:
    """The workers of one stage that answers in parts.

    Args:
        rows: Most streams in a running set.
        limit: Most units that the streams of a set may come to hold.
        resumable: Whether the model can go on from the parts that it has made.
        silence_s: How long a stream may be silent: before its first part, and between parts.
        max_stream_s: How long a stream may take in all.
        max_batch_time_s: As for a batcher; a call is one of `start` or `step`.
        weigh: Writes on a request how many units a stream may come to hold that gets this result of
            the stage before; may raise a `CarpoolError`. By default it is 1.
        measure: Returns the bytes that a part holds while it is kept.

    Attributes:
        safe_size: How many units a running set can hold before memory runs out.
        leaving: The places of workers that are to go: no stream joins these any more, and those
            that they have go on.
        late_results: What workers said of streams that others have by now.
        sets: The running set of each worker, by its place.
        step_s: Smoothed seconds of a step.
    """

    # there are no batches, of which admission and figures ask each `Crew`
    in_flight: Final[Mapping[int, Batch]] = {}
    made: Final = None
    stray_replies: Final = 0

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
        measure: Callable[[Any], int] | None = None,
    ) -> None:
        self.name = name
        self.queue = queue
        self.lobby = Lobby(
            name,
            policy,
            queue,
            idempotent=idempotent,
            weigh=weigh,
            substitute=lambda former: GreedySteps(rows, cast(StepPolicy, former).part_slo_s),
        )
        self.safe_size = SafeSize()
        self.times = Times(max_batch_time_s, patience_s)
        self.running = self.late_results = 0
        self.rows = rows
        self.limit = limit
        self.resumable = resumable
        sets: dict[int, RunningSet] = {}
        self.at_work = self.sets = sets
        self.steps = self.parts = self.resumed = self.stray_parts = 0
        self.step_s = 0.0
        self._silence_s = silence_s
        self._max_stream_s = max_stream_s
        self._measure = measure
        self._longest = 1  # the greatest length of a request so far
        self._stay_s = 0.0  # smoothed seconds that a stream spends in a set
        self._ends = 0  # how many streams have left sets
        self._judged_ends = -1  # at which of these it was last judged whether more would fit
        self.places = Places()
        self.leaving = self.places.leaving
        self._knots = Knots(policy.max_batch_size or self.lobby.batch_limit)  # counts, about which others are

    def __repr__(self) -> str:
        return f"<Stepper {self.name} queued={len(self.queue)} running={self.running} sets={len(self.sets)}>"

    @property
    def _policy(self) -> StepPolicy:
        return cast(StepPolicy, self.lobby.policy)

    @property
    def idle(self) -> int:
        return sum([self._is_open(running) and len(running) < self.rows for running in self.sets.values()])

    @property
    def has_worker(self) -> bool:
        return bool(self.sets)

    @property
    def owed(self) -> list[Request]:
        return [request for running in self.sets.values() for request in running]

    # -- requests come and go

    def enter(self, now: float, requests: Sequence[Request], *known: object) -> None:
        """Put requests in the queue, as `Lobby.enter` does; what is known of their deadlines is not
        so any more once these are set here.
        """
        for request in requests:
            stream = request.stream
            if stream is None:
                stream = request.stream = Stream(is_collected=True)
            stream.until = min(stream.until, request.admitted + self._max_stream_s)
            stream.part_at = request.admitted
            silence_s = inf if stream.is_collected else self._silence_s
            request.deadline = min(request.deadline, stream.until, now + silence_s)
            request.due = min(request.due, request.deadline)
            if stream.length > self._longest:
                self._longest = stream.length
        self.lobby.enter(now, requests)

    def caller_changed(self, now: float, request: Request) -> None:
        """Do as the caller of a request wants which a worker has; see `Crew`.

        The next order sends a stream away that is done. One that pauses keeps its place in the set
        and is not stepped, and no silence counts.
        """
        stream = stream_of(request)
        running = self.sets.get(stream.place)
        if running is None or request.id not in running.members:
            return
        if request.state == DONE:
            self._send_away(now, running, request)
            return
        stream.next_due = inf
        request.deadline = stream.until if stream.is_paused else min(stream.until, now + self._silence_s)
        self.lobby.look_at(request.deadline)
        running.pauses_changed = True

    def _may_run_again(self, request: Request) -> bool:
        return self.lobby.idempotent and (self.resumable or not stream_of(request).parts)

    def _send_away(self, now: float, running: RunningSet, request: Request) -> None:
        if request in running.to_join:
            running.to_join.remove(request)
        else:
            running.to_leave.append(request.id)
            running.gone[request.id] = running.number + 1
        self._take_out(now, running, request)

    def _take_out(self, now: float, running: RunningSet, request: Request, *, is_over: bool = True) -> None:
        """Take a stream out of a running set; its place is free. If it is over, its parts need not
        be kept.
        """
        stream = stream_of(request)
        del running.members[request.id]
        running.size -= request.size
        running.resting -= stream.is_resting
        self.running -= 1
        self._ends += 1
        if running.suspect is request:
            running.suspect = None
            running.pauses_changed = True
        if running.unwanted_since == inf and not running.is_wanted:
            running.unwanted_since = now
        stay_s = now - stream.joined
        self._stay_s += (stay_s - self._stay_s) * (0.1 if self._stay_s else 1.0)
        if is_over:
            self._let_go(stream)

    def _let_go(self, stream: Stream) -> None:
        if stream.kept:
            self.queue.nbytes -= stream.kept_bytes
            stream.kept_bytes = 0
            stream.kept = []

    def _detach(self, requests: Sequence[Request]) -> None:
        for request in requests:
            stream = stream_of(request)
            stream.is_resting = False
            stream.next_due = inf
            stream.place = -1
            self.queue.nbytes -= stream.kept_bytes  # while it waits, they are bytes of the request
            request.nbytes += stream.kept_bytes

    # -- workers come and go

    def trained_steps(self, now: float, rows: int, step_s: float, length: int, start_s: float) -> None:
        """Have the policy learn from a warm-up, unless steps have been made already: those teach
        better. The arguments are those of `Stepped`.
        """
        if not self.steps:
            self.lobby.guarded(self._policy.learn, now, Stepped(rows, step_s, length, start_s))

    def worker_ready(self, place: int) -> None:
        if place in self.sets:
            raise ValueError(f"worker {place} of stage {self.name} is ready already")
        self.sets[place] = RunningSet(place)

    def worker_gone(self, now: float, place: int, unsent: Collection[int] = (), *, blames: bool = True) -> Gone | None:
        """Note that a worker is gone, and return what becomes of its streams, if it was ready.

        If one is found guilty after more than one step on probation, all that wait to run so make
        one step alone: most likely the others that were lost with it are innocent.

        Args:
            blames: Whether one of its streams may be to blame: of those that it may have been
                stepping or starting.
        """
        self.places.gone(place)
        running = self.sets.pop(place, None)
        if running is None:
            return None
        blamed: list[Request] = []
        untold: list[Request] = []
        resting: list[Request] = []
        for request in running:
            if request.id in unsent or request in running.to_join:
                untold.append(request)
            elif stream_of(request).is_resting:
                resting.append(request)
            else:
                blamed.append(request)
                running.note_loss(stream_of(request))
        self.running -= len(running)
        self._ends += len(running)
        if not blames:
            blamed, resting = [], [*blamed, *resting]
        suspect = running.suspect
        self._detach(list(running))
        gone = self.lobby.take_back(now, blamed, resting, untold, self._may_run_again, running.given_up)
        for request, _ in gone.failed:
            if request.losses >= MOST_LOSSES and stream_of(request).redo:
                for other in self.queue:
                    stream_of(other).probation = 1
        return gone._replace(is_guilty=suspect is not None and suspect.losses >= MOST_LOSSES)

    def take_drained(self) -> list[int]:
        drained = self.places.take_drained([place for place in self.leaving if not self.is_empty(place)])
        for place in drained:
            self.sets.pop(place, None)
        return drained

    def is_empty(self, place: int) -> bool:
        running = self.sets.get(place)
        return running is None or not (running.members or running.owes_report)

    def restart_hang_timer(self, now: float, place: int, batch_id: int | None = None) -> None:
        """Count the time of a worker anew; see `Crew`."""
        running = self.sets.get(place)
        if running is not None and (batch_id is None or not running.given_up):
            running.note_report(now)
            running.given_up = ""
            self.lobby.look_at(now + self.times.least_s)

    # -- what takes too long

    def attend(self, now: float) -> Attention:
        """See `Batcher.attend`."""
        expired = self.lobby.expire(now)
        hung = []
        attention_at = self.queue.earliest_deadline
        for running in self.sets.values():
            for request in [request for request in running if request.deadline <= now]:
                request.state = DONE
                self._send_away(now, running, request)
                expired.append(Expiry(request, stream_of(request).joined))
            for request in running:
                if request.deadline < attention_at:
                    attention_at = request.deadline
            if not running.owes_report or running.given_up:
                continue
            size = max(1, len(running))
            until, running.given_up = self.times.judge(now, running.reported_at, running.unwanted_since, size)
            if running.given_up:
                hung.append(running.place)
            else:
                attention_at = min(attention_at, until)
        self.lobby.attention_at = attention_at
        return Attention(expired, hung)

    # -- how long requests wait

    def predicted_wait_s(self, now: float, units_before: float) -> float:
        """Return how long a request waits that has `units_before` queued before it.

        It goes by how long streams have stayed, and is rather too short than too long.
        """
        most = self.rows if self.limit == inf else min(self.rows, self.limit)
        free = sum([most - (len(running) if self.limit == inf else running.size) for running in self.sets.values()])
        if units_before < free:
            return 0.0
        return (units_before - free + 1) * self._stay_s / (most * max(1, len(self.sets)))

    # -- what workers report

    def reported(
        self, now: float, report: SetReport
    ) -> tuple[list[tuple[Request, object]], list[tuple[Request, int, Any]]]:
        """Take what a worker says after a step.

        Returns:
            The parts to hand on, each with its request, and the ends, each with its kind and value:
            the requests are not done yet, and the value has been handed on unless their callers
            take the whole answer.

        Raises:
            ValueError: The worker breaks the protocol: it is not known, has seen an order that was
                not sent, has stepped more streams than a set may have, or names a stream twice, or
                one that it was not given or that has ended. Nothing was done.
        """
        running = self._checked(report)
        self._learn_report(now, report)
        ids, kinds, values, kept = report.parts
        requests: list[Any] = list(map(running.members.get, ids))
        ended: list[tuple[Request, int, Any]] = []
        returned: list[Request] = []
        if not (  # the usual step: each stream goes on, is still there, has a part and takes it
            kinds.count(MORE) == len(ids)
            and None not in requests
            and None not in values
            and True not in [request.stream.is_collected for request in requests]
        ):
            requests, values, kept = self._sort_out(requests, report.parts, ended, returned)
        if requests:
            self._note_parts(now, requests, kept or values)  # without `kept` a part itself is what is kept of it
        for request, _, _ in ended:
            self._take_out(now, running, request)
        if returned:
            self._take_back(now, running, returned, ended)
        self._note_progress(now, running, report)
        self.parts += len(requests)
        return list(zip(requests, values, strict=True)), ended

    def _checked(self, report: SetReport) -> RunningSet:
        running = self.sets.get(report.place)
        if running is None or not running.seen <= report.seen <= running.number:
            raise ValueError(f"worker {report.place} of stage {self.name} reports on order {report.seen}")
        if report.rows > self.rows:
            raise ValueError(
                f"worker {report.place} of stage {self.name} has stepped {report.rows} of {self.rows} streams"
            )
        ids = set(report.parts.ids)
        if len(ids) < len(report.parts.ids) and report.parts.names_twice:
            raise ValueError(f"worker {report.place} of stage {self.name} names a stream twice in one report")
        if not ids <= running.members.keys() and (strangers := ids - running.members.keys() - running.gone.keys()):
            raise ValueError(f"worker {report.place} of stage {self.name} has no streams {sorted(strangers)}")
        return running

    def _learn_report(self, now: float, report: SetReport) -> None:
        rows, length = report.rows, report.length
        if not rows and not length:
            return
        is_first, place = self.places.is_first, report.place
        starts = length > 0 and is_first(place, ("start", length.bit_length()))
        steps = rows > 0 and is_first(place, self._knots.nearest(rows))
        self.lobby.guarded(self._policy.learn, now, Stepped(rows, report.step_s, length, report.start_s, steps, starts))
        if rows:
            self.steps += 1
            self.step_s += (report.step_s - self.step_s) * (0.2 if self.step_s else 1.0)

    def _sort_out(
        self,
        requests: Sequence[Request | None],
        said: Parts,
        ended: list[tuple[Request, int, Any]],
        returned: list[Request],
    ) -> tuple[list[Request], list[object], list[object]]:
        """Return who gets a part, the parts, and what is kept of them if that is something else.

        Args:
            requests: Of the streams; None for those that have left meanwhile.
            said: What the worker says of them.
            ended: Is given the streams that have ended, each with its kind and value.
            returned: Is given those that found no memory.
        """
        takers: list[Request] = []
        parts: list[object] = []
        kept: list[object] = []
        for i, (request, kind, value) in enumerate(zip(requests, said.kinds, said.values, strict=True)):
            if request is None:
                self.stray_parts += kind != BACK
            elif kind == BACK:
                returned.append(request)
            else:
                stream = stream_of(request)
                is_part = kind == MORE or (kind == LAST and not stream.is_told_both)
                if is_part and value is not None and not stream.is_collected:
                    takers.append(request)
                    parts.append(value)
                    if said.kept:
                        kept.append(said.kept[i])
                if kind != MORE:
                    ended.append((request, kind, value))
        return takers, parts, kept

    def _note_parts(self, now: float, requests: Sequence[Request], kept: Sequence[object]) -> None:
        pace_s = self._pace_s
        # without a goal, newcomers need not wait until a stream has caught up with what it has lost
        oldest = now - _LATEST * pace_s if self._policy.part_slo_s else now
        until, attention_at = now + self._silence_s, self.lobby.attention_at
        for request in requests:
            stream: Any = request.stream
            stream.part_at = now
            if not stream.parts:
                self.times.learn_usual(now - stream.joined)
            stream.parts += 1
            if not stream.is_paused:
                due = stream.next_due
                stream.next_due = (due if oldest <= due < inf else now) + pace_s
                request.deadline = deadline = until if until < stream.until else stream.until
                if deadline < attention_at:
                    attention_at = deadline
        self.lobby.attention_at = attention_at
        if self.resumable:
            for request, part in zip(requests, kept, strict=True):
                self._keep(stream_of(request), part)

    @property
    def _pace_s(self) -> float:
        try:
            return self._policy.pace_s
        except BaseException as error:
            self.lobby.failed(error)
            return self._policy.pace_s

    def _keep(self, stream: Stream, value: object) -> None:
        stream.kept.append(value)
        if self._measure is not None:
            nbytes = self._measure(value)
            stream.kept_bytes += nbytes
            self.queue.nbytes += nbytes

    def _take_back(
        self, now: float, running: RunningSet, returned: Sequence[Request], ended: list[tuple[Request, int, Any]]
    ) -> None:
        """Let streams wait again that were stopped as memory ran out, and remember what fits."""
        tried = running.size
        again = []
        for request in returned:
            if self._may_run_again(request):
                self._take_out(now, running, request, is_over=False)
                again.append(request)
            else:
                self._take_out(now, running, request)
                text = "MemoryError: memory ran out in a step, and this stream must not or cannot be started again"
                ended.append((request, FAILED, ModelError(text, type_name="MemoryError")))
        running.untested = 0
        if running.size < tried:
            self.safe_size.ran_out(tried, running.size)
        self._detach(again)
        self.lobby.put_back(now, again)

    def _note_progress(self, now: float, running: RunningSet, report: SetReport) -> None:
        if self.times.learns and report.rows:
            self.times.learn_most(report.rows, now - running.reported_at)
        running.note_report(now)
        running.seen = report.seen
        running.note_step(report)
        is_up_to_date = report.seen == running.number
        running.is_stopped = report.stopped and is_up_to_date
        if is_up_to_date:
            running.starting = 0
        if running.gone and is_up_to_date:
            running.gone = {id: number for id, number in running.gone.items() if number > report.seen}
        if running.suspect is not None and report.rows and report.seen >= running.suspect_order:
            self._note_probation(running, running.suspect)
        if running.untested and report.rows and is_up_to_date:
            if running.untested > self.safe_size.limit:
                self.safe_size.fitted(running.untested)
            running.untested = 0

    def _note_probation(self, running: RunningSet, suspect: Request) -> None:
        stream_of(suspect).probation -= 1
        if stream_of(suspect).probation <= 0:
            acquit(suspect)
            running.suspect = None
            running.pauses_changed = True

    # -- what to do

    def poll(self, now: float, room: float, todo: Todo, refuse: list[tuple[Request, str]]) -> None:
        """Let requests join, and write the orders; those that cannot be in time go to `refuse`,
        with why.

        Nothing comes after a stage of steps, so there always is `room`.
        """
        self.lobby.wake_at = None
        if self.queue.count:
            self._refuse_late(now, refuse)
            self._let_in(now)
            due = self.queue.earliest_due
            self.lobby.wake_at = due if now < due < inf else None
        for running in self.sets.values():
            if running.awaits_suspect and not self._has_suspect_waiting:
                running.await_suspect(False)
            self._write_order(now, running, todo)

    def _refuse_late(self, now: float, refuse: list[tuple[Request, str]]) -> None:
        """Drop the queued requests whose first parts cannot come in time any more.

        Where nothing runs, one is let through all the same: what it takes may have been learned
        wrongly, and this is how that is noticed.
        """
        late = self.lobby.guarded(self._find_late, now)
        if late and not self.running:
            del late[0]
        if late:
            self.lobby.drop(now, late)
            refuse += [(request, TOO_LATE) for request in late]

    def _find_late(self, now: float) -> list[Request]:
        queue, policy = self.queue, self._policy
        horizon = now + policy.first_part_s(self._longest)
        if queue.earliest_due >= horizon:
            return []
        late: list[Request] = []
        has_one_lane = queue.lanes == 1
        for request in queue:
            if request.due >= horizon:
                if has_one_lane:
                    break
            elif not stream_of(request).parts and policy.is_late(now, request):
                late.append(request)
        return late

    def _is_open(self, running: RunningSet) -> bool:
        return running.suspect is None and not running.given_up and running.place not in self.leaving

    @property
    def _has_suspect_waiting(self) -> bool:
        return self.queue.suspect_lanes > 0 and self.queue.next_is_suspect

    def _let_in(self, now: float) -> None:
        """Have requests join running sets, the emptiest set first.

        Where workers hold one stream each, none is sent behind a step that is still made for one
        that has left: another worker may be free before that one is.
        """
        may_wait = self.rows == 1 and len(self.sets) > 1
        open_sets = [running for running in self.sets.values() if self._is_open(running)]
        if len(open_sets) > 1:
            open_sets.sort(key=_by_room)
        for running in open_sets:
            if not self.queue.count:
                break
            if self._has_suspect_waiting:
                self._try_suspect(now, running)
            elif not running.awaits_suspect and not (may_wait and running.owes_report):
                self._join(now, running, self._ask_policy(now, running))

    def _ask_policy(self, now: float, running: RunningSet) -> int:
        heads = self._heads(running)
        if not heads:
            return 0
        try:
            n = operator.index(self._policy.join(now, heads, running))
            if not 0 <= n <= len(heads):
                raise RuntimeError(f"{self.lobby.whose_policy} has {n} of {len(heads)} requests join a set")
        except BaseException as error:
            self.lobby.failed(error)
            n = len(heads)
        if not n and self.lobby.closing and not running.members:
            return len(heads)
        return n

    def _heads(self, running: RunningSet) -> list[Request]:
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
                running.await_suspect(False)
                return
        if running.owes_report:
            running.await_suspect(True)
            return
        running.awaits_suspect = False
        running.pauses_changed = True
        self._join(now, running, 1)
        running.suspect = suspect
        running.suspect_order = running.number + 1

    def _join(self, now: float, running: RunningSet, n: int) -> None:
        if not n:
            return
        for request in self.queue.take(n, now):
            stream = stream_of(request)
            stream.place = running.place
            request.nbytes -= stream.kept_bytes
            self.queue.nbytes += stream.kept_bytes
            stream.joined = now
            stream.first_step, stream.first_parts = -1, stream.parts
            running.members[request.id] = request
            running.size += request.size
            running.starting += stream.length + stream.parts
            running.to_join.append(request)
            if stream.kept:
                self.resumed += 1
            if stream.is_paused:
                running.pauses_changed = True
                request.deadline = stream.until
        self.running += n
        if not running.owes_report:
            running.unwanted_since = inf
        if running.size > self.safe_size.limit:
            running.untested = running.size

    def _write_order(self, now: float, running: RunningSet, todo: Todo) -> None:
        pause: list[int] = []
        resume: list[int] = []
        if running.pauses_changed:
            running.change_rests(pause, resume)
        stop_when = self._stop_when(running)
        has_news = running.to_join or running.to_leave or pause or resume
        if not has_news and not (running.active and (running.is_stopped or stop_when != running.stop_when)):
            return
        if not running.owes_report:
            running.reported_at = now
        running.number += 1
        running.is_stopped = False
        running.stop_when = stop_when
        to_leave, to_join = running.to_leave, running.to_join
        order = Order(self.lobby.stage, running.place, running.number, to_leave, to_join, pause, resume, stop_when)
        if order.join or pause or resume:
            running.unfollowed.append(order)
        todo.orders.append(order)
        running.to_leave, running.to_join = [], []
        self.lobby.look_at(now + self.times.least_s)

    def _stop_when(self, running: RunningSet) -> int:
        """Return after which steps a worker is to stop: see `Order.stop_when`.

        While others wait it stops, so that they can join one step earlier, if a stop costs little
        of a step; where no row is free, they have to wait until a stream has ended.
        """
        if running.suspect is not None:
            return EVERY_STEP
        if not self.queue.count or not self._is_open(running):
            return GO_ON
        if len(running.members) >= self.rows or self.step_s * _STOP_SHARE < _STOP_S:
            return ON_LEAVING
        return EVERY_STEP


def _by_room(running: RunningSet) -> tuple[bool, int, int, bool]:
    """Return the key by which the emptiest set comes first, after one that is being cleared.

    Of equally empty sets those come first of which no step is under way: one that a stream has just
    left may be busy for long with a step for nobody.
    """
    return not running.awaits_suspect, running.size, len(running), running.owes_report


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
    own = next(iter(running)).lane
    return key_of(own) == key_of(lane) and own.bucket == lane.bucket


Crew: TypeAlias = Batcher | Stepper
"""Who serves one lobby. The core makes the same calls of both, and does not ask which one it is:

* `enter` takes in requests. All else about what waits is asked of `lobby` and `queue`;
* `caller_changed` applies a change by the caller of a running request: it has left, or its stream
  pauses or goes on (`stream.is_paused`);
* `worker_ready`, `take_drained`, `worker_gone` and `restart_hang_timer` are about workers. The last
  one counts a worker's time anew: the worker has begun another call of a batch, or, without a
  batch, it seemed to hang and does not. A worker that is taken to hang stays so;
* `attend` and `poll` return actions;
* `predicted_wait_s` predicts times.

Replies are for batchers (`completed`), reports for steppers (`reported`); both refuse those that
cannot be right. Whether workers are idle, lent or about to go is asked of `places`; the batch or
the running set that a worker is at work on is in `at_work`.
"""
