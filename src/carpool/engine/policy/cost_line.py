"""Seconds as a straight line over an amount of work, learned with forgetting.

The costs of steps are lines: taking in `length` units takes a + b·length, a step of n streams
c + d·n. `policy/cost.py` learns another kind of cost. Its shape is a table of sizes up to a limit,
with a knee where there is one, but lengths have no limit, and a prompt that is ten times as long
as all before it must have a price. So this is least squares, where each sample counts 0.98 times
as much once the next one has come.

A sample far above the line is a stall: it is believed only if the next one is as far off.
"""

from __future__ import annotations

from typing import Final

from carpool.engine.policy.cost import FirstCalls

_KEEP: Final = 0.98  # what a sample still counts for when the next one has come
_LEARNED: Final = 8  # samples after which the line means something
_STALLED: Final = 3.0  # times the expected seconds


class CostLine(FirstCalls):
    """Learned seconds `a + b·x`; both are at least 0.

    Args:
        a: Seconds that do not depend on the amount, as far as it is known beforehand.
        b: Seconds per unit.

    Attributes:
        a: The same, as learned.
        b: The same, as learned.
        samples: How many samples it has learned from.
    """

    __slots__ = ("_has_stalled", "_known", "_n", "_x", "_xx", "_xy", "_y", "a", "b", "samples")

    def __init__(self, a: float = 0.0, b: float = 0.0) -> None:
        super().__init__()
        self._known = a, b
        self.forget()

    def forget(self) -> None:
        self.a, self.b = self._known
        self.samples = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._has_stalled = False

    def __repr__(self) -> str:
        return f"<CostLine {self.a:.3g} s + {self.b:.3g} s/unit>"

    def seconds(self, x: float) -> float:
        """Return the expected seconds of `x` units."""
        return self.a + self.b * x

    def learn(self, x: float, seconds: float, is_first: bool = False) -> None:
        """Learn that `x` units took `seconds`, perhaps as the first call of so many on a worker."""
        if not self._teaches(int(x).bit_length(), seconds, self.seconds(x), is_first):
            return
        if self.samples >= _LEARNED and seconds > _STALLED * self.seconds(x) and not self._has_stalled:
            self._has_stalled = True
            return
        self._has_stalled = False
        self.samples += 1
        self._n = _KEEP * self._n + 1.0
        self._x = _KEEP * self._x + x
        self._y = _KEEP * self._y + seconds
        self._xx = _KEEP * self._xx + x * x
        self._xy = _KEEP * self._xy + x * seconds
        spread = self._n * self._xx - self._x * self._x
        if spread > 1e-9 * self._n * self._xx:
            self.b = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        elif self.b * self._x > self._y:  # amounts do not differ: what is known of the slope stays, if it can
            self.b = 0.0
        self.a = max(0.0, (self._y - self.b * self._x) / self._n)
