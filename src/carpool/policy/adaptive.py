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

The way of large items grows with their batch (`policy/hop_cost.py`); then batches are only so large
that one may travel while another runs.

What is learned, and how, stands in `policy/adaptive_learning.py`; batches by length stand in
`policy/adaptive_lengths.py`.

Rules 2 to 4 need due times, by an SLO or by deadlines; without them, only the others apply. Theory,
figures and when it loses: docs/policies.md.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from carpool.policy.adaptive_learning import COLD
from carpool.policy.adaptive_lengths import AdaptiveLengths
from carpool.policy.backlog import Pace
from carpool.policy.base import NOTHING, Decision, QueueView, View
from carpool.policy.candidates import Candidates
from carpool.policy.due_plan import DuePlan
from carpool.request import Request

_TIME_IS_FREE, _TIME_IS_DEAR = 0.5, 1.0  # loads at which a worker's time has no price, and its full price
_CALM = 0.95  # of the capacity: with a load below it an overload is over
_NEARLY_FULL = 0.95  # of the largest batch: groups of clients that large are not cut, as a few would be left over


class _Load(NamedTuple):
    """How much comes, beside how much can be served; in units of the requests' sizes per second.

    Attributes:
        short: How much has come lately, by the short window.
        long: How much has come lately, by the long window.
        capacity: How much all workers can serve.
        workers: How many there are.
    """

    short: float
    long: float
    capacity: float
    workers: int

    @property
    def share(self) -> float:
        """The load as a share of the capacity."""
        return max(self.short, self.long) / self.capacity


