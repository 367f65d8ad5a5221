"""What a worker notes of its calls, where another process can read it: counters in a shared file.

A server of any kind runs our model in processes of its own, so no server is asked for the figures.
Standard library only, since it runs in the environments of other servers, too.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = "BENCH_GPU_METERS"
"""The environment variable that names the folder; without it nothing is noted."""


@dataclass(slots=True)
class Counts:
    """Sums over the calls of one worker, or of several.

    Attributes:
        calls: How many calls have ended.
        items: How many items they had.
        stack_s: Seconds in which items were put into one block, on the host.
        in_s: Seconds in which that block was copied to the device.
        compute_s: Seconds in which the device computed.
        out_s: Seconds in which results were copied back.
        call_s: Seconds of whole calls, by the host's clock.
        gap_s: Seconds between the end of a call and the beginning of the next one.
        cpu_s: Processor seconds of the worker's process.
        memory: Bytes of the device's memory at the most.
    """

    calls: float = 0
    items: float = 0
    stack_s: float = 0
    in_s: float = 0
    compute_s: float = 0
    out_s: float = 0
    call_s: float = 0
    gap_s: float = 0
    cpu_s: float = 0
    memory: float = 0

    def __sub__(self, before: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


_FORM = struct.Struct(f"{len(fields(Counts))}d")


class Meter:
    """The counters of this worker."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._ended = 0.0
        self._began = 0.0
        self._map: mmap.mmap | None = None
        if folder := os.environ.get(FOLDER):
            path = Path(folder, str(os.getpid()))
            path.write_bytes(bytes(_FORM.size))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _FORM.size)

    def begin(self) -> None:
        """A call begins."""
        self._began = time.perf_counter()
        if self._ended:
            self.counts.gap_s += self._began - self._ended

    def end(self, items: int, memory: int = 0) -> None:
        """The call has ended."""
        counts = self.counts
        self._ended = time.perf_counter()
        counts.calls += 1
        counts.items += items
        counts.call_s += self._ended - self._began
        counts.cpu_s = time.process_time()
        counts.memory = memory
        if self._map is not None:
            _FORM.pack_into(self._map, 0, *(getattr(counts, each.name) for each in fields(counts)))


def read(folder: Path) -> Counts:
    """Return the sums over all workers that note there."""
    found = Counts()
    for path in folder.iterdir():
        found = found + Counts(*_FORM.unpack(path.read_bytes()))
    return found
