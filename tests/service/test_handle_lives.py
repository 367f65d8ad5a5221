"""The life of a handle against real threads, tasks, forks and loops: every public call ends.

`core/life.py` is explored in all orders by tests/engine/core/test_life.py; here are the situations that users meet.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import carpool
from carpool import Service, Stage
from carpool.engine.core.life import LifeState
from carpool.engine.drive import loop_thread
from carpool.engine.drive.pools import BatchPool
from carpool.engine.policy import Decision, DoneBatch, View
from carpool.service import thread_handle
from carpool.service.handle import AsyncHandle
from tests.effort import slow_where
from tests.support import models
from tests.support.loops import on_a_loop
from tests.support.processes import in_a_child
from tests.support.waiting import PATIENCE_S, wait_until


def echo(xs: list[Any]) -> list[Any]:
    return xs


def slow(xs: list[Any]) -> list[Any]:
    time.sleep(0.5)
    return xs


def first(xs: list[Any]) -> list[Any]:
    return [x[0] for x in xs]


async def echo_async(xs: list[Any]) -> list[Any]:
    return xs


class SlowToLoad(carpool.Model):
    def setup(self) -> None:
        time.sleep(0.5)

    def predict(self, xs: list[Any]) -> list[Any]:
        return xs


THREADED = Service(Stage(echo, max_batch_size=8, run_in="thread"), timeout_s=PATIENCE_S, name="echo")
SLOW = Service(Stage(slow, max_batch_size=8, run_in="thread"), timeout_s=PATIENCE_S, name="slow")
ON_LOOP = Service(Stage(echo_async, max_batch_size=8, run_in="loop"), timeout_s=PATIENCE_S, name="loop")


def in_threads(n: int, work: Callable[[], object]) -> list[object]:
    """What `work` returned or raised in each of `n` threads, none of which may hang."""
    heard: list[object] = []

    def run() -> None:
        try:
            heard.append(work())
        except BaseException as error:
            heard.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(heard) == n, f"{n - len(heard)} of {n} threads hang"
    return heard


# -- closing


def test_a_stream_that_outlives_its_service_ends_with_an_error() -> None:
    """When a service closes, its streams give the answers of what was inside and then raise that it
    has stopped.
    """
    with THREADED.run() as s:
        answers = s.stream(range(1000))
        assert next(answers) == 0
    heard = in_threads(1, lambda: list(answers))
    assert isinstance(heard[0], carpool.Unavailable)


def test_a_stream_whose_input_is_slow_hears_of_the_end_at_its_next_item() -> None:
    """A stream whose input is slow raises at its next item after the service has closed, and does
    not wait for what was read later.
    """
    more = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        more.wait(PATIENCE_S)
        yield 2

    s = THREADED.start()
    answers = s.stream(source())
    assert next(answers) == 1
    s.close()
    more.set()
    heard = in_threads(1, lambda: list(answers))
    assert isinstance(heard[0], carpool.Unavailable)


def test_a_stream_that_is_dropped_after_the_service_has_closed_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Dropping a stream after its service has closed prints no "Exception ignored" for a generator
    that is thrown away.
    """
    with THREADED.run() as s:
        answers = s.stream(range(1000))
        next(answers)
    del answers
    gc.collect()
    assert "ignored" not in capfd.readouterr().err


@pytest.mark.fault("F72")
@pytest.mark.parametrize("drain", [True, False])
def test_calls_that_meet_the_end_are_answered(drain: bool) -> None:
    """While many threads call all the time and the service closes, each call ends with its answer
    or `Unavailable`.
    """
    for _ in range(5):
        s = THREADED.start()
        closed = threading.Event()
        wrong: list[object] = []

        def call(s: carpool.Handle = s, closed: threading.Event = closed, wrong: list[object] = wrong) -> None:
            while True:
                try:
                    if s.predict(1) != 1:
                        wrong.append("another's answer")
                except carpool.Unavailable:
                    if closed.wait(0.001):
                        return
                except BaseException as error:
                    wrong.append(error)
                    return

        def close(s: carpool.Handle = s, closed: threading.Event = closed) -> None:
            time.sleep(0.02)
            s.close(drain)
            closed.set()

        closer = threading.Thread(target=close)
        closer.start()
        in_threads(16, call)
        closer.join()
        assert wrong == []


