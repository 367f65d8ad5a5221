"""Handles that nobody holds any more: what they have started is ended, wherever and whenever they are collected."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

import carpool
from carpool import Service, Stage
from tests.effort import slow_where
from tests.service.dropped import Diary, Slow, echo
from tests.support import models
from tests.support.loops import on_a_loop
from tests.support.processes import existing, in_a_child
from tests.support.waiting import PATIENCE_S, let_go, wait_until

DOUBLE = Service(models.double, name="doubling")
DROPPED = "handle of service {} was dropped"
ENDED = "event loop of service {} has ended"
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """The collector leaves alone what other tests have left, at which these would have it look a hundred times."""
    gc.collect()
    gc.freeze()


@contextmanager
def told(name: str = "doubling", n: int = 1, what: str = DROPPED) -> Iterator[None]:
    """It is told of so many handles of a service that were dropped, and of nothing else, such as open sockets."""
    gc.collect()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
        gc.collect()
    texts = [str(each.message) for each in heard]
    assert [each.category for each in heard] == [ResourceWarning] * n, texts
    assert all(re.match(f"the ({what.replace('{}', name)}) .*close\\(\\)", text) for text in texts), texts


@contextmanager
def without_collector() -> Iterator[None]:
    """Only counting references: where that ends a handle, there is no cycle around it and nobody else who holds it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -- in threads


@pytest.mark.fault("F85")
def test_its_workers_and_its_thread_end(tmp_path: Path) -> None:
    """When a handle is dropped its models are torn down, and its workers and its thread end."""
    before = set(threading.enumerate())
    diary = tmp_path / "diary"
    s = Service(Stage(Diary, kwargs={"path": str(diary)}), name="doubling").start()
    assert s.predict(1) == 1
    pids = s.pids
    with told():
        del s
        wait_until(lambda: not existing(pids))
    assert diary.read_text() == "torn down"
    wait_until(lambda: {thread for thread in threading.enumerate() if thread.name == "carpool"} <= before)


def test_nobody_but_its_user_holds_it() -> None:
    """Whatever was called before, a handle goes with its user's last reference, and needs no
    collector.
    """
    s = Service(models.double, Stage(echo, run_in="loop"), name="doubling").start()
    assert s.predict(1) == 2
    assert list(s.stream(range(3))) == [0, 2, 4]
    assert s.stats().outcomes["ok"] == 4
    gone, pids = weakref.ref(s), s.pids
    with told(), without_collector():
        del s
        assert gone() is None
        wait_until(lambda: not existing(pids))


def test_the_warning_is_of_the_line_that_drops_it() -> None:
    """The warning of a dropped handle names the line that drops it, if a line does so and not the
    collector.
    """
    s = DOUBLE.start()
    with pytest.warns(ResourceWarning, match="was dropped") as heard:
        del s
    assert [each.filename for each in heard] == [__file__]


def test_a_stream_holds_it() -> None:
    """A stream holds its handle until it has ended or is dropped itself."""
    with told():
        assert list(DOUBLE.start().stream(range(100))) == [2 * i for i in range(100)]
    s = DOUBLE.start()
    answers, pids = s.stream(iter(range(10_000))), s.pids
    del s
    assert next(answers) == 0
    gc.collect()
    assert existing(pids) == pids
    with told():
        del answers
        wait_until(lambda: not existing(pids))


def test_parts_that_were_left_do_not_hold_it() -> None:
    """An answer in parts holds its handle until its block ends, and no longer, whoever keeps the
    parts and whatever refers to them in a circle.
    """
    s = DOUBLE.start()
    gone, pids = weakref.ref(s), s.pids
    with told(), without_collector():
        with s.predict_stream(1) as parts:
            del s
            assert gone() is not None
            assert list(parts) == [2]
        assert gone() is None
        wait_until(lambda: not existing(pids))


@on_a_loop
async def test_parts_of_a_task_that_were_left_do_not_hold_it() -> None:
    """The same for a task's answer in parts, which is left before it has come."""
    s = Service(models.double, name="doubling").run_async()
    await s.start()
    gone, pids = weakref.ref(s), s.pids
    with told(), without_collector():
        async with s.predict_stream(1) as parts:
            del s
        assert parts is not None
        assert gone() is None
        await asyncio.to_thread(wait_until, lambda: not existing(pids))


def test_a_call_holds_it() -> None:
    """A call whose handle is dropped meanwhile is answered, and then the service ends."""
    heard: list[Any] = []
    with told("Slow"):
        thread = threading.Thread(target=lambda: heard.append(Service(Slow).start().predict(0.3)))
        thread.start()
        thread.join(PATIENCE_S)
    assert heard == [0.3]


