"""A batch call that fails is made again, in parts: smaller ones if memory ran out, halves to find guilty items.

The two are different. Memory is a matter of size: all of the batch is run again in calls that fit, and what was too
much is told (`Trouble`), so that later batches are smaller. Any other error is a matter of some items: only what failed
is halved, breadth first, until the guilty are alone. Of n items with one guilty that takes 1 + 2·log2(n) calls.

Where the four quarters of a batch all fail, either many items are guilty or the model is broken. Items run by
themselves tell which, one of each quarter in turn: once some have gone through, what is left is run one by one if more
than a quarter of them failed, and is halved further if not. If none goes through, the rest fails with the error of its
quarter; and each time that this happens, fewer are tried in the next such batch (`MOST_IN_VAIN` down to `ALL_BAD`), so
a model that is broken altogether costs eleven calls a batch before long.

Running items again takes time that others wait for, and still it is what serves the good ones best: where it takes
long, next to no batch would come through without. So it ends when nobody waits for the batch any more (`until`), and
what is owed to others is a small share of the time: a batch that raises while the share is used up fails as a whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from math import inf
from typing import Any, TypeVar

import msgspec

from carpool.call.oom import give_back, is_out_of_memory
from carpool.clock import Clock, monotonic
from carpool.errors import ModelError
from carpool.rows import Rows, first

T = TypeVar("T")

ALL_BAD = 4
"""So many parts of a batch fail, and none succeeds: perhaps it is the model that is broken."""

MOST_IN_VAIN = 32
"""So many items are then tried by themselves before the model counts as broken; half as many after each such batch."""

AGAIN_PER_S = 100.0
"""Seconds for which batches may be run again, for each second that passes otherwise."""

MOST_AGAIN_S = 60.0
"""As many of these seconds can be saved up, and are there at the start."""


class Failed:
    """Takes the place of an item's value once it has failed.

    Attributes:
        error: why.
    """

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Trouble(msgspec.Struct, array_like=True):
    """What happened to one batch besides its results; workers send it only where there is something to tell.

    Attributes:
        split: whether it raised and was run again in parts; unsplit: whether it was not for lack of budget.
        out_of_memory: whether a call ran out of memory.
        ran_out: for each call that did and held several items, their places in the batch.
        fitted: likewise for the calls that went through when the batch was run again.
    """

    split: bool = False
    unsplit: bool = False
    out_of_memory: bool = False
    ran_out: list[list[int]] = []
    fitted: list[list[int]] = []


class Retrier:
    """Makes batch calls, and makes them again in parts where they fail.

    Args:
        isolate_errors: whether a batch that raises is halved to find the guilty items.
        halve: whether one that runs out of memory is run again in smaller calls.
        oom_errors: full names of exceptions that mean it, besides MemoryError and torch's; None if nothing does.
        through: exceptions that end the whole call instead of failing an item.
        meant: whether one of these does end it; user code may have raised it by itself.
        may_wait: whether there is an event loop on which async user code can wait.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        isolate_errors: bool,
        halve: bool = True,
        oom_errors: Sequence[str] | None = (),
        through: tuple[type[BaseException], ...] = (),
        meant: Callable[[], bool] = lambda: True,
        may_wait: bool = False,
        clock: Clock = monotonic,
    ) -> None:
        self.isolate_errors = isolate_errors
        self.halve = halve
        self.clock = clock
        self.tries = MOST_IN_VAIN
        self._oom_errors = oom_errors
        self._through = through
        self._meant = meant
        self._may_wait = may_wait
        self._again_s = MOST_AGAIN_S  # for which batches may still be run again
        self._asked = clock()
        self._spent_s = 0.0  # since then

    async def call(
        self,
        function: Callable[[list[Any]], Any],
        items: list[Any],
        trouble: list[Trouble],
        *,
        sizes: Sequence[int] | None = None,
        places: Sequence[int] | None = None,
        until: float = inf,
    ) -> list[Any]:
        """What `function` returns for the items; `Failed` in the place of each that fails.

        Args:
            function: takes a list, returns as many results; may be async.
            items: one at least.
            trouble: what there is to tell is appended here.
            sizes: each part is padded up to the next of these with its last item, and the surplus results dropped.
            places: of the items in their batch, if they are not all of it.
            until: when nobody waits for the results any more.
        """
        n = len(items)
        part: Any
        returned: Any
        try:
            part = items[:] if sizes is None else filled_up(items, sizes)
            returned = function(part)
            if hasattr(returned, "__await__"):
                returned = await self.outcome_of(returned)
            return first(as_results(returned, len(part)), n)
        except BaseException as error:
            if self.goes_through(error):
                raise
            why = error
        returned = part = None  # nothing of the failed call may take up memory while parts of it are run
        again = _Retry(self, function, items, trouble, sizes, range(n) if places is None else places, until)
        try:
            return await again.run(why)
        finally:
            del why  # it holds this frame

    def call_now(self, function: Callable[[list[Any]], Any], items: list[Any], trouble: list[Trouble]) -> list[Any]:
        """What `call` does, where nothing waits: for all of a batch, and without a coroutine."""
        returned: Any
        part: Any = items[:]
        try:
            returned = function(part)
            if type(returned) is not list and hasattr(returned, "__await__"):
                returned = run_now(returned)
            return as_results(returned, len(part))
        except BaseException as error:
            if self.goes_through(error):
                raise
            why = error
        returned = part = None
        again = _Retry(self, function, items, trouble, None, range(len(items)), inf)
        try:
            return run_now(again.run(why))
        finally:
            del why

    async def outcome_of(self, awaitable: Awaitable[Any]) -> Any:
        """What user code returned to be awaited. Raises TypeError if it would wait where nothing can."""
        return await awaitable if self._may_wait else run_now(awaitable)

    def goes_through(self, error: BaseException) -> bool:
        """Whether an exception ends the whole call. It is asked nothing, not even for its class."""
        return issubclass(type(error), self._through) and self._meant()

    def failed_alone(self, error: BaseException, trouble: list[Trouble]) -> Failed:
        """The end of an item that was called by itself."""
        if self.ran_out(error):
            give_back(error)
            trouble.append(Trouble(out_of_memory=True))
        return Failed(error)

    def ran_out(self, error: BaseException) -> bool:
        """Whether an exception means that memory has run out."""
        return self._oom_errors is not None and is_out_of_memory(error, self._oom_errors)

    def may_repeat(self) -> bool:
        """Whether there is time to run a batch again in parts; it may be overdrawn by one batch."""
        now = self.clock()
        earned_s = AGAIN_PER_S * max(0.0, now - self._asked - self._spent_s)
        self._again_s = min(self._again_s + earned_s, MOST_AGAIN_S)
        self._asked, self._spent_s = now, 0.0
        return self._again_s > 0

    def repeated(self, seconds: float) -> None:
        """A batch has been run again for so long."""
        self._again_s -= seconds
        self._spent_s += seconds


