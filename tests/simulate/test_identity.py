"""The simulator's decisions are the service's: one recording of requests, replayed through both drivers.

The virtual driver runs as it is. The asyncio driver runs as it is too, on a loop whose time jumps from one event to the
next and with an executor that answers when the batch's time is over. Then all must be equal: who shares which batch, in
which order, on which worker, why, and when; who is refused, who expires, who is answered, and when.

Where the drivers differ by design: a reply that finds a full batch waiting has it sent at once by asyncio's driver, and
a timer ends a turn early. With `turn_s` = 0 neither can be seen, as both happen at the same moment; with a turn that
takes time they are equal where neither occurs.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Any

import pytest

from carpool.engine.core.batch import Batch, Reply
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.virtual import TICK_S, VirtualDriver
from carpool.engine.observe.stats import Stats
from carpool.engine.request import Lane, Request
from carpool.simulate.arrivals import Bursts, Flash, Open, Poisson, Scene
from carpool.simulate.policies import policy_of
from tests.effort import slow_where

POLICIES = ("greedy", "static:10ms", "static:10ms,from_idle=yes", "aimd", "cork", "deadline", "adaptive")
SLO_S = 0.06
CAPACITY = 64 / 0.024  # requests per second of one worker

Recording = list[tuple[float, float, int]]
"""When each request came, how long its caller would wait, and its priority."""


def affine(n: int) -> float:
    return 0.008 + 0.00025 * n


@dataclass(frozen=True)
class Setting:
    """What is served by whom.

    Attributes:
        noise: Of the costs, as the standard deviation of their logarithm.
        hop_s: Of each batch to its worker and back.
        turn_s: Of the loop.
        runs_ahead: Whether a batch may lie with its worker before that is free.
    """

    policy: str
    workers: int = 1
    max_batch_size: int = 64
    max_queue_size: float = inf
    noise: float = 0.0
    hop_s: float = 0.0
    turn_s: float = 0.0
    runs_ahead: bool = False

    def core(self) -> Core:
        limit = self.max_batch_size
        policy = policy_of(self.policy, max_batch_size=limit, slo_s=SLO_S, cost_s=lambda n: affine(round(n)))
        slo_s = None if self.runs_ahead else SLO_S
        batcher = Batcher("stage", policy, Queue(self.max_queue_size), runs_ahead=self.runs_ahead)
        return Core([batcher], slo_s=slo_s)

    def costs(self) -> Callable[[Batch, float], float]:
        """The same series of costs each time."""
        dice = Random(1)
        return lambda batch, now: affine(len(batch)) * dice.lognormvariate(0.0, self.noise)


@dataclass
class Decisions:
    """What was decided and when, to the nanosecond: a timer that is asked for as a delay is off by a last bit."""

    batches: list[tuple[float, int, str, tuple[object, ...]]] = field(default_factory=list)
    answers: list[tuple[float, object, str]] = field(default_factory=list)

    def started(self, now: float, batch: Batch, busy_s: float) -> None:
        of = tuple(request.item for request in batch.requests)
        self.batches.append((round(now, 9), batch.place, batch.reason, of))

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            self.answers.append((round(now, 9), request.item, type(request.error).__name__))

    def outcomes(self) -> set[str]:
        return {outcome for _, _, outcome in self.answers}


class JumpingLoop(asyncio.AbstractEventLoop):
    """As much of a loop as the driver needs. What happens at one moment is all delivered before what that turn put off,
    and timers, are called; so does a real loop. `call_soon` comes `turn_s` later.
    """

    def __init__(self, turn_s: float) -> None:
        self.now = 0.0
        self._turn_s = turn_s
        self._order = itertools.count()
        self._due: list[tuple[float, int, int, Callable[[], object], _Handle]] = []

    def time(self) -> float:
        return self.now

    def happen(self, when: float, event: Callable[[], object]) -> None:
        """Have something come from outside."""
        heapq.heappush(self._due, (when, 0, next(self._order), event, _Handle()))

    def call_soon(self, callback: Callable[..., object], *args: Any, **unused: Any) -> Any:
        return self._call_at(self.now + self._turn_s, lambda: callback(*args))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, **unused: Any) -> Any:
        return self._call_at(self.now + (delay or TICK_S), lambda: callback(*args))

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def run_until(self, end: float) -> None:
        while self._due and self._due[0][0] <= end:
            self.now, _, _, callback, handle = heapq.heappop(self._due)
            if not handle.cancelled:
                callback()

    def _call_at(self, when: float, callback: Callable[[], object]) -> _Handle:
        handle = _Handle()
        heapq.heappush(self._due, (when, 1, next(self._order), callback, handle))
        return handle


class _Handle:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Stub:
    """The executor: a batch's answers come when its hop and its cost are over."""

    def __init__(self, driver: Driver, loop: JumpingLoop, setting: Setting, decisions: Decisions) -> None:
        self._driver, self._loop, self._setting, self._decisions = driver, loop, setting, decisions
        self._costs = setting.costs()
        self._ahead: dict[int, list[Batch]] = {}

    def run(self, batch: Batch) -> None:
        if batch.ahead:
            self._ahead.setdefault(batch.place, []).append(batch)
        else:
            self._begin(batch, self._setting.hop_s)

    def _begin(self, batch: Batch, hop_s: float) -> None:
        now = self._loop.now
        busy_s = self._costs(batch, now)
        self._decisions.started(now, batch, busy_s)
        results = [request.item for request in batch.requests]
        reply = Reply(batch.stage, batch.place, batch.id, batch.ids, results, None, busy_s)

        def end() -> None:
            if lying := self._ahead.get(batch.place):
                self._begin(lying.pop(0), 0.0)
            self._driver.completed(reply)

        self._loop.happen(now + hop_s + busy_s, end)

    def start(self) -> None:
        raise AssertionError("workers are there already")

    def kill(self, worker: int) -> None:
        raise AssertionError("nobody hangs")

    async def stop(self, grace_s: float) -> None:
        raise AssertionError("nobody stops")