@pytest.mark.fault("F72")
@pytest.mark.parametrize("busy", [False, True])
def test_many_threads_close_at_once(busy: bool) -> None:
    """When many threads close at once all return once everything has ended, and closing again does
    nothing.
    """
    before = set(threading.enumerate())
    s = SLOW.start()
    caller = threading.Thread(target=lambda: s.predict(1)) if busy else None
    if caller is not None:
        caller.start()
        time.sleep(0.1)
    assert in_threads(4, s.close) == [None] * 4
    s.close()
    if caller is not None:
        caller.join(PATIENCE_S)
    assert [t.name for t in set(threading.enumerate()) - before if t.name.startswith("carpool")] == []


@pytest.mark.slow
def test_who_closes_without_draining_hurries_one_who_drains() -> None:
    """When one thread drains and another closes without draining, what is inside is failed at once,
    and both return.
    """
    s = Service(Stage(models.Slow, max_batch_size=1), timeout_s=30).start()
    heard: list[BaseException] = []

    def ask() -> None:
        try:
            s.predict(10.0)
        except BaseException as error:
            heard.append(error)

    caller = threading.Thread(target=ask)
    caller.start()
    time.sleep(0.2)
    began = time.monotonic()
    closer = threading.Thread(target=s.close)
    closer.start()
    time.sleep(0.1)
    s.close(drain=False)
    closer.join(PATIENCE_S)
    caller.join(PATIENCE_S)
    assert time.monotonic() - began < 8.0
    assert isinstance(heard[0], carpool.Unavailable)


@pytest.mark.fault("F72")
@on_a_loop
async def test_two_tasks_close_at_once() -> None:
    """When two tasks close at once neither waits for a time-out."""
    s = SLOW.run_async()
    await s.start()
    call = asyncio.ensure_future(s.predict(1))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await asyncio.gather(s.close(), s.close(), s.close())
    assert time.monotonic() - began < PATIENCE_S / 2
    assert await call == 1


@on_a_loop
async def test_a_task_that_is_cancelled_while_it_closes_leaves_the_closing_to_go_on() -> None:
    """A time-out around `close` does not leave a service half closed: if the task is cancelled, the
    closing goes on.
    """
    gate = asyncio.Event()

    async def gated(xs: list[int]) -> list[int]:
        await gate.wait()
        return xs

    s = Service(Stage(gated, max_batch_size=8, run_in="loop")).run_async()
    await s.start()
    call = asyncio.ensure_future(s.predict(1))
    await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(s.close(), 0.05)
    gate.set()
    await s.close()
    assert await call == 1
    with pytest.raises(carpool.Unavailable, match="has stopped"):
        await s.predict(1)


@pytest.mark.fault("F72")
@on_a_loop
async def test_a_service_that_is_closed_while_it_starts() -> None:
    """If a service is closed while it starts both calls end, and the start says why."""
    may_load = threading.Event()

    class Loads(carpool.Model):
        def setup(self) -> None:
            may_load.wait(PATIENCE_S)

        def predict(self, xs: list[Any]) -> list[Any]:
            return xs

    s = Service(Stage(Loads, max_batch_size=1, run_in="thread")).run_async()
    start = asyncio.ensure_future(s.start())
    await asyncio.sleep(0.05)
    closing = asyncio.ensure_future(s.close())
    await asyncio.sleep(0.05)
    may_load.set()
    with pytest.raises(carpool.Unavailable, match="closed while it was starting"):
        await start
    await closing
    assert s.pids == []


def test_a_closed_service_says_so_and_still_has_its_stats() -> None:
    """A closed service answers calls with `Unavailable`, and its stats can still be read."""
    with THREADED.run() as s:
        s.predict(1)
    for call in (lambda: s.predict(1), lambda: next(s.stream([1]))):
        with pytest.raises(carpool.Unavailable, match="has stopped"):
            call()
    assert s.stats().outcomes["ok"] == 1
    with pytest.raises(RuntimeError, match="started before"):
        s.start()


def test_a_start_that_is_refused_can_be_made_again() -> None:
    """A start that was refused has started nothing, and can be made again."""

    def local(xs: list[Any]) -> list[Any]:
        return xs

    s = Service(Stage(local, max_batch_size=2)).run()
    for _ in range(2):
        with pytest.raises(TypeError, match="top level of a module"):
            s.start()
    s.close()


# -- the wrong process, thread or loop


