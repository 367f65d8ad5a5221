"""How much backlog is worth keeping while more arrives than can be served.

What waits beyond μ·(S - t), or beyond the full batches that fit into the SLO S one after the other if that is more, can
never be served in time, so dropping the oldest of it costs nothing and makes room for requests that can be. And the
longer an overload lasts, the less likely it is to end just now, when a backlog would still be of use (Lindy's law;
CoDel, Nichols & Jacobson 2012, drops by the same reasoning): so the part that is kept shrinks with time, down to what a
full batch and the scatter of arrivals need. That trades a little goodput, in bursts that end soon, for much lower
latency in those that do not; `overload` chooses the side.
"""

from __future__ import annotations

from math import sqrt

_PATIENCE = {"goodput": (8.0, 0.25), "latency": (0.5, 0.0)}
"""SLOs after which half of the servable backlog is kept, and the least share of it that is."""
_NEARLY = 0.1  # of a batch: the last one that fits in may take so much longer, as a learned cost is never exact


class Backlog:
    """Notices overloads.

    Attributes:
        overloaded_since: when the present one was noticed; None if there is none.
    """

    def __init__(self) -> None:
        self.overloaded_since: float | None = None

    def calm(self) -> None:
        """The overload is over."""
        self.overloaded_since = None

    def keep(
        self, now: float, waiting: int, batch: int, batch_s: float, arriving: float, capacity: float, workers: int,
        slo_s: float, room_s: float, noise: float, overload: str,
    ) -> int:  # fmt: skip
        """How much of what waits is worth keeping, in units of the requests' sizes.

        Args:
            now: the time.
            waiting: how much waits.
            batch, batch_s: the working size of a batch, and its time.
            arriving, capacity: how much comes and how much can be served, per second, by all `workers`.
            slo_s: the SLO of the head; room_s: what a full batch leaves of it for waiting.
            noise: coefficient of variation of the time of a batch.
            overload: "goodput" or "latency".
        """
        if self.overloaded_since is None and waiting > 0.5 * capacity * room_s:
            self.overloaded_since = now
        if self.overloaded_since is None:
            return waiting
        patience, least = _PATIENCE[overload]
        share = max(least, 1.0 / (1.0 + (now - self.overloaded_since) / (patience * slo_s)))
        at_once = sqrt(workers)  # workers that become free at the same time, when they are neither in step nor spread
        meanwhile = arriving * batch_s / workers * at_once  # comes while one batch of each of them runs
        needed = int(batch * at_once + max(0.0, batch * at_once - meanwhile + 2.0 * sqrt(meanwhile))) + 1
        batches = int((room_s + batch_s) / (batch_s * (1.0 + noise)) + _NEARLY) * workers
        servable = max(capacity * room_s, batches * batch)
        return max(needed, int(servable * share))
