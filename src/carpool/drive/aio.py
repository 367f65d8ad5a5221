"""The asyncio driver: feeds events to a pipeline and performs what it says to do.

Arrivals of one loop turn only append and mark the pipeline dirty; one callback per turn polls it, so everything parsed
in that turn shares a batch at no waiting cost. One timer points at the pipeline's next deadline. Everything here runs
on one loop; other threads come in through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import Protocol

from carpool.call.retry import Trouble
from carpool.clock import Clock, monotonic
from carpool.core.batch import Batch
from carpool.core.pipeline import Pipeline, Todo
from carpool.core.reply import Reply
from carpool.drive.trouble import FAILED_FOR_S, learn, stage_at_fault
from carpool.errors import CarpoolError, StartupError, Unavailable
from carpool.foreign import text_of
from carpool.logger import logger
from carpool.observe.stats import Stats
from carpool.request import NEW, Request

_ASLEEP_S = 1.0  # a timer that fires so late says that this process was stopped, or its loop blocked


class Executor(Protocol):
    """Runs the batches of one stage and reports to the driver."""

    def start(self) -> None:
        """Start the workers that are due; each is reported by `worker_ready`, or the stage by `stage_failed`."""

    def run(self, batch: Batch) -> None:
        """Hand a batch to its worker, which is idle or, with a batch ahead, about to be."""

    def kill(self, place: int) -> None:
        """Give up a worker that hangs: it is reported as lost at once, and ended."""

    async def stop(self, grace_s: float) -> None:
        """End all workers, by force after `grace_s`."""


class Driver:
    """Drives one service's pipeline on the running loop.

    Args:
        pipeline: decides.
        stats: told of every batch and answer.
        clock: monotonic seconds.
    """

    def __init__(self, pipeline: Pipeline, stats: Stats, clock: Clock = monotonic) -> None:
        self.pipeline = pipeline
        self.stats = stats
        self.clock = clock
        self.executors: Sequence[Executor] = ()
        self.loop = asyncio.get_running_loop()
        self._dirty = False
        self._handing_over = False  # batches are, in their order: what happens meanwhile is looked at afterwards
        self._arrivals: list[Request] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._drained: asyncio.Future[None] | None = None
        self._stopped = False  # there is nothing inside and nothing will be: who still comes is answered at once
        self._broken = False  # a policy has raised
        self._failed: asyncio.Future[None] = self.loop.create_future()
        self._started: asyncio.Future[None] = self.loop.create_future()
        self._missing: set[tuple[int, int]] = set()  # workers that have not been ready yet

    # -- life

    async def start(self, executors: Sequence[Executor], workers: Sequence[int]) -> None:
        """Start every stage and wait until all workers are ready.

        Args:
            executors: one per stage.
            workers: how many workers each stage has.

        Raises:
            StartupError: a worker could not load; the caller should `stop`.
        """
        self.executors = executors
        self._missing = {(stage, place) for stage, n in enumerate(workers) for place in range(n)}
        self.start_workers()
        await self._started

    async def stop(self, *, drain: bool = True, timeout_s: float | None = 30.0, grace_s: float = 5.0) -> None:
        """Stop taking requests, finish those inside (within `timeout_s`, or fail them at once), end the workers."""
        if self._arrivals:
            self.poll()  # those came before
        if self.pipeline.closed is None:
            self.pipeline.close(Unavailable("the service is stopping", code="draining"))
        if drain and self.pipeline.unanswered and not self.loop.is_closed():
            if self._drained is None:
                self._drained = self.loop.create_future()
            self.poll()  # what was held back for company goes now
            await asyncio.wait([self._drained], timeout=None if timeout_s == inf else timeout_s)
        self._stopped = True
        self.abort()
        self.start_failed(Unavailable("the service was closed while it was starting", code="stopped"))
        await asyncio.gather(*[executor.stop(grace_s) for executor in self.executors])
        if self._timer is not None:
            self._timer.cancel()

    def abort(self) -> None:
        """Fail all that are inside, and refuse all who come."""
        self.pipeline.abort(self.clock(), Unavailable("the service has stopped", code="stopped"))
        self.poll()

    @property
    def has_failed(self) -> bool:
        """Whether a stage has: its workers died in vain, or its policy raised."""
        return self._failed.done()

    async def failed(self) -> None:
        """Wait until a stage has failed: from then on the service answers nothing but that."""
        await asyncio.shield(self._failed)

    # -- callers

    def close(self, error: CarpoolError) -> None:
        """Refuse new requests with `error` from the next turn of the loop on; those inside wait for no company."""
        self.pipeline.close(error)
        if not self._dirty and not self.loop.is_closed():
            self._poll_soon()

    def submit(self, request: Request) -> None:
        """A new request; it is told its answer, or why it is refused, from a later turn of the loop on."""
        self._arrivals.append(request)
        if not self._dirty:
            self._poll_soon()

    def submit_all(self, requests: Iterable[Request]) -> None:
        """Several new requests, in their order."""
        self._arrivals += requests
        if not self._dirty:
            self._poll_soon()

    def cancel(self, request: Request) -> None:
        """The request's caller has gone."""
        before = self.pipeline.cancelled
        try:
            self.pipeline.cancel(self.clock(), request)
        except BaseException as error:
            self._fail(error)
        self.stats.cancelled += self.pipeline.cancelled - before
        if not self._dirty:
            self._poll_soon()

    # -- executors

    def worker_ready(self, stage: int, place: int) -> None:
        """A worker can take batches."""
        self.pipeline.worker_ready(stage, place)
        self._missing.discard((stage, place))
        if not self._missing and not self._started.done():
            self._started.set_result(None)
        self.poll()

    def worker_lost(self, stage: int, place: int, unsent: Collection[int] = ()) -> bool:
        """A worker that was ready is gone; whether that is the fault of a request (see `Pipeline.worker_lost`)."""
        try:
            blamed = self.pipeline.worker_lost(self.clock(), stage, place, unsent)
        except BaseException as error:
            self._fail(error)
            return False
        self.poll()
        return blamed

    def worker_left(self, stage: int, place: int) -> None:
        """A worker that was ready is gone, without having looked at what it was given."""
        try:
            self.pipeline.worker_left(self.clock(), stage, place)
        except BaseException as error:
            self._fail(error)
        self.poll()

    def trained(self, stage: int, n: int, size: int, busy_s: float) -> None:
        """A worker's warm-up has run `n` examples, with sizes summing to `size`, in `busy_s`."""
        try:
            self.pipeline.trained(stage, n, size, busy_s)
        except BaseException as error:
            self._fail(error)

    def start_workers(self) -> None:
        """A worker is ready or dead, so others may be started."""
        for executor in self.executors:
            executor.start()

    def spare(self, stage: int, place: int) -> None:
        """A worker that seemed to hang has spoken."""
        self.pipeline.batchers[stage].spare(self.clock(), place)
        self.poll()

    def start_failed(self, error: CarpoolError) -> None:
        """A worker could not load while the service was starting."""
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()  # it counts as heard: where `start` itself has raised, nobody waits for it

    def stage_failed(self, error: CarpoolError) -> None:
        """A stage has no worker and will get none: the service cannot answer any more."""
        self.start_failed(StartupError(str(error)))
        if not self._failed.done():
            self._failed.set_result(None)
        self.pipeline.abort(self.clock(), error)
        self.poll()

    def completed(self, reply: Reply) -> None:
        """A worker's reply. The next batch goes out before this one's answers are delivered.

        It goes at once if it is full; else at the end of this turn, so that what arrives in the turn shares it. If
        nobody waits, there is nothing to share, and the answers go at once.
        """
        batcher, stats, place = self.pipeline.batchers[reply.stage], self.stats.stages[reply.stage], reply.place
        before = batcher.in_flight.get(place)
        try:
            self.pipeline.completed(self.clock(), reply)
        except BaseException as error:
            self._fail(error)
            return
        stats.completed(place, reply.busy_s, reply.waited_s)
        following = batcher.in_flight.get(place)
        if following is not None and following is not before:  # it lay there, ahead of time
            stats.started(following)
        if self._handing_over:
            if not self._dirty:
                self._poll_soon()
        elif batcher.queue.size >= batcher.policy.limit:
            self.poll()
        elif not self._dirty:
            if self.pipeline.waiting:
                self._poll_soon()
            else:
                self.poll()

    def troubled(self, stage: int, place: int, batch_id: int, trouble: Sequence[Trouble]) -> None:
        """What happened to a worker's batch besides its results, before they come.

        Raises:
            ValueError: it speaks of what the worker was not given.
        """
        batcher, stats = self.pipeline.batchers[stage], self.stats.stages[stage]
        stats.troubled(trouble)
        learn(f"stage {batcher.name}", batcher, place, batch_id, trouble)

    def trained_with_trouble(self, stage: int, trouble: Sequence[Trouble]) -> None:
        """What happened during a worker's warm-up, where every example counts for one."""
        learned = self.pipeline.batchers[stage].safe_size
        self.stats.stages[stage].troubled(trouble)
        for each in trouble:
            if each.ran_out:
                tried = min(map(len, each.ran_out))
                learned.ran_out(tried, max([n for n in map(len, each.fitted) if n < tried], default=0))

    def call_started(self, stage: int, place: int, batch_id: int) -> None:
        """A worker has begun another call for the same batch."""
        self.pipeline.call_started(self.clock(), stage, place, batch_id)

    # -- the turn of the loop

    def poll(self) -> None:
        """Ask the pipeline what to do, and do it."""
        self._dirty = False
        now = self.clock()
        arrivals: list[Request] = []
        try:
            if self._arrivals:
                arrivals, self._arrivals = self._arrivals, arrivals
                self.pipeline.submit(now, arrivals)
            todo = self.pipeline.poll(now)
        except BaseException as error:
            self._arrivals = [request for request in arrivals if request.state == NEW] + self._arrivals
            self._fail(error)
            return
        self._perform(todo)
        self._set_timer(todo.wake_at)
        if self._drained is not None and not self._drained.done() and not self.pipeline.unanswered:
            self._drained.set_result(None)

    def _perform(self, todo: Todo) -> None:
        late_s = self.clock() - self._timer_at if todo.kill else 0.0
        self._handing_over = bool(todo.run)
        for batch in todo.run:
            if not batch.ahead:
                self.stats.stages[batch.stage].started(batch)
            try:
                self.executors[batch.stage].run(batch)
            except BaseException as error:  # no memory for its message, say: that is nobody's fault, and others go on
                self._could_not_run(batch, error)
        self._handing_over = False
        for stage, place in todo.kill:
            if late_s > _ASLEEP_S:
                self._wait_once_more(stage, place, late_s)
            else:
                self.executors[stage].kill(place)
        if todo.answer:
            self.stats.answered(todo.answer, self.clock())
            for request in todo.answer:
                try:
                    request.tell()
                except BaseException:  # one caller that cannot be told is no reason to keep others waiting
                    logger.exception("the caller of %r could not be told its answer", request)

    def _could_not_run(self, batch: Batch, error: BaseException) -> None:
        logger.exception("%r could not be handed to its worker", batch)
        told = Unavailable(f"the batch could not be handed to a worker: {type(error).__name__}")
        n = len(batch.ids)
        errors: dict[int, Exception] = dict.fromkeys(range(n), told)
        self.completed(Reply(batch.stage, batch.place, batch.id, batch.ids, [None] * n, errors))

    def _fail(self, error: BaseException) -> None:
        """Something raised in deciding: a policy, which may be the user's. Its stage has failed."""
        name = stage_at_fault(error)
        what = f"stage {name} has failed: its policy raised" if name else "the service has failed: its pipeline raised"
        logger.critical("%s %s: %s", what, type(error).__name__, text_of(error), exc_info=error)
        if not self._broken:
            self._broken = True
            self.stage_failed(
                Unavailable(f"{what} {type(error).__name__}", code="stage_failed", retry_after_s=FAILED_FOR_S)
            )

    def _wait_once_more(self, stage: int, place: int, late_s: float) -> None:
        """A worker seems to hang; but we did not run ourselves, so perhaps nobody did: a container that was paused."""
        name = self.pipeline.batchers[stage].name
        logger.warning("this process did not run for %.1f s; worker %s/%d has its time anew", late_s, name, place)
        self.pipeline.batchers[stage].spare(self.clock(), place)
        self._poll_soon()

    def _poll_soon(self) -> None:
        if self._stopped:
            self.poll()
            return
        self._dirty = True
        self.loop.call_soon(self.poll)

    def _set_timer(self, when: float) -> None:
        """Have `poll` called at `when`. A timer that is early does no harm; it is left alone."""
        if self._stopped:
            return
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        if when == inf:
            self._timer = None
            return
        self._timer = self.loop.call_later(max(0.0, when - self.clock()), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.poll()