class _Retry:
    """One batch whose call has failed, while it is run again in parts."""

    def __init__(
        self,
        caller: Retrier,
        function: Callable[[list[Any]], Any],
        items: list[Any],
        trouble: list[Trouble],
        sizes: Sequence[int] | None,
        places: Sequence[int],
        until: float,
    ) -> None:
        self._caller = caller
        self._function = function
        self._items = items
        self._sizes = sizes
        self._results: list[Any] = [None] * len(items)
        self._may_repeat = caller.may_repeat()
        self._todo: list[tuple[int, int]] = []  # parts of the present level, the next one last
        self._raised: list[tuple[int, int, BaseException]] = []  # parts of the present level
        self._calls = 1  # in the present level
        self._until = until
        self._began = caller.clock()
        # of the parts that are there to make calls smaller:
        self._too_many: float = inf  # so many items have run out of memory, as far as no single one was to blame
        self._alone = 0  # items that ran out of memory by themselves
        self._ran_out: list[tuple[int, int]] = []
        self._fitted: list[tuple[int, int]] = []
        self._trouble = Trouble()
        self._log = trouble
        self._places = places

    async def run(self, error: BaseException) -> list[Any]:
        """All results, after the call for all items has raised `error`."""
        self._failed(0, len(self._items), error)
        while self._todo or self._raised:
            while self._todo:
                begin, end = self._todo.pop()
                if self._caller.clock() < self._until:
                    await self._call(begin, end)
                else:  # nobody waits any more
                    self._trouble.unsplit = True
                    self._give(begin, end, error)
            await self._descend()
        self._settle()
        return self._results

    async def _call(self, begin: int, end: int) -> None:
        n = end - begin
        if n > 1 and n >= self._too_many:
            self._halve(begin, end)  # it would run out again
            return
        self._calls += 1
        part: Any
        returned: Any
        try:
            part = self._items[begin:end]
            if self._sizes is not None:
                part = filled_up(part, self._sizes)
            returned = self._function(part)
            if hasattr(returned, "__await__"):
                returned = await self._caller.outcome_of(returned)
            self._results[begin:end] = as_results(returned, len(part))[:n]
            self._fitted.append((begin, end))
        except BaseException as error:
            if self._caller.goes_through(error):
                raise
            returned = part = None
            self._failed(begin, end, error)

    def _failed(self, begin: int, end: int, error: BaseException) -> None:
        if not self._caller.ran_out(error):
            self._raised.append((begin, end, error))
            return
        give_back(error)
        self._trouble.out_of_memory = True
        if end - begin == 1:
            self._ran_out_alone(begin, error)
            return
        self._ran_out.append((begin, end))
        if self._caller.halve and self._may_repeat:
            self._too_many = end - begin
            self._halve(begin, end)
        else:
            self._give(begin, end, error)

    def _ran_out_alone(self, at: int, error: BaseException) -> None:
        """The item is too large by itself, so what it was in says nothing about sizes."""
        self._give(at, at + 1, error)
        self._alone += 1
        self._too_many = inf
        self._ran_out.clear()
        if self._alone > 1 and not self._fitted:  # memory is gone altogether
            for begin, end in self._todo:
                self._give(begin, end, error)
            self._todo.clear()

    def _halve(self, begin: int, end: int) -> None:
        middle = (begin + end) // 2
        self._todo += [(middle, end), (begin, middle)]

    async def _descend(self) -> None:
        """The parts of this level that have raised: halved for the next one, or given up."""
        raised, self._raised = self._raised, []
        suspect = len(raised) == self._calls >= ALL_BAD and not self._fitted
        self._calls = 0
        halved: list[tuple[int, int, BaseException]] = []
        for begin, end, error in reversed(raised):
            if end - begin == 1 or not self._caller.isolate_errors or _is_no_result(error):
                self._give(begin, end, error)
            elif self._may_repeat:
                self._trouble.split = True
                halved.append((begin, end, error))
            else:
                self._trouble.unsplit = True
                self._give(begin, end, error)
        if suspect and halved:
            await self._probe(halved[::-1])
            return
        for begin, end, _ in halved:
            self._halve(begin, end)

    async def _probe(self, parts: list[tuple[int, int, BaseException]]) -> None:
        """No part has gone through, so items by themselves tell whether it is the model that is broken."""
        tried = 0
        while parts and not self._fitted and self._caller.clock() < self._until:
            if tried and tried + len(parts) > self._caller.tries:
                break
            for begin, _, _ in parts:
                await self._call(begin, begin + 1)
            tried += len(parts)
            parts = [(begin + 1, end, error) for begin, end, error in parts if begin + 1 < end]
        guilty, self._raised = self._raised, []
        for begin, end, error in guilty:
            self._give(begin, end, error)
        if not self._fitted:
            for begin, end, error in parts:
                self._give(begin, end, error)
            self._caller.tries = max(self._caller.tries // 2, ALL_BAD)
            return
        one_by_one = 4 * len(guilty) > tried
        for begin, end, _ in reversed(parts):
            if one_by_one or end - begin == 1:
                self._todo += [(at, at + 1) for at in reversed(range(begin, end))]
            else:
                self._halve(begin, end)

    def _give(self, begin: int, end: int, error: BaseException) -> None:
        self._results[begin:end] = [Failed(error)] * (end - begin)

    def _settle(self) -> None:
        """What was run again because a batch was too large costs nothing: the next one will be smaller."""
        if self._trouble.split or self._alone:
            self._caller.repeated(self._caller.clock() - self._began)
        if self._fitted:
            self._caller.tries = MOST_IN_VAIN
        if self._ran_out:
            self._trouble.ran_out = [self._of_batch(*part) for part in self._ran_out]
            self._trouble.fitted = [self._of_batch(*part) for part in self._fitted]
        if self._trouble != Trouble():
            self._log.append(self._trouble)

    def _of_batch(self, begin: int, end: int) -> list[int]:
        return list(self._places[begin:end])


def run_now(awaitable: Awaitable[T]) -> T:
    """What `awaitable` results in, without an event loop.

    Raises:
        TypeError: it waits for something; only user code that is really asynchronous does.
    """
    steps = awaitable.__await__()
    try:
        next(steps)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    close = getattr(steps, "close", None)
    if close is not None:
        close()
    raise TypeError('the model waits for something: async models run with run_in="loop" or under @carpool.batch')


def padded(n: int, sizes: Sequence[int]) -> int:
    """The least of the allowed sizes that holds `n` items; `n` itself beyond the largest."""
    i = bisect_left(sizes, n)
    return sizes[i] if i < len(sizes) else n


def filled_up(items: list[Any], sizes: Sequence[int]) -> list[Any]:
    """The items, and the last one again until there are as many as one of `sizes`."""
    return items + items[-1:] * (padded(len(items), sizes) - len(items))


def as_results(returned: Any, n: int) -> list[Any]:
    """What a batch call returned, as a list of `n` results.

    Raises:
        ModelError: it is no sequence, or one of another length.
    """
    if type(returned) is list and len(returned) == n:
        return returned
    results: Any = returned
    if hasattr(returned, "unbind") and hasattr(returned, "detach"):  # a torch tensor
        tensor = returned.detach().cpu()
        # a row of its own memory each: pickling a view would take the whole batch along
        results = tensor.tolist() if tensor.ndim == 1 else [row.clone() for row in tensor]
    elif hasattr(returned, "tolist") and hasattr(returned, "ndim"):  # a numpy array
        results = returned.tolist() if returned.ndim <= 1 else Rows(returned)
    elif not isinstance(returned, Sequence) or isinstance(returned, str | bytes | bytearray):
        kind = type(returned).__name__
        text = f"a batch of {n} needs a sequence of {n} results, but the model returned {kind}"
        raise ModelError(text, code="bad_result")
    if type(results) is Rows and len(results) == n:
        return results
    if type(results) is not list and isinstance(results, Sequence) and len(results) == n:
        results = list(islice(results, n + 1))  # one of the user's own may have no end, whatever its length says
    if type(results) is not list or len(results) != n:
        got = len(results) if isinstance(results, Sequence) else "a single value"
        text = f"a batch of {n} needs {n} results, but the model returned {got}"
        raise ModelError(text, code="bad_result")
    return results


def _is_no_result(error: BaseException) -> bool:
    """Whether the model returned what cannot be shared out: with fewer items it would do the same."""
    return type(error) is ModelError and error.code == "bad_result"
