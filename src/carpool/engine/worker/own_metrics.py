"""Metrics of the user's own that change in a worker process, on their way to `/metrics`.

A worker gives away the present values of its model's metrics at most every `EVERY_S` seconds. One
on the machine of its service writes them into a file of its own. One that has come over the network
sends them when it has nothing to do, or behind an answer (`remote.py`). The service's process puts
together what all workers say when somebody asks (`observe/own_metrics.py`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

FOLDER_VARIABLE = "CARPOOL_METRICS_FOLDER"
"""The variable of the environment that says where a worker writes its metrics."""

EVERY_S = 0.3
"""How many seconds there are between two reports of a worker's metrics, at least."""

OF_NOW = frozenset({"info", "stateset", "gauge", "gaugehistogram"})
"""Kinds of metrics that say what is so now, so that those of a worker that has ended are void."""

_OF_THE_PROCESS = ("python_", "process_")  # prometheus_client's own, which cannot be summed


class OwnSample(msgspec.Struct, frozen=True):
    """One number of a sample such as `tokens_total`, and its labels."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True):
    """One metric of the user's, without the endings of its samples; `kind` is counter, gauge,
    histogram or summary, and `mode` a gauge's `multiprocess_mode`.
    """

    name: str
    text: str
    kind: str
    samples: list[OwnSample]
    mode: str = ""

    @property
    def bounds(self) -> frozenset[str]:
        """The bounds of a histogram that has counted anything; nothing for any other metric."""
        labels = [each.labels for each in self.samples if self.kind == "histogram"]
        return frozenset([each["le"] for each in labels if "le" in each])


def families_of(registry: Any) -> list[Family]:
    collectors = getattr(registry, "_names_to_collectors", {})
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [
                OwnSample(sample.name, dict(sample.labels), float(sample.value))
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ],
            str(getattr(collectors.get(metric.name), "_multiprocess_mode", "")),
        )
        for metric in registry.collect()
        if not metric.name.startswith(_OF_THE_PROCESS)
    ]


class OwnMetrics:
    """Gives a worker's metrics away, now and then.

    Args:
        keep: Is given the metrics as bytes.
        registry: Of prometheus_client.
    """

    def __init__(self, keep: Callable[[bytes], None], registry: Any) -> None:
        self._keep = keep
        self._registry = registry
        self._written = b""
        self._is_due = False
        self._lock = threading.Lock()

    def note(self) -> None:
        if not self._is_due:
            self._is_due = True
            timer = threading.Timer(EVERY_S, self.write)
            timer.daemon = True
            timer.start()

    def keep_writing(self) -> None:
        """Write again and again, for a model that answers in parts and is never done."""

        def write_and_wait() -> None:
            while True:
                time.sleep(EVERY_S)
                self.write()

        threading.Thread(target=write_and_wait, daemon=True).start()

    def write(self) -> None:
        self._is_due = False
        with self._lock:
            try:
                data = msgspec.msgpack.encode(families_of(self._registry))
                if data == self._written:
                    return
                self._keep(data)
                self._written = data
            except BaseException:  # collectors are the user's, and the service may be ending
                return


def are_wanted() -> bool:
    """Report whether a server in this process shows the metrics of its workers."""
    return bool(os.environ.get(FOLDER_VARIABLE))


def own_metrics(keep: Callable[[bytes], None]) -> OwnMetrics | None:
    """Return what gives this worker's metrics away, and has done so once; None without any."""
    client = sys.modules.get("prometheus_client")
    if client is None:
        return None
    found = OwnMetrics(keep, client.REGISTRY)
    found.write()
    return found


def metrics_in_file(stage: str, place: int) -> OwnMetrics | None:
    """Return what writes this worker's metrics; None if nobody wants them, or there are none."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return None
    name = "".join(c if c.isalnum() else "_" for c in stage)
    return own_metrics(partial(write_file, os.path.join(folder, f"{name}.{place}.{os.getpid()}")))


def write_file(path: str, data: bytes) -> None:
    """Write a file that is never seen half written."""
    with open(f"{path}.new", "wb") as file:
        file.write(data)
    os.replace(f"{path}.new", path)


def read_all(folder: str) -> Iterable[tuple[str, int, list[Family]]]:
    """Yield path, process and metrics of each file in a folder, if it is still there."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # by what cleans /tmp, or by a server in another container on it
        return
    for name in names:
        pid = name.rpartition(".")[2]
        if not pid.isdigit():
            continue
        path = os.path.join(folder, name)
        try:
            with open(path, "rb") as file:
                yield path, int(pid), msgspec.msgpack.decode(file.read(), type=list[Family])
        except (OSError, msgspec.DecodeError):
            continue