class Adaptive(AdaptiveLengths):
    """Batch size and waiting time found by the program, with and without an SLO.

    Args:
        max_batch_size: As for every policy; the only one that is needed.
        max_queue_delay_s: As for every policy; it bounds how long clients are waited for.
    """

    @property
    def lone_slack_s(self) -> float:
        cost = self.cost
        if cost.samples < COLD or (not self._is_trifling and self._gather.window_s):
            return inf
        if self._observation is not None and self._next_has_gone:
            return inf  # it is learned from when something arrives, and may change all this
        return cost.shortest_s * cost.margin

    # -- what to do

    def decide(self, view: View) -> Decision:
        self._view = view
        if view.free_in_s is not None:
            return self._ahead(view, view.free_in_s)
        now, queue, free, busy = view.now, view.queue, view.free, view.busy
        waiting = self._waiting = len(queue)
        if not free or not waiting:
            return NOTHING
        is_easy = self._is_trifling or (waiting == 1 and not busy and not self._gather.window_s)
        if is_easy and self._has_time(view):
            n = min(queue.size, self.limit)
            decision = Decision(take=n, reason="free" if n < self.limit else "full")
        elif queue.by_length and (composed := self._composed(view)) is not None:
            decision = composed
        elif self.cost.samples < COLD:
            decision = self._cold(now, queue)
        else:
            self._chooser.refresh()
            decision = self._warm(view)
        self._busy = busy
        if decision.take:
            self._busy += 1
            self._note_gone(decision, queue)
        return decision

    def _ahead(self, view: View, free_in_s: float) -> Decision:
        """Return what goes to a busy worker.

        That is the best size for all that wait, if none is in a hurry and none is to be refused.

        What comes until the worker is free could not join the batch, or would save less than the
        worker loses while it is idle, so nothing is lost; in all other cases `decide` is to judge
        by what waits then.
        """
        now, queue = view.now, view.queue
        cost, chooser, waiting = self.cost, self._chooser, queue.size
        if cost.samples < COLD or self._backlog.overloaded_since is not None or self._composes(view):
            return NOTHING
        chooser.refresh()
        most = self.limit if self._is_trifling else chooser.most(waiting)
        n = min(waiting, most)
        slack_s = queue.earliest_due - now - free_in_s - view.onward_s
        if (
            (n < most and not self._is_as_good(view, n, most))
            or slack_s < self._drain_s(waiting, most) * cost.margin  # else some may have to be refused
            or not (self._is_trifling or self._is_best(now, waiting, n))
            or self._fair_share(now, waiting, most, self._busy) < n  # another worker may be free before this one
        ):
            return NOTHING
        if self._is_trifling:
            decision = Decision(take=most, reason="full")
        else:
            decision = self._go([], waiting, n, slack_s, "full" if n == most else "free")
        self._waiting = len(queue)
        self._note_gone(decision, queue)
        return decision

    def _drain_s(self, waiting: int, most: int) -> float:
        """Return how long all that waits takes in batches of `most`, of which one is not full."""
        seconds = self.cost.seconds(most)
        return seconds + waiting // most * (seconds - self._chooser.overlapping_s(most))

    def _is_as_good(self, view: View, n: int, most: int) -> bool:
        """Report whether a batch of `n` ahead serves as many a second as one of `most` that is not.

        The worker is idle before the latter. No other request may come before; and there are at
        most twice as many batches, as each of them is work for the service, too.
        """
        if self._is_trifling or 2 * n < most or not self._inside.are_all(view.running + len(view.queue)):
            return False
        cost, hop_s = self.cost, view.hop_s  # which is in the cost, unless that is of a warm-up
        in_worker_s = max(0.0, cost.seconds(n) - hop_s), max(0.0, cost.seconds(most) - hop_s)
        return in_worker_s[0] * most <= (in_worker_s[1] + view.gap_s) * n

    def _is_best(self, now: float, waiting: int, n: int) -> bool:
        """Report whether the best batch for all that wait, of up to `n`, is one of `n`."""
        chooser = self._chooser
        load = self._load(now, max(1, self._busy))
        return chooser.choose(waiting, n, load.share, load.capacity / load.workers) == n

    def _note_gone(self, decision: Decision, queue: QueueView) -> None:
        """Note that a batch goes, and how many requests it leaves in the queue."""
        self._next_has_gone = True
        self._rule = decision.reason
        self._waiting -= round(decision.take / self._unit) if queue.weighted else decision.take

    def _has_time(self, view: View) -> bool:
        """Report whether all that waits can go without more ado, as no request is in a hurry.

        It is asked for a lone request on an idle server, and for trifles.
        """
        cost, queue = self.cost, view.queue
        if cost.samples < COLD:
            return False
        self._backlog.calm()
        if queue.size <= cost.limit:
            self._backlog.drained()
        slack_s = queue.earliest_due - view.now - view.onward_s
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

    def _warm(self, view: View) -> Decision:
        """Decide by what was learned: rules 2 to 7 of the list above, one after the other."""
        now, queue, free, busy = view.now, view.queue, view.free, view.busy
        cost, chooser = self.cost, self._chooser
        left = Candidates(queue)
        at = now + view.onward_s  # an answer takes this much longer than its batch
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
        until = None if free > 1 else self._worth_waiting_until(now, queue, left.size, share, slack_s)
        if until is not None:
            return Decision(drop=left.dropped, wake_at=until)
        return self._sized(at, left, most, share, load)

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
            left.drop_first(urgent - self._backlog.keep(now, urgent, pace, slo_s, self._onward_s, self.overload))
            urgent = left.due_by(now + 1.001 * slo_s)
        spare = self._backlog.look(now, urgent, pace._replace(arriving=load.long), slo_s)
        edge_s = self._onward_s + pace.surely_s
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

    def _fair_share(self, now: float, waiting: int, most: int, workers: int) -> int:
        """Return the most that one of several workers takes; `most` for one worker alone.

        Clients that come back together, and are waited for, are as many groups as there are
        workers; if more wait than there are of them, others have come. In an overload full batches
        serve most.
        """
        if workers <= 1 or self._backlog.overloaded_since is not None:
            return most
        if self._gather.window_s:
            clients = round(self._gather.clients * self._unit)
            if waiting <= clients:
                group = -(-clients // workers)
                return most if group > _NEARLY_FULL * most else max(1, group)
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
