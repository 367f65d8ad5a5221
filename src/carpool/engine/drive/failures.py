"""Failures and refusals in drivers: the outcome of a batch of a batch function, with the exceptions
that its callers get, smaller batches where memory ran out, and the log about refused requests,
which has a few lines for all.

An exception that several callers share goes to the first as it is and to the others as copies,
since each raise adds to its traceback. Some exceptions have a meaning for the code that calls,
awaits or iterates, and would mislead it here:

* StopIteration and StopAsyncIteration mean "this is the end": `map(f, xs)` would stop there in
  silence, and a future refuses the first one. They become a RuntimeError with the original as its
  cause, as in generators (PEP 479).
* GeneratorExit and CancelledError mean "you are being ended", which the caller is not. They become
  a ModelError.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec

from carpool.engine.call.results import Failed, Trouble, none_failed
from carpool.engine.clock import Clock
from carpool.engine.core.batcher import Batcher
from carpool.engine.logger import logger
from carpool.engine.observe.refusals import Refusals
from carpool.errors import ModelError


class BatchOutcome(msgspec.Struct):
    """The outcome of one batch of a batch function. A struct is made as fast as a tuple.

    Attributes:
        results: One for each item; any value where there is an error.
        errors: By position in the batch; None if no item failed.
        trouble: What happened besides, such as calls that ran out of memory.
        busy_s: Seconds of the call; in threads 0 if the whole batch failed.
    """

    results: Sequence[object]
    errors: dict[int, Exception] | None = None
    trouble: Sequence[Trouble] = ()
    busy_s: float = 0.0


def as_outcome(results: list[Any], trouble: Sequence[Trouble]) -> BatchOutcome:
    if none_failed(results):
        return BatchOutcome(results, None, trouble)
    failed = {i: value.error for i, value in enumerate(results) if type(value) is Failed}
    return BatchOutcome(results, _each_its_own(failed), trouble)


def for_all(error: BaseException, n: int) -> BatchOutcome:
    return BatchOutcome([None] * n, _each_its_own(dict.fromkeys(range(n), error)))


def _each_its_own(errors: dict[int, BaseException]) -> dict[int, Exception]:
    own: dict[int, Exception] = {}
    given: dict[int, Exception] = {}
    for i, error in errors.items():
        first = given.get(id(error))
        if first is None:
            own[i] = given[id(error)] = _to_be_raised(error)
        else:
            own[i] = _copy_of(first)
    return own


def _to_be_raised(error: BaseException) -> Exception:
    kind = type(error).__name__
    shown: Exception
    if isinstance(error, StopIteration | StopAsyncIteration):
        shown = RuntimeError(f"the batched function raised {kind}")
    elif isinstance(error, GeneratorExit | asyncio.CancelledError):
        shown = ModelError(f"the batch was broken off: {kind}", type_name=kind)
    else:
        return cast(Exception, error)
    shown.__cause__ = error
    return shown


def _copy_of(error: Exception) -> Exception:
    """Return a copy whose cause is the original, or the original if copying it fails."""
    try:
        twin = copy.copy(error)
        if type(twin) is not type(error):
            return error
        twin.__cause__ = error
    except BaseException:
        return error
    return twin


FAILED_FOR_S = 30.0
"""How long callers of a failed stage are asked to wait for the service to be restarted."""

NOTHING_MORE: Final[Mapping[str, str]] = MappingProxyType({})


def learn(
    name: str,
    batcher: Batcher,
    place: int,
    batch_id: int,
    trouble: Sequence[Trouble],
    about: Mapping[str, str] = NOTHING_MORE,
) -> None:
    """Learn from calls for parts of a batch that ran out of memory how much one call can hold.

    Raises:
        ValueError: The trouble is about a batch or items that the worker does not have.
    """
    before = batcher.safe_size.limit
    for each in trouble:
        if each.ran_out:
            batcher.ran_out_of_memory(place, batch_id, each.ran_out, each.fitted)
    if batcher.safe_size.limit < before:
        logger.warning(
            "%s ran out of memory: its batches hold at most %d%s from now on, and more again once that fits",
            name,
            batcher.safe_size.limit,
            " (their count times their longest length)" if batcher.limits_padded else "",
            extra=about,
        )


def learn_from_warm_up(batcher: Batcher, trouble: Sequence[Trouble]) -> None:
    """Learn the same from a worker's warm-up, in which every example counts for one."""
    for each in trouble:
        if each.ran_out and not batcher.limits_padded:  # else the lengths matter, which it does not say
            tried = min(map(len, each.ran_out))
            batcher.safe_size.ran_out(tried, max([n for n in map(len, each.fitted) if n < tried], default=0))


class RefusalLog:
    """Logs what `Refusals` have counted, as soon as it is due and until the service has stopped;
    `who` has refused, the server or a service, and `about` is what else is said of each line.
    """

    def __init__(
        self,
        refusals: Refusals,
        who: str,
        about: Mapping[str, str],
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._refusals = refusals
        self._who = who
        self._about = about
        self._clock = clock
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None  # for the next line
        self.has_stopped = False

    def log_due(self) -> None:
        self._log()
        wake_at = self._refusals.wake_at
        if wake_at < inf and not self.has_stopped and not self._loop.is_closed():
            self._timer = self._loop.call_later(max(0.0, wake_at - self._clock()), self.log_due)

    def log_all(self) -> None:
        self._log(everything=True)

    def _log(self, *, everything: bool = False) -> None:
        for line in self._refusals.take(self._clock(), everything=everything):
            level = logging.WARNING if line.reason.is_alarming else logging.INFO
            about = {**self._about, "code": line.reason.code, "requests": line.requests}
            logger.log(level, "%s %s", self._who, line, extra=about)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
