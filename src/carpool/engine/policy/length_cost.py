"""What a batch of n items costs of which the longest has length L, learned while serving:

    t(n, L) = level · (a + n · (b·L + c·L² + e)).

A model pads its batch to the longest item: `b` is the work for each position, `c` that of attention
over pairs of them, `e` what each item costs however short it is, and `a` what each call costs. The
four weights are found by least squares of errors relative to the expected time, with forgetting
(half of it in 140 batches), from as few samples as there are; a weight that would come out negative
is left out. The level and the noise are learned as for batches of equal items (`policy/cost.py`).

Sizes and lengths that the model pads up to are looked up first: the cost of a batch is that of the
shape that is run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from carpool.engine.policy.cost import EVERY, KEEP, LEARNED, NEWS, CostLevel, LeastSquares

_KEEP = 0.995
"""What a sample still counts for once the next one has come: half of it after 140. At half of that
time the four weights follow noise more; at twice as much, a change of shape is followed as much
later."""


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
        longest_varies: Whether batches have had different longest lengths.
    """

    def __init__(
        self, allowed_batch_sizes: Sequence[int] | None = None, allowed_lengths: Sequence[int] | None = None
    ) -> None:
        self.pads_counts = allowed_batch_sizes is not None
        self._counts = allowed_batch_sizes
        self._lengths = allowed_lengths
        super().__init__()

    def forget(self) -> None:
        super().forget()
        self.samples = 0
        self.longest = 1
        self.usual_length = 1.0
        self.switch_s = 0.0
        self._excess_s = 0.0  # smoothed, of first batches of another key
        self.longest_varies = False
        self._line = LeastSquares((0.25,) * 4, _KEEP)

    @property
    def setup_s(self) -> float:
        """Seconds of a call that depend on nothing."""
        return self._line.weights[0] * self.level

    def item_s(self, length: float) -> float:
        """Return the seconds of each item in a batch whose longest has this length."""
        if self._lengths is not None:
            length = padded(length, self._lengths)
        _, b, c, e = self._line.weights
        return (b * length + c * length * length + e) * self.level

    def item_s_at(self, lengths: Sequence[int]) -> list[float]:
        """Return `item_s` of each of these lengths."""
        if self._lengths is not None:
            lengths = [padded(length, self._lengths) for length in lengths]
        _, b, c, e = self._line.weights
        level = self.level
        return [(b * length + c * length * length + e) * level for length in lengths]

    def items_s(self, lengths: Sequence[int]) -> float:
        """Return the sum of the seconds of items, each in a batch of its own length."""
        return sum(self.item_s_at(lengths))

    def seconds(self, n: float, length: float) -> float:
        """Return the expected seconds of a batch of `n` items, the longest of this length."""
        if self._counts is not None:
            n = padded(n, self._counts)
        return max(1e-6, self.setup_s + n * self.item_s(length))

    def seconds_of(self, counts: Sequence[int], lengths: Sequence[int]) -> list[float]:
        """Return `seconds` of each of some batches, by their counts and longest lengths."""
        if self._counts is not None:
            counts = [padded(n, self._counts) for n in counts]
        setup_s = self.setup_s
        return [max(1e-6, setup_s + n * each) for n, each in zip(counts, self.item_s_at(lengths), strict=True)]

    def usual(self, limit: int) -> CostAtLength:
        """Return the cost of batches of up to `limit` by their count, at the usual length."""
        return CostAtLength(self, self.usual_length, limit)

    def add(self, n: int, length: int, seconds: float, is_first: bool = False) -> None:
        """Learn from a batch of `n` items, the longest of this length, that took `seconds`.

        It may have been the first one of about this shape on its worker.
        """
        seconds = usual = max(seconds, 1e-9)
        if not self._teaches((n.bit_length(), length.bit_length()), seconds, self.seconds(n, length), is_first):
            return
        self.longest_varies = self.longest_varies or (self.samples > 0 and length != self.longest)
        self.longest = max(self.longest, length)
        self.usual_length += (length - self.usual_length) * (0.05 if self.samples else 1.0)
        self.samples += 1
        if self.samples > 2 * LEARNED:
            expected = self.seconds(n, length)
            believed = self._believed(seconds, expected, 1.0)
            if believed is None:
                return
            seconds, usual = believed, expected
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


class CostAtLength:
    """The cost of batches by their count, at one length: what rules ask that know no lengths.

    Attributes:
        limit: The largest count.
    """

    def __init__(self, cost: LengthCost, length: float, limit: int) -> None:
        self._cost = cost
        self._length = length
        self.limit = limit

    def seconds(self, n: float) -> float:
        """Return the expected seconds of a batch of `n`."""
        return self._cost.seconds(n, self._length)

    @property
    def cv(self) -> float:
        """Coefficient of variation of a batch's time about its expectation."""
        return self._cost.cv

    @property
    def setup_s(self) -> float:
        """Seconds of a batch that do not depend on its size."""
        return self._cost.setup_s


def padded(value: float, allowed: Sequence[int]) -> int:
    """Return what a count or a length is padded up to, or cut off to if it is above the last.

    Args:
        value: The count or length.
        allowed: What it may be padded to, rising.
    """
    at = bisect_left(allowed, value)
    return allowed[min(at, len(allowed) - 1)]
