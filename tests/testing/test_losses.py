"""Workers lost at awkward moments: idle, with half a batch received, all at once; and one that is only slow."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import carpool
from carpool.testing import EVERY_PASS, FaultPlan, environment
from tests.support import models
from tests.support.waiting import wait_until


@pytest.mark.fault("F2")
def test_an_idle_worker_is_lost() -> None:
    """When an idle worker is lost no request fails, and the supervisor fills its place."""
    with carpool.Service(carpool.Stage(models.scale, max_batch_size=4, workers=2)).run() as service:
        assert service.predict(1.0) == 2.0
        os.kill(service.pids[0], signal.SIGKILL)
        assert list(service.stream([1.0] * 20)) == [2.0] * 20
        wait_until(lambda: service.stats().stages[0].workers == {"ready": 2})


@pytest.mark.fault("F3")
def test_a_worker_is_lost_with_half_a_batch_received(tmp_path: Path) -> None:
    """If a worker is lost with half of a batch received the writing ends, and the next worker gets
    all of it.
    """
    plan = FaultPlan("worker.mid_recv", "kill")
    stage = carpool.Stage(models.scale, max_batch_size=4, env=environment([plan], tmp_path))
    item = np.arange(1_000_000.0)
    with carpool.Service(stage).run() as service:
        for _ in range(2):
            assert np.array_equal(service.predict(item), 2 * item)
        assert service.stats().stages[0].restarts == 1


@pytest.mark.fault("F12")
def test_a_worker_that_stops_reading_is_lost(tmp_path: Path) -> None:
    """A worker that is stopped with most of a batch unread is lost: the hang limit counts from the
    sending.
    """
    plan = FaultPlan("worker.mid_recv", "stop")
    stage = carpool.Stage(models.scale, max_batch_size=4, max_batch_time_s=2.0, env=environment([plan], tmp_path))
    item = np.arange(1_000_000.0)
    with carpool.Service(stage, timeout_s=60).run() as service:
        assert np.array_equal(service.predict(item), 2 * item)


@pytest.mark.fault("F7")
def test_all_workers_are_lost_at_once() -> None:
    """If all workers are lost at once what they had is run once more, and requests that come
    meanwhile wait for the new ones.
    """
    with carpool.Service(carpool.Stage(models.scale, max_batch_size=4, workers=3)).run() as service:
        pids = service.pids
        answers = service.stream(float(i) for i in range(3000))
        first = [next(answers) for _ in range(100)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        rest = list(answers)
        assert first + rest == [2.0 * i for i in range(3000)]
        wait_until(lambda: service.stats().stages[0].workers == {"ready": 3})
        assert not set(pids) & set(service.pids)


@pytest.mark.fault("F13")
def test_one_of_two_workers_is_slow() -> None:
    """A slow worker gets a batch only when it asks for one, so the other does most of the work and
    nobody waits behind it.
    """
    slow = FaultPlan("worker.in_predict", "delay", n=EVERY_PASS, worker=1, seconds=0.2)
    stage = carpool.Stage(models.Dies, max_batch_size=4, workers=2, env=environment([slow]))
    with carpool.Service(stage).run() as service:
        began = time.monotonic()
        answers = list(service.stream(range(400)))
        took_s = time.monotonic() - began
    by_worker = Counter(pid for _, pid in answers)
    assert [x for x, _ in answers] == list(range(400))
    assert max(by_worker.values()) > 300
    assert took_s < 400 / 4 * 0.2 / 2
