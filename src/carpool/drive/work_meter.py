"""How long the coordinator's thread works: measured ten times a second, for the views of policies.

That is the time for which it is on a core and, where Linux says so, waits for one: where cores are
shared, a batch takes as much longer to be written. Whatever else runs on the thread counts as well,
so time in which little has come teaches nothing.
"""

from __future__ import annotations

import os
from math import inf
from threading import get_ident
from time import thread_time
from typing import Final

from carpool.core.core import Core
from carpool.core.own_work import OwnWork

_EVERY_S: Final = 0.1  # a thread's time is no more than some milliseconds out; policies learn in seconds
_LONGEST_S: Final = 1.0  # in which `_LEAST` must have come
_LEAST: Final = 64  # requests and batches, some milliseconds of work
_QUEUE: Final = "/proc/thread-self/schedstat"  # its second number is in nanoseconds


class WorkMeter:
    """Measures the thread that drives a core, and gives the core what it works.

    Args:
        pipeline: The core. Where a stage answers in parts, no batch says what the work was for, and
            nothing is measured.

    Attributes:
        next_at: When `measure` is to be called next; infinity for never.
    """

    def __init__(self, pipeline: Core) -> None:
        self.next_at = -inf if pipeline.answers_in_batches else inf
        self._pipeline = pipeline
        self._work = OwnWork()
        self._thread = 0
        self._since = -inf
        self._worked_s = 0.0
        self._requests = self._batches = 0

    def measure(self, now: float) -> None:
        """Learn from what the calling thread has done since the last time, if it was enough."""
        self.next_at = now + _EVERY_S
        requests, batches = self._pipeline.requests_and_batches
        came, went = requests - self._requests, batches - self._batches
        is_new = now - self._since > _LONGEST_S or get_ident() != self._thread
        if not is_new and (came + went < _LEAST or not went):
            return
        try:
            before_s, self._worked_s = self._worked_s, worked_s()
        except OSError:  # say, no file can be opened now
            self._since = -inf
            return
        if not is_new:
            work = self._work
            work.learn(self._worked_s - before_s, came, went)
            self._pipeline.note_work(work.request_s, work.batch_s)
        self._thread, self._since, self._requests, self._batches = get_ident(), now, requests, batches


def worked_s() -> float:
    """Return for how many seconds this thread has been on a core, or has waited for one.

    Raises:
        OSError: The system does not say it now, although it does so mostly.
    """
    try:
        file = os.open(_QUEUE, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):  # no such system
        return thread_time()
    try:
        return thread_time() + int(os.read(file, 64).split()[1]) * 1e-9
    finally:
        os.close(file)
