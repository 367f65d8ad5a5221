"""Check that streams which share the steps of a model get the parts that each gets alone.

Whether a model keeps its caches rightly shows only in company: when a row moves into a gap, a
stream rests while others go on, or one is built anew from its parts. So streams join, leave, pause
and resume at random here, in the running sets that workers have, and every part is compared. All of
it follows from a seed.
"""

from __future__ import annotations

import asyncio
import copy
import random
import reprlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from carpool.engine.call.invoke import is_async
from carpool.engine.call.results import Failed, run_now
from carpool.engine.call.retry import Retrier
from carpool.engine.foreign import named_text_of
from carpool.engine.forms import Form
from carpool.engine.wire import order as wire
from carpool.engine.wire.order import OrderHead
from carpool.engine.wire.payload import OBJECT
from carpool.engine.worker.steps import Outs, Row, Runner
from carpool.model import Traits, traits_of

_LEAST_STREAMS = 200  # that a check runs by default
_STREAMS_PER_ROW = 10  # so many leave that a model which does not free their rows runs out of them
_GO_ON_SHARE = 0.2  # of the streams that rest go on before each step
_MOST_SILENT = 1000  # steps of a stream without a part, until it is taken for one that has been forgotten
_LONGEST_HISTORY = 6  # events of a stream that a failure shows


class StepsError(AssertionError):
    """A model of steps gives a stream other parts in company than alone; the text says which."""


def check_steps(
    make: Callable[[], Any],
    xs: Sequence[Any],
    *,
    seed: int = 0,
    streams: int | None = None,
    max_batch_size: int = 8,
    size: Callable[[Any], int] | None = None,
    max_rows: int | None = None,
    most_parts: int = 200,
    equal: Callable[[Any, Any], bool] | None = None,
) -> None:
    """Check that a model of steps gives each stream the parts that its item gets alone.

    Each item is run alone first, by a model of its own. Then streams of these items join, leave,
    pause and go on at random, as they do in a worker. Where the model has `resume`, there are two
    workers, and streams are also taken out and resumed by either of them.

    Args:
        make: The class of the model, or a function without arguments that makes one.
        xs: Items as callers bring them. Different lengths find most; a few items are enough.
        seed: All that happens follows from it.
        streams: How many streams to run; items take turns. By default 200, or ten for each row.
        max_batch_size: As that of the stage: how many streams run at a time, or with `size` the
            sum of their sizes.
        size: As that of the stage: what an item may come to hold.
        max_rows: As that of the stage: how many streams run at a time where `size` is given.
        most_parts: After how many parts a stream is left, since some answers have no end.
        equal: Whether two parts are the same; `==`, for arrays of all elements, by default.

    Raises:
        StepsError: A stream got something else than its item gets alone, or a method of the model
            raised. The text names the item, the part and the seed.
        TypeError: This is not a model of steps.
        ValueError: An item is larger than `max_batch_size`, or there is none.
    """
    rows = (max_rows or max_batch_size) if size else max_batch_size
    n = streams or max(_LEAST_STREAMS, _STREAMS_PER_ROW * min(rows, max_batch_size))
    limits = _Limits(max_batch_size, size or (lambda x: 1), rows)
    if not xs:
        raise ValueError("check_steps needs at least one item")
    for at, x in enumerate(xs):
        if limits.size(x) > max_batch_size:
            raise ValueError(
                f"item {at} has size {limits.size(x)}, more than max_batch_size={max_batch_size}: it never joins"
            )
    check = _Check(make, xs, random.Random(seed), n, limits, most_parts, equal or _equal)
    try:
        if check.is_async:
            with ThreadPoolExecutor(1) as thread:  # the caller's thread may have a loop already
                thread.submit(asyncio.run, check.run()).result()
        else:
            run_now(check.run())
    except StepsError as error:
        raise StepsError(f"{error} (seed {seed})") from error.__cause__


class _Limits(NamedTuple):
    """The limits of a running set: of the sum of its streams' sizes, and of their number."""

    sizes: int
    size: Callable[[Any], int]
    rows: int


@dataclass
class _Alone:
    """The answer of an item by itself.

    Attributes:
        end: Their end, in words; None if it was left.
        longest_silence: The most steps that one of them, or the end, has taken.
    """

    parts: list[Any] = field(default_factory=list)
    end: str | None = None
    longest_silence: int = 0


