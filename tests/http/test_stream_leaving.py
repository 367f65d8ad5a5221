"""A client leaves a stream over HTTP: how soon the next one has its row, to the millisecond.

A real front and a real driver on a clock that jumps, and a worker whose steps take 5 ms.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator

import pytest

from carpool import Model, Service, Stage
from carpool.engine.core.core import Core
from carpool.engine.core.roster import PlaceState, Roster
from carpool.engine.core.running_set import Order
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.virtual import StepCosts, VirtualStepWorker
from carpool.engine.observe.snapshot import StreamStats
from carpool.engine.observe.stats import Stats
from carpool.http.app import App
from carpool.http.connection import Connection
from carpool.http.server_state import Limits, ServerState
from tests.support.http.front import post
from tests.support.http.jump import on_a_jumping_loop
from tests.support.http.wire import Wire
from tests.support.steps import stepper

STEP_S = 0.005


class Counts(Model):
    def predict(self, n: int) -> Iterator[int]:
        yield from range(n)


class Worker:
    """The only worker, which has room for a single stream."""

    def __init__(self, driver: Driver) -> None:
        def at(when: float, event: object) -> None:
            driver.loop.call_at(when, event)  # type: ignore[arg-type]

        def answer(item: bytes) -> list[bytes]:
            return [b"%d" % i for i in range(int(item))]

        costs = StepCosts(lambda length: 0.0, lambda n: STEP_S, answer)
        self.driver = driver
        self.steps = VirtualStepWorker(0, 0, costs, at, driver.reported)

    def send(self, order: Order) -> None:
        self.steps.take(self.driver.clock(), order)


class Front:
    """A server of a stage with a single row; the worker takes orders between two steps."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.app = App(Service(Stage(Counts, name="counts", run_in="thread"), timeout_s=30.0))
        self.stage = stepper(rows=1)
        core = Core([self.stage])
        roster = Roster(1, lambda: 0.5)
        self.driver = Driver(
            core,
            Stats("counts", core, [roster], [False], streams=StreamStats(self.stage, None, None)),
            clock=loop.time,
        )
        self.driver.executors = [Worker(self.driver)]  # type: ignore[list-item]
        roster.due(0.0)
        roster.moved(0, PlaceState.LOADING)
        roster.moved(0, PlaceState.READY)
        self.driver.worker_ready(0, 0)
        self.app.endpoints[0].driver = self.driver
        self.app.refusing = None
        self.state = ServerState(self.app, Limits())

    def ask(self, n: int, accept: str) -> Wire:
        wire = Wire(lambda: Connection(self.state))
        wire.send(post(b"%d" % n, "/predict", "Content-Type: application/json", f"Accept: {accept}"))
        return wire


async def until_part(wire: Wire, part: bytes) -> float:
    """Wait until a client has a part, and return the time."""
    while part not in wire.received:  # noqa: ASYNC110
        await asyncio.sleep(0.0001)
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("accept", "early_s", "takes_s"),
    [
        ("text/event-stream", 0.0005, 0.0055),  # half a millisecond before the step under way ends
        ("text/event-stream", 0.0049, 0.0099),  # just after it has begun
        ("application/x-ndjson", 0.0005, 0.0055),
    ],
)
@on_a_jumping_loop
async def test_who_follows_one_that_leaves_has_a_part_after_the_step_under_way_and_one_of_its_own(
    accept: str, early_s: float, takes_s: float
) -> None:
    """A client on the same machine that closes has reset its connection before the call returns by which it is sent
    something, so nobody waits to find out whether it has.
    """
    front = Front()
    leaver = front.ask(2000, accept)
    part = b"data: %d\n" if accept == "text/event-stream" else b'{"part": %d}'
    boundary = await until_part(leaver, part % 9)
    leaver.socket_error = errno.ECONNRESET
    await asyncio.sleep(boundary + STEP_S - early_s - asyncio.get_running_loop().time())
    left = asyncio.get_running_loop().time()
    leaver.end()
    follower = front.ask(3, accept)

    assert await until_part(follower, part % 0) - left == pytest.approx(takes_s, abs=0.00021)
    assert leaver.aborted and front.stage.stray_parts <= 1
