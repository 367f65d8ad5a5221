"""Fault points: what each does to a service, and that without a plan there is nothing there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool.engine import faults
from carpool.engine.faults import EVERY_PASS, FaultPlan, InjectedFault, WorkerPoints, environment
from tests.effort import slow_where
from tests.support import models
from tests.support.waiting import wait_until


def stage(*plans: FaultPlan, once: Path | None = None, **settings: Any) -> carpool.Stage:
    return carpool.Stage(models.scale, max_batch_size=4, env=environment(plans, once), **settings)


# -- plans as data and as text


@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan("worker.in_predict", "kill"),
        FaultPlan("worker.mid_send", "stop", n=3, worker=1),
        FaultPlan("parent.before_reply", "delay", n=EVERY_PASS, seconds=0.25),
    ],
    ids=str,
)
def test_a_plan_is_read_as_it_was_written(plan: FaultPlan) -> None:
    """A plan of faults reads back as it was written: text and data say the same."""
    assert FaultPlan.parse(str(plan)) == plan


def test_the_short_form() -> None:
    """The short form of a fault is the first pass in any worker."""
    assert FaultPlan.parse("worker.setup:exit") == FaultPlan("worker.setup", "exit", 1, None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("worker.nowhere:kill", "no fault point"),
        ("worker.setup:explode", "no fault action"),
        ("worker.setup:kill:first", "invalid literal"),
        ("worker.setup:corrupt", "needs a reply to change"),
        ("parent.before_reply:eof", "is not in a worker"),
        ("parent.before_reply@1:kill", "is not in a worker"),
        ("worker.setup", "no fault action"),
    ],
)
def test_what_cannot_be_planned(text: str, why: str) -> None:
    """A fault that cannot be planned is named together with what there is."""
    with pytest.raises(ValueError, match=why):
        FaultPlan.parse(text)


def test_without_a_plan_every_point_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plan every point is None, so that a batch pays a comparison; planned points are
    those of the worker that was named.
    """
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    assert set(vars(WorkerPoints(0)).values()) == {None}
    assert faults.at("parent.before_reply") is faults.sending(0) is None
    monkeypatch.setenv(faults.VARIABLE, "worker.setup@1:raise, worker.after_send:raise")
    assert [name for name, hook in vars(WorkerPoints(0)).items() if hook] == ["after_send"]
    assert [name for name, hook in vars(WorkerPoints(1)).items() if hook] == ["setup", "after_send"]


def test_a_fault_happens_on_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault happens on the pass that was planned, on the second one only for example, or on every
    one.
    """
    monkeypatch.setenv(faults.VARIABLE, "worker.setup:raise:2")
    assert _passes(4) == [False, True, False, False]
    monkeypatch.setenv(faults.VARIABLE, "worker.setup:raise:*")
    assert _passes(3) == [True, True, True]


def test_a_fault_may_be_limited_to_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fault that is limited to one process happens once, although two processes have counters of
    their own.
    """
    for name, value in environment([FaultPlan("worker.setup", "raise")], tmp_path).items():
        monkeypatch.setenv(name, value)

    assert _passes(1) == [True]
    assert _passes(1) == [False]


def _passes(n: int) -> list[bool]:
    """Which of so many passes raise."""
    hook = faults.at("worker.setup")
    assert hook is not None
    raised = []
    for _ in range(n):
        try:
            hook()
            raised.append(False)
        except InjectedFault:
            raised.append(True)
    return raised


# -- what they do to a service

DEADLY = [
    FaultPlan("worker.after_recv", "kill"),
    pytest.param(FaultPlan("worker.before_predict", "exit"), marks=pytest.mark.slow),
    FaultPlan("worker.in_predict", "kill"),
    pytest.param(FaultPlan("worker.after_predict", "raise"), marks=pytest.mark.slow),
    FaultPlan("worker.before_send", "corrupt"),
    pytest.param(FaultPlan("worker.before_send", "eof"), marks=pytest.mark.slow),
    pytest.param(FaultPlan("worker.mid_send", "kill"), marks=pytest.mark.slow),
    FaultPlan("worker.mid_send", "eof"),
]


