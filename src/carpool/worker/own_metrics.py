"""Metrics of the user's own that change in a worker process, on their way to `/metrics`.

A model makes counters, gauges and histograms of prometheus_client as in any program. A worker that
has loaded such a model writes their present values into a file of its own, at most every
`_EVERY_S` seconds and not while it answers; the service's process reads the files of all workers
when somebody asks (`observe/own_metrics.py`). A worker that has loaded no prometheus_client does
nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec

FOLDER_VARIABLE = "CARPOOL_METRICS_FOLDER"
"""The variable of the environment that says where a worker writes its metrics."""

_EVERY_S = 0.3
_OF_THE_PROCESS = ("python_", "process_")  # prometheus_client's own, which cannot be summed


class OwnSample(msgspec.Struct, frozen=True):
    """One number.

    Attributes:
        name: Of the sample, such as `tokens_total`.
        labels: Its labels.
        value: The number.
    """

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True):
    """One metric.

    Attributes:
        name: Of the metric, without the endings of its samples.
        text: What it is.
        kind: Counter, gauge, histogram or summary.
        samples: Its numbers.
    """

    name: str
    text: str
    kind: str
    samples: list[OwnSample]


def families_of(registry: Any) -> list[Family]:
    """Return the user's metrics in a registry of prometheus_client."""
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
        )
        for metric in registry.collect()
        if not metric.name.startswith(_OF_THE_PROCESS)
    ]


class OwnMetrics:
    """Writes a worker's metrics into its file, now and then.

    Args:
        path: The file.
        registry: Of prometheus_client.
    """

    def __init__(self, path: str, registry: Any) -> None:
        self._path = path
        self._registry = registry
        self._written = b""
        self._is_due = False
        self._lock = threading.Lock()

    def note(self) -> None:
        """Note that the model was called: what it counts is written soon."""
        if not self._is_due:
            self._is_due = True
            timer = threading.Timer(_EVERY_S, self.write)
            timer.daemon = True
            timer.start()

    def keep_writing(self) -> None:
        """Write again and again, for a model that answers in parts and is never done."""

        def write_and_wait() -> None:
            while True:
                time.sleep(_EVERY_S)
                self.write()

        threading.Thread(target=write_and_wait, daemon=True).start()

    def write(self) -> None:
        """Write the metrics if they have changed."""
        self._is_due = False
        with self._lock:
            try:
                data = msgspec.msgpack.encode(families_of(self._registry))
                if data == self._written:
                    return
                with open(f"{self._path}.new", "wb") as file:
                    file.write(data)
                os.replace(f"{self._path}.new", self._path)
                self._written = data
            except BaseException:  # collectors are the user's, and the service may be ending
                return


def own_metrics(stage: str, place: int) -> OwnMetrics | None:
    """Return what writes this worker's metrics; None if nobody wants them, or there are none."""
    folder = os.environ.get(FOLDER_VARIABLE)
    client = sys.modules.get("prometheus_client")
    if not folder or client is None:
        return None
    name = "".join(c if c.isalnum() else "_" for c in stage)
    found = OwnMetrics(os.path.join(folder, f"{name}.{place}.{os.getpid()}"), client.REGISTRY)
    found.write()
    return found


def read_all(folder: str) -> Iterable[tuple[int, list[Family]]]:
    """Yield the process and the metrics of each file in a folder, if it is still there."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # by what cleans /tmp, or by a server in another container on it
        return
    for name in names:
        pid = name.rpartition(".")[2]
        if not pid.isdigit():
            continue
        try:
            with open(os.path.join(folder, name), "rb") as file:
                yield int(pid), msgspec.msgpack.decode(file.read(), type=list[Family])
        except (OSError, msgspec.DecodeError):
            continue
