"""How long the batches of one stage take: all that is learned of it, but for what a policy learns.

What batches of each size take is the policy's to learn; where it does not, it is learned here, if a
scaler asks.

A slow call is not a crash: as long as a caller waits for it, it may go on. Where the user has set
no limit, a call is given up once no caller has waited for it for a while. It is given up sooner
only where it has itself taken that long, and also ten times as long as such batches take by what
was seen: then it hangs, and its callers are better served by another worker.

What such batches take is a bound, not an estimate: the slowest batch of late, or the slowest per
unit of late times the size, whichever is more. Warm-ups do not count: examples are often smaller
than real items.

A caller that leaves sets the deadline of its running request to that moment. So the time since when
a batch is unwanted is the latest of its deadlines.
"""

from __future__ import annotations

from math import inf
from typing import Final

from carpool.engine.core.batch import Batch
from carpool.engine.policy.cost import CostModel

_FADING: Final = 0.998  # what is left of a learned gap after each batch that does not show it
_FAR: Final = 10.0  # times what its batch should take: a call that takes longer hangs
_LEARNED: Final = 8  # batches after which it is known what they take at most
_FORGET: Final = 0.01  # share of the distance to the slowest that each faster batch takes away
_UNIT_KEEP: Final = 0.95  # of the smoothed size of a request, at each batch
_COST_EVERY_S: Final = 0.01  # of work of one worker


