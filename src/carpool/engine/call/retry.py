"""A batch call that fails is made again in parts: smaller ones if memory ran out, halves to find
the guilty items.

Memory is a matter of size: the whole batch is run again in calls that fit, and the size that failed
is reported (`Trouble`), so that later batches are smaller. Any other error is a matter of some
items: only what failed is halved, breadth first, until the guilty items are alone. Of n items with
one guilty that takes 1 + 2·log2(n) calls.

Where the four quarters of a batch all fail, either many items are guilty or the model is broken.
Items run by themselves show which, one of each quarter in turn. Once some have succeeded, the rest
is run one by one if more than a quarter of them failed, and is halved further if not. If none
succeeds, the rest fails with the error of its quarter. Each time fewer items are tried in the next
such batch (`MOST_PROBES` down to `SUSPECT_PARTS`), so a broken model soon costs no more than eleven
calls a batch.

Running items again takes time for which others wait. So it ends when no caller waits for the batch
any more (`until`), and may take only a share of the time: a batch that raises while that share is
used up fails as a whole.

A model that has returned a wrong number of results may be written for one item, and its list of
five results for one be taken for the answers to five. So the next number of several that fits is
not trusted: the batch is run again in halves, and fails as a whole if one of them does not fit.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any, NamedTuple

from carpool.engine.call.results import (
    UNCHANGING,
    Again,
    Failed,
    Miscount,
    Own,
    Trouble,
    as_it_is,
    as_results,
    doubted,
    is_bad_result,
    run_now,
)
from carpool.engine.clock import Clock, monotonic
from carpool.engine.rows import first

SUSPECT_PARTS = 4
"""The model may be broken if this many parts of a batch fail and none succeeds."""

MOST_PROBES = 32
"""How many items are then tried by themselves before the model counts as broken; half as many after
each such batch.
"""

RERUN_PER_S = 100.0
"""How many seconds of running batches again are earned with each second that passes otherwise."""

MOST_RERUN_S = 60.0
"""The most of these seconds that can be saved up; a worker starts with as many."""


Pad = Callable[[list[Any]], list[Any]]
"""Returns items with more of them behind, that are there only to be as many as a call takes."""


class Retrier:
    """Makes batch calls, and makes them again in parts where they fail.

    Args:
        isolate_errors: Whether a batch that raises is halved to find the guilty items.
        retry_on_oom: Whether a batch that runs out of memory is run again in smaller calls.
        oom_errors: Full names of exceptions that mean out of memory, besides MemoryError and
            torch's; None if no exception does, not even these.
        fatal_errors: Exceptions that end the whole call instead of failing an item.
        is_ending: Whether the caller is in fact being ended; user code may raise the fatal errors,
            too.
        may_wait: Whether there is an event loop on which async user code can wait.
        own: Copies what one call of user code has made and others may change before it is read; of
            an exception, its arguments are replaced by copies.

    Attributes:
        most_probes: How many items of the next suspect batch are tried by themselves.
        odd_count: The wrong number of results of a call, until one of several items has returned
            one for each; None if there is none.
    """

    def __init__(
        self,
        *,
        isolate_errors: bool,
        retry_on_oom: bool = True,
        oom_errors: Sequence[str] | None = (),
        fatal_errors: tuple[type[BaseException], ...] = (),
        is_ending: Callable[[], bool] = lambda: True,
        may_wait: bool = False,
        own: Own = as_it_is,
        clock: Clock = monotonic,
    ) -> None:
        self.isolate_errors = isolate_errors
        self.retry_on_oom = retry_on_oom
        self.clock = clock
        self.most_probes = MOST_PROBES
        self.odd_count: int | None = None
        self._oom_errors = oom_errors
        self._fatal_errors = fatal_errors
        self._is_ending = is_ending
        self.may_wait = may_wait
        self.own = own
        self._budget_s = MOST_RERUN_S  # for running batches again; below zero it is overdrawn
        self._budget_at = clock()  # when that was worked out
        self._rerun_s = 0.0  # spent on running batches again since then

    async def call(
        self,
        function: Callable[[list[Any]], Any],
        items: list[Any],
        trouble: list[Trouble],
        *,
        pad: Pad | None = None,
        positions: Sequence[int] | None = None,
        until: float = inf,
        again: Again | None = None,
    ) -> list[Any]:
        """Return what `function` returns for the items, with a `Failed` in the place of each that
        fails.

        Args:
            function: Takes a list and returns as many results; may be async.
            pad: Adds items to each part until there are as many as `function` takes; the surplus
                results are dropped.
            positions: The items' positions in their batch, if they are not all of it.
            until: The time from which nobody waits for the results.
            again: Returns items as they came, for further calls; None to give the same objects.
        """
        n = len(items)
        part: Any
        returned: Any
        try:
            part = items[:] if pad is None else pad(items)
            returned = function(part)
            if hasattr(returned, "__await__"):
                returned = await self.resolve(returned)
            return first(self.results_of(returned, len(part)), n)
        except BaseException as error:
            if self.is_fatal(error):
                raise
            why = error
        # nothing of the failed call may take up memory while parts of it are run
        returned = part = None
        where = range(n) if positions is None else positions
        try:
            return await _Retry(self, function, items, trouble, pad, where, until, again).run(why)
        finally:
            del why  # it holds this frame

    def call_now(
        self,
        function: Callable[[list[Any]], Any],
        items: list[Any],
        trouble: list[Trouble],
        *,
        announced: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] | None = None,
        until: float = inf,
        again: Again | None = None,
    ) -> list[Any]:
        """Make a call for a whole batch where nothing waits.

        A part of the fast path `calls_now`: the same outcome as that of `call`, without a
        coroutine. `announced` returns the function for calls in parts.
        """
        returned: Any
        part: Any = items[:]
        try:
            returned = function(part)
            if type(returned) is not list and hasattr(returned, "__await__"):
                returned = run_now(returned)
            results = as_results(returned, len(part))
            return results if self.odd_count is None else self._trusted(results)
        except BaseException as error:
            if self.is_fatal(error):
                raise
            why = error
        returned = part = None
        try:
            function = function if announced is None else announced(function)
            return self.retry_now(function, items, trouble, why, until, again)
        finally:
            del why

    def retry_now(
        self,
        function: Callable[[list[Any]], Any],
        items: list[Any],
        trouble: list[Trouble],
        why: BaseException,
        until: float,
        again: Again | None,
    ) -> list[Any]:
        return run_now(_Retry(self, function, items, trouble, None, range(len(items)), until, again).run(why))

    def results_of(self, returned: Any, n: int) -> list[Any]:
        """Return what a batch call returned as a list of `n` results.

        Raises:
            ModelError: It is not a sequence, or one of another length, or its length is doubted.
        """
        results = as_results(returned, n)
        return results if self.odd_count is None else self._trusted(results)

    def _trusted(self, results: list[Any]) -> list[Any]:
        """Return as many results as there are items, after a call has returned another number.
        Raises ModelError if they are several.
        """
        n = len(results)
        if self.odd_count is not None and n > 1:
            if self.isolate_errors or n == self.odd_count:
                raise doubted(n, self.odd_count)
            self.odd_count = None  # it cannot be run again; that it fits by chance is not likely
        return results

    async def resolve(self, awaitable: Awaitable[Any]) -> Any:
        """Return the result of what user code returned to be awaited. Raises TypeError if there is
        no event loop to wait on.
        """
        return await awaitable if self.may_wait else run_now(awaitable)

    def is_fatal(self, error: BaseException) -> bool:
        """Report whether an exception ends the whole call. Nothing of the exception itself is
        called or read.
        """
        return issubclass(type(error), self._fatal_errors) and self._is_ending()

    def failed_alone(self, error: BaseException, trouble: list[Trouble]) -> Failed:
        self.own(error)
        if self.means_out_of_memory(error):
            release_memory(error)
            trouble.append(Trouble(out_of_memory=True))
        return Failed(error)

    def means_out_of_memory(self, error: BaseException) -> bool:
        return self._oom_errors is not None and is_out_of_memory(error, self._oom_errors)

    def may_rerun(self) -> bool:
        """Report whether there is time to run a batch again in parts; one batch may overdraw it."""
        now = self.clock()
        earned_s = RERUN_PER_S * max(0.0, now - self._budget_at - self._rerun_s)
        self._budget_s = min(self._budget_s + earned_s, MOST_RERUN_S)
        self._budget_at, self._rerun_s = now, 0.0
        return self._budget_s > 0

    def charge(self, seconds: float) -> None:
        self._budget_s -= seconds
        self._rerun_s += seconds


class _Part(NamedTuple):
    """Consecutive items of a batch, as a range of their indices."""

    begin: int
    end: int


class _FailedPart(NamedTuple):
    begin: int
    end: int
    error: BaseException


class _Retry:
    """One batch whose call has failed, while it is run again in parts.

    Parts are run level by level: those that raise are halved, and their halves are the parts of the
    next level. A part that runs out of memory is halved at once, within its level.
    """

    def __init__(
        self,
        retrier: Retrier,
        function: Callable[[list[Any]], Any],
        items: list[Any],
        trouble: list[Trouble],
        pad: Pad | None,
        positions: Sequence[int],
        until: float,
        again: Again | None,
    ) -> None:
        self._retrier = retrier
        self._function = function
        self._items = items
        self._pad = pad
        self._positions = positions
        self._until = until
        self._again = again
        self._began = retrier.clock()
        self._may_rerun = retrier.may_rerun()
        self._results: list[Any] = [None] * len(items)

        # the present level
        self._todo: list[_Part] = []  # the next one last
        self._raised: list[_FailedPart] = []
        self._calls = 1

        # calls and their sizes, which show how many items memory holds
        # a call of this many ran out of memory, and no single item was to blame
        self._too_many: float = inf
        self._ran_out_alone = 0  # how many items ran out of memory by themselves
        self._miscounted: BaseException | None = None  # why a part failed that had a wrong number of results
        self._ran_out: list[_Part] = []
        self._fitted: list[_Part] = []

        self._trouble = Trouble()
        self._reported = trouble

    async def run(self, error: BaseException) -> list[Any]:
        self._handle_failure(0, len(self._items), error)
        while self._todo or self._raised:
            while self._todo:
                begin, end = self._todo.pop()
                if self._retrier.clock() < self._until:
                    await self._call(begin, end)
                else:  # nobody waits any more
                    self._trouble.unsplit = True
                    self._fail(begin, end, error)
            await self._go_to_next_level()
        if type(error) is Miscount and error.is_doubted and self._retrier.isolate_errors:
            if self._miscounted is not None:
                self._fail(0, len(self._items), self._miscounted)
            elif self._fitted:
                self._retrier.odd_count = None
        self._report()
        return self._results

    async def _call(self, begin: int, end: int) -> None:
        n = end - begin
        if n > 1 and n >= self._too_many:
            self._halve(begin, end)  # it would run out of memory again
            return
        self._calls += 1
        part: Any
        returned: Any
        try:
            part = await self._items_of(begin, end)
            if self._pad is not None:
                part = self._pad(part)
            returned = self._function(part)
            if hasattr(returned, "__await__"):
                returned = await self._retrier.resolve(returned)
            # the next call may fill the same memory again
            self._results[begin:end] = map(self._retrier.own, as_results(returned, len(part))[:n])
            self._fitted.append(_Part(begin, end))
        except BaseException as error:
            if self._retrier.is_fatal(error):
                raise
            returned = part = None
            self._handle_failure(begin, end, error)

    async def _items_of(self, begin: int, end: int) -> list[Any]:
        """Return the items of a part as they came, since a failed call may have changed them."""
        items = self._items[begin:end]
        if self._again is None or UNCHANGING.issuperset(map(type, items)):
            return items
        items = await self._again(self._positions[begin:end])
        for item in items:
            if type(item) is Failed:
                raise item.error
        return items

    def _handle_failure(self, begin: int, end: int, error: BaseException) -> None:
        self._retrier.own(error)
        if not self._retrier.means_out_of_memory(error):
            if type(error) is Miscount and not error.is_doubted:
                self._retrier.odd_count, self._miscounted = error.n, error
            self._raised.append(_FailedPart(begin, end, error))
            return
        release_memory(error)
        self._trouble.out_of_memory = True
        if end - begin == 1:
            self._fail_too_large_item(begin, error)
            return
        self._ran_out.append(_Part(begin, end))
        if self._retrier.retry_on_oom and self._may_rerun:
            self._too_many = end - begin
            self._halve(begin, end)
        else:
            self._fail(begin, end, error)

    def _fail_too_large_item(self, at: int, error: BaseException) -> None:
        """Fail an item that is too large by itself: its parts say nothing about their size."""
        self._fail(at, at + 1, error)
        self._ran_out_alone += 1
        self._too_many = inf
        self._ran_out.clear()
        if self._ran_out_alone > 1 and not self._fitted:  # no memory is left at all
            for begin, end in self._todo:
                self._fail(begin, end, error)
            self._todo.clear()

    def _halve(self, begin: int, end: int) -> None:
        middle = (begin + end) // 2
        self._todo += [_Part(middle, end), _Part(begin, middle)]

    async def _go_to_next_level(self) -> None:
        raised, self._raised = self._raised, []
        may_be_broken = len(raised) == self._calls >= SUSPECT_PARTS and not self._fitted
        self._calls = 0
        to_halve: list[_FailedPart] = []
        for part in reversed(raised):
            begin, end, error = part
            if end - begin == 1 or not self._retrier.isolate_errors or is_bad_result(error):
                self._fail(begin, end, error)
            elif self._may_rerun:
                self._trouble.split = True
                to_halve.append(part)
            else:
                self._trouble.unsplit = True
                self._fail(begin, end, error)
        if may_be_broken and to_halve:
            await self._probe(to_halve[::-1])
            return
        for begin, end, _ in to_halve:
            self._halve(begin, end)

    async def _probe(self, parts: list[_FailedPart]) -> None:
        """Find out with single items whether the model is broken, since no part has succeeded."""
        tried = 0
        while parts and not self._fitted and self._retrier.clock() < self._until:
            if tried and tried + len(parts) > self._retrier.most_probes:
                break
            for begin, _, _ in parts:
                await self._call(begin, begin + 1)
            tried += len(parts)
            parts = [_FailedPart(begin + 1, end, error) for begin, end, error in parts if begin + 1 < end]
        guilty, self._raised = self._raised, []
        for begin, end, error in guilty:
            self._fail(begin, end, error)
        if not self._fitted:
            for begin, end, error in parts:
                self._fail(begin, end, error)
            self._retrier.most_probes = max(self._retrier.most_probes // 2, SUSPECT_PARTS)
            return
        one_by_one = 4 * len(guilty) > tried
        for begin, end, _ in reversed(parts):
            if one_by_one or end - begin == 1:
                self._todo += [_Part(at, at + 1) for at in reversed(range(begin, end))]
            else:
                self._halve(begin, end)

    def _fail(self, begin: int, end: int, error: BaseException) -> None:
        self._results[begin:end] = [Failed(error)] * (end - begin)

    def _report(self) -> None:
        """Charge the time to the budget and report the trouble.

        Running again what was only too large is not charged: the next batch will be smaller.
        """
        if self._trouble.split or self._ran_out_alone:
            self._retrier.charge(self._retrier.clock() - self._began)
        if self._fitted:
            self._retrier.most_probes = MOST_PROBES
        if self._ran_out:
            self._trouble.ran_out = [self._positions_of(part) for part in self._ran_out]
            self._trouble.fitted = [self._positions_of(part) for part in self._fitted]
        if self._trouble != Trouble():
            self._reported.append(self._trouble)

    def _positions_of(self, part: _Part) -> list[int]:
        return list(self._positions[part.begin : part.end])


def padded_size(n: int, sizes: Sequence[int]) -> int:
    """Return the least of the allowed sizes that holds `n` items; `n` itself beyond the largest."""
    i = bisect_left(sizes, n)
    return sizes[i] if i < len(sizes) else n


def padding_to(sizes: Sequence[int], own: Callable[[Any], Any]) -> Pad:
    """Return what adds copies of the last item until there are as many as the next allowed size."""

    def pad(items: list[Any]) -> list[Any]:
        return items + [own(items[-1]) for _ in range(padded_size(len(items), sizes) - len(items))]

    return pad


# in `torch` or, before 2.5, `torch.cuda`; recognised without importing it
_TORCH_ERROR = "OutOfMemoryError"
_LONGEST_CHAIN = 10

OomErrors = Sequence[type[BaseException] | str]
"""Exception classes, or their full names, where importing them here would load a framework."""


def names_of(oom_errors: OomErrors) -> tuple[str, ...]:
    """Return the full names of exception classes, by which a worker recognises them without an
    import. Raises TypeError.
    """
    names = []
    if isinstance(oom_errors, str) or not isinstance(oom_errors, Sequence):
        raise TypeError(f"oom_errors must be a sequence of exception classes or their full names, not {oom_errors!r}")
    for error in oom_errors:
        if isinstance(error, type) and issubclass(error, BaseException):
            names.append(_name_of(error))
        elif isinstance(error, str) and "." in error:
            names.append(error)
        else:
            raise TypeError(
                "each of oom_errors must be an exception class or its full name, such as 'package.Error',"
                f" not {error!r}"
            )
    return tuple(names)


def is_out_of_memory(error: BaseException, names: Sequence[str] = ()) -> bool:
    """Report whether `error` means out of memory: a MemoryError, torch's error on a GPU, or one of
    `names`.
    """
    # nothing of the exception itself is called or read: it may be a trap
    if issubclass(type(error), MemoryError):
        return True
    for kind in type(error).__mro__:
        module = kind.__module__
        if kind.__name__ == _TORCH_ERROR and isinstance(module, str) and module.partition(".")[0] == "torch":
            return True
        if names and _name_of(kind) in names:
            return True
    return False


def release_memory(error: BaseException) -> None:
    """Release what a failed call holds: the variables of its frames, and the GPU memory that torch
    has cached.

    This raises nothing, whatever the exception's attributes or torch do.
    """
    with contextlib.suppress(BaseException):
        link: BaseException | None = error
        for _ in range(_LONGEST_CHAIN):
            if link is None:
                break
            traceback.clear_frames(link.__traceback__)
            link = link.__context__ if link.__cause__ is None else link.__cause__
    gc.collect(1)  # recent reference cycles only: a full collection would take long
    with contextlib.suppress(BaseException):
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            cuda.empty_cache()


def _name_of(kind: type) -> str:
    """Return the full name of a class; one of the main program has the same name in workers."""
    module = kind.__module__
    return f"{'__main__' if module == '__mp_main__' else module}.{kind.__qualname__}"
