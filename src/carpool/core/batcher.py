"""The batcher of one stage: a queue, a policy, idle workers and batches in flight.

Told what happened (`enter`, `completed`, `worker_ready`, `worker_lost`), asked what to run next (`next_batch`). It
keeps three promises whatever the policy says: no batch is larger than the limit, no request is dispatched after its
deadline, and a reply is paired with a request only if that worker was given that request in that batch.

A policy may be anybody's, and raise. So it is told before something becomes of a request, or when that has happened
altogether: whatever it raises, each request is in the queue, in a batch, or answered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import inf

from carpool.core.patience import Patience
from carpool.core.queue import Alone, Queue
from carpool.core.safe_size import SafeSize
from carpool.policy.base import Decision, Policy
from carpool.request import DONE, QUEUED, RUNNING, Request

_LEAD_S = 0.02  # so long before its worker should be free a batch ahead is handed over: drivers are late by some of it
_SHORT_LEAD_S = 0.002  # where it matters who comes meanwhile; timers tick in milliseconds
_STEADY = 0.25  # of a batch: with several workers, the mean deviation up to which the end of one can be foretold


class Batch:
    """Requests that one worker runs together.

    Attributes:
        id: unique within its stage.
        place: the position of its worker in the stage.
        size: sum of the requests' sizes.
        reason: why it went when it did (the policy's word).
        ahead: whether it was handed over while its worker still had another.
        started: when its worker got to it, which is when it was handed over unless it went ahead;
        call_started: when user code was last entered, and heard: when a part of it was last answered, to tell whether
            the worker hangs.
        given_up: why the worker is taken to hang; empty if it is not.
        n: how many requests it had at first; `requests` and `ids` are those that the worker still owes an answer.
        busy_s, ok: of the partial replies so far.
    """

    __slots__ = (
        "ahead",
        "busy_s",
        "call_started",
        "given_up",
        "heard",
        "id",
        "ids",
        "n",
        "ok",
        "place",
        "reason",
        "requests",
        "size",
        "stage",
        "started",
    )

    def __init__(
        self,
        id: int,
        stage: int,
        place: int,
        requests: list[Request],
        size: int,
        reason: str,
        now: float,
        ahead: bool = False,
    ) -> None:
        self.id = id
        self.stage = stage
        self.place = place
        self.requests = requests
        self.size = size
        self.ids = [request.id for request in requests]
        self.reason = reason
        self.ahead = ahead
        self.started = self.call_started = self.heard = now
        self.given_up = ""
        self.n = len(requests)
        self.busy_s = 0.0
        self.ok = True

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def earliest_deadline(self) -> float:
        """When the next of its requests expires; infinity if nobody waits for it any more."""
        return min([request.deadline for request in self.requests if request.state == RUNNING], default=inf)

    @property
    def unwanted_since(self) -> float:
        """When the last of its callers went or was answered; infinity if somebody still waits."""
        if any(request.state == RUNNING for request in self.requests):
            return inf
        return max(self.heard, max([request.deadline for request in self.requests], default=self.heard))

    def expire(self, now: float) -> list[Request]:
        """Those whose deadline has passed; they are now done."""
        expired = [request for request in self.requests if request.state == RUNNING and request.deadline <= now]
        for request in expired:
            request.state = DONE
        return expired

    def __repr__(self) -> str:
        return f"<Batch {self.id} stage={self.stage} place={self.place} n={len(self)} {self.reason}>"


class Batcher:
    """One stage's decisions.

    Args:
        name: the stage's name.
        policy: decides when and how many; owned by this batcher alone.
        queue: where requests wait.
        max_batch_time_s: a worker that spends longer in one call is taken to hang. Infinity if the user has not said.
        patience_s: in that case, how long a call may go on for which nobody waits (see `core/patience.py`).
        idempotent: whether a request may be run once more when its worker is lost.
        runs_ahead: whether a worker may be handed its next batch before it is free. Only where requests may be run once
            more, since what lies with a worker that is given up may still be run by it.
        weigh: how much of a batch the result of the stage before takes up, if not 1; may raise a `CarpoolError`.

    Attributes:
        outlet: most results that the next stage can ever take at once; the pipeline sets it.
        safe_size: how much one call can hold before memory runs out, as far as it ever has.
        patience: how long a call may take.
        closing: nobody can join the queue any more, so nothing is held back for company; the pipeline sets it.
        retired: everybody has been answered, and the policy is asked and told nothing any more; likewise.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        queue: Queue,
        *,
        stage: int = 0,
        max_batch_time_s: float = inf,
        patience_s: float = inf,
        idempotent: bool = True,
        runs_ahead: bool = False,
        weigh: Callable[[object], int] | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.queue = queue
        self.stage = stage
        self.patience = Patience(max_batch_time_s, patience_s)
        self.idempotent = idempotent
        self.runs_ahead = runs_ahead and idempotent
        self.weigh = weigh or _counts_for_one
        self.outlet = inf
        self.closing = self.retired = False
        self.safe_size = SafeSize(policy.allowed_batch_sizes)
        self.in_flight: dict[int, Batch] = {}  # by worker
        self.ahead: dict[int, Batch] = {}  # by worker: the one after it, which lies with the worker already
        self.wake_at: float | None = None
        self.attention_at = inf  # nothing expires and nobody hangs before this
        self.batch_s = 0.0  # smoothed seconds from a batch's start to its end
        self.deviation_s = 0.0  # smoothed, how far batches are from that
        self.fastest_s = 0.0  # the least of these lately
        self.stray_replies = 0  # late, duplicate or unknown: dropped and counted
        self.late_results = 0  # came after the caller had been answered or had gone
        self._policy_listens = (
            type(policy).arrived is not Policy.arrived or type(policy).arrived_together is not Policy.arrived_together
        )
        self._knows_lone = _knows_lone(type(policy))
        self._idle: list[int] = []  # the worker that was busy last is used first: its caches are warm
        self._running = 0
        self._batch_ids = 0
        self._limited_since = 0  # the last batch that went before memory ran out

    def __repr__(self) -> str:
        return f"<Batcher {self.name} queued={len(self.queue)} running={self._running} idle={len(self._idle)}>"

    @property
    def running(self) -> int:
        """Requests that workers have been handed and have not answered."""
        return self._running

    @property
    def handed_over(self) -> list[Batch]:
        """The batches that workers have, those ahead included."""
        return [*self.in_flight.values(), *self.ahead.values()]

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for what workers have."""
        return any(batch.unwanted_since == inf for batch in self.handed_over)

    @property
    def idle(self) -> int:
        """Workers that could take a batch now."""
        return len(self._idle)

    # -- what happened

    def enter(self, now: float, requests: Sequence[Request], soonest: float | None = None) -> None:
        """Requests join the queue of this stage; their `stage` and `arrived` say so already.

        Args:
            now: the time.
            requests: at least one.
            soonest: the earliest of their deadlines, if it is known.
        """
        if soonest is None:
            soonest = min([request.deadline for request in requests])
        if soonest < self.attention_at:
            self.attention_at = soonest
        self.queue.push(requests)
        if self._policy_listens:
            self.policy.arrived_together(now, requests)

    def put_back(self, now: float, requests: Sequence[Request]) -> None:
        """Requests whose worker has left wait for another one; they have been waiting since they first arrived."""
        self.queue.put_back(requests)
        news = [request for request in requests if not request.losses]  # of those in quarantine it is not told
        if news:
            self.policy.arrived_together(now, news)

    def quarantine(self, requests: Sequence[Request]) -> None:
        """One of these may have killed the worker they shared: they wait in their old place, to be run one by one.

        The policy is not told, neither now nor when they have run: they do not arrive, and it does not decide on them.
        """
        for request in requests:
            request.lane = request.lane._replace(key=Alone(request.lane.key))
        self.queue.put_back(requests)

    def leave(self, now: float, request: Request) -> None:
        """The caller of a queued request has gone; it is now done."""
        self.queue.remove(request)
        self.policy.left(now, request)

    def abandon(self, now: float, request: Request) -> None:
        """The caller of a request that a worker has is gone, or told otherwise; it is now done."""
        request.state = DONE
        request.deadline = min(request.deadline, now)  # nobody waits for it from now on
        self.attention_at = min(self.attention_at, request.deadline + self.patience.least_s)

    def in_the_way(self, request: Request) -> list[Request]:
        """Who has to give up its place to a new request, if the queue is full; a batch of each priority stays, or half
        of a queue that is smaller than two batches."""
        return self.queue.in_the_way(request, max(1, int(min(self.policy.limit, self.queue.max_size / 2))))

    def displace(self, now: float, request: Request) -> None:
        """A queued request gives up its place to one of a higher priority; it is now done, or may wait elsewhere."""
        self.policy.left(now, request)
        self.queue.evict(request)

    def trained(self, n: int, size: int, busy_s: float) -> None:
        """A worker's warm-up took so long. Once requests have been run, those teach better."""
        if not self._batch_ids:
            self.policy.trained(n, size, busy_s)

    def worker_ready(self, place: int) -> None:
        """A worker can take batches from now on."""
        if place in self._idle or place in self.in_flight:
            raise ValueError(f"worker {place} of stage {self.name} is ready already")
        self._idle.append(place)

    def worker_lost(self, place: int) -> Batch | None:
        """A worker is gone; returns the batch that it had not finished, if any. One ahead is for `take_back`."""
        if place in self._idle:
            self._idle.remove(place)
        batch = self.in_flight.pop(place, None)
        if batch is not None:
            self._running -= len(batch)
        return batch

    def take_back(self, place: int) -> list[Request]:
        """A worker is gone, and has not looked at the batch ahead: those of it that still wait for their answers."""
        batch = self.ahead.pop(place, None)
        if batch is None:
            return []
        self._running -= len(batch)
        return [request for request in batch.requests if request.state == RUNNING]

    def call_started(self, now: float, place: int, batch_id: int) -> None:
        """The worker reports that it has entered user code once more for the same batch; too late if it hung before."""
        batch = self.in_flight.get(place)
        if batch is not None and batch.id == batch_id and not batch.given_up:
            batch.call_started = now

    def spare(self, now: float, place: int) -> None:
        """A worker that seemed to hang does not: its time counts anew, if it still has something to do."""
        batch = self.in_flight.get(place)
        if batch is not None:
            batch.call_started = now
            batch.given_up = ""
            self.attention_at = min(self.attention_at, now + self.patience.least_s)

    def ran_out_of_memory(
        self, place: int, batch_id: int, calls: Sequence[Sequence[int]], fitted: Sequence[Sequence[int]]
    ) -> None:
        """A worker, before it replies: calls for parts of its batch ran out of memory, and smaller ones fitted.

        Args:
            place: the position of the worker.
            batch_id: its batch.
            calls: for each call that ran out, the places of its items in the batch; one at least.
            fitted: likewise for those that went through.

        Raises:
            ValueError: the worker has no such batch, or the batch no such places.
        """
        batch = self.in_flight.get(place)
        if batch is None or batch.id != batch_id or len(batch) != batch.n:
            raise ValueError(f"worker {place} of stage {self.name} has no batch {batch_id}")
        sizes = [request.size for request in batch.requests]
        if any(not 0 <= place < len(sizes) for call in [*calls, *fitted] for place in call):
            raise ValueError(f"batch {batch_id} of stage {self.name} has {len(sizes)} items, not more")
        batch.ok = False  # the time it takes is not that of one call
        tried = min([sum([sizes[place] for place in call]) for call in calls])
        smaller = [size for call in fitted if (size := sum([sizes[place] for place in call])) < tried]
        self.safe_size.ran_out(tried, max(smaller, default=0))
        self._limited_since = self._batch_ids

    def completed(
        self, now: float, place: int, batch_id: int, ids: Sequence[int], busy_s: float, ok: bool
    ) -> Sequence[Request | None]:
        """The worker at `place` has answered the requests `ids`.

        Returns the requests that the answers are for, in the order of `ids`; None where one is double or was never
        asked for. Of these requests, only those that are still running take theirs: for the others it is late.
        `busy_s` is the time spent on these answers.
        """
        batch = self.in_flight.get(place)
        if batch is None or batch.id != batch_id:
            return self._completed_ahead(place, batch_id, ids)
        if ids == batch.ids:  # the common case: one reply for the whole batch, in its order
            self._finish(now, batch, busy_s, ok)
            return batch.requests
        return self._completed_partly(now, batch, ids, busy_s, ok)

    # -- a request that nobody else shares the stage with

    def lets_go(self, now: float, deadline: float, slo_s: float) -> bool:
        """Whether a request of size 1 that came now, to a worker that is idle beside an empty queue, would be admitted
        and go at once. Changes nothing; False where that takes more thought.
        """
        if not self._knows_lone:
            return False
        due = deadline
        if deadline != inf and deadline - now < self.longest_wait_s(1):
            return False
        if now + slo_s < due:
            due = now + slo_s
        return self.policy.lets_go(due - now)

    def went_alone(self, began: float, now: float, busy_s: float, ok: bool) -> None:
        """Such a request was let go and is done: what has become of it is told here in one, and not step by step."""
        took_s = now - began
        policy = self.policy
        self._batch_ids += 1
        policy.hop_s += 0.1 * (max(0.0, took_s - busy_s) - policy.hop_s)
        policy.went_alone(began, now, busy_s, ok)
        self._took(took_s)

    # -- what to do

    def next_batch(self, now: float, room: float, refuse: list[tuple[Request, str]]) -> Batch | None:
        """The batch to run now, or None; `wake_at` then says when to ask again.

        Args:
            now: the time.
            room: how many results the next stage can take.
            refuse: the policy's drops are appended here, and why; also if this raises in the end.

        Raises:
            RuntimeError: the policy asked for what is not possible; nothing was done.
        """
        queue = self.queue
        self.wake_at = None
        while queue.count:
            if queue.lone_lanes and queue.next_goes_alone and self._idle and room >= 1:
                return self._start(now, 1, "quarantine")  # it waits for nobody, whatever the policy
            lanes, short = queue.lanes, room < queue.count
            decision, n, reason = self._ask(now, room)
            if decision.drop:
                self._drop(now, decision.drop)
                refuse += [(request, decision.drop_reason) for request in decision.drop]
            if n and queue.count:
                if n > self.safe_size.limit and queue.size > self.safe_size.limit:
                    n = self._safe(n)
                if queue.weighted:
                    n = self._fitting(n)
                return self._start(now, n if n <= room else int(room), reason)
            self.wake_at = decision.wake_at
            if not decision.drop or (not short and (lanes == 1 or decision.wake_at is not None)):
                break  # else there are others left, whom the policy has not judged yet, or for whom there is room now
        if self.runs_ahead and queue.count and len(self.in_flight) > len(self.ahead) and not self._idle:
            return self._next_ahead(now, room)
        return None

    def longest_wait_s(self, more: int) -> float:
        """A bound for `predicted_wait_s` and a batch after it, if `more` units came now; quicker to tell."""
        return self.batch_s * (2 + len(self.ahead) + (self.queue.size + more) / self._limit)

    def predicted_wait_s(self, now: float, ahead: float) -> float:
        """How long a request waits that has `ahead` units queued ahead of it, by what recent batches took.

        Rather too short than too long: in a stage that is not saturated, batches are smaller than they could be.
        """
        limit = self._limit
        if self._idle and ahead < limit:
            return 0.0
        workers = max(1, len(self._idle) + len(self.in_flight))
        wait_s = self.policy.predicted_wait_s(int(ahead), workers)
        if wait_s is None:
            wait_s = ahead // limit * self.batch_s / workers
        if self.ahead:
            wait_s += len(self.ahead) * self.batch_s / workers
        if self._idle or not self.in_flight:
            return wait_s
        return wait_s + max(0.0, min(batch.started for batch in self.in_flight.values()) + self.batch_s - now)

    def expected_s(self, now: float) -> float:
        """How long a request that came now would spend here, its batch included."""
        if not self.in_flight and not self.queue.count:
            return self.fastest_s
        return self.predicted_wait_s(now, self.queue.size) + self.batch_s

    def attend(self, now: float) -> tuple[list[tuple[Request, float | None]], list[int]]:
        """To be called from `attention_at` on.

        Returns:
            What has expired, which is now done, with the time at which it was handed to a worker if it was; and which
            workers hang.
        """
        waited = self.queue.expired(now)
        for request in waited:
            self.policy.left(now, request)
        expired: list[tuple[Request, float | None]] = []
        for request in waited:
            self.queue.remove(request)
            expired.append((request, None))
        hung = []
        self.attention_at = self.queue.earliest_deadline
        for place, batch in self.in_flight.items():
            expired += [(request, batch.started) for request in batch.expire(now)]
            self.attention_at = min(self.attention_at, batch.earliest_deadline)
            if batch.given_up:
                continue  # it is being killed: said once
            times = batch.call_started, batch.unwanted_since, batch.size
            until = self.patience.until(*times)
            if until <= now:
                hung.append(place)
                batch.given_up = self.patience.why(*times)
            elif until < self.attention_at:
                self.attention_at = until
        for batch in self.ahead.values():
            expired += [(request, None) for request in batch.expire(now)]
            self.attention_at = min(self.attention_at, batch.earliest_deadline)
        return expired, hung

    # -- inside

    @property
    def _limit(self) -> float:
        """Most that a batch can hold now."""
        limit, safe = self.policy.limit, self.safe_size.limit
        return safe if safe < limit else limit

    def _safe(self, units: int) -> int:
        """How many of these fit into memory, or are worth trying."""
        limit = self.safe_size.limit
        if any(batch.size > limit for batch in self.handed_over):
            return int(limit)  # what comes of the last one that is larger is not known yet
        return self.safe_size.allowed(units)

    def _ask(self, now: float, room: float) -> tuple[Decision, int, str]:
        """What the policy says, how many units go, and why. Raises as `next_batch` does."""
        queue = self.queue
        free = len(self._idle)
        if free and room < queue.count and room < self.outlet and room < self._most_requests():
            free = 0  # no credit: the next stage could not take what this one would produce
        decision = self.policy.decide(now, queue, free, len(self.in_flight))
        n = decision.take
        if type(n) is not int:
            n = operator.index(n)
        if n and not (free and 0 < n <= self.policy.limit):
            raise self._impossible(n, f"with {free} free workers")
        if not n and free and self.closing:
            return decision, int(self.policy.limit), "closing"
        return decision, n, decision.reason

    def _start(self, now: float, n: int, reason: str) -> Batch:
        place = self._idle.pop()
        batch = self._make(now, n, reason, place)
        look_at = now + self.patience.least_s
        if look_at < self.attention_at:
            self.attention_at = look_at
        self.in_flight[place] = batch
        return batch

    def _make(self, now: float, n: int, reason: str, place: int, ahead: bool = False) -> Batch:
        size = self.queue.size
        requests = self.queue.take(n, now)
        self._batch_ids += 1
        self._running += len(requests)
        return Batch(self._batch_ids, self.stage, place, requests, size - self.queue.size, reason, now, ahead)

    def _next_ahead(self, now: float, room: float) -> Batch | None:
        """A batch for a busy worker, if waiting could not make it a better one.

        It lies in the worker's socket when the worker comes for it. Until then it cannot be taken back, and who leaves
        it is run all the same. So it goes shortly before the learned end of the call under way, and later still where
        it matters who comes meanwhile: where another worker may be free first, and where requests have priorities, keys
        or buckets. Requests of different lanes and those in quarantine are kept until a worker is free, and so is all
        that waits for one of several workers whose ends cannot be foretold, or for one that takes too long already.
        """
        queue = self.queue
        if queue.lanes > 1 or queue.lone_lanes or not self.batch_s:
            return None
        several = len(self.in_flight) > 1
        if several and self.deviation_s > _STEADY * self.batch_s:
            return None
        lead_s = _LEAD_S
        if several or queue.varied:
            lead_s = min(_LEAD_S, max(_SHORT_LEAD_S, 0.5 * self.batch_s))
        for batch in self.in_flight.values():  # in the order of their starts
            free_in_s = batch.started + self.batch_s - now
            if batch.place in self.ahead or batch.given_up or free_in_s < -lead_s:
                continue
            decision = self.policy.decide_ahead(now, queue, max(0.0, free_in_s))
            n = operator.index(decision.take)
            if not 0 <= n <= self.policy.limit:
                raise self._impossible(n, "for a busy worker")
            if n > self.safe_size.limit:
                n = self._safe(n)
            if not n or n > room:
                return None
            opens_at = batch.started + self.batch_s - lead_s
            if now < opens_at:
                self.wake_at = opens_at if self.wake_at is None else min(self.wake_at, opens_at)
                return None
            if queue.weighted:
                n = self._fitting(n)
            self.ahead[batch.place] = made = self._make(now, n, decision.reason, batch.place, ahead=True)
            return made
        return None

    def _impossible(self, n: int, with_what: str) -> RuntimeError:
        policy = type(self.policy).__name__
        return RuntimeError(
            f"policy {policy} of stage {self.name} asked for a batch of {n} {with_what} and a limit of"
            f" {self.policy.limit}"
        )

    def _begin(self, now: float, batch: Batch) -> None:
        """The worker of a batch ahead is done with the one before it."""
        batch.started = batch.call_started = batch.heard = now
        self.attention_at = min(self.attention_at, now + self.patience.least_s)
        self.in_flight[batch.place] = batch

    def _completed_ahead(self, place: int, batch_id: int, ids: Sequence[int]) -> Sequence[Request | None]:
        """Answers for a batch that the worker does not work on: strays, unless one ahead has failed to reach it."""
        batch = self.ahead.get(place)
        if batch is None or batch.id != batch_id or ids != batch.ids:
            self.stray_replies += len(ids)
            return [None] * len(ids)
        del self.ahead[place]
        self._running -= len(batch)
        return batch.requests

    def _most_requests(self) -> float:
        """How many of those that wait a full batch would hold, about."""
        limit, queue = self._limit, self.queue
        return limit * queue.count / queue.size + 1 if queue.weighted else limit

    def _fitting(self, units: int) -> int:
        """How many requests from the head fit into so many units; one that is larger by itself counts as fitting."""
        n = size = 0
        for request in self.queue.peek(units):
            size += request.size
            if n and size > units:
                break
            n += 1
        return n

    def _drop(self, now: float, requests: Sequence[Request]) -> None:
        """The policy refuses these."""
        if len(set(requests)) < len(requests) or any(r.state != QUEUED or r.stage != self.stage for r in requests):
            raise RuntimeError(f"policy {type(self.policy).__name__} of stage {self.name} drops what is not queued")
        for request in requests:
            self.policy.left(now, request)
        for request in requests:
            self.queue.remove(request)

    def _finish(self, now: float, batch: Batch, busy_s: float, ok: bool) -> None:
        took_s = now - batch.started
        if not batch.requests[0].losses and not self.retired:  # in quarantine the policy does not decide
            ok = ok and batch.ok
            if ok and batch.size > self.safe_size.limit and batch.id > self._limited_since:
                self.safe_size.fitted(batch.size)  # it was one that tries whether more fits
            policy = self.policy
            busy_s += batch.busy_s
            policy.hop_s += 0.1 * (max(0.0, took_s - busy_s) - policy.hop_s)
            policy.completed(now, batch.n, batch.size, busy_s, ok)
        del self.in_flight[batch.place]
        self._running -= len(batch.requests)
        following = self.ahead.pop(batch.place, None) if self.ahead else None
        if following is None:
            self._idle.append(batch.place)
        else:
            self._begin(now, following)
        if self.patience.learns:
            self.patience.learn(batch.size, took_s)
        if self.runs_ahead and self.batch_s:
            self.deviation_s += (abs(took_s - self.batch_s) - self.deviation_s) * 0.2
        self._took(took_s)

    def _took(self, took_s: float) -> None:
        """What the last batch took, from its start to its end."""
        self.batch_s += (took_s - self.batch_s) * (0.2 if self.batch_s else 1.0)
        if took_s < self.fastest_s or not self.fastest_s:
            self.fastest_s = took_s
        else:
            self.fastest_s += 0.01 * (took_s - self.fastest_s)  # in case that it has become slower

    def _completed_partly(
        self, now: float, batch: Batch, ids: Sequence[int], busy_s: float, ok: bool
    ) -> list[Request | None]:
        owed = {request.id: request for request in batch.requests}
        takers: list[Request | None] = []
        for id in ids:
            request = owed.pop(id, None)
            if request is None:
                self.stray_replies += 1
            takers.append(request)
        if not owed:
            self._finish(now, batch, busy_s, ok)
            return takers
        if len(owed) < len(batch.requests):  # perhaps nobody waits for the others
            batch.heard = now
            self.attention_at = min(self.attention_at, now + self.patience.least_s)
        self._running -= len(batch.requests) - len(owed)
        batch.requests = list(owed.values())
        batch.ids = list(owed)
        batch.busy_s += busy_s
        batch.ok = batch.ok and ok
        return takers


def _counts_for_one(result: object) -> int:
    return 1


def _knows_lone(kind: type[Policy]) -> bool:
    """Whether what a policy says of lone requests is meant for the rule that it follows: a class that overrides the
    rule, and not what its base says of lone requests, is asked step by step.
    """
    rules = ("decide", "arrived", "arrived_together", "completed", "limit")
    depth = {name: next(i for i, base in enumerate(kind.__mro__) if name in vars(base)) for name in (*rules, *_LONE)}
    return kind.lets_go is not Policy.lets_go and all(depth[lone] <= depth[rule] for lone in _LONE for rule in rules)


_LONE = ("lets_go", "went_alone")
