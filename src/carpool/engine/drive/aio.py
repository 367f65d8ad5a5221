"""The asyncio driver: feeds events to a core and does what the core decides.

One callback per turn of the loop polls the core, so everything that was parsed in that turn shares
a batch. One timer points at the core's next deadline.

A reply that finds a full batch waiting sends it at once; a shorter one waits for the end of the
turn.

Everything here runs on one loop. Other threads come in through the mailbox of
`drive/loop_thread.py`; worker threads, and batch functions on other loops, call
`call_soon_threadsafe` themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Any, Protocol

from carpool.engine.call.results import Trouble
from carpool.engine.clock import Clock, monotonic
from carpool.engine.core.batch import Batch, Reply, Todo
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.running_set import SetReport
from carpool.engine.drive.failures import FAILED_FOR_S, RefusalLog, learn, learn_from_warm_up
from carpool.engine.drive.loop_thread import WorkMeter
from carpool.engine.fast_paths import fast_path
from carpool.engine.foreign import text_of
from carpool.engine.logger import logger
from carpool.engine.observe.snapshot import ServiceSnapshot
from carpool.engine.observe.stats import Stats
from carpool.engine.request import NEW, Request
from carpool.errors import CarpoolError, StartupError, Unavailable


class Executor(Protocol):
    """Runs the batches of one stage and reports to the driver."""

    def start(self) -> None:
        """Start the workers that are due; each reports `worker_ready`, or all `stage_failed`."""

    def run(self, batch: Batch) -> None:
        """Hand a batch to its worker, which is idle, or is about to be if the batch goes ahead."""

    def kill(self, place: int) -> None:
        """Give up a worker that hangs: report it as lost at once, and end it."""

    async def stop(self, grace_s: float) -> None:
        """End all workers, by force after `grace_s` seconds."""


_ASLEEP_S = 1.0  # a timer that fires later than this means that this process was stopped, or its loop blocked


class Driver:
    """Drives one service's core on the running loop.

    Attributes:
        executors: One per stage.
        lender: Lends a worker to callers' threads; None where nothing lends.
        loan: What callers' threads have of the worker that is lent; None if none is.
    """

    def __init__(self, core: Core, stats: Stats, clock: Clock = monotonic) -> None:
        self.core = core
        for crew in core.crews:
            crew.lobby.on_fault = self._policy_raised
        self.stats = stats
        self.clock = clock
        self.executors: Sequence[Executor] = ()
        self.loop = asyncio.get_running_loop()
        self.lender: Any = None  # `drive/lending.py`, which has both, imports this module
        self.loan: Any = None

        # what has come in this turn of the loop, and when the core is polled
        self._arrivals: list[Request] = []
        self._is_poll_due = False  # at the end of this turn
        self._is_handing_over = False  # `_perform` sends batches; replies that come meanwhile are polled for afterwards
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._meter = WorkMeter(core)
        self._refusal_log = RefusalLog(stats.refusals, f"service {stats.name}", {"model": stats.name}, clock, self.loop)

        # the service's life: each of these happens once, in whatever order
        self._started: asyncio.Future[None] = self.loop.create_future()
        self._failed: asyncio.Future[None] = self.loop.create_future()
        self._has_raised = False
        self._drained: asyncio.Future[None] | None = None
        self._awaited: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []  # what is waited for
        self._missing: set[tuple[int, int]] = set()  # (stage, place) of workers that have not been ready yet
        self._has_stopped = False  # nothing is inside or will be: new requests are refused at once

    # -- life

    async def start(self, executors: Sequence[Executor], workers: Sequence[int]) -> None:
        """Start every stage and wait until all workers are ready, of which each has so many.

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
        """Refuse new requests, finish those inside (fail them at once without `drain`) and end the
        workers.

        Args:
            timeout_s: How long that may take, before the rest fails; None or `inf` for any time.
            grace_s: How long the workers may take for their teardown.
        """
        if self._arrivals:
            self.poll()  # these came before
        if self.core.flow.closed_because is None:
            self.core.close(Unavailable("the service is stopping", code="draining"))
        self.recall()  # a call under way is one of those inside
        if drain and self.core.unanswered and not self.loop.is_closed():
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
        self._refusal_log.log_all()

    def abort(self) -> None:
        self.recall()
        self.core.abort(self.clock(), Unavailable("the service has stopped", code="stopped"))
        self.poll()

    @property
    def has_failed(self) -> bool:
        """Whether a stage has failed: its workers kept dying, or its policy raised."""
        return self._failed.done()

    async def failed(self) -> None:
        """Wait until a stage has failed: from then on the service fails every request."""
        await asyncio.shield(self._failed)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true of the core, which is asked after each poll."""
        if condition():
            return
        awaited = condition, self.loop.create_future()
        self._awaited.append(awaited)
        try:
            await awaited[1]
        finally:
            self._awaited.remove(awaited)

    def snapshot(self) -> ServiceSnapshot:
        self.recall()
        return self.stats.snapshot(self.clock())

    # -- callers

    def close(self, error: CarpoolError) -> None:
        """Refuse new requests with `error` from the next turn on, and hold no batch back."""
        self.core.close(error)
        if not self.loop.is_closed():
            self._poll_soon()

    def submit(self, request: Request) -> None:
        """Take a new request; its answer, or its refusal, comes in a later turn of the loop."""
        self._arrivals.append(request)
        if not self._is_poll_due:
            self._poll_soon()

    def submit_all(self, requests: Sequence[Request], alike: bool = False) -> None:
        """Take several new requests, in their order. If they are alike, as `Flow.submit` has it,
        they are submitted at once, and what follows is done at the end of this turn.
        """
        if not alike or not self._submit_alike(requests):
            self._arrivals += requests
        self._poll_soon()

    @fast_path("alike", declined=False)
    def _submit_alike(self, requests: Sequence[Request]) -> bool:
        """Submit requests that are alike at once, of which the core looks at the first one only.

        Fast path of `poll`: the same outcome, see tests/engine/core/test_fast_paths.py.
        """
        try:
            self.core.flow.submit(self.clock(), requests, alike=True)
        except BaseException as error:
            self._fail(error)
        return True

    def cancel(self, request: Request) -> None:
        if request.state == NEW:  # perhaps a thread was interrupted in its lone call
            self.recall()
        before = self.core.flow.cancelled
        self.core.cancel(self.clock(), request)
        if self.core.flow.cancelled > before:
            self.stats.cancelled_by_caller(request, self.clock())
        self._poll_soon()

    def suffice(self, request: Request) -> None:
        """End a stream of which the caller has all that it wants; it gets this end as any other."""
        self.core.suffice(self.clock(), request)
        self._poll_soon()

    def pause(self, request: Request, is_paused: bool) -> None:
        now = self.clock()
        self.core.pause(now, request, is_paused)
        self.stats.paused(now, request, is_paused)
        self._poll_soon()

    def refused(self, error: CarpoolError) -> None:
        self.stats.refused(error)
        if self.stats.refusals.is_due:
            self._refusal_log.log_due()

    # -- workers

    def start_workers(self) -> None:
        for executor in self.executors:
            executor.start()

    def worker_ready(self, stage: int, place: int) -> None:
        self.core.worker_ready(stage, place)
        self._missing.discard((stage, place))
        if not self._missing and not self._started.done():
            self._started.set_result(None)
        self.poll()

    def drain(self, stage: int, place: int) -> None:
        self.core.drain(stage, place)
        self.poll()

    def hold(self, is_held: bool) -> None:
        """Have the first of several stages start no batch for now, or go on."""
        self.core.hold(is_held)
        self.poll()

    def worker_lost(self, stage: int, place: int, unsent: Collection[int] = ()) -> bool:
        """Take note that a worker that was ready is gone; return whether a request is to blame (see
        `Core.worker_lost`).
        """
        blamed = self.core.worker_lost(self.clock(), stage, place, unsent)
        self.poll()
        return blamed

    def worker_left(self, stage: int, place: int) -> None:
        self.core.worker_left(self.clock(), stage, place)
        self.poll()

    def restart_hang_timer(self, stage: int, place: int) -> None:
        """Give a worker that seemed to hang, but has sent something, its time anew."""
        self.core.restart_hang_timer(self.clock(), stage, place)
        self.poll()

    def call_started(self, stage: int, place: int, batch_id: int) -> None:
        self.core.restart_hang_timer(self.clock(), stage, place, batch_id)

    # -- what the workers teach

    def troubled(self, batcher: Batcher, place: int, batch_id: int, trouble: Sequence[Trouble]) -> None:
        """Learn from what happened during a worker's batch, before its results come.

        Raises:
            ValueError: It is about a batch or items that the worker does not have.
        """
        stage = batcher.lobby.stage
        self.stats.stages[stage].troubled(trouble)
        learn(f"stage {batcher.name}", batcher, place, batch_id, trouble, self._about(stage, place))

    def troubled_in_warm_up(self, batcher: Batcher, trouble: Sequence[Trouble]) -> None:
        self.stats.stages[batcher.lobby.stage].troubled(trouble)
        learn_from_warm_up(batcher, trouble)

    # -- the turn

    def poll(self) -> None:
        self._is_poll_due = False
        self._settle()
        now = self.clock()
        arrivals: list[Request] = []
        try:
            if self._arrivals:
                arrivals, self._arrivals = self._arrivals, arrivals
                self.core.flow.submit(now, arrivals)
            todo = self.core.poll(now)
        except BaseException as error:
            self._arrivals = [request for request in arrivals if request.state == NEW] + self._arrivals
            self._fail(error)
            return
        self._perform(todo)
        self._set_timer(todo.wake_at)
        if now >= self._meter.next_at:
            self._meter.measure(now)
        if self._drained is not None and not self._drained.done() and not self.core.unanswered:
            self._drained.set_result(None)
        if self._awaited:
            self._deliver_awaited()
        if self.lender is not None and not self._is_poll_due:
            self.lender.polled(todo)

    def _perform(self, todo: Todo) -> None:
        late_s = self.clock() - self._timer_at if todo.kill else 0.0
        self._is_handing_over = bool(todo.run or todo.orders)
        for order in todo.orders:
            steps: Any = self.executors[order.stage]
            steps.send(order)
        for batch in todo.run:
            if not batch.ahead:
                self.stats.stages[batch.stage].started(batch)
            try:
                self.executors[batch.stage].run(batch)
            except BaseException as error:  # say, no memory for its message: the other batches go on
                self._could_not_run(batch, error)
        self._is_handing_over = False
        if todo.orders:
            self.stats.ordered(todo.orders, self.clock())
            if self.stats.refusals.is_due:
                self._refusal_log.log_due()
        if todo.parts:
            self.stats.handed_on(todo.parts)
        for request, part in todo.parts:  # before the answers, as parts come before the end
            try:
                request.tell_part(part)
            except BaseException:  # the other callers have their parts all the same
                logger.exception("a part of the answer of %r could not be delivered to its caller", request)
        for stage, place in todo.kill:  # after the parts, as what this worker still sends is handed on at once
            self._give_up(stage, place, late_s)
        for stage, place in todo.drained:
            pool: Any = self.executors[stage]  # one whose workers may go while the service runs
            pool.drained(place)
        if todo.answer:
            self.stats.answered(todo.answer, self.clock())
            if self.stats.refusals.is_due:
                self._refusal_log.log_due()
            self._deliver(todo.answer)
        if todo.recall:
            self.recall()

    def _deliver(self, requests: Sequence[Request]) -> None:
        for request in requests:
            try:
                request.tell()
            except BaseException:  # the other callers have their answers all the same
                about = {"model": self.stats.name}
                logger.exception("the answer of %r could not be delivered to its caller", request, extra=about)

    def _give_up(self, stage: int, place: int, late_s: float) -> None:
        """Give up a worker that hangs; if this process did not run itself for more than a moment,
        as in a container that was paused, give it its time anew.
        """
        if late_s <= _ASLEEP_S:
            self.executors[stage].kill(place)
            return
        text, about = "this process did not run for %.1f s, so worker %s gets its time again", self._about(stage, place)
        logger.warning(text, late_s, about["worker"], extra=about)
        self.core.restart_hang_timer(self.clock(), stage, place)
        self._poll_soon()

    def _deliver_awaited(self) -> None:
        for condition, future in self._awaited:
            if not future.done() and condition():
                future.set_result(None)

    def _could_not_run(self, batch: Batch, error: BaseException) -> None:
        logger.exception("%r could not be handed to its worker", batch, extra=self._about(batch.stage, batch.place))
        shown = Unavailable(f"the batch could not be handed to a worker: {type(error).__name__}")
        n = len(batch.ids)
        errors: dict[int, Exception] = dict.fromkeys(range(n), shown)
        self.completed(Reply(batch.stage, batch.place, batch.id, batch.ids, [None] * n, errors))

    def _about(self, stage: int, place: int) -> dict[str, str]:
        stats = self.stats.stages[stage]
        return {"model": self.stats.name, "stage": stats.name, "worker": stats.worker_name(place)}

    def _poll_soon(self) -> None:
        """Have the core polled at the end of this turn, or now if no further turn may come."""
        if self._is_poll_due:
            return
        if self._has_stopped:
            self.poll()
            return
        self._is_poll_due = True
        self.loop.call_soon(self.poll)

    def _set_timer(self, when: float) -> None:
        """Have `poll` called at `when`. A timer that fires earlier does no harm and is kept."""
        if self._has_stopped:
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

    # -- what the workers say of their batches

    def completed(self, reply: Reply) -> None:
        """Take a worker's reply. The next batch goes out before this one's answers are delivered.

        If no request waits, the answers are delivered at once.
        """
        crew, stats, place = self.core.crews[reply.stage], self.stats.stages[reply.stage], reply.place
        ran = crew.in_flight.get(place)
        self._settle()
        try:
            self.core.completed(self.clock(), reply)
        except BaseException as error:
            self._fail(error)
            return
        stats.completed(place, len(reply.ids), reply.busy_s, reply.waited_s)
        runs = crew.in_flight.get(place)
        if runs is not None and runs is not ran:  # it had been sent ahead
            stats.started(runs)
        is_full = crew.queue.size >= crew.lobby.batch_limit
        if self._is_handing_over or (not is_full and (self._is_poll_due or self.core.waiting)):
            self._poll_soon()
        else:
            self.poll()

    def reported(self, report: SetReport) -> None:
        """Take what a worker says after a step. Orders that follow go out before the parts.

        Raises:
            ValueError: The worker breaks the protocol. What came before that in its report counts.
        """
        try:
            self.core.reported(self.clock(), report)
        except ValueError:
            self._poll_soon()
            raise
        except BaseException as error:
            self._fail(error)
            return
        self.stats.reported(report)
        if not self._is_handing_over:
            self.poll()
        else:
            self._poll_soon()

    # -- the worker that is lent

    def recall(self) -> None:
        if self.loan is not None:
            assert self.lender is not None
            self.lender.recall()

    def _settle(self) -> None:
        if self.loan is not None:
            assert self.lender is not None
            self.lender.settle()

    def took_back(self, batch: Batch | None) -> None:
        if batch is not None:
            self.stats.stages[batch.stage].started(batch)
        self._poll_soon()

    # -- what fails

    def start_failed(self, error: CarpoolError) -> None:
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()  # counts as retrieved: where `start` itself has raised, nothing awaits it

    def stage_failed(self, error: CarpoolError) -> None:
        self.recall()
        self.start_failed(StartupError(str(error)))
        if not self._failed.done():
            self._failed.set_result(None)
        self.core.abort(self.clock(), error)
        self.poll()

    def _policy_raised(self, stage: str, error: BaseException) -> None:
        """Have the service fail, once the core is out of its call, as a policy has raised."""
        failure = self._failure(f"stage {stage} has failed: its policy raised", stage, error)
        self.start_failed(StartupError(str(failure)))
        if not self._has_stopped:
            self.loop.call_soon(self._fail_once, failure)

    def _fail(self, error: BaseException) -> None:
        self._fail_once(self._failure("the service has failed: its core raised", None, error))

    def _failure(self, what: str, stage: str | None, error: BaseException) -> Unavailable:
        kind, about = type(error).__name__, {"model": self.stats.name, "stage": stage, "code": "stage_failed"}
        logger.critical("%s %s: %s", what, kind, text_of(error), exc_info=error, extra=about)
        return Unavailable(f"{what} {kind}", code="stage_failed", retry_after_s=FAILED_FOR_S)

    def _fail_once(self, failure: Unavailable) -> None:
        if not self._has_raised:
            self._has_raised = True
            self.stage_failed(failure)
