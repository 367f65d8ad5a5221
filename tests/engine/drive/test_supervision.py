"""When workers die: who is started again and when, how many at a time, what is told, and when it is given up."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from carpool.engine.core.roster import MOST_DEATHS
from carpool.service.thread_handle import Handle
from carpool.testing import served
from tests.support import models
from tests.support.processes import alive
from tests.support.serving import serve
from tests.support.waiting import PATIENCE_S, wait_until


def most_at_a_time(diary: Path) -> int:
    """How many were loading at the same time, as `models.LoadsSlowly` has written it down."""
    loading = most = 0
    for sign in diary.read_text():
        loading += 1 if sign == "+" else -1
        most = max(most, loading)
    return most


def all_ready(service: Handle, *stages: int) -> Callable[[], bool]:
    """Whether each stage has so many workers that are ready."""
    return lambda: [stage.workers.get("ready") for stage in service.stats().stages] == list(stages)


def kill_all_at_once(service: Handle, pids: list[int]) -> None:
    """While the loop looks elsewhere: it must not hand a batch on before the next one is killed."""

    def kill_all() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            wait_until(lambda: not alive(pid))  # noqa: B023 - called at once

    assert service._thread is not None
    service._thread.loop.call_soon_threadsafe(kill_all)


@pytest.mark.fault("F7")
@pytest.mark.slow
def test_after_all_were_killed_only_so_many_load_at_a_time(tmp_path: Path) -> None:
    """After all workers were killed two load at a time, over all stages, as at first; all come
    back, no request is lost, and no stage has failed.
    """
    both = tmp_path / "both"
    stages = [
        Stage(models.LoadsSlowly, name="one", workers=5, max_batch_size=4, kwargs={"diary": str(both), "seconds": 0.5}),
        Stage(models.LoadsSlowly, name="two", workers=1, max_batch_size=4, kwargs={"diary": str(both), "seconds": 0.5}),
    ]
    with Service(*stages, max_parallel_starts=2).run() as service:
        assert 1 <= most_at_a_time(both) <= 2
        before = service.pids
        both.write_text("")
        answers: list[Any] = []
        caller = threading.Thread(target=lambda: answers.extend(service.stream([0.3] * 4)))
        caller.start()
        time.sleep(0.1)
        kill_all_at_once(service, before)
        wait_until(lambda: not set(service.pids) & set(before))
        wait_until(all_ready(service, 5, 1), timeout_s=60)
        caller.join()
        assert answers == [0.3] * 4
        assert 1 <= most_at_a_time(both) <= 2
        assert not set(service.pids) & set(before)
        assert [stage.restarts for stage in service.stats().stages] == [5, 1]


def test_by_default_no_more_load_than_there_are_cores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By default as many workers load at a time as there are cores, and at least two; the log says
    once that others wait.
    """
    caplog.set_level("INFO", "carpool")
    diary = tmp_path / "diary"
    cores = max(2, len(os.sched_getaffinity(0)))
    kwargs = {"diary": str(diary), "seconds": 0.5}
    with Service(Stage(models.LoadsSlowly, workers=2 * cores, max_batch_size=4, kwargs=kwargs)).run():
        assert 1 <= most_at_a_time(diary) <= cores
    waiting = [line for line in map(logging.LogRecord.getMessage, caplog.records) if "when others have loaded" in line]
    what = f"{cores} workers of stage LoadsSlowly will start when others have loaded"
    assert waiting == [f"{what}, since {cores} may load at a time (max_parallel_starts)"]


def test_each_stage_of_a_pipeline_starts_one_worker_first(caplog: pytest.LogCaptureFixture) -> None:
    """The second worker of the first stage starts after the first one of the last stage."""
    caplog.set_level("INFO", "carpool")
    stages = [Stage(models.double, name="a", workers=2), Stage(models.double, name="b")]
    with Service(*stages, max_parallel_starts=2).run():
        told = [line for line in map(logging.LogRecord.getMessage, caplog.records) if line.endswith(" starts")]
    assert [line.split()[1] for line in told] == ["a/0", "b/0", "a/1"]


