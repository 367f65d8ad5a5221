"""A worker of a stage of steps as the core sees it, with nothing inside: it follows orders, steps and reports.

A stream's parts are 0, 1, 2, … in the order in which it makes them, so a part that is missing, double or of another
stream shows. What is wrong about an order fails an assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from carpool.engine.clock import VirtualClock
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.core.running_set import (
    BACK,
    END,
    EVERY_STEP,
    FAILED,
    LAST,
    MORE,
    ON_LEAVING,
    Order,
    Parts,
    SetReport,
    stream_of,
)
from carpool.engine.core.stepper import Stepper
from carpool.engine.drive.virtual import Answer, StepCosts, VirtualDriver
from carpool.engine.policy.steps import GreedySteps, StepPolicy
from carpool.engine.request import Request, Stream


class Said(NamedTuple):
    """What a worker says of one stream; without a value, and last, an end without a part."""

    id: int
    value: object = None
    last: bool = False
    error: Exception | None = None


def columns(said: Sequence[Said], returned: Sequence[int] = ()) -> Parts:
    """What a worker says of its streams, in columns; `returned` found no memory."""
    rows: list[tuple[int, int, object]] = []
    for id, value, last, error in said:
        if error is not None:
            rows.append((id, FAILED, error))
        else:
            rows.append((id, END if last and value is None else LAST if last else MORE, value))
    return Parts(*zip(*rows, *[(id, BACK, b"") for id in returned], strict=True))


@dataclass(eq=False)
class State:
    """One stream in a worker."""

    request: Request
    made: int
    """Parts that it has made, here and before."""
    paused: bool = False


@dataclass(eq=False)
class StubWorker:
    """One worker; `inbox` holds the orders that it has not read."""

    place: int
    rows: int
    limit: float = inf
    stage: int = 0
    inbox: list[Order] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)
    seen: int = 0
    stop_when: int = 0
    stopped: bool = True
    alone: set[int] = field(default_factory=set)
    """Ids of streams that have been stepped with no other."""

    @property
    def active(self) -> dict[int, State]:
        """What the next step is made with."""
        return {id: state for id, state in self.states.items() if not state.paused}

    def follow(self, most: int = 1000) -> bool:
        """Reads what orders there are; whether there were any."""
        read = self.inbox[:most]
        del self.inbox[:most]
        for order in read:
            assert order.place == self.place and order.number == self.seen + 1
            self.seen, self.stop_when, self.stopped = order.number, order.stop_when, False
            for id in order.leave:
                self.states.pop(id, None)  # it may have ended meanwhile
            for request in order.join:
                assert request.id not in self.states
                stream = stream_of(request)
                self.states[request.id] = State(request, len(stream.kept))
            for id in order.pause:
                if id in self.states:
                    self.states[id].paused = True
            for id in order.resume:
                if id in self.states:
                    self.states[id].paused = False
            assert len(self.states) <= self.rows
            assert len(self.states) <= 1 or sum(s.request.size for s in self.states.values()) <= self.limit
        return bool(read)

    def step(self, outcome: Callable[[State], Said | None], returned: int = 0, step_s: float = 1.0) -> SetReport:
        """Makes one step of all that do not pause and says what came of it, as `outcome` does for each of them."""
        active = self.active
        back = list(self.states)[-returned:] if returned and len(self.states) > 1 else []
        said = []
        for id, state in active.items():
            part = None if id in back else outcome(state)
            if part is not None:
                said.append(part)
                if part.last or part.error is not None:
                    del self.states[id]
        for id in back:
            del self.states[id]
        if len(active) == 1 and not back:
            self.alone |= active.keys()
        has_ended = any(part.last or part.error is not None for part in said) or bool(back)
        self.stopped = not self.active or self.stop_when == EVERY_STEP or (self.stop_when == ON_LEAVING and has_ended)
        return SetReport(self.stage, self.place, self.seen, self.stopped, columns(said, back), len(active), step_s)


def part_of(state: State, *, last: bool = False) -> Said:
    """The next part of a stream; collected, only the last one says anything: how many there were."""
    number = state.made
    state.made += 1
    if stream_of(state.request).is_collected:
        return Said(state.request.id, number + 1 if last else None, last)
    return Said(state.request.id, number, last)


def end_of(state: State) -> Said:
    """An end without a part."""
    value = state.made if stream_of(state.request).is_collected else None
    return Said(state.request.id, value, last=True)


class Reader:
    """A caller that notes its parts with the times at which they came."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.parts: list[object] = []
        self.times: list[float] = []
        self.ended = -1.0

    def take_part(self, request: Request, part: object) -> None:
        self.parts.append(part)
        self.times.append(self.clock.now)

    def answered(self, request: Request) -> None:
        assert self.ended < 0
        self.ended = self.clock.now


def stepper(
    rows: int = 4, *, policy: StepPolicy | None = None, max_size: float = inf, name: str = "steps", **settings: Any
) -> Stepper:
    """One stage of steps; greedy, if nothing else is said."""
    return Stepper(name, policy or GreedySteps(rows), Queue(max_size), rows=rows, **settings)


def drive(
    stage: Stepper,
    *,
    start_s: Callable[[int], float] = lambda length: 0.0,
    step_s: Callable[[int], float] = lambda n: 1.0,
    answer: Answer = range,
    workers: int = 1,
    **settings: Any,
) -> VirtualDriver:
    """A service of this stage alone, in virtual time; an item is how many parts its answer has, 0, 1, 2, …"""
    core = Core([stage], **settings)
    return VirtualDriver(core, [], [workers], steps=StepCosts(start_s, step_s, answer))


def ask(driver: VirtualDriver, item: Any, when: float = 0.0, *, collected: bool = False, **settings: Any) -> Request:
    """One caller that comes at a time; `timeout_s` is its own, and bounds the whole."""
    until = when + settings.get("timeout_s", inf)
    stream = Stream(settings.pop("length", 1), collected, until)
    return driver.arrive(when, item, stream=stream, caller=Reader(driver.clock), **settings)


def reader(request: Request) -> Reader:
    """Who has asked."""
    assert isinstance(request.caller, Reader)
    return request.caller
