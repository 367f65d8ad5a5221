"""The running set of one worker: the states that the model gave, and what orders and steps make of
them.

Each method of the user's is called here, and guarded. What it raises ends as few streams as it can:

* `start` and `resume`: the streams are started again in halves, until the guilty ones are alone;
* `step`: what the states hold then is not defined, so all that were stepped are stopped, and begin
  again in halves, each of which makes one step at once. A stream that has had parts can do so only
  by `resume`. One that has lost steps by it comes to the step that has raised only after some
  others; until then its half is stepped in calls of its own;
* a result of the wrong length fails all that were in the call;
* out of memory is no stream's fault: the newest half is given back to the coordinator;
* an exception in the place of a part, and what `postprocess` or `collect` raises, fails its stream;
* `stop`: it is logged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from carpool.engine.call.results import OF_RESUME, OF_START, OF_STEP, Failed, as_results, is_bad_result
from carpool.engine.call.retry import Retrier, release_memory
from carpool.engine.fast_paths import fast_path
from carpool.engine.foreign import traceback_of
from carpool.engine.logger import logger
from carpool.engine.parts import END, Last, ends_answer
from carpool.engine.wire import order as wire
from carpool.engine.wire.payload import SCALARS
from carpool.engine.worker.own import own, own_part
from carpool.errors import ModelError


class StepModel(Protocol):
    """What a model of steps has; each method may be async."""

    def start(self, xs: list[Any]) -> Any:
        """Return a state for each item."""

    def step(self, states: list[Any]) -> Any:
        """Return for each state a part, None, a `Last`, `END` or an exception."""

    def stop(self, state: Any) -> Any:
        """Let go of a state."""


class Row:
    """One stream in a running set.

    Attributes:
        again: Returns the item once more, as it came; None if it will not begin again.
        is_given: Whether the model has been given the item, and may have changed it.
        accept: The encoding in which its caller wants parts, or the answer.
        takes: What its caller takes, see `wire/order.py`.
        state: What `start` or `resume` has returned.
        n_parts: How many parts the model has given.
        begun: How many steps the runner had made when the state was made, and `begun_parts` how
            many parts the model had given then.
        apart: The number of the half with which it is stepped apart from others; 0 if it is not.
        apart_until: The last step of the runner that is made so.
        raw: These parts, for `resume`; empty if the model has none.
        parts: These parts as callers get them, for a caller that takes the whole answer.
    """

    def __init__(
        self,
        id: int,
        item: Any,
        accept: int,
        takes: int,
        raw: Sequence[Any] = (),
        again: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        self.id = id
        self.item = item
        self.again = again
        self.is_given = False
        self.accept = accept
        self.takes = takes
        self.state: Any = None
        self.raw = list(raw)
        self.n_parts = self.begun_parts = len(self.raw)
        self.begun = self.apart = self.apart_until = 0
        self.parts: list[Any] = []


class Lineup:
    """The rows of one step, and what is the same in every step of theirs: the encoding that all of
    their callers want, -1 if they differ, and whether all of them take parts, and nothing else.
    """

    __slots__ = ("accept", "all_take_parts", "ids", "rows", "states")

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.states = [row.state for row in rows]
        self.ids = [row.id for row in rows]
        accepts = {row.accept for row in rows}
        self.accept = accepts.pop() if len(accepts) == 1 else -1
        self.all_take_parts = [row.takes for row in rows].count(wire.TAKES_PARTS) == len(rows)


class Outs:
    """What has come of streams, in columns of one length: as it was made, and then as it is sent.

    A stream is there more than once if a part of it is followed by its end.

    Attributes:
        kinds: `MORE`, `LAST`, `END` or `BACK` of `wire/order.py` for each, `LAST` if the value is
            `Failed`; once it is packed, an outcome if it has failed.
        values: The part of each, the whole answer of one that takes it, `Failed`, or None; once it
            is packed, the payload.
        kept: The part of each as the model gave it; once it is packed, how many buffers of the
            payload are the caller's, 0 for all. Empty if it is so of all.
        lineup: The rows of a step that gave each of them a part to be sent as it is, with more to
            come, where nothing else has come; else None.
        causes: Once it is packed, exceptions by position, if they may go as they are; else None.
    """

    __slots__ = ("causes", "kept", "kinds", "lineup", "rows", "values")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.kinds = bytearray()
        self.values: list[Any] = []
        self.kept: list[Any] = []
        self.lineup: Lineup | None = None
        self.causes: dict[int, BaseException] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[Row, int, Any, Any]]:
        return zip(self.rows, self.kinds, self.values, self.kept, strict=True)

    @property
    def ids(self) -> list[int]:
        return [row.id for row in self.rows] if self.lineup is None else self.lineup.ids

    @property
    def has_ends(self) -> bool:
        return self.kinds.count(wire.MORE) != len(self.kinds)

    def add(self, row: Row, kind: int, value: Any = None, kept: Any = None) -> None:
        self.rows.append(row)
        self.kinds.append(kind)
        self.values.append(value)
        self.kept.append(kept)

    def add_all(self, rows: Sequence[Row], kind: int, value: Any = None) -> None:
        for row in rows:
            self.add(row, kind, value)

    def extend(self, others: Outs) -> None:
        self.rows += others.rows
        self.kinds += others.kinds
        self.values += others.values
        self.kept += others.kept

    def then(self, later: Outs) -> Outs:
        if not self.values:
            return later
        self.extend(later)
        return self

    def part(self, begin: int, end: int) -> Outs:
        some = Outs()
        some.rows, some.kinds = self.rows[begin:end], self.kinds[begin:end]
        some.values, some.kept = self.values[begin:end], self.kept[begin:end]
        return some


class Measures:
    """What was done since the last report: how many streams were started or resumed and stepped,
    and the seconds that each took.
    """

    __slots__ = ("start_s", "started", "step_s", "stepped")

    def __init__(self) -> None:
        self.started = self.stepped = 0
        self.start_s = self.step_s = 0.0


class Runner:
    """A model of steps and its running set.

    Args:
        retrier: Knows which errors are whose fault, and how much time may be spent on finding out.
        postprocess: Called with each part, and with its item too if `postprocess_takes_x`.
        collect: Makes one answer of the parts; None for a list of them.
        before_next_call: Called before each call of the model but the first one of a step.
        in_step: Called as each call of `step` begins, as part of it.

    Attributes:
        measures: What was done since they were taken.
    """

    def __init__(
        self,
        model: StepModel,
        retrier: Retrier,
        *,
        can_resume: bool = False,
        postprocess: Callable[..., Any] | None = None,
        postprocess_takes_x: bool = False,
        collect: Callable[[list[Any]], Any] | None = None,
        before_next_call: Callable[[], None] | None = None,
        in_step: Callable[[], None] | None = None,
    ) -> None:
        self.measures = Measures()
        self._model = model
        self._retrier = retrier
        self._can_resume = can_resume
        self._postprocess = postprocess
        self._postprocess_takes_x = postprocess_takes_x
        self._collect = collect
        self._before_next_call = before_next_call
        self._in_step = in_step
        self._calls = 0  # since the last boundary
        self._has_run_again = False  # since the last boundary
        self._steps = 0  # made so far
        self._halves = 0  # how often rows were set apart
        self._has_apart = False  # some rows are stepped apart from the others
        self._running: dict[int, Row] = {}
        self._paused: dict[int, Row] = {}
        self._lineup: Lineup | None = None  # all of `_running`, until it changes

    @property
    def has_running(self) -> bool:
        return bool(self._running)

    def __len__(self) -> int:
        return len(self._running) + len(self._paused)

    # -- between two steps

    async def follow(self, order: wire.OrderHead, joining: list[Row]) -> Outs:
        began = self._begin_boundary()
        for id in order.leave:
            await self.leave(id)
        outs = Outs()
        for row in joining:
            if row.raw and row.takes == wire.TAKES_BOTH:
                await self._refill(row, outs)
        lost = set(outs.ids)
        await self._begin([row for row in joining if row.id not in lost] if lost else joining, outs)
        if order.pause or order.resume:
            _move(order.pause, self._running, self._paused)
            _move(order.resume, self._paused, self._running)
            self._lineup = None
        self._charge_since(began)
        return outs

    async def step(self) -> Outs:
        began = self._begin_boundary()
        self._steps += 1
        if self._has_apart:
            outs = await self._step_apart(list(self._running.values()))
        else:
            if self._lineup is None:
                self._lineup = Lineup(list(self._running.values()))
            outs = await self._step(self._lineup)
        if self._has_run_again:
            self._charge_since(began)
        return outs

    async def leave(self, id: int) -> None:
        row = self._running.get(id) or self._paused.get(id)
        if row is not None:
            await self._stop(row)

    async def stop_all(self) -> None:
        for row in [*self._running.values(), *self._paused.values()]:
            await self._stop(row)

    # -- beginning

    async def _begin(self, rows: list[Row], outs: Outs) -> None:
        """Start rows, or resume those that have had parts; add those of which nothing came."""
        new = [row for row in rows if not row.raw]
        had_parts = [row for row in rows if row.raw]
        for alike in (new, had_parts):
            if alike:
                await self._begin_alike(alike, outs)

    async def _begin_alike(self, rows: list[Row], outs: Outs) -> None:
        began = self._retrier.clock()
        n = len(rows)
        try:
            items = [await _item_of(row) for row in rows]
            if rows[0].raw:
                model: Any = self._model
                returned = await self._call(model.resume, items, [list(map(own, row.raw)) for row in rows])
                states = as_results(returned, n, OF_RESUME)
            else:
                states = as_results(await self._call(self._model.start, items), n, OF_START)
            self._lineup = None
            for row, state in zip(rows, states, strict=True):
                row.state = state
                row.begun, row.begun_parts = self._steps, row.n_parts
                self._running[row.id] = row
        except BaseException as error:
            if self._retrier.is_fatal(error):
                raise
            why = own(error)
        else:
            self.measures.started += n
            return
        finally:
            self.measures.start_s += self._retrier.clock() - began
        try:
            await self._begin_in_parts(rows, why, outs)
        finally:
            del why  # it holds this frame

    async def _begin_in_parts(self, rows: list[Row], error: BaseException, outs: Outs) -> None:
        older, newer = _halves(rows)
        if self._retrier.means_out_of_memory(error):
            release_memory(error)
            if older or len(self):
                await self._begin(older, outs)
                outs.add_all(newer, wire.BACK)
                return
        elif older and self._may_run_again(error):
            await self._begin(older, outs)
            await self._begin(newer, outs)
            return
        outs.add_all(rows, wire.LAST, Failed(error))

    # -- stepping

    async def _step(self, lineup: Lineup, more: bool = False) -> Outs:
        """Make one call of `step`; with `more` the model is called again before what has come is
        sent.
        """
        began = self._retrier.clock()
        rows, n = lineup.rows, len(lineup.rows)
        try:
            if self._in_step is not None:
                self._in_step()
            parts = as_results(await self._call(self._model.step, lineup.states[:]), n, OF_STEP)
        except BaseException as error:
            if self._retrier.is_fatal(error):
                raise
            why = own(error)
        else:
            self.measures.stepped += n
            self.measures.step_s += self._retrier.clock() - began
            # what is called meanwhile may fill the memory of the parts again: another step,
            # `postprocess`, or `collect` and `stop` of a stream that has ended
            is_plain = _PLAIN.issuperset(map(type, parts))
            if more or self._postprocess is not None or (not is_plain and any(map(ends_answer, parts))):
                parts = [own_part(part, self._postprocess is not None) for part in parts]
            plain = self._take_plain(lineup, parts)
            if plain is not None:
                return plain
            outs = Outs()
            for row, part in zip(rows, parts, strict=True):
                if part is not None:
                    await self._take(row, part, outs)
            return outs
        try:
            return await self._begin_anew(rows, why)
        finally:
            del why  # it holds this frame

    async def _step_apart(self, rows: list[Row]) -> Outs:
        """Step rows in several calls: each half that is not yet where a step raised has its own.

        It is for calls that raised, as the stepper's probation is for workers that died.
        """
        halves: dict[int, list[Row]] = {}
        for row in rows:
            if row.apart_until < self._steps:
                row.apart = 0
            halves.setdefault(row.apart, []).append(row)
        self._has_apart = halves.keys() != {0}
        outs = Outs()
        for half in halves.values():
            outs.extend(await self._step(Lineup(half), more=True))
        return outs

    def _missed(self, row: Row) -> int:
        """Return how many steps a row that begins anew makes again before the one under way."""
        made = self._steps - 1 - row.begun
        return made - (row.n_parts - row.begun_parts) if self._can_resume else made

    async def _begin_anew(self, rows: list[Row], error: BaseException) -> Outs:
        """Stop rows whose step has raised; those that can begin again do so in halves, and make
        the step that they have missed.
        """
        missed = {row.id: self._missed(row) for row in rows}
        for row in rows:
            await self._stop(row)
        lost = [row for row in rows if not self._can_begin_anew(row)]
        rows = [row for row in rows if row not in lost]
        outs, failure = Outs(), Failed(error)
        outs.add_all(lost, wire.LAST, failure)
        older, newer = _halves(rows)
        halves = [older, newer]
        if self._retrier.means_out_of_memory(error):
            release_memory(error)
            if not (older or lost or len(self)):
                outs.add_all(rows, wire.LAST, failure)
                return outs
            outs.add_all(newer, wire.BACK)
            halves = [older]
        elif not self._may_run_again(error) or not (older or lost):
            outs.add_all(rows, wire.LAST, failure)
            return outs
        for half in halves:
            if half:
                await self._begin(half, outs)
                half = [row for row in half if row.id in self._running]
                self._set_apart(half, missed)
                outs.extend(await self._step(Lineup(half), more=True))
        return outs

    def _set_apart(self, half: list[Row], missed: dict[int, int]) -> None:
        """Have rows that have begun anew stepped apart from others until each is where it was:
        `missed` is by id how many steps each must make again before the one that it has missed.
        """
        self._halves += 1
        for row in half:
            row.begun = self._steps - 1
            if missed[row.id] > 0:
                row.apart, row.apart_until = self._halves, self._steps + missed[row.id]
                self._has_apart = True

    def _can_begin_anew(self, row: Row) -> bool:
        """Report whether a stream can begin again; one that cannot be resumed loses its parts,
        which may not have been handed on.
        """
        if row.n_parts and not self._can_resume:
            if row.takes != wire.TAKES_WHOLE:
                return False
            row.n_parts = 0
            row.parts = []
        return True

    def _may_run_again(self, error: BaseException) -> bool:
        """Report whether streams may begin again after an error that may be only some streams'."""
        if is_bad_result(error) or not self._retrier.isolate_errors or not self._retrier.may_rerun():
            return False
        self._has_run_again = True
        return True

    def _begin_boundary(self) -> float:
        self._calls, self._has_run_again = 0, False
        return self._retrier.clock()

    def _charge_since(self, began: float) -> None:
        if self._has_run_again:
            self._retrier.charge(self._retrier.clock() - began)

    # -- one part

    async def _take(self, row: Row, given: Any, outs: Outs) -> None:
        """Add what has come of a row in a step: the model has given this in the place of a part,
        not None.
        """
        is_last = type(given) is Last
        part = given.value if is_last else given
        if part is END or part is None:
            await self._end(row, outs)
            return
        if issubclass(type(part), BaseException):
            await self._fail(row, part, outs)
            return
        value = part
        raw = own(part) if self._can_resume else part
        if self._postprocess is not None:
            try:
                value = own(await self._postprocessed(part, row))
            except BaseException as error:
                if self._retrier.is_fatal(error):
                    raise
                await self._fail(row, error, outs)
                return
        row.n_parts += 1
        if self._can_resume:
            row.raw.append(raw)
        if row.takes != wire.TAKES_WHOLE and not self._can_resume:
            row.again = None  # it cannot begin anew
        if row.takes == wire.TAKES_PARTS:
            outs.add(row, wire.LAST if is_last else wire.MORE, value, raw)
            if is_last:
                await self._stop(row)
            return
        row.parts.append(own(value))
        if row.takes == wire.TAKES_BOTH:
            outs.add(row, wire.MORE, value, raw)
        if is_last:
            await self._end(row, outs)

    @fast_path("parts_alike")
    def _take_plain(self, lineup: Lineup, parts: Any) -> Outs | None:
        """Take a step that gave a part for each row, all of them sent as they are; None if not.

        Fast path of `_take`: the same outcome, see tests/engine/worker/test_steps.py.
        """
        if self._postprocess is not None or not lineup.all_take_parts or type(parts) is not list:
            return None
        if not _PLAIN.issuperset(map(type, parts)):
            return None
        rows = lineup.rows
        for row in rows:
            row.n_parts += 1
            if not self._can_resume:
                row.again = None
        if self._can_resume:
            for row, part in zip(rows, parts, strict=True):
                row.raw.append(own(part))
        outs = Outs()
        outs.rows, outs.kinds, outs.values, outs.kept, outs.lineup = rows, bytearray(len(rows)), parts, parts, lineup
        return outs

    async def _refill(self, row: Row, outs: Outs) -> None:
        """Make the parts anew that another worker has given, since the whole answer needs them."""
        try:
            row.parts = [
                own(each) if self._postprocess is None else own(await self._postprocessed(own(each), row))
                for each in row.raw
            ]
        except BaseException as error:
            if self._retrier.is_fatal(error):
                raise
            outs.add(row, wire.LAST, Failed(error))

    async def _postprocessed(self, part: Any, row: Row) -> Any:
        assert self._postprocess is not None
        value = self._postprocess(part, row.item) if self._postprocess_takes_x else self._postprocess(part)
        if hasattr(value, "__await__"):
            value = await self._retrier.resolve(value)
        if issubclass(type(value), BaseException):
            raise value
        if value is None:
            raise ModelError("postprocess returned None in the place of a part", code="bad_result")
        return value

    async def _end(self, row: Row, outs: Outs) -> None:
        await self._stop(row)
        if row.takes == wire.TAKES_PARTS:
            outs.add(row, wire.END)
            return
        answer: Any = row.parts
        if self._collect is not None:
            try:
                answer = self._collect(row.parts)
                if hasattr(answer, "__await__"):
                    answer = await self._retrier.resolve(answer)
                answer = own(answer)
            except BaseException as error:
                if self._retrier.is_fatal(error):
                    raise
                answer = Failed(error)
            if issubclass(type(answer), BaseException):
                answer = Failed(answer)
        outs.add(row, wire.LAST, answer)

    async def _fail(self, row: Row, error: BaseException, outs: Outs) -> None:
        own(error)
        await self._stop(row)
        outs.add(row, wire.LAST, Failed(error))

    # -- calls of the model

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._calls and self._before_next_call is not None:
            self._before_next_call()
        self._calls += 1
        returned = method(*arguments)
        if hasattr(returned, "__await__"):
            returned = await self._retrier.resolve(returned)
        return returned

    async def _stop(self, row: Row) -> None:
        self._lineup = None
        if self._running.pop(row.id, None) is None:
            self._paused.pop(row.id, None)
        state, row.state = row.state, None
        try:
            returned = self._model.stop(state)
            if hasattr(returned, "__await__"):
                await self._retrier.resolve(returned)
        except BaseException as error:
            if self._retrier.is_fatal(error):
                raise
            logger.error("stop of a model raised, and its state may not be free:\n%s", traceback_of(error).rstrip())


_PLAIN: Final = (SCALARS - {type(None)}) | {bytes, dict, list, tuple}
"""Types of what can only be a part: neither None, `Last` or `END` nor an exception."""


def _move(ids: Sequence[int], source: dict[int, Row], target: dict[int, Row]) -> None:
    for id in ids:
        row = source.pop(id, None)
        if row is not None:
            target[id] = row


async def _item_of(row: Row) -> Any:
    """Return the item of a row as it came. Raises what it takes to prepare it once more."""
    if row.is_given and row.again is not None:
        item = await row.again()
        if type(item) is Failed:
            raise item.error
        row.item = own(item, handed_on=True)
    row.is_given = True
    return row.item


def _halves(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return the older and the newer half of rows; of a single one the older half is empty."""
    middle = len(rows) // 2
    return rows[:middle], rows[middle:]