@pytest.mark.fault("F1", "F4", "F5", "F44")
@pytest.mark.parametrize("plan", DEADLY, ids=str)
def test_a_batch_survives_its_worker(plan: FaultPlan, tmp_path: Path) -> None:
    """Wherever a worker is lost with a batch, that is run once more by the next one."""
    with carpool.Service(stage(plan, once=tmp_path)).run() as service:
        assert list(service.stream([1.0, 2.0, 3.0])) == [2.0, 4.0, 6.0]
        assert service.stats().stages[0].restarts == 1


@pytest.mark.fault("F10")
@slow_where(lambda plan: plan.action == "stop")
@pytest.mark.parametrize(
    "plan", [FaultPlan("worker.in_predict", "hang"), FaultPlan("worker.mid_send", "stop")], ids=str
)
def test_a_batch_survives_a_worker_that_stands_still(plan: FaultPlan, tmp_path: Path) -> None:
    """A worker that stands still is found by the hang limit, and its batch is run once more."""
    with carpool.Service(stage(plan, once=tmp_path, max_batch_time_s=1.5), timeout_s=60).run() as service:
        assert service.predict(1.5) == 3.0
        assert service.stats().stages[0].restarts == 1


@pytest.mark.fault("F11")
@pytest.mark.slow
def test_holding_the_gil_stops_all_threads(tmp_path: Path) -> None:
    """While a worker holds the GIL not even its own watcher runs, and still it is found and
    replaced.
    """
    plan = FaultPlan("worker.in_predict", "gil")
    with carpool.Service(stage(plan, once=tmp_path, max_batch_time_s=1.5), timeout_s=60).run() as service:
        assert service.predict(1.5) == 3.0
        assert service.stats().stages[0].restarts == 1


@pytest.mark.fault("F5")
def test_what_was_sent_before_the_death_is_delivered(tmp_path: Path) -> None:
    """If a worker is killed right after its reply the batch is answered, and not run again."""
    plan = FaultPlan("worker.after_send", "kill")
    with carpool.Service(stage(plan, once=tmp_path, idempotent=False)).run() as service:
        assert service.predict(1.0) == 2.0
        wait_until(lambda: service.stats().stages[0].restarts == 1)


def test_a_raise_in_predict_is_the_models_own() -> None:
    """If a planned fault raises in `predict` the caller gets it as the model's error, and the
    worker goes on.
    """
    with carpool.Service(stage(FaultPlan("worker.in_predict", "raise"), isolate_errors=False)).run() as service:
        with pytest.raises(carpool.ModelError, match=r"worker\.in_predict:raise:1"):
            service.predict(1.0)
        assert service.predict(1.0) == 2.0
        assert service.stats().stages[0].restarts == 0


def test_a_fault_in_setup_is_a_failed_start() -> None:
    """With a fault in `setup` the service does not start, and says why."""
    with pytest.raises(carpool.StartupError, match=r"worker\.setup:raise:1"):
        carpool.Service(stage(FaultPlan("worker.setup", "raise"))).start()


@pytest.mark.parametrize("point", ["parent.after_dispatch", "parent.before_reply"])
def test_the_parents_points(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault points of the parent are passed once per batch, here with a delay."""
    monkeypatch.setenv(faults.VARIABLE, str(FaultPlan(point, "delay", n=2, seconds=0.4)))
    with carpool.Service(carpool.Stage(models.scale, max_batch_size=4)).run() as service:
        took_s = []
        for _ in range(2):
            began = time.monotonic()
            assert service.predict(1.0) == 2.0
            took_s.append(time.monotonic() - began)
    assert took_s[1] > 0.4
