"""Workers that hang: judged from outside, whatever they do; their stacks are told, their batch goes on elsewhere."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from tests.effort import slow_where
from tests.engine.drive.diary import KeepsDiary
from tests.support import models
from tests.support.output import Output
from tests.support.processes import alive
from tests.support.waiting import wait_until

LIMIT_S = 0.5


@pytest.mark.fault("F10", "F11")
@slow_where(lambda model: model is models.HoldsTheGil)
@pytest.mark.parametrize("model", [models.Slow, models.HoldsTheGil], ids=["sleeping", "holding the GIL"])
def test_its_stack_comes_through_like_all_it_prints(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The stack of a worker that hangs comes through its output, under its name and with the user's
    line in it, although no Python code can run there; the log names the limit.
    """
    output = Output()
    batched = 4 if model is models.Slow else None
    stage = Stage(model, name="hangs", max_batch_size=batched, max_batch_time_s=LIMIT_S, idempotent=False)
    with Service(stage).run(output=output) as service:
        (pid,) = service.pids
        with pytest.raises(carpool.Unavailable) as caught:
            service.predict(600.0)
        assert caught.value.code == "worker_lost"
        wait_until(lambda: not alive(pid))
        service.predict(0.0)

    dump = [line for worker, is_error, line in output.lines if worker == "hangs/0" and is_error]
    assert any("most recent call first" in line for line in dump)
    assert any("models.py" in line and "in predict" in line for line in dump)
    (line,) = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert f"hangs/0 (pid {pid}) hangs" in line and "max_batch_time_s (0.5 s)" in line


@pytest.mark.fault("F12")
def test_one_that_is_stopped_is_continued_for_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that was stopped is continued to write its stack, which shows where it was, and the
    successor runs its request once more.
    """
    output = Output()
    with Service(Stage(models.Slow, max_batch_size=4, max_batch_time_s=LIMIT_S)).run(output=output) as service:
        (pid,) = service.pids
        os.kill(pid, signal.SIGSTOP)
        assert service.predict(0.0) != pid
        assert not alive(pid)

    assert any("most recent call first" in line for line in output.texts)


def test_mates_do_not_wait_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a worker is given up another one runs its batch, while it still has time to write its
    stack.
    """
    monkeypatch.setattr("carpool.engine.drive.process._LAST_WORDS_S", 60.0)
    diary = tmp_path / "diary"
    stage = Stage(models.HangsOnce, workers=2, max_batch_size=4, max_batch_time_s=LIMIT_S, kwargs={"diary": str(diary)})
    with Service(stage).run() as service:
        answers = set(service.stream(range(4)))
        hung = int(diary.read_text())
        assert hung not in answers
        assert alive(hung)
        assert service.stats().stages[0].workers == {"ready": 1, "hung": 1}
    assert not alive(hung)  # nor does the service wait when it is closed


