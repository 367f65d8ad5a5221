"""When a call of user code is given up, so that its worker is replaced. Sans-IO.

A slow call is not a crash: as long as a caller waits for it, it may go on. Where the user has set
no limit, a call is given up once no caller has waited for it for a while. It is given up sooner
only where it has itself taken that long, and also ten times as long as such batches take by what
was seen: then it hangs, and its callers are better served by another worker.

What such batches take is a bound, not an estimate: the slowest batch of late, or the slowest per
unit of late times the size, whichever is more. So a batch of 64 after nothing but single items is
given 64 times as long, and a single item after nothing but full batches as long as they took.
Warm-ups
do not count: examples are often smaller than real items.
"""

from __future__ import annotations

from math import inf

_FAR = 10.0  # times what its batch should take: a call that takes longer hangs
_LEARNED = 8  # batches after which it is known what they take
_FORGET = 0.01  # share of the distance to the slowest that each faster batch takes away


class Patience:
    """How long the calls of one stage may take, by what its batches took.

    Args:
        limit_s: How long one call may take, if the user has set it (`max_batch_time_s`); nothing
            else counts then.
        unwanted_s: If not, how long a call may go on that no caller waits for.

    Attributes:
        least_s: No call is given up sooner than this.
        learns: Whether it needs to know what batches take.
    """

    __slots__ = ("_batches", "_limit_s", "_slowest_s", "_unit_s", "_unwanted_s", "learns", "least_s")

    def __init__(self, limit_s: float = inf, unwanted_s: float = inf) -> None:
        self._limit_s = limit_s
        self._unwanted_s = unwanted_s
        self._batches = 0
        self._slowest_s = 0.0
        self._unit_s = 0.0  # seconds per unit of the batch that took longest for its size
        self.least_s = limit_s if limit_s < inf else unwanted_s
        self.learns = limit_s == inf and unwanted_s < inf

    def learn(self, size: int, took_s: float) -> None:
        """Learn from a batch of `size` that has run to its end."""
        self._batches += 1
        self._slowest_s = _slowest(self._slowest_s, took_s)
        self._unit_s = _slowest(self._unit_s, took_s / max(1, size))

    def until(self, started: float, unwanted_since: float, size: int) -> float:
        """Return when a call is to be given up.

        Args:
            started: When the call started.
            unwanted_since: Since when no caller waits for any of its batch; infinity if one does.
            size: Of the batch.
        """
        if self._limit_s < inf:
            return started + self._limit_s
        unwanted = max(started, unwanted_since) + self._unwanted_s
        return min(unwanted, started + max(self._unwanted_s, _FAR * self._most_s(size)))

    def hint(self, ran_s: float) -> str:
        """Return what else to tell a caller whose time is up while the call goes on.

        Args:
            ran_s: How long the call has run.
        """
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
        """Return the most that a batch of `size` should take; infinity while that is not known."""
        if self._batches < _LEARNED:
            return inf
        return max(self._slowest_s, self._unit_s * size)


def _slowest(before: float, now: float) -> float:
    """Return the slowest time of late: it rises at once and is forgotten slowly."""
    return now if now > before else before + _FORGET * (now - before)
