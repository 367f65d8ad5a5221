"""Changes of a running service: other numbers of workers, and new workers in place of old ones.

In each of them newcomers are there, loaded, warmed up and checked by their examples, before an old
worker goes. If one of them fails, all of them go again, and the old workers stay. The user asks for
one change at a time. Once a second, unless that is under way, a service replaces worn workers, and
adds and takes away some as the load rises and falls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, cast

from carpool.engine.core.batcher import Batcher
from carpool.engine.core.roster import PlaceState, Recycling
from carpool.engine.core.scaler import EVERY_S, Scaler
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.worker import Newcomer
from carpool.engine.drive.worker_pool import WorkerPool
from carpool.engine.foreign import text_of
from carpool.engine.logger import logger
from carpool.engine.policy import OneByOne
from carpool.errors import CarpoolError, StartupError, Unavailable

GRACE_S = 30.0
"""How long streams may go on in a worker that is to go, unless the user says otherwise."""


_END_S = 5.0  # for newcomers that are killed


class _Successor(NamedTuple):
    pool: WorkerPool
    old: int
    new: Newcomer


class CoreShares:
    """How worker processes share the cores; `variables_of` returns the variables of each worker of
    a stage, by its position and the number of workers in all stages.
    """

    def __init__(
        self, workers: Sequence[int], variables_of: Callable[[int, int], tuple[Mapping[str, str], ...]]
    ) -> None:
        self._workers = [*workers]
        self._variables_of = variables_of

    def scaled(self, stage: int, workers: int) -> list[tuple[int, tuple[Mapping[str, str], ...]]]:
        if not self._workers[stage]:
            return []
        before, self._workers[stage] = sum(self._workers), workers
        n = sum(self._workers)
        if n == before:
            return []
        return [(each, self._variables_of(each, n)) for each, there in enumerate(self._workers) if there]


class Changes:
    """Changes one running service, on its loop. `pools` has one for each stage; `shares` is None if
    no worker process is on this machine.
    """

    def __init__(self, driver: Driver, pools: Sequence[WorkerPool], shares: CoreShares | None = None) -> None:
        self._shares = shares
        self._driver = driver
        self._pools = pools
        self._lock = asyncio.Lock()

    @property
    def is_changing(self) -> bool:
        return self._lock.locked()

    async def scale(self, stage: int, workers: int, grace_s: float = GRACE_S) -> None:
        """Have another number of workers in a stage.

        It returns when those that were added are ready, or those that were to go have gone, at the
        latest after `grace_s`. Where workers are added, old ones with more than their share of the
        cores (`worker/place.py`) are replaced, one at a time: a process cannot be given fewer
        threads.

        Raises:
            StartupError: A new worker could not load; then none was added.
            Unavailable: The service is stopping, or has failed.
        """
        async with self._lock:
            self._refuse_if_over()
            pool = self._pools[stage]
            pool.turnover.take_all_back()
            established = pool.roster.established
            more = workers - len(established)
            logger.info(
                "stage %s: %d workers instead of %d", pool.name, workers, len(established), extra=self._about(pool)
            )
            changed = self._share_cores(stage, workers)
            if more > 0:
                try:
                    new = await self._hired(pool, [None] * more)
                except BaseException:
                    self._share_cores(stage, len(established))
                    raise
                for place in new:
                    pool.turnover.admit(place)
                for other in changed:
                    for place in [place for place in other.roster.established if place not in new or other is not pool]:
                        await self._replace_in_place(other, place, grace_s)
            elif more:
                await self._let_go(pool, pool.roster.least_useful(-more), grace_s)

    def _share_cores(self, stage: int, workers: int) -> list[WorkerPool]:
        """Have workers that are started from now on get their share of the cores; return the stages
        whose workers get another share.
        """
        scaled = [] if self._shares is None else self._shares.scaled(stage, workers)
        return [self._pools[each] for each, variables in scaled if self._pools[each].set_variables(variables)]

    async def add_one(self, stage: int) -> None:
        """Add a worker to a stage, beside other changes. Raises StartupError."""
        pool = self._pools[stage]
        (place,) = await self._hired(pool, [None])
        pool.turnover.admit(place)

    async def take_away(self, stage: int, workers: int) -> None:
        pool = self._pools[stage]
        await self._let_go(pool, pool.roster.least_useful(workers), GRACE_S)

    async def recycle(self, stage: int, place: int) -> int | None:
        """Replace one worker, beside other changes; it goes when its successor is ready. Return the
        successor's process; None if another change was faster.

        Raises:
            StartupError: The successor could not load; the old worker stays.
        """
        pool = self._pools[stage]
        (new,) = await self._hired(pool, [pool.roster.places[place].index])
        if place not in pool.roster.established:  # another change was faster
            await _take_back(pool, [new])
            return None
        pool.turnover.admit(new)
        await self._let_go(pool, [place], GRACE_S)
        return pool.pids_by_place.get(new)

    async def reload(self, *, rolling: bool = False, grace_s: float = GRACE_S) -> None:
        """Replace all workers by new ones, which load the model anew.

        Args:
            rolling: Whether each old one goes before its successor is started, because there is no
                memory for both.
            grace_s: How long streams may go on in old workers, and requests behind the first stage.

        Raises:
            StartupError: A new worker could not load; unless `rolling`, all old ones stay.
            Unavailable: The service is stopping, or has failed; or its stages did not get empty.
        """
        async with self._lock:
            self._refuse_if_over()
            for pool in self._pools:
                pool.turnover.take_all_back()
            if rolling:
                for pool in self._pools:
                    for place in pool.roster.established:
                        await self._replace_in_place(pool, place, grace_s)
                return
            for pool in self._pools:
                pool.roster.is_renewed = True
            try:
                successors = await self._successors()
                try:
                    await self._take_over(successors, grace_s)
                except BaseException:
                    await self._take_back(successors)
                    raise
            finally:
                for pool in self._pools:
                    pool.roster.is_renewed = False
                self._driver.start_workers()
            for pool in self._pools:
                await self._see_off(pool, [each.old for each in successors if each.pool is pool], grace_s)

    # -- newcomers

    async def _hired(self, pool: WorkerPool, indices: Sequence[int | None]) -> list[int]:
        """Return the places of newcomers once all are ready. If one fails, none stays."""
        newcomers = [pool.turnover.add(index) for index in indices]
        places = [newcomer.place for newcomer in newcomers]
        try:
            await _all_ready(newcomers)
            _check_ready(pool.turnover.is_ready(place) for place in places)
        except BaseException:
            await _take_back(pool, places)
            raise
        return places

    async def _successors(self) -> list[_Successor]:
        successors = [
            _Successor(pool, old, pool.turnover.add(pool.roster.places[old].index))
            for pool in self._pools
            for old in pool.roster.established
        ]
        try:
            await _all_ready([each.new for each in successors])
        except BaseException:
            await self._take_back(successors)
            raise
        return successors

    async def _take_back(self, successors: Sequence[_Successor]) -> None:
        for pool in self._pools:
            await _take_back(pool, [each.new.place for each in successors if each.pool is pool])

    # -- taking over

    async def _take_over(self, successors: Sequence[_Successor], grace_s: float) -> None:
        """Have the new workers take all batches from now on, and the old ones no more.

        With several stages a request must not pass old ones and new ones. So the first one starts
        nothing until no request is behind its queue; in a graph that is no line, nothing leaves the
        doors until no request is inside.
        """
        if len(self._pools) == 1 and self._driver.core.flow.is_line:
            self._switch(successors)
            return
        driver = self._driver
        driver.hold(True)
        try:
            async with asyncio.timeout(grace_s):
                core = driver.core
                await driver.until(lambda: core.is_empty_behind_queue or core.flow.closed_because is not None)
            self._switch(successors)
        except TimeoutError:
            text = f"requests behind the first stage were not finished within {grace_s:g} s, so nothing was changed"
            raise Unavailable(f"{text}: try again, or give a longer grace_s") from None
        finally:
            driver.hold(False)

    def _switch(self, successors: Sequence[_Successor]) -> None:
        self._refuse_if_over()
        _check_ready(each.pool.turnover.is_ready(each.new.place) for each in successors)
        for each in successors:
            each.pool.turnover.admit(each.new.place)
        for each in successors:
            each.pool.turnover.retire(each.old)

    async def _replace_in_place(self, pool: WorkerPool, place: int, grace_s: float) -> None:
        index = pool.roster.places[place].index
        await self._let_go(pool, [place], grace_s)
        try:
            (new,) = await self._hired(pool, [index])
        except BaseException:
            if not pool.roster.stopping:
                pool.roster.add(index, is_new=False)  # it is tried again, as after a death
                self._driver.start_workers()
            raise
        pool.turnover.admit(new)

    # -- workers that go

    async def _let_go(self, pool: WorkerPool, places: Collection[int], grace_s: float) -> None:
        for place in places:
            pool.turnover.retire(place)
        await self._see_off(pool, places, grace_s)

    async def _see_off(self, pool: WorkerPool, places: Collection[int], grace_s: float) -> None:
        """Wait until workers have gone; have streams move that can, and after `grace_s` all."""
        if pool.moves_out(is_late=False):
            for place in places:
                pool.turnover.move_out(place)
        late = await pool.turnover.until_gone(places, grace_s)
        if pool.moves_out(is_late=True):
            for place in late:
                pool.turnover.move_out(place)

    def _refuse_if_over(self) -> None:
        if self._driver.has_failed:
            raise Unavailable("the service has failed: start it anew", code="stage_failed")
        if self._driver.core.flow.closed_because is not None:
            raise Unavailable("the service is stopping", code="draining")

    def _about(self, pool: WorkerPool) -> dict[str, str]:
        return {"model": self._driver.stats.name, "stage": pool.name}


async def _take_back(pool: WorkerPool, places: Sequence[int]) -> None:
    for place in places:
        pool.turnover.take_back(place)
    if not pool.roster.stopping:  # whoever stops it waits for their ends
        await pool.turnover.until_gone(places, _END_S)


def _check_ready(are_ready: Iterable[bool]) -> None:
    """Raise StartupError unless all newcomers are ready: one may have died since it said so."""
    if not all(are_ready):
        raise StartupError("a new worker died before it was given anything")


async def _all_ready(newcomers: Sequence[Newcomer]) -> None:
    await asyncio.gather(*[asyncio.shield(newcomer.ready) for newcomer in newcomers])


_MIB = 2**20
_FIRST_PAUSE_S = 2.0  # after a worker that was added and could not load; twice that after each further one
_LONGEST_PAUSE_S = 60.0


class StageUpkeep:
    """Looks after the workers of one stage: `recycling` says which one is worn, None if none ever
    is.

    Attributes:
        scaler: Says how many workers there should be; None if their number is fixed.
    """

    def __init__(self, pool: WorkerPool, driver: Driver, changes: Changes, recycling: Recycling | None = None) -> None:
        self.scaler: Scaler | None = None
        self._pool = pool
        self._driver = driver
        self._changes = changes
        self._about = {"model": driver.stats.name, "stage": pool.name}
        self._recycling = recycling
        self._batcher = driver.core.crews[pool.stage]
        self._is_single = isinstance(self._batcher.lobby.policy, OneByOne)
        self._coming: set[asyncio.Task[None]] = set()  # which each add a worker
        self._going: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._is_limit_logged = False
        self._resume_at = -inf  # when workers may be added again, after one that could not load
        self._pause_s = _FIRST_PAUSE_S
        if recycling is not None:
            pool.count_calls = self._count_calls

    def scale_between(self, least: int, most: int) -> None:
        slo_s = self._driver.core.flow.slo_s
        batcher = cast(Batcher, self._batcher)  # the number of workers of a stage of steps is fixed
        batcher.learn_costs()
        self.scaler = Scaler(least, most, batcher.lobby.batch_limit, slo_s, batcher.cost_s)

    @property
    def is_needed(self) -> bool:
        return self.scaler is not None or self._recycling is not None

    def keep_fixed(self) -> None:
        self.scaler = None

    def look(self, now: float) -> None:
        if self._changes.is_changing or self._driver.has_failed or self._pool.roster.stopping:
            return
        if self.scaler is not None:
            self._scale(now, self.scaler)
        if self._recycling is not None:
            self._recycle(now, self._recycling)

    def stop(self) -> None:
        for task in (self._going, self._replacing, *self._coming):
            if task is not None:
                task.cancel()

    def _count_calls(self, place: int, n: int) -> None:
        if self._recycling is not None:
            self._recycling.called(place, n if self._is_single else 1)

    # -- how many

    def _scale(self, now: float, scaler: Scaler) -> None:
        have = len(self._pool.roster.established) + len(self._coming)
        wait_s = self._batcher.predicted_wait_s(now, self._batcher.queue.size)
        offered, unit = self._driver.core.offered(self._pool.stage), self._batcher.times.unit
        wanted = scaler.wanted(now, offered, unit, wait_s, have)
        if wanted == have or (now < self._resume_at if wanted > have else self._is_busy_scaling):
            return
        text = "stage %s: %.0f requests/s need %d workers; there are %d, and %d are wanted"
        logger.info(text, self._pool.name, scaler.rate, scaler.needed, have, wanted, extra=self._about)
        if wanted < have:
            self._going = self._begin(self._changes.take_away(self._pool.stage, have - wanted))
            return
        for _ in range(wanted - have):
            task = self._begin(self._add_one())
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)

    @property
    def _is_busy_scaling(self) -> bool:
        return bool(self._coming) or (self._going is not None and not self._going.done())

    async def _add_one(self) -> None:
        try:
            await self._changes.add_one(self._pool.stage)
        except CarpoolError as error:
            now = self._driver.clock()
            if now < self._resume_at or self._changes.is_changing:  # of several that came together one is logged
                return
            self._resume_at = now + self._pause_s
            text = "stage %s: a worker could not be added, and none is for %.0f s: %s"
            logger.error(text, self._pool.name, self._pause_s, error, extra=self._about)
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        else:
            self._pause_s = _FIRST_PAUSE_S

    # -- which are worn

    def _recycle(self, now: float, recycling: Recycling) -> None:
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
        about = {**self._about, "worker": name}
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
                level = logging.INFO if self._is_limit_logged else logging.WARNING
                self._is_limit_logged = True
                logger.log(level, text, about["worker"], memory_mb, self._pool.name, pause_s, extra=about)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._driver.loop.create_task(work)
        task.add_done_callback(_log_failure)
        return task


class Upkeep:
    def __init__(self, driver: Driver, stages: Sequence[StageUpkeep]) -> None:
        self._driver = driver
        self.stages = stages
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look now and once a second, unless there is nothing to look after."""
        if self._timer is None and any(stage.is_needed for stage in self.stages):
            self._look()

    def stop(self) -> None:
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
    """Return how much memory a process holds, in MiB; 0 where that cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MIB
    return 0.0


def _log_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("workers could not be looked after: %s", text_of(error), exc_info=error)
