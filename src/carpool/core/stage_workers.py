"""The workers of one stage: what they have been handed, what they answer, what takes too long.

A reply is paired with a request only if that worker was given that request in that batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from math import inf

from carpool.core.batch import Attention, Batch, Expiry, LoneBatch, WarmUpBatch
from carpool.core.keyed_workers import KeyedWorkers
from carpool.core.levels import level_of
from carpool.core.places import Places
from carpool.core.queue import Queue
from carpool.core.safe_size import SafeSize, least_that_ran_out
from carpool.core.stage_requests import StageRequests
from carpool.core.times import Times
from carpool.policy.base import Policy
from carpool.policy.length_cost import padded
from carpool.policy.shape import Knots
from carpool.request import DONE, RUNNING, Request


class StageWorkers(StageRequests):
    """What the workers of one stage have, and what is learned as they answer.

    Args:
        name: As for `StageRequests`.
        policy: As for `StageRequests`.
        queue: As for `StageRequests`.
        stage: As for `StageRequests`.
        max_batch_time_s: A worker that spends longer in one call is taken to hang. Infinity if the
            user has not set it.
        patience_s: In that case, how long a call may go on that no caller waits for (see
            `core/times.py`).
        idempotent: As for `StageRequests`.
        runs_ahead: Whether a worker may be handed its next batch before it is free. It has no
            effect where requests must not be run once more, since what lies with a worker that is
            given up may still be run by it.
        weigh: As for `StageRequests`.
        keyed: Which workers serve which keys; None where requests have none.

    Attributes:
        limits_padded: Whether a call takes memory by its count times its longest length, to which
            it is padded.
        safe_size: How much one call can hold before memory runs out, as far as it ever has: the sum
            of its sizes, or its padded size.
        times: How long batches take, and may take.
        in_flight: The batch that each busy worker runs, by the worker's place.
        ahead: The batches that lie with a busy worker already, behind the one that it runs, by its
            place and in their order; at least one for each place that is named.
        leaving: The places of the workers that are about to go; see `core/places.py`.
        stray_replies: Answers that were late, duplicate or unknown: dropped and counted.
        late_results: Results that came after the caller had been answered or had gone.
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
        super().__init__(name, policy, queue, stage=stage, idempotent=idempotent, weigh=weigh)
        self.runs_ahead = self.view.runs_ahead = runs_ahead and idempotent
        self.keyed = keyed
        self.limits_padded = queue.has_lengths
        self.safe_size = SafeSize(None if self.limits_padded else policy.allowed_batch_sizes)
        self.times = Times(max_batch_time_s, patience_s, watches_gaps=self.runs_ahead)
        self.in_flight: dict[int, Batch] = {}
        self.ahead: dict[int, list[Batch]] = {}
        self._lying = 0  # how many batches that is
        self._has_asked = False  # a batch was laid ahead a moment ago, in the same poll
        self.stray_replies = 0
        self.late_results = 0
        self._places = Places()
        self._knots = Knots(policy.max_batch_size or self.batch_limit)  # sizes, about which others are
        self._lone = LoneBatch(0, stage, 0, [], 1, "alone", 0.0)
        self._lone.n = 1
        self.leaving = self._places.leaving
        self._idle = self._places.idle  # the worker that was busy last is used first: its caches are warm
        self._running = 0
        self._batch_ids = 0
        self._limited_since = 0  # the last batch that went before memory ran out
        self._unserved_since = inf

    @property
    def running(self) -> int:
        """How many requests workers have been handed and have not answered."""
        return self._running

    @property
    def handed_over(self) -> list[Batch]:
        """The batches that workers have, those ahead included."""
        return [*self.in_flight.values(), *chain.from_iterable(self.ahead.values())]

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
    def has_worker(self) -> bool:
        """Whether there is a worker, busy or idle. Slots of a function count as there."""
        return bool(self._idle or self.in_flight) or self._places.are_slots

    def unserved_since(self, now: float) -> float:
        """Return since when there has been no worker, as far as was asked; infinity if there is
        one.
        """
        if self.has_worker:
            self._unserved_since = inf
        elif self._unserved_since == inf:
            self._unserved_since = now
        return self._unserved_since

    def abandon(self, now: float, request: Request) -> None:
        """Note that the caller of a request which a worker has is gone; it is now done."""
        request.state = DONE
        request.deadline = min(request.deadline, now)  # no caller waits for it from now on
        self.attention_at = min(self.attention_at, request.deadline + self.times.least_s)

    # -- workers come and go

    def have_slots(self) -> None:
        """Take the places for slots of one function, which come and go for each batch."""
        self._places.are_slots = True

    def trained(self, now: float, n: int, size: int, busy_s: float, longest: int = 0) -> None:
        """Tell the policy of a warm-up, unless requests have run already: those teach better."""
        if not self._batch_ids:
            self._learn(now, WarmUpBatch(now, self.stage, n, size, longest, busy_s), 0)

    def worker_ready(self, place: int) -> None:
        """Note that a worker can take batches from now on."""
        if place in self._idle or place in self.in_flight or place in self.leaving:
            raise ValueError(f"worker {place} of stage {self.name} is ready already")
        self._idle.append(place)

    def worker_lost(self, place: int) -> Batch | None:
        """Note that a worker is gone, and return the batch that it had not finished, if any.

        What lies ahead is left for `withdraw_ahead`.
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
        """Return the requests that lay ahead of a lost worker and still wait for their answers.

        The worker has not looked at them.
        """
        requests = [request for batch in self.ahead.pop(place, ()) for request in self._taken_back(batch)]
        return [request for request in requests if request.state == RUNNING]

    def _taken_back(self, batch: Batch) -> list[Request]:
        """Note that a batch which lay ahead will not be run; return its requests."""
        self._lying -= 1
        self._running -= len(batch)
        return batch.requests

    # -- workers run calls

    def call_started(self, now: float, place: int, batch_id: int) -> None:
        """Note that a worker has entered user code once more for the same batch.

        That is too late for a worker which was taken to hang before.
        """
        batch = self.in_flight.get(place)
        if batch is not None and batch.id == batch_id and not batch.given_up:
            batch.call_started = now

    def spare(self, now: float, place: int) -> None:
        """Count the time of a worker that seemed to hang, and does not, anew if it has a batch."""
        batch = self.in_flight.get(place)
        if batch is not None:
            batch.call_started = now
            batch.given_up = ""
            self.attention_at = min(self.attention_at, now + self.times.least_s)

    def ran_out_of_memory(
        self, place: int, batch_id: int, calls: Sequence[Sequence[int]], fitted: Sequence[Sequence[int]]
    ) -> None:
        """Learn from calls for parts of a batch: some ran out of memory, and smaller ones fitted.

        A worker reports them before it replies.

        Args:
            place: The position of the worker.
            batch_id: Its batch.
            calls: For each call that ran out, the positions of its items in the batch; one at
                least.
            fitted: The same for each call that went through.

        Raises:
            ValueError: The worker has no such batch, or the batch no such positions.
        """
        batch = self.in_flight.get(place)
        if batch is None or batch.id != batch_id or len(batch) != batch.n:
            raise ValueError(f"worker {place} of stage {self.name} has no batch {batch_id}")
        requests = batch.requests
        if any(not 0 <= i < len(requests) for call in [*calls, *fitted] for i in call):
            raise ValueError(f"batch {batch_id} of stage {self.name} has {len(requests)} items, not more")
        batch.ok = False  # the time it takes is not that of one call

        def size_of(call: Sequence[int]) -> int:
            if self.limits_padded:
                return len(call) * self.padded_length(max([requests[i].length for i in call], default=1))
            return sum([requests[i].size for i in call])

        self.safe_size.ran_out(*least_that_ran_out(size_of, calls, fitted))
        self._limited_since = self._batch_ids

    def padded_length(self, length: int) -> int:
        """Return the length to which the model pads a batch with this longest length."""
        allowed = self.policy.allowed_lengths
        return length if allowed is None else padded(length, allowed)

    def memory_of(self, batch: Batch) -> int:
        """Return what a batch takes of memory, in the units of `safe_size`."""
        return batch.n * self.padded_length(batch.longest) if self.limits_padded else batch.size

    # -- workers answer

    def completed(
        self, now: float, place: int, batch_id: int, ids: Sequence[int], busy_s: float, ok: bool
    ) -> Sequence[Request | None]:
        """Note that a worker has answered the requests `ids`, and return these requests.

        They are in the order of `ids`; None stands where an id is double or was never asked for.
        Only those that are still running are to have their answers: for the others it is late.

        Args:
            now: The time.
            place: The position of the worker.
            batch_id: The batch that it answers.
            ids: The requests that it answers, all of the batch or some of it.
            busy_s: The seconds in user code that were spent on these answers.
            ok: Whether none of them is an error.
        """
        batch = self.in_flight.get(place)
        if batch is None or batch.id != batch_id:
            return self._completed_ahead(place, batch_id, ids)
        if ids == batch.ids:  # mostly all are answered at once
            self._finish(now, batch, busy_s, ok)
            return batch.requests
        owed = {request.id: request for request in batch.requests}
        takers = [owed.pop(id, None) for id in ids]
        self.stray_replies += takers.count(None)
        if not owed:
            self._finish(now, batch, busy_s, ok)
            return takers
        if len(owed) < len(batch.requests):  # perhaps no caller waits for the others
            batch.heard = now
            self.attention_at = min(self.attention_at, now + self.times.least_s)
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
        lying = self.ahead.get(place, ())
        batch = next((batch for batch in lying if batch.id == batch_id), None)
        if batch is None or ids != batch.ids:
            self.stray_replies += len(ids)
            return [None] * len(ids)
        rest = [other for other in lying if other is not batch]
        if rest:
            self.ahead[place] = rest
        else:
            del self.ahead[place]
        return self._taken_back(batch)

    def _finish(self, now: float, batch: Batch, busy_s: float, ok: bool) -> None:
        """Note that a worker has answered all of its batch, and learn from it."""
        batch.busy_s = busy_s = busy_s + batch.busy_s
        batch.hop_s = self.times.learn(now - batch.started, busy_s, batch.n, batch.size, batch.ahead)
        if not batch.requests[0].losses:  # in quarantine the policy does not decide
            batch.ok = ok = ok and batch.ok
            if ok and batch.id > self._limited_since and self.safe_size.limit < inf:
                memory = self.memory_of(batch)
                if memory > self.safe_size.limit:
                    self.safe_size.fitted(memory)  # it was sent to find out whether more fits
            if self._policy_learns:
                self._learn(now, batch, self._running)
        del self.in_flight[batch.place]
        if self.keyed is not None:
            self.keyed.ended(batch.place)
        self._running -= len(batch.requests)
        lying = self.ahead.get(batch.place) if self.ahead else None
        if lying:
            self._begin(now, lying)
        elif not self.leaving or batch.place not in self.leaving:
            self._idle.append(batch.place)

    def _learn(self, now: float, batch: Batch, running: int) -> None:
        """Have the policy learn from a batch that is done."""
        times, view = self.times, self.view
        view.hop_s, view.gap_s, view.running = times.hop_s, times.gap_s, running
        batch.judge = self._is_first
        try:
            self.policy.learn(now, batch)
            self.batch_limit = self.policy.limit
        except BaseException as error:
            self._failed(error)

    def learn_costs(self) -> None:
        """Learn from now on what batches of each size take, unless the policy does."""
        if type(self.policy).cost_s is Policy.cost_s:
            self.times.learn_costs(self.batch_limit)

    def cost_s(self, size: int) -> float:
        """Return what a batch of `size` takes, its way included; 0 while that is not known."""
        try:
            seconds = self.policy.cost_s(size)
        except BaseException as error:
            self._failed(error)
            seconds = None
        return self.times.cost_s(size) if seconds is None else seconds

    def _is_first(self, batch: Batch) -> bool:
        """Note that a batch has run; report whether it was the first one of about its size on its
        worker, and of about its length.
        """
        counts, lengths, longest = self.policy.allowed_batch_sizes, self.policy.allowed_lengths, batch.longest
        size = padded(batch.n, counts) if counts else self._knots.nearest(batch.size)
        if longest:
            return self._places.is_first(
                batch.place, (size, padded(longest, lengths) if lengths else level_of(longest))
            )
        return self._places.is_first(batch.place, size)

    def _begin(self, now: float, lying: list[Batch]) -> None:
        """Note that the worker of batches ahead is done with the one before them."""
        batch = lying.pop(0)
        if not lying:
            del self.ahead[batch.place]
        self._lying -= 1
        batch.started = batch.call_started = batch.heard = now
        self.attention_at = min(self.attention_at, now + self.times.least_s)
        self.in_flight[batch.place] = batch

    # -- what takes too long

    def attend(self, now: float) -> Attention:
        """Expire requests and find workers that hang; call it once `attention_at` has passed."""
        expired = self._expire_queued(now)
        hung = []
        self.attention_at = self.queue.earliest_deadline
        for batch in self.in_flight.values():
            expired += [Expiry(request, batch.started) for request in batch.expire(now)]
            self.attention_at = min(self.attention_at, batch.earliest_deadline)
            if not batch.given_up:  # a worker being killed is reported once
                batch.given_up = self._why_given_up(now, batch.call_started, batch.unwanted_since, batch.size)
                if batch.given_up:
                    hung.append(batch.place)
        for batch in chain.from_iterable(self.ahead.values()):
            expired += [Expiry(request, None) for request in batch.expire(now)]
            self.attention_at = min(self.attention_at, batch.earliest_deadline)
        return Attention(expired, hung)

    def _why_given_up(self, now: float, began: float, unwanted_since: float, size: int) -> str:
        """Return why a call has gone on too long; else an empty text, and look again in time.

        Its arguments are those of `Times.until`.
        """
        until = self.times.until(began, unwanted_since, size)
        if until <= now:
            return self.times.why(began, unwanted_since, size)
        self.attention_at = min(self.attention_at, until)
        return ""

    def hint(self, now: float, request: Request, started: float | None) -> str:
        """Return what else to tell a caller whose time is up, and whose request started then."""
        return "" if started is None else self.times.hint(now - started)