class Punctual(Driver):
    """Polls when it is time, and at no timer that was set before for what has happened meanwhile.

    A real loop keeps such timers. A batch that may go within a millisecond goes when it is asked
    for, so an extra poll may send one ahead a little earlier than in virtual time.
    """

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super()._set_timer(when)


class Heard:
    """The caller of every request."""

    def __init__(self, decisions: Decisions, clock: Callable[[], float], again: Again | None = None) -> None:
        self._decisions, self._clock, self._again = decisions, clock, again

    def answered(self, request: Request) -> None:
        now = self._clock()
        self._decisions.answered(now, [request])
        if self._again is not None:
            self._again(now, request)


Again = Callable[[float, Request], None]


def request_of(index: int, entry: tuple[float, float, int], caller: Heard) -> Request:
    when, timeout_s, priority = entry
    request = Request(index, when + timeout_s, caller)
    request.lane = Lane(priority, None, 0)
    return request


def in_virtual_time(setting: Setting, recording: Recording, think_s: float | None = None) -> Decisions:
    """Through the simulator's driver. With `think_s` each client asks again so long after its answer."""
    decisions = Decisions()
    core = setting.core()
    driver = VirtualDriver(
        core,
        setting.costs(),
        [setting.workers],
        hop_s=setting.hop_s,
        turn_s=setting.turn_s,
        watcher=_Watch(decisions),
    )

    def again(now: float, request: Request) -> None:
        after = now + (think_s or 0.0)
        following = request_of(request.item, (after, inf, 0), caller)  # type: ignore[arg-type]
        driver.at(after, lambda: driver.enter(following))

    caller = Heard(decisions, driver.clock, None if think_s is None else again)
    requests = [request_of(i, entry, caller) for i, entry in enumerate(recording)]
    driver.feed(zip([entry[0] for entry in recording], requests, strict=True))
    driver.run(until=end_of(recording))
    return decisions


def on_a_loop(setting: Setting, recording: Recording, think_s: float | None = None) -> Decisions:
    """Play a setting through the asyncio driver, on a loop whose time jumps."""
    decisions = Decisions()
    loop = JumpingLoop(setting.turn_s)
    core = setting.core()
    asyncio._set_running_loop(loop)
    try:
        driver = Punctual(core, Stats("replay", core, [None], [False], SLO_S), loop.time)
    finally:
        asyncio._set_running_loop(None)
    driver.executors = [Stub(driver, loop, setting, decisions)]
    for worker in range(setting.workers):
        driver.worker_ready(0, worker)

    def again(now: float, request: Request) -> None:
        after = now + (think_s or 0.0)
        following = request_of(request.item, (after, inf, 0), caller)  # type: ignore[arg-type]
        loop.happen(after, lambda: driver.submit(following))

    caller = Heard(decisions, loop.time, None if think_s is None else again)
    for i, entry in enumerate(recording):
        request = request_of(i, entry, caller)
        loop.happen(entry[0], lambda request=request: driver.submit(request))  # type: ignore[misc]
    loop.run_until(end_of(recording))
    return decisions


class _Watch:
    """Batches only: answers are heard by the callers, in both drivers."""

    def __init__(self, decisions: Decisions) -> None:
        self.started = decisions.started

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        """They say so themselves."""


def end_of(recording: Recording) -> float:
    return recording[-1][0] + 1.0


def recorded(process: Open, duration_s: float, *, patience_s: float = inf, urgent: float = 0.0) -> Recording:
    """Requests as they came. A third of the callers give up after `patience_s`; some are `urgent`."""
    dice = Random(2)
    times = process.times(Random(3), Scene(duration_s, CAPACITY))
    return [(when, patience_s if dice.random() < 0.3 else inf, int(dice.random() < urgent)) for when in times]


OVERLOAD = recorded(Poisson(rho=1.6), 1.5, patience_s=0.09, urgent=0.1)
"""More than can be done, deadlines that pass, two priorities."""
FLASH = recorded(Flash(rho=0.4, peak_rho=2.5), 2.0)
"""A quiet time, a crowd, a quiet time."""
BURSTS = recorded(Bursts(rho=0.7), 1.5)
"""Many at one moment."""
CLIENTS: Recording = [(0.1 * client, inf, 0) for client in range(12)]
"""The first requests of clients that ask again so soon after each answer:"""
THINK_S = 0.0007


