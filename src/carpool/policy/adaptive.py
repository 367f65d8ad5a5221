"""Adaptive, the default: learns what batches cost and how requests come, and needs no parameter but the batch limit.

The principle: whatever is queued goes as soon as a worker is free, and each deviation must pay by theory or by a
learned statistic. In the order in which `decide` asks:

1. *nothing learned yet*: serve whatever waits; nothing is refused on a guess;
2. *hopeless*: what cannot be answered in time even alone is refused;
3. *overload* (`policy/backlog.py`): what the workers will never get to in time is refused early; of a backlog that
   stands, also who would be late if the batch took a little longer than usual;
4. *tight* (`policy/due_plan.py`): the head cannot go with the others: a smaller batch, or without it;
5. *gather* (`policy/gather.py`): clients in a closed loop are about to return: wait for them;
6. *size* (`policy/batch_size.py`): take as many as makes the sum of delays least, not always all;
7. *probe*: now and then try a size that nobody has measured.

Rules 2 to 4 need due times, by an SLO or by deadlines; without them, only the others apply. Theory, figures and when it
loses: docs/policies.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from carpool.policy.arrivals import Arrivals
from carpool.policy.backlog import Backlog, Pace
from carpool.policy.base import NOTHING, Decision, Policy, QueueView
from carpool.policy.batch_size import BatchSize
from carpool.policy.cost import CostModel
from carpool.policy.due_plan import DuePlan
from carpool.policy.gather import Gather, Round
from carpool.request import Request

_COLD = 6  # batches before anything is decided by what was learned
_FEW = 64  # batches that must be known before any is passed over without much thought
_TRIFLE_S = 200e-6  # shorter batches just go: to think about them costs more than it brings
_SHORT_S = 5e-3  # of shorter ones not all are learned from: that costs a share of their time too,
_LEARN_EVERY_S, _LEARN_FROM_TRIFLES_EVERY_S = 20e-3, 50e-3  # about one in this time
_NOVEL = 2.0  # a size that was measured less often is learned from whenever it comes
_TIME_IS_FREE, _TIME_IS_DEAR = 0.5, 1.0  # loads at which a worker's time is worth nothing, and all it could serve


class Adaptive(Policy):
    """Batch size and waiting time found by the program, with and without an SLO.

    Args: see `Policy`; `max_batch_size` is the only one that is needed.
    """

    def __init__(self, max_batch_size: int | None = None, max_queue_delay_s: float | None = None) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        self._arrivals = Arrivals()
        self._gather = Gather(self._arrivals)
        self._backlog = Backlog()
        self._unit = 1.0  # smoothed size of a request
        self._waiting = 0  # requests left in the queue by the last decision, and what has come and gone since
        self._busy = 0  # workers, after the last decision
        self._rule = "cold"
        self._trifling = False  # the last batch was short
        self._pass_over = 0  # so many batches are not learned from
        self._lesson: _Observation | None = None  # what is still to be learned from the last one that is
        self._gone_on = False  # a batch has gone since
        self._learn_from_scratch()

    def _learn_from_scratch(self) -> None:
        self.cost = CostModel(self.limit)
        self._size = BatchSize(self.cost)

    # -- what happened

    def arrived(self, now: float, request: Request) -> None:
        self._arrivals.add(now, 1)
        self._waiting += 1
        if request.size != 1 or self._unit != 1.0:
            self._unit += 0.02 * (request.size - self._unit)
        if self._lesson is not None and self._gone_on:
            self._study()

    def arrived_together(self, now: float, requests: Sequence[Request]) -> None:
        n = len(requests)
        self._arrivals.add(now, n)
        self._waiting += n
        size = sum([request.size for request in requests])
        if size != n or self._unit != 1.0:
            self._unit += min(0.02 * n, 0.5) * (size / n - self._unit)
        if self._lesson is not None and self._gone_on:
            self._study()

    def left(self, now: float, request: Request) -> None:
        self._waiting -= 1

    def completed(self, now: float, n: int, size: int, busy_s: float, ok: bool) -> None:
        trifling = self._trifling
        if trifling and self._pass_over and busy_s < _TRIFLE_S:
            self._pass_over -= 1
            return
        if self._lesson is not None:
            self._study()  # of the one before, if there was no better time
        cost, gather = self.cost, self._gather
        if cost.limit != self.limit:
            self._learn_from_scratch()
            cost = self.cost
        known = cost.samples > _FEW
        self._trifling = known and busy_s < _TRIFLE_S
        novel = not known or cost.measured(size) < _NOVEL
        if novel or not self._pass_over:
            before = None if self._trifling else gather.account(now, n, self._waiting, max(0, self._busy - 1))
            # what one more batch costs, the way to the worker and back too
            self._lesson = _Observation(size, busy_s + self.hop_s if ok else None, before, size / n)
            self._pass_over = self._worth_passing_over(size, busy_s) if known else 0
        else:
            # counted, not timed: of batches picked by the clock, more would be stalls than there are
            self._pass_over = 0 if trifling and not self._trifling else self._pass_over - 1
        if self._trifling:
            gather.stop()
        else:
            gather.completed(now, n)
        self._gone_on = False
        if novel:
            self._study()  # the next decision depends on it

    def _worth_passing_over(self, size: int, busy_s: float) -> int:
        """How many batches not to learn from, after one that has taken so long: none if they are not short any more."""
        usual_s = max(busy_s, self.cost.seconds(min(size, self.limit)))
        if usual_s >= _SHORT_S:
            return 0
        return int((_LEARN_FROM_TRIFLES_EVERY_S if self._trifling else _LEARN_EVERY_S) / usual_s)

    def _study(self) -> None:
        """Learn from a batch: once the next one has gone if possible, since its worker may be idle until then."""
        lesson, self._lesson = self._lesson, None
        if lesson is None:
            return
        if lesson.seconds is not None:
            self.cost.add(lesson.size, lesson.seconds)
            self._size.completed()
        if lesson.before is not None:
            self._gather.learn(lesson.before, lesson.unit, self.cost)

    def trained(self, n: int, size: int, busy_s: float) -> None:
        """A batch of the warm-up took so long."""
        if self.cost.limit != self.limit:
            self._learn_from_scratch()
        self.cost.add(size, busy_s, sure=True)

    # -- a request that nobody else shares the stage with

    def lets_go(self, slack_s: float) -> bool:
        cost = self.cost
        if cost.samples < _COLD or (not self._trifling and self._gather.window_s):
            return False
        if self._lesson is not None and self._gone_on:  # it is studied when something arrives, and may change all this
            return False
        margin = cost.margin
        return slack_s >= cost.longest_s * margin or slack_s >= cost.seconds(1) * margin

    def went_alone(self, began: float, now: float, busy_s: float, ok: bool) -> None:
        self._arrivals.add(began, 1)
        if self._unit != 1.0:
            self._unit += 0.02 * (1.0 - self._unit)
        self._backlog.calm()
        self._backlog.drained()
        self._waiting, self._busy, self._gone_on = 0, 1, True
        self._rule = "free" if self.limit > 1 else "full"
        self.completed(now, 1, 1, busy_s, ok)

    # -- what to do

    def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:
        waiting = self._waiting = len(queue)
        if not free or not waiting:
            return NOTHING
        easy = self._trifling or (waiting == 1 and not busy and not self._gather.window_s)
        if easy and self._has_time(now, queue):
            n = min(queue.size, self.limit)
            decision = Decision(take=n, reason="free" if n < self.limit else "full")
        elif self.cost.samples < _COLD:
            decision = self._cold(now, queue)
        else:
            self._size.refresh()
            decision = self._unhurried(now, queue, free, busy) or self._warm(now, queue, free, busy)
        self._busy = busy
        if decision.take:
            self._busy += 1
            self._gone_on = True
            self._rule = decision.reason
            self._waiting -= decision.take if queue.size == len(queue) else round(decision.take / self._unit)
        return decision

    def decide_ahead(self, now: float, queue: QueueView, free_in_s: float) -> Decision:
        """A batch of the size that is best for all that wait, where nobody is in a hurry and nobody has to be refused.

        What comes until the worker is free could not join it, so nothing is lost; else `decide` is to judge by what
        waits then.
        """
        cost, size, waiting = self.cost, self._size, queue.size
        if cost.samples < _COLD or self._backlog.overloaded_since is not None:
            return NOTHING
        size.refresh()
        most = self.limit if self._trifling else size.most(waiting)
        slack_s = queue.earliest_due - now - free_in_s - self.ahead_s
        if (
            waiting < most
            or self._share(now, waiting, most, self._busy) < most  # another worker may be free before this one
            or slack_s < (1 + waiting // most) * cost.longest_s * cost.margin  # else some may have to be refused
            or not (self._trifling or size.best_at_once(waiting, most, size.capacity * cost.bias))
        ):
            return NOTHING
        decision = (
            Decision(take=most, reason="full") if self._trifling else self._go([], waiting, most, slack_s, "full")
        )
        self._gone_on = True
        self._rule = decision.reason
        self._waiting = len(queue) - (decision.take if waiting == len(queue) else round(decision.take / self._unit))
        return decision

    def _has_time(self, now: float, queue: QueueView) -> bool:
        """Whether nobody is in a hurry: then a lone request on an idle server, or a trifle, goes without more ado."""
        cost = self.cost
        if cost.samples < _COLD:
            return False
        self._backlog.calm()
        if queue.size <= cost.limit:
            self._backlog.drained()
        slack_s = queue.earliest_due - now - self.ahead_s
        return slack_s >= cost.longest_s * cost.margin or (
            slack_s >= cost.seconds(min(queue.size, self.limit)) * cost.margin
        )

    def _cold(self, now: float, queue: QueueView) -> Decision:
        """Too early to judge: serve whatever is there and give up only what is late already."""
        late = [] if queue.earliest_due > now else [r for r in queue.peek(len(queue)) if r.due <= now]
        waiting = queue.size - sum([request.size for request in late])
        if not waiting:
            return Decision(drop=late)
        return Decision(drop=late, take=min(waiting, self.limit), reason="cold")

    def _share(self, now: float, waiting: int, most: int, workers: int) -> int:
        """The largest batch to make of so many where several workers share them; `most` for one worker alone."""
        if workers <= 1 or self._gather.window_s or self._backlog.overloaded_since is not None:
            return most  # clients that come back together would be split, and in an overload full batches serve most
        return min(most, self._size.share(waiting, self._arrivals.steady_rate(now) * self._unit, workers))

    def _unhurried(self, now: float, queue: QueueView, free: int, busy: int) -> Decision | None:
        """What `_warm` would say, in a fraction of the steps; None where that takes more thought.

        Here all have time, nobody is refused, and the batch takes all that it may.
        """
        cost, size = self.cost, self._size
        waiting, due = queue.size, queue.earliest_due
        most = size.most(waiting)
        slack_s = due - now - self.ahead_s
        if (
            queue.lanes > 1
            or slack_s < cost.longest_s * cost.margin
            or (waiting > most and due < _NO_SLO_S)
            or self._backlog.overloaded_since is not None
        ):
            return None
        if waiting <= most:
            self._backlog.drained()
        n = min(waiting, self._share(now, waiting, most, free + busy))
        if not size.best_at_once(waiting, n, size.capacity * cost.bias):
            return None
        until = None if free > 1 else self._worth_waiting_until(now, queue, waiting, most, slack_s)
        if until is not None:
            return Decision([], wake_at=until)
        return self._go([], waiting, n, slack_s, "full" if n == most else "free" if n == waiting else "size")

    def _warm(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:
        cost, size = self.cost, self._size
        line = _Candidates(queue)
        at = now + self.ahead_s  # an answer takes this much longer than its batch
        self._drop_hopeless(line, at, size.most(line.size))
        if not line.size:
            return self._hopeless(line, at - now + cost.seconds(1))
        workers = free + busy
        capacity = workers * size.capacity * cost.bias
        short, long = self._arrivals.short_rate(now) * self._unit, self._arrivals.long_rate(now) * self._unit
        most = size.most(line.size)
        if long < 0.95 * capacity or (not busy and 2 * line.size < most):
            self._backlog.calm()
        if line.size <= most:
            self._backlog.drained()
        else:
            self._trim(now, line, Pace(min(short, long), capacity, workers, most, cost.seconds(most), cost.cv), long)
            if not line.size:
                return Decision(drop=line.dropped)  # whoever is left would be larger than all that is worth keeping
        share = self._share(now, line.size, most, workers)
        everything = min(line.size, share)
        load = max(short, long) / capacity
        slack_s = line.due - at
        if slack_s < cost.seconds(everything) * cost.margin:
            return self._tight(at, line, share, load, capacity, workers)
        # with two workers idle, those who come back find one, so nobody waits for them
        until = None if free > 1 else self._worth_waiting_until(now, queue, line.size, most, slack_s)
        if until is not None:
            return Decision(drop=line.dropped, wake_at=until)
        n = size.choose(line.size, share, load, capacity / workers)
        if n < everything and line.due_behind(n) - at - cost.seconds(n) < cost.margin * cost.seconds(
            min(line.size - n, share)
        ):
            n = everything  # those left behind would be late
        return self._go(
            line.dropped, line.size, n, slack_s, "full" if n == most else "free" if n == line.size else "size"
        )

    def _drop_hopeless(self, line: _Candidates, at: float, most: int) -> None:
        """Refuse what could not be answered in time even by a batch of its own."""
        cost = self.cost
        line.drop_due_before(at + cost.seconds(1))
        if line.weighted and line.due - at < cost.seconds(min(line.size, most)) * cost.margin:
            line.drop([request for request in line.requests if request.due - at < cost.seconds(request.size)])

    def _hopeless(self, line: _Candidates, least_s: float) -> Decision:
        """Nobody who waits can make it. If nobody ever could, one goes: the cost may have been mislearned."""
        last = max(line.dropped, key=lambda request: request.due)
        if last.due - last.arrived >= least_s:
            return Decision(drop=line.dropped)
        line.dropped.remove(last)
        return Decision(drop=line.dropped, take=1, reason="probe")

    def _trim(self, now: float, line: _Candidates, pace: Pace, long_rate: float) -> None:
        """Refuse what is not worth keeping of a backlog that grows, since more comes than can be served, or stands."""
        slo_s = line.slo_s
        if slo_s > _NO_SLO_S:
            return
        urgent = line.due_by(now + 1.001 * slo_s)  # what is due later does not keep these waiting
        if pace.arriving > pace.capacity:
            line.drop_first(urgent - self._backlog.keep(now, urgent, pace, slo_s, self.ahead_s, self.overload))
            urgent = line.due_by(now + 1.001 * slo_s)
        spare = self._backlog.look(now, urgent, pace._replace(arriving=long_rate), slo_s)
        edge_s = self.ahead_s + pace.surely_s
        if spare and edge_s < slo_s:  # else all are at the edge when they come
            line.drop_first(spare, due_by=now + edge_s)

    def _tight(self, at: float, line: _Candidates, most: int, load: float, capacity: float, workers: int) -> Decision:
        """The head cannot go with the others: serve it in a smaller batch, or give it up for those behind it."""
        plan = DuePlan(line.requests, line.size, self.cost, most, workers)
        alone, in_time_with, end_with = plan.serve_head(at, line.due - at)
        start = plan.first_in_time(0, at)
        if start < len(line.requests):
            in_time_without, end_without = plan.drain(start, at)
            price = capacity * min(1.0, max(0.0, (load - _TIME_IS_FREE) / (_TIME_IS_DEAR - _TIME_IS_FREE)))
            price /= self._unit  # requests per second
            if in_time_without - price * end_without > in_time_with - price * end_with:
                line.drop(plan.late_before(start, at))
                return self._go(line.dropped, line.size, min(line.size, most), line.due - at, "shed")
        return Decision(drop=line.dropped, take=alone, reason="tight")

    def _worth_waiting_until(
        self, now: float, queue: QueueView, waiting: int, most: int, slack_s: float
    ) -> float | None:
        """When to stop waiting for clients that come back; None to go now."""
        gather = self._gather
        if not gather.window_s or waiting >= most or not gather.expected:
            return None
        until = gather.until
        if self.max_queue_delay_s is not None:
            until = min(until, queue.oldest_arrival + self.max_queue_delay_s)
        more = min(waiting + int(gather.served * self._unit), most)
        if now < until and slack_s > until - now + self.cost.seconds(more) * self.cost.margin:
            return until
        return None

    def _go(self, dropped: list[Request], waiting: int, n: int, slack_s: float, reason: str) -> Decision:
        probe = self._size.probe(n, waiting, slack_s)
        return Decision(drop=dropped, take=probe, reason=reason if probe == n else "probe")

    # -- why

    def explain(self, now: float) -> dict[str, Any]:
        """What it has learned and by which rule the last batch went; all times in seconds."""
        cost, size = self.cost, self._size
        size.refresh()
        sizes = sorted({1, size.working, size.best, self.limit})
        return {
            "policy": "adaptive",
            "rule": self._rule,
            "samples": cost.samples,
            "cost_s": {n: cost.seconds(n) for n in sizes} if cost.samples else {},
            "noise_cv": cost.cv,
            "margin": cost.margin,
            "hop_s": self.hop_s,
            "arrival_rate": self._arrivals.long_rate(now),
            "capacity_per_worker": size.capacity * cost.bias if cost.samples else 0.0,
            "expected_batch_size": size.working,
            "gather_s": self._gather.window_s,
            "overloaded": self._backlog.overloaded_since is not None,
        }


_NO_SLO_S = 1e11


class _Observation(NamedTuple):
    """What is to be learned from a batch.

    Attributes:
        size: its; seconds: what it took in all, None if it failed.
        before: the batch before it, and what came of that.
        unit: the mean size of its requests.
    """

    size: int
    seconds: float | None
    before: Round | None
    unit: float


class _Candidates:
    """What may share the next batch, less the drops of one decision; it is listed only if somebody must look at it.

    Attributes:
        size: how much there is, in units of the requests' sizes.
        due: when the first one is due.
        dropped: who is to be refused.
    """

    __slots__ = ("_queue", "_requests", "dropped", "due", "size")

    def __init__(self, queue: QueueView) -> None:
        self._queue = queue
        self._requests: Sequence[Request] | None = None
        self.dropped: list[Request] = []
        if queue.lanes == 1:
            self.size = queue.size
            self.due = queue.earliest_due
        else:
            self._requests = queue.peek(len(queue))
            self.size = sum([request.size for request in self._requests])
            self.due = min([request.due for request in self._requests])

    @property
    def requests(self) -> Sequence[Request]:
        """Those left, in the order in which they would be taken."""
        if self._requests is None:
            self._requests = self._queue.peek(len(self._queue))
        return self._requests

    @property
    def weighted(self) -> bool:
        """Whether there are requests, and some take up more than one unit."""
        return self._queue.size != len(self._queue) and self.size > 0

    @property
    def slo_s(self) -> float:
        """How long the head may take in all."""
        head = self._queue.peek(1)[0] if self._requests is None else self._requests[0]
        return head.due - head.arrived

    def due_behind(self, units: int) -> float:
        """When the first one behind so many units is due."""
        if self.size == len(self.requests):
            return self.requests[units].due
        before = list(accumulate((request.size for request in self.requests), initial=0))
        behind = max(1, bisect_right(before, units) - 1)
        return self.requests[behind].due if behind < len(self.requests) else inf

    def drop(self, requests: list[Request]) -> None:
        """Refuse these."""
        gone = set(requests)
        self._requests = [request for request in self.requests if request not in gone]
        self.size -= sum([request.size for request in requests])
        self.due = min([request.due for request in self._requests], default=inf)
        self.dropped += requests

    def drop_due_before(self, when: float) -> None:
        """Refuse what is due before `when`."""
        if self.due < when:
            self.drop([request for request in self.requests if request.due < when])

    def due_by(self, when: float) -> int:
        """How much is due by `when`, in units."""
        if self.size and self._queue.lanes == 1 and self.requests[-1].due <= when:
            return self.size
        return sum([request.size for request in self.requests if request.due <= when])

    def drop_first(self, units: int, due_by: float = inf) -> None:
        """Refuse so much, or a little more, of what is due by then: what is due first, the lowest priority ahead."""
        if units <= 0 or self.due > due_by:
            return
        order = self.requests
        if self._queue.lanes > 1:
            order = sorted(order, key=lambda request: (request.lane[0], request.due))
        refused = []
        for request in order:
            if units <= 0:
                break
            if request.due <= due_by:
                units -= request.size
                refused.append(request)
        self.drop(refused)
