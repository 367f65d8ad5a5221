"""A chain of stages and the way of a request through it; the object that every driver drives.

Events go in (`submit`, `cancel`, `completed`, `worker_ready`, `worker_lost`), `poll` says what to do next. The
invariants:

* every request gets exactly one answer, be it a refusal (`DONE` is entered once, and whoever enters it appends the
  request to `Todo.answer`), unless its caller has cancelled it;
* an error in any stage goes straight back to its caller;
* only the first stage refuses; a later one gives credits: stage k takes a batch only when stage k+1 has room for it;
* late stages are asked first, so that the room they make can be used in the same poll;
* whatever a policy raises, and wherever, every request is somewhere inside or answered; `abort` answers the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from math import inf

from carpool.core import trail
from carpool.core.batcher import Batch, Batcher
from carpool.core.journal import Journal
from carpool.core.queue import Alone, Queue
from carpool.core.reply import Reply
from carpool.core.trail import AT_THE_DOOR
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError, Overloaded, Unavailable
from carpool.policy.admission import Admission, retry_after_s
from carpool.request import DONE, NEW, QUEUED, RUNNING, Request

_DISPLACED = "the queue is full, and others have a higher priority"

_MOST_LOSSES = 2  # workers of one stage that a request may cost


class Todo:
    """What a driver must do now.

    Attributes:
        run: batches to send to their workers; do this first, the workers are idle, or nearly so.
        answer: requests whose callers are to be told.
        kill: (stage, place) of each worker that hangs.
        wake_at: when to poll again although nothing happens; infinity for never.
    """

    __slots__ = ("answer", "kill", "run", "wake_at")

    def __init__(self) -> None:
        self.run: list[Batch] = []
        self.answer: list[Request] = []
        self.kill: list[tuple[int, int]] = []
        self.wake_at = inf


class Pipeline:
    """The stages of one service.

    Args:
        batchers: of its stages, first to last.
        slo_s: how soon after their admission requests are due; None leaves it at their deadlines.
        measure: bytes that a result will hold while it waits for the next stage.
        journal: records what happens to each request, if given.
    """

    def __init__(
        self,
        batchers: Sequence[Batcher],
        *,
        slo_s: float | None = None,
        measure: Callable[[object], int] = lambda result: 0,
        journal: Journal | None = None,
    ) -> None:
        self.batchers = tuple(batchers)
        self.journal = journal
        self.closed: CarpoolError | None = None  # why new requests are refused
        self.admitted = 0
        self.refused = 0
        self.answered = 0  # of the admitted
        self.cancelled = 0
        self.door = Queue()  # callers that wait for room; bounded by the callers there are
        self._admission = Admission(self.batchers[0].queue.max_size, self.batchers[0].queue.max_bytes)
        self.slo_s = inf if slo_s is None else slo_s
        self._measure = measure
        self._todo = Todo()
        for stage, batcher in enumerate(self.batchers):
            batcher.stage = stage
        for batcher, following in pairwise(self.batchers):
            batcher.outlet = following.queue.max_size

    def __repr__(self) -> str:
        return f"<Pipeline {' -> '.join(map(repr, self.batchers))}>"

    @property
    def waiting(self) -> int:
        """Requests in queues, the door's included."""
        waiting = self.door.count
        for batcher in self.batchers:
            waiting += batcher.queue.count
        return waiting

    @property
    def unanswered(self) -> int:
        """Admitted requests whose callers still wait."""
        return self.admitted - self.answered - self.cancelled

    # -- what happened

    def submit(self, now: float, requests: Sequence[Request]) -> None:
        """New requests, in the order of their arrival. One that is refused is answered with the error at once.

        Raises:
            ValueError: one of them was submitted before; then none is taken.
        """
        try:
            if self.closed is None and not self.door.count and self.journal is None and self._admit_all(now, requests):
                return
        except BaseException:  # of the policy
            self._keep(now, requests)
            raise
        _check_new(requests)
        try:
            for request in requests:
                if request.state == NEW:  # some may have been cancelled
                    self._submit_one(now, request)
        except BaseException:
            self._keep(now, requests)
            raise

    def cancel(self, now: float, request: Request) -> None:
        """The caller has gone. A queued request is never run; a running one's result is dropped."""
        state = request.state
        if state == NEW:
            request.state = DONE
        if state not in (QUEUED, RUNNING):
            return
        self.cancelled += 1
        request.caller = None
        if self.journal is not None:
            self.journal.record(now, "cancelled", request.id)
        if request.stage == AT_THE_DOOR:
            self.door.remove(request)
        elif state == QUEUED:
            self.batchers[request.stage].leave(now, request)
        else:
            self.batchers[request.stage].abandon(now, request)

    def completed(self, now: float, reply: Reply) -> None:
        """A worker has answered a batch, or a part of it. Each request that is answered ends in one of six ways:

        1. nobody waits for it any more, or it never was that worker's: the result is dropped;
        2. the worker found that its deadline had passed, or
        3. it goes no further since its deadline passed meanwhile: it expires;
        4. it has failed: it is answered with its error;
        5. it has been through the last stage: it is answered with its result;
        6. else the result is what the next stage gets, unless it cannot be weighed for it, which fails the request.

        Raises:
            ValueError: there are more or fewer results than ids; then nothing was done.
        """
        ids, results, errors, stage = reply.ids, reply.results, reply.errors, reply.stage
        if len(results) != len(ids):
            raise ValueError(f"{len(results)} results for {len(ids)} requests")
        batcher = self.batchers[stage]
        is_last = stage == len(self.batchers) - 1
        batch = batcher.in_flight.get(reply.place)
        if now >= batcher.attention_at and batch is not None and batch.id == reply.batch_id:
            for late in batch.expire(now):  # the driver stood still meanwhile, or would have polled before
                self._expired(now, late, batch.started)
        takers = batcher.completed(now, reply.place, reply.batch_id, ids, reply.busy_s, ok=not errors)
        if errors is None and is_last and self.journal is None:
            batcher.late_results += self._answer_all(takers, results)
            return
        passed: list[Request] = []
        for i, request in enumerate(takers):
            if request is None:
                continue
            if request.state != RUNNING:
                batcher.late_results += 1
            elif errors is not None and i in errors:
                if isinstance(errors[i], DeadlineExceeded):  # the worker does not know where the time went
                    self._expired(now, request, batch.started if batch else None)
                else:
                    self._fail(now, request, errors[i])
            elif is_last:
                request.result = results[i]
                self._answer(now, request)
            elif request.deadline <= now:
                self._expired(now, request, batch.started if batch else None)
            elif self._weigh(now, request, stage + 1, results[i]):
                request.item = results[i]
                request.nbytes = self._measure(results[i])
                passed.append(request)
        if passed:
            assert batch is not None
            self._pass_on(now, stage, passed, batch.started)

    def call_started(self, now: float, stage: int, place: int, batch_id: int) -> None:
        """A worker that makes several calls for one batch has started the next one."""
        self.batchers[stage].call_started(now, place, batch_id)

    def trained(self, stage: int, n: int, size: int, busy_s: float) -> None:
        """A worker's warm-up has run `n` examples, with sizes summing to `size`, in `busy_s`."""
        self.batchers[stage].trained(n, size, busy_s)

    def went_alone(self, began: float, now: float, busy_s: float, ok: bool) -> None:
        """A request that the only stage's `Batcher.lets_go` let go was never submitted here, and has been answered."""
        self.admitted += 1
        self.answered += 1
        self.batchers[0].went_alone(began, now, busy_s, ok)

    def worker_ready(self, stage: int, place: int) -> None:
        """A worker can take batches from now on."""
        self.batchers[stage].worker_ready(place)

    def worker_lost(self, now: float, stage: int, place: int, unsent: Collection[int] = ()) -> bool:
        """A worker has died, or was killed because it hung or broke the protocol.

        What it owed is run once more, each request alone, so that one which kills workers is found and harms no other;
        it fails if it must not be run again, or was the only one that a worker had when this happened once more.

        Args:
            now: the time.
            stage: the position of the worker's stage.
            place: the position of the worker in it.
            unsent: requests of its batch that it had not been sent yet, so that they wait again as if nothing had been.

        Returns:
            Whether that is so: this death, and the one before it, are that request's fault and not the stage's.
        """
        batcher = self.batchers[stage]
        batch = batcher.worker_lost(place)
        if batch is None:
            return False
        again: list[Request] = []
        untouched: list[Request] = []
        for request in batch.requests:
            if request.id in unsent:
                if request.state == RUNNING:
                    untouched.append(request)
                continue
            request.losses += 1
            if request.state != RUNNING:
                continue
            if batcher.idempotent and request.losses < _MOST_LOSSES:
                again.append(request)
                if self.journal is not None:
                    self.journal.record(now, "worker lost, queued again, alone", request.id, batcher.name)
            else:
                self._fail(now, request, _lost_with(request, batcher, batch.given_up))
        if again:
            batcher.quarantine(again)
        self._put_back(now, batcher, untouched, batcher.take_back(place))
        return batch.requests[0].losses >= _MOST_LOSSES

    def worker_left(self, now: float, stage: int, place: int) -> None:
        """A worker goes, in the midst of a batch perhaps, and none of its requests is to blame: they wait again."""
        batcher = self.batchers[stage]
        batch = batcher.worker_lost(place)
        if batch is None:
            return
        again = [request for request in batch.requests if request.state == RUNNING]
        self._put_back(now, batcher, again, batcher.take_back(place))

    def close(self, error: CarpoolError) -> None:
        """Refuse new requests with `error` from now on; those inside go on, and from the next poll on nothing is held
        back for company that cannot come."""
        self.closed = error

    def abort(self, now: float, error: CarpoolError) -> None:
        """Refuse new requests and fail all that are inside. No policy is asked or told anything from now on."""
        self.closed = error
        for request in list(self.door):
            self.door.remove(request)
            self._fail(now, request, copy.copy(error))
        for batcher in self.batchers:
            batcher.retired = True
            for request in list(batcher.queue):
                batcher.queue.remove(request)
                self._fail(now, request, copy.copy(error))
            for batch in batcher.handed_over:
                for request in batch.requests:
                    if request.state == RUNNING:
                        batcher.abandon(now, request)
                        self._fail(now, request, copy.copy(error))

    # -- what to do

    def poll(self, now: float) -> Todo:
        """Everything there is to do at `now`, since the last poll and because time has passed."""
        todo = self._todo
        ahead_s = 0.0
        for batcher in reversed(self.batchers):
            batcher.policy.ahead_s = ahead_s
            self._poll_stage(now, batcher)
            if batcher.stage and not batcher.retired:
                ahead_s += batcher.expected_s(now)
        if self.closed is not None:
            for batcher in self.batchers:  # the last who could have joined one has just expired, or was refused
                if batcher.queue.count and not batcher.closing and self._is_last_call(batcher):
                    self._poll_stage(now, batcher)
        if self.door.count:
            self._open_door(now)
            todo.wake_at = self.door.earliest_deadline
        for batcher in self.batchers:
            if batcher.attention_at < todo.wake_at:
                todo.wake_at = batcher.attention_at
            if batcher.wake_at is not None and batcher.wake_at < todo.wake_at:
                todo.wake_at = batcher.wake_at
        self._todo = Todo()
        return todo

    def take_answers(self) -> list[Request]:
        """Those answered since the last poll, for one who does not want anything done now."""
        answered, self._todo.answer = self._todo.answer, []
        return answered

    def retry_after_s(self, now: float) -> float:
        """When trying again makes sense for a caller that is refused now: after those who wait already."""
        first = self.batchers[0]
        return retry_after_s(first.predicted_wait_s(now, first.queue.size + self.door.count), self._fastest_s())

    # -- inside

    def _admit_all(self, now: float, requests: Sequence[Request]) -> bool:
        """The common case in short: all are new, nobody is in a hurry, and there is room for all.

        If it is not so, none was taken.
        """
        first = self.batchers[0]
        longest_wait_s = first.longest_wait_s(len(requests)) + first.policy.ahead_s
        latest = now + self.slo_s
        soonest, nbytes = inf, 0
        id = self.admitted
        for request in requests:
            if request.id or request.state != NEW:
                break
            id += 1
            request.id = id
            request.admitted = request.arrived = now
            deadline = request.deadline
            if deadline < soonest:
                soonest = deadline
            if deadline < request.due:
                request.due = deadline
            if latest < request.due and not request.bulk:
                request.due = latest
            nbytes += request.nbytes
        n = id - self.admitted
        hurried = soonest - now < longest_wait_s
        if n < len(requests) or not n or hurried or not first.queue.has_room(nbytes, n):
            for request in requests[:n]:
                request.id = 0
            return False
        self.admitted = id
        first.enter(now, requests, soonest)
        return True

    def _submit_one(self, now: float, request: Request) -> None:
        """A request that may be refused, may have to wait at the door, or is written about."""
        first = self.batchers[0]
        request.admitted = request.arrived = now
        request.due = min(request.due, request.deadline, inf if request.bulk else now + self.slo_s)
        if self.closed is not None:
            self._refuse(request, copy.copy(self.closed))
            return
        roomy = first.queue.has_room(request.nbytes)
        full = self.door.count > 0 or not roomy
        give_way = [] if roomy else first.in_the_way(request)
        refusal = self._refusal(now, request, give_way)
        if refusal is not None:
            self._refuse(request, refusal)
            return
        self.admitted += 1
        request.id = self.admitted
        waits = full and not give_way
        if waits:
            request.stage = AT_THE_DOOR
            self.door.push([request])
        else:
            for other in give_way:
                self._displace(now, other)
            first.enter(now, [request])
        if self.journal is not None:
            self.journal.record(now, "waits for room" if waits else "admitted", request.id)

    def _keep(self, now: float, requests: Sequence[Request]) -> None:
        """The policy has raised while these were taken in: those that were not yet wait at the door."""
        for request in requests:
            if request.state == NEW:
                if not request.id:
                    self.admitted += 1
                    request.id = self.admitted
                request.stage = AT_THE_DOOR
                request.admitted = request.arrived = now
                self.door.push([request])

    def _refuse(self, request: Request, error: CarpoolError) -> None:
        """A new request is not taken in."""
        self.refused += 1
        request.state = DONE
        request.error = error
        self._todo.answer.append(request)

    def _displace(self, now: float, request: Request) -> None:
        """A request in the first queue has to make room: it is refused after all, or waits at the door if it can."""
        self.batchers[0].displace(now, request)
        if not request.patient:
            self._drop(now, [(request, _DISPLACED)])
            return
        request.stage = AT_THE_DOOR
        self.door.put_back([request])
        if self.journal is not None:
            self.journal.record(now, "waits for room again", request.id)

    def _refusal(self, now: float, request: Request, give_way: Sequence[Request]) -> CarpoolError | None:
        """Why a request that came now must not join the first queue, for which these would leave it; None if it may, or
        may wait for room."""
        first = self.batchers[0]
        queue = first.queue
        ahead: float = queue.ahead_of(request, now)
        if queue.weighted:
            ahead *= queue.size / queue.count
        outside, outside_bytes = self.door.count, self.door.nbytes  # nobody gets past them
        if give_way:
            outside = -len(give_way)
            outside_bytes = -sum([other.nbytes for other in give_way])
        return self._admission.refusal(
            now,
            request,
            queued=queue.count + outside,
            queued_bytes=queue.nbytes + outside_bytes,
            busy=len(first.in_flight),
            wait_s=first.predicted_wait_s(now, ahead + max(0, outside)),
            fastest_s=self._fastest_s(),
        )

    def _fastest_s(self) -> float:
        """The least time from the first queue's head to the answer."""
        return sum([batcher.fastest_s for batcher in self.batchers])

    def _poll_stage(self, now: float, batcher: Batcher) -> None:
        todo = self._todo
        room = self._room_after(batcher)
        if now >= batcher.attention_at:
            expired, hung = batcher.attend(now)
            for request, started in expired:
                self._expired(now, request, started, "" if started is None else batcher.patience.hint(now - started))
            todo.kill += [(batcher.stage, place) for place in hung]
        if self.closed is not None:
            batcher.closing = self._is_last_call(batcher)
        refuse: list[tuple[Request, str]] = []
        try:
            while (batch := batcher.next_batch(now, room - batcher.running, refuse)) is not None:
                todo.run.append(batch)
                if self.journal is not None:
                    for request in batch.requests:
                        how = f"{batch.reason}, ahead" if batch.ahead else batch.reason
                        detail = f"batch {batch.id} of {len(batch)} on worker {batch.place} ({how})"
                        self.journal.record(now, "runs", request.id, batcher.name, detail)
        finally:
            if refuse:
                self._drop(now, refuse)

    def _is_last_call(self, batcher: Batcher) -> bool:
        """Whether nobody can join the stage's queue any more, now that callers are refused, before some of it runs."""
        if self.door.count and self.batchers[0].queue.has_room(self.door.peek(1)[0].nbytes):
            return False
        return not any(one.queue.count or one.is_wanted for one in self.batchers[: batcher.stage])

    def _drop(self, now: float, refuse: Sequence[tuple[Request, str]]) -> None:
        """Requests that were queued are refused after all, and told why."""
        errors = [Overloaded(why) for _, why in refuse]
        for (request, _), error in zip(refuse, errors, strict=True):
            self._fail(now, request, error)
        again_s = self.retry_after_s(now)  # asks the policy, so this comes last
        for error in errors:
            error.retry_after_s = again_s

    def _open_door(self, now: float) -> None:
        """Let waiting callers in while there is room; whenever some came in, the first stage is asked once more."""
        for request in self.door.expire(now):
            self._expired(now, request)
        first = self.batchers[0]
        while self._let_in(now, first) and first.idle:
            self._poll_stage(now, first)

    def _let_in(self, now: float, first: Batcher) -> bool:
        """Fill the first queue from the door; whether anybody came in."""
        before = first.queue.count
        while self.door.count and first.queue.has_room(self.door.peek(1)[0].nbytes):
            (request,) = self.door.take(1, now)
            request.stage = 0
            request.arrived = now
            first.enter(now, [request])
            if self.journal is not None:
                self.journal.record(now, "let in", request.id)
        return first.queue.count > before

    def _room_after(self, batcher: Batcher) -> float:
        """How many results the stage after it can take."""
        if batcher.stage == len(self.batchers) - 1:
            return inf
        queue = self.batchers[batcher.stage + 1].queue
        return queue.max_size - queue.count if queue.nbytes < queue.max_bytes else 0

    def _answer_all(self, takers: Sequence[Request | None], results: Sequence[object]) -> int:
        """The common case in short: a last stage's reply without an error in it. Returns how many came too late."""
        answer = self._todo.answer
        before = len(answer)
        for request, result in zip(takers, results, strict=True):
            if request is not None and request.state == RUNNING:
                request.state = DONE
                request.result = result
                answer.append(request)
        answered = len(answer) - before
        self.answered += answered
        return len(takers) - takers.count(None) - answered

    def _put_back(self, now: float, batcher: Batcher, untouched: list[Request], ahead: list[Request]) -> None:
        """A worker is gone: what it has not looked at waits again, as if nothing had been; so does its next one."""
        if self.journal is not None:
            for request in ahead:
                self.journal.record(now, "worker gone, queued again", request.id, batcher.name)
        batcher.put_back(now, [*untouched, *ahead])

    def _weigh(self, now: float, request: Request, stage: int, result: object) -> bool:
        """Set how much of a batch the request takes up in its next stage; if that cannot be told, it fails."""
        try:
            request.size = self.batchers[stage].weigh(result)
        except CarpoolError as error:
            self._fail(now, request, error)
            return False
        except BaseException as error:  # it is the user's function, and has failed in a way that nobody has foreseen
            kind = type(error).__name__
            text = f"size= of stage {self.batchers[stage].name} raised {kind}"
            self._fail(now, request, ModelError(text, type_name=kind))
            return False
        return True

    def _pass_on(self, now: float, stage: int, requests: Sequence[Request], started: float) -> None:
        """One stage is done with the requests, which it has worked on since `started`; the next gets their results."""
        trail.extend(requests, stage, started, now)
        for request in requests:
            request.stage = stage + 1
            request.arrived = now
            request.format = 0
            if request.losses:
                _acquit(request)
            if self.journal is not None:
                self.journal.record(now, "passed", request.id, self.batchers[stage].name)
        self.batchers[stage + 1].enter(now, requests)

    def _expired(self, now: float, request: Request, started: float | None = None, hint: str = "") -> None:
        text = trail.format_expiry(now, request, started, [batcher.name for batcher in self.batchers])
        self._fail(now, request, DeadlineExceeded(text + hint))

    def _fail(self, now: float, request: Request, error: Exception) -> None:
        request.error = error
        self._answer(now, request)

    def _answer(self, now: float, request: Request) -> None:
        request.state = DONE
        self.answered += 1
        self._todo.answer.append(request)
        if self.journal is not None:
            outcome = "answered" if request.error is None else f"failed: {request.error}"
            self.journal.record(now, outcome, request.id)


