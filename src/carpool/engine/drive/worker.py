"""A worker, what it takes to start one, and its end, as the pool of its stage sees them; and how
workers come and go while the service runs.

A newcomer is started like any other worker, but it is given nothing until it is admitted: whoever
asked for it decides when. A worker that is to go gets nothing more, finishes what it has, and is
then ended.

A successor has a place of its own, since it exists beside its predecessor; both have one index,
which selects their cores, devices and environment. So nothing is withdrawn and nothing is sent
twice. A service of several stages changes over when no request is behind its first queue
(`Core.hold`). Versions of requests, with a queue for each in each stage, would save that short
pause at the cost of every batch, and were rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from carpool.engine.core.roster import PlaceState, Roster
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.guard import Guard
from carpool.engine.logger import logger
from carpool.engine.wire.frame import Frame
from carpool.engine.wire.handshake import Hello
from carpool.engine.worker.own import Spot
from carpool.engine.worker.place import INDEX_VARIABLE, Cores
from carpool.engine.worker.program import Setup
from carpool.errors import CarpoolError, StartupError
from carpool.model import Adapter, AnyModel


class Worker(Protocol):
    """One worker as its pool sees it.

    Attributes:
        broke_protocol: Whether it has sent what it must not send; it is ended for that.
        fell_silent: Whether it was lost since nothing came from its machine.
        hello: What it has said of itself, if it has come from somewhere else.
    """

    @property
    def broke_protocol(self) -> bool: ...
    @property
    def fell_silent(self) -> bool: ...
    @property
    def hello(self) -> Hello | None: ...

    @property
    def pid(self) -> int | None:
        """The id of its process, if it has one of its own on this machine."""

    @property
    def where(self) -> str:
        """Where it runs, in words for the log; empty for this process."""

    @property
    def has_unread_batch(self) -> bool:
        """Whether the model cannot have seen the batch that the worker was given last."""

    @property
    def send(self) -> Callable[[Frame], None]:
        """Sends it a frame."""

    @property
    def send_ahead(self) -> Callable[[Frame], None] | None:
        """Sends it a large frame while it is busy, as soon as that harms nobody.

        What is sent later waits behind it. None if `send` may do that at once.
        """

    def close_input(self) -> None:
        """Send nothing more: the worker finishes, tears down and ends."""

    def catch_up(self) -> bool:
        """Read what it has sent already, and report whether there was anything."""

    def give_up(self, why: str, on_frame: Callable[[Frame], None]) -> None:
        """End a worker that hangs, soon. What it still sends goes to `on_frame`."""

    def kill(self, why: str = "") -> None:
        """End it at once; where it cannot be ended, have nothing more to do with it."""

    def abandon(self) -> None:
        """End it and let go of everything without the loop, which ends or has ended."""

    async def ended(self) -> None:
        """Wait until it is gone."""


class Loss(NamedTuple):
    """The end of a worker: its place, its name for the log, its state before, what has become of it
    as this process saw it, and its own report of its failure with a traceback, empty if there is
    none.
    """

    place: int
    label: str
    worker: Worker
    state: PlaceState
    why: str
    failure: str

    @property
    def cause(self) -> str:
        return self.failure or self.why


class WarmUpShape(NamedTuple):
    """A call of the warm-up with one example `n` times over."""

    example: int
    n: int
    length: int


@dataclass(frozen=True, slots=True)
class Launch:
    """All that the start of a worker of one stage takes.

    Attributes:
        run_in: "process", "thread" or "loop".
        setup: What each worker gets first; `place` and `cores` are filled in for each.
        model: For workers inside this process, as are `kwargs`, `adapters` (of its addresses) and
            `spots` (what becomes of its results).
        cores: By the index of a worker; None for those of the parent before it was pinned.
        env: By the index of a worker, environment variables to add.
        warm_up: The sum of the sizes of each number of examples that is run at a time.
        guard: Guards the worker processes, if there are any.
        hire: Makes a worker for a place where worker processes run somewhere else, called like
            `WorkerProcess`; None for this machine.
        is_idempotent: Whether a request may run once more after its worker was lost.
        warm_up_shapes: What each of the setup's shapes is.
    """

    run_in: str
    setup: Setup
    model: AnyModel
    kwargs: Mapping[str, Any]
    adapters: Sequence[Adapter]
    spots: Sequence[Spot]
    cores: tuple[Cores | None, ...]
    env: tuple[Mapping[str, str], ...]
    warm_up: Mapping[int, int]
    guard: Guard | None
    is_idempotent: bool
    hire: Callable[..., Any] | None = None
    warm_up_shapes: Sequence[WarmUpShape] = ()

    def cores_of(self, index: int) -> Cores | None:
        """Return the cores of a worker; beyond the workers declared they are shared in turn."""
        return self.cores[index % len(self.cores)]

    def env_of(self, index: int) -> Mapping[str, str]:
        return {**self.declared_env_of(index), INDEX_VARIABLE: str(index)}

    def declared_env_of(self, index: int) -> Mapping[str, str]:
        """Return the declared variables of a worker, shared in turn likewise."""
        return self.env[index % len(self.env)]


_TEARDOWN_S = 5.0  # for a worker that was asked to end


class Newcomer(NamedTuple):
    """A worker that was added, until it is admitted; `ready` is done once it is ready, and fails
    with `StartupError` if it has died before.
    """

    place: int
    ready: asyncio.Future[None]


class Turnover:
    """Has workers of one stage come and go: those of `workers`, by place. `start` starts those that
    are due, and `about` returns the fields of a log line about a place.
    """

    def __init__(
        self,
        stage: int,
        roster: Roster,
        driver: Driver,
        workers: Mapping[int, Worker],
        start: Callable[[], None],
        about: Callable[[int], dict[str, str]],
    ) -> None:
        self._stage = stage
        self._roster = roster
        self._driver = driver
        self._workers = workers
        self._start = start
        self._about = about
        self._newcomers: dict[int, asyncio.Future[None]] = {}  # until they are admitted or taken back
        self._going: dict[int, asyncio.Future[None]] = {}  # done when the worker has ended
        self._ending: dict[int, asyncio.TimerHandle] = {}  # of those that were asked to end

    # -- newcomers

    def add(self, index: int | None = None) -> Newcomer:
        """Have a newcomer started, as soon as there is room; without an index, with the least that
        no other has.
        """
        place = self._roster.add(index)
        ready = self._newcomers[place] = self._driver.loop.create_future()
        self._start()
        return Newcomer(place, ready)

    def is_ready(self, place: int) -> bool:
        record = self._roster.places.get(place)
        return place in self._newcomers and record is not None and record.state == PlaceState.READY

    def admit(self, place: int) -> None:
        del self._newcomers[place]
        self._roster.establish(place)
        self._driver.worker_ready(self._stage, place)

    def take_back(self, place: int) -> None:
        if self._newcomers.pop(place, None) is not None:
            self._leave(place)

    def take_all_back(self) -> None:
        """End all newcomers: those who wait for one get an error."""
        for place, future in list(self._newcomers.items()):
            if not future.done():
                _fail(future, StartupError(f"worker {self._about(place)['worker']} was not wanted any more"))
            self.take_back(place)

    # -- workers that go

    def retire(self, place: int) -> None:
        logger.info("worker %s is to go", self._about(place)["worker"], extra=self._about(place))
        self._leave(place)

    def move_out(self, place: int) -> None:
        """Have others go on with what a worker that was to go still has, and end it."""
        if place in self._going and place not in self._ending:
            self._driver.worker_left(self._stage, place)
            self.drained(place)

    def drained(self, place: int) -> None:
        worker = self._workers.get(place)
        if worker is not None and place not in self._ending:
            worker.close_input()
            self._ending[place] = self._driver.loop.call_later(_TEARDOWN_S, worker.kill)

    async def until_gone(self, places: Collection[int], timeout_s: float) -> list[int]:
        """Wait until workers that were to go have ended, and return those that have not in time."""
        going = {place: self._going[place] for place in places if place in self._going}
        if going:
            await asyncio.wait(going.values(), timeout=timeout_s)
        return [place for place, future in going.items() if not future.done()]

    def _leave(self, place: int) -> None:
        record = self._roster.places[place]
        is_serving = record.state == PlaceState.READY and not record.is_new
        self._roster.leave(place)
        self._going[place] = self._driver.loop.create_future()
        if is_serving:
            self._driver.drain(self._stage, place)
        elif place in self._workers:
            self._workers[place].kill()
        else:
            self.gone(place, "")

    # -- what the pool reports

    def became_ready(self, place: int) -> bool:
        """Note that a worker is ready, and report whether it gets nothing all the same.

        A newcomer waits until it is admitted, and one that was to go before is being ended.
        """
        future = self._newcomers.get(place)
        if future is not None and not future.done():
            future.set_result(None)
        record = self._roster.places[place]
        return record.is_new or record.is_leaving

    def is_ending(self, place: int) -> bool:
        return place in self._ending

    def gone(self, place: int, cause: str) -> None:
        newcomer = self._newcomers.pop(place, None)
        if newcomer is not None and not newcomer.done():
            _fail(newcomer, StartupError(cause))
        ending = self._ending.pop(place, None)
        if ending is not None:
            ending.cancel()
        going = self._going.pop(place, None)
        if going is not None and not going.done():
            going.set_result(None)
        self._roster.remove(place)
        self._driver.stats.stages[self._stage].gone(place)

    def fail(self, error: CarpoolError) -> None:
        for future in self._newcomers.values():
            if not future.done():
                _fail(future, error)


def _fail(future: asyncio.Future[None], error: Exception) -> None:
    future.set_exception(error)
    future.exception()  # counts as retrieved: perhaps nothing awaits it any more
