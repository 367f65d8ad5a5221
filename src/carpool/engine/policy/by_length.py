"""How the default policy decides where requests have lengths and these vary, or have keys."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from carpool.engine.policy.adaptive_learning import AdaptiveLearning
from carpool.engine.policy.base import Decision, DoneBatch, LevelsView, View
from carpool.engine.policy.compose import ChosenGroup, Composer, in_line
from carpool.engine.policy.cost import LEARNED
from carpool.engine.policy.length_cost import LengthCost
from carpool.engine.policy.size import share_of
from carpool.engine.request import Request


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
        cost, policy = self.cost, self._policy
        if done.is_warm_up:
            cost.add(done.n, done.longest, done.busy_s)
            return
        at = now + policy._onward_s
        for request in done.requests:
            self._composer.answered(request, at <= request.due)
        if not done.ok:
            return
        seconds = done.busy_s + policy._hop_s
        if not done.is_switch or cost.samples < LEARNED:
            cost.add(done.n, done.longest, seconds, done.is_first)
        elif not done.is_first:
            cost.learn_switch(done.n, done.longest, seconds)

    # -- what to do

    def composes(self, view: View) -> bool:
        """Report whether batches are to be composed of what waits."""
        queue, limit = view.queue, self._policy.limit
        if not queue.by_length or self.cost.samples < LEARNED:
            return False
        if queue.lanes > 1 and len(queue.levels) > 1:
            return True  # which of them, is a question even where all are of one length
        if not queue.lengths_vary or not queue.levels:
            return False
        if len(queue) <= limit or self._policy.most_padded(view) < inf:
            return True
        return not self._composer.keeps_plain_order(queue, limit)

    def decide(self, view: View) -> Decision | None:
        """Return the batch of like lengths that is to go; None where what comes first is."""
        if not self.composes(view):
            return None
        now, queue, policy, composer, cost = view.now, view.queue, self._policy, self._composer, self.cost
        levels, at = queue.levels, now + view.onward_s
        hopeless, limit = self._hopeless_alone(at, now, levels), self._share(view, levels)
        choice = composer.choose(at, levels, limit, policy.most_padded(view), set(hopeless), view.warm_keys)
        if not choice.requests:
            least_s = view.onward_s + cost.seconds(1, min([request.length for request in hopeless]))
            return policy._hopeless(hopeless, least_s)
        if queue.weighted:
            choice = composer.within(choice, policy.limit)
        if policy.allowed_batch_sizes is not None:
            choice = composer.without_padding(choice, policy.allowed_batch_sizes)
        n = len(choice.requests)
        units = min(policy.limit, sum([request.size for request in choice.requests]))
        until = self._until(view, levels, choice, units)
        if until is not None:
            return Decision(drop=hopeless, wake_at=until)
        reason = "full" if units == policy.limit else "free" if n == len(queue) - len(hopeless) else "length"
        return Decision(drop=hopeless, take=units, reason=reason, chosen=choice.requests)

    def _hopeless_alone(self, at: float, now: float, levels: Sequence[LevelsView]) -> list[Request]:
        """Return the requests that could not be answered in time even alone."""
        cost, longest = self.cost, self.cost.longest  # what is longer is served, to find out what it costs
        if min([each.earliest_due for each in levels]) - at >= cost.seconds(1, longest):
            return []
        late = [r for each in levels for r in in_line(each) if r.due - at < cost.seconds(1, r.length)]
        return [r for r in late if r.length <= longest or r.due <= now]

    def _share(self, view: View, levels: Sequence[LevelsView]) -> int:
        """Return the most that one of several workers takes, as others are or soon will be free.

        It is the share without lengths (`Sizes.share`), for requests of the mean length.
        """
        cost, policy, waiting, workers = self.cost, self._policy, len(view.queue), view.free + view.busy
        limit = policy.limit
        if workers <= 1 or policy.gather.window_s or waiting > workers * limit:
            return limit
        lengths = [request.length for each in levels for request in in_line(each)]
        item_s = sum(cost.item_s_at(lengths)) / len(lengths)
        rate = policy.arrivals.steady_rate(view.now)
        return min(limit, share_of(waiting, rate, workers, cost.setup_s, item_s, limit))

    def _until(self, view: View, levels: Sequence[LevelsView], choice: ChosenGroup, units: int) -> float | None:
        """Return until when to wait for more requests; None to go now.

        Clients that come back make a batch larger that is not full (`Gather`). And the more wait,
        the less padding is in the batches that are made of them.
        """
        now, queue, policy, gather = view.now, view.queue, self._policy, self._policy.gather
        due = min([each.earliest_due for each in levels])
        slack_s = due - now - view.onward_s
        if view.free <= 1 and gather.served:
            if choice.batches == 1:
                until = policy._back_until(view, units, policy.limit, slack_s)
                if until is not None:
                    return until
            until = gather.best_until(now, self._composer.saved_by_more_s(choice, len(queue)))
            if len(levels) == 1:  # else of which key they are is not known
                until = policy._wait_until(view, until, slack_s, choice.seconds)
                if until is not None:
                    return until
        if policy.is_patient and choice.batches == 1 and units < policy.limit and policy._defers(queue):
            more_s = self.cost.seconds(len(choice.requests) + 1, choice.longest) + view.hop_s
            return policy._held_until(view, due, more_s, self.cost.cv)
        return None

    def explain(self) -> dict[str, Any]:
        """Return what was learned of lengths and keys."""
        cost, limit = self.cost, self._policy.limit
        lengths = sorted({1, round(cost.usual_length), cost.longest})
        by_length = {f"{n} x {length}": cost.seconds(n, length) for n in (1, limit) for length in lengths}
        saves = 1.0 - self._composer.ratio
        return {"cost_by_length_s": by_length, "composing_saves": saves, "switch_s": cost.switch_s}
