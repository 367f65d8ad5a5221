"""The batcher of one stage: a queue, a policy, idle workers and batches in flight.

It is told what happened (`enter`, `completed`, `worker_ready`, `worker_lost`) and asked what to run
next (`next_batch`). It keeps three promises whatever the policy says: no batch is larger than the
limit, no request is dispatched after its deadline, and a reply is paired with a request only if
that worker was given that request in that batch.

A policy may be the user's, and raise. So it is told before something becomes of a request, or when
that has happened altogether: whatever it raises, each request is in the queue, in a batch, or
answered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import inf

from carpool.core.ahead import lead_allowed_s, next_to_end
from carpool.core.batch import Attention, Batch, Expiry
from carpool.core.batch_times import BatchTimes
from carpool.core.keyed_workers import KeyedWorkers
from carpool.core.patience import Patience
from carpool.core.places import Places
from carpool.core.quarantine import suspect
from carpool.core.queue import Queue, Suspect
from carpool.core.queue_view import WithoutKeys
from carpool.core.safe_size import SafeSize, least_that_ran_out
from carpool.policy.base import Decision, Policy, QueueView, knows_lone_requests
from carpool.policy.length_cost import padded
from carpool.request import DONE, QUEUED, RUNNING, Request


class Batcher:
    """One stage's decisions.

    Args:
        name: the stage's name.
        policy: decides when and how many; owned by this batcher alone.
        queue: where requests wait.
        stage: the position of the stage; the pipeline sets it.
        max_batch_time_s: a worker that spends longer in one call is taken to hang. Infinity if the
            user has not set it.
        patience_s: in that case, how long a call may go on that no caller waits for (see
            `core/patience.py`).
        idempotent: whether a request may be run once more when its worker is lost.
        runs_ahead: whether a worker may be handed its next batch before it is free. It has no
            effect where requests must not be run once more, since what lies with a worker that is
            given up may still be run by it.
        weigh: writes on a request what the result of the stage before counts for in this one: its
            size, if that is not 1, its length and its key. It may raise a `CarpoolError`.
        keyed: which workers serve which keys; None where requests have none.

    Attributes:
        next_max_size: most results that the next stage can ever take at once; the pipeline sets it.
        safe_size: how much one call can hold before memory runs out, as far as it ever has.
        patience: how long a call may take.
        times: how long batches take.
        closing: whether no request can join the queue any more, so that nothing is held back for
            company; the pipeline sets it.
        retired: whether all requests have been answered, and the policy is asked and told nothing
            any more; the pipeline sets it.
        in_flight: the batch that each busy worker runs, by the worker's place.
        ahead: the batch that lies with a busy worker already, after the one that it runs, by place.
        entered: how many requests have joined the queue.
        leaving: the places of the workers that are about to go; see `core/places.py`.
        wake_at: when to call `next_batch` again although nothing happened; None for never.
        attention_at: no request expires and no worker hangs before this.
        stray_replies: answers that were late, duplicate or unknown: dropped and counted.
        late_results: results that came after the caller had been answered or had gone.
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
        weigh: Callable[[Request, object], None] | None = None,
        keyed: KeyedWorkers | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.queue = queue
        self.stage = stage
        self.patience = Patience(max_batch_time_s, patience_s)
        self.idempotent = idempotent
        self.runs_ahead = runs_ahead and idempotent
        self.weigh = weigh or _counts_for_one
        self.keyed = keyed
        self.next_max_size = inf
        self.closing = self.retired = False
        self.entered = 0
        self.safe_size = SafeSize(policy.allowed_batch_sizes)
        self.times = BatchTimes()
        self.in_flight: dict[int, Batch] = {}
        self.ahead: dict[int, Batch] = {}
        self.wake_at: float | None = None
        self.attention_at = inf
        self.stray_replies = 0
        self.late_results = 0
        kind = type(policy)
        self._policy_listens = (
            kind.arrived is not Policy.arrived or kind.arrived_together is not Policy.arrived_together
        )
        self._policy_predicts = kind.predicted_wait_s is not Policy.predicted_wait_s
        self._policy_knows_lone = knows_lone_requests(kind)
        self._places = Places()
        self.leaving = self._places.leaving
        self._idle = self._places.idle  # the worker that was busy last is used first: its caches are warm
        self._running = 0
        self._batch_ids = 0
        self._limited_since = 0  # the last batch that went before memory ran out

    def __repr__(self) -> str:
        return f"<Batcher {self.name} queued={len(self.queue)} running={self._running} idle={len(self._idle)}>"

    @property
    def running(self) -> int:
        """How many requests workers have been handed and have not answered."""
        return self._running

    @property
    def handed_over(self) -> list[Batch]:
        """The batches that workers have, those ahead included."""
        return [*self.in_flight.values(), *self.ahead.values()]

    @property
    def owed(self) -> list[Request]:
        """The requests that workers have and whose callers wait."""
        return [request for batch in self.handed_over for request in batch.requests if request.state == RUNNING]

    @property
    def is_wanted(self) -> bool:
        """Whether a caller waits for what workers have."""
        return any(batch.unwanted_since == inf for batch in self.handed_over)

    @property
    def idle(self) -> int:
        """How many workers could take a batch now."""
        return len(self._idle)

    @property
    def lone_place(self) -> int | None:
        """The place of the worker that a request would get now; None if not all are idle."""
        if self.in_flight or self.queue.count or self.retired or not self._idle:
            return None
        return self._idle[-1]

    @property
    def next_id(self) -> int:
        """The id of the next batch."""
        return self._batch_ids + 1

    # -- requests come and go

    def enter(self, now: float, requests: Sequence[Request], soonest: float | None = None) -> None:
        """Put requests in the queue of this stage; their `stage` and `arrived` must be set already.

        Args:
            now: the time.
            requests: at least one.
            soonest: the earliest of their deadlines, if it is known.
        """
        if soonest is None:
            soonest = min([request.deadline for request in requests])
        if soonest < self.attention_at:
            self.attention_at = soonest
        self.entered += len(requests)
        self.queue.push(requests)
        if self._policy_listens:
            self.policy.arrived_together(now, requests)

    def put_back(self, now: float, requests: Sequence[Request]) -> None:
        """Let requests of a worker that has gone wait again, in their old places."""
        self.queue.put_back(requests)
        news = [request for request in requests if not request.losses]  # the policy does not know those in quarantine
        if news:
            self.policy.arrived_together(now, news)

    def quarantine(self, requests: Sequence[Request]) -> None:
        """Let requests wait again, each to be run alone, as one of them may have killed its worker.

        They wait in their old places. The policy is not told, neither now nor when they have run:
        they do not arrive, and it does not decide on them.
        """
        for request in requests:
            suspect(request)
        self.queue.put_back(requests)

    def leave(self, now: float, request: Request) -> None:
        """Remove a queued request whose caller has gone; it is now done."""
        self.queue.remove(request)
        self.policy.left(now, request)

    def abandon(self, now: float, request: Request) -> None:
        """Note that the caller of a request which a worker has is gone; it is now done."""
        request.state = DONE
        request.deadline = min(request.deadline, now)  # no caller waits for it from now on
        self.attention_at = min(self.attention_at, request.deadline + self.patience.least_s)

    def in_the_way(self, request: Request) -> list[Request]:
        """Return the requests that must give up their places to a new one, if the queue is full.

        A batch of each priority stays, or half of a queue that is smaller than two batches.
        """
        return self.queue.in_the_way(request, max(1, int(min(self.policy.limit, self.queue.max_size / 2))))

    def displace(self, now: float, request: Request) -> None:
        """Remove a queued request for one of a higher priority; it is now done."""
        self.policy.left(now, request)
        self.queue.evict(request)

    def may_run_again(self, request: Request) -> bool:
        """Report whether a request may be run once more after its worker was lost."""
        return self.idempotent

    # -- workers come and go

    def trained(self, n: int, size: int, busy_s: float) -> None:
        """Tell the policy of a warm-up, unless requests have run already: those teach better."""
        if not self._batch_ids:
            self.policy.trained(n, size, busy_s)

    def trained_at(self, n: int, longest: int, busy_s: float) -> None:
        """Tell the policy of a warm-up with examples of one length, as `trained` does."""
        if not self._batch_ids:
            self.policy.trained_at(n, longest, busy_s)

    def worker_ready(self, place: int) -> None:
        """Note that a worker can take batches from now on."""
        if place in self._idle or place in self.in_flight or place in self.leaving:
            raise ValueError(f"worker {place} of stage {self.name} is ready already")
        self._idle.append(place)

    def worker_lost(self, place: int) -> Batch | None:
        """Note that a worker is gone, and return the batch that it had not finished, if any.

        A batch ahead is left for `withdraw_ahead`.
        """
        self._places.gone(place)
        if self.keyed is not None:
            self.keyed.lost(place)
        batch = self.in_flight.pop(place, None)
        if batch is not None:
            self._running -= len(batch)
        return batch

    def drain(self, place: int) -> None:
        """Let a worker finish what it has and get nothing more; `take_drained` reports its end."""
        self._places.drain(place)

    def take_drained(self) -> list[int]:
        """Return, once, the places of workers that were to go and have nothing left to do."""
        return self._places.take_drained(self.in_flight)

    def withdraw_ahead(self, place: int) -> list[Request]:
        """Return the requests of a lost worker's batch ahead that still wait for their answers.

        The worker has not looked at that batch.
        """
        batch = self.ahead.pop(place, None)
        if batch is None:
            return []
        self._running -= len(batch)
        return [request for request in batch.requests if request.state == RUNNING]

    def call_started(self, now: float, place: int, batch_id: int) -> None:
        """Note that a worker has entered user code once more for the same batch.

        That is too late for a worker which was taken to hang before.
        """
        batch = self.in_flight.get(place)
        if batch is not None and batch.id == batch_id and not batch.given_up:
            batch.call_started = now

    def spare(self, now: float, place: int) -> None:
        """Count the time of a worker anew that seemed to hang and does not, if it has a batch."""
        batch = self.in_flight.get(place)
        if batch is not None:
            batch.call_started = now
            batch.given_up = ""
            self.attention_at = min(self.attention_at, now + self.patience.least_s)

    def ran_out_of_memory(
        self, place: int, batch_id: int, calls: Sequence[Sequence[int]], fitted: Sequence[Sequence[int]]
    ) -> None:
        """Learn from calls for parts of a batch: some ran out of memory, and smaller ones fitted.

        A worker reports them before it replies.

        Args:
            place: the position of the worker.
            batch_id: its batch.
            calls: for each call that ran out, the positions of its items in the batch; one at
                least.
            fitted: the same for each call that went through.

        Raises:
            ValueError: the worker has no such batch, or the batch no such positions.
        """
        batch = self.in_flight.get(place)
        if batch is None or batch.id != batch_id or len(batch) != batch.n:
            raise ValueError(f"worker {place} of stage {self.name} has no batch {batch_id}")
        sizes = [request.size for request in batch.requests]
        if any(not 0 <= i < len(sizes) for call in [*calls, *fitted] for i in call):
            raise ValueError(f"batch {batch_id} of stage {self.name} has {len(sizes)} items, not more")
        batch.ok = False  # the time it takes is not that of one call
        self.safe_size.ran_out(*least_that_ran_out(sizes, calls, fitted))
        self._limited_since = self._batch_ids

    # -- workers answer

    def completed(
        self, now: float, place: int, batch_id: int, ids: Sequence[int], busy_s: float, ok: bool
    ) -> Sequence[Request | None]:
        """Note that a worker has answered the requests `ids`, and return these requests.

        They are in the order of `ids`; None stands where an id is double or was never asked for.
        Only those that are still running are to have their answers: for the others it is late.

        Args:
            now: the time.
            place: the position of the worker.
            batch_id: the batch that it answers.
            ids: the requests that it answers, all of the batch or some of it.
            busy_s: the seconds in user code that were spent on these answers.
            ok: whether none of them is an error.
        """
        batch = self.in_flight.get(place)
        if batch is None or batch.id != batch_id:
            return self._completed_ahead(place, batch_id, ids)
        if ids == batch.ids:
            # Fast path of `_completed_partly`, one reply for the whole batch: the same outcome, see
            # tests/core/test_fast_paths.py.
            self._finish(now, batch, busy_s, ok)
            return batch.requests
        return self._completed_partly(now, batch, ids, busy_s, ok)

    def _completed_partly(
        self, now: float, batch: Batch, ids: Sequence[int], busy_s: float, ok: bool
    ) -> list[Request | None]:
        """Pair answers with the requests that the worker owes, in any order, double or unknown."""
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
        if len(owed) < len(batch.requests):  # perhaps no caller waits for the others
            batch.heard = now
            self.attention_at = min(self.attention_at, now + self.patience.least_s)
        self._running -= len(batch.requests) - len(owed)
        batch.requests = list(owed.values())
        batch.ids = list(owed)
        batch.busy_s += busy_s
        batch.ok = batch.ok and ok
        return takers

    def _completed_ahead(self, place: int, batch_id: int, ids: Sequence[int]) -> Sequence[Request | None]:
        """Pair answers for a batch that the worker does not run.

        They are strays, unless they say that a batch ahead has failed to reach the worker.
        """
        batch = self.ahead.get(place)
        if batch is None or batch.id != batch_id or ids != batch.ids:
            self.stray_replies += len(ids)
            return [None] * len(ids)
        del self.ahead[place]
        self._running -= len(batch)
        return batch.requests

    def _finish(self, now: float, batch: Batch, busy_s: float, ok: bool) -> None:
        """Note that a worker has answered all of its batch, and learn from it."""
        took_s = now - batch.started
        if not batch.requests[0].losses and not self.retired:  # in quarantine the policy does not decide
            ok = ok and batch.ok
            busy_s += batch.busy_s
            if ok and batch.size > self.safe_size.limit and batch.id > self._limited_since:
                self.safe_size.fitted(batch.size)  # it was sent to find out whether more fits
            policy = self.policy
            policy.hop_s += 0.1 * (max(0.0, took_s - busy_s) - policy.hop_s)
            if batch.longest:
                policy.served(now, batch.n, batch.longest, batch.requests, busy_s, ok, batch.is_switch)
            policy.completed(now, batch.n, batch.size, busy_s, ok)
        del self.in_flight[batch.place]
        if self.keyed is not None:
            self.keyed.ended(batch.place)
        self._running -= len(batch.requests)
        following = self.ahead.pop(batch.place, None) if self.ahead else None
        if following is not None:
            self._begin(now, following)
        elif not self.leaving or batch.place not in self.leaving:
            self._idle.append(batch.place)
        if self.patience.learns:
            self.patience.learn(batch.size, took_s)
        if self.runs_ahead:
            self.times.learn_deviation(took_s)
        self.times.learn(took_s)

    # -- a request that no other shares the stage with

    def lets_go(self, now: float, deadline: float, slo_s: float) -> bool:
        """Report whether a lone request of size 1 that came now would be admitted and go at once.

        The queue must be empty, and all workers idle. It changes nothing; it is False where that
        takes more thought.
        """
        if not self._policy_knows_lone:
            return False
        due = deadline
        # As in `longest_wait_s`; a policy's own prediction is not asked for while a worker is idle.
        if deadline != inf and deadline - now < self.times.usual_s * (2 + 1 / self._limit):
            return False
        if now + slo_s < due:
            due = now + slo_s
        return self.policy.lets_go(due - now)

    def went_alone(self, began: float, now: float, busy_s: float, ok: bool) -> None:
        """Note that a request was let go by `lets_go`, and is done.

        Fast path of `enter`, `next_batch` and `completed`: the same outcome, see
        tests/batch_function/test_alone.py.
        """
        took_s = now - began
        policy = self.policy
        self._batch_ids += 1
        policy.hop_s += 0.1 * (max(0.0, took_s - busy_s) - policy.hop_s)
        policy.went_alone(began, now, busy_s, ok)
        if self.patience.learns:
            self.patience.learn(1, took_s)
        if self.runs_ahead:
            self.times.learn_deviation(took_s)
        self.times.learn(took_s)

    def start_lone(self, now: float) -> Batch:
        """Make a batch of the only request in the queue, which a worker has been handed already.

        The policy has let it go before (`lets_go`). It is asked once more, as it keeps accounts of
        what it decides, but it is too late to hold anything back.
        """
        decision = self.policy.decide(now, self.queue, len(self._idle), len(self.in_flight))
        return self._start(now, 1, decision.reason if decision.take else "free")

    # -- what to do

    def next_batch(self, now: float, room: float, dropped: list[tuple[Request, str]]) -> Batch | None:
        """Return the batch to run now, or None; `wake_at` then says when to ask again.

        Args:
            now: the time.
            room: how many results the next stage can take.
            dropped: the requests that the policy drops are appended here, and why; also if this
                raises in the end.

        Raises:
            RuntimeError: the policy asked for what is not possible; nothing was done.
        """
        queue = self.queue
        self.wake_at = None
        while queue.count:
            if queue.suspect_lanes and queue.next_is_suspect and self._idle and room >= 1:
                return self._start(now, 1, "quarantine")  # it waits for no other, whatever the policy
            had_several_lanes, was_short = queue.lanes > 1, room < queue.count
            decision = self._ask(now, room)
            if decision.drop:
                self._drop(now, decision.drop)
                dropped += [(request, decision.drop_reason) for request in decision.drop]
            n = decision.take
            if n and queue.count:
                if decision.chosen:
                    return self._start_chosen(now, decision, room)
                if n > self.safe_size.limit or queue.weighted or n > room or queue.lengths_vary:
                    n = self._most_to_send(n, room)
                return self._start(now, n, decision.reason)
            self.wake_at = decision.wake_at
            if not decision.drop:
                break
            # It has only dropped some. It is asked again where it may not have judged the others
            # yet: where they wait in other lanes, or where there is room for all of them only now.
            if not was_short and not (had_several_lanes and decision.wake_at is None):
                break
        if self.runs_ahead and queue.count and len(self.in_flight) > len(self.ahead) and not self._idle:
            return self._next_ahead(now, room)
        return None

    def _ask(self, now: float, room: float) -> Decision:
        """Return what the policy says, or what it would if it knew that the service closes.

        Raises what `next_batch` does.
        """
        queue = self.queue
        free = len(self._idle)
        if free and room < queue.count and room < self.next_max_size and room < self._most_requests():
            free = 0  # no credit: the next stage could not take what this one would produce
        view = queue if self.keyed is None else self._view_by_keys(self.keyed)
        decision = self.policy.decide(now, view, free, len(self.in_flight))
        n = decision.take
        if type(n) is not int:
            n = operator.index(n)
            decision = decision._replace(take=n)
        if n and not (free and 0 < n <= self.policy.limit):
            raise self._impossible(n, f"with {free} free workers")
        if not n and free and self.closing and len(view):
            decision = decision._replace(take=int(self.policy.limit), reason="closing")
        if view is not queue and decision.take and not decision.chosen:
            decision = decision._replace(chosen=view.peek(self._fitting(decision.take, view)))
        return decision

    def _view_by_keys(self, keyed: KeyedWorkers) -> Queue | WithoutKeys:
        """Return what the policy is to see: no keys that run on as many workers as they may."""
        self.policy.warm_keys = keyed.warm(self._idle)
        held = keyed.held
        return WithoutKeys(self.queue, held) if held else self.queue

    def _most_to_send(self, units: int, room: float) -> int:
        """Return how many requests go where the policy takes `units`.

        They are as many as fit into memory, into `units`, and into the next stage.
        """
        queue = self.queue
        if units > self.safe_size.limit and queue.size > self.safe_size.limit:
            units = self._safe(units)
        n = self._fitting(units) if queue.weighted or queue.lengths_vary else units
        return n if n <= room else int(room)

    def _safe(self, units: int) -> int:
        """Return how much of `units` fits into memory, or is worth trying."""
        limit = self.safe_size.limit
        if any(batch.size > limit for batch in self.handed_over):
            return int(limit)  # what comes of the last one that is larger is not known yet
        return self.safe_size.allowed(units)

    def _fitting(self, units: int, view: QueueView | None = None) -> int:
        """Return how many requests from the head fit into `units`; the first one always does."""
        n = size = longest = 0
        most_padded = self.policy.max_padded_size
        for request in (self.queue if view is None else view).peek(units):
            size += request.size
            longest = max(longest, request.length)
            if n and (size > units or (n + 1) * self._padded(longest) > most_padded):
                break
            n += 1
        return n

    def _padded(self, length: int) -> int:
        """Return the length to which the model pads a batch with this longest length."""
        allowed = self.policy.allowed_lengths
        return length if allowed is None else padded(length, allowed)

    def _drop(self, now: float, requests: Sequence[Request]) -> None:
        """Remove the queued requests that the policy drops."""
        if len(set(requests)) < len(requests) or any(r.state != QUEUED or r.stage != self.stage for r in requests):
            raise RuntimeError(f"policy {type(self.policy).__name__} of stage {self.name} drops what is not queued")
        for request in requests:
            self.policy.left(now, request)
        for request in requests:
            self.queue.remove(request)

    def _start_chosen(self, now: float, decision: Decision, room: float) -> Batch:
        """Make a batch of the requests that the policy has chosen, as far as there is room."""
        self._check_chosen(decision)
        units = decision.take
        most = min(room, self._safe(units) if units > self.safe_size.limit else inf)
        return self._start(now, 0, decision.reason, decision.chosen[: max(1, int(min(most, len(decision.chosen))))])

    def _check_chosen(self, decision: Decision) -> None:
        """Raise RuntimeError if the requests that the policy has chosen cannot be a batch."""
        chosen, policy = decision.chosen, self.policy
        if len(set(chosen)) < len(chosen) or any(r.state != QUEUED or r.stage != self.stage for r in chosen):
            raise RuntimeError(f"policy {type(policy).__name__} of stage {self.name} chooses what is not queued")
        first = chosen[0].lane
        if any(r.lane.key != first.key or r.lane.bucket != first.bucket for r in chosen):
            raise RuntimeError(f"policy {type(policy).__name__} of stage {self.name} chooses requests of several keys")
        size, longest = sum([r.size for r in chosen]), max([r.length for r in chosen])
        if len(chosen) > 1 and (size > policy.limit or len(chosen) * self._padded(longest) > policy.max_padded_size):
            raise self._impossible(size, f"whose longest is {longest}")

    def _start(self, now: float, n: int, reason: str, chosen: Sequence[Request] = ()) -> Batch:
        """Make a batch of the next `n` requests, or of the chosen ones, for an idle worker."""
        if self.keyed is None:
            place = self._idle.pop()
            batch = self._make(now, n, reason, place, chosen=chosen)
        else:
            batch = self._make(now, n, reason, -1, chosen=chosen)
            batch.place = place = self._place_for(self.keyed, batch)
        look_at = now + self.patience.least_s
        if look_at < self.attention_at:
            self.attention_at = look_at
        self.in_flight[place] = batch
        return batch

    def _place_for(self, keyed: KeyedWorkers, batch: Batch) -> int:
        """Return the place of the idle worker that is best for the key of a batch."""
        key = batch.requests[0].lane.key
        if isinstance(key, Suspect):
            key = key.former_key
        place = keyed.choose(self._idle, key)
        self._idle.remove(place)
        batch.is_switch = keyed.started(place, key)
        return place

    def _make(
        self, now: float, n: int, reason: str, place: int, ahead: bool = False, chosen: Sequence[Request] = ()
    ) -> Batch:
        queue = self.queue
        size = queue.size
        requests = queue.pick(chosen, now) if chosen else queue.take(n, now)
        longest = max([request.length for request in requests]) if queue.by_length else 0
        self._batch_ids += 1
        self._running += len(requests)
        return Batch(self._batch_ids, self.stage, place, requests, size - queue.size, reason, now, ahead, longest)

    def _next_ahead(self, now: float, room: float) -> Batch | None:
        """Return a batch for a busy worker, if it may go already: see `core/ahead.py`."""
        queue, usual_s = self.queue, self.times.usual_s
        lead_s = lead_allowed_s(queue, self.times, len(self.in_flight), self._limit)
        if lead_s is None:
            return None
        taken = self.leaving.union(self.ahead) if self.leaving else self.ahead
        before = next_to_end(now, self.in_flight.values(), taken, usual_s, lead_s)
        if before is None:
            return None
        decision = self.policy.decide_ahead(now, queue, max(0.0, before.started + usual_s - now))
        n = operator.index(decision.take)
        if not 0 <= n <= self.policy.limit:
            raise self._impossible(n, "for a busy worker")
        if n > self.safe_size.limit:
            n = self._safe(n)
        if not n or n > room:
            return None
        opens_at = before.started + usual_s - lead_s
        if now < opens_at:
            self.wake_at = opens_at if self.wake_at is None else min(self.wake_at, opens_at)
            return None
        if queue.weighted or queue.lengths_vary:
            n = self._fitting(n)
        self.ahead[before.place] = made = self._make(now, n, decision.reason, before.place, ahead=True)
        return made

    def _begin(self, now: float, batch: Batch) -> None:
        """Note that the worker of a batch ahead is done with the one before it."""
        batch.started = batch.call_started = batch.heard = now
        self.attention_at = min(self.attention_at, now + self.patience.least_s)
        self.in_flight[batch.place] = batch

    def _impossible(self, n: int, with_what: str) -> RuntimeError:
        policy = type(self.policy).__name__
        return RuntimeError(
            f"policy {policy} of stage {self.name} asked for a batch of {n} {with_what} and a limit of"
            f" {self.policy.limit}"
        )

    # -- what takes too long

    def attend(self, now: float) -> Attention:
        """Expire requests and find workers that hang; call it once `attention_at` has passed."""
        expired = self._expire_queued(now)
        hung = []
        self.attention_at = self.queue.earliest_deadline
        for batch in self.in_flight.values():
            expired += [Expiry(request, batch.started) for request in batch.expire(now)]
            self.attention_at = min(self.attention_at, batch.earliest_deadline)
            if not batch.given_up and self._gives_up(now, batch):  # a worker being killed is reported once
                hung.append(batch.place)
        for batch in self.ahead.values():
            expired += [Expiry(request, None) for request in batch.expire(now)]
            self.attention_at = min(self.attention_at, batch.earliest_deadline)
        return Attention(expired, hung)

    def _expire_queued(self, now: float) -> list[Expiry]:
        """Remove the queued requests whose deadlines have passed."""
        waited = self.queue.expired(now)
        for request in waited:
            self.policy.left(now, request)
        for request in waited:
            self.queue.remove(request)
        return [Expiry(request, None) for request in waited]

    def _gives_up(self, now: float, batch: Batch) -> bool:
        """Report whether the call for a batch has gone on too long; if not, look again in time."""
        times = batch.call_started, batch.unwanted_since, batch.size
        until = self.patience.until(*times)
        if until <= now:
            batch.given_up = self.patience.why(*times)
            return True
        self.attention_at = min(self.attention_at, until)
        return False

    def hint(self, now: float, request: Request, started: float | None) -> str:
        """Return what else to tell a caller whose time is up, and whose request started then."""
        return "" if started is None else self.patience.hint(now - started)

    # -- how long requests wait

    def predicted_wait_s(self, now: float, units_before: float) -> float:
        """Return how long a request waits that has `units_before` units queued before it.

        It goes by what recent batches took, and is rather too short than too long: in a stage that
        is not saturated, batches are smaller than they could be.
        """
        limit, usual_s = self._limit, self.times.usual_s
        if self._idle and units_before < limit:
            return 0.0
        workers = max(1, len(self._idle) + len(self.in_flight) - len(self.leaving))
        wait_s = self.policy.predicted_wait_s(int(units_before), workers)
        if wait_s is None:
            wait_s = units_before // limit * usual_s / workers
        if self.ahead:
            wait_s += len(self.ahead) * usual_s / workers
        if self._idle or not self.in_flight:
            return wait_s
        return wait_s + max(0.0, min(batch.started for batch in self.in_flight.values()) + usual_s - now)

    def longest_wait_s(self, more: int) -> float:
        """Return a bound on a wait and the batch after it, if `more` units came now.

        Fast path of `predicted_wait_s`: never less than that and the fastest batch, see
        tests/core/test_fast_paths.py. Infinity where the policy makes predictions of its own.
        """
        if self._policy_predicts:
            return inf
        return self.times.usual_s * (2 + len(self.ahead) + (self.queue.size + more) / self._limit)

    def expected_s(self, now: float) -> float:
        """Return how long a request that came now would spend here, its batch included."""
        if not self.in_flight and not self.queue.count:
            return self.times.fastest_s
        return self.predicted_wait_s(now, self.queue.size) + self.times.usual_s

    @property
    def _limit(self) -> float:
        """Most that a batch can hold now."""
        limit, safe = self.policy.limit, self.safe_size.limit
        return safe if safe < limit else limit

    def _most_requests(self) -> float:
        """Return about how many of the requests that wait a full batch would hold."""
        limit, queue = self._limit, self.queue
        return limit * queue.count / queue.size + 1 if queue.weighted else limit


def _counts_for_one(request: Request, result: object) -> None:
    request.size = 1
