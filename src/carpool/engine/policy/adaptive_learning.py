"""The learning of the default policy, of arrivals and batches, and its explanations.

A choice can keep its own reason from being measured again: who believes that large batches are slow
makes none. So each figure has an age, and is measured whatever is chosen, within so many of the
batches that are learned from:

* level and noise of the cost: by each batch, of any size; within some 10;
* the time of a size that is run: by its next batch, which counts for a twentieth or more;
* the time of a size that is not run: it counts half after as many batches as it has held for, 16 to
  128, and each time that another size is found to have changed. Below half a batch it is unknown,
  and is tried if its gain may outweigh its cost (`policy/size.py`): after 16 to 640, and half a
  life more each time that the cost is twice as high, within 32 more for each other size that
  promises as much. One worker waits for clients that are about to return if the size needs them;
* the way, and how it grows: by each batch that does not go ahead. If all do, it fades, until one
  does not. Where all are of one size, one of half the size goes; within 350;
* the part of the way that nothing hides: by the next batch that goes ahead, in an overload, too;
* windows for clients, and whether all are inside: by each batch, within 20 for each worker;
* rates and sizes of requests: by each arrival, within 50 to 1,024 of these.

What the first batch of a size on a worker took counts only if it was not slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Final, Literal

from carpool.engine.policy.base import Decision, DoneBatch, Policy, QueueView, View
from carpool.engine.policy.clients import Arrivals, Gather, Inside
from carpool.engine.policy.cost import MOST_KNOTS, SURE, CostModel
from carpool.engine.policy.length_cost import LengthCost
from carpool.engine.policy.size import Sizes
from carpool.engine.request import Request

_TRIFLE_S: Final = 200e-6
"""Shorter batches just go: to think about them costs more than it brings. With half of it, more
models pay for decisions; with twice as much, the knees of more models are passed over."""
_LEARN_EVERY_S: Final = 20e-3
"""In which time about one batch is learned from, where they are shorter than a quarter of it, as
learning costs a share of their time. With half of it, that share is twice as large; with twice as
much, a change is noticed as much later."""


class AdaptiveLearning(Policy):
    """What `Adaptive` knows when it decides: arrivals, costs, rounds of clients, the backlog.

    Attributes:
        prefer: As given to `Adaptive`.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        max_queue_delay_s: float | None = None,
        prefer: Literal["latency", "efficiency"] = "latency",
    ) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        if prefer not in ("latency", "efficiency"):
            raise ValueError(f'prefer must be "latency" or "efficiency", not {prefer!r}')
        self.prefer = prefer
        self.is_patient = prefer == "efficiency"
        self.arrivals = Arrivals()
        self.gather = Gather(self.arrivals)
        self._overloaded_since: float | None = None
        self.inside = Inside()
        self._unit = 1.0  # smoothed size of a request
        self._busy = 0  # workers, after the last decision
        self._rule = "cold"
        self._view: View | None = None  # of the stage, once it has asked
        self._was_trifle = False  # whether the last batch was very short
        self._n_to_skip = 0  # how many of the next batches to skip when learning
        self._learn_from_scratch()

    def _learn_from_scratch(self) -> None:
        self.cost = CostModel(self.limit)
        self._sizes = Sizes(self.cost)

    # -- what happened

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        n = len(requests)
        self.arrivals.add(now, n)
        if self._unit != 1.0 or self._view is None or self._view.queue.weighted:  # else each has size 1
            size = sum([request.size for request in requests])
            self._unit += min(0.02 * n, 0.5) * (size / n - self._unit)

    def learn(self, now: float, done: DoneBatch) -> None:
        if self.cost.limit != self.limit:
            self._learn_from_scratch()
        if done.is_warm_up:
            if not done.longest:
                self.cost.add(done.size, done.busy_s, sure=True)
            return
        if done.is_alone:
            self._note_lone(done.started)
        cost, busy_s, was_trifle = self.cost, done.busy_s, self._was_trifle
        if was_trifle and self._n_to_skip and busy_s < _TRIFLE_S:
            self._n_to_skip -= 1
            return
        is_known = cost.samples > MOST_KNOTS  # before, none is skipped
        self._was_trifle = is_known and busy_s < _TRIFLE_S and self._sizes.part == inf
        is_first = done.is_first  # of all batches but trifles, or a later one would seem to be
        if not self._n_to_skip or not is_known or not cost.is_known(done.size):
            self._learn_batch(now, done, is_first)
            self._n_to_skip = self._worth_skipping(done.size, busy_s) if is_known else 0
        elif was_trifle and not self._was_trifle:
            self._n_to_skip = 0
        else:
            self._n_to_skip -= 1
        if self._was_trifle:
            self.gather.stop()
        else:
            self.gather.completed(now, done.n)
            self.inside.note(self._inside(done), max(1, self._busy))

    def _inside(self, done: DoneBatch) -> int:
        """Return how many requests the stage has, those of a batch that has just ended included."""
        return done.n if self._view is None else self._view.running + len(self._view.queue)

    def _note_lone(self, began: float) -> None:
        """Note what `arrived` and `decide` would, of a request that went without a question.

        A part of the fast paths `lone_call` and `lent_worker`.
        """
        self.arrivals.add(began, 1)
        if self._unit != 1.0:
            self._unit += 0.02 * (1.0 - self._unit)
        self._overloaded_since = None
        self._busy = 1
        self._rule = "free" if self.limit > 1 else "full"

    def _learn_batch(self, now: float, done: DoneBatch, is_first: bool) -> None:
        """Learn what batches cost, and what has come since the batch before."""
        cost, sizes, size, workers = self.cost, self._sizes, done.size, max(1, self._busy)
        if done.ok:
            sizes.ran(size, done.busy_s)
            cost.add(size, done.busy_s, is_first=is_first)
            cost.learn_way(size, done.hop_s, done.ahead)
            sizes.runs_ahead = self._view is not None and self._view.runs_ahead
            if sizes.runs_ahead:
                sizes.refresh()
                sizes.learn_part(self.inside.clients * self._unit, self._unit, workers)
        if not self._was_trifle:
            usual = self._usual_cost()
            most = sizes.most if usual is cost else self.limit
            self.gather.learn(now, self._inside(done), workers, size / done.n, usual, most)

    def _worth_skipping(self, size: int, busy_s: float) -> int:
        """Return how many batches not to learn from, after one that has taken `busy_s`.

        None are skipped if batches are not short. They are skipped by count, not by time: sampling
        by time would pick stalled batches too often.
        """
        usual_s = max(busy_s, self.cost.seconds(min(size, self.limit)))
        return int(_LEARN_EVERY_S / usual_s) if usual_s < 0.25 * _LEARN_EVERY_S else 0

    @property
    def _hop_s(self) -> float:
        return 0.0 if self._view is None else self._view.hop_s

    @property
    def _onward_s(self) -> float:
        """Seconds that a request still needs behind this stage, see `View`."""
        return 0.0 if self._view is None else self._view.onward_s

    def _usual_cost(self) -> CostModel | LengthCost:
        return self.cost

    # -- what it has come to

    def _back_until(self, view: View, waiting: int, most: int, slack_s: float) -> float | None:
        """Return when to stop waiting for clients that come back; None to go now."""
        gather = self.gather
        if not gather.window_s or waiting >= most or not gather.expected:
            return None
        more = min(waiting + int(gather.served * self._unit), most)
        return self._wait_until(view, gather.until, slack_s, self.cost.seconds(more))

    def _back_for_try(self, view: View, waiting: int, slack_s: float) -> float | None:
        """Return until when to wait for clients as a batch with them may be better than it seems.

        None of its size would be run, and show what it takes, if the clients stay two groups.
        """
        cost, gather = self.cost, self.gather
        usual_s = cost.seconds(min(waiting, self.limit)) / waiting

        def saved_s(more: float) -> float:
            n = min(waiting + int(more * self._unit), self.limit)
            return 0.0 if cost.is_known(n) else usual_s * n - cost.hoped_s(n)

        most = min(waiting + int(gather.expected * self._unit), self.limit)
        return self._wait_until(view, gather.best_until(view.now, saved_s), slack_s, usual_s * most)

    def _wait_until(self, view: View, until: float | None, slack_s: float, seconds: float) -> float | None:
        """Return until when to wait for a batch that takes so long; None to go now."""
        if until is None:
            return None
        until = self._at_latest(view.queue, until)
        return until if view.now < until and slack_s > until - view.now + seconds * self.cost.margin else None

    def _hopeless(self, late: list[Request], least_s: float) -> Decision:
        """Refuse all that may go next, as none of them can be in time.

        If not even a new request could be, which needs `least_s`, one goes all the same: the cost
        may have been mislearned.
        """
        last = max(late, key=lambda request: request.due)
        if last.due - last.arrived >= least_s:
            return Decision(drop=late)
        late.remove(last)
        return Decision(drop=late, take=1, reason="probe")

    def _at_latest(self, queue: QueueView, until: float) -> float:
        """Return until when to wait, if it is no longer than the user allows."""
        if self.max_queue_delay_s is None:
            return until
        return min(until, queue.oldest_arrival + self.max_queue_delay_s)

    def _defers(self, queue: QueueView) -> bool:
        """Report whether requests are to wait as long as they have time: those with an SLO.

        The first one counts. What is due by its own deadline does not wait.
        """
        (head,) = queue.peek(1)
        return head.due < head.deadline

    def _held_until(self, view: View, due: float, more_s: float, cv: float) -> float | None:
        """Return until when a batch waits for one more request; None to go now.

        No longer than that those who come just behind it can be in time, too: of m workers one is
        free in the m-th part of a batch's time. And not where none can come, as all clients are
        inside.

        Args:
            view: As for `decide`.
            due: When its first request is due.
            more_s: The seconds of a batch with one more.
            cv: By how much they vary.
        """
        queue = view.queue
        if self.inside.are_all(view.running + len(queue)):
            return None
        until = self._at_latest(queue, due - view.onward_s - more_s * (1.0 + SURE * cv))
        others_have_time = more_s * (1.0 + 1.0 / (view.free + view.busy)) <= due - queue.oldest_arrival
        return until if view.now < until and others_have_time else None

    def cost_s(self, size: int) -> float | None:
        return self.cost.seconds(size) if self.cost.samples else None

    def explain(self, now: float) -> dict[str, Any]:
        """Return what was learned and by which rule the last batch went; all times in seconds."""
        cost, sizes = self.cost, self._sizes
        sizes.refresh()
        shown = sorted({1, sizes.most, self.limit})
        return {
            "policy": "efficient" if self.is_patient else "adaptive",
            "rule": self._rule,
            "samples": cost.samples,
            "cost_s": {n: cost.seconds(n) for n in shown} if cost.samples else {},
            "noise_cv": cost.cv,
            "margin": cost.margin,
            "arrival_rate": self.arrivals.rate(now),
            "capacity_per_worker": sizes.rate if cost.samples else 0.0,
            "expected_batch_size": sizes.most,
            "gather_s": self.gather.window_s,
            "overloaded": self._overloaded_since is not None,
        }