@dataclass(eq=False)
class _Stream:
    """One stream.

    Attributes:
        id: Its number, in the order of their arrival.
        n_heard: How many parts have come.
        raw: The parts as the model gave them, for `resume`.
        n_silent: How many steps it has had since its last part.
        rests: Whether it is paused.
    """

    id: int
    at: int
    n_heard: int = 0
    raw: list[Any] = field(default_factory=list)
    n_silent: int = 0
    rests: bool = False
    history: list[str] = field(default_factory=list)

    def note(self, event: str) -> None:
        parts = "1 part" if self.n_heard == 1 else f"{self.n_heard} parts"
        self.history.append(f"{event} after {parts}" if self.n_heard else event)


class _Different(StepsError):
    def __init__(self, text: str, stream: _Stream) -> None:
        super().__init__(text)
        self.stream = stream


class _Watched:
    """A model of which it is noted what its methods raise, since a running set lives on after that:
    the method that has raised first, with how many streams, and what.
    """

    def __init__(self, model: Any, retrier: Retrier) -> None:
        self.raised: tuple[str, int, BaseException] | None = None
        self._model = model
        self._retrier = retrier

    async def start(self, xs: list[Any]) -> Any:
        return await self._call("start", len(xs), xs)

    async def resume(self, xs: list[Any], parts: list[list[Any]]) -> Any:
        return await self._call("resume", len(xs), xs, parts)

    async def step(self, states: list[Any]) -> Any:
        return await self._call("step", len(states), states)

    async def stop(self, state: Any) -> Any:
        return await self._call("stop", 1, state)

    async def _call(self, method: str, n: int, *arguments: Any) -> Any:
        try:
            returned = getattr(self._model, method)(*arguments)
            if hasattr(returned, "__await__"):
                returned = await self._retrier.resolve(returned)
        except BaseException as error:
            if not self._retrier.is_fatal(error):
                self.raised = self.raised or (method, n, error)
            raise
        return returned


class _Worker:
    def __init__(self, model: Any, traits: Traits, name: str, *, may_wait: bool) -> None:
        self.name = name
        self.streams: dict[int, _Stream] = {}
        self._model = model
        self._retrier = Retrier(isolate_errors=False, fatal_errors=(KeyboardInterrupt,), may_wait=may_wait)
        self._watched = _Watched(model, self._retrier)
        self._runner = Runner(
            self._watched,
            self._retrier,
            can_resume=traits.can_resume,
            postprocess=getattr(model, "postprocess", None),
            postprocess_takes_x=traits.postprocess_takes_x,
        )

    @property
    def can_step(self) -> bool:
        return self._runner.has_running

    async def call_hook(self, name: str, *arguments: Any) -> Any:
        """Call a method of the model that it may have; without it, return its last argument."""
        method = getattr(self._model, name, None)
        if method is None:
            return arguments[-1] if arguments else None
        returned = method(*arguments)
        return await self._retrier.resolve(returned) if hasattr(returned, "__await__") else returned

    async def follow(self, order: OrderHead, joining: Sequence[_Stream], xs: Sequence[Any]) -> Outs:
        """Let streams leave, join, rest and go on, and return what has come of it."""
        rows = []
        for stream in joining:
            x = await self.call_hook("preprocess", copy.deepcopy(xs[stream.at]))
            rows.append(Row(stream.id, x, OBJECT, wire.TAKES_PARTS, copy.deepcopy(stream.raw)))
        for id in order.leave:
            del self.streams[id]
        self.streams.update((stream.id, stream) for stream in joining)
        return self._checked(await self._runner.follow(order, rows), order.leave)

    async def step(self) -> Outs:
        return self._checked(await self._runner.step(), ())

    def _checked(self, outs: Outs, left: Sequence[int]) -> Outs:
        if self._watched.raised is None:
            return outs
        method, n, error = self._watched.raised
        company = f"{n} stream{'s' * (n != 1)}" + (f", just after {len(left)} had left" if left else "")
        inside = ", ".join(f"item {stream.at}" for stream in self.streams.values()) or "no other"
        raise StepsError(
            f"{method} raised {named_text_of(error)}, called for {company}, in {self.name} with {inside}"
        ) from error


