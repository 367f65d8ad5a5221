"""How fast requests come: over a short and a long window, both measured up to now, so that silence counts too."""

from __future__ import annotations

from collections import deque

_SHORT, _LONG = 32, 256  # arrivals


class ArrivalRate:
    """Requests per second, by the last arrivals."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_LONG + 1)

    def add(self, now: float) -> None:
        """A request has arrived."""
        self._times.append(now)

    def long(self, now: float) -> float:
        """Per second, by the last 256; 0 until there are two."""
        times = self._times
        return (len(times) - 1) / max(now - times[0], 1e-9) if len(times) > 1 else 0.0

    def short(self, now: float) -> float:
        """Per second, by the last 32."""
        times = self._times
        if len(times) <= _SHORT:
            return self.long(now)
        return _SHORT / max(now - times[-_SHORT - 1], 1e-9)