def test_a_start_that_is_interrupted_ends_whoever_begins_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a start is interrupted while it is closing what it began, the interrupted thread still
    stops the loop.
    """
    handle = Service(Stage(SlowToLoad, max_batch_size=8), timeout_s=5).run()
    post = loop_thread.LoopThread.post

    def post_late(thread: loop_thread.LoopThread, work: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while handle._inner.state is not LifeState.DRAINING and time.monotonic() < deadline:
            time.sleep(0)
        post(thread, work)

    def interrupted(futures: list[Any], timeout: float) -> Any:
        while handle._inner.state is not LifeState.STARTING:
            time.sleep(0.001)
        monkeypatch.setattr(loop_thread.LoopThread, "post", post_late)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop_thread, "wait", interrupted)
    (heard,) = in_threads(1, handle.start)
    assert isinstance(heard, KeyboardInterrupt)
    assert handle._inner.state is LifeState.CLOSED


def test_a_start_without_a_thread_to_be_had_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start for which the system had no thread can be made again, since the system may have one
    then.
    """
    handle = THREADED.run()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _refuse_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            handle.start()
    with handle:
        assert handle.predict(1) == 1


def _refuse_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class LeavesTasks(carpool.Model):
    """Starts a task of its own, which does something else than to end when it is cancelled."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def setup(self) -> None:
        self.task = asyncio.ensure_future(self.go_on())

    async def go_on(self) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if self.kind == "exits":
                    raise SystemExit(3) from None

    async def predict(self, xs: list[Any]) -> list[Any]:
        if self.kind == "hangs":
            await self.go_on()
        return xs


@slow_where(lambda kind: kind == "hangs")
@pytest.mark.parametrize("kind", ["goes on", "exits", "hangs"])
def test_tasks_that_do_not_end_do_not_keep_a_service_from_being_closed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing ends in bounded time, whatever becomes of the tasks of `async def` models when they
    are cancelled.
    """
    monkeypatch.setattr(loop_thread, "_TASKS_END_S", 0.2)
    handle = Service(Stage(LeavesTasks, kwargs={"kind": kind}, max_batch_size=8, run_in="loop"), timeout_s=0.5).start()
    if kind == "hangs":
        with pytest.raises(carpool.DeadlineExceeded):
            handle.predict(1)
    assert in_threads(1, handle.close) == [None]


def test_a_thread_may_post_while_it_posts() -> None:
    """A thread may post to the loop while it is posting, as when a signal handler or a collected
    generator comes in the midst of it.
    """
    thread = loop_thread.LoopThread("test")
    mailbox, done = thread._mailbox, []

    class Interrupted(type(mailbox)):  # type: ignore[misc]
        __slots__ = ()

        def post(self, work: Callable[[], object]) -> bool:
            thread._mailbox = mailbox
            thread.post(lambda: done.append("within"))
            return mailbox.post(work)

    thread._mailbox = Interrupted()
    (heard,) = in_threads(1, lambda: thread.post(lambda: done.append("around")))
    assert heard is None
    thread.ask(lambda: None, PATIENCE_S)
    assert done == ["within", "around"]
    thread.post(thread.stop)
    thread.wait_until_ended(PATIENCE_S)


@pytest.mark.parametrize("who", ["the service, once more", "the task itself"])
def test_a_loop_that_is_stopped_while_it_ends_its_tasks_still_ends_them_all(who: str) -> None:
    """A loop that is stopped while it ends its tasks still ends them all: a second closer may come
    by then, and the tasks themselves may call `stop()`.
    """
    thread, ended = loop_thread.LoopThread("test"), []

    async def linger() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            (thread if who == "the service, once more" else thread.loop).stop()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
            ended.append(who)

    tasks = thread.ask(lambda: [thread.loop.create_task(linger())], PATIENCE_S)
    thread.ask(lambda: None, PATIENCE_S)
    thread.post(thread.stop)
    thread.wait_until_ended(PATIENCE_S)
    assert ended == [who] and tasks[0].done()


@pytest.mark.fault("F72")
def test_a_forked_child_can_neither_use_nor_hang_in_its_parent_s_service() -> None:
    """In a forked child calls of the parent's service raise, closing it and leaving its block do
    nothing, and the parent's goes on.
    """
    with THREADED.run() as s:
        s.predict(1)
        assert in_a_child(s.close) == 7
        assert in_a_child(lambda: s.__exit__()) == 7
        assert in_a_child(lambda: s.predict(1)) == 8
        assert in_a_child(lambda: next(s.stream([1]))) == 8
        assert in_a_child(s.stats) == 8
        assert s.predict(2) == 2