class _Check:
    def __init__(
        self,
        make: Callable[[], Any],
        xs: Sequence[Any],
        dice: random.Random,
        n: int,
        limits: _Limits,
        most_parts: int,
        equal: Callable[[Any, Any], bool],
    ) -> None:
        self._make = make
        self._first: Any = make()
        kind = make if isinstance(make, type) else type(self._first)
        self._traits = traits_of(kind, True)
        if self._traits.form is not Form.STEPS:
            raise TypeError(f"{kind.__name__} is not a model of steps: it has no start, step and stop")
        self.is_async = is_async(kind)
        self._xs = xs
        self._dice = dice
        self._most_parts = most_parts
        self._limits = limits
        self._equal = equal
        self._alone: list[_Alone] = []
        self._workers: list[_Worker] = []
        self._waiting = deque(_Stream(id, at) for id, at in enumerate(self._turns(n)))

    async def run(self) -> None:
        for at in range(len(self._xs)):
            self._alone.append(await self._run_alone(at))
        try:
            await self._run_together()
        except _Different as error:
            if await self._is_the_same_twice(error.stream.at):
                raise
            text = "Alone it gets other parts each time: draw what is random from a generator that the item seeds"
            raise StepsError(f"{error}. {text}") from None

    async def _run_together(self) -> None:
        names = ("one worker", "the other worker") if self._traits.can_resume else ("the worker",)
        self._workers = [await self._new_worker(name) for name in names]
        while self._waiting or any(worker.streams for worker in self._workers):
            unrest = self._dice.choice((0.0, 0.3, 1.0, 3.0))  # events of a stream in its life, for a while
            crowd = self._dice.choice((0.1, 0.5, 1.0))  # the chance of a newcomer before a step, likewise
            for _ in range(self._dice.randint(5, 50)):
                for worker in self._workers:
                    await self._turn(worker, unrest, crowd)
        for worker in self._workers:
            await worker.call_hook("teardown")

    # -- alone

    async def _run_alone(self, at: int) -> _Alone:
        worker, alone = await self._new_worker("a worker of its own"), _Alone()
        stream = _Stream(0, at)
        try:
            outs = await worker.follow(OrderHead(), [stream], self._xs)
            while alone.end is None and len(alone.parts) < self._most_parts:
                for _, kind, value, _ in outs or await worker.step():
                    stream.n_silent = 0
                    if _is_part(kind, value):
                        alone.parts.append(copy.deepcopy(value))
                    if kind != wire.MORE:
                        alone.end = _end_of(value)
                outs = Outs()
                stream.n_silent += 1
                alone.longest_silence = max(alone.longest_silence, stream.n_silent)
                if stream.n_silent > _MOST_SILENT:
                    raise StepsError(f"{_MOST_SILENT} steps in a row have given it nothing")
            if alone.end is None:
                await worker.follow(OrderHead([stream.id]), [], self._xs)
        except StepsError as error:
            raise StepsError(f"{self._name(at)} fails alone: {error}") from error.__cause__
        await worker.call_hook("teardown")
        return alone

    async def _new_worker(self, name: str) -> _Worker:
        model = self._make() if self._first is None else self._first
        self._first = None
        worker = _Worker(model, self._traits, name, may_wait=self.is_async)
        await worker.call_hook("setup")
        return worker

    # -- in company

    async def _turn(self, worker: _Worker, unrest: float, crowd: float) -> None:
        order = OrderHead()
        for stream in worker.streams.values():
            self._unsettle(stream, order, unrest)
        for id in order.leave:
            self._let_go(worker.streams[id])
        joining = self._newcomers(worker, order.leave) if self._dice.random() < crowd else []
        self._hear(worker, await worker.follow(order, joining, self._xs))
        if worker.can_step:
            for stream in worker.streams.values():
                stream.n_silent += not stream.rests
            self._hear(worker, await worker.step())

    def _unsettle(self, stream: _Stream, order: OrderHead, unrest: float) -> None:
        alone = self._alone[stream.at]
        life = max(1, len(alone.parts))
        x = self._dice.random()
        if stream.rests and x < _GO_ON_SHARE:
            stream.rests = False
            order.resume.append(stream.id)
        elif stream.n_silent > alone.longest_silence:
            return  # it stays until it is clear that its part does not come
        elif stream.n_heard >= self._most_parts or x > 1 - unrest / life / 2:
            order.leave.append(stream.id)
        elif not stream.rests and x < unrest / life:
            stream.rests = True
            stream.note("paused")
            order.pause.append(stream.id)

    def _let_go(self, stream: _Stream) -> None:
        """Have a stream that leaves come again, to be resumed, or not."""
        stream.rests, stream.n_silent = False, 0
        if self._traits.can_resume and stream.n_heard < self._most_parts and self._dice.random() < 0.6:
            stream.note("taken out")
            self._waiting.insert(self._dice.randint(0, min(3, len(self._waiting))), stream)

    def _newcomers(self, worker: _Worker, leave: Sequence[int]) -> list[_Stream]:
        stay = [stream for stream in worker.streams.values() if stream.id not in leave]
        used = sum(self._size(stream) for stream in stay)
        joining: list[_Stream] = []
        for _ in range(self._dice.randint(1, 4)):
            if not self._waiting or len(stay) + len(joining) >= self._limits.rows:
                break
            if used + self._size(self._waiting[0]) > self._limits.sizes:
                break
            stream = self._waiting.popleft()
            used += self._size(stream)
            joining.append(stream)
            company = len(stay) + len(joining) - 1
            event = "resumed" if stream.n_heard else "started"
            stream.note(f"{event} in {worker.name} beside {company or 'no'} other{'s' * (company != 1)}")
        return joining

    def _size(self, stream: _Stream) -> int:
        return self._limits.size(self._xs[stream.at])

    # -- comparing

    def _hear(self, worker: _Worker, outs: Outs) -> None:
        for row, kind, value, raw in outs:
            stream = worker.streams[row.id]
            alone = self._alone[stream.at]
            stream.n_silent = 0
            if _is_part(kind, value):
                if stream.n_heard < self._most_parts:
                    self._check_part(stream, alone, value)
                stream.n_heard += 1
                stream.raw.append(copy.deepcopy(raw))
            if kind != wire.MORE:
                del worker.streams[stream.id]
                self._check_end(stream, alone, _end_of(value))
        for stream in worker.streams.values():
            if stream.n_silent > _MOST_SILENT:
                raise self._error(stream, stream.n_heard, f"does not come in company, in {_MOST_SILENT} steps")

    def _check_part(self, stream: _Stream, alone: _Alone, part: Any) -> None:
        number = stream.n_heard
        if number >= len(alone.parts):
            should = f"the answer {alone.end}"
        elif self._equal(part, alone.parts[number]):
            return
        else:
            should = f"it is {_shown(alone.parts[number])}"
        raise self._error(stream, number, f"is {_shown(part)} in company, where alone {should}")

    def _check_end(self, stream: _Stream, alone: _Alone, end: str) -> None:
        number = stream.n_heard
        if number < len(alone.parts):
            should = f"it is {_shown(alone.parts[number])}"
        elif alone.end in (end, None):  # alone it was left before its end
            return
        else:
            should = f"the answer {alone.end}"
        raise self._error(stream, number, f"does not come in company, where the answer {end}, and alone {should}")

    def _error(self, stream: _Stream, number: int, text: str) -> _Different:
        history = stream.history[-_LONGEST_HISTORY:]
        dots = "... " if len(history) < len(stream.history) else ""
        return _Different(f"{self._name(stream.at)}, part {number} {text}. It was {dots}{', '.join(history)}", stream)

    async def _is_the_same_twice(self, at: int) -> bool:
        """Report whether an item gets the same if it is run alone once more."""
        first, again = self._alone[at], await self._run_alone(at)
        return (
            first.end == again.end
            and len(first.parts) == len(again.parts)
            and all(map(self._equal, first.parts, again.parts))
        )

    def _turns(self, n: int) -> list[int]:
        """Return the positions of items for streams: all of them take turns, shuffled each time."""
        turns: list[int] = []
        while len(turns) < n:
            turns += self._dice.sample(range(len(self._xs)), len(self._xs))
        return turns[:n]

    def _name(self, at: int) -> str:
        return f"item {at} ({_shown(self._xs[at])})"


def _is_part(kind: int, value: Any) -> bool:
    return kind != wire.END and type(value) is not Failed


def _end_of(value: Any) -> str:
    return f"fails with {named_text_of(value.error)}" if type(value) is Failed else "has ended"


def _shown(value: Any) -> str:
    return reprlib.repr(value)


def _equal(a: Any, b: Any) -> bool:
    if getattr(a, "shape", None) != getattr(b, "shape", None):
        return False
    same = a == b
    return bool(same.all()) if hasattr(same, "all") else bool(same)
