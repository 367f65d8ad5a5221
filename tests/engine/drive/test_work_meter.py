"""The coordinator's own work, measured by drivers and given to policies."""

from __future__ import annotations

import asyncio
import threading
from math import inf
from typing import Any

import pytest

from carpool import Service, Stage
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.drive import loop_thread
from carpool.engine.drive.loop_thread import WorkMeter, worked_s
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.observe.stats import explained
from carpool.engine.policy import Greedy, View
from carpool.engine.policy.base import Decision
from carpool.simulate import Coordinator, run
from tests.support.loops import on_a_loop
from tests.support.models import scale
from tests.support.steps import stepper


class Seeing(Greedy):
    """Greedy, which notes the coordinator's work as its view has it."""

    def __init__(self) -> None:
        super().__init__(64)
        self.seen: set[tuple[float, float]] = set()

    def decide(self, view: View) -> Decision:
        self.seen.add((view.request_work_s, view.batch_work_s))
        return super().decide(view)


class Metered:
    """A meter of a core that answers at once, and a thread whose work is said in numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worked_s = 5.0
        monkeypatch.setattr(loop_thread, "worked_s", lambda: self.worked_s)
        self.core = Core([Batcher("stage", Greedy(64), Queue())])
        self.driver = VirtualDriver(self.core, [lambda n: 0.0])
        self.meter = WorkMeter(self.core)

    def serve(self, batches: int, size: int) -> None:
        for _ in range(batches):
            for _ in range(size):
                self.driver.submit("x")
            self.driver.run()

    @property
    def found(self) -> tuple[float, float]:
        view = self.core.batchers[0].lobby.view
        return view.request_work_s, view.batch_work_s


def test_work_is_divided_among_what_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the thread has worked since it was last looked at is for the requests and batches since then."""
    metered = Metered(monkeypatch)
    metered.serve(7, 3)  # before the first look
    metered.meter.measure(10.0)
    before = metered.found
    metered.serve(20, 7)
    metered.worked_s += 12.0
    metered.meter.measure(10.5)

    assert before == (0.0, 0.0)
    assert metered.found == pytest.approx((12 / 240, 12 / 48))
    assert explained(Greedy(64), 0.0, metered.core.batchers[0])["batch_work_s"] == pytest.approx(0.25)
    assert metered.meter.next_at == pytest.approx(10.6)


def test_what_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few requests are counted with the next ones; a second in which too few came, the work of another
    thread, and a moment in which the system does not say it are passed over.
    """
    metered = Metered(monkeypatch)
    measure, serve = metered.meter.measure, metered.serve

    def fails() -> float:
        raise OSError("too many open files")

    measure(0.0)
    serve(10, 2)
    metered.worked_s += 1.0
    measure(0.5)
    few = metered.found
    serve(10, 12)
    metered.worked_s += 1.0
    measure(0.9)
    both = metered.found

    serve(20, 7)
    metered.worked_s += 500.0
    measure(2.5)  # much later
    thread = threading.Thread(target=measure, args=(2.6,))
    serve(20, 7)
    metered.worked_s += 500.0
    thread.start()
    thread.join()
    serve(20, 7)
    metered.worked_s += 500.0
    measure(2.7)
    serve(20, 7)
    with monkeypatch.context() as patch:
        patch.setattr(loop_thread, "worked_s", fails)
        measure(2.8)
    serve(20, 7)
    metered.worked_s += 500.0
    measure(2.9)

    assert few == (0.0, 0.0)
    assert both == pytest.approx((2 / 240, 2 / 48))  # 140 requests and 20 batches
    assert metered.found == both


def test_work_for_parts_is_not_measured() -> None:
    """With a stage that answers in parts nothing is measured."""
    assert WorkMeter(Core([stepper()])).next_at == inf


def test_a_thread_that_works_has_worked() -> None:
    """The seconds of a thread rise while it works, on any system."""
    before = worked_s()
    while worked_s() == before:
        sum(range(1000))

    assert worked_s() > before > 0


@on_a_loop
async def test_a_service_measures_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that has enough to do shows what its loop works, as its policy sees it."""
    monkeypatch.setattr(loop_thread, "_EVERY_S", 0.0)
    async with Service(Stage(scale, max_batch_size=64, policy="greedy", run_in="thread")).run_async() as service:
        shown: dict[str, Any] = {}
        while not shown.get("request_work_s"):
            assert await asyncio.gather(*[service.predict(1.0) for _ in range(64)]) == [2.0] * 64
            shown = service.stats().stages[0].policy

    assert shown["batch_work_s"] >= 0


def test_a_simulated_coordinator_is_known() -> None:
    """A policy is given what the work of a simulated coordinator takes, twice as much where
    its core is away for half of the time; without a coordinator nothing.
    """
    seen = {}
    for coordinator in (None, Coordinator(1e-5, 6e-5), Coordinator(1e-5, 6e-5, slice_s=3e-3, pause_s=3e-3)):
        policy = Seeing()
        run(lambda policy=policy: policy, "poisson:rate=200", duration_s=0.1, coordinator=coordinator)  # type: ignore[misc]
        seen[coordinator] = policy.seen

    assert list(seen.values()) == [
        {(0.0, 0.0)},
        {(1e-5, 6e-5)},
        {(2 * 1e-5, 2 * 6e-5)},
    ]
