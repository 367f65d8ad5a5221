"""Metrics of the user's own, from all worker processes and from this one, as one set of metrics.

Counters and histograms are summed over all workers that there have been, so that they never fall;
gauges over those that live.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import REGISTRY, Collector

from carpool.foreign import traceback_of
from carpool.logger import logger
from carpool.observe.log import printable
from carpool.worker.own_metrics import Family, families_of, read_all

_OURS = "carpool_"
_PREFIX = "carpool-metrics-"


class OwnMetricsOfWorkers(Collector):
    """The folder in which workers leave their metrics, and what is in it.

    Attributes:
        folder: Where it is; only this user may look into it.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        self._alive: frozenset[int] = frozenset()

    def seen(self, pids: Iterable[int]) -> None:
        """Note which workers live now."""
        self._alive = frozenset(pids)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def collect(self) -> Iterator[Metric]:
        """Yield the user's metrics."""
        merged: dict[str, Metric] = {}
        sums: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Any]] = {}
        sources = [(0, _of_this_process()), *read_all(self.folder)]
        for pid, families in sources:
            for family in families:
                is_past = pid != 0 and pid not in self._alive
                if not family.name.startswith(_OURS) and not (is_past and family.kind == "gauge"):
                    _add(family, merged, sums)
        for name, metric in merged.items():
            for sample, value in sums[name].items():
                metric.add_sample(sample[0], dict(sample[1]), value)
            yield metric


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


def _add(family: Family, merged: dict[str, Metric], sums: dict[str, dict[Any, float]]) -> None:
    """Add the numbers of one process to a metric."""
    if family.name not in merged:
        merged[family.name] = Metric(family.name, family.text, family.kind)
        sums[family.name] = {}
    of_metric = sums[family.name]
    for sample in family.samples:
        key = (sample.name, frozenset(sample.labels.items()))
        of_metric[key] = of_metric.get(key, 0.0) + sample.value