@pytest.mark.slow
def test_who_is_handed_to_one_dead_worker_after_another_is_not_to_blame() -> None:
    """A request that is handed to one dead worker after another, because the loop looked elsewhere
    while all were killed, is not to blame, and a new one answers it.
    """
    stage = Stage(models.Slow, workers=4, max_batch_size=4, idempotent=False)
    with Service(stage).run() as service:
        before = service.pids
        kill_all_at_once(service, before)
        assert service.predict(0.0) not in before


def test_under_an_slo_nobody_waits_for_a_worker_that_is_away(tmp_path: Path) -> None:
    """While the only worker is dead or loads, requests of a service with an SLO are refused by any
    policy, in Python and over HTTP, and none is held until it is back; then requests are served.
    """
    file = tmp_path / "file"
    stage = Stage(models.LoadsOnce, max_batch_size=4, policy="greedy", kwargs={"file": str(file)})
    service = Service(stage, name="away", slo_s=0.2, timeout_s=10 * PATIENCE_S)

    def kill() -> None:
        os.kill(int(file.read_text()), signal.SIGKILL)

    def refusal(ask: Callable[[float], float]) -> tuple[int, str]:
        """How the next request is refused, which may still have been run before the worker died."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                ask(1.0)
            except carpool.CarpoolError as error:
                return error.status, error.code
        raise AssertionError("no request was refused")

    with service.run() as running:
        kill()
        assert [refusal(running.predict) for _ in range(3)] == [(429, "overloaded")] * 3
        file.unlink()
        wait_until(all_ready(running, 1))
        assert running.predict(2.0) == 2.0
    file.unlink()
    with served(service) as client, carpool.Client(client.url, retries=0) as impatient:
        kill()
        assert [refusal(impatient.predict) for _ in range(3)] == [(429, "overloaded")] * 3
        file.unlink()
        assert client.predict(2.0, timeout_s=PATIENCE_S) == 2.0


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_max_parallel_starts_is_a_number(wrong: Any) -> None:
    """A `max_parallel_starts` below one, or that is no whole number, is refused."""
    with pytest.raises(ValueError, match="max_parallel_starts must be a whole number of at least 1"):
        Service(models.double, max_parallel_starts=wrong)


@pytest.mark.fault("F16")
def test_a_load_that_fails_twice_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker whose load fails is started again at once after the first death, then after a
    quarter to a half of a second, then after a half to one.
    """
    diary = tmp_path / "diary"
    with Service(Stage(models.LoadsAfterFailures, kwargs={"diary": str(diary), "n": 2})).run() as service:
        os.kill(service.pids[0], signal.SIGKILL)
        killed = time.monotonic()
        assert service.predict(1) == service.pids[0]
        starts = [float(line) for line in diary.read_text().split()][1:]

    assert len(starts) == 3
    assert starts[1] - starts[0] > 0.25
    assert starts[2] - starts[1] > 0.5
    assert starts[2] - killed < PATIENCE_S
    assert sum("the weights are missing" in record.message for record in caplog.records) == 2


def test_the_log_says_when_a_lost_worker_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """When the successor of a lost worker is ready, the log says that it is back, and how long
    after the loss.
    """
    with caplog.at_level(logging.INFO, logger="carpool"), Service(Stage(models.double, name="two")).run() as service:
        (before,) = service.pids
        os.kill(before, signal.SIGKILL)
        assert service.predict(1) == 2
        (pid,) = service.pids
    messages = [re.sub(r"\d+\.\d\d s", "N s", record.message) for record in caplog.records]
    assert f"worker two/0 (pid {before}) is ready after N s" in messages
    assert f"worker two/0 (pid {pid}) is back after N s" in messages
    assert f"worker two/0 (pid {pid}) is ready after N s" not in messages


