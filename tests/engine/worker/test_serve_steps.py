"""What a worker of steps says of the time that its steps and starts take."""

from __future__ import annotations

from typing import Any

import pytest

from carpool.engine.call.invoke import Invoker
from carpool.engine.call.results import run_now
from carpool.engine.call.retry import Retrier
from carpool.engine.clock import VirtualClock
from carpool.engine.faults import WorkerPoints
from carpool.engine.wire import order as wire
from carpool.engine.wire.frame import Frame
from carpool.engine.wire.payload import OBJECT, dump
from carpool.engine.worker import serve
from carpool.engine.worker.answer import BatchAnswerer
from carpool.engine.worker.serve import StepAnswerer
from carpool.model import Model, traits_of
from tests.engine.worker.link import Link


class Slow(Model):
    """Each of its methods takes a time of its own."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def preprocess(self, x: int) -> int:
        self.clock.now += 100.0
        return x

    def start(self, xs: list[int]) -> list[list[int]]:
        self.clock.now += 1000.0
        return [[x] for x in xs]

    def step(self, states: list[list[int]]) -> list[int]:
        self.clock.now += 1.0
        return [state[0] for state in states]

    def stop(self, state: list[int]) -> None:
        """There is nothing to free."""

    def postprocess(self, part: int) -> int:
        self.clock.now += 10.0
        return part


class SlowLink(Link):
    """Gives its last frame once so many reports were sent; waiting for it takes a second, sending 0.25 s."""

    def __init__(self, clock: VirtualClock, *frames: Frame) -> None:
        super().__init__(*frames)
        self.clock = clock

    async def receive(self) -> Frame | None:
        self.came_at = self.clock.now = self.clock.now + 1.0
        return await super().receive()

    async def has_news(self) -> bool:
        return len(self.sent) == 4

    def send(self, frame: Frame) -> None:
        super().send(frame)
        self.clock.now += 0.25


def test_a_step_takes_all_the_time_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that knew the time of `step` alone would let newcomers use what `postprocess` and sending take: parts
    come further apart than it thinks. Starting is counted by itself with its `preprocess`, and waiting nowhere.
    """
    clock = VirtualClock()
    monkeypatch.setattr(serve, "monotonic", clock)
    retrier = Retrier(isolate_errors=True, clock=clock)
    invoker = Invoker(Slow, {"clock": clock}, traits_of(Slow, True), retrier, batched=True)
    run_now(invoker.set_up())
    batches = BatchAnswerer(invoker, is_first=True, is_last=True)
    answerer = StepAnswerer(invoker, batches, retrier, before_next_call=lambda: None)
    joining = [wire.Joining(id, OBJECT, OBJECT, wire.TAKES_PARTS, 1e9, dump(id)) for id in (1, 2)]
    link = SlowLink(clock, wire.order_frame(1, wire.OrderHead(), joining))
    run_now(serve.serve_steps(link, answerer, Announcer(), WorkerPoints(0)))

    reports: list[Any] = [wire.read_report(frame) for frame in link.sent]
    assert [(report.started, report.start_s) for report in reports] == [(2, 1200.0), (0, 0.0), (0, 0.0), (0, 0.0)]
    assert [(report.stepped, report.step_s) for report in reports] == [(2, 21.0)] + [(2, 21.25)] * 3


class Announcer:
    def begin(self, batch_id: int) -> None:
        """Nobody is told."""
