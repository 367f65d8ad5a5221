"""Slow calls where no limit is set: answered as long as somebody waits, given up some time after nobody does."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import carpool
from carpool import Service, Stage
from tests.support import models
from tests.support.processes import alive
from tests.support.waiting import wait_until


@pytest.mark.fault("F78")
def test_a_lone_request_has_all_of_its_time() -> None:
    """A lone request that takes more than a third of its time-out is answered, and the model is not
    loaded again.
    """
    with Service(Stage(models.Slow, max_batch_size=4), timeout_s=4.2).run() as service:
        (pid,) = service.pids
        assert service.predict(1.5) == pid
        assert service.stats().stages[0].restarts == 0


@pytest.mark.fault("F78")
def test_a_call_that_nobody_waits_for_any_more_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """A call is given up a third of the time-out after its caller heard, in time, of its deadline.
    Both texts name the setting.
    """
    with Service(Stage(models.Slow, max_batch_size=4), timeout_s=0.9).run() as service:
        (pid,) = service.pids
        started = time.monotonic()
        with pytest.raises(carpool.DeadlineExceeded, match=r"in Slow; .* see max_batch_time_s"):
            service.predict(600.0)
        assert time.monotonic() - started >= 0.9
        wait_until(lambda: not alive(pid) and service.stats().stages[0].workers == {"ready": 1})
        assert service.pids != [pid]

    (text,) = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert "nobody has waited for its call for 0.3 s" in text
    assert "max_batch_time_s" in text


@pytest.mark.slow
def test_mates_of_one_who_has_gone_are_answered() -> None:
    """When one caller's own time-out is over the call goes on, and its mates are answered."""
    stage = Stage(models.Slow, max_batch_size=2, policy="static", max_queue_delay_s=3.0)  # both in one batch
    with Service(stage, timeout_s=6.0).run() as service:
        (pid,) = service.pids
        with ThreadPoolExecutor(2) as threads:
            hasty = threads.submit(service.predict, 2.5, timeout_s=0.3)
            patient = threads.submit(service.predict, 2.5)
            with pytest.raises(carpool.DeadlineExceeded):
                hasty.result()
            assert patient.result() == pid


@pytest.mark.slow
def test_slow_requests_do_not_end_the_stage() -> None:
    """However many slow requests follow each other, none counts as a crash, and the stage serves
    whatever comes then.
    """
    stage = Stage(models.Slow, run_in="thread", max_batch_size=1, name="slow")
    with Service(stage, timeout_s=0.6).run() as service:

        def is_served() -> bool:
            try:
                return bool(service.predict(0.0))
            except carpool.DeadlineExceeded:  # on a busy machine a quick call, too, may take that long
                return False

        wait_until(is_served)
        for restarts in range(1, 7):
            with pytest.raises(carpool.DeadlineExceeded):
                service.predict(10.0)
            wait_until(lambda: service.stats().stages[0].restarts >= restarts)  # noqa: B023 - called at once
            wait_until(lambda: service.stats().stages[0].workers == {"ready": 1})
        wait_until(is_served)


@pytest.mark.slow
def test_what_hangs_is_given_up_sooner_once_it_is_known() -> None:
    """Once it is known what calls take, one that hangs is given up before anybody's time is up; run
    once more, alone, it hangs again and gets 504 that names the setting.
    """
    with Service(Stage(models.Slow, workers=2, max_batch_size=4), timeout_s=6.0).run() as service:
        for _ in range(8):
            service.predict(0.001)
        with pytest.raises(carpool.DeadlineExceeded, match=r"two workers of stage Slow .*max_batch_time_s") as caught:
            service.predict(600.0)
        assert caught.value.status == 504
        assert service.predict(0.0)
