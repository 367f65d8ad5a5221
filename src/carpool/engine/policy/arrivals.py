"""When requests have come lately: at which rate, and how many by a given moment.

The rates are measured up to now, so that silence counts too. What comes at one moment is one entry,
so that bursts, and the arrivals of one turn of a loop, cost next to nothing. Nothing is worked out
before it is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from math import sqrt

_SHORT, _LONG, _STEADY = 32, 256, 1024  # arrivals that a rate is measured by
_DOUBT = 2.0  # standard deviations of a Poisson count
_MOST_MOMENTS = 4096  # remembered; more than one batch can bring


class Arrivals:
    """The latest arrivals.

    Attributes:
        total: How many there were in all.
    """

    def __init__(self) -> None:
        self.total = 0
        self._times: list[float] = []
        self._totals: list[int] = []  # how many had come by each of these times
        self._forgotten = 0  # how many came before them

    def add(self, now: float, n: int) -> None:
        """Note that `n` requests have arrived."""
        self.total += n
        self._times.append(now)
        self._totals.append(self.total)
        if len(self._times) > _MOST_MOMENTS:
            half = _MOST_MOMENTS // 2
            self._forgotten = self._totals[half - 1]
            del self._times[:half], self._totals[:half]

    def until(self, when: float, before: int = 0) -> int:
        """Return how many requests had come by `when`.

        It is quicker where at least `before` of them are known to have come by then.
        """
        i = bisect_right(self._times, when, max(0, len(self._times) - (self.total - before)))
        return self._totals[i - 1] if i else self._forgotten

    def short_rate(self, now: float) -> float:
        """Return the requests per second, by the last 32."""
        return self._rate(now, _SHORT)

    def long_rate(self, now: float) -> float:
        """Return the requests per second, by the last 256."""
        return self._rate(now, _LONG)

    def steady_rate(self, now: float) -> float:
        """Return arrivals per second, by the last 1024, or by fewer that surely came faster.

        By a noisier rate batches grow with every chance crowd, which costs a tenth of the p99; by a
        slower one they are too small for a while when the rate has risen.
        """
        rates = [self._rate(now, n) * (1.0 - _DOUBT / sqrt(n)) for n in (_SHORT, _LONG)]
        return max(self._rate(now, _STEADY), *rates)

    def _rate(self, now: float, n: int) -> float:
        """Return the requests per second by the last `n`, counted from the moment before them.

        0 if all came at one moment.
        """
        totals = self._totals
        if not totals:
            return 0.0
        i = max(0, bisect_right(totals, self.total - n, max(0, len(totals) - n - 1)) - 1)  # each moment brings some
        return (self.total - totals[i]) / max(now - self._times[i], 1e-9)
