"""The batcher of one stage: a queue, a policy, idle workers and batches in flight.

It is told what happened (`enter`, `completed`, `worker_ready`, `worker_lost`) and asked what to run
next (`next_batch`). It keeps three promises whatever the policy says: no batch is larger than the
limit, no request is dispatched after its deadline, and a reply is paired with a request only if
that worker was given that request in that batch.

It has three layers, and each knows only those before it: what waits (`core/stage_requests.py`),
what workers have (`core/stage_workers.py`), and what goes next, which is this file.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import inf

from carpool.core.ahead import LEAST_LEAD_S, MOST, is_deep, is_time, lead_allowed_s, next_to_end
from carpool.core.batch import Batch
from carpool.core.graph import Node, with_room
from carpool.core.keyed_workers import KeyedWorkers
from carpool.core.lane_order import Suspect, key_of
from carpool.core.queue import Queue
from carpool.core.queue_view import WithoutLanes
from carpool.core.stage_workers import StageWorkers
from carpool.policy.base import Decision
from carpool.request import Request


class Batcher(StageWorkers):
    """One stage's decisions.

    Its arguments are those of `StageWorkers`; `wake_at` says when to call `next_batch` again
    although nothing happened.
    """

    def __repr__(self) -> str:
        return f"<Batcher {self.name} queued={len(self.queue)} running={self._running} idle={len(self._idle)}>"

    @property
    def lone_place(self) -> int | None:
        """The place of the worker that a request would get now; None if not all are idle."""
        if self.in_flight or self.queue.count or not self._idle:
            return None
        return self._idle[-1]

    @property
    def next_id(self) -> int:
        """The id of the next batch."""
        return self._batch_ids + 1

    # -- a request that no other shares the stage with

    def lets_go(self, now: float, deadline: float, slo_s: float) -> bool:
        """Report whether a lone request of size 1 that came now would be admitted and go at once.

        The queue must be empty, and all workers idle. Nothing is changed. If it cannot be told
        quickly, the answer is False.
        """
        try:
            slack_s = self.policy.lone_slack_s
        except BaseException as error:
            self._failed(error)
            return False
        if slack_s == inf:
            return False
        due = deadline
        # As in `longest_wait_s`; a policy's own prediction is not asked for while a worker is idle.
        if deadline != inf and deadline - now < self.times.usual_s * (2 + 1 / self._limit):
            return False
        if now + slo_s < due:
            due = now + slo_s
        return due - now >= slack_s

    def went_alone(self, began: float, now: float, busy_s: float, ok: bool) -> None:
        """Note that a request was let go by `lets_go`, and is done.

        Fast path of `enter`, `next_batch` and `completed`: the same outcome, see
        tests/batch_function/test_alone.py.
        """
        self._batch_ids += 1
        hop_s = self.times.learn(now - began, busy_s, 1, 1, went_ahead=False)
        if self._policy_learns:
            lone, idle = self._lone, self._idle
            lone.place, lone.started, lone.ok = idle[-1] if idle else 0, began, ok
            lone.busy_s, lone.hop_s = busy_s, hop_s
            self._learn(now, lone, 1)

    def start_lone(self, now: float) -> Batch:
        """Make a batch of the only request in the queue, which a worker has been handed already.

        The policy has let it go before (`lets_go`). It is asked once more, as it keeps accounts of
        what it decides, but it is too late to hold anything back.
        """
        decision = self._decide(now, self.queue, len(self._idle))
        return self._start(now, 1, decision.reason if decision.take else "free")

    # -- what to do

    def next_batch(
        self,
        now: float,
        room: float,
        dropped: list[tuple[Request, str]],
        rooms: Mapping[Node, float] | None = None,
    ) -> Batch | None:
        """Return the batch to run now, or None; `wake_at` then says when to ask again.

        Args:
            now: The time.
            room: How many requests may be handed to workers, as there is room for their results.
            dropped: The requests that the policy drops are appended here, and why.
            rooms: In the place of `room`, that of each node of a stage that has several.
        """
        queue = self.queue
        # After a batch for a busy worker no worker is free, and the policy has been asked already.
        has_asked, self._has_asked = self._has_asked, False
        if not (has_asked and queue.count):
            self.wake_at = None
        while queue.count and not has_asked:
            if queue.suspect_lanes and self._idle and room >= 1:
                view = self._visible(rooms)
                head = view.peek(1)
                if head and type(head[0].lane.key) is Suspect:  # it waits for no other, whatever the policy
                    return self._start(now, 1, "quarantine", () if view is queue else head)
            had_several_lanes, was_short = queue.lanes > 1, room < queue.count
            decision = self._ask(now, room, rooms)
            if decision.drop:
                self.drop(now, decision.drop)
                dropped += [(request, decision.drop_reason) for request in decision.drop]
            if decision.take and (self.keyed is not None or rooms is not None) and not decision.chosen:
                decision = self._chosen_of_visible(decision, rooms)  # of what is left, hence after the drop
            n = decision.take
            if n and queue.count:
                if decision.chosen:
                    return self._start_chosen(now, decision, room, is_shared=rooms is not None)
                if queue.by_length or n > self.safe_size.limit or queue.weighted or n > room:
                    n = self._most_to_send(n, room)
                return self._start(now, n, decision.reason)
            self.wake_at = decision.wake_at
            if not decision.drop:
                break
            # It has only dropped some. It is asked again where it may not have judged the others
            # yet: where they wait in other lanes, or where there is room for all of them only now.
            if not was_short and not (had_several_lanes and decision.wake_at is None):
                break
        if self.runs_ahead and queue.count and not self._idle and rooms is None:
            running = len(self.in_flight)
            if len(self.ahead) < running or (self._lying < MOST * running and is_deep(queue, running, self._limit)):
                return self._next_ahead(now, room)
        return None

    def _ask(self, now: float, room: float, rooms: Mapping[Node, float] | None) -> Decision:
        """Return what the policy says, or what it would if it knew that the service closes."""
        queue = self.queue
        free = len(self._idle)
        if free and room < queue.count and room < self.next_max_size and room < self._most_requests():
            free = 0  # no credit: the next stage could not take what this one would produce
        view: Queue | WithoutLanes = queue
        if rooms is not None:
            view = self._visible(rooms)
        if self.keyed is not None:
            view = self._visible(rooms)
            self.view.warm_keys = self.keyed.warm(self._idle)
        if self.limits_padded and self.safe_size.limit < inf:
            self._tell_safe_padded()
        decision = self._decide(now, view, free)
        if not decision.take and free and self.closing and len(view):
            decision = decision._replace(take=int(self.batch_limit), reason="closing")
        return decision

    def _decide(self, now: float, queue: Queue | WithoutLanes, free: int, free_in_s: float | None = None) -> Decision:
        """Return what the policy says, if that is possible."""
        view, times = self.view, self.times
        view.now, view.queue, view.free, view.free_in_s = now, queue, free, free_in_s
        view.busy, view.running = len(self.in_flight), self._running
        view.hop_s, view.gap_s = times.hop_s, times.gap_s
        try:
            decision = self.policy.decide(view)
            self.batch_limit = limit = self.policy.limit
            n = decision.take
            if type(n) is not int:
                n = operator.index(n)
                decision = decision._replace(take=n)
            if n and (not 0 < n <= limit or not (free or free_in_s is not None)):
                with_what = f"with {free} free workers" if free_in_s is None else "for a busy worker"
                raise self._impossible(n, with_what)
            if free_in_s is None and (decision.drop or decision.chosen):
                self._check_named(decision)
        except BaseException as error:
            self._failed(error)
            return self.policy.decide(view)
        return decision

    def _visible(self, rooms: Mapping[Node, float] | None) -> Queue | WithoutLanes:
        """Return the queue as the policy sees it: without what must not go now.

        That are the keys that may get no more workers, and the nodes with too little room behind
        them: batches would be made too small.
        """
        keys = () if self.keyed is None else self.keyed.held
        order = self.queue.order
        held = order.of_keys(keys)
        if rooms is not None:
            shut = {node for node, room in rooms.items() if self._is_too_little(node, room)}
            if shut:
                held.update([lane_queue for lane_queue in order if lane_queue.lane.source in shut])
        return WithoutLanes(self.queue, held) if held else self.queue

    def _is_too_little(self, node: Node, room: float) -> bool:
        return room < 1 or (room < node.queued and room < node.most_room and room < self._most_requests())

    def _chosen_of_visible(self, decision: Decision, rooms: Mapping[Node, float] | None) -> Decision:
        """Return a decision with the requests that it takes, if not just any may go."""
        view = self._visible(rooms)
        if view is self.queue and rooms is None:
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
        """Whether the lengths of requests may say how many of them share a batch."""
        return self.queue.by_length and (self.queue.lengths_vary or self.policy.most_padded(self.view) < inf)

    def _tell_safe_padded(self) -> None:
        """Tell the policy how large a padded batch fits into memory, or is worth trying."""
        safe, view, queue = self.safe_size, self.view, self.queue
        if any(self.memory_of(batch) > safe.limit for batch in self.handed_over):
            view.safe_padded_size = safe.limit  # whether that one fits is not known yet
            return
        longest = max([rising[-1][0] for levels in queue.levels if (rising := levels.rising())], default=1)
        wanted = int(min(queue.count, self.batch_limit)) * self.padded_length(longest)
        view.safe_padded_size = safe.limit if wanted <= safe.limit else safe.offered(wanted)

    def _note_padded(self, batch: Batch) -> None:
        """Count a batch as one that could have held more, if it was kept within what fits."""
        safe = self.safe_size
        could_be_larger = self.queue.count and self.memory_of(batch) + self.padded_length(batch.longest) > safe.limit
        if could_be_larger:
            safe.allowed(self.memory_of(batch))

    def _safe(self, units: int) -> int:
        """Return how much of `units` fits into memory, or is worth trying."""
        limit = self.safe_size.limit
        if any(batch.size > limit for batch in self.handed_over):
            return int(limit)  # one that is larger is under way, and whether it fits is not known yet
        return self.safe_size.allowed(units)

    def _fitting(self, units: int, requests: Sequence[Request]) -> int:
        """Return how many requests, from the first on, fit into `units`; that one always does."""
        n = size = longest = 0
        most_padded = self.policy.most_padded(self.view)
        for request in requests:
            size += request.size
            longest = max(longest, request.length)
            if n and (size > units or (n + 1) * self.padded_length(longest) > most_padded):
                break
            n += 1
        return n

    def _start_chosen(self, now: float, decision: Decision, room: float, is_shared: bool) -> Batch:
        """Make a batch of the requests that the policy has chosen, as far as there is room."""
        units = decision.take
        chosen = with_room(decision.chosen) if is_shared else decision.chosen
        most = room
        if self.limits_padded:
            most = min(most, self._fitting_of(chosen))
        elif units > self.safe_size.limit:
            most = min(most, self._fitting(self._safe(units), chosen))
        return self._start(now, 0, decision.reason, chosen[: max(1, int(min(most, len(chosen))))])

    def _fitting_of(self, chosen: Sequence[Request]) -> int:
        """Return how many of the requests that the policy has chosen fit into memory together."""
        safe = self.view.safe_padded_size
        n, longest = 0, 0
        if safe == inf:
            return len(chosen)
        for request in chosen:
            longest = max(longest, self.padded_length(request.length))
            if n and (n + 1) * longest > safe:
                break
            n += 1
        return n

    def _check_named(self, decision: Decision) -> None:
        """Raise RuntimeError if the policy drops what it cannot, or what it chooses is no batch."""
        chosen = decision.chosen
        self._check_queued(decision.drop, "drops")
        if not decision.take or not chosen:
            return
        self._check_queued([*decision.drop, *chosen], "chooses")
        first = chosen[0].lane
        if any(r.lane.key != first.key or r.lane.bucket != first.bucket for r in chosen):
            raise RuntimeError(f"{self._whose_policy} chooses requests of several keys")
        size, longest = sum([r.size for r in chosen]), max([r.length for r in chosen])
        if len(chosen) > 1 and (
            size > self.batch_limit or len(chosen) * self.padded_length(longest) > self.policy.max_padded_size
        ):
            raise self._impossible(size, f"whose longest is {longest}")

    def _start(self, now: float, n: int, reason: str, chosen: Sequence[Request] = ()) -> Batch:
        """Make a batch of the next `n` requests, or of the chosen ones, for an idle worker."""
        if self.keyed is None:
            place = self._idle.pop()
            batch = self._make(now, n, reason, place, chosen=chosen)
        else:
            batch = self._make(now, n, reason, -1, chosen=chosen)
            batch.place = place = self._place_for(self.keyed, batch)
        look_at = now + self.times.least_s
        if look_at < self.attention_at:
            self.attention_at = look_at
        self.in_flight[place] = batch
        if self.limits_padded and self.safe_size.limit < inf:
            self._note_padded(batch)
        return batch

    def _place_for(self, keyed: KeyedWorkers, batch: Batch) -> int:
        """Return the place of the idle worker that is best for the key of a batch."""
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
        self._running += len(requests)
        return Batch(self._batch_ids, self.stage, place, requests, size - queue.size, reason, now, ahead, longest)

    def _next_ahead(self, now: float, room: float) -> Batch | None:
        """Return a batch for a busy worker, if it may go already: see `core/ahead.py`."""
        queue, usual_s, running = self.queue, self.times.usual_s, len(self.in_flight)
        much_waits = is_deep(queue, running, self._limit)
        lead_s = lead_allowed_s(queue, self.times, running, much_waits)
        if lead_s is None:
            return None
        most = MOST if much_waits and not queue.varied else 1
        before = next_to_end(now, self.in_flight.values(), self.ahead, self.leaving, usual_s, lead_s, most)
        if before is None:
            return None
        place, lying = before.place, self.ahead.get(before.place)
        ends = before.started + usual_s * (1 + len(lying) if lying else 1)
        opens_at = ends - lead_s
        if lying and now < opens_at:
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
            self.wake_at = opens_at if self.wake_at is None else min(self.wake_at, opens_at)
            return None
        if queue.weighted or self._is_limited_by_length:
            n = self._fitting(n, queue.peek(n))
        made = self._make(now, n, decision.reason, place, ahead=True)
        self.ahead.setdefault(place, []).append(made)
        self._lying += 1
        self._has_asked = True
        return made

    def _impossible(self, n: int, with_what: str) -> RuntimeError:
        return RuntimeError(
            f"{self._whose_policy} asked for a batch of {n} {with_what} and a limit of {self.batch_limit}"
        )

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
        wait_s = None
        if self._predictor is not None:
            try:
                wait_s = self._predictor.wait_s(int(units_before), workers)
            except BaseException as error:
                self._failed(error)
        if wait_s is None:
            wait_s = units_before // limit * usual_s / workers
        if self._lying:
            wait_s += self._lying * usual_s / workers
        if self._idle or not self.in_flight:
            return wait_s
        return wait_s + max(0.0, min(batch.started for batch in self.in_flight.values()) + usual_s - now)

    def longest_wait_s(self, more: int) -> float:
        """Return a bound on a wait and the batch after it, if `more` units came now.

        Fast path of `predicted_wait_s`: never less than that and the fastest batch, see
        tests/core/test_fast_paths.py. Infinity where the policy makes predictions of its own.
        """
        if self._predictor is not None:
            return inf
        return self.times.usual_s * (2 + self._lying + (self.queue.size + more) / self._limit)

    def expected_s(self, now: float) -> float:
        """Return how long a request that came now would spend here, its batch included."""
        if not self.in_flight and not self.queue.count:
            return self.times.fastest_s
        return self.predicted_wait_s(now, self.queue.size) + self.times.usual_s

    @property
    def _limit(self) -> float:
        """The most that a batch can hold now."""
        limit, safe = self.batch_limit, self.safe_size.limit
        return safe if safe < limit and not self.limits_padded else limit

    def _most_requests(self) -> float:
        """Return about how many of the requests that wait a full batch would hold."""
        limit, queue = self._limit, self.queue
        return limit * queue.count / queue.size + 1 if queue.weighted else limit
