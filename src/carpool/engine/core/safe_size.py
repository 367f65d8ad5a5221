"""How much one call of a model can hold before memory runs out, found by what happens. Sans-IO.

Nothing is limited until a call has run out of memory. From then on batches hold at most what is
known to fit, and now and then a larger one is sent: half-way to the least that is known to be too
much, until the two are next to each other. After that, much more rarely, what was too much is tried
again, in case memory has become free. The pauses in between are counted in batches, not in seconds,
and only those batches count that would have been larger; each failure doubles their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

_FIRST_PAUSE = 4  # batches that stay within the limit before a larger one is tried
_RETRY_PAUSE = 256  # batches within the limit before what was too much is tried again
_LONGEST_PAUSE = 2**16
_CLOSE = 8  # a gap below an eighth of the limit is not worth another failure


class SafeSize:
    """The sizes that fit into memory, as one stage has learned them. All its workers share it: they
    run the same model on the same machine.

    If `sizes` are given, the model is called with no others, and smaller batches are padded.
    `limit` is the most that is known to fit, in units of the requests' sizes; infinity while
    nothing has run out.
    """

    def __init__(self, sizes: Sequence[int] | None = None) -> None:
        self.limit = inf
        self._sizes = sizes
        self._too_much = inf  # the least that is known to run out; above the limit
        self._pause = _FIRST_PAUSE
        self._batches_left = _FIRST_PAUSE  # until a larger one is tried

    def __repr__(self) -> str:
        return f"<SafeSize {self.limit} fits, {self._too_much} does not>"

    def ran_out(self, tried: int, fitted: int) -> None:
        """Learn from a call of size `tried`, the least of several, that has run out of memory, and
        from the largest size below it that went through instead; 0 if none did.
        """
        fitted = fitted if 0 < fitted < tried else tried // 2
        if tried <= self.limit:  # the first time, or memory has become shorter
            self.limit = max(1, fitted)
            self._too_much = tried
            self._pause = self._batches_left = _FIRST_PAUSE
        else:
            self.limit = max(self.limit, fitted)
            self._too_much = min(self._too_much, tried)
        self._rest_if_found()

    def fitted(self, size: int) -> None:
        """Learn from a batch larger than the limit that has gone through."""
        self.limit = size
        if size >= self._too_much:
            self._too_much = inf
        self._pause = self._batches_left = _FIRST_PAUSE
        self._rest_if_found()

    def allowed(self, wanted: int) -> int:
        """Return how much the next batch may hold that would hold `wanted`, over the limit."""
        offered = self.offered(wanted)
        self._batches_left -= 1
        if self._batches_left <= 0:
            self._pause = self._batches_left = min(2 * self._pause, _LONGEST_PAUSE)
        return offered

    def offered(self, wanted: int) -> int:
        """Return what `allowed` would say, without counting a batch."""
        return int(self.limit) if self._batches_left > 1 else min(wanted, self._larger())

    def _larger(self) -> int:
        """Return the next size to try.

        It lies between the limit and what is too much; if there is nothing between, it is what was
        too much.
        """
        limit = int(self.limit)
        if self._sizes is not None:
            larger = [size for size in self._sizes if size > limit]
            between = [size for size in larger if size < self._too_much]
            return between[(len(between) - 1) // 2] if between else (larger or [limit])[0]
        if self._too_much == inf:
            return 2 * limit
        return int(self._too_much) if self._is_found() else (limit + int(self._too_much)) // 2

    def _is_found(self) -> bool:
        if self._too_much == inf:
            return False
        if self._sizes is not None:
            return not any(self.limit < size < self._too_much for size in self._sizes)
        return self._too_much - self.limit <= max(1, self.limit // _CLOSE)

    def _rest_if_found(self) -> None:
        if self._is_found():
            self._pause = self._batches_left = max(self._pause, _RETRY_PAUSE)


def least_that_ran_out(
    size_of: Callable[[Sequence[int]], int], calls: Sequence[Sequence[int]], fitted: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """Return the least size of a call that ran out of memory, and the largest below it that fitted;
    0 if there is none. Calls are given as the positions of their items in the batch.
    """
    tried = min([size_of(call) for call in calls])
    smaller = [size for call in fitted if (size := size_of(call)) < tried]
    return tried, max(smaller, default=0)
