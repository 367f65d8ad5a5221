"""The numbers of a service in Ray's own metrics (`ray.util.metrics`).

Every few seconds a snapshot is sent. No request and no batch is counted there by itself, since that
takes about 2 µs a value.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from ray.util.metrics import Counter, Gauge

from carpool.engine.observe.snapshot import ServiceSnapshot
from carpool.engine.observe.stats import Stats
from carpool.engine.wire.handshake import Hello

TELL_EVERY_S: Final = 5.0
"""How often a snapshot is sent."""

_STAGE = ("model", "stage")
_WORKER = (*_STAGE, "worker", "host", "node", "actor", "device")

Tags = dict[str, str]

Where = Mapping[str, Mapping[int, Hello]]
"""By stage and place, the greetings of workers."""


def where_workers_are(stats: Stats) -> Where:
    """Return a copy of the greetings of the workers of a service."""
    return {stage.name: dict(stage.elsewhere) for stage in stats.stages}


class RayMetrics:
    """Ray's metrics of one service.

    Args:
        service: Its name.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._counted: dict[tuple[str, ...], float] = {}
        self._shown: dict[str, set[tuple[tuple[str, str], ...]]] = {}  # by gauge, the tags that stood last

    def tell(self, snapshot: ServiceSnapshot, where: Where) -> None:
        """Set and count all metrics by a snapshot.

        Args:
            snapshot: The numbers of the service.
            where: Where its workers run.
        """
        model = {"model": self._service}
        for outcome, n in snapshot.outcomes.items():
            self._count("carpool_requests", n, {**model, "outcome": outcome})
        self._show("carpool_in_flight_requests", [(model, snapshot.in_flight)])
        self._show("carpool_mean_latency_seconds", [(model, snapshot.mean_latency_s)])
        states: list[tuple[Tags, float]] = []
        queued: list[tuple[Tags, float]] = []
        sizes: list[tuple[Tags, float]] = []
        placed: list[tuple[Tags, float]] = []
        for stage in snapshot.stages:
            about = {**model, "stage": stage.name}
            self._count("carpool_batches", stage.batches, about)
            self._count("carpool_worker_restarts", stage.restarts, about)
            queued.append((about, stage.queued))
            sizes.append((about, stage.mean_batch_size))
            states += [({**about, "state": state}, n) for state, n in stage.workers.items()]
            for place, hello in where.get(stage.name, {}).items():
                tags = {name: getattr(hello, name) for name in ("host", "node", "actor", "device")}
                placed.append(({**about, "worker": str(place), **tags}, 1))
        self._show("carpool_queue_length", queued)
        self._show("carpool_mean_batch_size", sizes)
        self._show("carpool_workers", states)
        self._show("carpool_worker_info", placed)

    def end(self) -> None:
        for name in self._shown:
            self._show(name, [])

    def _count(self, name: str, total: float, tags: Tags) -> None:
        key = (name, *tags.values())
        more = total - self._counted.get(key, 0)
        if more > 0:
            self._counted[key] = total
            metric(name).inc(more, tags)

    def _show(self, name: str, values: list[tuple[Tags, float]]) -> None:
        """Set a gauge; a value that stood last and is there no more becomes 0."""
        now = {tuple(tags.items()): value for tags, value in values}
        for gone in self._shown.get(name, set()) - now.keys():
            metric(name).set(0, dict(gone))
        for tags, value in now.items():
            metric(name).set(value, dict(tags))
        self._shown[name] = set(now)


_COUNTERS = {
    "carpool_requests": ("Requests that have ended, by outcome.", ("model", "outcome")),
    "carpool_batches": ("Calls of the model.", _STAGE),
    "carpool_worker_restarts": ("Workers that have been replaced.", _STAGE),
}
_GAUGES = {
    "carpool_in_flight_requests": ("Requests that were admitted and have no answer yet.", ("model",)),
    "carpool_mean_latency_seconds": ("Mean time from admission to an answer without an error.", ("model",)),
    "carpool_queue_length": ("Requests that wait.", _STAGE),
    "carpool_mean_batch_size": ("Mean number of requests in a call of the model.", _STAGE),
    "carpool_workers": ("Workers by state.", (*_STAGE, "state")),
    "carpool_worker_info": ("1 for each worker; the tags say where it runs.", _WORKER),
}


@functools.cache
def metric(name: str) -> Any:
    """Return a metric of this process."""
    if name in _COUNTERS:
        return Counter(name, *_COUNTERS[name])
    return Gauge(name, *_GAUGES[name])
