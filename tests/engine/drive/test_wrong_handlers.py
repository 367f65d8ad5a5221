"""What user code may do to its own process: the right callers hear of it, nobody waits for ever, the rest goes on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from tests.effort import slow_where
from tests.support import models
from tests.support.output import Output
from tests.support.processes import alive, resident_bytes
from tests.support.waiting import wait_until


def misbehaving(**options: Any) -> Service:
    """One worker, at most once: whoever is hit by a lost worker is told so."""
    return Service(Stage(models.Misbehaves, name="m", max_batch_time_s=10.0, idempotent=False, **options))


@pytest.mark.fault("F6", "F44")
@slow_where(lambda how: how not in ("exit", "SIGSEGV"))
@pytest.mark.parametrize("how", ["exit", *models.CRASHES])
def test_a_process_that_ends_in_a_call(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """If a process ends in a call, with exit code 0 or otherwise, its caller hears at once, the log
    names the cause, and a new worker answers.
    """
    output = Output()
    with misbehaving().run(output=output) as service:
        pid = service.predict("pid")
        with pytest.raises(carpool.Unavailable) as caught:
            service.predict(how)
        assert caught.value.code == "worker_lost"
        assert service.predict("pid") != pid
        assert service.stats().stages[0].restarts == 1
    (line,) = [record.message for record in caplog.records if "is lost" in record.message]
    assert f"m/0 (pid {pid})" in line
    assert how in line if how in models.CRASHES else "it ended" in line or "closed its connection" in line
    if how in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL"):
        wait_until(lambda: any("Fatal Python error" in text for text in output.texts))
        assert any("models.py" in text for text in output.texts)  # faulthandler tells where


@pytest.mark.fault("F47")
def test_a_fork_that_returns_answers_nobody() -> None:
    """A child that a model forks, and that returns from `predict`, ends where it would have
    answered: each caller gets the worker's own answer, and only that.
    """
    output = Output()
    with misbehaving().run(output=output) as service:
        pid = service.predict("pid")
        assert [service.predict("fork") for _ in range(5)] == [pid] * 5
        assert [service.predict("pid") for _ in range(20)] == [pid] * 20  # no child has taken a frame away
        wait_until(lambda: sum("the model has forked" in text for text in output.texts) == 5)
        assert service.stats().stages[0].restarts == 0


@pytest.mark.fault("F46")
def test_closing_all_files_costs_the_worker() -> None:
    """If a model closes all files, its worker's socket too, the caller is told and a new worker
    answers.
    """
    with misbehaving().run() as service:
        pid = service.predict("pid")
        with pytest.raises(carpool.Unavailable) as caught:
            service.predict("fds")
        assert caught.value.code == "worker_lost"
        assert service.predict("pid") != pid


@pytest.mark.fault("F45")
def test_a_closed_stdout_harms_nobody() -> None:
    """After a model has closed its stdout only calls that print fail; the worker goes on, and ends
    as it should.
    """
    with misbehaving().run() as service:
        pid = service.predict("stdout")
        with pytest.raises(carpool.ModelError, match="closed file"):
            service.predict("prints")
        assert service.predict("pid") == pid
    assert not alive(pid)


@pytest.mark.fault("F47")
def test_a_thread_left_behind_does_not_hold_up_the_end() -> None:
    """A thread that a model leaves behind does not hold up the end: the service closes as soon as
    usual, and the log names the thread.
    """
    output = Output()
    with misbehaving().run(output=output) as service:
        pid = service.predict("thread")
        assert service.predict("pid") == pid
        began = time.monotonic()
    assert time.monotonic() - began < 4.0  # a second is granted; teardown would have five
    assert not alive(pid)
    assert any("left-behind" in text for text in output.texts)


@pytest.mark.fault("F47")
def test_children_end_with_their_worker() -> None:
    """Children of a worker end with it, whether it is killed or its service is closed."""
    with misbehaving().run() as service:
        pid, child = service.predict("child")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(child))
        _, child = service.predict("child")
        assert alive(child)
    wait_until(lambda: not alive(child))


@pytest.mark.fault("F45")
def test_bad_habits_change_nothing() -> None:
    """A model that leaves its folder, ends logging, sets signal handlers or has little stack
    changes nothing for callers.
    """
    with misbehaving().run() as service:
        pid = service.predict("habits")
        assert [service.predict("pid") for _ in range(10)] == [pid] * 10
    assert not alive(pid)


def test_sigterm_is_the_parents_business(tmp_path: Path) -> None:
    """If a supervisor sends SIGTERM to every process of a service, requests inside are finished
    nevertheless: the parent decides.
    """
    with misbehaving().run() as service:
        pid = service.predict("term")
        assert service.predict("pid") == pid
        _, child = service.predict("child")
        os.kill(child, signal.SIGTERM)  # what it starts is not deaf for it
        wait_until(lambda: not alive(child))


@pytest.mark.fault("F51")
@pytest.mark.slow
def test_a_worker_that_floods_is_replaced() -> None:
    """A worker that sends without being asked, as fast as it can, is replaced; others are served
    meanwhile, and memory stays where it was.
    """
    with Service(
        Stage(models.Misbehaves, name="m", workers=2, max_batch_time_s=1.0, idempotent=False)
    ).run() as service:
        first = service.predict("pid")
        before = resident_bytes()
        with pytest.raises(carpool.Unavailable):
            service.predict("floods")
        assert resident_bytes() - before < 50 * 2**20
        assert service.predict("pid") > 0
        wait_until(lambda: service.stats().stages[0].workers == {"ready": 2})
        assert first in service.pids or service.stats().stages[0].restarts == 1


@pytest.mark.fault("F15")
@slow_where(lambda how: how not in ("raises", "crashes"))
@pytest.mark.parametrize("how", ["raises", "exits", "interrupts", "leaves", "crashes"])
def test_a_setup_that_does_not_end_well(how: str) -> None:
    """If `setup` ends in whatever odd way, the start fails at once with the cause, and leaves no
    process.
    """
    before = set(threading.enumerate())
    cause = {
        "raises": "FileNotFoundError: the weights are missing",
        "exits": "no licence",
        "interrupts": "KeyboardInterrupt",
        "leaves": "exited with code 3",
        "crashes": "killed by SIGSEGV",
    }[how]
    with pytest.raises(carpool.StartupError) as caught:
        Service(Stage(models.EndsInSetup, kwargs={"how": how}), models.double).start()
    assert cause in str(caught.value)
    left = {
        thread for thread in set(threading.enumerate()) - before if thread.name != "carpool-output"
    }  # of all services
    assert left == set()


assert sys.platform == "linux"  # these look into /proc
