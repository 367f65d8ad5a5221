"""What the coordinator works for each request, and for each batch besides: learned from its sums.

The driver measures how long its thread has worked in some time, and the core counts requests and
batches; from several such sums follow the two numbers, by the least squares of relative errors.
Where batches have about one size for a while, sums say nothing of how the work divides. So it is
taken to divide as for a service of a trivial model unless sums say otherwise.
"""

from __future__ import annotations

from typing import Final

_KEEP: Final = 0.95  # of the weight of former sums, at each new one
_USUAL: Final = 5.0  # requests that are as much work as a batch besides: 63 and 12 µs were measured
_PULL: Final = 0.02  # weight of that ratio beside the sums; noise of a tenth moves the numbers by as much


class OwnWork:
    """Learned seconds of the coordinator's work.

    Attributes:
        request_s: Seconds for each request; 0 while that is not known.
        batch_s: Seconds for each batch besides; likewise.
    """

    __slots__ = ("_b", "_bb", "_n", "_nb", "_nn", "batch_s", "request_s")

    def __init__(self) -> None:
        self.request_s = self.batch_s = 0.0
        self._n = self._b = self._nn = self._nb = self._bb = 0.0

    def learn(self, worked_s: float, requests: int, batches: int) -> None:
        """Learn from a sum.

        Args:
            worked_s: The seconds for which the coordinator has worked.
            requests: How many requests have come in that time.
            batches: How many batches have gone, at least one.
        """
        if worked_s <= 0.0:
            return
        n, b = requests / worked_s, batches / worked_s
        self._n, self._b = _KEEP * self._n + n, _KEEP * self._b + b
        self._nn, self._nb, self._bb = _KEEP * self._nn + n * n, _KEEP * self._nb + n * b, _KEEP * self._bb + b * b
        pull = _PULL * self._bb  # times (batch_s - _USUAL * request_s)², beside the squares of the sums
        nn, nb, bb = self._nn + pull * _USUAL**2, self._nb - pull * _USUAL, self._bb + pull
        determinant = nn * bb - nb * nb
        request_s = (bb * self._n - nb * self._b) / determinant
        batch_s = (nn * self._b - nb * self._n) / determinant
        if request_s < 0.0:
            request_s, batch_s = 0.0, self._b / self._bb
        elif batch_s < 0.0:
            request_s, batch_s = self._n / self._nn, 0.0
        self.request_s, self.batch_s = request_s, batch_s