def _lost_with(request: Request, batcher: Batcher, given_up: str) -> CarpoolError:
    """What to tell a request that is not run again; `given_up` says why its worker was, if it has not died."""
    if request.losses < _MOST_LOSSES:
        text = f"a worker of stage {batcher.name} died with this request"
        if given_up:
            text = f"a worker of stage {batcher.name} was given up with this request: {given_up}"
        return Unavailable(text, code="worker_lost")
    if given_up:
        return DeadlineExceeded(
            f"two workers of stage {batcher.name} were lost with this request, the second one when it ran alone and was"
            f" given up: {given_up}; it is not tried again"
        )
    text = (
        f"two workers of stage {batcher.name} died with this request or had to be killed, the second one when it ran"
        " alone; it is not tried again"
    )
    return ModelError(text, code="request_crashed_worker")


def _acquit(request: Request) -> None:
    """It has come through the stage alone: in the next one it is like any other."""
    request.losses = 0
    lane = request.lane
    if isinstance(lane.key, Alone):
        request.lane = lane._replace(key=lane.key.former_key)


def _check_new(requests: Sequence[Request]) -> None:
    """A request that was cancelled before it came here is passed over; one that is known here is a mistake."""
    seen: set[Request] = set()
    for request in requests:
        if request.id or request.state in (QUEUED, RUNNING) or request in seen:
            raise ValueError(f"{request!r} was submitted before")
        seen.add(request)
