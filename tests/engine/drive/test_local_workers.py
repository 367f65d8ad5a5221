"""Models on the loop and in threads: whatever their code raises is an item's error and costs no worker, and what comes
from outside (a kill, the end of the loop) still ends them.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from tests.effort import slow_where
from tests.support.loops import cancel_unbegun, on_a_loop
from tests.support.output import Output
from tests.support.waiting import PATIENCE_S


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Trap(Exception):
    """Not even its class can be asked for."""

    __class__ = property(lambda self: 1 / 0)  # type: ignore[assignment]


class FullOfTraps(MemoryError):
    __cause__ = __context__ = __traceback__ = property(lambda self: 1 / 0)  # type: ignore[assignment]


RAISED = [
    *(ValueError, StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError, KeyboardInterrupt),
    *(SystemExit, MemoryError, RecursionError, Mute, Trap, FullOfTraps),
]


class Awkward:
    """Awaitable, and raises in a way of its own."""

    def __init__(self, error: type[BaseException], where: str) -> None:
        self.error, self.where = error, where

    def __await__(self) -> Generator[Any, None, Any]:
        if self.where == "__await__":
            raise self.error
        return self._steps()

    def _steps(self) -> Generator[Any, None, Any]:
        raise self.error
        yield


class Raises(carpool.Model):
    """Raises what a bad item is, in one of many places."""

    def __init__(self, where: str) -> None:
        self.where = where

    def preprocess(self, x: Any) -> Any:
        if self.where == "preprocess" and x is not None:
            raise x
        return x

    def predict(self, xs: list[Any]) -> Any:
        bad = [x for x in xs if x is not None]
        if not bad or self.where in ("preprocess", "postprocess"):
            return xs
        if self.where == "predict":
            raise bad[0]
        if self.where == "result":
            return [x if x is None else x() for x in xs]
        if self.where == "coroutine":
            return self._later(bad[0])
        return Awkward(bad[0], self.where)

    async def _later(self, error: type[BaseException]) -> Any:
        await asyncio.sleep(0)
        raise error

    def postprocess(self, y: Any) -> Any:
        if self.where == "postprocess" and y is not None:
            raise y
        return y


class RaisesOnLoop(Raises):
    """The same model as `async def`, for the loop."""

    async def setup(self) -> None: ...


PLACES = {
    "loop": ["preprocess", "predict", "result", "coroutine", "__await__", "its steps", "postprocess"],
    "thread": ["preprocess", "predict", "result", "__await__", "its steps", "postprocess"],
}


@pytest.mark.parametrize(("run_in", "where"), [(run_in, where) for run_in in PLACES for where in PLACES[run_in]])
def test_whatever_user_code_raises_fails_its_item(run_in: Any, where: str) -> None:
    """Each kind of exception in each place of a model on the loop or in a thread is a `ModelError`
    that names it, and its mate is answered by the same worker.
    """
    model = RaisesOnLoop if run_in == "loop" else Raises
    stage = Stage(model, run_in=run_in, max_batch_size=2, kwargs={"where": where})
    with Service(stage, timeout_s=10).run() as service:
        for error in RAISED:
            mate, bad = service.stream([None, error], return_exceptions=True)
            assert mate is None
            assert isinstance(bad, carpool.ModelError)
            # generators and coroutines must not raise StopIteration, says Python
            renamed = error is StopIteration and where in ("coroutine", "__await__", "its steps")
            assert bad.type_name == ("RuntimeError" if renamed else error.__name__)
            assert str(bad)
        assert service.predict(None) is None
        assert service.stats().stages[0].restarts == 0
        assert service._thread is not None
        assert service._thread.loop.is_running()


class RaisesAtTheEnds(carpool.Model):
    def __init__(self, where: str, error: type[BaseException]) -> None:
        self.at, self.error = where, error

    def predict(self, xs: list[Any]) -> list[Any]:
        return xs

    def setup(self) -> None:
        if self.at == "setup":
            raise self.error

    def teardown(self) -> None:
        if self.at == "teardown":
            raise self.error


class RaisesAtTheEndsOnLoop(RaisesAtTheEnds):
    async def preprocess(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("run_in", ["loop", "thread"])
@pytest.mark.parametrize("error", RAISED)
def test_a_setup_or_teardown_that_raises_ends_the_worker_and_nothing_else(
    run_in: Any, error: type[BaseException]
) -> None:
    """If `setup` raises, the start says what it was; if `teardown` raises, the end is as always."""
    model = RaisesAtTheEndsOnLoop if run_in == "loop" else RaisesAtTheEnds
    stage = Stage(model, run_in=run_in, max_batch_size=2, kwargs={"where": "setup", "error": error})
    with pytest.raises(carpool.StartupError, match="could not be set up"):
        Service(stage).start()
    stage = Stage(model, run_in=run_in, max_batch_size=2, kwargs={"where": "teardown", "error": error})
    began = time.monotonic()
    with Service(stage).run() as service:
        assert service.predict(None) is None
    assert time.monotonic() - began < 4.0


# -- what comes from outside


class Waits(carpool.Model):
    """Tells when it is asked, and waits until it is let go."""

    begun = 0

    async def predict(self, xs: list[Any]) -> list[Any]:
        Waits.begun += 1
        await asyncio.sleep(0 if xs == ["at once"] else 600)
        return xs


async def begun() -> None:
    """Wait until `Waits` is in a call."""
    async with asyncio.timeout(PATIENCE_S):
        while not Waits.begun:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("at", ["idle", "in a call"])
@on_a_loop
async def test_a_cancelled_worker_ends(at: str) -> None:
    """A task that is cancelled from outside ends, and another worker answers: that is no error of
    an item.
    """
    Waits.begun = 0
    async with Service(Stage(Waits, run_in="loop", max_batch_size=2)).run_async() as service:
        (worker,) = service.driver.executors[0]._workers.values()  # type: ignore[attr-defined]
        if at == "in a call":
            waiting = asyncio.ensure_future(service.predict("long"))
            await begun()
            waiting.cancel()
        worker._task.cancel()
        await asyncio.wait([worker._task], timeout=PATIENCE_S)
        assert worker._task.done()
        assert await service.predict("at once") == "at once"
        assert service.stats().stages[0].restarts == 1


def test_a_loop_that_ends_ends_its_workers() -> None:
    """At the end of `asyncio.run` tasks that are workers end without `close`, and do not hold it
    up.
    """

    async def main() -> None:
        service = Service(Stage(Waits, run_in="loop", max_batch_size=2)).run_async()
        await service.start()
        asyncio.ensure_future(service.predict("long"))  # noqa: RUF006
        await asyncio.sleep(0.05)

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    # which of the two comes first is up to the version of Python
    with pytest.warns(ResourceWarning, match=r"the (handle|event loop) of service Waits (was dropped|has ended)"):
        thread.join(timeout=10)
    assert not thread.is_alive()


# -- where it hangs


@on_a_loop
async def test_the_stack_of_a_task_is_the_model_s() -> None:
    """The stack of a task is where the model waits, without what has called it; one that has ended
    has none.
    """
    Waits.begun = 0
    async with Service(Stage(Waits, run_in="loop", max_batch_size=2)).run_async() as service:
        (worker,) = service.driver.executors[0]._workers.values()  # type: ignore[attr-defined]
        waiting = asyncio.ensure_future(service.predict("long"))
        await begun()
        stack = worker._stack()
        assert "await asyncio.sleep" in stack
        assert "in _stack" not in stack
        assert "run_forever" not in stack
        worker._task.cancel()
        await asyncio.wait([worker._task])
        assert worker._stack().splitlines() == [f"Task {worker._name}:"]
        waiting.cancel()


def test_no_thread_to_be_had_is_an_error_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system has no thread to give the start fails with that error, as where it has no
    process.
    """
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("carpool r/"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(carpool.StartupError, match="no thread can be started"):
        Service(Stage(Raises, name="r", run_in="thread", max_batch_size=2, kwargs={"where": ""})).start()


# -- sinks


def bad_sink(error: type[BaseException]) -> tuple[Callable[[str, bool, str], None], Output]:
    output = Output()

    def sink(worker: str, is_error: bool, line: str) -> None:
        output(worker, is_error, line)
        raise error

    return sink, output


@slow_where(lambda error: error not in (ValueError, SystemExit))
@pytest.mark.parametrize("error", RAISED)
def test_a_sink_that_raises_loses_its_lines_and_nothing_else(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """A sink that raises while a hung worker is given up loses its lines only: the worker is
    replaced, and the log tells once.
    """
    sink, output = bad_sink(error)
    stage = Stage(Waits, name="m", run_in="loop", max_batch_size=2, max_batch_time_s=0.2, idempotent=False)
    with Service(stage, timeout_s=5).run(output=sink) as service:
        for _ in range(2):
            with pytest.raises(carpool.Unavailable):
                service.predict("long")
        assert service.predict("at once") == "at once"
    assert len(output.lines) > 2
    told = [record.message for record in caplog.records if "output= raised" in record.message]
    assert len(told) == 1
    assert f"output= raised {error.__name__} for a line of worker m/0" in told[0]


@on_a_loop
async def test_a_worker_that_is_cancelled_before_it_begins_is_replaced() -> None:
    """If the task of a worker on the loop is cancelled before its first step, as at the end of a
    loop, the service hears of it and does not wait for it forever.
    """
    handle = Service(Stage(Waits, run_in="loop", max_batch_size=2)).run_async()
    start = asyncio.ensure_future(handle.start())
    await cancel_unbegun("LoopWorker._live")
    with pytest.raises(carpool.StartupError, match="its task was cancelled"):
        await asyncio.wait_for(start, 10)
    await handle.close()


class InSetup(carpool.Model):
    def setup(self) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def predict(self, x: int) -> int:
        return x


class InPredict(carpool.Model):
    def predict(self, x: int) -> int:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        return x


def test_what_needs_a_main_thread_is_told_of_processes() -> None:
    """A model that sets a signal's handler in a thread gets Python's error, with the way that there is."""
    hint = 'signal only works in main thread.*run_in="process"'
    with Service(Stage(InPredict, run_in="thread")).run() as running, pytest.raises(carpool.ModelError, match=hint):
        running.predict(1)
    with pytest.raises(carpool.StartupError, match='run_in="process"'):
        Service(Stage(InSetup, run_in="thread")).start()
