"""The lines of the log about refused and late requests: not one for each, but a few for all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from math import inf

from carpool.engine.clock import Clock
from carpool.engine.logger import logger
from carpool.engine.observe.refusals import Refusals


class RefusalLog:
    """Logs what `Refusals` have counted, as soon as it is due.

    Args:
        refusals: What has been counted.
        who: Who has refused: the server, or a service by its name.
        about: What else is said of each line.
        clock: Monotonic seconds.
        loop: The one that the service runs on.

    Attributes:
        has_stopped: Whether the service has: then nothing is told later any more.
    """

    def __init__(
        self,
        refusals: Refusals,
        who: str,
        about: Mapping[str, str],
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._refusals = refusals
        self._who = who
        self._about = about
        self._clock = clock
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None  # for the next line
        self.has_stopped = False

    def tell(self) -> None:
        """Log what is due, and see to it that the rest is told in time."""
        self._log()
        wake_at = self._refusals.wake_at
        if wake_at < inf and not self.has_stopped and not self._loop.is_closed():
            self._timer = self._loop.call_later(max(0.0, wake_at - self._clock()), self.tell)

    def tell_all(self) -> None:
        """Log all that has been counted, also what is not due yet."""
        self._log(everything=True)

    def _log(self, *, everything: bool = False) -> None:
        for line in self._refusals.take(self._clock(), everything=everything):
            level = logging.WARNING if line.reason.is_alarming else logging.INFO
            about = {**self._about, "code": line.reason.code, "requests": line.requests}
            logger.log(level, "%s %s", self._who, line, extra=about)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
