"""Metrics of the user's own, from all worker processes and from this one, as one set of metrics.

Counters and histograms are summed over all workers that there have been, so that they never fall;
gauges over those that live, unless their `multiprocess_mode` asks for the largest or the smallest;
and of what an Info or an Enum says each is there once. A histogram whose bounds have changed, by a
reload, starts anew with those of the workers that live. Workers on this machine leave files in a
folder, and those elsewhere send messages (`stats.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import add
from pathlib import Path
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import REGISTRY, Collector

from carpool.engine.foreign import traceback_of
from carpool.engine.logger import logger
from carpool.engine.observe.log import printable
from carpool.engine.observe.stats import Counted, SentMetrics
from carpool.engine.worker.own_metrics import OF_NOW, Family, families_of, read_all

_OURS = "carpool_"
_PREFIX = "carpool-metrics-"
_HISTOGRAM, _INFINITE = "histogram", "+Inf"
_YOUNG_S = 60.0  # a folder may have been made and not locked yet
_JOINS: dict[str, Callable[[float, float], float]] = {"max": max, "livemax": max, "min": min, "livemin": min}
_ONCE = frozenset({"info", "stateset"})  # they say what is so, and not how often


class _Found(NamedTuple):
    """Metrics, as several processes have them.

    Attributes:
        living: Of the processes that count them and live.
        past: Of workers that have ended.
        imported: Of this process, if it has no stages and has only imported the module.
    """

    living: list[Family]
    past: list[Family]
    imported: list[Family]


class OwnMetricsOfWorkers(Collector):
    """The folder in which workers leave their metrics, into which only this user may look."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        self._lock = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # while this process lives
        self._alive: frozenset[int] = frozenset()
        self._has_own_stages = True
        self._sent: Sequence[SentMetrics] = ()
        self._past = Counted()  # of workers on this machine

    def seen(self, pids: Iterable[int], sent: Sequence[SentMetrics] = (), *, has_own_stages: bool = True) -> None:
        """Note which workers live now: their `pids` on this machine, and what those elsewhere have
        sent, of each stage.
        """
        self._alive = frozenset(pids)
        self._sent = sent
        self._has_own_stages = has_own_stages

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def collect(self) -> Iterator[Metric]:
        here = _of_this_process()
        all_ = _Found(here, [], []) if self._has_own_stages else _Found([], [], here)
        for path, pid, families in read_all(self.folder):
            if pid in self._alive:
                all_.living.extend(families)
            elif _is_alive(pid):  # it is just starting, or ending
                all_.past.extend(families)
            else:
                self._past.add(families)
                with contextlib.suppress(OSError):
                    os.unlink(path)
        for sent in self._sent:
            all_.living.extend(chain(*sent.living()))
            all_.past.extend(sent.past.families())
        all_.past.extend(self._past.families())
        found: dict[str, _Found] = {}
        for i, families in enumerate(all_):
            for family in families:
                if not family.name.startswith(_OURS):
                    found.setdefault(family.name, _Found([], [], []))[i].append(family)
        for each in found.values():
            yield from _merged(each)


def _of_this_process() -> list[Family]:
    try:
        return families_of(REGISTRY)
    except BaseException as error:  # collectors are the user's, and other metrics are wanted all the same
        logger.error("a collector of metrics raised:\n%s", printable(traceback_of(error)))
        return []


def _remove_abandoned() -> None:
    """Remove what servers of this user have left behind that were killed.

    The lock says whether a server lives, also of one in another container with the same folder for
    temporary files, where process ids mean nothing.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _YOUNG_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError if its server lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _merged(found: _Found) -> Iterator[Metric]:
    kind = (found.living or found.imported or found.past)[0].kind
    now = found.living or found.imported
    counted = now if kind in OF_NOW else [*found.living, *found.past, *found.imported]
    families = [each for each in counted if each.kind == kind]
    if not families:
        return
    bounds = _common_bounds(found.living) or _common_bounds(families)
    join: Callable[[float, float], float] = max if kind in _ONCE else _JOINS.get(families[0].mode, add)
    numbers: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in families:
        if not bounds <= family.bounds:
            continue
        for sample in family.samples:
            if kind == _HISTOGRAM and sample.labels.get("le", _INFINITE) not in bounds | {_INFINITE}:
                continue
            key = (sample.name, frozenset(sample.labels.items()))
            numbers[key] = join(numbers[key], sample.value) if key in numbers else sample.value
    try:
        metric = Metric(families[0].name, families[0].text, kind)
    except ValueError:  # a kind that there is not, from a worker elsewhere
        return
    for (name, labels), value in numbers.items():
        metric.add_sample(name, dict(labels), value)
    yield metric


def _common_bounds(families: list[Family]) -> frozenset[str]:
    return frozenset.intersection(*([family.bounds for family in families if family.bounds] or [frozenset()]))
