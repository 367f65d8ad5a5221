"""Lines of the log about a service say in fields which model, stage and worker they are about."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from tests.support import models
from tests.support.processes import guards_of
from tests.support.waiting import wait_until


def holds_eight(xs: list[int]) -> list[int]:
    if len(xs) > 8:
        raise MemoryError
    return xs


def about(lines: list[logging.LogRecord], part: str) -> tuple[str | None, ...]:
    """Model, stage and worker of the line with this part."""
    (line,) = [each for each in lines if part in each.getMessage()]
    return tuple(getattr(line, name, None) for name in ("model", "stage", "worker"))


@pytest.mark.slow
def test_every_line_of_a_service_names_its_model(caplog: pytest.LogCaptureFixture) -> None:
    """From the start to the end of a service with worker processes no line lacks the model."""
    caplog.set_level(logging.INFO, logger="carpool")
    service = Service(Stage(models.double, workers=2, devices=[0, 1]), name="twice")
    before = guards_of(os.getpid())  # of services that end still
    with service.run() as handle:
        assert handle.predict(2) == 4
        (guard,) = set(guards_of(os.getpid())) - set(before)
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: any("the guard of the workers" in line.getMessage() for line in caplog.records))
    assert about(caplog.records, "see the devices") == ("twice", "double", None)
    assert about(caplog.records, "the guard of the workers") == ("twice", None, None)
    assert [line.getMessage() for line in caplog.records if getattr(line, "model", None) != "twice"] == []


def test_a_line_about_memory_names_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    """A stage whose batches become smaller says for which model, in which stage and worker."""
    caplog.set_level(logging.INFO, logger="carpool")
    stage = Stage(holds_eight, max_batch_size=32, run_in="thread", policy="greedy")
    with Service(stage, name="small").run() as handle:
        assert list(handle.stream(range(200))) == list(range(200))
    lines = [each for each in caplog.records if "ran out of memory" in each.getMessage()]
    (line,) = {about([each], "ran out of memory") for each in lines}
    assert line == ("small", "holds_eight", "holds_eight/0")


@pytest.mark.parametrize(
    ("policy", "delay_s", "is_told"), [("static", None, True), ("static", 0, False), (None, None, False)]
)
def test_a_static_policy_without_a_delay_is_told(
    policy: Any, delay_s: float | None, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A static policy that was given no delay holds nothing back, and the log says so; a delay of 0
    is meant.
    """
    settings: dict[str, Any] = {"max_batch_size": 8, "policy": policy, "max_queue_delay_s": delay_s}
    with Service(Stage(holds_eight, run_in="thread", **settings)).run() as handle:
        handle.predict(1)
    carpool.batch(holds_eight, **settings)(1)
    told = [line.getMessage() for line in caplog.records if "max_queue_delay_s" in line.getMessage()]
    assert [text.partition(":")[0] for text in told] == (["stage holds_eight", "holds_eight"] if is_told else [])
