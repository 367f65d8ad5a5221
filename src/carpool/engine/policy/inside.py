"""How many requests are in a stage at most, and whether that is always the same number.

In a closed loop whose clients come back at once, all of them are inside now and then. Once they
are, it is known that no other request comes before a batch ends. What is looked at is the greatest
number inside while some batches end, twice as many as there are workers: if two end soon after each
other, the clients of the first are not back yet.

Traffic that does not wait for answers has no such number: the greatest of a few Poisson counts
still deviates by about half of the root of the usual one. In a later stage requests may still come
from the one before it, and then a batch goes ahead that could have been larger.
"""

from __future__ import annotations

from math import sqrt

_WEIGHT = 0.1  # of a look
_FIRST = 10  # looks, of which the mean is taken, and without which nothing is known
_STEADY = 0.1  # of the root of the usual number: the deviation up to which it counts as always the same
_FEW = 0.02  # of the usual number: so many more or less do not count


class Inside:
    """Learns how many requests are inside when all clients are."""

    def __init__(self) -> None:
        self._usual = 0.0  # the smoothed number
        self._deviation = 0.0  # smoothed distance from it
        self._looks = 0
        self._most = self._ended = 0  # the greatest number since the last look, and how many batches have ended

    def note(self, inside: int, workers: int) -> None:
        """Note how many are inside when a batch ends, that of the batch included.

        Args:
            inside: So many requests.
            workers: How many run batches.
        """
        self._ended += 1
        if inside > self._most:
            self._most = inside
        if self._ended >= 2 * workers:
            self._look(self._most)
            self._most = self._ended = 0

    def _look(self, most: int) -> None:
        """Learn from the greatest number since the last look."""
        self._looks += 1
        if self._looks == 1:
            self._usual = most
        distance = most - self._usual
        weight = max(_WEIGHT, 1.0 / self._looks)
        self._usual += weight * distance
        self._deviation += weight * (abs(distance) - self._deviation)

    @property
    def clients(self) -> float:
        """How many clients there are, if all are inside now and then; 0 if that is not known."""
        is_steady = self._looks >= _FIRST and self._deviation <= _STEADY * sqrt(self._usual)
        return self._usual if is_steady else 0.0

    def are_all(self, inside: int) -> bool:
        """Report whether all clients are inside, so that no request comes before a batch ends."""
        usual = self.clients
        return usual > 0.0 and abs(usual - inside) <= max(0.5, _FEW * usual)
