"""The batcher of one stage: its workers, what they have been handed, and what goes next.

Its promises, whatever the policy says: no batch is larger than the limit, no request is dispatched
after its deadline, and a reply is paired with a request only if that worker was given that request
in that batch. What waits is the lobby's affair (`core/lobby.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from math import inf

from carpool.engine.core.ahead import LEAST_LEAD_S, MOST, is_deep, is_time, lead_allowed_s, next_to_end
from carpool.engine.core.batch import Attention, Batch, Expiry, Gone, LoneBatch, Todo, WarmUpBatch
from carpool.engine.core.graph import Node, with_room
from carpool.engine.core.lane_order import Suspect, key_of
from carpool.engine.core.levels import level_of
from carpool.engine.core.lobby import MOST_LOSSES, Lobby
from carpool.engine.core.places import KeyedWorkers, Places
from carpool.engine.core.queue import Queue, WithoutLanes
from carpool.engine.core.safe_size import SafeSize, least_that_ran_out
from carpool.engine.core.times import Times
from carpool.engine.policy.base import Decision, Policy
from carpool.engine.policy.cost import Knots
from carpool.engine.policy.length_cost import padded
from carpool.engine.request import DONE, RUNNING, Request


class Batcher:
    """The workers of one stage that answers in batches.

    Args:
        max_batch_time_s: A worker that spends longer in one call is taken to hang. Infinity if the
            user has not set it.
        patience_s: In that case, how long a call may go on that no caller waits for (see
            `core/times.py`).
        runs_ahead: Whether a worker may be handed its next batch before it is free. It has no
            effect where requests must not be run once more, since what lies with a worker that is
            given up may still be run by it.
        keyed: Which workers serve which keys; None where requests have none.

    Attributes:
        limits_padded: Whether a call takes memory by its count times its longest length, to which
            it is padded.
        safe_size: How much one call can hold before memory runs out, as far as it ever has: the sum
            of its sizes, or its padded size.
        times: How long batches take, and may take.
        ahead: The batches that lie with a busy worker already, behind the one that it runs, by its
            place and in their order; at least one for each place that is named.
        places: Which of its workers are idle, lent to callers' threads, or about to go.
        stray_replies: Answers that were late, duplicate or unknown: dropped and counted.
        late_results: Results that came after the caller had been answered or had gone.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        queue: Queue,
        *,
        max_batch_time_s: float = inf,
        patience_s: float = inf,
        idempotent: bool = True,
        runs_ahead: bool = False,
        weigh: Callable[[Request, object], None] | None = None,
        keyed: KeyedWorkers | None = None,
    ) -> None:
        self.name = name
        self.lobby = lobby = Lobby(name, policy, queue, idempotent=idempotent, weigh=weigh)
        self.places = Places()
        # Short ways for each batch to what these two own. Of a stepper, `enter` is its own method.
        self.queue, self.enter, self._view, self._idle = queue, lobby.enter, lobby.view, self.places.idle
        self.runs_ahead = self._view.runs_ahead = runs_ahead and idempotent
        self.keyed = keyed
        self.limits_padded = queue.has_lengths
        self.safe_size = SafeSize(None if self.limits_padded else policy.allowed_batch_sizes)
        self.times = Times(max_batch_time_s, patience_s, watches_gaps=self.runs_ahead)
        in_flight: dict[int, Batch] = {}
        self.at_work = self.in_flight = in_flight
        self.ahead: dict[int, list[Batch]] = {}
        self.running = self.stray_replies = self.late_results = 0
        self._n_ahead = 0  # how many batches are ahead
        self._went_ahead = False  # the batch that `next_batch` returned last, in the same poll
        self._knots = Knots(policy.max_batch_size or lobby.batch_limit)  # sizes, about which others are
        self._lone = LoneBatch(0, 0, 0, [], 1, "alone", 0.0)
        self._lone.n = 1
        self._batch_ids = 0
        self._limited_since = 0  # the last batch that went before memory ran out

    def __repr__(self) -> str:
        return f"<Batcher {self.name} queued={len(self.queue)} running={self.running} idle={len(self._idle)}>"

    @property
    def handed_over(self) -> list[Batch]:
        return [*self.in_flight.values(), *chain.from_iterable(self.ahead.values())]

    @property
    def owed(self) -> list[Request]:
        return [request for batch in self.handed_over for request in batch.requests if request.state == RUNNING]

    @property
    def made(self) -> int:
        return self._batch_ids

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def has_worker(self) -> bool:
        """Whether there is a worker, busy, idle or lent. Slots of a function count as there."""
        return bool(self._idle or self.in_flight or self.places.lent) or self.places.are_slots

    def caller_changed(self, now: float, request: Request) -> None:
        if request.state == DONE:
            request.deadline = min(request.deadline, now)  # no caller waits for it from now on
            self.lobby.look_at(request.deadline + self.times.least_s)

    # -- workers come and go

    def trained(self, now: float, n: int, size: int, busy_s: float, longest: int = 0) -> None:
        """Have the policy learn from a warm-up, unless requests have run: those teach better."""
        if not self._batch_ids:
            self._learn(now, WarmUpBatch(now, self.lobby.stage, n, size, longest, busy_s), 0)

    def worker_ready(self, place: int) -> None:
        if place in self._idle or place in self.in_flight or place in self.places.lent or place in self.places.leaving:
            raise ValueError(f"worker {place} of stage {self.name} is ready already")
        self._idle.append(place)

    def worker_gone(self, now: float, place: int, unsent: Collection[int] = (), *, blames: bool = True) -> Gone | None:
        """Note that a worker is gone; return what becomes of its batch, None if it had none.

        Args:
            unsent: Requests of its batch that it had not been sent yet.
            blames: Whether one of its requests may be to blame.
        """
        self.places.gone(place)
        if self.keyed is not None:
            self.keyed.lost(place)
        batch = self.in_flight.pop(place, None)
        if batch is None:
            return None
        self.running -= len(batch)
        blamed = [request for request in batch.requests if blames and request.id not in unsent]
        untold = [r for r in batch.requests if r.state == RUNNING and (not blames or r.id in unsent)]
        behind = [request for ahead in self.ahead.pop(place, ()) for request in self._taken_back(ahead)]
        resting = [request for request in behind if request.state == RUNNING]
        gone = self.lobby.take_back(now, blamed, resting, untold, lambda _: self.lobby.idempotent, batch.given_up)
        return gone._replace(is_guilty=len(batch) == 1 and batch.requests[0].losses >= MOST_LOSSES)

    def take_drained(self) -> list[int]:
        return self.places.take_drained(self.in_flight.keys() | self.places.lent)

    def _taken_back(self, batch: Batch) -> list[Request]:
        self._n_ahead -= 1
        self.running -= len(batch)
        return batch.requests

    # -- workers run calls

    def restart_hang_timer(self, now: float, place: int, batch_id: int | None = None) -> None:
        """See `Crew`."""
        batch = self.in_flight.get(place)
        if batch is not None and (batch_id is None or (batch_id == batch.id and not batch.given_up)):
            batch.call_started = now
            batch.given_up = ""
            self.lobby.look_at(now + self.times.least_s)

    def ran_out_of_memory(
        self, place: int, batch_id: int, calls: Sequence[Sequence[int]], fitted: Sequence[Sequence[int]]
    ) -> None:
        """Learn from calls for parts of a batch: some ran out of memory, and smaller ones fitted. A
        worker reports them before it replies.

        Args:
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
                return len(call) * self.lobby.padded_length(max([requests[i].length for i in call], default=1))
            return sum([requests[i].size for i in call])

        self.safe_size.ran_out(*least_that_ran_out(size_of, calls, fitted))
        self._limited_since = self._batch_ids

    def memory_of(self, batch: Batch) -> int:
        return batch.n * self.lobby.padded_length(batch.longest) if self.limits_padded else batch.size

    # -- workers answer

    def completed(
        self, now: float, place: int, batch_id: int, ids: Sequence[int], busy_s: float, ok: bool
    ) -> Sequence[Request | None]:
        """Note that a worker has answered the requests `ids`, and return these requests.

        They are in the order of `ids`; None stands where an id is double or was never asked for.
        Only those that are still running are to have their answers: for the others it is late.
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
            batch.answered_at = now
            self.lobby.look_at(now + self.times.least_s)
        self.running -= len(batch.requests) - len(owed)
        batch.requests = list(owed.values())
        batch.ids = list(owed)
        batch.busy_s += busy_s
        batch.ok = batch.ok and ok
        return takers

    def _completed_ahead(self, place: int, batch_id: int, ids: Sequence[int]) -> Sequence[Request | None]:
        """Pair answers for a batch that the worker does not run.

        They are strays, unless they say that a batch ahead has failed to reach the worker.
        """
        behind = self.ahead.get(place, ())
        batch = next((batch for batch in behind if batch.id == batch_id), None)
        if batch is None or ids != batch.ids:
            self.stray_replies += len(ids)
            return [None] * len(ids)
        rest = [other for other in behind if other is not batch]
        if rest:
            self.ahead[place] = rest
        else:
            del self.ahead[place]
        return self._taken_back(batch)

    def _finish(self, now: float, batch: Batch, busy_s: float, ok: bool) -> None:
        batch.busy_s = busy_s = busy_s + batch.busy_s
        batch.hop_s = self._learn_times(now - batch.started, busy_s, batch.n, batch.size, batch.ahead)
        if not batch.requests[0].losses:  # in quarantine the policy does not decide
            batch.ok = ok = ok and batch.ok
            if ok and batch.id > self._limited_since and self.safe_size.limit < inf:
                memory = self.memory_of(batch)
                if memory > self.safe_size.limit:
                    self.safe_size.fitted(memory)  # it was sent to find out whether more fits
            if self.lobby.learns:
                self._learn(now, batch, self.running)
        del self.in_flight[batch.place]
        if self.keyed is not None:
            self.keyed.ended(batch.place)
        self.running -= len(batch.requests)
        behind = self.ahead.get(batch.place) if self.ahead else None
        if behind:
            self._begin(now, behind)
        elif not self.places.leaving or batch.place not in self.places.leaving:
            self._idle.append(batch.place)

    def _learn_times(self, took_s: float, busy_s: float, n: int, size: int, went_ahead: bool) -> float:
        times, view = self.times, self._view
        hop_s = times.learn(took_s, busy_s, n, size, went_ahead)
        view.hop_s, view.gap_s = times.hop_s, times.gap_s
        return hop_s

    def _learn(self, now: float, batch: Batch, running: int) -> None:
        self._view.running = running
        batch.ask_if_first = self._note_kind
        self.lobby.learn(now, batch)

    def learn_costs(self) -> None:
        """Learn from now on what batches of each size take, unless the policy does."""
        if type(self.lobby.policy).cost_s is Policy.cost_s:
            self.times.learn_costs(self.lobby.batch_limit)

    def cost_s(self, size: int) -> float:
        seconds = self.lobby.cost_s(size)
        return self.times.cost_s(size) if seconds is None else seconds

    def _note_kind(self, batch: Batch) -> bool:
        """Note that a batch has run; report whether it was the first one of about its size on its
        worker, and of about its length.
        """
        policy, longest = self.lobby.policy, batch.longest
        counts, lengths = policy.allowed_batch_sizes, policy.allowed_lengths
        size = padded(batch.n, counts) if counts else self._knots.nearest(batch.size)
        if longest:
            return self.places.is_first(batch.place, (size, padded(longest, lengths) if lengths else level_of(longest)))
        return self.places.is_first(batch.place, size)

    def _begin(self, now: float, behind: list[Batch]) -> None:
        batch = behind.pop(0)
        if not behind:
            del self.ahead[batch.place]
        self._n_ahead -= 1
        batch.started = batch.call_started = batch.answered_at = now
        self.lobby.look_at(now + self.times.least_s)
        self.in_flight[batch.place] = batch

    # -- what takes too long

    def attend(self, now: float) -> Attention:
        """Expire requests and find workers that hang; call it once `attention_at` has passed."""
        expired = self.lobby.expire(now)
        hung = []
        attention_at = self.queue.earliest_deadline
        for batch in self.in_flight.values():
            hint = self.times.hint(now - batch.started)
            expired += [Expiry(request, batch.started, hint) for request in batch.expire(now)]
            attention_at = min(attention_at, batch.earliest_deadline)
            if batch.given_up:  # a worker being killed is reported once
                continue
            until, batch.given_up = self.times.judge(now, batch.call_started, batch.unwanted_since, batch.size)
            if batch.given_up:
                hung.append(batch.place)
            else:
                attention_at = min(attention_at, until)
        for batch in chain.from_iterable(self.ahead.values()):
            expired += [Expiry(request, None) for request in batch.expire(now)]
            attention_at = min(attention_at, batch.earliest_deadline)
        self.lobby.attention_at = attention_at
        return Attention(expired, hung)

    # -- lone requests, which need no decision

    def lets_go(self, now: float, deadline: float, slo_s: float) -> bool:
        """Report whether a lone request of size 1 that came now would be admitted and go at once.

        The queue must be empty, and all workers idle. Nothing is changed. Where that takes long to
        find out, the answer is False.
        """
        slack_s = self.lobby.lone_slack_s
        if slack_s == inf:
            return False
        due = deadline
        if deadline != inf and deadline - now < self.times.usual_s:  # whether it may be admitted is judged elsewhere
            return False
        if now + slo_s < due:
            due = now + slo_s
        return due - now >= slack_s

    def lone_done(self, place: int, began: float, now: float, busy_s: float, ok: bool) -> None:
        """Note that a request was let go by `lets_go`, and is done.

        A part of the fast paths `lone_call` and `lent_worker`: the same outcome as that of `enter`,
        `next_batch` and `completed`, see tests/batch_function/test_alone.py.
        """
        self._batch_ids += 1
        hop_s = self._learn_times(now - began, busy_s, 1, 1, went_ahead=False)
        if self.lobby.learns:
            lone = self._lone
            lone.place, lone.started, lone.ok = place, began, ok
            lone.busy_s, lone.hop_s = busy_s, hop_s
            self._learn(now, lone, 1)

    # -- a worker that is lent to callers' threads

    def lend(self, now: float, deadline: float, slo_s: float) -> int | None:
        """Take out the worker that would be next, for lone requests that go at once by `lets_go`,
        and return its place; None if a lone request would have to wait.

        While it is away, all is as with one worker less, and `lone_done` may be called at any time
        later. Once something waits that no other worker is free for, it should come back
        (`Todo.recall`).
        """
        if (
            self.in_flight
            or self.places.lent
            or self.queue.count
            or not self._idle
            or not self.lets_go(now, deadline, slo_s)
        ):
            return None
        place = self._idle.pop()
        self.places.lent.add(place)
        return place

    def take_back(self, place: int, request: Request | None = None, began: float = 0.0) -> Batch | None:
        """Have a worker back that was lent; the request that it is at work on since `began`, if
        any, becomes a batch.
        """
        self.places.lent.remove(place)
        if request is None:
            if place not in self.places.leaving:
                self._idle.append(place)
            return None
        self._batch_ids += 1
        self.running += 1
        self.lobby.entered += 1
        batch = self.in_flight[place] = LoneBatch(request.id, self.lobby.stage, place, [request], 1, "free", began)
        self.lobby.look_at(min(request.deadline, began + self.times.least_s))
        return batch

    # -- what to do

    def poll(self, now: float, room: float, todo: Todo, dropped: list[tuple[Request, str]]) -> None:
        """Put the batches to run now on the list of what a driver must do; see `next_batch`.

        `room` is how many requests workers may have in all, as there is room for their results.
        """
        while (batch := self.next_batch(now, room - self.running, dropped)) is not None:
            todo.run.append(batch)

    def next_batch(self, now: float, room: float, dropped: list[tuple[Request, str]]) -> Batch | None:
        """Return the batch to run now, or None; `wake_at` then says when to ask again.

        Args:
            room: How many requests may be handed to workers, as there is room for their results.
            dropped: The requests that the policy drops are appended here, and why.
        """
        queue, lobby = self.queue, self.lobby
        # After a batch for a busy worker no worker is free, and the policy has been asked already.
        went_ahead, self._went_ahead = self._went_ahead, False
        if not (went_ahead and queue.count):
            lobby.wake_at = None
        while queue.count and not went_ahead:
            if queue.suspect_lanes and self._idle and room >= 1:
                view = self._visible(goes_alone=True)
                head = view.peek(1)
                if head and type(head[0].lane.key) is Suspect:  # it waits for no other, whatever the policy
                    return self._start(now, 1, "quarantine", () if view is queue else head)
            had_several_lanes, was_room_short = queue.lanes > 1, room < queue.count
            decision = self._ask(now, room)
            if decision.drop:
                lobby.drop(now, decision.drop)
                dropped += [(request, decision.drop_reason) for request in decision.drop]
            if decision.take and (lobby.is_shared or self.keyed is not None) and not decision.chosen:
                decision = self._chosen_of_visible(decision)  # of what is left, hence after the drop
            n = decision.take
            if n and queue.count:
                if decision.chosen:
                    return self._start_chosen(now, decision, room)
                if queue.by_length or n > self.safe_size.limit or queue.weighted or n > room:
                    n = self._most_to_send(n, room)
                return self._start(now, n, decision.reason)
            lobby.wake_at = decision.wake_at
            if not decision.drop:
                break
            # It has only dropped some. It is asked again where it may not have judged the others
            # yet: where they wait in other lanes, or where there is room for all of them only now.
            if not was_room_short and not (had_several_lanes and decision.wake_at is None):
                break
        if self.runs_ahead and queue.count and not self._idle and not lobby.is_shared:
            running = len(self.in_flight)
            if len(self.ahead) < running or (self._n_ahead < MOST * running and is_deep(queue, running, self._limit)):
                return self._next_ahead(now, room)
        return None

    def _ask(self, now: float, room: float) -> Decision:
        """Return what the policy says, or what it would if it knew that the service closes."""
        queue = self.queue
        free = len(self._idle)
        if free and room < queue.count and room < self.lobby.most_room and room < self._most_requests():
            free = 0  # no credit: the next stage could not take what this one would produce
        view: Queue | WithoutLanes = queue
        if self.lobby.is_shared or self.keyed is not None:
            view = self._visible()
        if self.keyed is not None:
            self._view.warm_keys = self.keyed.warm(self._idle)
        if self.limits_padded and self.safe_size.limit < inf:
            self._set_safe_padded()
        decision = self._decide(now, view, free)
        if not decision.take and free and self.lobby.closing and len(view):
            decision = decision._replace(take=int(self.lobby.batch_limit), reason="closing")
        return decision

    def _decide(self, now: float, queue: Queue | WithoutLanes, free: int, free_in_s: float | None = None) -> Decision:
        view = self._view
        view.now, view.queue, view.free, view.free_in_s = now, queue, free, free_in_s
        view.busy, view.running = len(self.in_flight) + len(self.places.lent), self.running
        return self.lobby.decide()

    def _visible(self, goes_alone: bool = False) -> Queue | WithoutLanes:
        """Return the queue as the policy sees it: without what must not go now.

        That are the keys that may get no more workers, and the nodes with too little room behind
        them: batches would be made too small, unless a single request is to go.
        """
        lobby, order = self.lobby, self.queue.order
        held = set() if self.keyed is None else order.of_keys(self.keyed.held)
        if lobby.is_shared:
            rooms = [(node, node.room()) for node in lobby.nodes]
            shut = {node for node, room in rooms if room < 1 or not (goes_alone or self._is_enough(node, room))}
            if shut:
                held.update([lane_queue for lane_queue in order if lane_queue.lane.source in shut])
        return WithoutLanes(self.queue, held) if held else self.queue

    def _is_enough(self, node: Node, room: float) -> bool:
        return room >= node.queued or room >= node.most_room or room >= self._most_requests()

    def _chosen_of_visible(self, decision: Decision) -> Decision:
        view = self._visible()
        if view is self.queue and not self.lobby.is_shared:
            return decision
        head = view.peek(decision.take)
        return decision._replace(take=decision.take if head else 0, chosen=head[: self._fitting(decision.take, head)])

    def _most_to_send(self, units: int, room: float) -> int:
        """Return how many requests go where the policy takes `units`.

        They are as many as fit into memory, into `units`, and into the next stage.
        """
        queue = self.queue
        if not self.limits_padded and units > self.safe_size.limit and queue.size > self.safe_size.limit:
            units = self._safe(units)
        n = self._fitting(units, queue.peek(units)) if queue.weighted or self._is_limited_by_length else units
        return n if n <= room else int(room)

    @property
    def _is_limited_by_length(self) -> bool:
        return self.queue.by_length and (self.queue.lengths_vary or self.lobby.policy.most_padded(self._view) < inf)

    def _set_safe_padded(self) -> None:
        """Write into the view how large a padded batch fits into memory, or is worth trying."""
        safe, view, queue = self.safe_size, self._view, self.queue
        if any(self.memory_of(batch) > safe.limit for batch in self.handed_over):
            view.safe_padded_size = safe.limit  # whether that one fits is not known yet
            return
        longest = max([rising[-1][0] for levels in queue.levels if (rising := levels.rising())], default=1)
        wanted = int(min(queue.count, self.lobby.batch_limit)) * self.lobby.padded_length(longest)
        view.safe_padded_size = safe.limit if wanted <= safe.limit else safe.offered(wanted)

    def _note_padded(self, batch: Batch) -> None:
        safe = self.safe_size
        memory = self.memory_of(batch)
        if self.queue.count and memory + self.lobby.padded_length(batch.longest) > safe.limit:
            safe.allowed(memory)

    def _safe(self, units: int) -> int:
        limit = self.safe_size.limit
        if any(batch.size > limit for batch in self.handed_over):
            return int(limit)  # one that is larger is under way, and whether it fits is not known yet
        return self.safe_size.allowed(units)

    def _fitting(self, units: float, requests: Sequence[Request], most_padded: float | None = None) -> int:
        """Return how many requests, from the first on, fit into `units`; that one always does.

        They also fit together into `most_padded`, by default as much as the policy allows.
        """
        n = size = longest = 0
        if most_padded is None:
            most_padded = self.lobby.policy.most_padded(self._view)
        for request in requests:
            size += request.size
            longest = max(longest, request.length)
            if n and (size > units or (n + 1) * self.lobby.padded_length(longest) > most_padded):
                break
            n += 1
        return n

    def _start_chosen(self, now: float, decision: Decision, room: float) -> Batch:
        units = decision.take
        chosen = with_room(decision.chosen) if self.lobby.is_shared else decision.chosen
        most, safe = room, self._view.safe_padded_size
        if self.limits_padded:
            most = most if safe == inf else min(most, self._fitting(inf, chosen, safe))
        elif units > self.safe_size.limit:
            most = min(most, self._fitting(self._safe(units), chosen))
        return self._start(now, 0, decision.reason, chosen[: max(1, int(min(most, len(chosen))))])

    def _start(self, now: float, n: int, reason: str, chosen: Sequence[Request] = ()) -> Batch:
        if self.keyed is None:
            place = self._idle.pop()
            batch = self._make(now, n, reason, place, chosen=chosen)
        else:
            batch = self._make(now, n, reason, -1, chosen=chosen)
            batch.place = place = self._place_for(self.keyed, batch)
        look_at = now + self.times.least_s
        if look_at < self.lobby.attention_at:  # as `Lobby.look_at` does, without its call
            self.lobby.attention_at = look_at
        self.in_flight[place] = batch
        if self.limits_padded and self.safe_size.limit < inf:
            self._note_padded(batch)
        return batch

    def _place_for(self, keyed: KeyedWorkers, batch: Batch) -> int:
        key = key_of(batch.requests[0].lane)
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
        self.running += len(requests)
        return Batch(self._batch_ids, self.lobby.stage, place, requests, size - queue.size, reason, now, ahead, longest)

    def _next_ahead(self, now: float, room: float) -> Batch | None:
        """Return a batch for a busy worker, if it may go already: see `core/ahead.py`. None goes,
        too, if the policy takes nothing, or more than there is room for.
        """
        queue, times, running = self.queue, self.times, len(self.in_flight)
        much_waits = is_deep(queue, running, self._limit)
        lead_s = lead_allowed_s(queue, times, running, much_waits)
        if lead_s is None:
            return None
        most = MOST if much_waits else 1
        before = next_to_end(now, self.in_flight.values(), self.ahead, self.places.leaving, times, lead_s, most)
        if before is None:
            return None
        place, behind = before.place, self.ahead.get(before.place)
        ends = times.usual_end(before) + (len(behind) * (times.ahead_s or times.usual_s) if behind else 0.0)
        opens_at = ends - lead_s
        if behind and now < opens_at:
            return None  # it goes when something else happens, and no timer is set for it
        decision = self._decide(now, queue, 0, max(0.0, ends - now))
        n = decision.take
        if not self.limits_padded and n > self.safe_size.limit:
            n = self._safe(n)
        if not n or n > room:
            return None
        if queue.size <= n < self._limit:
            opens_at = max(opens_at, ends - LEAST_LEAD_S)
        if not is_time(now, opens_at):
            self.lobby.wake_at = opens_at if self.lobby.wake_at is None else min(self.lobby.wake_at, opens_at)
            return None
        if queue.weighted or self._is_limited_by_length:
            n = self._fitting(n, queue.peek(n))
        made = self._make(now, n, decision.reason, place, ahead=True)
        self.ahead.setdefault(place, []).append(made)
        self._n_ahead += 1
        self._went_ahead = True
        return made

    # -- how long requests wait

    def predicted_wait_s(self, now: float, units_before: float) -> float:
        """Return how long a request waits that has `units_before` units queued before it.

        It goes by what recent batches took, and is rather too short than too long: in a stage that
        is not saturated, batches are smaller than they could be. It never falls as `units_before`
        rises, unless the policy predicts waits itself.
        """
        limit, usual_s, running, n_idle = self._limit, self.times.usual_s, self.in_flight, len(self._idle)
        if n_idle and units_before < limit:
            return 0.0
        workers = max(1, n_idle + len(running) + len(self.places.lent) - len(self.places.leaving))
        wait_s = (units_before // limit + self._n_ahead) * usual_s / workers
        if self.lobby.predicts:
            predicted_s = self.lobby.predicted_wait_s(int(units_before), workers)
            if predicted_s is not None:
                wait_s = predicted_s + self._n_ahead * usual_s / workers
        if n_idle or not running:
            return wait_s
        oldest = next(iter(running.values()))
        rest_s = oldest.started + usual_s - now
        return wait_s + rest_s if rest_s > 0.0 else wait_s

    @property
    def _limit(self) -> float:
        limit, safe = self.lobby.batch_limit, self.safe_size.limit
        return safe if safe < limit and not self.limits_padded else limit

    def _most_requests(self) -> float:
        """Return about how many of the requests that wait a full batch would hold."""
        limit, queue = self._limit, self.queue
        return limit * queue.count / queue.size + 1 if queue.weighted else limit
