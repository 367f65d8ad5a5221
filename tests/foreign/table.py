"""The table of places where code that is not ours is called, what is asked of each, and the ways that lead there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from carpool import Policy, Service, Stage
from carpool.engine.policy import Static
from tests.foreign import models, typed
from tests.foreign.ways import DOORS, LIMIT_S, TIMEOUT_S, close_quietly
from tests.support.kinds import KINDS, fail
from tests.support.processes import children

RUN_IN = ("process", "thread", "loop")
PROCESSES, THREADS, LOOPS = ([f"{run_in} by {door}" for door in DOORS] for run_in in RUN_IN)
SERVICES = PROCESSES + THREADS + LOOPS
INSIDE = THREADS + LOOPS
HANDLES = [name for name in SERVICES if "Handle" in name]
WEB = [name for name in SERVICES if "Handle" not in name]
BATCH_THREADS = ["batch in threads", "batched method in threads"]
BATCH_TASKS = ["batch in tasks", "batched method in tasks"]
BATCHES = BATCH_THREADS + BATCH_TASKS
VIRTUAL = ["virtual time"]
WAYS = SERVICES + BATCHES + VIRTUAL

Check = Callable[["Way", str], None]


class Cell(NamedTuple):
    """One check of one kind at one place by one way; `what` tells checks of one place apart."""

    place: str
    what: str
    way: str
    kind: str
    check: Check


CELLS: list[Cell] = []
LEFT_OUT: dict[tuple[str, str], str] = {}
"""By place and way: why there is nothing to check."""


def place(
    name: str, ways: Sequence[str], what: str = "", kinds: Sequence[str] = tuple(KINDS)
) -> Callable[[Check], Check]:
    """A check of one place of the table, by each of these ways and for each of these kinds."""

    def register(check: Check) -> Check:
        CELLS.extend(Cell(name, what, way, kind, check) for way in ways for kind in kinds)
        return check

    return register


def left_out(name: str, ways: Sequence[str], why: str) -> None:
    """There is nothing to check at this place by these ways."""
    for way in ways:
        LEFT_OUT[name, way] = why


class Way:
    """One driver behind one door, with a service that all cells share which fail no more than an item.

    Attributes:
        lines: What the workers of the shared service have printed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.run_in, _, self.door = name.partition(" by ")
        self.lines: list[str] = []
        self._shared: Any = None
        self._others: dict[str, Any] = {}
        self._threads = set(threading.enumerate())
        self._children = set(children())

    @property
    def shared(self) -> Any:
        """A service of two stages whose items say where they raise; over HTTP also one of its own format, and types."""
        if self._shared is None:
            services = [self.hooks()]
            if not self.door.endswith("Handle"):
                services += [self.custom(), self.typed()]
            self._shared = DOORS[self.door](*services, output=self._sink)
        return self._shared

    def other(self, name: str, make: Callable[[], Service]) -> Any:
        """Another service that cells share, which runs."""
        if name not in self._others:
            self._others[name] = self.open(make())
        return self._others[name]

    def _taken(self) -> list[Any]:
        """The services that run, which nobody is to use any more."""
        running = [each for each in (self._shared, *self._others.values()) if each is not None]
        self._shared, self._others = None, {}
        return running

    def discard(self) -> None:
        """Something has failed: the next cell gets a service of its own, and nobody waits for this one."""
        for each in self._taken():
            threading.Thread(target=close_quietly, args=(each,), daemon=True).start()
        self._threads |= set(threading.enumerate())

    def close(self) -> None:
        """End the shared service; workers have lived, and nothing is left."""
        for each in self._taken():
            restarts = [stage.restarts for stage in each.stats().stages]
            each.close()
            assert not any(restarts), restarts
        until = time.monotonic() + LIMIT_S
        while left := self._left():
            assert time.monotonic() < until, f"left behind: {left}"
            time.sleep(0.01)

    def hooks(self) -> Service:
        """A service of two stages whose models have hooks."""
        asynchronous = self.run_in == "loop"
        common: dict[str, Any] = {"run_in": self.run_in, "max_batch_size": 3, "max_batch_time_s": 20.0}
        first = Stage(
            models.AsyncHooks if asynchronous else models.Hooks,
            name="first",
            size=models.weigh,
            policy=Static(max_queue_delay_s=0.003),
            **common,
        )
        later = Stage(
            models.last_async if asynchronous else models.last,
            name="later",
            size=models.weigh_later,
            policy="greedy",
            **common,
        )
        return Service(first, later, name="hooks", timeout_s=TIMEOUT_S)

    def custom(self) -> Service:
        """A service whose model has a format of its own."""
        return self.service(models.AsyncCustom if self.run_in == "loop" else models.Custom, name="custom")

    def typed(self) -> Service:
        """A service whose model has types of its own, and an address of its own."""
        asynchronous = self.run_in == "loop"
        model, adapter = (typed.AsyncTyped, typed.order_of_later) if asynchronous else (typed.Typed, typed.order_of)
        return self.service(model, name="typed", routes={"/adapted": adapter})

    def service(
        self, model: Any, name: str = "one", policy: Policy | None = None, routes: Any = None, **settings: Any
    ) -> Service:
        """A service of one stage."""
        options: dict[str, Any] = {"max_batch_size": 3, "max_batch_time_s": 20.0, "run_in": self.run_in, **settings}
        policy = Static(max_queue_delay_s=0.003) if policy is None else policy
        return Service(Stage(model, name=name, policy=policy, **options), timeout_s=TIMEOUT_S, routes=routes)

    def open(self, service: Service, **options: Any) -> Any:
        """A service of its own, which runs."""
        return DOORS[self.door](service, **options)

    def _sink(self, worker: str, is_error: bool, line: str) -> None:
        self.lines.append(line)
        if line.startswith("raise "):
            fail(line.removeprefix("raise "))

    def _left(self) -> list[str]:
        threads = {each for each in threading.enumerate() if each.name != "carpool-output"} - self._threads
        return [repr(each) for each in threads] + [f"child {pid}" for pid in set(children()) - self._children]
