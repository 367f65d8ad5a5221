"""What the clocks of a service and of a worker on another machine differ by. Sans-IO.

Deadlines are by the monotonic clock of the service, which on another machine stands elsewhere. Each
batch says when it was made by that clock. It has been under way for an unknown time when it is
read, and this time was least where the difference of the two is least. So the least one counts, but
more and more of a later one is believed, since clocks drift apart.
"""

from __future__ import annotations

from typing import Final

_DRIFT: Final = 2e-4  # seconds a second: more than two quartz clocks do


class ClockOffset:
    """How far the clock of this machine is ahead of the service's.

    Attributes:
        offset_s: The best estimate, in seconds; never less than the truth at the time.
    """

    __slots__ = ("_at", "offset_s")

    def __init__(self) -> None:
        self.offset_s: float | None = None
        self._at = 0.0

    def heard(self, sent: float, now: float) -> None:
        """Learn from a message.

        Args:
            sent: When it was made, by the clock of the service.
            now: When it was heard, by the clock of this machine.
        """
        seen_s = now - sent
        if self.offset_s is None:
            self.offset_s = seen_s
        else:
            self.offset_s = min(seen_s, self.offset_s + _DRIFT * max(0.0, now - self._at))
        self._at = now
