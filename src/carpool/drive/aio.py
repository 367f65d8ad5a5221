"""The asyncio driver: feeds events to a pipeline and does what the pipeline decides.

What it does with the pipeline in each turn of the loop is in `drive/loop_turn.py`; here is what
happens in the life of a service, by callers and by workers. Everything here runs on one loop. Other
threads come in through the mailbox of `drive/loop_thread.py`; worker threads, and batch functions
on other loops, call `call_soon_threadsafe` themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from math import inf

from carpool.call.results import Trouble
from carpool.clock import Clock, monotonic
from carpool.core.batcher import Batcher
from carpool.core.core import Core
from carpool.drive.executor import Executor
from carpool.drive.loop_turn import LoopTurn
from carpool.drive.trouble import learn, learn_from_warm_up
from carpool.errors import CarpoolError, Unavailable
from carpool.observe.snapshot import ServiceSnapshot
from carpool.observe.stats import Stats
from carpool.request import NEW, Request


class Driver(LoopTurn):
    """Drives one service's pipeline on the running loop.

    Its arguments and attributes are those of `LoopTurn`.
    """

    def __init__(self, pipeline: Core, stats: Stats, clock: Clock = monotonic) -> None:
        super().__init__(pipeline, stats, clock)
        self._missing: set[tuple[int, int]] = set()  # (stage, place) of workers that have not been ready yet

    # -- life

    async def start(self, executors: Sequence[Executor], workers: Sequence[int]) -> None:
        """Start every stage and wait until all workers are ready.

        Args:
            executors: One per stage.
            workers: How many workers of each stage are to be started, and waited for.

        Raises:
            StartupError: A worker could not load; the caller should `stop`.
        """
        self.executors = executors
        self._missing = {(stage, place) for stage, n in enumerate(workers) for place in range(n)}
        if not self._missing:  # all its workers come by themselves
            self._started.set_result(None)
        self.start_workers()
        await self._started

    async def stop(self, *, drain: bool = True, timeout_s: float | None = 30.0, grace_s: float = 5.0) -> None:
        """Refuse new requests, finish those inside and end the workers.

        Args:
            drain: Whether requests inside are finished; if not, they fail at once.
            timeout_s: How long that may take; None or `inf` for any time. Then the rest fails.
            grace_s: How long the workers may take for their teardown.
        """
        if self._arrivals:
            self.poll()  # these came before
        if self.pipeline.flow.closed_because is None:
            self.pipeline.close(Unavailable("the service is stopping", code="draining"))
        self.recall()  # a call under way is one of those inside
        if drain and self.pipeline.unanswered and not self.loop.is_closed():
            if self._drained is None:
                self._drained = self.loop.create_future()
            self.poll()  # what was held back for company goes now
            await asyncio.wait([self._drained], timeout=None if timeout_s == inf else timeout_s)
        self._has_stopped = self._refusal_log.has_stopped = True
        self.abort()
        self.start_failed(Unavailable("the service was closed while it was starting", code="stopped"))
        await asyncio.gather(*[executor.stop(grace_s) for executor in self.executors])
        if self._timer is not None:
            self._timer.cancel()
        self._refusal_log.tell_all()

    def abort(self) -> None:
        """Fail all requests inside, and refuse all that come."""
        self.recall()
        self.pipeline.abort(self.clock(), Unavailable("the service has stopped", code="stopped"))
        self.poll()

    @property
    def has_failed(self) -> bool:
        """Whether a stage has failed: its workers kept dying, or its policy raised."""
        return self._failed.done()

    async def failed(self) -> None:
        """Wait until a stage has failed: from then on the service fails every request."""
        await asyncio.shield(self._failed)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true of the pipeline, which is asked after each poll."""
        if condition():
            return
        awaited = condition, self.loop.create_future()
        self._awaited.append(awaited)
        try:
            await awaited[1]
        finally:
            self._awaited.remove(awaited)

    def snapshot(self) -> ServiceSnapshot:
        """Return what the service has done so far."""
        self.recall()
        return self.stats.snapshot(self.clock())

    # -- callers

    def close(self, error: CarpoolError) -> None:
        """Refuse new requests with `error` from the next turn on, and hold no batch back."""
        self.pipeline.close(error)
        if not self._is_poll_due and not self.loop.is_closed():
            self._poll_soon()

    def submit(self, request: Request) -> None:
        """Take a new request; its answer, or its refusal, comes in a later turn of the loop."""
        self._arrivals.append(request)
        if not self._is_poll_due:
            self._poll_soon()

    def submit_all(self, requests: Sequence[Request], alike: bool = False) -> None:
        """Take several new requests, in their order.

        Args:
            requests: None of them was submitted before.
            alike: Whether they are alike, as `Core.submit` has it. They are submitted at once
                then, and what follows is done at the end of this turn.
        """
        if not alike:
            self._arrivals += requests
        else:
            try:
                self.pipeline.flow.submit(self.clock(), requests, alike=True)
            except BaseException as error:
                self._fail(error)
        if not self._is_poll_due:
            self._poll_soon()

    def cancel(self, request: Request) -> None:
        """Cancel a request, whose caller has gone."""
        if request.state == NEW:  # perhaps a thread was interrupted in its lone call
            self.recall()
        before = self.pipeline.flow.cancelled
        self.pipeline.cancel(self.clock(), request)
        if self.pipeline.flow.cancelled > before:
            self.stats.cancelled_by_caller(request, self.clock())
        if not self._is_poll_due:
            self._poll_soon()

    def suffice(self, request: Request) -> None:
        """End a stream of which the caller has all that it wants; it is told, as of any end."""
        self.pipeline.suffice(self.clock(), request)
        if not self._is_poll_due:
            self._poll_soon()

    def pause(self, request: Request, is_paused: bool) -> None:
        """Take note that a caller wants no more parts for now, or wants them again."""
        now = self.clock()
        self.pipeline.pause(now, request, is_paused)
        self.stats.paused(now, request, is_paused)
        if not self._is_poll_due:
            self._poll_soon()

    def refused(self, error: CarpoolError) -> None:
        """Take note of a request that was refused before it was submitted."""
        self.stats.refused(error)
        if self.stats.refusals.is_due:
            self._refusal_log.tell()

    # -- workers

    def start_workers(self) -> None:
        """Have every stage start the workers that are due, since there is room."""
        for executor in self.executors:
            executor.start()

    def worker_ready(self, stage: int, place: int) -> None:
        """Take note that a worker can take batches."""
        self.pipeline.worker_ready(stage, place)
        self._missing.discard((stage, place))
        if not self._missing and not self._started.done():
            self._started.set_result(None)
        self.poll()

    def drain(self, stage: int, place: int) -> None:
        """Let a worker get nothing more; its executor is told once it has nothing left."""
        self.pipeline.drain(stage, place)
        self.poll()

    def hold(self, is_held: bool) -> None:
        """Have the first of several stages start no batch for now, or go on."""
        self.pipeline.hold(is_held)
        self.poll()

    def worker_lost(self, stage: int, place: int, unsent: Collection[int] = ()) -> bool:
        """Take note that a worker that was ready is gone.

        Returns:
            Whether a request is to blame (see `Core.worker_lost`).
        """
        blamed = self.pipeline.worker_lost(self.clock(), stage, place, unsent)
        self.poll()
        return blamed

    def worker_left(self, stage: int, place: int) -> None:
        """Take note that a worker that was ready is gone, for which no request is to blame."""
        self.pipeline.worker_left(self.clock(), stage, place)
        self.poll()

    def spare(self, stage: int, place: int) -> None:
        """Give a worker that seemed to hang, but has sent something, its time anew."""
        self.pipeline.batchers[stage].spare(self.clock(), place)
        self.poll()

    def call_started(self, stage: int, place: int, batch_id: int) -> None:
        """Take note that a worker has begun another call for the same batch."""
        self.pipeline.call_started(self.clock(), stage, place, batch_id)

    # -- what the workers teach

    def trained(self, batcher: Batcher, n: int, size: int, busy_s: float, longest: int = 0) -> None:
        """Learn from a warm-up call of `n` examples, whose sizes sum to `size`.

        With `longest`, it was `n` times one example of that length.
        """
        batcher.trained(self.clock(), n, size, busy_s, longest)

    def troubled(self, batcher: Batcher, place: int, batch_id: int, trouble: Sequence[Trouble]) -> None:
        """Learn from what happened during a worker's batch, before its results come.

        Raises:
            ValueError: It is about a batch or items that the worker does not have.
        """
        stage = batcher.lobby.stage
        self.stats.stages[stage].troubled(trouble)
        learn(f"stage {batcher.name}", batcher, place, batch_id, trouble, self._about(stage, place))

    def troubled_in_warm_up(self, batcher: Batcher, trouble: Sequence[Trouble]) -> None:
        """Learn from what happened during a worker's warm-up."""
        self.stats.stages[batcher.lobby.stage].troubled(trouble)
        learn_from_warm_up(batcher, trouble)
