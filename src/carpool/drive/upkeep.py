"""What a running service does about its workers by itself: it replaces worn ones, and adds and
takes away workers as the load rises and falls.

It looks once a second, and only where a stage asks for it. While the user changes something
(`drive/changes.py`) it does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Sequence
from math import inf
from typing import Any, cast

from carpool.core.batcher import Batcher
from carpool.core.recycling import Recycling
from carpool.core.roster import PlaceState
from carpool.core.scaler import EVERY_S, Scaler
from carpool.drive.aio import Driver
from carpool.drive.changes import Changes
from carpool.drive.worker_pool import WorkerPool
from carpool.errors import CarpoolError
from carpool.foreign import text_of
from carpool.logger import logger
from carpool.policy import OneByOne

_MIB = 2**20
_FIRST_PAUSE_S = 2.0  # after a worker that was added and could not load; twice that after each further one
_LONGEST_PAUSE_S = 60.0


class StageUpkeep:
    """Looks after the workers of one stage.

    Args:
        pool: The stage's.
        driver: The service's.
        changes: Replaces workers.
        recycling: Says which worker is worn; None if none ever is.

    Attributes:
        scaler: Says how many workers there should be; None if their number is fixed.
    """

    def __init__(self, pool: WorkerPool, driver: Driver, changes: Changes, recycling: Recycling | None = None) -> None:
        self.scaler: Scaler | None = None
        self._pool = pool
        self._driver = driver
        self._changes = changes
        self._recycling = recycling
        self._batcher = driver.pipeline.batchers[pool.stage]
        self._is_single = isinstance(self._batcher.lobby.policy, OneByOne)
        self._coming: set[asyncio.Task[None]] = set()  # which each add a worker
        self._going: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._is_limit_told = False
        self._resume_at = -inf  # when workers may be added again, after one that could not load
        self._pause_s = _FIRST_PAUSE_S
        if recycling is not None:
            pool.count_calls = self._count_calls

    def scale_between(self, least: int, most: int) -> None:
        """Have the number of workers follow the load from now on."""
        slo_s = self._driver.pipeline.flow.slo_s
        batcher = cast(Batcher, self._batcher)  # the number of workers of a stage of steps is fixed
        batcher.learn_costs()
        self.scaler = Scaler(least, most, batcher.lobby.batch_limit, slo_s, batcher.cost_s)

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to look after."""
        return self.scaler is not None or self._recycling is not None

    def keep_fixed(self) -> None:
        """Leave the number of workers as it is from now on."""
        self.scaler = None

    def look(self, now: float) -> None:
        """Do what is due."""
        if self._changes.is_changing or self._driver.has_failed or self._pool.roster.stopping:
            return
        if self.scaler is not None:
            self._scale(now, self.scaler)
        if self._recycling is not None:
            self._recycle(now, self._recycling)

    def stop(self) -> None:
        """Do nothing more."""
        for task in (self._going, self._replacing, *self._coming):
            if task is not None:
                task.cancel()

    def _count_calls(self, place: int, n: int) -> None:
        if self._recycling is not None:
            self._recycling.called(place, n if self._is_single else 1)

    # -- how many

    def _scale(self, now: float, scaler: Scaler) -> None:
        """Have workers added or taken away as the load asks for it."""
        have = len(self._pool.roster.established) + len(self._coming)
        wait_s = self._batcher.predicted_wait_s(now, self._batcher.queue.size)
        offered, unit = self._driver.pipeline.offered(self._pool.stage), self._batcher.times.unit
        wanted = scaler.wanted(now, offered, unit, wait_s, have)
        if wanted == have or (now < self._resume_at if wanted > have else self._is_busy_scaling):
            return
        about = {"model": self._driver.stats.name, "stage": self._pool.name}
        text = "stage %s: %.0f requests/s need %.1f workers; there are %d, and %d are wanted"
        logger.info(text, self._pool.name, scaler.rate, scaler.needed, have, wanted, extra=about)
        if wanted < have:
            self._going = self._begin(self._changes.take_away(self._pool.stage, have - wanted))
            return
        for _ in range(wanted - have):
            task = self._begin(self._add_one())
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)

    @property
    def _is_busy_scaling(self) -> bool:
        """Whether workers are being added, or taken away."""
        return bool(self._coming) or (self._going is not None and not self._going.done())

    async def _add_one(self) -> None:
        try:
            await self._changes.add_one(self._pool.stage)
        except CarpoolError as error:
            now = self._driver.clock()
            if now < self._resume_at or self._changes.is_changing:  # of several that came together one is told
                return
            self._resume_at = now + self._pause_s
            text = "stage %s: a worker could not be added, and none is for %.0f s: %s"
            about = {"model": self._driver.stats.name, "stage": self._pool.name}
            logger.error(text, self._pool.name, self._pause_s, error, extra=about)
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        else:
            self._pause_s = _FIRST_PAUSE_S

    # -- which are worn

    def _recycle(self, now: float, recycling: Recycling) -> None:
        """Have a worn worker replaced, unless one is being replaced already."""
        places = self._pool.roster.places
        ready = [place for place in self._pool.roster.established if places[place].state == PlaceState.READY]
        recycling.are_there(now, {place: places[place].order for place in ready})
        if recycling.measures_memory:
            for place, pid in self._pool.pids_by_place.items():
                recycling.measured(place, _resident_mb(pid))
        if self._replacing is not None and not self._replacing.done():
            return
        worn = recycling.due(now)
        if worn is None:
            return
        name = self._driver.stats.stages[self._pool.stage].worker_name(worn.place)
        about = {"model": self._driver.stats.name, "stage": self._pool.name, "worker": name}
        logger.info("worker %s is to be replaced: %s", name, worn.why, extra=about)
        self._replacing = self._begin(self._replace(worn.place, recycling, about))

    async def _replace(self, place: int, recycling: Recycling, about: dict[str, str]) -> None:
        try:
            pid = await self._changes.recycle(self._pool.stage, place)
        except CarpoolError as error:
            if self._changes.is_changing:  # which has ended it
                return
            pause_s = recycling.failed(self._driver.clock())
            text = "worker %s stays, and is not replaced for %.0f s, since its successor could not load: %s"
            logger.error(text, about["worker"], pause_s, error, extra=about)
        else:
            memory_mb = _resident_mb(pid) if pid is not None and recycling.measures_memory else 0.0
            pause_s = recycling.succeeded(self._driver.clock(), memory_mb)
            if pause_s:
                text = (
                    "worker %s holds %.0f MiB when it has just loaded: max_memory_mb is too low for stage %s, and no"
                    " worker of it is replaced for %.0f s"
                )
                level = logging.INFO if self._is_limit_told else logging.WARNING
                self._is_limit_told = True
                logger.log(level, text, about["worker"], memory_mb, self._pool.name, pause_s, extra=about)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._driver.loop.create_task(work)
        task.add_done_callback(_tell_failure)
        return task


class Upkeep:
    """Looks after the workers of all stages of a service, once a second.

    Args:
        driver: The service's.
        stages: Those of its stages, first to last.
    """

    def __init__(self, driver: Driver, stages: Sequence[StageUpkeep]) -> None:
        self._driver = driver
        self.stages = stages
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look now, and once a second from now on, unless there is nothing to look after."""
        if self._timer is None and any(stage.is_needed for stage in self.stages):
            self._look()

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for stage in self.stages:
            stage.stop()

    def _look(self) -> None:
        self._timer = None
        if not any(stage.is_needed for stage in self.stages):
            return
        self._timer = self._driver.loop.call_later(EVERY_S, self._look)
        now = self._driver.clock()
        for stage in self.stages:
            stage.look(now)


def _resident_mb(pid: int) -> float:
    """Return how much memory a process holds, in MiB; 0 where that cannot be told."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MIB
    return 0.0


def _tell_failure(task: asyncio.Task[None]) -> None:
    """Log what a task has raised that nothing waits for."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("workers could not be looked after: %s", text_of(error), exc_info=error)
