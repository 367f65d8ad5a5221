"""How fast a machine is now, and how much its batches vary: what costs of all shapes share.

The **level** is the one factor by which all batches are slower or faster than the shape of the cost
says: a model that is throttled, or whose neighbour has woken up. Its gain follows a tracking signal
(Trigg & Leach 1967): small while the residuals scatter around zero, large when they agree in sign.
A residual far outside the noise is a stall and is believed only if it repeats.

Each batch that is learned from measures level and noise, whatever its size: half of the variance is
of the last 14 of them, and a change of speed is followed within some ten.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import Final

from carpool.engine.policy.first_calls import FirstCalls

_STALL: Final = 0.25
"""Log-ratio beyond which, and beyond 3.5 sigma, a batch may have stalled. With half of it, changes
of an eighth are believed one batch later; with twice as much, stalls of 1.6 times count."""
_REPEATED: Final = 1.4
"""Oddness at which it was no stall, which two odd batches in a row reach. With half of it, each
stall is believed; with twice as much, no change is."""
_GAIN: Final = 0.3
"""The level's gain while all residuals agree. With half of it, a drift takes twice as many batches;
with twice as much, three batches that are slow by chance move the level by half of that."""


class CostLevel(FirstCalls):
    """The level and the noise of a learned cost.

    Attributes:
        level: What to multiply the relative times of the shape with.
        samples: How many batches it has learned from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self.level = 1.0
        self.samples = 0
        self._variance = 0.0  # of the log-ratios
        self._trend = 0.0  # smoothed log-ratio
        self._scatter = 1e-3  # smoothed absolute log-ratio
        self._oddness = 0.0

    @property
    def cv(self) -> float:
        """Coefficient of variation of a batch's time about its expectation."""
        return sqrt(self._variance)

    @property
    def margin(self) -> float:
        """Planned time over expected time: about the 0.7-quantile of what a batch takes."""
        return 1.0 + 0.5 * self.cv

    def _believed(self, seconds: float, expected: float, weight: float) -> float | None:
        """Learn level and noise from a batch; return the seconds that the shape should believe.

        Args:
            seconds: What it took.
            expected: What it was expected to take.
            weight: How well batches like it are known, up to 1; where that is little, it is the
                shape that is wrong.

        Returns:
            None for a stall.
        """
        error = log(min(max(seconds / expected, 0.4), 2.5))
        if weight > 0.3 and abs(error) > max(3.5 * self.cv, _STALL):
            self._oddness = 0.5 * self._oddness + (1.0 if error > 0.0 else -1.0)
            if abs(self._oddness) < _REPEATED:
                return None
        else:
            self._oddness *= 0.5
            if weight >= 0.6 and abs(error) < 0.8:
                self._variance += 0.05 * (error * error - self._variance)
        self._trend += 0.2 * weight * (error - self._trend)
        self._scatter += 0.2 * weight * (abs(error) - self._scatter)
        agreement = abs(self._trend) / (self._scatter + 0.01)
        if agreement < 0.8 and weight >= 0.6:
            most = 2.5 * self.cv + 0.02
            error = min(max(error, -most), most)
        self.level *= exp(weight * (0.02 + (_GAIN - 0.02) * agreement**4) * error)
        return expected * exp(error) if weight > 0.3 else seconds