@contextlib.contextmanager
def meanwhile(act: Callable[[], object], has_begun: threading.Event, go_on: threading.Event) -> Iterator[None]:
    """Around what happens between two events in a thread that does something: it has begun, and may go on."""
    thread = threading.Thread(target=act)
    thread.start()
    try:
        assert has_begun.wait(PATIENCE_S)
        yield
    finally:
        go_on.set()
        thread.join()


def test_a_child_that_is_forked_while_the_loop_ends_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is forked while the handle is closed already, but its loop still has work, does
    not wait for that loop.
    """
    ending, go_on = threading.Event(), threading.Event()

    async def linger(until: float) -> None:
        ending.set()
        go_on.wait(PATIENCE_S)

    monkeypatch.setattr(loop_thread, "_end_tasks", linger)
    s = THREADED.start()
    with meanwhile(s.close, ending, go_on):
        assert in_a_child(s.stats) == 8
        assert in_a_child(s.close) == 7


def test_a_child_that_is_forked_before_its_parent_s_loop_has_begun_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child that is forked once a service has a thread, and before its life has begun there, does not wait for it."""
    begun, go_on = threading.Event(), threading.Event()
    start = AsyncHandle.start

    async def start_late(handle: AsyncHandle) -> AsyncHandle:
        begun.set()
        go_on.wait(PATIENCE_S)
        return await start(handle)

    monkeypatch.setattr(AsyncHandle, "start", start_late)
    s = THREADED.run()
    with meanwhile(s.start, begun, go_on):
        assert in_a_child(s.stats) == 2  # the error says that the service does not run
    s.close()


def test_a_handle_that_was_made_before_a_fork_can_be_started_in_the_child() -> None:
    """A handle that was made before a fork and never started can be started in the child: only a
    life that has begun ends with a fork.
    """
    s = THREADED.run()

    def use() -> None:
        with s:
            assert s.predict(3) == 3

    assert in_a_child(use) == 7
    with s:
        assert s.predict(4) == 4


def test_a_service_must_not_be_asked_in_the_thread_of_its_own_loop() -> None:
    """A sink, a size function or an async model that calls its own service would wait for itself,
    and gets an error.
    """
    heard: list[BaseException] = []

    class Asking(carpool.Model):
        async def predict(self, xs: list[Any]) -> list[Any]:
            for act in (lambda: s.predict(1), lambda: s.stream([1]), s.close):
                try:
                    act()
                except BaseException as error:
                    heard.append(error)
            s.stats()
            return xs

    with Service(Stage(Asking, max_batch_size=8, run_in="loop"), timeout_s=5).run() as s:
        assert s.predict(1) == 1
    assert [type(error) for error in heard] == [RuntimeError] * 3
    assert all("its own loop" in str(error) for error in heard)


def test_nor_by_a_sink_or_a_size_of_its_own() -> None:
    """When a sink or a `size` calls its own service the sink's line is reported, the item that
    cannot be weighed fails alone, and the next ones are answered.
    """
    heard: list[str] = []

    def ask(*_: object) -> int:
        try:
            return s.predict(1)  # type: ignore[no-any-return]
        except RuntimeError as error:
            heard.append(str(error))
            raise

    def sink(worker: str, is_error: bool, line: str) -> None:
        ask()

    weighed = Stage(echo, name="weighed", max_batch_size=8, run_in="thread", size=lambda x: ask() if x == "ask" else 1)
    with Service(Stage(models.Talks), weighed, timeout_s=5).run(output=sink) as s:
        said = s.predict("x")
        wait_until(lambda: heard)
        assert s.predict("x") == said
    of_the_sink = len(heard)

    first_stage = Stage(echo, max_batch_size=8, run_in="thread")
    with Service(first_stage, weighed, timeout_s=5).run() as s:
        good, bad = s.stream([1, "ask"], return_exceptions=True)
        assert (good, type(bad)) == (1, carpool.ModelError)
        assert s.predict(2) == 2
    assert len(heard) == of_the_sink + 1 > 1
    assert all("its own loop" in text for text in heard)


def test_an_async_handle_belongs_to_its_loop() -> None:
    """On a loop other than its own the calls of an async handle raise at once, whether that one
    still runs or not.
    """
    held: list[carpool.AsyncHandle] = []

    async def start() -> None:
        held.append(await ON_LOOP.run_async().__aenter__())
        assert await held[-1].predict(1) == 1

    async def use() -> None:
        s = held[-1]
        with pytest.raises(RuntimeError, match="has ended"):
            await s.predict(1)
        with pytest.raises(RuntimeError, match="has ended"):
            s.stream([1])
        await s.close()

    asyncio.run(start())
    asyncio.run(use())

    async def use_while_it_runs() -> None:
        async with ON_LOOP.run_async() as s:

            async def elsewhere() -> None:
                for act in (lambda: s.predict(1), s.close):
                    with pytest.raises(RuntimeError, match="another event loop"):
                        await act()

            await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
            assert await s.predict(2) == 2

    asyncio.run(use_while_it_runs())


