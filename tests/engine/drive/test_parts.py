"""Answers in parts, from the model to a caller in Python: in processes, threads and on the loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import carpool
from carpool import DeadlineExceeded, ModelError, Service, Stage, Unavailable
from carpool.engine.drive.callers import PAUSE_BYTES
from carpool.engine.drive.pools import _parts_of
from carpool.engine.wire import order as wire
from carpool.engine.wire.frame import Frame, FrameKind
from carpool.engine.worker import serve
from tests.effort import slow_where
from tests.support.parts import (
    Counting,
    Held,
    HeldLater,
    HeldSteps,
    Later,
    Once,
    Resuming,
    Spelling,
    StepsLater,
    Together,
    up_to,
)

LONG_S = 30.0

FORMS = {
    "steps in a process": Stage(Resuming, max_batch_size=4),
    "steps in threads": Stage(Resuming, max_batch_size=4, run_in="thread", workers=2),
    "steps on the loop": Stage(StepsLater, max_rows=4, run_in="loop"),
    "a generator for each item": Stage(Once, run_in="thread"),
    "generators that share a worker": Stage(Once, run_in="thread", max_rows=3),
    "a generator for each batch": Stage(Together, max_batch_size=4, run_in="thread"),
    "a generator on the loop": Stage(Later, run_in="loop"),
}

HELD: dict[str, tuple[type[carpool.Model], dict[str, Any]]] = {
    "a generator in a process": (Held, {}),
    "a generator in a thread": (Held, {"run_in": "thread"}),
    "generators that share a worker": (Held, {"run_in": "thread", "max_rows": 4}),
    "steps in a thread": (HeldSteps, {"run_in": "thread", "max_batch_size": 4}),
    "a generator on the loop": (HeldLater, {"run_in": "loop"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_caller_gets_its_own_parts_in_order(form: str) -> None:
    """Whatever the form of the model and wherever it runs, a caller gets its own parts, as they
    come or collected.
    """
    with Service(FORMS[form]).run() as s:
        with s.predict_stream(5) as parts:
            assert list(parts) == up_to(5)
        assert s.predict(3) == up_to(3)
        heard: list[int] = []
        assert s.predict(4, on_part=heard.append) == up_to(4) == heard
        assert list(s.stream([2, 7, 1])) == [up_to(2), up_to(7), up_to(1)]
        got: dict[int, list[int]] = {}

        def ask(n: int) -> None:
            with s.predict_stream(n) as parts:
                got[n] = list(parts)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert got == {n: up_to(n) for n in range(1, 10)}


def test_tasks_get_parts_likewise() -> None:
    """On the loop, parts are iterated with `async for`, and `on_part` may be a coroutine function."""

    async def main() -> None:
        async with Service(Stage(Spelling, max_batch_size=8, run_in="thread")).run_async() as s:

            async def ask(n: int) -> list[Any]:
                async with s.predict_stream(n) as parts:
                    return [part async for part in parts]

            said = [[f"number {i}" for i in up_to(n)] for n in range(1, 12)]
            assert await asyncio.gather(*map(ask, range(1, 12))) == said
            heard: list[str] = []

            async def hear(part: str) -> None:
                heard.append(part)

            assert await s.predict(2, on_part=hear) == "number 1; number 2" == await s.predict(2)
            assert heard == ["number 1", "number 2"]
            with pytest.raises(RuntimeError, match="use it as a block: `async with"):
                await anext(s.predict_stream(1))

    asyncio.run(main())


def test_a_model_that_answers_whole_gives_one_part() -> None:
    """Asked for parts, a model that returns gives its answer as the only one."""
    with Service(Stage(lambda x: x + 1, name="plus", run_in="thread")).run() as s:
        with s.predict_stream(1) as parts:
            assert list(parts) == [2]
        heard: list[int] = []
        assert s.predict(1, on_part=heard.append) == 2 and heard == [2]
        with s.predict_stream("x") as parts, pytest.raises(ModelError, match="TypeError"):
            next(parts)


def test_a_stream_is_used_once_and_as_a_block() -> None:
    """What is forgotten is told: to enter the block, and that a stream has been used."""
    with Service(Stage(Once, run_in="thread")).run() as s:
        stream = s.predict_stream(2)
        with pytest.raises(RuntimeError, match="use it as a block: `with"):
            next(stream)
        with stream as parts:
            assert list(parts) == [1, 2]
        with pytest.raises(RuntimeError, match="has been used"), stream:
            pass


def test_a_stream_that_was_left_says_so() -> None:
    """After its block, or once another thread has left it, a stream that was not read to its end
    raises, as an end would look like a whole answer; one that was read to its end stays at its end.
    """
    with Service(Stage(Counting, max_batch_size=2, run_in="thread", kwargs={"step_s": 0.001})).run() as s:
        with s.predict_stream(10**9) as parts:
            assert next(parts) == 1
        with pytest.raises(RuntimeError, match="left before its end"):
            next(parts)
        with s.predict_stream(2) as parts:
            assert list(parts) == [1, 2]
        assert list(parts) == []
        stream = s.predict_stream({"n": 10**9, "at": 1, "hang": 0.3})
        with stream as parts:
            assert next(parts) == 1
            leaving = threading.Timer(0.05, stream.__exit__, (None, None, None))
            leaving.start()
            with pytest.raises(RuntimeError, match="left before its end"):
                list(parts)
            leaving.join()

    async def main() -> None:
        async with Service(Stage(Later, run_in="loop")).run_async() as s:
            async with s.predict_stream(10**9) as parts:
                assert await anext(parts) == 1
            with pytest.raises(RuntimeError, match="left before its end"):
                await anext(parts)
            async with s.predict_stream(2) as parts:
                assert [part async for part in parts] == [1, 2]
            assert [part async for part in parts] == []

    asyncio.run(main())


def test_a_stream_has_one_reading_task() -> None:
    """A second task that waits for a part is told; the first one misses nothing."""

    async def main() -> None:
        async with (
            Service(Stage(Counting, max_batch_size=1, run_in="thread")).run_async() as s,
            s.predict_stream({"n": 9, "at": 0, "hang": 0.1}) as parts,
        ):

            async def read() -> list[Any]:
                return [part async for part in parts]

            first, second = await asyncio.gather(read(), read(), return_exceptions=True)
            assert first == up_to(9) and "another task waits" in str(second)

    asyncio.run(main())


def test_a_forked_child_is_told_that_a_stream_is_its_parents() -> None:
    """In a forked child the loop does not run, so the parent's stream raises there at once."""
    with Service(Stage(Once, run_in="thread")).run() as s:
        stream = s.predict_stream(2)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with stream as parts:
                    next(parts)
            except RuntimeError as error:
                code = 7 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        with stream as parts:
            assert list(parts) == [1, 2]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)