@pytest.mark.fault("F10")
def test_its_callers_hear_at_their_deadline() -> None:
    """Callers of a worker that hangs hear at their deadline, whether it has been judged by then or
    their batch waits for another worker.
    """
    with Service(Stage(models.Slow, max_batch_size=4, max_batch_time_s=LIMIT_S)).run() as service:
        for timeout_s in (0.2, LIMIT_S + 0.05):
            os.kill(service.pids[0], signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(carpool.DeadlineExceeded):
                service.predict(0.0, timeout_s=timeout_s)
            assert timeout_s <= time.monotonic() - started
            assert service.predict(0.0) > 0  # by the successor


@pytest.mark.slow
def test_while_it_ends_the_stage_is_not_ready() -> None:
    """A worker counts as hung, and the stage as not ready, from the moment it is given up; its
    successor starts when it is gone.
    """
    with Service(Stage(models.Slow, max_batch_size=4, max_batch_time_s=LIMIT_S, idempotent=False)).run() as service:
        (pid,) = service.pids
        with pytest.raises(carpool.Unavailable):
            service.predict(600.0)
        workers = service.stats().stages[0].workers
        assert workers == {"hung": 1}
        assert service.pids == [pid]
        wait_until(lambda: service.stats().stages[0].workers == {"ready": 1})
        assert not alive(pid)


@pytest.mark.fault("F12")
@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_it_has_not_read_is_not_to_blame_and_not_run(workers: int, tmp_path: Path) -> None:
    """A batch that came after its worker was stopped has not run, so others run it however often
    that happens, also if it must not run twice. The stopped worker, which is continued for its
    stack, does not begin it then.
    """
    diary = tmp_path / "diary"
    stage = Stage(
        KeepsDiary,
        workers=workers,
        max_batch_size=4,
        max_batch_time_s=LIMIT_S,
        idempotent=False,
        kwargs={"diary": str(diary), "setup_s": workers - 1.0},  # all of them are asked before a successor is ready
    )
    with Service(stage).run() as service:
        pids = service.pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        successor = service.predict(0.0)
        assert successor not in pids
        assert service.stats().outcomes["ok"] == 1
        wait_until(lambda: not any(map(alive, pids)))
    assert diary.read_text() == f"{successor} 0.0\n"


@pytest.mark.fault("F48")
def test_a_late_answer_is_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If a worker that was given up comes back nobody gets its answer, and it is ended at once."""
    monkeypatch.setattr("carpool.engine.drive.process._LAST_WORDS_S", 60.0)
    diary = tmp_path / "diary"
    kwargs = {"diary": str(diary), "stops": True}
    stage = Stage(KeepsDiary, workers=2, max_batch_size=4, max_batch_time_s=LIMIT_S, kwargs=kwargs)
    with Service(stage).run() as service:
        successor = service.predict(0.2)
        stopped, other = [int(line.split()[0]) for line in diary.read_text().splitlines()]
        assert successor == other != stopped  # what that will answer when it is continued, it answers too late
        wait_until(lambda: not alive(stopped))
        wait_until(lambda: service.stats().stages[0].late_results == 1)
        assert service.stats().outcomes["ok"] == 1


@pytest.mark.fault("F47")
def test_its_children_end_with_it(tmp_path: Path) -> None:
    """When a worker that hangs is killed its whole process group is."""
    pids = tmp_path / "pids"
    kwargs = {"pids": str(pids), "when": "predict"}
    stage = Stage(models.HasChildren, max_batch_time_s=2 * LIMIT_S, idempotent=False, kwargs=kwargs)
    with Service(stage).run() as service:
        with pytest.raises(carpool.Unavailable):
            service.predict(1)
        family = [int(pid) for pid in pids.read_text().split()]
        assert len(family) == 2
        wait_until(lambda: not any(alive(pid) for pid in family))


@pytest.mark.fault("F60")
@pytest.mark.slow
def test_a_loop_that_was_late_itself_judges_nobody_by_it() -> None:
    """A loop that did nothing for longer than the limit judges no worker by it: two have answered
    meanwhile, and when the answer of the first is heard, the other one, whose answer still lies in
    its socket, is late by the clock.
    """
    with Service(Stage(models.Slow, workers=2, max_batch_size=1, max_batch_time_s=LIMIT_S)).run() as service:
        pids = set(service.pids)
        threads = [threading.Thread(target=service.predict, args=(0.2,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: service.stats().stages[0].running == 2)
        assert service._thread is not None
        service._thread.loop.call_soon_threadsafe(time.sleep, 2 * LIMIT_S)
        for thread in threads:
            thread.join()
        assert set(service.pids) == pids
        assert service.stats().stages[0].workers == {"ready": 2}


@pytest.mark.parametrize("run_in", ["thread", "loop"])
def test_inside_the_process_it_is_left_to_itself(run_in: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A thread or task that hangs cannot be killed: its stack is written, and it is replaced at
    once.
    """
    output = Output()
    model = models.Slow if run_in == "thread" else models.SlowAsync
    stage = Stage(model, name="m", run_in=run_in, max_batch_size=4, max_batch_time_s=LIMIT_S, idempotent=False)
    with Service(stage).run(output=output) as service:
        with pytest.raises(carpool.Unavailable):
            service.predict(3.0)
        assert service.predict(0.0) == os.getpid()
    assert any("hangs and is given up" in record.message for record in caplog.records)
    assert any(worker == "m/0" and "models.py" in line for worker, _, line in output.lines)
