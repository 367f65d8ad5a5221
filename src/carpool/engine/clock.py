"""Where time comes from. The core takes `now` as an argument; only drivers own a clock."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns the seconds of a clock that never goes back, from an arbitrary zero."""

monotonic: Clock = time.monotonic


class VirtualClock:
    """A clock that moves only when it is set: the time of tests and of the simulator."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance_to(self, when: float) -> None:
        """Move to `when`; a time in the past leaves the clock where it is."""
        self.now = max(self.now, when)
