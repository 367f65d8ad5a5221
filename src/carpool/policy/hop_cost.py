"""What of the way to a worker and back grows with the batch, as it does where items are large.

A small item travels for nothing once its batch does, so the way is a cost of the batch, and one
more reason for large ones. Megabytes do not: twice as many take twice as long. There a large batch
gains little, and costs something: while all that waits is on its way together, nothing runs, and
while it runs, nothing is on its way. Of several smaller batches one travels while another runs
(`core/ahead.py`).

So the way is learned as a straight line over the size of batches, by least squares that forget. As
long as sizes do not differ, all of it is taken to grow. That is found out soon if it is wrong,
since smaller batches are made then; the contrary would never be, as all batches would be large.

What is said of it is the **share** of a batch's time that is on the way and grows with its size. It
is 0 while that is a trifle, as it is for all small items: what a service does for each of them, to
write and to read it, makes the way of a hundred longer, too, but to make more batches of them would
only give it more to do.
"""

from __future__ import annotations

from typing import Final

_KEEP: Final = 0.95  # weight of the former batches
_INERTIA: Final = 0.05  # pull toward the former slope, as a share of the mean size squared
_FEW: Final = 3  # batches after which anything is said
_STALLED: Final = 3.0  # times the expected seconds: what is beyond is a stall
_MUCH_S, _LITTLE_S = 1e-3, 0.25e-3  # by which the way of a large batch grows: to count, and to go on counting
_MUCH_OF_ITEM_S, _LITTLE_OF_ITEM_S = 50e-6, 25e-6  # the same for each item; the smallest take a service up to 20 us
_LARGE, _SMALL = 0.1, 0.05  # the same as a share of a mean batch's time


class HopCost:
    """Learned seconds of the way to a worker and back, `fixed_s + unit_s * size`.

    Attributes:
        share: The share of a mean batch's time that is on the way and grows with its size.
        samples: How many batches it has learned from.
        fixed_s: Seconds that do not depend on the size.
        unit_s: Seconds per unit of size.
    """

    def __init__(self) -> None:
        self.share = self.fixed_s = self.unit_s = 0.0
        self.samples = 0
        self._n = self._x = self._y = self._xx = self._xy = self._busy = 0.0  # sums, forgotten

    def learn(self, size: int, hop_s: float, busy_s: float, largest: float, unit: float) -> float:
        """Learn from a batch, and return the share that has come of it.

        Args:
            size: Its size.
            hop_s: What it spent on its way.
            busy_s: What it took besides.
            largest: The size that batches could have with what is asked for at a time.
            unit: The mean size of its requests.
        """
        self.samples += 1
        if self.samples > _FEW:
            hop_s = min(hop_s, _STALLED * (self.fixed_s + self.unit_s * size))
        elif self.samples == 1:
            self.unit_s = hop_s / size
        self._n = _KEEP * self._n + 1.0
        self._x = _KEEP * self._x + size
        self._y = _KEEP * self._y + hop_s
        self._xx = _KEEP * self._xx + size * size
        self._xy = _KEEP * self._xy + size * hop_s
        self._busy = _KEEP * self._busy + busy_s
        self._fit(largest, unit)
        return self.share

    def _fit(self, largest: float, unit: float) -> None:
        """Draw the line anew, and say what share of a mean batch it is."""
        n, x, y = self._n, self._x, self._y
        pull = _INERTIA * x * x
        slope = (n * self._xy - x * y + pull * self.unit_s) / (n * self._xx - x * x + pull)
        self.unit_s = min(max(0.0, slope), y / x)
        self.fixed_s = (y - self.unit_s * x) / n
        if self.samples < _FEW:
            return
        grown_s, item_s = self.unit_s * max(x / n, largest), self.unit_s * unit
        share = self.unit_s * x / (y + self._busy) if grown_s else 0.0
        if self.share:
            counts = grown_s >= _LITTLE_S and item_s >= _LITTLE_OF_ITEM_S and share >= _SMALL
        else:
            counts = grown_s >= _MUCH_S and item_s >= _MUCH_OF_ITEM_S and share >= _LARGE
        self.share = share if counts else 0.0
