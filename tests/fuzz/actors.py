"""How steps are taken: by threads, which block, and by tasks, which await. Both hand what comes to the run.

A step that answers wrongly raises `Wrong`; any other exception is judged by the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tests.fuzz import models, verdict
from tests.fuzz.program import (
    Batch,
    Cancel,
    Change,
    Close,
    Fork,
    HangUp,
    Item,
    Kill,
    Leave,
    Many,
    Parts,
    Predict,
    Result,
    Silence,
    Sleep,
    StartAgain,
    Stats,
    Step,
    Stream,
    Submit,
)

if TYPE_CHECKING:
    from tests.fuzz.run import Run

SLOW_INPUT_S = 0.01
SLOW_READER_S = 0.002
LOOK_S = 0.005
CHANGE_S = 3.0
"""How long streams may go on in a worker that goes."""
CHILD_S = 6.0
"""A forked child that has not ended by then hangs."""
CHILD_CALL_S = 1.0
"""How long a forked child asks its parent's server."""


class Wrong(Exception):
    """An answer that is not the caller's own."""


class Asked:
    """An item as it is sent, and whether an answer is its own."""

    def __init__(self, run: Run, item: Item) -> None:
        token = next(run.tokens)
        subject = run.program.subject
        self._run = run
        self.token = self._token = token
        self._merges = isinstance(subject, Batch) and subject.over == "merge"
        do = item.do
        if (self._merges and do == "return") or (getattr(subject, "way", "") == "app" and do == "dump"):
            do = ""  # it would be a row like any other; it would not be sent at all
        self._cargo = models.new_cargo(getattr(subject, "cargo", ""), token)
        sent = models.Sent(token, do, item.kind, item.at, cargo=self._cargo)
        self._rows = 1 + token % 3 if self._merges else 1
        x: Any = models.Stubborn(sent, "dump") if do == "dump" and not self._merges else sent
        self.x = [sent] * self._rows if self._merges else x
        self._arrays = isinstance(subject, Batch) and subject.over == "arrays"
        if self._arrays:
            self.x = np.full(1 + token % 3, token, (np.int64, np.float32)[token % 2])

    def check(self, answer: Any) -> None:
        """Raises Wrong."""
        if self._arrays:
            if answer.dtype != self.x.dtype or not np.array_equal(answer, 2 * self.x):
                raise Wrong(f"asked with {self.x!r}, answered {answer!r:.300}")
            return
        answers = answer if self._merges and isinstance(answer, list) else [answer]
        program, facts = self._run.program, self._run.facts
        if len(answers) != self._rows or not all(verdict.is_own(program, facts, self._token, each) for each in answers):
            raise Wrong(f"asked with token {self._token}, answered {answer!r:.300}")
        if not models.holds(self._cargo, self._token):
            raise Wrong(f"the item of token {self._token} was written over: {self._cargo!r:.300}")
        if self._cargo is not None:
            for cargo in verdict.cargoes(answer):
                self._run.keep(self._token, cargo)


class Heard:
    """The parts of one answer, each checked as it comes."""

    def __init__(self, run: Run, step: Parts) -> None:
        self.asked = Asked(run, step.item)
        self._in_parts = run.program.in_parts
        self._over_json = run.program.over_http
        self._token = self.asked.token
        self._n = 0
        self._whole: Any = None

    @property
    def n(self) -> int:
        """How many there were."""
        return self._n

    def hear(self, part: Any) -> None:
        """Raises Wrong."""
        if self._whole is not None:
            raise Wrong(f"of token {self._token} a part came after the last one: {part!r:.300}")
        self._n += 1
        if self._in_parts and self._n <= models.n_parts(self._token):
            if tuple(part) != ("part", self._token, self._n):
                raise Wrong(f"of token {self._token} part {self._n} is {part!r:.300}")
            return
        self.asked.check(models.sent(part) if self._over_json else part)
        self._whole = part

    def end(self, answer: Any = None) -> None:
        """Raises Wrong."""
        if self._whole is None:
            raise Wrong(f"the answer to token {self._token} ended after {self._n} parts")
        if answer is not None:
            self.asked.check(answer)


