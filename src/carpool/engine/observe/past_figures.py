"""The figures of the last ten minutes, for whoever opens the dashboard after it has happened.

One sample is kept of each `EVERY_S` seconds, as JSON and without what only the latest figures are
shown of: some kilobytes a service. So the ring takes at most `MOST_BYTES`, however many there are.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import msgspec

EVERY_S: Final = 5.0
KEPT_S: Final = 600.0
MOST_BYTES: Final = 4 * 2**20
LATELY_S: Final = 10.0
"""How many seconds ago the figures are, at least, by which it is said what is wrong now."""
DEATHS_S: Final = 60.0
"""How many seconds a worker's death counts as a cause of that."""

_OF_A_SERVICE = ("name", "run", "outcomes", "latency", "within_slo", "slo_s", "streams")
_OF_A_STAGE = ("name", "batch_sizes", "queue", "compute", "idle_gap", "queued")


class PastFigures:
    """A bounded ring of figures, see `figures`, oldest first.

    Args:
        most_bytes: How many bytes of JSON are kept at most.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._samples: deque[tuple[float, bytes]] = deque()  # when, and the figures as JSON
        self._nbytes = 0
        self._latest: deque[dict[str, Any]] = deque()  # those of the last minute, whole

    def note(self, figures: dict[str, Any]) -> None:
        """Keep the figures of now."""
        now = figures["time"]
        sample = msgspec.json.encode({"time": now, "services": [_slim(each) for each in figures["services"]]})
        self._samples.append((now, sample))
        self._nbytes += len(sample)
        while self._samples and (self._nbytes > self._most_bytes or now - self._samples[0][0] > KEPT_S):
            self._nbytes -= len(self._samples.popleft()[1])
        self._latest.append(figures)
        while len(self._latest) > 1 and now - self._latest[1]["time"] >= DEATHS_S:
            self._latest.popleft()

    def before(self, now: float, ago_s: float = LATELY_S) -> dict[str, Any] | None:
        """Return the newest figures that are `ago_s` old, else the oldest; None without any."""
        found = None
        for each in self._latest:
            if found is None or now - each["time"] >= ago_s:
                found = each
        return found

    def as_json(self) -> bytes:
        """Return all samples as a list in JSON."""
        return b"[" + b",".join([sample for _, sample in self._samples]) + b"]"


def _slim(service: dict[str, Any]) -> dict[str, Any]:
    """Return of the figures of a service what is shown over time."""
    stages = [{name: stage[name] for name in _OF_A_STAGE} for stage in service["stages"]]
    return {**{name: service[name] for name in _OF_A_SERVICE}, "stages": stages}
