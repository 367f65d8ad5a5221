"""What a batch of n items costs of which the longest has length L, learned while serving:

    t(n, L) = level · (a + n · (b·L + c·L² + e)).

A model pads its batch to the longest item: `b` is the work for each position, `c` that of attention
over pairs of them, `e` what each item costs however short it is, and `a` what each call costs. The
four weights are found by least squares of relative errors, the level and the noise as for batches
of equal items (`policy/cost.py`). Sizes and lengths that the model pads up to are looked up first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

from carpool.engine.policy.cost import EVERY, KEEP, LEARNED, NEWS, CostLevel, LeastSquares


class LengthCost(CostLevel):
    """Learned seconds of a batch by its count and its longest length.

    Args:
        allowed_batch_sizes: The counts that batches are padded up to; None if they are not.
        allowed_lengths: The lengths that items are padded up to; None for those of the longest.

    Attributes:
        samples: How many batches it has learned from.
        longest: The longest length sampled so far.
        usual_length: Smoothed longest length of a batch.
        switch_s: What the first batch of another key on a worker takes besides; 0 where that is no
            more than noise.
    """

    limit = inf

    def __init__(
        self, allowed_batch_sizes: Sequence[int] | None = None, allowed_lengths: Sequence[int] | None = None
    ) -> None:
        self._counts = allowed_batch_sizes
        self._lengths = allowed_lengths
        super().__init__()

    def forget(self) -> None:
        super().forget()
        self.longest = 1
        self.usual_length = 1.0
        self.switch_s = self._excess_s = 0.0  # smoothed, of first batches of another key
        self._line = LeastSquares((0.25,) * 4)

    @property
    def setup_s(self) -> float:
        """Seconds of a call that depend on nothing."""
        return self._line.weights[0] * self.level

    def item_s_at(self, lengths: Sequence[float]) -> list[float]:
        """Return for each length the seconds of each item of a batch whose longest has it."""
        if self._lengths is not None:
            lengths = [padded(length, self._lengths) for length in lengths]
        _, b, c, e = self._line.weights
        level = self.level
        return [(b * length + c * length * length + e) * level for length in lengths]

    def seconds(self, n: float, length: float | None = None) -> float:
        """Return the seconds of a batch of `n`, the longest of this or the usual length."""
        if length is None:
            length = self.usual_length
        if self._counts is not None:
            n = padded(n, self._counts)
        if self._lengths is not None:
            length = padded(length, self._lengths)
        a, b, c, e = self._line.weights
        return max(1e-6, (a + n * (b * length + c * length * length + e)) * self.level)

    def add(self, n: int, length: int, seconds: float, is_first: bool = False) -> None:
        """Learn from a batch of `n` items, the longest of this length, that took `seconds`.

        It may have been the first one of about this shape on its worker.
        """
        seconds = usual = max(seconds, 1e-9)
        if not self._teaches((n.bit_length(), length.bit_length()), seconds, self.seconds(n, length), is_first):
            return
        self.longest = max(self.longest, length)
        self.usual_length += (length - self.usual_length) * (1.0 - KEEP if self.samples else 1.0)
        self.samples += 1
        if self.samples > 2 * LEARNED:
            usual = self.seconds(n, length)
            believed = self._believed(seconds, usual, 1.0)
            if believed is None:
                return
            seconds = believed
        if self._counts is not None:
            n = padded(n, self._counts)
        if self._lengths is not None:
            length = padded(length, self._lengths)
        self._line.add((1.0, n * length, n * length * length, n), seconds / self.level, usual / self.level)
        if self.samples <= EVERY**2 or self.samples % EVERY == 0:
            self._line.fit()

    def learn_switch(self, n: int, length: int, seconds: float) -> None:
        """Learn from a batch that was the first one of its key on its worker."""
        expected = self.seconds(n, length)
        self._excess_s += (1.0 - KEEP) * (seconds - expected - self._excess_s)
        self.switch_s = self._excess_s if self._excess_s > NEWS * expected else 0.0


def padded(value: float, allowed: Sequence[int]) -> int:
    """Return what a count or a length is padded up to, or cut off to if it is above the last.

    Args:
        value: The count or length.
        allowed: What it may be padded to, rising.
    """
    at = bisect_left(allowed, value)
    return allowed[min(at, len(allowed) - 1)]