def test_leaving_the_block_frees_the_place() -> None:
    """A caller that leaves has its stream stopped, and the next one joins in its place."""
    log: list[Any] = []
    stage = Stage(Counting, max_batch_size=1, run_in="thread", kwargs={"step_s": 0.001, "log": log})
    with Service(stage).run() as s:
        with s.predict_stream(10**9) as parts:
            assert next(parts) == 1
        with s.predict_stream(3) as parts:
            assert list(parts) == up_to(3)
        assert log.index(("stop", 10**9)) < log.index(("start", 3))
        wait_for(lambda: log[-1] == ("stop", 3))


@slow_where(lambda form, timeout_s: (timeout_s is None) is ([*HELD].index(form) % 2 == 0))
@pytest.mark.parametrize("timeout_s", [None, 0.3], ids=["leaves", "is late"])
@pytest.mark.parametrize("form", HELD)
def test_the_next_request_is_not_sent_behind_a_part_for_nobody(
    form: str, timeout_s: float | None, tmp_path: Path
) -> None:
    """While the next part of a stream is still made whose caller has left, or whose time is up, others get their
    answers from the workers that have nothing to do.
    """
    held, done = tmp_path / "held", tmp_path / "done"
    done.touch()
    model, settings = HELD[form]
    with Service(Stage(model, workers=3, **settings)).run() as s:
        try:
            if timeout_s is None:
                with s.predict_stream(str(held)) as parts:
                    assert next(parts) == 1
            else:
                with pytest.raises(DeadlineExceeded):
                    s.predict(str(held), timeout_s=timeout_s)
            for _ in range(3):
                assert s.predict(str(done), timeout_s=LONG_S) == up_to(2)
            assert not held.exists()
        finally:
            held.touch()


