"""What is counted, told and logged of answers in parts, in numbers: a step takes 1 s, an item is how many parts it has.

The asyncio driver drives workers whose time jumps, so every number is exact.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from carpool.engine.core.batch import Batch
from carpool.engine.core.core import Core
from carpool.engine.core.journal import Journal
from carpool.engine.core.running_set import Order
from carpool.engine.core.stepper import Stepper
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.virtual import Answer, StepCosts, VirtualStepWorker
from carpool.engine.observe.log import JsonLines
from carpool.engine.observe.prometheus import render
from carpool.engine.observe.snapshot import StreamSnapshot, StreamStats
from carpool.engine.observe.stats import Stats
from carpool.engine.policy.paced import Paced
from carpool.engine.policy.steps import GreedySteps
from carpool.engine.request import DONE, Request, Stream
from carpool.errors import ModelError, Unavailable, ValidationError
from tests.support.http.jump import on_a_jumping_loop
from tests.support.http.metrics import parse, value
from tests.support.pipelines import pipeline_of
from tests.support.pipelines import stage as batch_stage
from tests.support.steps import stepper

NAMES = {"model": "chat", "stage": "steps"}


class Listener:
    """A caller that takes all that comes."""

    def __init__(self) -> None:
        self.parts: list[object] = []

    def take_part(self, request: Request, part: object) -> None:
        self.parts.append(part)

    def answered(self, request: Request) -> None:
        """The request itself says how it ended."""


class World:
    """A service of one stage of steps, whose driver is real, and whose workers take jumping time."""

    def __init__(
        self,
        stage: Stepper,
        *,
        start_s: Callable[[int], float] = lambda length: 0.0,
        step_s: Callable[[int], float] = lambda n: 1.0,
        answer: Answer = range,
        slo_s: float | None = None,
        part_slo_s: float | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.journal = Journal()
        self.core = Core([stage], journal=self.journal)
        self.stats = Stats("chat", self.core, [None], [False], slo_s, StreamStats(stage, slo_s, part_slo_s))
        self.driver = Driver(self.core, self.stats, self.loop.time)
        self.driver.executors = [Pool(self)]
        self.stage = stage
        self._costs = StepCosts(start_s, step_s, answer)
        self._start_worker()

    def _start_worker(self) -> None:
        def at(when: float, happen: Callable[[], None]) -> None:
            self.loop.call_at(when, happen)

        self.worker = VirtualStepWorker(0, 0, self._costs, at, self.driver.reported)
        self.driver.worker_ready(0, 0)

    def ask(self, item: Any, when: float = 0.0, *, collected: bool = False, timeout_s: float = inf) -> Request:
        """One caller that comes at a time."""
        request = Request(item, when + timeout_s, Listener())
        request.stream = Stream(is_collected=collected, until=when + timeout_s)
        if when <= self.loop.time():
            self.driver.submit(request)
        else:
            self.at(when, lambda: self.driver.submit(request))
        return request

    def at(self, when: float, happen: Callable[[], object]) -> None:
        self.loop.call_at(when, happen)

    def lose(self) -> None:
        """Have the worker die; another one takes its place."""
        self.worker.lose()
        self.driver.worker_lost(0, 0)
        self._start_worker()

    async def run(self, until: float) -> StreamSnapshot:
        await asyncio.sleep(until - self.loop.time())
        found = self.driver.snapshot().streams
        assert found is not None
        return found

    def story(self, request: Request) -> list[str]:
        return [str(entry).replace("00000 ", " ") for entry in self.journal.story(request.id)]


class Pool:
    """What hands orders to the worker of a `World`; it has no batches to run."""

    def __init__(self, world: World) -> None:
        self._world = world

    def start(self) -> None:
        """The worker is there."""

    def run(self, batch: Batch) -> None:
        raise AssertionError("a stage of steps has no batches")

    def kill(self, place: int) -> None:
        raise AssertionError("no worker hangs")

    async def stop(self, grace_s: float) -> None:
        """There is nothing to stop."""

    def send(self, order: Order) -> None:
        self._world.worker.take(self._world.loop.time(), order)


@on_a_jumping_loop
async def test_times_are_to_the_first_part_between_parts_and_the_longest_gap() -> None:
    """A newcomer's start holds up those who run: that is their longest gap, and counts in the mean."""
    world = World(stepper(), start_s=lambda length: 0.5 * length)
    world.ask(4)  # parts at 1.5, 2.5, 4.0, 5.0
    world.ask(2, 2.0)  # joins at 2.5, parts at 4.0, 5.0
    found = await world.run(3.0)
    assert (found.rows, found.size, found.parts, found.ends["complete"]) == (2, 2, 2, 0)
    assert (found.mean_first_part_s, found.mean_part_s) == (1.5, 0.0)  # the distances count at the end

    found = await world.run(10.0)
    assert (found.rows, found.size, found.parts, found.ends["complete"]) == (0, 0, 6, 2)
    assert found.mean_first_part_s == (1.5 + 2.0) / 2
    assert found.mean_part_s == pytest.approx((3.5 / 3 + 1.0) / 2)
    assert found.mean_longest_gap_s == (1.5 + 1.0) / 2
    assert (found.steps, found.mean_step_s, found.starts, found.mean_start_s) == (4, 1.0, 2, 0.5)
    assert found.goodput is None  # without goals nothing is good or bad
    stage = world.driver.snapshot().stages[0]
    assert (stage.batches, stage.batch_sizes, stage.mean_compute_s) == (4, {1: 2, 2: 2}, 1.0)
    assert stage.mean_queue_s == 0.0  # both joined the set at once, and waited for a step under way