def test_in_the_thread_of_its_own_loop() -> None:
    """A callback or a model may be the last one to hold a handle, so that it is dropped in the
    thread of its own loop.
    """
    held = [DOUBLE.start()]
    thread, pids = held[0]._thread, held[0].pids
    assert thread is not None
    with told():
        thread.post(held.clear)
        wait_until(lambda: not existing(pids))


@pytest.mark.fault("F85")
def test_while_somebody_holds_our_locks() -> None:
    """A handle may be collected in the midst of `post`, in the thread that holds our locks and in
    any other.
    """
    for in_another in (False, True):
        held = [DOUBLE.start()]
        thread, pids = held[0]._thread, held[0].pids
        assert thread is not None
        with told():
            with thread._lock, thread._afterwards:
                dropping = threading.Thread(target=held.clear)
                (dropping.run if not in_another else dropping.start)()
                wait_until(lambda held=held: not held)
                if in_another:
                    dropping.join(PATIENCE_S)
                    assert not dropping.is_alive()
            wait_until(lambda pids=pids: not existing(pids))


@pytest.mark.fault("F85")
def test_while_its_loop_stands_still() -> None:
    """Who drops a handle whose loop stands still does not wait; the workers end when the loop goes
    on.
    """
    go_on = threading.Event()
    s = DOUBLE.start()
    thread, pids = s._thread, s.pids
    assert thread is not None
    thread.post(lambda: go_on.wait(PATIENCE_S))
    with told():
        began = time.monotonic()
        del s
        assert time.monotonic() - began < PATIENCE_S / 2
        assert existing(pids) == pids
        go_on.set()
        wait_until(lambda: not existing(pids))


@pytest.mark.fault("F85")
def test_in_a_forked_child_nothing_is_done() -> None:
    """In a forked child a dropped handle does nothing: it is the parent's, and goes on there."""
    held = [DOUBLE.start()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", "the handle")
            assert in_a_child(held.clear) == 7
            assert held[0].predict(2) == 4
    finally:
        held[0].close()


def test_one_that_does_not_run_is_dropped_in_silence() -> None:
    """A handle that was closed, never started or has failed to start is dropped in silence."""
    handles = [DOUBLE.start(), DOUBLE.run(), Service(models.RaisesInSetup).run()]
    handles[0].close()
    with pytest.raises(carpool.StartupError):
        handles[2].start()
    with told(n=0):
        handles.clear()


def test_a_program_that_ends_says_nothing() -> None:
    """A program that ends says nothing of handles that it leaves open, in a global, in a cycle or
    in a thread.
    """
    program = """
        import os, carpool
        from tests.support import models

        class Holder: pass

        if __name__ == "__main__":
            s = carpool.Service(models.double).start()
            holder = Holder()
            holder.me, holder.handle = holder, carpool.Service(models.double).start()
            print(s.predict(1), holder.handle.predict(2), *s.pids, *holder.handle.pids)
            del holder
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    first, second, *pids = map(int, done.stdout.split())
    assert (first, second, done.returncode) == (2, 4, 0)
    assert "was dropped" not in done.stderr
    wait_until(lambda: not existing(pids))


def test_closed_while_the_interpreter_ends() -> None:
    """A handle that is closed by what is collected as the interpreter ends, when threads have ended
    already, waits for nothing, also without a limit in time.
    """
    program = """
        import os, sys, types, carpool
        from tests.support import models

        class Holder:
            def __del__(self, write=os.write):
                self.handle.close()
                write(1, b"closed")

        sys.modules["other"] = other = types.ModuleType("other")  # whose names go after those of this one
        other.holder = Holder()
        other.holder.handle = carpool.Service(carpool.Stage(models.double, run_in="thread"), timeout_s=None).start()
        other.holder.handle.predict(1)
        del other
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("closed", "", 0)


# -- in asyncio


@pytest.mark.fault("F85")
@slow_where(lambda new_loop: new_loop is uvloop.new_event_loop)
@LOOPS
def test_on_a_loop_that_goes_on(new_loop: Any) -> None:
    """An async handle that is dropped while its loop goes on leaves no task and no worker behind; a
    call or a stream under way holds it.
    """

    async def main() -> None:
        before = asyncio.all_tasks()
        s = DOUBLE.run_async()
        await s.start()
        pids = s.pids
        call, answers = asyncio.ensure_future(s.predict(1)), s.stream(range(100))
        del s
        assert await call == 2
        assert [y async for y in answers] == [2 * i for i in range(100)]
        del call, answers
        while existing(pids):
            let_go()
            await asyncio.sleep(0.01)
        while asyncio.all_tasks() != before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=new_loop) as runner, told():
        runner.run(asyncio.wait_for(main(), PATIENCE_S))


@slow_where(lambda new_loop: new_loop is uvloop.new_event_loop)
@LOOPS
def test_in_another_thread_than_its_loop_s(new_loop: Any) -> None:
    """When an async handle is dropped in another thread than its loop's, the loop hears of it."""

    async def main() -> None:
        held = [DOUBLE.run_async()]
        await held[0].start()
        pids = held[0].pids
        await asyncio.to_thread(held.clear)
        while existing(pids):
            let_go()
            await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=new_loop) as runner, told():
        runner.run(asyncio.wait_for(main(), PATIENCE_S))


