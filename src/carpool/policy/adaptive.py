"""Adaptive, the default: learns what batches cost and how requests come.

It needs no parameter but the batch limit. The principle: whatever is queued goes as soon as a
worker is free, and each deviation must pay by theory or by a learned statistic. In the order in
which `decide` asks:

1. *nothing learned yet*: serve whatever waits; nothing is refused on a guess;
2. *hopeless*: what cannot be answered in time even alone is refused;
3. *overload* (`policy/backlog.py`): what the workers will never get to in time is refused early; of
   a backlog that stands, so is what would be late if the batch took a little longer than usual;
4. *tight* (`policy/due_plan.py`): the head cannot go with the others: a smaller batch, or without
   it;
5. *gather* (`policy/gather.py`): clients in a closed loop are about to return: wait for them;
6. *size* (`policy/batch_size.py`): take as many as makes the sum of delays least, not always all;
7. *probe*: now and then try a size that has never been measured.

Where requests have lengths and these vary, batches are composed by length (`policy/compose.py`),
which takes the place of rules 3, 4, 6 and 7, unless that saves little; then all is as above.

Rules 2 to 4 need due times, by an SLO or by deadlines; without them, only the others apply. Theory,
figures and when it loses: docs/policies.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from carpool.policy.arrivals import Arrivals
from carpool.policy.backlog import Backlog, Pace
from carpool.policy.base import NOTHING, Decision, LevelsView, Policy, QueueView
from carpool.policy.batch_size import BatchSize
from carpool.policy.candidates import Candidates
from carpool.policy.compose import Composer, in_line
from carpool.policy.cost import CostModel
from carpool.policy.due_plan import DuePlan
from carpool.policy.gather import Gather, Round
from carpool.policy.length_cost import LengthCost
from carpool.request import Request

_COLD = 6  # batches before anything is decided by what was learned
_FEW = 64  # batches that must be known before any is skipped without much thought
_TRIFLE_S = 200e-6  # shorter batches just go: to think about them costs more than it brings
_SHORT_S = 5e-3  # shorter batches are not all learned from, as learning costs a share of their time,
_LEARN_EVERY_S, _LEARN_FROM_TRIFLES_EVERY_S = 20e-3, 50e-3  # but about one in this time
_NOVEL = 2.0  # a size that was measured less often is learned from whenever it comes
_TIME_IS_FREE, _TIME_IS_DEAR = 0.5, 1.0  # loads at which a worker's time has no price, and its full price
_KNOWN_LENGTH = 1.1  # times the longest that was measured: what a longer one costs is a guess
_CALM = 0.95  # of the capacity: with a load below it an overload is over


class _Observation(NamedTuple):
    """What is to be learned from one batch.

    Attributes:
        size: the sum of its requests' sizes.
        seconds: what it took in all; None if it failed.
        before: the batch before it, and what came of that; None if nothing is to be learned of it.
        unit: the mean size of its requests.
    """

    size: int
    seconds: float | None
    before: Round | None
    unit: float


class _Load(NamedTuple):
    """How much comes, beside how much can be served; in units of the requests' sizes per second.

    Attributes:
        short: how much has come lately, by the short window.
        long: how much has come lately, by the long window.
        capacity: how much all workers can serve.
        workers: how many there are.
    """

    short: float
    long: float
    capacity: float
    workers: int

    @property
    def share(self) -> float:
        """The load as a share of the capacity."""
        return max(self.short, self.long) / self.capacity


class Adaptive(Policy):
    """Batch size and waiting time found by the program, with and without an SLO.

    Args:
        max_batch_size: as for every policy; the only one that is needed.
        max_queue_delay_s: as for every policy; it bounds how long clients are waited for.
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
        self._is_trifling = False  # whether the last batch was very short
        self._to_skip = 0  # how many of the next batches to skip when learning
        self._length_cost: LengthCost | None = None  # where requests have lengths
        self._composer: Composer | None = None
        self._observation: _Observation | None = None  # of the last batch that is learned from, until it is
        self._next_has_gone = False  # whether a batch has gone since that one was completed
        self._learn_from_scratch()

    def _learn_from_scratch(self) -> None:
        self.cost = CostModel(self.limit)
        self._chooser = BatchSize(self.cost)

    # -- what happened

    def arrived(self, now: float, request: Request) -> None:
        self._arrivals.add(now, 1)
        self._waiting += 1
        if request.size != 1 or self._unit != 1.0:
            self._unit += 0.02 * (request.size - self._unit)
        if self._observation is not None and self._next_has_gone:
            self._learn()

    def arrived_together(self, now: float, requests: Sequence[Request]) -> None:
        n = len(requests)
        self._arrivals.add(now, n)
        self._waiting += n
        size = sum([request.size for request in requests])
        if size != n or self._unit != 1.0:
            self._unit += min(0.02 * n, 0.5) * (size / n - self._unit)
        if self._observation is not None and self._next_has_gone:
            self._learn()

    def left(self, now: float, request: Request) -> None:
        self._waiting -= 1
        if self._composer is not None and request.due < inf:
            self._left_composer(now, request)

    def _left_composer(self, now: float, request: Request) -> None:
        """Count a request among those not answered in time, if that is why it leaves."""
        assert self._composer is not None and self._length_cost is not None
        if request.due < now + self.onward_s + self._length_cost.seconds(1, request.length):
            self._composer.answered(request, False)

    def completed(self, now: float, n: int, size: int, busy_s: float, ok: bool) -> None:
        was_trifling = self._is_trifling
        if was_trifling and self._to_skip and busy_s < _TRIFLE_S:
            self._to_skip -= 1
            return
        if self._observation is not None:
            self._learn()  # from the batch before, for which there was no better time
        cost = self.cost
        if cost.limit != self.limit:
            self._learn_from_scratch()
            cost = self.cost
        is_known = cost.samples > _FEW
        is_novel = not is_known or cost.measured(size) < _NOVEL
        self._is_trifling = is_known and busy_s < _TRIFLE_S
        if is_novel or not self._to_skip:
            self._observe(now, n, size, busy_s, ok)
            self._to_skip = self._worth_skipping(size, busy_s) if is_known else 0
        elif was_trifling and not self._is_trifling:
            self._to_skip = 0
        else:
            self._to_skip -= 1
        if self._is_trifling:
            self._gather.stop()
        else:
            self._gather.completed(now, n)
        self._next_has_gone = False
        if is_novel:
            self._learn()  # the next decision depends on it

    def _observe(self, now: float, n: int, size: int, busy_s: float, ok: bool) -> None:
        """Note what is to be learned from a batch that has just been completed."""
        before = None
        if not self._is_trifling:
            before = self._gather.close_round(now, n, self._waiting, max(0, self._busy - 1))
        # what one more batch costs, the way to the worker and back too
        self._observation = _Observation(size, busy_s + self.hop_s if ok else None, before, size / n)

    def _worth_skipping(self, size: int, busy_s: float) -> int:
        """Return how many batches not to learn from, after one that has taken `busy_s`.

        None are skipped if batches are not short. They are skipped by count, not by time: sampling
        by time would pick stalled batches too often.
        """
        usual_s = max(busy_s, self.cost.seconds(min(size, self.limit)))
        if usual_s >= _SHORT_S:
            return 0
        return int((_LEARN_FROM_TRIFLES_EVERY_S if self._is_trifling else _LEARN_EVERY_S) / usual_s)

    def _learn(self) -> None:
        """Learn from the batch that was observed last, if that has not been done.

        The best time for it is once the next batch has gone, since its worker may be idle until
        then.
        """
        observed, self._observation = self._observation, None
        if observed is None:
            return
        if observed.seconds is not None:
            self.cost.add(observed.size, observed.seconds)
            self._chooser.completed()
        if observed.before is not None:
            length_cost = self._length_cost
            composes = length_cost is not None and length_cost.longest_varies
            cost = length_cost.usual(self.limit) if length_cost is not None and composes else self.cost
            self._gather.learn(observed.before, observed.unit, cost)

    def served(
        self,
        now: float,
        n: int,
        longest: int,
        requests: Sequence[Request],
        busy_s: float,
        ok: bool,
        is_switch: bool = False,
    ) -> None:
        """Learn what a batch costs by its longest, and which lengths are answered in time."""
        composer = self._composing_with()
        composer.batch_gone()
        done = now + self.onward_s
        for request in requests:
            composer.answered(request, done <= request.due)
        cost = self._length_cost
        if not ok or cost is None:
            return
        if is_switch and cost.samples >= _COLD:
            cost.learn_switch(n, longest, busy_s + self.hop_s)
        else:
            cost.add(n, longest, busy_s + self.hop_s)

    def trained_at(self, n: int, longest: int, busy_s: float) -> None:
        """Learn from a batch of the warm-up by its longest."""
        self._composing_with()
        assert self._length_cost is not None
        self._length_cost.add(n, longest, busy_s)

    def trained(self, n: int, size: int, busy_s: float) -> None:
        """Learn from a batch of the warm-up."""
        if self.cost.limit != self.limit:
            self._learn_from_scratch()
        self.cost.add(size, busy_s, sure=True)

    # -- a request that no other shares the stage with

    def lets_go(self, slack_s: float) -> bool:
        cost = self.cost
        if cost.samples < _COLD or (not self._is_trifling and self._gather.window_s):
            return False
        if self._observation is not None and self._next_has_gone:
            return False  # it is learned from when something arrives, and may change all this
        margin = cost.margin
        return slack_s >= cost.longest_s * margin or slack_s >= cost.seconds(1) * margin

    def went_alone(self, began: float, now: float, busy_s: float, ok: bool) -> None:
        """Fast path of `arrived`, `decide`, `completed`; see tests/batch_function/test_alone.py."""
        self._arrivals.add(began, 1)
        if self._unit != 1.0:
            self._unit += 0.02 * (1.0 - self._unit)
        self._backlog.calm()
        self._backlog.drained()
        self._waiting, self._busy, self._next_has_gone = 0, 1, True
        self._rule = "free" if self.limit > 1 else "full"
        self.completed(now, 1, 1, busy_s, ok)

    # -- what to do

    def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:
        waiting = self._waiting = len(queue)
        if not free or not waiting:
            return NOTHING
        is_easy = self._is_trifling or (waiting == 1 and not busy and not self._gather.window_s)
        if is_easy and self._has_time(now, queue):
            n = min(queue.size, self.limit)
            decision = Decision(take=n, reason="free" if n < self.limit else "full")
        elif queue.by_length and (composed := self._composed(now, queue, free)) is not None:
            decision = composed
        elif self.cost.samples < _COLD:
            decision = self._cold(now, queue)
        else:
            self._chooser.refresh()
            decision = self._unhurried(now, queue, free, busy) or self._warm(now, queue, free, busy)
        self._busy = busy
        if decision.take:
            self._busy += 1
            self._note_gone(decision, queue)
        return decision

    def decide_ahead(self, now: float, queue: QueueView, free_in_s: float) -> Decision:
        """Take the best size for all that wait, if none is in a hurry and none is to be refused.

        What comes until the worker is free could not join the batch, so nothing is lost; in all
        other cases `decide` is to judge by what waits then.
        """
        cost, chooser, waiting = self.cost, self._chooser, queue.size
        if cost.samples < _COLD or self._backlog.overloaded_since is not None or self._composes(queue):
            return NOTHING
        chooser.refresh()
        most = self.limit if self._is_trifling else chooser.most(waiting)
        slack_s = queue.earliest_due - now - free_in_s - self.onward_s
        if (
            waiting < most
            or slack_s < (1 + waiting // most) * cost.longest_s * cost.margin  # else some may have to be refused
            or not (self._is_trifling or chooser.takes_all(waiting, most, chooser.capacity * cost.bias))
            or self._fair_share(now, waiting, most, self._busy) < most  # another worker may be free before this one
        ):
            return NOTHING
        if self._is_trifling:
            decision = Decision(take=most, reason="full")
        else:
            decision = self._go([], waiting, most, slack_s, "full")
        self._waiting = len(queue)
        self._note_gone(decision, queue)
        return decision

    def _note_gone(self, decision: Decision, queue: QueueView) -> None:
        """Note that a batch goes, and how many requests it leaves in the queue."""
        self._next_has_gone = True
        self._rule = decision.reason
        self._waiting -= round(decision.take / self._unit) if queue.weighted else decision.take

    def _has_time(self, now: float, queue: QueueView) -> bool:
        """Report whether all that waits can go without more ado, as no request is in a hurry.

        It is asked for a lone request on an idle server, and for trifles.
        """
        cost = self.cost
        if cost.samples < _COLD:
            return False
        self._backlog.calm()
        if queue.size <= cost.limit:
            self._backlog.drained()
        slack_s = queue.earliest_due - now - self.onward_s
        return slack_s >= cost.longest_s * cost.margin or (
            slack_s >= cost.seconds(min(queue.size, self.limit)) * cost.margin
        )

    def _cold(self, now: float, queue: QueueView) -> Decision:
        """Serve whatever waits and give up only what is late already: it is too early to judge."""
        late = [] if queue.earliest_due > now else [r for r in queue.peek(len(queue)) if r.due <= now]
        waiting = queue.size - sum([request.size for request in late])
        if not waiting:
            return Decision(drop=late)
        return Decision(drop=late, take=min(waiting, self.limit), reason="cold")

    def _warm(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:
        """Decide by what was learned: rules 2 to 7 of the list above, one after the other."""
        cost, chooser = self.cost, self._chooser
        left = Candidates(queue)
        at = now + self.onward_s  # an answer takes this much longer than its batch
        self._drop_hopeless(left, at, chooser.most(left.size))
        if not left.size:
            return self._hopeless(left, at - now + cost.seconds(1))
        load = self._load(now, free + busy)
        most = chooser.most(left.size)
        if load.long < _CALM * load.capacity or (not busy and 2 * left.size < most):
            self._backlog.calm()
        if left.size <= most:
            self._backlog.drained()
        else:
            self._trim(now, left, load, most)
            if not left.size:
                return Decision(drop=left.dropped)  # each one left would be larger than all that is worth keeping
        share = self._fair_share(now, left.size, most, load.workers)
        slack_s = left.due - at
        if slack_s < cost.seconds(min(left.size, share)) * cost.margin:
            return self._tight(at, left, share, load)
        # with two workers idle, clients that come back find one, so there is no need to wait for
        # them
        until = None if free > 1 else self._worth_waiting_until(now, queue, left.size, most, slack_s)
        if until is not None:
            return Decision(drop=left.dropped, wake_at=until)
        return self._sized(at, left, most, share, load)

    def _unhurried(self, now: float, queue: QueueView, free: int, busy: int) -> Decision | None:
        """Fast path of `_warm`: the same outcome, see tests/policy/test_adaptive.py.

        It answers where all have time, nothing is refused, and the batch takes all that it may.
        None in all other cases, which take more thought.
        """
        cost, chooser = self.cost, self._chooser
        waiting, due = queue.size, queue.earliest_due
        most = chooser.most(waiting)
        slack_s = due - now - self.onward_s
        if (
            queue.lanes > 1
            or slack_s < cost.longest_s * cost.margin
            or (waiting > most and due < inf)
            or self._backlog.overloaded_since is not None
        ):
            return None
        if waiting <= most:
            self._backlog.drained()
        n = min(waiting, self._fair_share(now, waiting, most, free + busy))
        if not chooser.takes_all(waiting, n, chooser.capacity * cost.bias):
            return None
        until = None if free > 1 else self._worth_waiting_until(now, queue, waiting, most, slack_s)
        if until is not None:
            return Decision([], wake_at=until)
        return self._go([], waiting, n, slack_s, "full" if n == most else "free" if n == waiting else "size")

    def _load(self, now: float, workers: int) -> _Load:
        """Return the load of the stage, by the latest arrivals and the learned cost."""
        arrivals, unit = self._arrivals, self._unit
        capacity = workers * self._chooser.capacity * self.cost.bias
        return _Load(arrivals.short_rate(now) * unit, arrivals.long_rate(now) * unit, capacity, workers)

    def _drop_hopeless(self, left: Candidates, at: float, most: int) -> None:
        """Refuse what could not be answered in time even by a batch of its own."""
        cost = self.cost
        left.drop_due_before(at + cost.seconds(1))
        if left.weighted and left.due - at < cost.seconds(min(left.size, most)) * cost.margin:
            left.drop([request for request in left.requests if request.due - at < cost.seconds(request.size)])

    def _hopeless(self, left: Candidates, least_s: float) -> Decision:
        """Refuse all, as none of them can be in time.

        If not even a new request could be, one goes all the same: the cost may have been
        mislearned.
        """
        last = max(left.dropped, key=lambda request: request.due)
        if last.due - last.arrived >= least_s:
            return Decision(drop=left.dropped)
        left.dropped.remove(last)
        return Decision(drop=left.dropped, take=1, reason="probe")

    def _trim(self, now: float, left: Candidates, load: _Load, most: int) -> None:
        """Refuse what is not worth keeping of a backlog that grows in an overload, or stands."""
        cost, slo_s = self.cost, left.slo_s
        if slo_s == inf:
            return
        pace = Pace(min(load.short, load.long), load.capacity, load.workers, most, cost.seconds(most), cost.cv)
        urgent = left.due_by(now + 1.001 * slo_s)  # what is due later does not keep these waiting
        if pace.arriving > pace.capacity:
            left.drop_first(urgent - self._backlog.keep(now, urgent, pace, slo_s, self.onward_s, self.overload))
            urgent = left.due_by(now + 1.001 * slo_s)
        spare = self._backlog.look(now, urgent, pace._replace(arriving=load.long), slo_s)
        edge_s = self.onward_s + pace.surely_s
        if spare and edge_s < slo_s:  # else all are at the edge when they come
            left.drop_first(spare, due_by=now + edge_s)

    def _tight(self, at: float, left: Candidates, most: int, load: _Load) -> Decision:
        """Serve the head, which cannot go with all others, in a smaller batch, or give it up."""
        plan = DuePlan(left.requests, left.size, self.cost, most, load.workers)
        alone, in_time_with, end_with = plan.serve_head(at, left.due - at)
        start = plan.first_in_time(0, at)
        if start < len(left.requests):
            in_time_without, end_without = plan.drain(start, at)
            price = self._price_of_time(load)
            if in_time_without - price * end_without > in_time_with - price * end_with:
                left.drop(plan.late_before(start, at))
                return self._go(left.dropped, left.size, min(left.size, most), left.due - at, "shed")
        return Decision(drop=left.dropped, take=alone, reason="tight")

    def _price_of_time(self, load: _Load) -> float:
        """Return what a second of the workers' time is worth, in requests."""
        dearness = (load.share - _TIME_IS_FREE) / (_TIME_IS_DEAR - _TIME_IS_FREE)
        return load.capacity * min(1.0, max(0.0, dearness)) / self._unit

    def _worth_waiting_until(
        self, now: float, queue: QueueView, waiting: int, most: int, slack_s: float
    ) -> float | None:
        """Return when to stop waiting for clients that come back; None to go now."""
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

    def _fair_share(self, now: float, waiting: int, most: int, workers: int) -> int:
        """Return the most that one of several workers takes; `most` for one worker alone.

        Clients that come back together would be split, and in an overload full batches serve most.
        """
        if workers <= 1 or self._gather.window_s or self._backlog.overloaded_since is not None:
            return most
        return min(most, self._chooser.share(waiting, self._arrivals.steady_rate(now) * self._unit, workers))

    def _sized(self, at: float, left: Candidates, most: int, share: int, load: _Load) -> Decision:
        """Take the size that makes the sum of delays least, or all of the worker's share where the
        rest would be late.
        """
        cost = self.cost
        everything = min(left.size, share)
        n = self._chooser.choose(left.size, share, load.share, load.capacity / load.workers)
        if n < everything:
            slack_behind_s = left.due_behind(n) - at - cost.seconds(n)
            if slack_behind_s < cost.margin * cost.seconds(min(left.size - n, share)):
                n = everything
        reason = "full" if n == most else "free" if n == left.size else "size"
        return self._go(left.dropped, left.size, n, left.due - at, reason)

    def _go(self, dropped: list[Request], waiting: int, n: int, slack_s: float, reason: str) -> Decision:
        """Take `n`, or now and then a size that deserves a try instead."""
        probe = self._chooser.probe(n, waiting, slack_s)
        return Decision(drop=dropped, take=probe, reason=reason if probe == n else "probe")

    # -- batches composed by length

    def _composing_with(self) -> Composer:
        """Return what composes batches, which is made when the first lengths are heard of."""
        if self._composer is None:
            self._length_cost = LengthCost(self.allowed_batch_sizes, self.allowed_lengths)
            self._composer = Composer(self._length_cost)
        return self._composer

    def _composes(self, queue: QueueView) -> bool:
        """Report whether batches are to be composed of what waits."""
        cost, composer = self._length_cost, self._composer
        if cost is None or composer is None or not queue.by_length or cost.samples < _COLD:
            return False
        if queue.lanes > 1 and len(queue.levels) > 1:
            return True  # which of them, is a question even where all are of one length
        if not queue.lengths_vary:
            return False
        if len(queue) <= self.limit or self.max_padded_size < inf:
            return True
        return not composer.keeps_plain_order(queue, self.limit)

    def _composed(self, now: float, queue: QueueView, free: int) -> Decision | None:
        """Return the batch of like lengths that is to go; None where what comes first is."""
        levels = queue.levels
        if not levels or not self._composes(queue):
            return None
        composer, cost = self._composer, self._length_cost
        assert composer is not None and cost is not None
        hopeless = self._hopeless_alone(now, levels)
        if hopeless:
            gone = set(hopeless)
            left = [each for each in levels if not gone.issuperset(in_line(each))]
            if not left:
                return self._all_hopeless(now, hopeless)
            levels = left
        onward_s = self.onward_s
        choice = composer.choose(
            now,
            levels,
            self.limit,
            self.max_padded_size,
            onward_s=onward_s,
            without=hopeless,
            extra_s=[0.0 if each.key in self.warm_keys else cost.switch_s for each in levels] if cost.switch_s else (),
        )
        n = len(choice.requests)
        if choice.batches == 1 and free <= 1:
            slack_s = min([each.earliest_due for each in levels]) - now - onward_s
            until = self._worth_waiting_until(now, queue, n, self.limit, slack_s)
            if until is not None:
                return Decision(drop=hopeless, wake_at=until)
        if self.allowed_batch_sizes is not None:
            choice = composer.without_padding(choice, self.allowed_batch_sizes)
            n = len(choice.requests)
        reason = "full" if n == self.limit else "free" if n == len(queue) - len(hopeless) else "length"
        return Decision(drop=hopeless, take=n, reason=reason, chosen=choice.requests)

    def _hopeless_alone(self, now: float, levels: Sequence[LevelsView]) -> list[Request]:
        """Return the requests that could not be answered in time even alone."""
        cost = self._length_cost
        assert cost is not None
        at = now + self.onward_s
        if min([each.earliest_due for each in levels]) - at >= cost.seconds(1, cost.longest):
            return []
        known = _KNOWN_LENGTH * cost.longest  # what is longer is served, to find out what it costs
        late = [r for each in levels for r in in_line(each) if r.due - at < cost.seconds(1, r.length)]
        return [r for r in late if r.length <= known or r.due <= now]

    def _all_hopeless(self, now: float, hopeless: list[Request]) -> Decision:
        """Refuse all, as none of them can be in time, but one if not even a new one could be."""
        cost = self._length_cost
        assert cost is not None
        last = max(hopeless, key=lambda request: request.due)
        if last.due - last.arrived >= cost.seconds(1, last.length) + self.onward_s:
            return Decision(drop=hopeless)
        hopeless.remove(last)
        return Decision(drop=hopeless, take=1, reason="probe", chosen=[last])

    # -- why

    def explain(self, now: float) -> dict[str, Any]:
        """Return what was learned and by which rule the last batch went; all times in seconds."""
        cost, chooser = self.cost, self._chooser
        chooser.refresh()
        sizes = sorted({1, chooser.working, chooser.best, self.limit})
        return {
            "policy": "adaptive",
            "rule": self._rule,
            "samples": cost.samples,
            "cost_s": {n: cost.seconds(n) for n in sizes} if cost.samples else {},
            "noise_cv": cost.cv,
            "margin": cost.margin,
            "hop_s": self.hop_s,
            "arrival_rate": self._arrivals.long_rate(now),
            "capacity_per_worker": chooser.capacity * cost.bias if cost.samples else 0.0,
            "expected_batch_size": chooser.working,
            "gather_s": self._gather.window_s,
            "overloaded": self._backlog.overloaded_since is not None,
            **self._explain_lengths(),
        }

    def _explain_lengths(self) -> dict[str, Any]:
        """Return what was learned of lengths and keys; nothing where there are none."""
        cost, composer = self._length_cost, self._composer
        if cost is None or composer is None:
            return {}
        lengths = sorted({1, round(cost.usual_length), cost.longest})
        return {
            "cost_by_length_s": {
                f"{n} x {length}": cost.seconds(n, length) for n in (1, self.limit) for length in lengths
            },
            "composing_saves": composer.saving,
            "switch_s": cost.switch_s,
        }
