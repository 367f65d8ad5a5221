"""How a worker process tells, through a small file, its times in calls and between them.

The same on both sides, since it is the model's own clock: what lies between two calls is getting
rid of the answers and getting at the next batch. Of that, idle is what is not processor time of the
thread that calls the model: it waited, for the next batch, for the lock of the interpreter or for a
core.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

FOLDER = "BENCH_CLOCKS"  # the variable that names the folder of the files
_LAYOUT = struct.Struct("5d")


class Times(NamedTuple):
    """Sums since the start, of one worker or of all."""

    batches: float = 0.0
    items: float = 0.0
    call_s: float = 0.0
    between_s: float = 0.0
    between_cpu_s: float = 0.0


class Clock:
    """To be made in the worker; `begin` and `end` go around each call."""

    def __init__(self) -> None:
        path = Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="cb-clocks-"), f"{os.getpid()}.clock")
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._batches = self._items = 0
        self._call_s = self._between_s = self._between_cpu_s = 0.0
        self._ended = self._ended_cpu = 0.0

    def begin(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        if self._batches:
            self._between_s += now - self._ended
            self._between_cpu_s += cpu - self._ended_cpu
        self._began = now

    def end(self, items: int) -> None:
        now = time.perf_counter()
        self._batches += 1
        self._items += items
        self._call_s += now - self._began
        _LAYOUT.pack_into(
            self._memory, 0, self._batches, self._items, self._call_s, self._between_s, self._between_cpu_s
        )
        self._ended, self._ended_cpu = time.perf_counter(), time.thread_time()


def read_all() -> Times:
    """The sums over all workers that tell in the folder of the environment."""
    folder = os.environ.get(FOLDER)
    found = [_LAYOUT.unpack(path.read_bytes()) for path in Path(folder).glob("*.clock")] if folder else []
    return Times(*map(sum, zip(*found, strict=True))) if found else Times()
