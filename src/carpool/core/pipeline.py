"""A chain of stages and the way of a request through it; the object that every driver drives.

Events go in (`submit`, `cancel`, `completed`, `worker_ready`, `worker_lost` and others), `poll`
says what to do next. The invariants:

* every request gets exactly one answer, even if it is refused, unless its caller has cancelled it:
  `DONE` is entered once, and `core/endings.py` hands the request out;
* an error in any stage goes straight back to its caller;
* only the first stage refuses (`core/entrance.py`); a later one gives credits: stage k takes a
  batch only when stage k+1 has room for it;
* late stages are asked first, so that the room they make can be used in the same poll;
* whatever a policy raises, its stage goes on without it (`core/lobby.py`); `abort` answers
  all that are inside.

What becomes of results stands in `core/passage.py`, and what becomes of the requests of a worker
that is gone in `core/losses.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from math import inf

from carpool.core.batch import Batch, Reply, Todo
from carpool.core.batcher import Batcher
from carpool.core.endings import Endings
from carpool.core.entrance import Entrance
from carpool.core.journal import Journal, parts_so_far, record_batches, record_orders, record_report
from carpool.core.losses import Losses
from carpool.core.passage import Passage
from carpool.core.running_set import Part, SetReport, stream_of
from carpool.core.stepper import Crew
from carpool.core.trail import AT_THE_DOOR
from carpool.errors import CarpoolError
from carpool.request import DONE, NEW, QUEUED, RUNNING, Request


class Pipeline:
    """The stages of one service.

    Args:
        batchers: Of its stages, first to last.
        slo_s: How soon after their admission requests are due; None leaves it at their deadlines.
        measure: Returns the bytes that a result will hold while it waits for the next stage.
        journal: Records what happens to each request, if given.

    Attributes:
        batchers: Of its stages, first to last.
        slo_s: How soon after their admission requests are due; infinity if that is not given.
        door: The requests that wait for room in the first queue.
        closed_because: Why new requests are refused; None while they are not.
        cancelled: How many admitted requests were cancelled.
        alone: How many went alone, and were admitted and answered that way.
    """

    def __init__(
        self,
        batchers: Sequence[Crew],
        *,
        slo_s: float | None = None,
        measure: Callable[[object], int] = lambda result: 0,
        journal: Journal | None = None,
    ) -> None:
        self.batchers = tuple(batchers)
        self.slo_s = inf if slo_s is None else slo_s
        self.closed_because: CarpoolError | None = None
        self.cancelled = 0
        self.alone = 0
        self._endings = Endings([batcher.name for batcher in self.batchers], journal)
        self._entrance = Entrance(self.batchers, self._endings, self.slo_s, journal)
        self._passage = Passage(self.batchers, self._endings, measure, journal)
        self._losses = Losses(self._endings, journal)
        self.door = self._entrance.door
        self._journal = journal
        self._is_held = False
        self._last = len(self.batchers) - 1
        self._todo = Todo()
        for stage, batcher in enumerate(self.batchers):
            batcher.lobby.stage = stage
        for batcher, following in pairwise(self.batchers):
            batcher.lobby.next_max_size = following.queue.max_size

    def __repr__(self) -> str:
        return f"<Pipeline {' -> '.join(map(repr, self.batchers))}>"

    @property
    def admitted(self) -> int:
        """How many requests have been admitted."""
        return self._entrance.admitted

    @property
    def refused(self) -> int:
        """How many requests were refused when they came."""
        return self._endings.refused

    @property
    def answered(self) -> int:
        """How many of the admitted requests have been answered."""
        return self._endings.answered + self.alone

    @property
    def failed(self) -> int:
        """How many of the admitted requests were answered with an error."""
        return self._endings.failed

    @property
    def waiting(self) -> int:
        """How many requests are in queues, the door's included."""
        waiting = self.door.count
        for batcher in self.batchers:
            waiting += batcher.queue.count
        return waiting

    @property
    def unanswered(self) -> int:
        """How many callers of admitted requests still wait."""
        return self.admitted - self.answered - self.cancelled

    def offered(self, stage: int) -> int:
        """Return how many requests have come to a stage so far, those refused included."""
        return self.batchers[stage].lobby.entered + (0 if stage else self.refused + self.alone)

    # -- callers

    def submit(self, now: float, requests: Sequence[Request], alike: bool = False) -> None:
        """Take in new requests, in the order of their arrival.

        One that is refused is answered with the error at once. Those that are `companions` of each
        other are taken in together, or refused.

        Args:
            now: The time.
            requests: None of them was submitted before.
            alike: Whether all are known to be new, of one lane, one due and one deadline, each of
                size 1 and without companions.

        Raises:
            ValueError: One of them was submitted before; then none is taken.
        """
        self._entrance.submit(now, requests, self.closed_because, alike)

    def cancel(self, now: float, request: Request) -> None:
        """Note that a caller has gone.

        A queued request is never run; a running one's result is dropped.
        """
        state = request.state
        if state == NEW:
            request.state = DONE
        if state not in (QUEUED, RUNNING):
            return
        self.cancelled += 1
        request.caller = None
        if self._journal is not None:
            self._journal.record(now, "cancelled", request.id, detail=parts_so_far(now, request))
        self._withdraw(now, request)

    def suffice(self, now: float, request: Request) -> None:
        """Note that a caller has all that it wants of a stream: its answer is complete."""
        if request.state in (QUEUED, RUNNING):
            self._withdraw(now, request)
            self._endings.answer(now, request)

    def _withdraw(self, now: float, request: Request) -> None:
        """Take a request away from where it is; it is now done."""
        if request.stage == AT_THE_DOOR:
            self.door.remove(request)
        elif request.state == QUEUED:
            self.batchers[request.stage].leave(now, request)
        else:
            self.batchers[request.stage].abandon(now, request)

    def pause(self, now: float, request: Request, is_paused: bool) -> None:
        """Note that a caller wants no more parts for now, or wants them again.

        It is for requests of a service whose last stage is one of steps, and takes effect when they
        get there.
        """
        stream = request.stream
        if stream is None or stream.is_paused == is_paused or request.state not in (QUEUED, RUNNING):
            return
        stream.is_paused = is_paused
        if request.state == RUNNING:
            self.batchers[request.stage].pause(now, request, is_paused)
        if self._journal is not None:
            self._journal.record(now, "paused" if is_paused else "goes on", request.id, self.batchers[-1].name)

    def lone_done(self, batcher: Batcher, place: int, began: float, now: float, busy_s: float, ok: bool) -> None:
        """Note that a lone request, which was let run without `submit`, is done; see `Batcher`.

        It can only be a pipeline of one stage, which is the batcher's.
        """
        self._entrance.admitted += 1
        self.alone += 1
        if not ok:
            self._endings.failed += 1
        batcher.lone_done(place, began, now, busy_s, ok)

    def take_back(
        self, batcher: Batcher, place: int, request: Request | None = None, began: float = 0.0, id: int = 0
    ) -> Batch | None:
        """Have a worker back that `Batcher.lend` took out; poll then.

        Args:
            batcher: Of the only stage.
            place: The worker's.
            request: What it is at work on; None if on nothing.
            began: When it began with that.
            id: What the worker has been told that the ids of this request and of its batch are.

        Returns:
            The batch that the request is in, as if the worker had been given it when it began.
        """
        if request is not None:
            self._entrance.admit_lone(began, request, id)
        return batcher.take_back(place, request, began)

    def close(self, error: CarpoolError) -> None:
        """Refuse new requests with `error` from now on; those inside go on.

        From the next poll on nothing is held back for company that cannot come.
        """
        self.closed_because = error

    def abort(self, now: float, error: CarpoolError) -> None:
        """Refuse new requests, and fail all that are inside."""
        self.closed_because = error
        fail = self._endings.fail
        for request in list(self.door):
            self.door.remove(request)
            fail(now, request, copy.copy(error))
        for batcher in self.batchers:
            for request in list(batcher.queue):
                batcher.queue.remove(request)
                fail(now, request, copy.copy(error))
            for request in batcher.owed:
                batcher.abandon(now, request)
                fail(now, request, copy.copy(error))

    # -- workers that answer

    def completed(self, now: float, reply: Reply) -> None:
        """Take the answers of a worker to a batch, or to a part of it.

        See `core/passage.py` for what becomes of each.

        Raises:
            ValueError: There are more or fewer results than ids; then nothing was done.
        """
        ids, results, errors, stage = reply.ids, reply.results, reply.errors, reply.stage
        if len(results) != len(ids):
            raise ValueError(f"{len(results)} results for {len(ids)} requests")
        batcher = self.batchers[stage]
        batch = batcher.in_flight.get(reply.place)
        if now >= batcher.lobby.attention_at and batch is not None and batch.id == reply.batch_id:
            for late in batch.expire(now):  # a driver that stood still has not polled
                self._endings.expire(now, late, batch.started)
        takers = batcher.completed(now, reply.place, reply.batch_id, ids, reply.busy_s, ok=not errors)
        if errors is None and stage == self._last and self._journal is None:
            batcher.late_results += self._passage.answer_all(takers, results)
            return
        self._passage.sort_out(now, reply, takers, batch.started if batch is not None else None)

    def reported(self, now: float, report: SetReport) -> None:
        """Take what a worker of a stage of steps says after a step.

        The parts are handed on by the next poll, and so are the answers of requests that have
        ended. If the worker has stopped, that poll should come at once.

        Raises:
            ValueError: The worker breaks the protocol, or the stage is not one of steps; then
                nothing was done.
        """
        if not 0 <= report.stage < len(self.batchers):
            raise ValueError(f"there is no stage {report.stage}")
        crew = self.batchers[report.stage]
        if now >= crew.lobby.attention_at:  # a driver that stood still has not polled
            self._attend(now, crew)
        parts, ended = crew.reported(now, report)
        self._todo.parts += parts
        if self._journal is not None:
            returned = [request for request in crew.queue if request.id in report.returned]
            record_report(self._journal, now, crew.name, [request for request, _ in parts], returned)
        for request, part in ended:
            self._end_stream(now, request, part)

    def _end_stream(self, now: float, request: Request, part: Part) -> None:
        """Answer a request whose stream has ended: its worker has said so."""
        if part.error is not None:
            self._endings.fail(now, request, part.error)
            return
        if stream_of(request).is_collected:
            request.result = part.value
        self._endings.answer(now, request)

    # -- workers that come and go

    def call_started(self, now: float, stage: int, place: int, batch_id: int) -> None:
        """Note that a worker which makes several calls for one batch has started the next one."""
        self.batchers[stage].call_started(now, place, batch_id)

    def drain(self, stage: int, place: int) -> None:
        """Let a worker get nothing more. It finishes what it has; then `Todo.drained` names it."""
        self.batchers[stage].drain(place)

    def hold(self, is_held: bool) -> None:
        """Have the first stage start no batch for now, or go on; what comes waits in its queue.

        So the stages behind it run empty. It has no effect where there is but one stage, and ends
        when the service closes.
        """
        self._is_held = is_held

    @property
    def is_empty_behind_queue(self) -> bool:
        """Whether no request is between the first queue and its answer, streams apart."""
        if any(batcher.queue.count for batcher in self.batchers[1:]):
            return False
        return not any(batcher.busy for batcher in self.batchers)

    def worker_ready(self, stage: int, place: int) -> None:
        """Note that a worker can take batches from now on."""
        self.batchers[stage].worker_ready(place)

    def worker_lost(self, now: float, stage: int, place: int, unsent: Collection[int] = ()) -> bool:
        """Note that a worker has died, or was killed because it hung or broke the protocol.

        What it owed is run once more, each request alone, so that one which kills workers is found
        and harms no other; it fails if it must not be run again, or was the only one that a worker
        had when this happened once more.

        Args:
            now: The time.
            stage: The position of the worker's stage.
            place: The position of the worker in it.
            unsent: Requests of its batch that it had not been sent yet, so that they wait again as
                if they had not been taken.

        Returns:
            Whether this death, and the one before it, are the fault of the only request that the
            worker had, and not the stage's.
        """
        return self._losses.lost(now, self.batchers[stage], place, unsent)

    def worker_left(self, now: float, stage: int, place: int) -> None:
        """Note that a worker is gone, perhaps amid a batch, and that no request is to blame.

        The requests that it had wait again.
        """
        self._losses.left(now, self.batchers[stage], place)

    # -- what to do

    def poll(self, now: float) -> Todo:
        """Return all there is to do now, because of what happened or because time has passed."""
        todo = self._todo
        late_at = self._entrance.refuse_unserved(now) if self.slo_s < inf else inf
        onward_s = 0.0
        for batcher in reversed(self.batchers):
            lobby = batcher.lobby
            lobby.view.onward_s = onward_s
            self._poll_stage(now, batcher)
            if lobby.stage:
                onward_s += batcher.expected_s(now)
        if self.closed_because is not None:
            for batcher in self.batchers:  # the last that could have joined one has just expired, or was refused
                if batcher.queue.count and not batcher.lobby.closing and self._is_last_call(batcher):
                    self._poll_stage(now, batcher)
        if self.door.count:
            self._open_door(now)
            todo.wake_at = self.door.earliest_deadline
        todo.wake_at = min(todo.wake_at, late_at)
        for batcher in self.batchers:
            lobby = batcher.lobby
            if lobby.attention_at < todo.wake_at:
                todo.wake_at = lobby.attention_at
            if lobby.wake_at is not None and lobby.wake_at < todo.wake_at:
                todo.wake_at = lobby.wake_at
            if batcher.leaving:
                todo.drained = [*todo.drained, *[(lobby.stage, place) for place in batcher.take_drained()]]
            if batcher.lent:
                places = batcher.wanted_back if self.closed_because is None else batcher.lent
                todo.recall = [*todo.recall, *[(lobby.stage, place) for place in places]]
        endings = self._endings
        todo.answer, endings.answers = endings.answers, todo.answer
        self._todo = Todo()
        return todo

    @property
    def has_untold_answers(self) -> bool:
        """Whether requests have been answered that no poll has handed out yet."""
        return bool(self._endings.answers)

    def collect_answers(self) -> list[Request]:
        """Return the requests answered since the last poll, where nothing is to be done now."""
        return self._endings.collect()

    def retry_after_s(self, now: float) -> float:
        """Return after how many seconds a caller that is refused now should try again."""
        return self._entrance.retry_after_s(now)

    def _poll_stage(self, now: float, batcher: Crew) -> None:
        """Ask one stage what to do."""
        todo, lobby, journal = self._todo, batcher.lobby, self._journal
        room = self._room_after(batcher)
        if now >= lobby.attention_at:
            self._attend(now, batcher)
        if self.closed_because is not None:
            lobby.closing = self._is_last_call(batcher)
        dropped: list[tuple[Request, str]] = []
        if journal is None:
            batcher.poll(now, room, todo, dropped)
        else:
            n_run, n_orders = len(todo.run), len(todo.orders)
            batcher.poll(now, room, todo, dropped)
            record_batches(journal, now, batcher.name, todo.run[n_run:])
            record_orders(journal, now, batcher.name, todo.orders[n_orders:])
        if dropped:
            self._entrance.drop(now, dropped)

    def _attend(self, now: float, batcher: Crew) -> None:
        """End what has expired in a stage, and have its workers that hang killed."""
        expired, hung = batcher.attend(now)
        for request, started in expired:
            self._endings.expire(now, request, started, batcher.hint(now, request, started))
        self._todo.kill += [(batcher.lobby.stage, place) for place in hung]

    def _is_last_call(self, batcher: Crew) -> bool:
        """Report whether all that can ever join a stage's queue is in it.

        It is asked only once new requests are refused (`closed_because`).
        """
        if self._entrance.lets_in:
            return False
        return not any(one.queue.count or one.is_wanted for one in self.batchers[: batcher.lobby.stage])

    def _open_door(self, now: float) -> None:
        """Let requests in from the door while there is room.

        Each time some came in, the first stage is asked what to run once more.
        """
        for request in self.door.expire(now):
            self._endings.expire(now, request)
        first = self.batchers[0]
        while self._entrance.fill(now) and first.idle:
            self._poll_stage(now, first)

    def _room_after(self, batcher: Crew) -> float:
        """Return how many results the stage after this one can take."""
        if batcher.lobby.stage == self._last:
            return inf
        if self._is_held and not batcher.lobby.stage and self.closed_because is None:
            return 0
        queue = self.batchers[batcher.lobby.stage + 1].queue
        return queue.max_size - queue.count if queue.nbytes < queue.max_bytes else 0