def _check_all(asked: list[Asked], answers: list[Any]) -> None:
    if len(asked) != len(answers):
        raise Wrong(f"{len(asked)} items have {len(answers)} answers")
    for one, answer in zip(asked, answers, strict=True):
        one.check(answer)


class InThread:
    """An actor that takes its steps in a thread."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def take(self, step: Step) -> None:
        """Take one step. Raises what its call raises."""
        run = self.run
        match step:
            case Predict():
                asked = Asked(run, step.item)
                asked.check(self._predict(asked.x, step))
            case Many():
                many = [Asked(run, item) for item in step.items]
                if run.is_batch:
                    _check_all(many, run.subject.many([each.x for each in many]))
                else:
                    _check_all(many, [run.subject.predict(each.x) for each in many])
            case Stream():
                self._stream(step)
            case Parts():
                self._parts(step)
            case Submit():
                asked = Asked(run, step.item)
                run.tickets.append((run.subject.submit(asked.x, lead=step.lead), asked))
            case Result() if run.tickets:
                ticket, asked = run.tickets[step.ticket % len(run.tickets)]
                ticket.done()
                asked.check(ticket.result(step.timeout_s))
            case Cancel() if run.tickets:
                run.tickets[step.ticket % len(run.tickets)][0].cancel()
            case Close():
                run.subject.close() if run.is_batch else run.subject.close(step.drain)
            case HangUp():
                run.subject.hang_up(step.drops)
            case Silence():
                run.subject.fall_silent()
            case Stats() if not run.is_batch:
                run.subject.stats()
                run.subject.story(1)
                _ = run.subject.pids
            case StartAgain() if not run.is_batch and not run.facts.early and not run.program.has_client:
                run.subject.start()
                raise Wrong("a handle was started twice")
            case Kill() if not run.is_batch:
                kill_one(run)
            case Change() if step.workers:
                run.subject.scale(f"stage{step.stage}", step.workers, grace_s=CHANGE_S)
            case Change():
                run.subject.reload(grace_s=CHANGE_S)
            case Fork():
                fork(run, step)
            case Sleep():
                time.sleep(step.seconds)

    def _predict(self, x: Any, step: Predict) -> Any:
        if self.run.is_batch:
            return self.run.subject(x)
        return self.run.subject.predict(x, timeout_s=step.timeout_s, priority=step.priority)

    def _parts(self, step: Parts) -> None:
        heard = Heard(self.run, step)
        if step.on_part:
            heard.end(self.run.subject.predict(heard.asked.x, timeout_s=step.timeout_s, on_part=heard.hear))
            return
        said = self.run.subject.predict_stream(heard.asked.x, timeout_s=step.timeout_s)
        if self.run.program.has_client:
            said = contextlib.nullcontext(said) if step.drops else contextlib.closing(said)
        with said as parts:
            if step.leave_after == 0:
                return
            for part in parts:
                heard.hear(part)
                if heard.n == step.leave_after:
                    return
                time.sleep(SLOW_READER_S if step.slow else 0)
            heard.end()

    def _stream(self, step: Stream) -> None:
        run = self.run
        asked: list[Asked] = []
        if run.is_batch:
            answers = run.subject.many(_input(run, step, asked))
            _check_all(asked, answers)
            return
        stream = run.subject.stream(_input(run, step, asked), **_settings(run, step))
        taken = 0
        for answer in stream:
            _check_one(run, step, asked, taken, answer)
            taken += 1
            if taken == step.leave_after:
                if not step.drops:
                    stream.close()
                return
        _check_whole(step, taken)


class InTask:
    """An actor that takes its steps in a task."""

    def __init__(self, run: Run) -> None:
        self.run = run

    async def take(self, step: Step) -> None:
        """Take one step. Raises what its call raises."""
        run = self.run
        match step:
            case Predict():
                asked = Asked(run, step.item)
                asked.check(await self._predict(asked.x, step))
            case Many():
                many = [Asked(run, item) for item in step.items]
                if run.is_batch:
                    _check_all(many, await run.subject.many([each.x for each in many]))
                else:
                    await self._gather(many)
            case Stream():
                await self._stream(step)
            case Parts():
                await self._parts(step)
            case Leave():
                await self._leave(step)
            case Close():
                await (run.subject.close() if run.is_batch else run.subject.close(step.drain))
            case HangUp():
                await run.subject.hang_up(step.drops)
            case Silence():
                run.subject.fall_silent()
            case Stats() if not run.is_batch:
                done = run.subject.stats()
                if hasattr(done, "__await__"):
                    await done
                run.subject.story(1)
                _ = run.subject.pids
            case StartAgain() if not run.is_batch and not run.facts.early and not run.program.over_http:
                await run.subject.start()
                raise Wrong("a handle was started twice")
            case Kill() if not run.is_batch:
                kill_one(run)
            case Change() if step.workers:
                await run.subject.scale(f"stage{step.stage}", step.workers, grace_s=CHANGE_S)
            case Change():
                await run.subject.reload(grace_s=CHANGE_S)
            case Fork():
                await fork_async(run, step)
            case Sleep():
                await asyncio.sleep(step.seconds)

    async def _predict(self, x: Any, step: Predict) -> Any:
        if self.run.is_batch:
            return await self.run.subject(x)
        return await self.run.subject.predict(x, timeout_s=step.timeout_s, priority=step.priority)

    async def _gather(self, many: list[Asked]) -> None:
        calls = [asyncio.ensure_future(self.run.subject.predict(each.x)) for each in many]
        try:
            answers = await asyncio.gather(*calls)
        except BaseException:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            raise
        _check_all(many, answers)

    async def _leave(self, step: Leave) -> None:
        """Cancelling must end it, with no other outcome than it might have had uncancelled."""
        task = asyncio.ensure_future(self._outcome(step.step))
        await asyncio.sleep(step.after_s)
        task.cancel()
        try:
            error = await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
        else:
            if error is not None:
                raise error

    async def _outcome(self, step: Step) -> BaseException | None:
        """What it raises: a task that raised a KeyboardInterrupt would end the loop."""
        try:
            await self.take(step)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return error
        return None

    async def _parts(self, step: Parts) -> None:
        heard = Heard(self.run, step)
        if step.on_part:
            heard.end(await self.run.subject.predict(heard.asked.x, timeout_s=step.timeout_s, on_part=heard.hear))
            return
        said = self.run.subject.predict_stream(heard.asked.x, timeout_s=step.timeout_s)
        if self.run.program.has_client:
            said = contextlib.nullcontext(said) if step.drops else contextlib.aclosing(said)
        async with said as parts:
            if step.leave_after == 0:
                return
            async for part in parts:
                heard.hear(part)
                if heard.n == step.leave_after:
                    return
                await asyncio.sleep(SLOW_READER_S if step.slow else 0)
            heard.end()

    async def _stream(self, step: Stream) -> None:
        run = self.run
        asked: list[Asked] = []
        if run.is_batch:
            answers = await run.subject.many(_input(run, step, asked))
            _check_all(asked, answers)
            return
        xs: Any = _input_async(run, step, asked) if step.source.startswith("async") else _input(run, step, asked)
        stream = run.subject.stream(xs, **_settings(run, step))
        taken = 0
        async with contextlib.nullcontext() if step.drops else contextlib.aclosing(stream):
            async for answer in stream:
                _check_one(run, step, asked, taken, answer)
                taken += 1
                if taken == step.leave_after:
                    return
        _check_whole(step, taken)


# -- inputs of streams


def _settings(run: Run, step: Stream) -> dict[str, Any]:
    """What a handle's `stream` and a client's `predict_many` are given besides their input."""
    own = {"timeout_s": step.timeout_s} if run.program.has_client else {"max_in_flight": step.max_in_flight}
    return {"return_exceptions": step.return_exceptions, **own}


def _input(run: Run, step: Stream, asked: list[Asked]) -> Any:
    if step.source == "list":
        asked += [Asked(run, item) for item in step.items]
        return [each.x for each in asked]
    return _generated(run, step, asked)


def _generated(run: Run, step: Stream, asked: list[Asked]) -> Iterator[Any]:
    for item in _until_it_raises(step):
        if "slow" in step.source and not run.program.in_tasks:
            time.sleep(SLOW_INPUT_S)
        asked.append(Asked(run, item))
        yield asked[-1].x


async def _input_async(run: Run, step: Stream, asked: list[Asked]) -> AsyncIterator[Any]:
    for item in _until_it_raises(step):
        await asyncio.sleep(SLOW_INPUT_S if "slow" in step.source else 0)
        asked.append(Asked(run, item))
        yield asked[-1].x


def _until_it_raises(step: Stream) -> Iterator[Item]:
    """The items; half of them where the source raises, which makes a `StopIteration` a RuntimeError."""
    if "raises" not in step.source:
        yield from step.items
        return
    yield from step.items[: len(step.items) // 2]
    models.throw(step.kind)


def _check_one(run: Run, step: Stream, asked: list[Asked], at: int, answer: Any) -> None:
    if at >= len(asked):
        raise Wrong(f"{len(asked)} items were read and there is an answer more: {answer!r:.300}")
    if isinstance(answer, BaseException) and step.return_exceptions:
        if not run.may_raise(step, answer):
            raise Wrong(f"a stream yielded {type(answer).__name__}") from answer
        return
    asked[at].check(answer)


def _check_whole(step: Stream, taken: int) -> None:
    if "raises" in step.source:
        raise Wrong(f"the input raised {step.kind}, and the stream ended as if complete after {taken} answers")
    if taken != len(step.items):
        raise Wrong(f"a stream of {len(step.items)} items ended after {taken} answers")


# -- processes


def kill_one(run: Run) -> None:
    """Kill a worker process from outside."""
    with contextlib.suppress(IndexError, ProcessLookupError):
        os.kill(run.subject.pids[0], signal.SIGKILL)


class Child:
    """A forked child, which tries something with the parent's subject and must end by itself.

    Args:
        run: Of the parent.
        step: Says what it tries.
    """

    def __init__(self, run: Run, step: Fork) -> None:
        self._told = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the child lives
        self._pid = os.fork()
        if self._pid == 0:
            warnings.filterwarnings("ignore", "this process was forked after")
            self._live(run, step)
        run.children.append(self)

    def ended(self) -> bool:
        """Whether it has. Raises Wrong with what it has told, if it did not end well."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid == 0:
            return False
        self._told.seek(0)
        told = self._told.read().decode(errors="replace")
        self._told.close()
        if status != 0:
            raise Wrong(f"a forked child ended with {os.waitstatus_to_exitcode(status)}\n{told}")
        return True

    def end(self) -> None:
        """Kill it, if nobody waits for it any more."""
        if not self._told.closed:
            self._told.close()
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _live(self, run: Run, step: Fork) -> NoReturn:
        code = 3
        try:
            faulthandler.dump_traceback_later(CHILD_S, exit=True, file=self._told)
            code = self._try(run, step)
        except BaseException:
            os.write(self._told.fileno(), traceback.format_exc().encode())
        finally:
            os._exit(code)

    def _try(self, run: Run, step: Fork) -> int:
        tried = TRIED[step.then]
        if run.program.has_client and isinstance(tried, Predict | Stream):
            # Where the parent's server ends meanwhile, its socket listens on in this process, and nobody answers.
            tried = replace(tried, timeout_s=CHILD_CALL_S)
        try:
            if run.program.in_tasks:
                asyncio.run(InTask(run).take(tried))
            else:
                InThread(run).take(tried)
        except BaseException as error:
            if not (run.may_raise(step, error) or run.may_raise(tried, error)):
                raise
        return 0


TRIED: dict[str, Step] = {
    "predict": Predict(),
    "stream": Stream((Item(), Item())),
    "stats": Stats(),
    "close": Close(),
    "nothing": Sleep(0.0),
}
"""What a forked child may try."""


def fork(run: Run, step: Fork) -> None:
    """Fork, and wait for the child."""
    child = Child(run, step)
    while not child.ended():
        time.sleep(LOOK_S)


async def fork_async(run: Run, step: Fork) -> None:
    """Fork in a task, and wait for the child."""
    child = Child(run, step)
    try:
        while not child.ended():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(LOOK_S)
    finally:
        child.end()