def test_workers_of_a_loop_that_ended_are_ended_when_that_is_noticed() -> None:
    """When `asyncio.run` has ended without `close`, the workers of a handle are ended by the next
    call on another loop.
    """
    service = Service(Stage(models.scale, max_batch_size=8))
    held: list[carpool.AsyncHandle] = []
    pids: list[int] = []

    async def start() -> None:
        held.append(await service.run_async().__aenter__())
        pids.extend(held[0].pids)

    async def close() -> None:
        await held[0].close()

    asyncio.run(start())
    asyncio.run(close())
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_program_that_ends_with_a_service_open_ends() -> None:
    """A program that ends while a service is open does end, whatever still waits inside it."""
    program = """
        import threading, time
        import carpool

        def slow(xs):
            time.sleep(30)
            return xs

        s = carpool.Service(carpool.Stage(slow, max_batch_size=8, run_in="thread"), timeout_s=60).start()
        threading.Thread(target=lambda: s.predict(1), daemon=True).start()
        time.sleep(0.2)
        print("over")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.stdout, done.stderr, done.returncode) == ("over\n", "", 0)


# -- a loop that stands still


class Blocking(carpool.Policy):
    """A policy that blocks the loop of its service."""

    def decide(self, view: View) -> Decision:
        time.sleep(4.0)
        return Decision()


@pytest.mark.fault("F74")
@pytest.mark.slow
def test_a_thread_does_not_wait_for_a_loop_that_stands_still() -> None:
    """A thread whose service's loop stands still is told so a second after its deadline."""
    service = Service(Stage(echo, max_batch_size=8, run_in="thread", policy=Blocking()), timeout_s=0.5)
    with service.run() as s:
        began = time.monotonic()
        with pytest.raises(carpool.DeadlineExceeded, match="is its loop blocked"):
            s.predict(1)
        assert time.monotonic() - began < 3.5


def test_statistics_do_not_wait_for_a_loop_that_stands_still() -> None:
    """`stats()` asks on the loop; if that stands still it ends with an error after the service's
    time-out and a second.
    """
    go_on = threading.Event()

    async def block(xs: list[Any]) -> list[Any]:
        go_on.wait(PATIENCE_S)
        return xs

    with Service(Stage(block, max_batch_size=8, run_in="loop"), timeout_s=0.3).run() as s:
        try:
            with pytest.raises(carpool.DeadlineExceeded, match="is its loop blocked"):
                s.predict(1)
            (heard,) = in_threads(1, s.stats)
            assert isinstance(heard, carpool.DeadlineExceeded)
        finally:
            go_on.set()
        assert s.stats().stages


@pytest.mark.slow
def test_closing_does_not_wait_for_ever_for_a_loop_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loop stands still `close` says so, and can be called again; worker processes are ended
    meanwhile.
    """
    monkeypatch.setattr(thread_handle, "_SILENT_S", 0.5)
    stages = (
        Stage(echo, max_batch_size=8),
        Stage(echo_async, name="loop", run_in="loop", max_batch_size=8, policy=Blocking()),
    )
    s = Service(*stages, timeout_s=0.5).start()
    (pid,) = s.pids
    caller = threading.Thread(target=lambda: in_threads(1, lambda: s.predict(1)))
    caller.start()
    time.sleep(0.3)
    with pytest.raises(carpool.DeadlineExceeded, match="is its loop blocked"):
        s.close()
    time.sleep(4.0)  # the loop goes on meanwhile
    s.close()
    caller.join(PATIENCE_S)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.fault("F81")
def test_a_batch_that_cannot_be_handed_over_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a batch cannot be handed over, for want of memory for its message for example, its callers
    hear of it, and the next ones are served.
    """
    run = BatchPool.run
    raised: list[int] = []

    def run_but_once(stage: BatchPool, batch: Any) -> None:
        if not raised:
            raised.append(batch.id)
            raise MemoryError
        run(stage, batch)

    monkeypatch.setattr(BatchPool, "run", run_but_once)
    with THREADED.run() as s:
        with pytest.raises(carpool.Unavailable, match="could not be handed to a worker: MemoryError"):
            s.predict(1)
        assert s.predict(2) == 2


