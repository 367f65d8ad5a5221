"""How much backlog is worth keeping while more arrives than can be served.

With the capacity μ and batches of t seconds, what waits beyond μ·(S - t), or beyond the full
batches that fit into the SLO S one after the other if that is more, can never be served in time. So
dropping the oldest of it costs nothing and makes room for requests that can be. And the longer an
overload lasts, the less likely it is to end just now, when a backlog would still be of use (Lindy's
law; CoDel, Nichols & Jacobson 2012, drops by the same reasoning): so the part that is kept shrinks
with time, down to what a full batch and the scatter of arrivals need. That trades a little goodput,
in bursts that end soon, for much lower latency in those that do not; `overload` chooses the side.

Clients in a closed loop come no faster than they are served, so their backlog stands instead of
growing, with its head at the very edge of the SLO, where noise makes many of the answers late. A
backlog that has stood for long (CoDel's sign of a bad queue) does not drain by itself: requests at
the edge are refused as long as others fill the batches.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

_PATIENCE = {"goodput": (8.0, 0.25), "latency": (0.5, 0.0)}
"""After how many SLOs half of the servable backlog is kept, and the least share of it that is."""
_STANDS = 2.0  # SLOs without a look that finds no more than one batch for each worker: then it stands
_SURE = 2.5  # almost no batch exceeds its expected time by this many coefficients of variation
_CLOSE = 0.1  # of a batch's time: workers that are free this soon after each other are free together
_LEARN = 0.1  # weight of a look
_NEARLY = 0.1  # of a batch: the last one that fits in may take this much longer, as costs are not exact


class Pace(NamedTuple):
    """How fast work comes and how fast it goes, in units of the requests' sizes.

    Attributes:
        arriving: How much comes per second.
        capacity: How much all workers together can serve per second.
        workers: How many there are.
        batch: The working size of a batch.
        batch_s: The expected seconds of a batch of that size.
        noise: The coefficient of variation of that time.
    """

    arriving: float
    capacity: float
    workers: int
    batch: int
    batch_s: float
    noise: float

    @property
    def surely_s(self) -> float:
        """Seconds that almost no batch exceeds."""
        return self.batch_s * (1.0 + _SURE * self.noise)


class Backlog:
    """Notices overloads.

    Attributes:
        overloaded_since: When the present overload was noticed; None if there is none.
    """

    def __init__(self) -> None:
        self.overloaded_since: float | None = None
        self._standing_since: float | None = None
        self._looked_at = 0.0
        self._followed = 0.0  # smoothed share of the looks that came close after another one

    def drained(self) -> None:
        """Note that the backlog does not stand: the next batches take all of it."""
        self._standing_since = None

    def calm(self) -> None:
        """Note that the overload is over."""
        self.overloaded_since = None

    def keep(self, now: float, waiting: int, pace: Pace, slo_s: float, onward_s: float, overload: str) -> int:
        """Return how much of what waits is worth keeping, in units of the requests' sizes.

        Args:
            now: The time.
            waiting: How much waits.
            pace: How fast work comes and goes.
            slo_s: The SLO of the head.
            onward_s: How much of the SLO is needed after this stage.
            overload: "goodput" or "latency".
        """
        here_s = slo_s - onward_s
        servable = pace.capacity * (here_s - pace.batch_s)
        if self.overloaded_since is None and waiting > 0.5 * servable:
            self.overloaded_since = now
        if self.overloaded_since is None:
            return waiting
        patience, least = _PATIENCE[overload]
        share = max(least, 1.0 / (1.0 + (now - self.overloaded_since) / (patience * slo_s)))
        batches = int(here_s / (pace.batch_s * (1.0 + pace.noise)) + _NEARLY) * pace.workers
        return max(self._needed(pace), int(max(servable, batches * pace.batch) * share))

    def look(self, now: float, waiting: int, pace: Pace, slo_s: float) -> int:
        """Note how much waits, and return how much of it to refuse because the backlog stands.

        That part may be in time, but is not needed to keep the workers busy.

        Args:
            now: The time.
            waiting: How much waits.
            pace: How fast work comes and goes.
            slo_s: The SLO of the head.
        """
        gap_s = now - self._looked_at
        silent = gap_s > slo_s  # what has become of the backlog meanwhile is not known
        self._looked_at = now
        self._followed += _LEARN * ((gap_s < _CLOSE * pace.batch_s) - self._followed)
        if waiting <= pace.batch * pace.workers:
            self._standing_since = None
        elif self._standing_since is None or silent:
            self._standing_since = now
        elif now - self._standing_since > _STANDS * slo_s:
            return max(0, waiting - self._needed(pace))
        return 0

    def _needed(self, pace: Pace) -> int:
        """Return what a full batch of each worker needs, and chance may keep from the next one."""
        # Workers that become free together: as many as by chance, or more if they are in step.
        at_once = max(sqrt(pace.workers), 1.0 / max(1.0 - self._followed, 1.0 / pace.workers))
        meanwhile = pace.arriving * pace.batch_s / pace.workers * at_once  # comes while each runs one batch
        batch = pace.batch * at_once
        return int(batch + max(0.0, batch - meanwhile + 2.0 * sqrt(meanwhile))) + 1