@slow_where(lambda policy, recording: recording is not OVERLOAD and policy != "adaptive")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recording", [OVERLOAD, FLASH, BURSTS], ids=["overload", "flash", "bursts"])
def test_both_drivers_decide_the_same(policy: str, recording: Recording) -> None:
    """The real and the virtual driver make the same batches, with the same members in the same
    order, reasons, refusals and times.
    """
    setting = Setting(policy, noise=0.1, hop_s=0.0003, max_queue_size=400)
    simulated, real = in_virtual_time(setting, recording), on_a_loop(setting, recording)

    assert len(real.answers) == len(recording)
    assert real.batches == simulated.batches
    assert real.answers == simulated.answers


@slow_where(lambda policy: policy not in ("greedy", "adaptive"))
@pytest.mark.parametrize("policy", POLICIES)
def test_both_drivers_decide_the_same_for_several_workers(policy: str) -> None:
    """With several workers both drivers give each batch to the same worker."""
    setting = Setting(policy, workers=3, max_batch_size=24, noise=0.2)
    simulated, real = in_virtual_time(setting, OVERLOAD), on_a_loop(setting, OVERLOAD)

    assert {worker for _, worker, _, _ in real.batches} == {0, 1, 2}
    assert (real.batches, real.answers) == (simulated.batches, simulated.answers)


@pytest.mark.parametrize("policy", POLICIES)
def test_both_drivers_decide_the_same_for_clients_that_return(policy: str) -> None:
    """With clients that return both drivers decide the same: what arrives follows from what was
    decided, so one difference would grow, and `Adaptive` waits for clients.
    """
    setting = Setting(policy, hop_s=0.0002)
    simulated, real = in_virtual_time(setting, CLIENTS, THINK_S), on_a_loop(setting, CLIENTS, THINK_S)

    assert len(real.batches) > 100
    assert (real.batches, real.answers) == (simulated.batches, simulated.answers)


@pytest.mark.parametrize("policy", ["greedy", "aimd", "deadline", "adaptive"])
def test_a_turn_that_takes_time_is_the_same_in_both_drivers(policy: str) -> None:
    """In both drivers what comes within a turn shares the decision, and a reply that finds nobody
    waiting cuts the turn short.
    """
    recording = recorded(Poisson(rho=0.6), 2.0)
    setting = Setting(policy, max_batch_size=512, hop_s=0.0003, turn_s=0.0005)
    simulated, real = in_virtual_time(setting, recording), on_a_loop(setting, recording)

    assert max(len(of) for _, _, _, of in real.batches) < setting.max_batch_size
    assert (real.batches, real.answers) == (simulated.batches, simulated.answers)


@slow_where(lambda policy, workers: (policy, workers) not in (("greedy", 2), ("adaptive", 1)))
@pytest.mark.parametrize("policy", ["greedy", "static:10ms", "adaptive"])
@pytest.mark.parametrize("workers", [1, 2])
def test_both_drivers_send_the_same_batches_ahead(policy: str, workers: int) -> None:
    """Both drivers send the same batches ahead, which saves the hop, so that more is done than
    without.
    """
    setting = Setting(policy, workers, max_batch_size=16, noise=0.05, hop_s=0.001, runs_ahead=True)
    simulated, real = in_virtual_time(setting, OVERLOAD), on_a_loop(setting, OVERLOAD)
    without = in_virtual_time(replace(setting, runs_ahead=False), OVERLOAD)

    assert (real.batches, real.answers) == (simulated.batches, simulated.answers)
    assert real.batches != without.batches


def test_the_recordings_ask_for_everything() -> None:
    """The recordings have refusals, expiries, batches that are full and that are not, and waits for
    clients; without them equality would say little.
    """
    setting = Setting("greedy", noise=0.1, hop_s=0.0003, max_queue_size=400)
    greedy, adaptive = on_a_loop(setting, OVERLOAD), on_a_loop(replace(setting, policy="adaptive"), OVERLOAD)
    returning = on_a_loop(Setting("adaptive"), CLIENTS, THINK_S)

    assert greedy.outcomes() >= {"NoneType", "Overloaded", "DeadlineExceeded"}
    assert adaptive.outcomes() >= {"NoneType", "Overloaded"}
    assert len({reason for _, _, reason, _ in adaptive.batches}) >= 3
    assert {len(of) for _, _, _, of in adaptive.batches} >= {1, 64}
    assert max(len(of) for _, _, _, of in returning.batches) > 10


def test_a_difference_would_be_seen() -> None:
    """With another turn or another hop the decisions differ, so the tests above can fail."""
    plain = in_virtual_time(Setting("adaptive", noise=0.1), FLASH)

    assert on_a_loop(Setting("adaptive", noise=0.1, turn_s=0.0005), FLASH).batches != plain.batches
    assert on_a_loop(Setting("adaptive", noise=0.1, hop_s=0.0005), FLASH).batches != plain.batches
