"""Faults made to happen: killed workers, killed parents, hung calls. Nobody hangs, nobody gets a wrong answer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from tests.support import models
from tests.support.processes import alive, children
from tests.support.waiting import PATIENCE_S, wait_until

# -- workers


@pytest.mark.fault("F1")
def test_a_killed_workers_requests_are_run_once_more(tmp_path: Path) -> None:
    """All requests of a killed worker's batch are run once more by its successor and answered
    right.
    """
    stage = Stage(models.DiesOnce, max_batch_size=8, kwargs={"diary": str(tmp_path / "diary")})
    with Service(stage).run() as service:
        assert list(service.stream(range(20))) == [2 * x for x in range(20)]
        assert service.stats().stages[0].restarts == 1


@pytest.mark.fault("F1")
def test_a_request_that_must_not_run_twice_fails_at_once(tmp_path: Path) -> None:
    """With `idempotent=False` the callers of a lost worker hear of it at once, and nothing runs a
    second time.
    """
    stage = Stage(models.DiesOnce, max_batch_size=8, kwargs={"diary": str(tmp_path / "diary")}, idempotent=False)
    with Service(stage).run() as service:
        with pytest.raises(carpool.Unavailable) as caught:
            service.predict(1)
        assert caught.value.code == "worker_lost"
        assert service.predict(1) == 2


@pytest.mark.fault("F9")
def test_a_request_that_kills_twice_is_not_tried_again() -> None:
    """A request that kills two workers is not tried again: its caller gets a clear error, and the
    service goes on, however often that happens.
    """
    with Service(Stage(models.Dies, max_batch_size=4)).run() as service:
        for number in range(4):
            with pytest.raises(carpool.ModelError, match="two workers of stage Dies died with this request") as caught:
                service.predict("die")
            assert (caught.value.status, caught.value.code) == (500, "request_crashed_worker")
            assert service.stats().stages[0].restarts in (2 * number + 1, 2 * number + 2)
        assert service.predict("fine")[0] == "fine"


@pytest.mark.fault("F14")
def test_the_mates_of_a_request_that_kills_are_answered_right() -> None:
    """Of twenty requests that share batches with two poison requests only these two fail, and each
    costs at most two workers.
    """
    xs: list[Any] = [*range(10), "die", *range(10, 15), "die", *range(15, 20)]
    with Service(Stage(models.Dies, max_batch_size=32)).run() as service:
        answers = list(service.stream(xs, return_exceptions=True))
        restarts = service.stats().stages[0].restarts

    for x, answer in zip(xs, answers, strict=True):
        if x == "die":
            assert isinstance(answer, carpool.ModelError)
            assert answer.code == "request_crashed_worker"
        else:
            assert answer[0] == x
    assert restarts in (3, 4)


@pytest.mark.fault("F3")
def test_a_worker_killed_with_half_a_request_read() -> None:
    """If a worker is killed with half of a request read, the parent does not hang on the rest, and
    the successor runs the request.
    """
    with Service(Stage(models.Lengths, max_batch_size=4)).run() as service:
        (pid,) = service.pids
        os.kill(pid, signal.SIGSTOP)  # its socket takes half a megabyte of the four
        answers: list[int] = []
        caller = threading.Thread(target=lambda: answers.append(service.predict(b"x" * 4 * 2**20)))
        caller.start()
        wait_until(lambda: service.stats().in_flight == 1)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        caller.join(timeout=20)
        assert answers == [4 * 2**20]
        assert service.stats().stages[0].restarts == 1


@pytest.mark.fault("F8")
def test_four_kills_under_load() -> None:
    """If workers are killed four times in mid-batch, every caller gets its own answer or a clear
    error, and service goes on.
    """
    answers: dict[int, Any] = {}
    stop = threading.Event()

    def client(first: int, service: Any) -> None:
        for x in range(first, 10_000_000, 8):
            if stop.is_set():
                return
            try:
                answers[x] = service.predict(x)[0]
            except carpool.CarpoolError as error:
                answers[x] = error

    with Service(Stage(models.Dies, max_batch_size=8, workers=2)).run() as service:
        clients = [threading.Thread(target=client, args=(i, service)) for i in range(8)]
        for thread in clients:
            thread.start()
        for _ in range(4):
            seen = len(answers)
            wait_until(lambda: len(answers) > seen + 50)  # noqa: B023 - called at once
            os.kill(service.pids[0], signal.SIGKILL)
        wait_until(lambda: service.stats().stages[0].restarts == 4)
        seen = len(answers)
        wait_until(lambda: len(answers) > seen + 50)
        stop.set()
        for thread in clients:
            thread.join(timeout=20)
            assert not thread.is_alive()
        snapshot = service.stats()

    wrong = {x: y for x, y in answers.items() if y != x and not isinstance(y, carpool.Unavailable)}
    assert wrong == {}
    assert sum(isinstance(y, Exception) for y in answers.values()) == 0  # each was hit once at the most
    assert snapshot.in_flight == 0


@pytest.mark.fault("F2")
def test_capacity_is_back_within_the_load_time() -> None:
    """After the only worker was killed, the service answers again as soon as its successor is
    loaded.
    """
    with Service(Stage(models.Dies, max_batch_size=4)).run() as service:
        service.predict(1)
        os.kill(service.pids[0], signal.SIGKILL)
        started = time.monotonic()
        assert service.predict(2)[0] == 2

    assert time.monotonic() - started < PATIENCE_S


@pytest.mark.fault("F17")
def test_a_stage_whose_workers_die_without_an_answer_fails() -> None:
    """When five requests in a row kill workers and no batch was ever finished, requests are refused
    at once from then on, and nothing loops.
    """
    stage = Stage(models.DiesAtOnce)
    with Service(stage, timeout_s=60).run() as service:
        for _ in range(5):
            with pytest.raises(carpool.ModelError) as crashed:
                service.predict(1)
            assert crashed.value.code == "request_crashed_worker"
        started = time.monotonic()
        with pytest.raises(carpool.Unavailable) as caught:
            service.predict(1)

    assert caught.value.code == "stage_failed"
    assert time.monotonic() - started < PATIENCE_S  # and not for the 60 s of a caller's patience


@pytest.mark.slow
def test_a_stage_whose_workers_die_and_may_not_try_again_fails() -> None:
    """Without a second run nobody can tell whose fault a death was, so five in a row are the
    stage's.
    """
    stage = Stage(models.DiesAtOnce, idempotent=False)
    codes = []
    with Service(stage, timeout_s=60).run() as service:
        for _ in range(6):
            with pytest.raises(carpool.Unavailable) as caught:
                service.predict(1)
            codes.append(caught.value.code)

    assert codes[:4] == ["worker_lost"] * 4
    assert codes[5] == "stage_failed"


@pytest.mark.parametrize("model", [models.Slow, models.HoldsTheGil], ids=["sleeping", "holding the GIL"])
def test_a_hung_call_is_killed_and_its_caller_hears_in_time(model: Any) -> None:
    """A caller whose call hangs gets its error at its deadline; at the hang limit the worker is
    killed and replaced.
    """
    stage = Stage(model, max_batch_size=4 if model is models.Slow else None, max_batch_time_s=0.5)
    with Service(stage).run() as service:
        service.predict(0.0)
        (pid,) = service.pids
        with pytest.raises(carpool.DeadlineExceeded):
            service.predict(600.0, timeout_s=0.2)
        service.predict(0.0)  # by the successor
        wait_until(lambda: not alive(pid))


def test_a_stopped_worker_is_killed() -> None:
    """A worker that was stopped by SIGSTOP, and so cannot even answer, is killed."""
    with Service(Stage(models.Slow, max_batch_size=4, max_batch_time_s=0.5)).run() as service:
        service.predict(0.0)
        os.kill(service.pids[0], signal.SIGSTOP)
        assert service.predict(0.0) > 0  # run once more, by the successor
        assert service.stats().stages[0].restarts == 1


@pytest.mark.slow
def test_a_long_batch_of_short_single_calls_is_no_hang() -> None:
    """The hang limit is one of a single call: a long batch of short calls one by one does not
    exceed it.
    """
    with Service(Stage(models.SleepsInCalls, max_batch_time_s=0.3)).run() as service:
        assert list(service.stream([0.0] * 2000 + [0.1] * 12)) == [0.0] * 2000 + [0.1] * 12
        assert service.stats().stages[0].restarts == 0


# -- the parent

PARENT = """
    import sys, threading, time
    import carpool
    from tests.support import models

    if __name__ == "__main__":
        kind = sys.argv[1]
        if kind == "setup":
            carpool.Service(models.SleepsInSetup).start()
        handle = carpool.Service(carpool.Stage(models.HoldsTheGil if kind == "gil" else models.Slow,
                                               max_batch_size=None if kind == "gil" else 4)).start()
        if kind != "idle":
            item = 600.0
            threading.Thread(target=handle.predict, args=(item,), daemon=True).start()
            time.sleep(0.3)
        print("up", *handle.pids, flush=True)
        time.sleep(600)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a program that runs a service."""
    program = tmp_path / "parent.py"
    program.write_text(textwrap.dedent(PARENT))
    started: list[subprocess.Popen[str]] = []

    def start(kind: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": os.getcwd()}
        command = [sys.executable, str(program), kind]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.fault("F18")
@pytest.mark.parametrize("doing", ["idle", "predict", "gil", "setup"])
def test_no_worker_outlives_a_killed_parent(parent: Callable[[str], subprocess.Popen[str]], doing: str) -> None:
    """Soon after the parent was killed with `kill -9` no worker is alive, whatever it was doing."""
    process = parent(doing)
    if doing == "setup":
        wait_until(lambda: children(process.pid))
        time.sleep(0.5)
        workers = children(process.pid)
    else:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()[1:]]
    assert workers
    assert all(alive(pid) for pid in workers)

    process.kill()
    process.wait()

    wait_until(lambda: not any(alive(pid) for pid in workers))


@pytest.mark.fault("F15")
def test_an_interrupted_start_leaves_nothing_behind(parent: Callable[[str], subprocess.Popen[str]]) -> None:
    """After Ctrl-C while models load, the program ends and its workers with it."""
    process = parent("setup")
    wait_until(lambda: children(process.pid))
    workers = children(process.pid)

    process.send_signal(signal.SIGINT)

    assert process.wait(timeout=PATIENCE_S) != 0
    wait_until(lambda: not any(alive(pid) for pid in workers))


@pytest.mark.fault("F20")
def test_a_service_started_from_a_thread_that_ends_stays_up() -> None:
    """A service stays up when the thread that started it ends: workers are started by the loop's
    thread, whose end the kernel's parent-death signal follows.
    """
    handles: list[Any] = []
    thread = threading.Thread(target=lambda: handles.append(Service(models.double).start()))
    thread.start()
    thread.join()
    time.sleep(0.2)

    assert handles[0].predict(2) == 4
    handles[0].close()