class Times:
    """Learned seconds of the batches of one stage.

    Args:
        limit_s: How long one call may take, if the user has set it (`max_batch_time_s`); nothing
            else counts then.
        unwanted_s: If not, how long a call may go on that no caller waits for.
        watches_gaps: Whether batches may go ahead, for which deviations and gaps must be known.

    Attributes:
        usual_s: Smoothed seconds of a batch; 0 while none has run.
        ahead_s: The same of batches that have gone ahead, which are not on their way for all of it.
        fastest_s: The least seconds of a batch lately; never more than `usual_s`.
        hop_s: Smoothed seconds that a batch spends on its way to the worker and back.
        deviation_s: Smoothed distance of calls from what they usually take. It goes by what workers
            say, since two replies may lie together when a busy service comes to read them.
        gap_s: Smoothed seconds that a worker is idle between two batches of which none goes ahead.
        unit: Smoothed size of a request.
        least_s: No call is given up sooner than this.
        learns: Whether the most that a batch takes must be known.
    """

    def __init__(self, limit_s: float = inf, unwanted_s: float = inf, watches_gaps: bool = False) -> None:
        self.usual_s = self.ahead_s = self.fastest_s = self.deviation_s = self.gap_s = self.hop_s = 0.0
        self.unit = 1.0
        self.least_s = limit_s if limit_s < inf else unwanted_s
        self.learns = limit_s == inf and unwanted_s < inf
        self._limit_s = limit_s
        self._unwanted_s = unwanted_s
        self._watches_gaps = watches_gaps
        self._batches = self._cost_pause = 0
        self._busy_s = self._slowest_s = 0.0
        self._unit_s = 0.0  # seconds per unit of the batch that took longest for its size
        self._cost: CostModel | None = None

    def learn(self, took_s: float, busy_s: float, n: int, size: int, went_ahead: bool) -> float:
        """Learn from a batch of `n` requests that is done, `took_s` after its worker got to it;
        return what it spent on its way.
        """
        hop_s = took_s - busy_s if took_s > busy_s else 0.0
        self.hop_s += 0.1 * (hop_s - self.hop_s)
        if self._watches_gaps:
            self._learn_gap(hop_s, busy_s, went_ahead)
        if self.learns:
            self.learn_most(size, took_s)
        if size != n or self.unit != 1.0:
            self.unit += (1.0 - _UNIT_KEEP) * (size / n - self.unit)
        if self._cost is not None:
            self._learn_cost(self._cost, size, busy_s + self.hop_s)
        if went_ahead:
            self.ahead_s += (took_s - self.ahead_s) * (0.2 if self.ahead_s else 1.0)
        self.learn_usual(took_s)
        return hop_s

    def usual_end(self, batch: Batch) -> float:
        return batch.started + (self.ahead_s if batch.ahead and self.ahead_s else self.usual_s)

    def learn_usual(self, took_s: float) -> None:
        self.usual_s += (took_s - self.usual_s) * (0.2 if self.usual_s else 1.0)
        if took_s < self.fastest_s or not self.fastest_s:
            self.fastest_s = min(took_s, self.usual_s)  # which may be less, after batches of no time at all
        else:
            self.fastest_s += 0.01 * (took_s - self.fastest_s)  # the stage may have become slower

    def learn_most(self, size: int, took_s: float) -> None:
        self._batches += 1
        self._slowest_s = _slowest(self._slowest_s, took_s)
        self._unit_s = _slowest(self._unit_s, took_s / max(1, size))

    def _learn_gap(self, hop_s: float, busy_s: float, went_ahead: bool) -> None:
        """Learn how well ends can be foretold, and how long a worker is idle between two batches.

        What is known of the latter fades while all batches go ahead, so that it is looked at again
        now and then. A stall teaches no more than a gap as long as the batch would.
        """
        distance_s = busy_s - self._busy_s
        if not self._busy_s:
            self._busy_s = busy_s
        else:
            self.deviation_s += (abs(distance_s) - self.deviation_s) * 0.2
            self._busy_s += distance_s * 0.2
        if went_ahead:
            self.gap_s *= _FADING
        else:
            self.gap_s += 0.1 * (min(hop_s, busy_s) - self.gap_s)

    # -- what batches of each size take

    def learn_costs(self, limit: int) -> None:
        self._cost = self._cost or CostModel(limit)

    def cost_s(self, size: int) -> float:
        return self._cost.seconds(size) if self._cost is not None and self._cost.samples else 0.0

    def _learn_cost(self, cost: CostModel, size: int, seconds: float) -> None:
        """Learn what a batch of `size` takes.

        Of short ones not all are learned from, as that takes a share of their time.
        """
        if self._cost_pause:
            self._cost_pause -= 1
            return
        self._cost_pause = int(_COST_EVERY_S / max(seconds, 1e-6))
        cost.add(size, seconds)

    # -- how long a call may take

    def until(self, started: float, unwanted_since: float, size: int) -> float:
        """Return when a call for a batch of `size` is to be given up that no caller waits for since
        a time; infinity if one does.
        """
        if self._limit_s < inf:
            return started + self._limit_s
        unwanted = max(started, unwanted_since) + self._unwanted_s
        return min(unwanted, started + max(self._unwanted_s, _FAR * self._most_s(size)))

    def judge(self, now: float, started: float, unwanted_since: float, size: int) -> tuple[float, str]:
        """Return when a call is to be given up, and why if it is time; see `until`."""
        until = self.until(started, unwanted_since, size)
        return until, self.why(started, unwanted_since, size) if until <= now else ""

    def hint(self, ran_s: float) -> str:
        if not self.learns or ran_s < self._unwanted_s:
            return ""
        return f"; the call goes on for {self._unwanted_s:.3g} s at most if nobody waits for it: see max_batch_time_s"

    def why(self, started: float, unwanted_since: float, size: int) -> str:
        """Return why a call is given up at the time that `until` says, given the same arguments."""
        if self._limit_s < inf:
            return f"it is in one call for longer than max_batch_time_s ({self._limit_s:g} s)"
        if max(started, unwanted_since) + self._unwanted_s <= self.until(started, unwanted_since, size):
            text = f"nobody has waited for its call for {self._unwanted_s:g} s"
        else:
            text = f"its call takes more than ten times as long as its batches do ({self._most_s(size):.3g} s at most)"
        return f"{text}, and max_batch_time_s, which would set a limit, is not given"

    def _most_s(self, size: int) -> float:
        if self._batches < _LEARNED:
            return inf
        return max(self._slowest_s, self._unit_s * size)


def _slowest(before: float, now: float) -> float:
    return now if now > before else before + _FORGET * (now - before)