@on_a_jumping_loop
async def test_goodput_has_a_goal_to_the_first_part_and_one_between_parts() -> None:
    """A stream is good if it is complete, its first part came in time and its mean distance is short enough."""
    world = World(stepper(rows=1), slo_s=2.0, part_slo_s=1.0, answer=lambda item: item)
    world.ask(["a", "b"])  # 1, 2: good
    world.ask(["a", "b"], 1.0)  # 3, 4: just in time
    world.ask(["a"], 2.0)  # 5: late
    world.ask(["a", None, "b"], 5.0)  # 6, 8: too far apart
    world.ask(["a", ModelError("bad row")], 8.0)  # 9, then it fails
    world.ask(["a", "b"], 10.0, collected=True)  # no stream
    world.ask([ValidationError("too long")], 13.0)  # its client's doing, and so is the next
    left = world.ask(["a"] * 9, 15.0)
    world.at(17.5, lambda: world.driver.cancel(left))
    found = await world.run(20.0)

    assert (found.ends["complete"], found.ends["model_error"], found.broken) == (4, 1, 1)
    assert (found.ends["invalid"], found.ends["cancelled"]) == (1, 1)
    assert found.goodput == 2 / 5
    service = world.driver.snapshot()
    assert (
        service.outcomes["ok"] == 5 and service.slo_attainment == 4 / 6
    )  # of a collected one all, else the first part
    assert service.stages[0].mean_queue_s == (0 + 1 + 2 + 0 + 0 + 0 + 0 + 0) / 8


@on_a_jumping_loop
async def test_a_reader_that_lags_does_not_count_against_the_service() -> None:
    """While a caller wants no parts, no time counts: neither as a gap, nor in the mean, nor as an end."""
    world = World(stepper())
    request = world.ask(6)
    world.at(2.5, lambda: world.driver.pause(request, True))  # the part at 3 still comes
    world.at(2.6, lambda: world.driver.pause(request, True))
    found = await world.run(6.0)
    assert (found.paused, found.pauses, found.rows) == (1, 1, 1)
    world.at(7.5, lambda: world.driver.pause(request, False))  # parts at 8.5, 9.5, 10.5
    world.at(7.6, lambda: world.driver.pause(request, False))
    found = await world.run(20.0)

    assert (found.paused, found.pauses, found.ends["complete"]) == (0, 1, 1)
    assert found.mean_longest_gap_s == 1.0 and found.mean_part_s == 1.0
    assert world.story(request) == [
        "0.0 admitted",
        "0.0 runs steps joins worker 0 by order 1",
        "1.0 first part steps from worker 0",
        "2.5 paused steps",
        "2.5 rests steps on worker 0 by order 2",
        "7.5 goes on steps",
        "7.5 is stepped again steps on worker 0 by order 3",
        "10.5 answered after 6 parts",
    ]


