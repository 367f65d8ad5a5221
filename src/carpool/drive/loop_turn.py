"""One turn of the loop: the pipeline is polled once, and what it decides is done.

Arrivals of one turn of the loop are only collected; one callback per turn polls the pipeline, so
everything that was parsed in that turn shares a batch and waits for nothing. One timer points at
the pipeline's next deadline. All else that happens in a service is in `drive/aio.py`.

A reply that finds a full batch waiting sends it at once. A shorter batch waits for the end of the
present turn of the loop (microseconds), so that requests that were parsed in the same turn travel
along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, cast

from carpool.clock import Clock, monotonic
from carpool.core.batch import Batch, Reply, Todo
from carpool.core.core import Core
from carpool.core.running_set import SetReport
from carpool.drive.executor import DrainingExecutor, Executor, Lender, StepExecutor
from carpool.drive.refusal_log import RefusalLog
from carpool.drive.trouble import FAILED_FOR_S
from carpool.drive.work_meter import WorkMeter
from carpool.errors import CarpoolError, StartupError, Unavailable
from carpool.foreign import text_of
from carpool.logger import logger
from carpool.observe.stats import Stats
from carpool.request import NEW, Request

_ASLEEP_S = 1.0  # a timer that fires later than this means that this process was stopped, or its loop blocked


class LoopTurn:
    """Polls a pipeline once per turn of the running loop; its subclass `Driver` adds the rest.

    Args:
        pipeline: Decides.
        stats: Counts every batch and answer.
        clock: Monotonic seconds.

    Attributes:
        executors: One per stage.
        loop: The loop that it runs on.
        lender: Lends a worker to callers' threads; None where nothing lends.
        loan: What callers' threads have of the worker that is lent; None if none is.
    """

    def __init__(self, pipeline: Core, stats: Stats, clock: Clock = monotonic) -> None:
        self.pipeline = pipeline
        for batcher in pipeline.batchers:
            batcher.lobby.on_fault = self._policy_raised
        self.stats = stats
        self.clock = clock
        self.executors: Sequence[Executor] = ()
        self.loop = asyncio.get_running_loop()
        self.lender: Lender | None = None
        self.loan: Any = None

        # what has come in this turn of the loop, and when the pipeline is polled
        self._arrivals: list[Request] = []
        self._is_poll_due = False  # at the end of this turn
        self._is_handing_over = False  # batches go out in their order; what happens meanwhile is polled for afterwards
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._meter = WorkMeter(pipeline)
        self._refusal_log = RefusalLog(stats.refusals, f"service {stats.name}", {"model": stats.name}, clock, self.loop)

        # the service's life: each of these happens once, in whatever order
        self._started: asyncio.Future[None] = self.loop.create_future()
        self._failed: asyncio.Future[None] = self.loop.create_future()
        self._has_raised = False
        self._drained: asyncio.Future[None] | None = None
        self._awaited: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []  # what is waited for
        self._has_stopped = False  # nothing is inside or will be: new requests are refused at once

    # -- the turn

    def poll(self) -> None:
        """Ask the pipeline what to do, and do it."""
        self._is_poll_due = False
        self._settle()
        now = self.clock()
        arrivals: list[Request] = []
        try:
            if self._arrivals:
                arrivals, self._arrivals = self._arrivals, arrivals
                self.pipeline.flow.submit(now, arrivals)
            todo = self.pipeline.poll(now)
        except BaseException as error:
            self._arrivals = [request for request in arrivals if request.state == NEW] + self._arrivals
            self._fail(error)
            return
        self._perform(todo)
        self._set_timer(todo.wake_at)
        if now >= self._meter.next_at:
            self._meter.measure(now)
        if self._drained is not None and not self._drained.done() and not self.pipeline.unanswered:
            self._drained.set_result(None)
        if self._awaited:
            self._tell_awaited()
        if self.lender is not None and not self._is_poll_due:
            self.lender.polled(todo)

    def _perform(self, todo: Todo) -> None:
        """Hand over batches, give up workers that hang and deliver answers."""
        late_s = self.clock() - self._timer_at if todo.kill else 0.0
        self._is_handing_over = bool(todo.run or todo.orders)
        for order in todo.orders:
            cast(StepExecutor, self.executors[order.stage]).send(order)
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
                self._refusal_log.tell()
        if todo.parts:
            self.stats.handed_on(todo.parts)
        for request, part in todo.parts:  # before the answers, as parts come before the end
            try:
                request.tell_part(part)
            except BaseException:  # the other callers have their parts all the same
                logger.exception("a part of the answer of %r could not be delivered to its caller", request)
        for stage, place in todo.kill:  # after the parts, as what this worker still says is told at once
            self._give_up(stage, place, late_s)
        for stage, place in todo.drained:
            cast(DrainingExecutor, self.executors[stage]).drained(place)
        if todo.answer:
            self.stats.answered(todo.answer, self.clock())
            if self.stats.refusals.is_due:
                self._refusal_log.tell()
            self._tell(todo.answer)
        if todo.recall:
            self.recall()

    def _tell(self, requests: Sequence[Request]) -> None:
        """Deliver answers to their callers."""
        for request in requests:
            try:
                request.tell()
            except BaseException:  # the other callers have their answers all the same
                about = {"model": self.stats.name}
                logger.exception("the answer of %r could not be delivered to its caller", request, extra=about)

    def _give_up(self, stage: int, place: int, late_s: float) -> None:
        """Give up a worker that hangs; if this process did not run itself, give it its time anew.

        Perhaps no process did, as in a container that was paused.

        Args:
            stage: The position of its stage.
            place: Its place there.
            late_s: For how many seconds this process was late to look.
        """
        if late_s <= _ASLEEP_S:
            self.executors[stage].kill(place)
            return
        text, about = "this process did not run for %.1f s, so worker %s gets its time again", self._about(stage, place)
        logger.warning(text, late_s, about["worker"], extra=about)
        self.pipeline.batchers[stage].spare(self.clock(), place)
        self._poll_soon()

    def _tell_awaited(self) -> None:
        """Wake those that wait for something to become true of the pipeline."""
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
        """Return the fields of a log line about a worker."""
        stats = self.stats.stages[stage]
        return {"model": self.stats.name, "stage": stats.name, "worker": stats.worker_name(place)}

    def _poll_soon(self) -> None:
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

        It goes at once if it is full, and else at the end of this turn, so that what arrives in the
        turn shares it. If no request waits, the answers are delivered at once.
        """
        batcher, stats, place = self.pipeline.batchers[reply.stage], self.stats.stages[reply.stage], reply.place
        before = batcher.in_flight.get(place)
        self._settle()
        try:
            self.pipeline.completed(self.clock(), reply)
        except BaseException as error:
            self._fail(error)
            return
        stats.completed(place, len(reply.ids), reply.busy_s, reply.waited_s)
        following = batcher.in_flight.get(place)
        if following is not None and following is not before:  # it had been sent ahead
            stats.started(following)
        if self._is_handing_over:
            if not self._is_poll_due:
                self._poll_soon()
        elif batcher.queue.size >= batcher.lobby.batch_limit:
            self.poll()
        elif not self._is_poll_due:
            if self.pipeline.waiting:
                self._poll_soon()
            else:
                self.poll()

    def reported(self, report: SetReport) -> None:
        """Take what a worker says after a step. Orders that follow go out before parts are told.

        Raises:
            ValueError: The worker breaks the protocol. What came before that in its report counts.
        """
        try:
            self.pipeline.reported(self.clock(), report)
        except ValueError:
            self._poll_soon()
            raise
        except BaseException as error:
            self._fail(error)
            return
        self.stats.reported(report)
        if not self._is_handing_over:
            self.poll()
        elif not self._is_poll_due:
            self._poll_soon()

    # -- the worker that is lent

    def recall(self) -> None:
        """Take back the worker that is lent to callers' threads, if one is."""
        if self.loan is not None:
            assert self.lender is not None
            self.lender.recall()

    def _settle(self) -> None:
        """Have the pipeline know of the calls that are done before it learns of what came later."""
        if self.loan is not None:
            assert self.lender is not None
            self.lender.settle()

    def took_back(self, batch: Batch | None) -> None:
        """Take note that the worker is back, perhaps with a batch that it has had for a while."""
        if batch is not None:
            self.stats.stages[batch.stage].started(batch)
        if not self._is_poll_due:
            self._poll_soon()

    # -- what fails

    def start_failed(self, error: CarpoolError) -> None:
        """Fail the start of the service with `error`, if it is still starting."""
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()  # counts as retrieved: where `start` itself has raised, nothing awaits it

    def stage_failed(self, error: CarpoolError) -> None:
        """Fail the service with `error`: one of its stages cannot work any more."""
        self.recall()
        self.start_failed(StartupError(str(error)))
        if not self._failed.done():
            self._failed.set_result(None)
        self.pipeline.abort(self.clock(), error)
        self.poll()

    def _policy_raised(self, stage: str, error: BaseException) -> None:
        """Have the service fail, as the policy of a stage has raised.

        That is not done at once, since the pipeline is in the midst of something.
        """
        failure = self._failure(f"stage {stage} has failed: its policy raised", stage, error)
        self.start_failed(StartupError(str(failure)))
        if not self._has_stopped:
            self.loop.call_soon(self._fail_once, failure)

    def _fail(self, error: BaseException) -> None:
        """Fail the service, as its pipeline has raised."""
        self._fail_once(self._failure("the service has failed: its pipeline raised", None, error))

    def _failure(self, what: str, stage: str | None, error: BaseException) -> Unavailable:
        """Log what was raised, and return the error of all requests inside."""
        kind, about = type(error).__name__, {"model": self.stats.name, "stage": stage, "code": "stage_failed"}
        logger.critical("%s %s: %s", what, kind, text_of(error), exc_info=error, extra=about)
        return Unavailable(f"{what} {kind}", code="stage_failed", retry_after_s=FAILED_FOR_S)

    def _fail_once(self, failure: Unavailable) -> None:
        if not self._has_raised:
            self._has_raised = True
            self.stage_failed(failure)
