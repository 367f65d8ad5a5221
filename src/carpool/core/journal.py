"""What happened to each request, in order: a bounded record for tests and for people who debug.

It is off by default; the pipeline then has no journal at all, so that it costs one comparison per
event.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from carpool.request import Request


@dataclass(frozen=True, slots=True)
class Entry:
    """One event in the life of a request.

    Attributes:
        at: When it happened, by the clock of the service.
        after_s: How many seconds that was after the request came, or after the first of its events
            that is still remembered.
        event: What happened.
        stage: The name of the stage in which it happened; empty where it was in none.
        detail: What else is known.
    """

    at: float
    after_s: float
    event: str
    stage: str
    detail: str

    def __str__(self) -> str:
        words = (f"{self.after_s:.6f}", self.event, self.stage, self.detail)
        return " ".join([word for word in words if word])


class Journal:
    """The last `max_entries` events of a service, oldest first."""

    def __init__(self, max_entries: int = 10_000) -> None:
        self._entries: deque[tuple[int, float, str, str, str]] = deque(maxlen=max_entries)

    def record(self, now: float, event: str, request_id: int, stage: str = "", detail: str = "") -> None:
        """Note that `event` happened to the request."""
        self._entries.append((request_id, now, event, stage, detail))

    def story(self, request_id: int | None = None) -> list[Entry]:
        """Return the events of one request, or of the latest, that are still recorded, in order."""
        entries = list(self._entries)
        if request_id is None:
            request_id = max((owner for owner, *_ in entries), default=0)
        found = [each for each in entries if each[0] == request_id]
        return [Entry(at, at - found[0][1], event, stage, detail) for _, at, event, stage, detail in found]


def parts_so_far(now: float, request: Request) -> str:
    """Return how many parts of its answer a request has had; empty if it has had none."""
    stream = request.stream
    if stream is None or not stream.parts:
        return ""
    silent_s = now - stream.heard
    ago = f", the last one {silent_s:.3f} s ago" if silent_s >= 0.001 else ""
    return f"after {stream.parts} part{'s' if stream.parts > 1 else ''}{ago}"