@pytest.mark.fault("F17")
@pytest.mark.slow
def test_a_worker_that_dies_as_soon_as_it_is_ready_fails_the_stage(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that dies as soon as it is ready has not worked: after five in a row the stage has
    failed, and one line says so, with the cause of the last one.
    """
    with Service(Stage(models.double, name="short-lived")).run() as service:
        dead: set[int] = set()
        for _ in range(MOST_DEATHS):
            wait_until(lambda: set(service.pids) - dead and all_ready(service, 1)())
            (pid,) = service.pids
            os.kill(pid, signal.SIGKILL)
            dead.add(pid)
        wait_until(lambda: service.stats().stages[0].workers == {"dead": 1})
        with pytest.raises(carpool.Unavailable) as caught:
            service.predict(1)
        assert caught.value.code == "stage_failed"
        time.sleep(0.2)
        assert service.pids == []

    (line,) = [record.message for record in caplog.records if record.levelno == logging.CRITICAL]
    assert "\n" not in line
    assert "stage short-lived has failed" in line and "killed by SIGKILL" in line


@pytest.mark.fault("F26")
@pytest.mark.slow
def test_a_load_in_c_of_any_length_is_no_hang(tmp_path: Path) -> None:
    """A load in C code that holds the GIL for longer than the limits of calls and requests is no
    hang: these do not apply before a worker is ready.
    """
    with Service(Stage(models.LoadsInC, max_batch_time_s=0.3), timeout_s=1.0).run() as service:
        (pid,) = service.pids
        assert service.predict(1) == pid
        assert service.stats().stages[0].restarts == 0


def test_what_cannot_be_started_now_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system has no room for another process, six times in a row, that is no death and does
    not fail the stage; the worker is started later.
    """
    monkeypatch.setattr("carpool.engine.core.roster.NO_ROOM_DELAY_S", 0.05)
    refused = []
    spawn = subprocess.Popen

    def no_room(*args: Any, **options: Any) -> Any:
        if len(refused) <= MOST_DEATHS:
            refused.append(args)
            raise OSError(11, "Resource temporarily unavailable")
        return spawn(*args, **options)

    with Service(models.double).run() as service:
        (pid,) = service.pids
        monkeypatch.setattr("carpool.engine.drive.process.subprocess.Popen", no_room)
        os.kill(pid, signal.SIGKILL)
        assert service.predict(2) == 4
        assert len(refused) == MOST_DEATHS + 1
        assert service.stats().stages[0].restarts == 1


# -- a server that has nothing to serve any more


FAILING = """
    import carpool
    from tests.support import models

    one = carpool.Service(carpool.Stage(models.double, name="one"))
    two = carpool.Service(carpool.Stage(models.double, name="two"))
    exits = carpool.Service(carpool.Stage(models.EndsInSetup, kwargs={"how": "exits"}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a module of services."""
    (tmp_path / "failing.py").write_text(re.sub("(?m)^    ", "", FAILING))
    return tmp_path


def workers_of(pid: int) -> list[int]:
    """The workers among a process's children, without the guards."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in children if b"worker.main" in command_of(child)]


def command_of(pid: int) -> bytes:
    """The command of a process; empty if it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.long
def test_a_server_that_can_answer_nothing_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of two services goes on as long as one of them can answer, and ends with status 1
    when the second has failed, too.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    with serve("failing:one", "failing:two", folder=folder) as served:
        first, second = sorted(workers_of(served.process.pid))
        kill_for_good(first, served.process.pid, keep={second})
        wait_until(lambda: served.ask("POST", "/models/one/predict", 1)[0] == 503)
        status, body, _ = served.ask("GET", "/readyz")
        assert (status, b"not ready: one" in body) == (200, True)
        assert served.ask("GET", "/models/one/ready")[0] == 503
        assert served.ask("POST", "/models/two/predict", 1)[0] == 200
        assert served.process.poll() is None
        kill_for_good(second, served.process.pid)
        assert served.wait() == 1
    assert sum("has failed: 5 workers in a row died" in line for line in served.log) == 2
    assert "no service can answer any more" in served.log[-1]


def kill_for_good(pid: int, server: int, keep: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Kill a worker and each that takes its place."""
    for death in range(MOST_DEATHS):
        if death:
            wait_until(lambda: set(workers_of(server)) - keep)
            (pid,) = set(workers_of(server)) - keep
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not alive(pid))  # type: ignore[misc]


@pytest.mark.fault("F15")
def test_a_server_whose_model_does_not_load_ends_with_the_cause(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose model does not load ends with status 1 and one line of the log with the cause, whatever
    `setup` does: here it calls `sys.exit`.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    with serve("failing:exits", ready=False, folder=folder) as served:
        assert served.wait() == 1
    (line,) = [line for line in served.log if '"startup_failed"' in line]
    assert json.loads(line)["level"] == "critical"
    assert "stage EndsInSetup could not start" in line
    assert "no licence" in "".join(served.log)
