"""Metrics of the user's own, from all worker processes and from this one, as one set of metrics.

Counters and histograms are summed over all workers that there have been, so that they never fall;
gauges over those that live, and of what an Info or an Enum says each is there once. A histogram
whose bounds have changed, by a reload, starts anew with those of the workers that live.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import REGISTRY, Collector

from carpool.foreign import traceback_of
from carpool.logger import logger
from carpool.observe.log import printable
from carpool.worker.own_metrics import Family, families_of, read_all

_OURS = "carpool_"
_PREFIX = "carpool-metrics-"
_HISTOGRAM, _INFINITE = "histogram", "+Inf"
_ONCE = frozenset({"info", "stateset"})  # they say what is so, and not how often
_OF_NOW = _ONCE | {"gauge", "gaugehistogram"}


class _Found(NamedTuple):
    """One metric, as several processes have it.

    Attributes:
        living: Of the processes that count it and live.
        past: Of workers that have ended.
        imported: Of this process, if it has no stages and has only imported the module.
    """

    living: list[Family]
    past: list[Family]
    imported: list[Family]


class OwnMetricsOfWorkers(Collector):
    """The folder in which workers leave their metrics, and what is in it.

    Attributes:
        folder: Where it is; only this user may look into it.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        self._alive: frozenset[int] = frozenset()
        self._has_own_stages = True

    def seen(self, pids: Iterable[int], *, has_own_stages: bool = True) -> None:
        """Note which workers live now, and whether stages run in this process as well."""
        self._alive = frozenset(pids)
        self._has_own_stages = has_own_stages

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def collect(self) -> Iterator[Metric]:
        """Yield the user's metrics."""
        found: dict[str, _Found] = {}
        sources = [(0, _of_this_process()), *read_all(self.folder)]
        for pid, families in sources:
            is_living = self._has_own_stages if pid == 0 else pid in self._alive
            for family in families:
                if not family.name.startswith(_OURS):
                    of_name = found.setdefault(family.name, _Found([], [], []))
                    (of_name.living if is_living else of_name.past if pid else of_name.imported).append(family)
        for each in found.values():
            yield from _merged(each)


def _of_this_process() -> list[Family]:
    """Return the user's metrics of stages that run in this process."""
    try:
        return families_of(REGISTRY)
    except BaseException as error:  # collectors are the user's, and other metrics are wanted all the same
        logger.error("a collector of metrics raised:\n%s", printable(traceback_of(error)))
        return []


def _remove_abandoned() -> None:
    """Remove what servers of this user have left behind that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError):
            pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
            if folder.stat().st_uid == os.geteuid() and pid.isdigit() and not _is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _merged(found: _Found) -> Iterator[Metric]:
    """Yield one metric of several processes, unless it is of those that have ended only."""
    kind = (found.living or found.imported or found.past)[0].kind
    now = found.living or found.imported
    counted = now if kind in _OF_NOW else [*found.living, *found.past, *found.imported]
    families = [each for each in counted if each.kind == kind]
    if not families:
        return
    bounds = _common_bounds(found.living) or _common_bounds(families)
    numbers: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in families:
        if not bounds <= _bounds(family):
            continue
        for sample in family.samples:
            if kind == _HISTOGRAM and sample.labels.get("le", _INFINITE) not in bounds | {_INFINITE}:
                continue
            key = (sample.name, frozenset(sample.labels.items()))
            before = numbers.get(key, 0.0)
            numbers[key] = max(before, sample.value) if kind in _ONCE else before + sample.value
    metric = Metric(families[0].name, families[0].text, kind)
    for (name, labels), value in numbers.items():
        metric.add_sample(name, dict(labels), value)
    yield metric


def _common_bounds(families: list[Family]) -> frozenset[str]:
    """Return the bounds that all of these have which have any."""
    return frozenset.intersection(*([each for each in map(_bounds, families) if each] or [frozenset()]))


def _bounds(family: Family) -> frozenset[str]:
    """Return the bounds of a histogram that has counted anything; nothing for any other metric."""
    labels = [each.labels for each in family.samples if family.kind == _HISTOGRAM]
    return frozenset([each["le"] for each in labels if "le" in each])
