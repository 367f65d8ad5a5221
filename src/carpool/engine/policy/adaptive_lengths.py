"""How the default policy composes batches by length, where requests have lengths and these vary."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from carpool.engine.policy.adaptive_learning import COLD, AdaptiveLearning
from carpool.engine.policy.base import Decision, LevelsView, QueueView, View
from carpool.engine.policy.compose import ChosenGroup, in_line
from carpool.engine.policy.size import share_of
from carpool.engine.request import Request

_KNOWN_LENGTH = 1.1  # times the longest that was measured: what a longer one costs is a guess


class AdaptiveLengths(AdaptiveLearning):
    """Decisions of `Adaptive` on batches of like lengths."""

    def _composes(self, view: View) -> bool:
        """Report whether batches are to be composed of what waits."""
        queue = view.queue
        cost, composer = self._length_cost, self._composer
        if cost is None or composer is None or not queue.by_length or cost.samples < COLD:
            return False
        if queue.lanes > 1 and len(queue.levels) > 1:
            return True  # which of them, is a question even where all are of one length
        if not queue.lengths_vary:
            return False
        if len(queue) <= self.limit or self.most_padded(view) < inf:
            return True
        return not composer.keeps_plain_order(queue, self.limit)

    def _composed(self, view: View) -> Decision | None:
        """Return the batch of like lengths that is to go; None where what comes first is."""
        now, queue, workers = view.now, view.queue, view.free + view.busy
        levels = queue.levels
        if not levels or not self._composes(view):
            return None
        hopeless = self._hopeless_alone(now, levels)
        if hopeless:
            gone = set(hopeless)
            left = [each for each in levels if not gone.issuperset(in_line(each))]
            if not left:
                return self._all_hopeless(now, hopeless)
            levels = left
        limit = self.limit if workers <= 1 else self._share_by_length(now, len(queue), levels, workers)
        return self._composed_of(view, levels, hopeless, limit)

    def _composed_of(self, view: View, levels: Sequence[LevelsView], hopeless: list[Request], limit: int) -> Decision:
        """Return the best batch of these levels, without those that are hopeless alone."""
        now, queue, composer, cost = view.now, view.queue, self._composer, self._length_cost
        assert composer is not None and cost is not None
        choice = composer.choose(
            now,
            levels,
            limit,
            self.most_padded(view),
            onward_s=view.onward_s,
            without=hopeless,
            extra_s=[0.0 if each.key in view.warm_keys else cost.switch_s for each in levels] if cost.switch_s else (),
        )
        if queue.weighted:
            choice = composer.within(choice, self.limit)
        if view.free <= 1 and self._gather.served:
            until = self._company_until(now, queue, levels, choice)
            if until is not None:
                return Decision(drop=hopeless, wake_at=until)
        if self._is_patient and choice.batches == 1 and self._defers(queue):
            until = self._like_until(view, levels, choice)
            if until is not None:
                return Decision(drop=hopeless, wake_at=until)
        if self.allowed_batch_sizes is not None:
            choice = composer.without_padding(choice, self.allowed_batch_sizes)
        n, units = len(choice.requests), self._units(queue, choice.requests)
        reason = "full" if units == self.limit else "free" if n == len(queue) - len(hopeless) else "length"
        return Decision(drop=hopeless, take=units, reason=reason, chosen=choice.requests)

    def _like_until(self, view: View, levels: Sequence[LevelsView], choice: ChosenGroup) -> float | None:
        """Return until when to wait for more requests than one batch; None to go now."""
        cost, n = self._length_cost, len(choice.requests)
        assert cost is not None
        if not n or self._units(view.queue, choice.requests) >= self.limit:
            return None
        more_s = cost.seconds(n + 1, max([request.length for request in choice.requests])) + view.hop_s
        return self._held_until(view, min([each.earliest_due for each in levels]), more_s, cost.cv)

    def _units(self, queue: QueueView, requests: Sequence[Request]) -> int:
        """Return how much of a batch these requests take up: all of it if one of them is larger."""
        return min(self.limit, sum([request.size for request in requests])) if queue.weighted else len(requests)

    def _share_by_length(self, now: float, waiting: int, levels: Sequence[LevelsView], workers: int) -> int:
        """Return the most that one of several workers takes, as others are or soon will be free.

        It is the share without lengths (`Sizes.share`), for requests of the mean length.
        """
        cost, gather = self._length_cost, self._gather
        assert cost is not None
        if gather.window_s or waiting > workers * self.limit:
            return self.limit
        rising = [each for level in levels for each in level.rising()]
        item_s = sum([cost.item_s(length) * count for length, _, count in rising]) / sum([n for _, _, n in rising])
        rate = self._arrivals.steady_rate(now)
        return min(self.limit, share_of(waiting, rate, workers, cost.setup_s, item_s, self.limit))

    def _company_until(
        self, now: float, queue: QueueView, levels: Sequence[LevelsView], choice: ChosenGroup
    ) -> float | None:
        """Return until when to wait for clients that come back; None to go now.

        Those of a batch that is not full make it larger (`policy/gather.py`). And the more wait,
        the less padding is in the batches that are made of them.
        """
        composer, gather = self._composer, self._gather
        assert composer is not None
        slack_s = min([each.earliest_due for each in levels]) - now - self._onward_s
        if choice.batches == 1:
            until = self._worth_waiting_until(now, queue, self._units(queue, choice.requests), self.limit, slack_s)
            if until is not None:
                return until
        if len(levels) > 1 or not gather.expected:
            return None  # of which key the next ones are is not known
        until = gather.best_until(now, composer.saved_by_more_s(choice, len(queue)))
        if until is None:
            return None
        if self.max_queue_delay_s is not None:
            until = min(until, queue.oldest_arrival + self.max_queue_delay_s)
        is_in_time = slack_s > until - now + choice.seconds * self.cost.margin
        return until if now < until and is_in_time else None

    def _hopeless_alone(self, now: float, levels: Sequence[LevelsView]) -> list[Request]:
        """Return the requests that could not be answered in time even alone."""
        cost = self._length_cost
        assert cost is not None
        at = now + self._onward_s
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
        if last.due - last.arrived >= cost.seconds(1, last.length) + self._onward_s:
            return Decision(drop=hopeless)
        hopeless.remove(last)
        return Decision(drop=hopeless, take=1, reason="probe", chosen=[last])
