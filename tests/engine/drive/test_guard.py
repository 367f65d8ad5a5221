"""The guard: when the service's process dies, nothing that its workers have started is left; nobody else is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carpool import Service
from carpool.engine.drive.guard import Guard
from tests.effort import slow_where
from tests.support import models
from tests.support.processes import alive, guards_of
from tests.support.waiting import wait_until

PROGRAM = """
    import os, sys, threading, time
    import carpool
    from tests.support import models

    if __name__ == "__main__":
        pids, when, how = sys.argv[1:]
        stage = carpool.Stage(models.HasChildren, kwargs={"pids": pids, "when": when})
        if how == "forked" and os.fork() == 0:
            time.sleep(600)  # a child of the program's own, which keeps the guard's pipe open
        handle = carpool.Service(stage, timeout_s=600, max_parallel_starts=1).start()
        if how == "forked late" and os.fork() == 0:
            time.sleep(600)
        threading.Thread(target=handle.predict, args=(1,), daemon=True).start()
        time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], list[int]]]]:
    """Starts a program whose worker has a child and holds the GIL; gives the pids of all its descendants."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    started: list[subprocess.Popen[bytes]] = []

    def start(when: str = "predict", how: str = "") -> tuple[subprocess.Popen[bytes], list[int]]:
        pids = tmp_path / "pids"
        path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(tmp_path / "program.py"), str(pids), when, how]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
        started.append(process)
        wait_until(pids.exists)
        family = [int(pid) for pid in pids.read_text().split()]
        assert all(alive(pid) for pid in family)
        return process, [*family, *guards_of(process.pid)]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its fork too
        process.wait()


Program = Callable[..., tuple[subprocess.Popen[bytes], list[int]]]


@pytest.mark.fault("F18", "F19")
@pytest.mark.parametrize("when", ["setup", "predict"])
def test_a_killed_parent_leaves_nobody_behind(program: Program, when: str) -> None:
    """Soon after `kill -9` of the parent all are gone: the worker, which holds the GIL, its
    child, and the guard.
    """
    process, family = program(when)
    assert len(family) == 3

    process.kill()
    process.wait()

    wait_until(lambda: not any(alive(pid) for pid in family))


@pytest.mark.fault("F53")
def test_a_fork_of_the_parent_does_not_hide_its_death(program: Program) -> None:
    """A fork of the parent still holds the guard's pipe, so the guard looks at the parent itself
    and notices its death.
    """
    process, family = program(how="forked late")

    process.kill()
    process.wait()

    wait_until(lambda: not any(alive(pid) for pid in family))


@pytest.mark.fault("F24")
@slow_where(lambda number: number != signal.SIGTERM)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_for_all_do_not_end_the_guard(program: Program, number: signal.Signals) -> None:
    """Signals that reach every process, by Ctrl-C, the end of a session or a supervisor, do not end
    the guard: the parent decides.
    """
    process, family = program()
    guard = family[-1]

    os.kill(guard, number)
    time.sleep(0.2)
    assert alive(guard)

    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(pid) for pid in family))


def test_a_dead_guard_harms_nobody_and_is_replaced(program: Program) -> None:
    """If the guard dies its successor is told of all workers, and serving goes on."""
    process, family = program()
    *family, guard = family

    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: guards_of(process.pid) not in ([], [guard]))
    assert all(alive(pid) for pid in family)
    family += guards_of(process.pid)
    time.sleep(0.2)  # until it has started

    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(pid) for pid in family))


def test_workers_end_without_the_guard_too(program: Program) -> None:
    """If the guard dies in the same moment as the parent, the kernel ends the workers, although
    they hold the GIL.
    """
    process, (worker, child, guard) = program()

    for pid in (guard, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()

    try:
        wait_until(lambda: not alive(worker))
    finally:
        os.kill(child, signal.SIGKILL)  # that is what the guard is for


def test_it_goes_with_its_service() -> None:
    """Each service has a guard, which ends and is reaped when the service is closed."""
    before = guards_of(os.getpid())
    with Service(models.double).run() as service:
        (guard,) = set(guards_of(os.getpid())) - set(before)
        assert service.predict(2) == 4
    assert not Path(f"/proc/{guard}").exists()


def test_workers_inside_the_process_need_none() -> None:
    """A service whose workers are threads or tasks has no guard: they die with the process anyway."""
    from carpool import Stage

    before = guards_of(os.getpid())
    with Service(Stage(models.double, run_in="thread")).run():
        assert guards_of(os.getpid()) == before


async def come_about(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)


def groups_of_sleepers(n: int) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen(["sleep", "600"], process_group=0) for _ in range(n)]


def test_it_kills_the_groups_it_knows_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """A guard kills the process groups that it was told of, except those that are over, whose
    numbers may be others' by now.
    """
    known, over, foreign = sleepers = groups_of_sleepers(3)

    async def scenario() -> None:
        guard = Guard()
        guard.start()
        guard.add(over.pid)
        guard.add(known.pid)
        guard.remove(over.pid)
        process = guard._process
        assert process is not None
        os.close(guard._pipe)  # as when this process dies
        guard._pipe = os.open(os.devnull, os.O_WRONLY)
        await come_about(lambda: known.poll() is not None)
        await guard.close()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 20))
        assert known.returncode == -signal.SIGKILL
        assert [over.poll(), foreign.poll()] == [None, None]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_closing_kills_nobody() -> None:
    """When a service is closed its guard is told to quit, and kills nobody, whatever groups it
    knows.
    """
    (sleeper,) = groups_of_sleepers(1)

    async def scenario() -> None:
        guard = Guard()
        guard.start()
        guard.add(sleeper.pid)
        pids.append(guard.pid)
        await guard.close()

    pids: list[int | None] = []
    try:
        asyncio.run(scenario())
        assert pids != [None] and not Path(f"/proc/{pids[0]}").exists()
        time.sleep(0.1)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_one_that_does_not_listen_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """A guard that is stopped, and whose pipe runs full, never blocks the parent; another one takes
    its place and is told all.
    """

    async def scenario() -> None:
        guard = Guard()
        guard.start()
        first = guard.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        for i in range(20_000):
            guard.remove(1_000_000_000 + i)
        assert guard.pid is None
        await come_about(lambda: guard.pid is not None)
        assert guard.pid != first
        await guard.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(scenario(), 20))
    assert "another one is started" in caplog.text


def test_without_room_for_it_serving_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If no guard can be started serving goes on, and it is tried again later."""

    def no_room(*args: object, **options: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    async def scenario() -> None:
        guard = Guard()
        with monkeypatch.context() as patch:
            patch.setattr("carpool.engine.drive.guard.subprocess.Popen", no_room)
            guard.start()
            guard.add(os.getpid())
            guard.remove(os.getpid())
            assert guard.pid is None
        await come_about(lambda: guard.pid is not None)
        await guard.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert "no guard could be started" in caplog.text