# -- policies that raise


class Raising(carpool.Policy):
    """A policy that raises in one of its calls."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where = where
        self.error = error

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise self.error

    def decide(self, view: View) -> Decision:
        self._maybe("decide")
        return Decision(take=view.queue.size, reason="free") if view.free and view.queue.size else Decision()

    def arrived(self, now: float, requests: Any) -> None:
        self._maybe("arrived")

    def learn(self, now: float, done: DoneBatch) -> None:
        self._maybe("learn")

    def explain(self, now: float) -> dict[str, Any]:
        self._maybe("explain")
        return super().explain(now)


@pytest.mark.fault("F73")
@pytest.mark.parametrize("where", ["decide", "arrived", "learn"])
@pytest.mark.parametrize("error", [ValueError("a bug"), StopIteration(), GeneratorExit(), SystemExit(3)], ids=repr)
def test_a_policy_that_raises_fails_its_stage_loudly(
    where: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """When a policy raises all who are inside its stage and all who come hear so at once, but for
    those whose batch was done; and closing works.
    """
    service = Service(Stage(echo, max_batch_size=8, run_in="thread", policy=Raising(where, error)), timeout_s=30)
    with service.run() as s:
        began = time.monotonic()
        if where == "learn":
            assert s.predict(1) == 1
        for _ in range(2):
            with pytest.raises(carpool.Unavailable, match="stage echo has failed: its policy raised") as caught:
                s.predict(1)
            assert caught.value.code == "stage_failed"
        assert time.monotonic() - began < 10.0
        assert s.stats().outcomes["unavailable"] == 2
    assert "stage echo has failed: its policy raised" in caplog.text


def test_a_policy_that_cannot_explain_itself_harms_nobody() -> None:
    """If a policy's `explain` raises the stats say so, and nothing else is harmed."""
    policy = Raising("explain", ValueError("no words"))
    with Service(Stage(echo, max_batch_size=8, run_in="thread", policy=policy)).run() as s:
        assert s.predict(1) == 1
        assert s.stats().stages[0].policy["error"] == "ValueError: no words"


# -- streams' inputs


def frames(buffer: Any) -> Iterator[Any]:
    """One buffer, filled again and again."""
    for i in range(200):
        buffer[0] = i
        yield buffer


@pytest.mark.fault("F75")
@pytest.mark.parametrize("size", [1, 100, 20_000], ids=["list", "array", "large array"])
@on_a_loop
async def test_a_stream_takes_items_as_they_are_when_they_are_read(size: int) -> None:
    """A stream takes each item as it is when it is read, so an input may use one buffer again and
    again, in threads and in asyncio.
    """
    service = Service(Stage(first, max_batch_size=8, run_in="thread"))

    def buffer() -> Any:
        return [0] if size == 1 else np.zeros(size)

    with service.run() as s:
        assert list(s.stream(frames(buffer()))) == list(range(200))

    async with service.run_async() as s:
        assert [y async for y in s.stream(frames(buffer()))] == list(range(200))


@pytest.mark.fault("F75")
@on_a_loop
async def test_an_asynchronous_input_that_is_cancelled_ends_its_stream_with_that() -> None:
    """When an asynchronous input is cancelled, its stream raises that, and does not end as if the
    input were complete.
    """

    async def source() -> AsyncIterator[int]:
        yield 1
        other = asyncio.ensure_future(asyncio.sleep(9))
        other.cancel()
        await other
        yield 2

    async with ON_LOOP.run_async() as s:
        answers = s.stream(source())
        assert await anext(answers) == 1
        with pytest.raises(asyncio.CancelledError):
            await anext(answers)


def test_an_item_that_cannot_be_sent_is_returned_in_its_place_in_both_kinds_of_streams() -> None:
    """With `return_exceptions` an item that cannot be sent is returned as an error in its place, in
    both kinds of streams.
    """
    items = [1, lambda: None, 2]
    with THREADED.run() as s:
        in_threads_heard = list(s.stream(items, return_exceptions=True))

    async def main() -> list[Any]:
        async with ON_LOOP.run_async() as s:
            return [y async for y in s.stream(items, return_exceptions=True)]

    for heard in (in_threads_heard, asyncio.run(main())):
        assert heard[0] == 1
        assert heard[2] == 2
        assert isinstance(heard[1], Exception)