@on_a_jumping_loop
async def test_each_stream_ends_in_one_of_the_ways() -> None:
    """Ends are counted by kind, each stream once; what is collected is none, whatever becomes of it."""
    bad = ModelError("bad row")
    answers: dict[str, list[object]] = {"whole": ["a", "b"], "bad": ["a", bad], "slow": [None] * 9, "long": ["a"] * 99}
    world = World(stepper(rows=8, max_size=8), answer=lambda item: answers[item])
    world.ask("whole"), world.ask("whole", collected=True), world.ask("bad"), world.ask("bad", collected=True)
    world.ask("slow", timeout_s=3.5)
    gone = world.ask("long")
    world.at(4.5, lambda: world.driver.cancel(gone))
    silent = world.ask("long", 5.0)
    refused = world.ask("whole", 8.5)
    world.at(8.2, lambda: world.driver.close(Unavailable("over", code="draining")))
    world.at(9.5, world.driver.abort)
    found = await world.run(20.0)

    ends = {"complete": 1, "model_error": 1, "expired": 1, "cancelled": 1, "unavailable": 2}
    assert {end: n for end, n in found.ends.items() if n} == ends
    assert (found.broken, found.stray_parts) == (2, 2)  # those of the failed row, of the abort; of both that left
    assert refused.state == DONE
    assert world.story(gone)[-1] == "4.5 cancelled after 4 parts, the last one 0.500 s ago"
    assert world.story(silent)[-1] == "4.5 failed: the service has stopped after 4 parts, the last one 0.500 s ago"
    assert world.driver.snapshot().outcomes["model_error"] == 2


@on_a_jumping_loop
async def test_the_silence_before_a_failure_is_a_gap() -> None:
    """A stream that falls silent has its silence as its longest gap, and not in its mean distance."""
    world = World(stepper(silence_s=3.0), answer=lambda item: ["a", "b", *[None] * item])
    silent, paused = world.ask(9), world.ask(9)
    world.at(2.5, lambda: world.driver.pause(paused, True))
    world.at(7.0, world.driver.abort)
    found = await world.run(6.0)
    assert (found.ends["expired"], found.broken, found.mean_longest_gap_s, found.mean_part_s) == (1, 1, 3.0, 1.0)
    assert world.story(silent)[-1].endswith("after 2 parts, the last one 3.000 s ago")
    found = await world.run(8.0)  # the other's reader wanted nothing meanwhile
    assert (found.ends["unavailable"], found.mean_longest_gap_s) == (1, (3.0 + 1.0) / 2)


@on_a_jumping_loop
async def test_a_stream_that_went_on_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """A lost worker is a gap like any other; the log sums up what went on and what broke off, with its code."""
    caplog.set_level(logging.INFO, "carpool")
    world = World(stepper(resumable=True))
    requests = [world.ask(5), world.ask(5)]
    world.at(2.5, world.lose)
    found = await world.run(9.9)
    assert (found.resumed, found.ends["complete"]) == (2, 2)
    assert world.stats.stages[0].queue_time.count == 2  # each has waited once, as far as callers are concerned
    assert found.mean_longest_gap_s == (2.0 + 2.5) / 2  # each is alone in turn, for a step, while the other rests
    assert world.story(requests[1])[2:] == [
        "1.0 first part steps from worker 0",
        "2.5 worker lost, queued again, alone steps",
        "3.5 resumed after 2 parts steps joins worker 0 by order 2",
        "6.5 answered after 5 parts",
    ]
    lines = [record for record in caplog.records if getattr(record, "code", "") == "resumed"]
    text = "service chat resumed 1: they go on from the parts that they have had"
    assert [record.getMessage() for record in lines] == [text]
    await world.run(15.0)
    lines = [record for record in caplog.records if getattr(record, "code", "") == "resumed"]
    assert [record.getMessage() for record in lines[1:]] == [text.replace("1:", "1 in the last 10 s:")]
    said = json.loads(JsonLines().format(lines[0]))
    assert (said["model"], said["code"], said["requests"], said["level"]) == ("chat", "resumed", 1, "info")