def test_a_caller_that_does_not_read_is_paused_and_loses_nothing() -> None:
    """Its stream pauses when a mebibyte waits for it, others go on meanwhile, and it goes on when
    it has read half.
    """
    log: list[Any] = []
    nbytes, n = 32 * 1024, 100
    stage = Stage(Counting, max_batch_size=2, run_in="thread", kwargs={"log": log})
    with Service(stage).run() as s, s.predict_stream({"n": n, "bytes": nbytes}) as parts:
        assert next(parts) == b"\1" * nbytes
        wait_for(lambda: sum(each == ("step", [n]) for each in log) > PAUSE_BYTES // nbytes)
        assert s.predict(200) == up_to(200)
        made = sum(n in each[1] for each in log if each[0] == "step")
        assert made < 2 * PAUSE_BYTES // nbytes, "the stream was not paused"
        assert [part[0] for part in parts] == list(range(2, n + 1))


def test_a_stream_that_fails_says_why_and_harms_no_other() -> None:
    """A stream whose step raises gets its error after its parts; the others go on."""
    with Service(Stage(Resuming, max_batch_size=4, run_in="thread")).run() as s:
        with s.predict_stream({"n": 9, "at": 3, "raise": "three"}) as bad, s.predict_stream(20) as good:
            assert [next(bad) for _ in range(3)] == up_to(3)
            with pytest.raises(ModelError, match="ValueError: three") as caught:
                next(bad)
            assert type(caught.value.__cause__) is ValueError
            assert list(good) == up_to(20)
        with pytest.raises(ModelError, match="ValueError: now"):
            s.predict({"n": 9, "at": 0, "raise": "now"})


@pytest.mark.parametrize(
    ("settings", "timeout_s"),
    [({"timeout_s": 0.2}, None), ({"max_stream_s": 0.2}, None), ({}, 0.2)],
    ids=["the service's silence", "the longest stream", "the caller's own"],
)
def test_a_stream_ends_by_its_time(settings: dict[str, Any], timeout_s: float | None) -> None:
    """The service's time-out bounds each silence, `max_stream_s` and a caller's time-out the whole;
    then the place is free.
    """
    item = {"n": 10**9, "at": 1, "hang": 0.4} if "timeout_s" in settings else 10**9
    stage = Stage(Counting, max_batch_size=1, run_in="thread", kwargs={"step_s": 0.001})
    with Service(stage, **settings).run() as s:
        began = time.monotonic()
        with s.predict_stream(item, timeout_s=timeout_s) as parts, pytest.raises(DeadlineExceeded):
            for _ in parts:
                pass
        assert 0.15 < time.monotonic() - began < LONG_S

        def is_answered() -> bool:
            try:
                return s.predict(2) == [1, 2]
            except DeadlineExceeded:  # the one before still hangs, or the machine is busy
                return False

        wait_for(is_answered)


# -- workers that are lost


def both(s: carpool.service.thread_handle.Handle, *items: Any) -> list[list[Any]]:
    """Ask for all items at once; return the parts of each, with the error behind them if it failed."""
    got: list[list[Any]] = [[] for _ in items]

    def ask(i: int) -> None:
        try:
            with s.predict_stream(items[i]) as parts:
                for part in parts:
                    got[i].append(part)
        except carpool.CarpoolError as error:
            got[i].append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return got


def test_streams_go_on_when_their_worker_is_killed() -> None:
    """With `resume`, streams of a killed worker go on from their parts: none fails, none is missing
    and none comes twice.
    """
    with Service(Stage(Resuming, max_batch_size=8, kwargs={"step_s": 0.002})).run() as s:
        killer = threading.Timer(0.1, lambda: os.kill(s.pids[0], signal.SIGKILL))
        killer.start()
        assert both(s, *[150 + i for i in range(8)]) == [up_to(150 + i) for i in range(8)]
        killer.join()


def test_without_resume_those_with_parts_fail_when_their_worker_is_killed() -> None:
    """Without `resume`, a stream that has had parts ends with `Unavailable`, code `worker_lost`;
    one of which nothing was told starts again.
    """
    with Service(Stage(Counting, max_batch_size=8, kwargs={"step_s": 0.002})).run() as s:
        killer = threading.Timer(0.1, lambda: os.kill(s.pids[0], signal.SIGKILL))
        killer.start()
        collected: list[Any] = []
        asker = threading.Thread(target=lambda: collected.append(s.predict(120)))
        asker.start()
        (got,) = both(s, 10**6)
        assert got[:-1] == up_to(len(got) - 1) and len(got) > 1
        assert type(got[-1]) is Unavailable and got[-1].code == "worker_lost"
        asker.join(LONG_S)
        assert collected == [up_to(120)]


@pytest.mark.slow
def test_a_stream_that_kills_its_worker_is_found_and_harms_no_other() -> None:
    """A stream whose step kills its worker costs two workers, and the others get all of their
    parts.
    """
    with Service(Stage(Resuming, max_batch_size=8, kwargs={"step_s": 0.001})).run() as s:
        *mates, guilty = both(s, 40, 60, 50, {"n": 99, "at": 5, "kill": True})
        assert mates == [up_to(40), up_to(60), up_to(50)]
        assert guilty[:-1] == up_to(5) and guilty[-1].code == "request_crashed_worker"


@pytest.mark.slow
def test_streams_go_on_when_their_worker_hangs() -> None:
    """A step that takes longer than `max_batch_time_s` is given up, and its mates go on."""
    stage = Stage(Resuming, max_batch_size=8, max_batch_time_s=0.3, kwargs={"step_s": 0.001})
    with Service(stage, timeout_s=LONG_S).run() as s:
        mate, guilty = both(s, 300, {"n": 99, "at": 5, "hang": 60})
        assert mate == up_to(300)
        assert guilty[:-1] == up_to(5) and isinstance(guilty[-1], carpool.CarpoolError)


@pytest.mark.parametrize("model", [Counting, Resuming])
def test_parts_stay_in_order_when_the_loop_is_late_to_read_them(model: Any) -> None:
    """A worker that seems to hang, as the loop stood still, is caught up with; no part overtakes another."""

    async def main() -> None:
        stage = Stage(model, max_batch_size=4, max_batch_time_s=0.1, kwargs={"step_s": 0.001})
        async with Service(stage).run_async() as s:

            async def read() -> None:
                async with s.predict_stream(600) as parts:
                    assert [part async for part in parts] == up_to(600)

            async def stand_still() -> None:
                for _ in range(2):
                    await asyncio.sleep(0.05)
                    time.sleep(0.25)  # noqa: ASYNC251

            await asyncio.gather(read(), read(), stand_still())

    asyncio.run(main())


@pytest.mark.slow
def test_what_must_not_run_twice_does_not() -> None:
    """With `idempotent=False` no stream of a lost worker starts again or is resumed."""
    with Service(Stage(Resuming, max_batch_size=8, idempotent=False, kwargs={"step_s": 0.002})).run() as s:
        killer = threading.Timer(0.1, lambda: os.kill(s.pids[0], signal.SIGKILL))
        killer.start()
        (got,) = both(s, 10**6)
        assert got[:-1] == up_to(len(got) - 1) and isinstance(got[-1], carpool.CarpoolError)


# -- the end of the service


def test_closing_lets_streams_end() -> None:
    """A service that closes refuses new streams and lets those inside end."""
    handle = Service(Stage(Counting, max_batch_size=2, run_in="thread", kwargs={"step_s": 0.002})).start()
    with handle.predict_stream(100) as parts:
        assert next(parts) == 1
        closing = threading.Thread(target=handle.close)
        closing.start()
        assert list(parts) == up_to(100)[1:]
    closing.join(LONG_S)
    with pytest.raises(Unavailable):
        handle.predict_stream(1)


def test_closing_at_once_fails_streams() -> None:
    """A service that does not drain ends its streams with `Unavailable`."""
    handle = Service(Stage(Counting, max_batch_size=2, run_in="thread", kwargs={"step_s": 0.002})).start()
    with handle.predict_stream(10**9) as parts:
        assert next(parts) == 1
        handle.close(drain=False)
        with pytest.raises(Unavailable):
            for _ in parts:
                pass


@pytest.mark.parametrize("drain", [True, False])
def test_closing_amid_streams_of_tasks(drain: bool) -> None:
    """A task that closes the service amid streams of others has them end, or fail with `Unavailable`
    if it does not drain; each part that came is right.
    """

    async def main() -> None:
        s = Service(Stage(Counting, max_batch_size=4, run_in="thread", kwargs={"step_s": 0.002})).run_async()
        await s.start()
        got: list[list[Any]] = [[] for _ in range(6)]  # two wait for a row

        async def read(mine: list[Any]) -> None:
            try:
                async with s.predict_stream(40 if drain else 10**9) as parts:
                    async for part in parts:
                        mine.append(part)
            except Unavailable as error:
                mine.append(error)

        reading = [asyncio.ensure_future(read(mine)) for mine in got]
        await asyncio.sleep(0.02)
        await s.close(drain)
        await asyncio.wait_for(asyncio.gather(*reading), LONG_S)
        for mine in got:
            if drain:
                assert mine == up_to(40)
            else:
                assert mine[:-1] == up_to(len(mine) - 1) and type(mine[-1]) is Unavailable

    asyncio.run(main())


def test_the_warm_up_trains_the_policy() -> None:
    """The examples are started and stepped alone and together, and what that takes is learned."""

    class Warm(Counting):
        examples = (2, 3, 4)

    with Service(Stage(Warm, max_batch_size=2, run_in="thread", kwargs={"step_s": 0.01})).run() as s:
        policy = s.stats().stages[0].policy
        assert policy["pace_s"] > 0.015 and policy["step_s"]["setup"] + policy["step_s"]["per_stream"] >= 0.01


def test_an_example_that_does_not_run_ends_the_start() -> None:
    """Examples are run to their ends before a worker is ready, and their parts are checked."""

    class Raises(Counting):
        examples = (1, {"n": 2, "at": 1, "raise": "at two"})

    with pytest.raises(carpool.StartupError, match=r"example 2 of 2 does not run .*at two"):
        Service(Stage(Raises, max_batch_size=2, run_in="thread")).start()


# -- reports


SAID = st.tuples(st.integers(1, 6), st.sampled_from([wire.MORE] * 6 + [wire.LAST, wire.END, wire.BACK]))


@given(st.lists(SAID, max_size=5))
def test_the_columns_of_a_report_are_those_of_its_frame(said: list[tuple[int, int]]) -> None:
    """What a worker says of its streams comes as it was sent, whether all goes on or not."""
    ids = [id for id, _ in dict(said).items()]
    kinds = [kind for _, kind in dict(said).items()]
    frame = wire.parts_frame(1, wire.ReportHead(), ids, kinds, [b"%d" % id for id in ids])
    parts = _parts_of(frame, wire.read_report(frame), {})
    assert [list(column) for column in parts] == [ids, kinds, [b"%d" % id for id in ids], []]


# -- workers that break the protocol


def foreign(frame: Frame) -> Frame:
    return wire.parts_frame(frame.batch_id, wire.ReportHead(), [77], [wire.MORE], [b"1"])


def of_the_future(frame: Frame) -> Frame:
    return wire.parts_frame(frame.batch_id + 5, wire.ReportHead(), [], [], [])


def unreadable(frame: Frame) -> Frame:
    return replace(frame, payloads=[b"\xc1", *frame.payloads[1:]])


def a_reply(frame: Frame) -> Frame:
    return replace(frame, kind=FrameKind.REPLY)


@pytest.mark.parametrize("spoil", [foreign, of_the_future, unreadable, a_reply])
def test_a_worker_that_breaks_the_protocol_is_replaced(spoil: Callable[[Frame], Frame], monkeypatch: Any) -> None:
    """Parts of a stream that it was not given, or bytes that are no report, end a worker; its
    streams go on with its successor.
    """
    frames = 0
    pack = serve._frame_of

    def spoilt(*arguments: Any) -> Frame:
        nonlocal frames
        frames += 1
        frame = pack(*arguments)
        return spoil(frame) if frames == 4 else frame

    monkeypatch.setattr(serve, "_frame_of", spoilt)
    with Service(Stage(Resuming, max_batch_size=4, run_in="thread")).run() as s:
        assert both(s, 9, 12) == [up_to(9), up_to(12)]
        assert s.stats().stages[0].restarts == 1
        assert s.stats().stages[0].protocol_errors == 1


class Crowded(Resuming):
    """Has memory for three streams."""

    def step(self, states: list[dict[str, Any]]) -> list[Any]:
        if len(states) > 3:
            self.log.append(("full", len(states)))
            raise MemoryError
        return super().step(states)


def test_streams_for_which_there_is_no_memory_wait_and_go_on() -> None:
    """Out of memory in a step is no stream's fault: the newest wait, all get all of their parts,
    and the stage remembers how many fit.
    """
    log: list[Any] = []
    stage = Stage(Crowded, max_batch_size=8, run_in="thread", kwargs={"step_s": 0.001, "log": log})
    with Service(stage).run() as s:
        assert both(s, *range(60, 68)) == [up_to(n) for n in range(60, 68)]
        assert s.predict(3) == up_to(3)
    kinds = [each[0] for each in log]
    assert 0 < kinds.count("full") < kinds.count("step") / 4


@pytest.mark.parametrize("stages", [1, 2])
def test_a_set_is_limited_by_what_its_streams_may_come_to_hold(stages: int) -> None:
    """With `size=`, the streams of a set hold no more than `max_batch_size` together, whichever
    stage it is, and `max_rows` bounds how many there are.
    """
    log: list[Any] = []
    settings: dict[str, Any] = {"max_batch_size": 25, "size": int, "max_rows": 4, "run_in": "thread"}
    last = Stage(Counting, kwargs={"step_s": 0.002, "log": log}, **settings)
    first = [Stage(lambda x: x, name="before", run_in="thread")] if stages == 2 else []
    with Service(*first, last).run() as s:
        assert both(s, 10, 11, 12, 13, 3, 3, 3, 3) == [up_to(n) for n in (10, 11, 12, 13, 3, 3, 3, 3)]
    sets = [each[1] for each in log if each[0] == "step"]
    assert max(map(sum, sets)) <= 25 and max(map(len, sets)) <= 4 and max(map(len, sets)) > 1
