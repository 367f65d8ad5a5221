"""How the default policy decides where requests have lengths and these vary, or have keys."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from carpool.engine.policy.adaptive_learning import AdaptiveLearning
from carpool.engine.policy.base import Decision, DoneBatch, LevelsView, QueueView, View
from carpool.engine.policy.compose import ChosenGroup, Composer, in_line
from carpool.engine.policy.cost import LEARNED
from carpool.engine.policy.length_cost import LengthCost
from carpool.engine.policy.size import share_of
from carpool.engine.request import Request

_KNOWN_LENGTH = 1.1
"""Times the longest that was measured: what is longer is served, since its cost is a guess. With
half of that tenth, those of the same level as the longest are served, too; with twice as much, some
are refused on a guess."""


class ByLength:
    """Learns and decides for a policy whose requests have lengths or keys.

    Args:
        policy: All else that was learned, and the rules that need no lengths.

    Attributes:
        cost: Of batches, by their count and longest length.
    """

    def __init__(self, policy: AdaptiveLearning) -> None:
        self._policy = policy
        self.cost = LengthCost(policy.allowed_batch_sizes, policy.allowed_lengths)
        self._composer = Composer(self.cost)

    # -- what happened

    def left(self, now: float, request: Request) -> None:
        """Count a request among those not answered in time, if that is why it leaves."""
        if request.due < now + self._policy._onward_s + self.cost.seconds(1, request.length):
            self._composer.answered(request, False)

    def learn(self, now: float, done: DoneBatch) -> None:
        """Learn what a batch costs by its longest, and which lengths are answered in time."""
        cost, composer, policy = self.cost, self._composer, self._policy
        if done.is_warm_up:
            cost.add(done.n, done.longest, done.busy_s)
            return
        composer.batch_gone()
        at = now + policy._onward_s
        for request in done.requests:
            composer.answered(request, at <= request.due)
        if not done.ok:
            return
        seconds = done.busy_s + policy._hop_s
        if done.is_switch and cost.samples >= LEARNED:
            if not done.is_first:
                cost.learn_switch(done.n, done.longest, seconds)
        else:
            cost.add(done.n, done.longest, seconds, done.is_first)

    # -- what to do

    def composes(self, view: View) -> bool:
        """Report whether batches are to be composed of what waits."""
        queue = view.queue
        if not queue.by_length or self.cost.samples < LEARNED:
            return False
        if queue.lanes > 1 and len(queue.levels) > 1:
            return True  # which of them, is a question even where all are of one length
        if not queue.lengths_vary:
            return False
        if len(queue) <= self._policy.limit or self._policy.most_padded(view) < inf:
            return True
        return not self._composer.keeps_plain_order(queue, self._policy.limit)

    def decide(self, view: View) -> Decision | None:
        """Return the batch of like lengths that is to go; None where what comes first is."""
        now, queue, workers = view.now, view.queue, view.free + view.busy
        levels = queue.levels
        if not levels or not self.composes(view):
            return None
        hopeless = self._hopeless_alone(now + view.onward_s, now, levels)
        if hopeless:
            gone = set(hopeless)
            left = [each for each in levels if not gone.issuperset(in_line(each))]
            if not left:
                return self._all_hopeless(view.onward_s, hopeless)
            levels = left
        limit = self._policy.limit if workers <= 1 else self._share(now, len(queue), levels, workers)
        return self._of(view, levels, hopeless, limit)

    def _of(self, view: View, levels: Sequence[LevelsView], hopeless: list[Request], limit: int) -> Decision:
        now, queue, policy, composer, cost = view.now, view.queue, self._policy, self._composer, self.cost
        choice = composer.choose(
            now,
            levels,
            limit,
            policy.most_padded(view),
            onward_s=view.onward_s,
            without=hopeless,
            extra_s=[0.0 if each.key in view.warm_keys else cost.switch_s for each in levels] if cost.switch_s else (),
        )
        if queue.weighted:
            choice = composer.within(choice, policy.limit)
        until = None
        if view.free <= 1 and policy.gather.served:
            until = self._company_until(view, levels, choice)
        if until is None and policy.is_patient and choice.batches == 1 and policy._defers(queue):
            until = self._like_until(view, levels, choice)
        if until is not None:
            return Decision(drop=hopeless, wake_at=until)
        if policy.allowed_batch_sizes is not None:
            choice = composer.without_padding(choice, policy.allowed_batch_sizes)
        n, units = len(choice.requests), self._units(queue, choice.requests)
        reason = "full" if units == policy.limit else "free" if n == len(queue) - len(hopeless) else "length"
        return Decision(drop=hopeless, take=units, reason=reason, chosen=choice.requests)

    def _like_until(self, view: View, levels: Sequence[LevelsView], choice: ChosenGroup) -> float | None:
        """Return until when to wait for more requests than one batch; None to go now."""
        cost, n = self.cost, len(choice.requests)
        if not n or self._units(view.queue, choice.requests) >= self._policy.limit:
            return None
        more_s = cost.seconds(n + 1, max([request.length for request in choice.requests])) + view.hop_s
        return self._policy._held_until(view, min([each.earliest_due for each in levels]), more_s, cost.cv)

    def _units(self, queue: QueueView, requests: Sequence[Request]) -> int:
        """Return how much of a batch these requests take up: all of it if one of them is larger."""
        if not queue.weighted:
            return len(requests)
        return min(self._policy.limit, sum([request.size for request in requests]))

    def _share(self, now: float, waiting: int, levels: Sequence[LevelsView], workers: int) -> int:
        """Return the most that one of several workers takes, as others are or soon will be free.

        It is the share without lengths (`Sizes.share`), for requests of the mean length.
        """
        cost, policy = self.cost, self._policy
        limit = policy.limit
        if policy.gather.window_s or waiting > workers * limit:
            return limit
        rising = [each for level in levels for each in level.rising()]
        item_s = sum([cost.item_s(length) * count for length, _, count in rising]) / sum([n for _, _, n in rising])
        rate = policy.arrivals.steady_rate(now)
        return min(limit, share_of(waiting, rate, workers, cost.setup_s, item_s, limit))

    def _company_until(self, view: View, levels: Sequence[LevelsView], choice: ChosenGroup) -> float | None:
        """Return until when to wait for clients that come back; None to go now.

        Those of a batch that is not full make it larger (`Gather`). And the more wait, the less
        padding is in the batches that are made of them.
        """
        now, queue, policy, gather = view.now, view.queue, self._policy, self._policy.gather
        slack_s = min([each.earliest_due for each in levels]) - now - view.onward_s
        if choice.batches == 1:
            until = policy._back_until(view, self._units(queue, choice.requests), policy.limit, slack_s)
            if until is not None:
                return until
        if len(levels) > 1 or not gather.expected:
            return None  # of which key the next ones are is not known
        until = gather.best_until(now, self._composer.saved_by_more_s(choice, len(queue)))
        return policy._wait_until(view, until, slack_s, choice.seconds)

    def _hopeless_alone(self, at: float, now: float, levels: Sequence[LevelsView]) -> list[Request]:
        """Return the requests that could not be answered in time even alone."""
        cost = self.cost
        if min([each.earliest_due for each in levels]) - at >= cost.seconds(1, cost.longest):
            return []
        known = _KNOWN_LENGTH * cost.longest  # what is longer is served, to find out what it costs
        late = [r for each in levels for r in in_line(each) if r.due - at < cost.seconds(1, r.length)]
        return [r for r in late if r.length <= known or r.due <= now]

    def _all_hopeless(self, onward_s: float, hopeless: list[Request]) -> Decision:
        """Refuse all, as none of them can be in time, but one if not even a new one could be."""
        last = max(hopeless, key=lambda request: request.due)
        if last.due - last.arrived >= self.cost.seconds(1, last.length) + onward_s:
            return Decision(drop=hopeless)
        hopeless.remove(last)
        return Decision(drop=hopeless, take=1, reason="probe", chosen=[last])

    def explain(self) -> dict[str, Any]:
        """Return what was learned of lengths and keys."""
        cost, limit = self.cost, self._policy.limit
        lengths = sorted({1, round(cost.usual_length), cost.longest})
        by_length = {f"{n} x {length}": cost.seconds(n, length) for n in (1, limit) for length in lengths}
        saves = self._composer.saving
        return {"cost_by_length_s": by_length, "composing_saves": saves, "switch_s": cost.switch_s}