@slow_where(lambda new_loop, inside: inside is (new_loop is uvloop.new_event_loop))
@LOOPS
@pytest.mark.parametrize("inside", [False, True])
def test_a_program_that_returns_without_closing(new_loop: Any, inside: bool, caplog: pytest.LogCaptureFixture) -> None:
    """If a program returns without having closed its handle, the loop's end meets the closing
    before it begins or in its midst, and nothing is left all the same.

    Whether the loop's end lets go of the handle before the loop has ended is up to the version of Python.
    """
    pids: list[int] = []

    async def main() -> None:
        s = Service(Slow, Stage(echo, run_in="loop"), name="doubling").run_async()
        await s.start()
        pids.extend(s.pids)
        if inside:
            asyncio.ensure_future(s.predict(30.0))  # noqa: RUF006
            await asyncio.sleep(0.05)

    with told(what=f"{DROPPED}|{ENDED}"):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main())
        assert existing(pids) == []
    assert [record.getMessage() for record in caplog.records] == []  # of tasks that were destroyed, say


@slow_where(lambda new_loop: new_loop is uvloop.new_event_loop)
@LOOPS
def test_when_its_loop_ends(new_loop: Any) -> None:
    """The workers of an async handle end with its loop, whoever still holds it, and dropping it
    later says nothing more.
    """
    held: list[carpool.AsyncHandle] = []

    async def main() -> None:
        held.append(await DOUBLE.run_async().__aenter__())

    async def ask() -> None:
        await held[0].predict(1)

    with told(what=ENDED):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main())
            pids = held[0].pids
            assert existing(pids) == pids
        assert existing(pids) == []
        with pytest.raises(RuntimeError, match="has ended: start it anew"):
            asyncio.run(ask())
        held.clear()


@pytest.mark.fault("F85")
@slow_where(lambda new_loop: new_loop is uvloop.new_event_loop)
@LOOPS
def test_after_its_loop_has_been_closed(new_loop: Any) -> None:
    """A loop that is closed by `close` alone tells nobody: the workers of its handle end when that
    is dropped.
    """
    held = [DOUBLE.run_async()]
    loop = new_loop()
    loop.run_until_complete(held[0].start())
    pids = held[0].pids
    loop.close()
    assert existing(pids) == pids
    with told():
        held.clear()
        assert existing(pids) == []


async def ended(pids: list[int]) -> None:
    """Waits until these processes have ended, and each task of the loop but this one."""
    async with asyncio.timeout(PATIENCE_S):
        while existing(pids) or asyncio.all_tasks() != {asyncio.current_task()}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@slow_where(lambda new_loop, goes_on: goes_on is (new_loop is uvloop.new_event_loop))
@LOOPS
@pytest.mark.parametrize("goes_on", [False, True])
def test_while_its_loop_does_not_run(new_loop: Any, goes_on: bool, tmp_path: Path) -> None:
    """If an async handle is dropped while its loop does not run its workers end by themselves, torn
    down; whether the loop runs once more or is closed, it lets go of them.
    """
    diary = tmp_path / "diary"
    held = [Service(Stage(Diary, kwargs={"path": str(diary)}), name="doubling").run_async()]
    loop = new_loop()
    loop.run_until_complete(held[0].start())
    pids = held[0].pids
    with told():
        held.clear()
        wait_until(diary.exists)
        if goes_on:
            loop.run_until_complete(ended(pids))
        loop.close()
        assert existing(pids) == []


@on_a_loop
async def test_a_closing_that_is_cancelled_before_it_begins_ends_the_workers() -> None:
    """Cancelling all tasks also cancels a closing that has not begun, and the workers end all the
    same: the service is closed then.
    """
    s = DOUBLE.run_async()
    await s.start()
    pids = s.pids
    closing = s._running.begin_to_close(drain=True)
    assert closing is not None
    closing.cancel()
    await asyncio.wait([closing], timeout=PATIENCE_S)
    assert existing(pids) == []
    with pytest.raises(carpool.Unavailable, match="has stopped"):
        await s.predict(1)
    await s.close()


def test_an_error_of_a_stream_s_input_does_not_hold_it() -> None:
    """An error of a stream's input that is kept holds the frames that it went through, and not the
    service.
    """

    def items() -> Iterator[int]:
        yield 1
        raise ValueError("of the input")

    handle = DOUBLE.start()
    pids = handle.pids
    with pytest.raises(ValueError, match="of the input") as kept:
        list(handle.stream(items()))
    with told():
        del handle
        gc.collect()
    assert kept.value.__traceback__ is not None
    wait_until(lambda: not existing(pids))
