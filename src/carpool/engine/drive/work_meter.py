"""How long the coordinator's thread works: measured ten times a second, for the views of policies.

That is the time for which it is on a core and, where Linux says so, waits for one: where cores are
shared, a batch takes as much longer to be written. Whatever else runs on the thread counts as well,
so time in which little has come teaches nothing.

The core counts requests and batches. From several sums of both follow the two numbers, work for a
request and for a batch besides, by the least squares of relative errors. Where batches have about
one size for a while, sums say nothing of how the work divides. So it is taken to divide as for a
service of a trivial model unless sums say otherwise.

No request and no batch reads a clock for it. Processor time alone is too little: with half of a
core, work takes twice as long.
"""

from __future__ import annotations

import os
from math import inf
from threading import get_ident
from time import thread_time
from typing import Final

from carpool.engine.core.core import Core

_EVERY_S: Final = 0.1  # a thread's time is no more than some milliseconds out; policies learn in seconds
_LONGEST_S: Final = 1.0  # in which `_LEAST` must have come
_LEAST: Final = 64  # requests and batches, some milliseconds of work
_QUEUE: Final = "/proc/thread-self/schedstat"  # its second number is in nanoseconds
_KEEP: Final = 0.95  # of the weight of former sums, at each new one
_USUAL: Final = 5.0  # requests that are as much work as a batch besides: 63 and 12 µs were measured
_PULL: Final = 0.02  # weight of that ratio beside the sums; noise of a tenth moves the numbers by as much


class OwnWork:
    """Learned seconds of the coordinator's work.

    Attributes:
        request_s: Seconds for each request; 0 while that is not known.
        batch_s: Seconds for each batch besides; likewise.
    """

    __slots__ = ("_b", "_bb", "_n", "_nb", "_nn", "batch_s", "request_s")

    def __init__(self) -> None:
        self.request_s = self.batch_s = 0.0
        self._n = self._b = self._nn = self._nb = self._bb = 0.0

    def learn(self, worked_s: float, requests: int, batches: int) -> None:
        """Learn from a sum.

        Args:
            worked_s: The seconds for which the coordinator has worked.
            requests: How many requests have come in that time.
            batches: How many batches have gone, at least one.
        """
        if worked_s <= 0.0:
            return
        n, b = requests / worked_s, batches / worked_s
        self._n, self._b = _KEEP * self._n + n, _KEEP * self._b + b
        self._nn, self._nb, self._bb = _KEEP * self._nn + n * n, _KEEP * self._nb + n * b, _KEEP * self._bb + b * b
        pull = _PULL * self._bb  # times (batch_s - _USUAL * request_s)², beside the squares of the sums
        nn, nb, bb = self._nn + pull * _USUAL**2, self._nb - pull * _USUAL, self._bb + pull
        determinant = nn * bb - nb * nb
        request_s = (bb * self._n - nb * self._b) / determinant
        batch_s = (nn * self._b - nb * self._n) / determinant
        if request_s < 0.0:
            request_s, batch_s = 0.0, self._b / self._bb
        elif batch_s < 0.0:
            request_s, batch_s = self._n / self._nn, 0.0
        self.request_s, self.batch_s = request_s, batch_s


class WorkMeter:
    """Measures the thread that drives a core, and gives the core what it works.

    Args:
        core: The core. Where it counts no batches, nothing is measured.

    Attributes:
        next_at: When `measure` is to be called next; infinity for never.
    """

    def __init__(self, core: Core) -> None:
        self.next_at = -inf if core.requests_and_batches is not None else inf
        self._core = core
        self._work = OwnWork()
        self._thread = 0
        self._since = -inf
        self._worked_s = 0.0
        self._requests = self._batches = 0

    def measure(self, now: float) -> None:
        """Learn from what the calling thread has done since the last time, if it was enough."""
        self.next_at = now + _EVERY_S
        counted = self._core.requests_and_batches
        assert counted is not None  # else this is not called
        requests, batches = counted
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
            self._core.note_work(work.request_s, work.batch_s)
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
