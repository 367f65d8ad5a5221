"""How fast a machine is now, and how much its batches vary: what costs of all shapes share.

The **level** is the one factor by which all batches are slower or faster than the shape of the cost
says: a model that is throttled, or whose neighbour has woken up. Its gain follows a tracking signal
(Trigg & Leach 1967): small while the residuals scatter around zero, large when they agree in sign.
A residual far outside the noise is a stall and is believed only if it repeats. The **margin** is a
quantile of measured over predicted time, tracked by steps up and down (Robbins & Monro 1951).
"""

from __future__ import annotations

from math import exp, sqrt

from carpool.policy.first_calls import FirstCalls

_QUANTILE, _QUANTILE_STEP = 0.7, 0.04
_STALL = 0.25  # log-ratio beyond which, and beyond 3.5 sigma, a residual may be a stall
_REPEATED = 1.4  # two odd residuals in a row of one sign: not a stall, but a change


class CostLevel(FirstCalls):
    """The level and the noise of a learned cost.

    Attributes:
        level: What to multiply the relative times of the shape with.
        margin: Planned time over expected time.
        trend: Smoothed log-ratio of measured to expected time; far from 0 while the level is
            moving.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self.level = 1.0
        self.margin = 1.0
        self.trend = 0.0
        self._variance = 0.0  # of the log-ratios
        self._scatter = 1e-3  # smoothed absolute log-ratio
        self._oddness = 0.0

    @property
    def cv(self) -> float:
        """Coefficient of variation of a batch's time about its expectation."""
        return sqrt(self._variance)

    def _learn_margin(self, ratio: float) -> None:
        """Move the margin one step after a batch that took `ratio` times its expected time."""
        step = _QUANTILE if ratio > self.margin else _QUANTILE - 1.0
        self.margin = min(2.0, max(1.0, self.margin + _QUANTILE_STEP * step))

    def _is_stall(self, residual: float, count: float) -> bool:
        """Report whether a batch took oddly long, or short, without others that agree with it."""
        if abs(residual) > max(3.5 * self.cv, _STALL) and count >= 2.0:
            self._oddness = 0.5 * self._oddness + (1.0 if residual > 0 else -1.0)
            return abs(self._oddness) < _REPEATED
        self._oddness *= 0.5
        return False

    def _learn_level(self, residual: float, count: float) -> float | None:
        """Move the level after a batch.

        Args:
            residual: The logarithm of measured over expected time.
            count: How often batches like it have been sampled; where that is hardly ever, it says
                little about the level, since there it is the shape that is wrong.

        Returns:
            As much of the residual as the shape should believe; None for a stall.
        """
        if self._is_stall(residual, count):
            return None
        if count >= 2.0 and abs(residual) < 0.8:
            self._variance += 0.05 * (residual * residual - self._variance)
        weight = min(1.0, count / 3.0)
        self.trend += 0.2 * weight * (residual - self.trend)
        self._scatter += 0.2 * weight * (abs(residual) - self._scatter)
        signal = abs(self.trend) / (self._scatter + 0.01)
        if signal < 0.8 and count >= 2.0:
            most = 2.5 * self.cv + 0.02
            residual = min(max(residual, -most), most)
        self.level *= exp(weight * (0.02 + 0.28 * signal**4) * residual)
        return residual