@on_a_jumping_loop
async def test_what_broke_off_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Streams that fail after their first part have a line of their own, one for many, and none among the refusals."""
    caplog.set_level(logging.INFO, "carpool")
    world = World(stepper(rows=8))
    for _ in range(5):
        world.ask(9)
    world.at(2.5, world.lose)
    found = await world.run(5.0)
    assert (found.ends["worker_lost"], found.broken, found.rows) == (5, 5, 0)
    assert found.mean_longest_gap_s == 1.0
    (line,) = [record for record in caplog.records if record.name.startswith("carpool")]
    text = "service chat broke off 5 (503): after the first part, the worker that had the request died"
    assert line.getMessage() == text and line.levelno == logging.WARNING
    assert vars(line)["code"] == "worker_lost" and vars(line)["requests"] == 5


@on_a_jumping_loop
async def test_metrics_have_a_row_for_each_number() -> None:
    """All names are there with the labels of the others, and agree with `stats()`."""
    world = World(stepper(rows=2), start_s=lambda length: 0.25, slo_s=2.0, part_slo_s=1.0)
    world.ask(3), world.ask(3)  # parts at 1.25, 2.25, 3.25
    late, gone = world.ask(99, 1.0), world.ask(99, 1.0)  # join at 3.25, parts at 4.5, 5.5, …
    world.at(5.0, lambda: world.driver.cancel(gone))
    world.at(5.7, lambda: world.driver.pause(late, True))
    found = await world.run(8.0)
    metrics = parse(*render([world.stats], world.loop.time()))

    assert value(metrics, "carpool_first_part_seconds", "_count", model="chat") == 4
    assert value(metrics, "carpool_first_part_seconds", "_sum", model="chat") == 2 * 1.25 + 2 * 3.5
    assert value(metrics, "carpool_part_seconds", "_count", model="chat") == 2
    assert value(metrics, "carpool_part_seconds", "_sum", model="chat") == 2.0
    assert value(metrics, "carpool_longest_gap_seconds", "_sum", model="chat") == 2.0
    assert value(metrics, "carpool_parts", "_total", **NAMES) == found.parts
    assert value(metrics, "carpool_running", **NAMES) == 1 == value(metrics, "carpool_running_size", **NAMES)
    assert value(metrics, "carpool_paused", **NAMES) == 1
    assert value(metrics, "carpool_step_seconds", "_count", **NAMES) == found.steps
    assert value(metrics, "carpool_start_seconds", "_sum", **NAMES) == 0.5
    assert value(metrics, "carpool_streams", "_total", model="chat", end="complete") == 2
    assert value(metrics, "carpool_streams", "_total", model="chat", end="cancelled") == 1
    assert value(metrics, "carpool_good", "_total", model="chat") == 2
    assert value(metrics, "carpool_resumed", "_total", **NAMES) == 0
    assert value(metrics, "carpool_stray_parts", "_total", **NAMES) == 1
    assert value(metrics, "carpool_policy_batch_cost_seconds", **NAMES, n="max") == pytest.approx(1.0)
    assert "carpool_first_part_seconds" in str(render([world.stats], 8.0, "application/openmetrics-text"))


def test_where_answers_are_whole_there_is_nothing_of_streams() -> None:
    """A service that answers whole has none of these metrics, and none of these numbers."""
    stats = Stats("plain", pipeline_of(batch_stage()), [None], [False], slo_s=1.0)
    assert stats.streams is None and stats.snapshot(0.0).streams is None
    text = render([stats], 0.0)[0].decode()
    assert "carpool_first_part" not in text and "carpool_running" not in text and "carpool_parts" not in text


@on_a_jumping_loop
async def test_the_table_shows_streams() -> None:
    """`print(s.stats())` has the main numbers in three lines below the table of stages."""
    world = World(stepper(rows=2), slo_s=2.0, part_slo_s=1.0)
    world.ask(3), world.ask(2)
    gone = world.ask(9)
    world.at(4.5, lambda: world.driver.cancel(gone))
    await world.run(9.0)
    assert str(world.driver.snapshot()).splitlines()[-3:] == [
        "streams: first part 1,667 ms, parts 1,000 ms apart, longest gap 1,000 ms, 100.0% good",
        "work: 5 steps, 1,000 ms each, 2 starts, 0.00 ms each, 7 parts",
        "ends: 2 complete, 1 cancelled, 1 part came too late",
    ]


@on_a_jumping_loop
async def test_the_policy_explains_itself() -> None:
    """`explain()` says what steps and starts cost, the pace, and what the last decision was made with."""
    world = World(stepper(rows=2, policy=Paced(2, part_slo_s=2.0)), step_s=lambda n: 1.0)
    world.ask(30)
    world.ask(30, 9.5)
    await world.run(12.5)
    why = world.driver.snapshot().stages[0].policy
    assert why["policy"] == "paced" and why["rule"] == "all" and why["joined"] == 1
    assert why["pace_s"] == 2.0 and why["spare_s"] > 5.0
    assert why["cost_s"] == {1: pytest.approx(1.0), 2: pytest.approx(1.0)}
    assert why["first_part_s"] == pytest.approx(1.0)
    assert GreedySteps(1).explain(0.0)["cost_s"] == {1: 0.0}


def test_a_part_costs_less_than_a_microsecond() -> None:
    """Counting the parts of a step of 32 rows takes about 0.1 µs each; the bound is generous."""
    streams = StreamStats(stepper(), None, None)
    parts: list[tuple[Request, object]] = []
    for _ in range(32):
        request = Request(None, inf)
        request.admitted = 0.0
        request.stream = Stream()
        parts.append((request, "part"))
    best_s = inf
    for step in range(200):
        for request, _ in parts:
            assert request.stream is not None
            request.stream.part_at = float(step)
        began = time.perf_counter()
        streams.handed_on(parts)
        best_s = min(best_s, time.perf_counter() - began)
    assert best_s / 32 < 1e-6
    assert streams.first_part.count == 32
