"""The workers of one stage: started, listened to, ended and replaced.

A worker is a process (`process.py`), a thread or a task (`local_workers.py`), or has come by itself
from somewhere else (`gate.py`). `pools.py` has the frames that it gets. The roster
(`core/roster.py`) decides when to replace a worker and when to give up.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from math import inf

import msgspec

from carpool.engine import faults
from carpool.engine.core.batch import Batch
from carpool.engine.core.roster import MOST_DEATHS, PlaceState, Roster, Starts
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.failures import FAILED_FOR_S
from carpool.engine.drive.gate import JoinedWorker
from carpool.engine.drive.local_workers import LoopWorker, ThreadWorker
from carpool.engine.drive.process import LowPriority, WorkerProcess
from carpool.engine.drive.worker import Launch, Loss, Turnover, Worker
from carpool.engine.logger import logger
from carpool.engine.observe.log import LineSink, guarded
from carpool.engine.request import DONE, Request
from carpool.engine.wire import outcome
from carpool.engine.wire.frame import Frame, FrameError, FrameKind
from carpool.engine.wire.handshake import Hello
from carpool.engine.worker import own_metrics
from carpool.engine.worker.program import LEAVING, NOWHERE
from carpool.errors import StartupError, Unavailable

_KINDS: dict[str, Callable[[Launch, int, Callable[[Frame], None], Callable[[str], None], LineSink], Worker]] = {
    "process": WorkerProcess,
    "thread": ThreadWorker,
    "loop": LoopWorker,
}


class WorkerPool:
    """The executor of a stage that runs in workers: what does not depend on what they work on.

    Args:
        launch: How to start its workers.
        driver: Takes readiness, losses and results.
        starts: How many workers of the service may load at a time.
        sink: Where the workers' output goes.

    Attributes:
        count_calls: Called with the place of a worker and how many requests it has answered; None
            if nothing counts them.
    """

    _unit = "request"  # what may be to blame for a loss, for the log

    def __init__(
        self, stage: int, launch: Launch, driver: Driver, roster: Roster, starts: Starts, sink: LineSink
    ) -> None:
        self.stage = stage
        self.name = launch.setup.stage
        self.roster = roster
        self._starts = starts
        self._launch = launch
        self._driver = driver
        self._crew = driver.core.crews[stage]
        self._sink = guarded(sink)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # for the next start that is due
        self._has_waiting = False  # whether workers waited at the last look

        # by place: the worker, when it was started, and why it could not load
        self._workers: dict[int, Worker] = {}
        self._began: dict[int, float] = {}
        self._failure: dict[int, outcome.FailureReport] = {}
        self._lost_at: dict[int, float] = {}  # when the last one that had been ready was lost
        self._low: dict[int, LowPriority] = {}  # of those that load while others serve
        self.turnover = Turnover(stage, roster, driver, self._workers, driver.start_workers, self._about)
        self.count_calls: Callable[[int, int], None] | None = None

        # requests that were with a worker which fell silent
        self._fell_silent_with: list[Request] = []

        # planned faults, for tests
        self._after_dispatch = faults.at("parent.after_dispatch")
        self._before_reply = faults.at("parent.before_reply")

    def set_variables(self, variables: tuple[Mapping[str, str], ...]) -> bool:
        """Set the variables of processes to come; report whether they are others."""
        differ = variables != self._launch.env
        self._launch = replace(self._launch, env=variables)
        return differ

    @property
    def pids(self) -> list[int]:
        return list(self.pids_by_place.values())

    @property
    def pids_by_place(self) -> dict[int, int]:
        return {place: worker.pid for place, worker in list(self._workers.items()) if worker.pid is not None}

    # -- what they work on

    def run(self, batch: Batch) -> None:
        raise NotImplementedError

    def _learn(self, frame: Frame) -> None:
        raise NotImplementedError

    def moves_out(self, is_late: bool) -> bool:
        """Report whether others can go on with what a worker has that is to go; it is late if it
        has had the time that it was given to finish.
        """
        return False

    def _take_unread(self, place: int, has_unread_batch: bool = False) -> Collection[int] | None:
        """Forget what was sent to a worker that is gone, and what was still to be sent; return the
        requests that it cannot have begun with, None for all of them.
        """
        raise NotImplementedError

    def _received_too_late(self, place: int, frame: Frame) -> None:
        """Count the late results of a worker that was given up: others have its requests by now."""
        if frame.kind in (FrameKind.REPLY, FrameKind.PARTS):
            self._crew.late_results += len(frame.ids) - (frame.kind == FrameKind.PARTS)  # whose first id is none
            self._workers[place].kill()  # it has come back, so it need not write down where it hung

    # -- starting

    def start(self) -> None:
        now = self._driver.clock()
        for place in self.roster.due(now, self._starts.room_for(now, self.roster)):
            self._start(place)
        self._log_waiting(len(self.roster.waiting(now)))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self.roster.next_start()
        if now < when < inf:  # one that is due already is started as soon as another has loaded
            self._timer = self._loop.call_later(when - now, self._driver.start_workers)

    def _log_waiting(self, waiting: int) -> None:
        if waiting and not self._has_waiting:
            what = "1 worker" if waiting == 1 else f"{waiting} workers"
            text = (
                "%s of stage %s will start when others have loaded, since %d may load at a time (max_parallel_starts)"
            )
            logger.info(text, what, self.name, self._starts.most, extra=self._about())
        self._has_waiting = waiting > 0

    def _start(self, place: int) -> None:
        self._began[place] = self._driver.clock()
        on_frame, on_lost = partial(self._received, place), partial(self._lost, place)
        record = self.roster.places[place]
        new = self._launch.hire or _KINDS[self._launch.run_in]
        try:
            self._workers[place] = new(self._launch, record.index, on_frame, on_lost, self._sink)
        except OSError as error:  # no process, memory or file descriptor to be had: tried again later
            about = self._about(place)
            logger.error("worker %s cannot be started: %s", about["worker"], error, extra=about)
            self.roster.not_started(self._driver.clock(), place)
            text = f"worker {record.index} of stage {self.name} cannot be started: {error}"
            if record.is_new:
                self._forget(place, text)
            elif not record.was_ready:
                self._driver.start_failed(StartupError(text))
        else:
            logger.info("worker %s starts", self._label(place), extra=self._about(place))
            pid = self._workers[place].pid
            if pid is not None and self.roster.is_served:
                self._low[place] = LowPriority(pid)

    def why_not_admitted(self) -> str:
        """Return why no worker can join now; empty if one can."""
        return f"stage {self.name} is closing, or has failed" if self.roster.stopping or self.roster.failed else ""

    def admit(self, sock: socket.socket, hello: Hello) -> None:
        place = self.roster.admit()
        self._began[place] = self._driver.clock()
        on_frame, on_lost = partial(self._received, place), partial(self._lost, place)
        worker = JoinedWorker(sock, hello, on_frame, on_lost, trusts_resets=self._launch.is_idempotent)
        self._workers[place] = worker
        logger.info("worker %s joins", self._label(place), extra=self._about(place))
        wanted = own_metrics.are_wanted()
        setup = msgspec.structs.replace(
            self._launch.setup, place=place, model=b"", program=NOWHERE, sends_metrics=wanted
        )
        packed, now = msgspec.msgpack.encode(setup), self._driver.clock()
        worker.send(Frame(FrameKind.SETUP, ids=[0], formats=b"\0", payloads=[packed], made_at=now))

    # -- what the workers say of themselves

    def _received(self, place: int, frame: Frame) -> None:
        """Take what a worker says of itself; what it says of its work is for the kinds of pools.
        Raises FrameError.
        """
        if not frame.payloads:
            raise FrameError(f"a {frame.kind.name} frame without a payload")
        if frame.kind == FrameKind.STATE:
            self._changed_state(place, frame)
        elif frame.kind == FrameKind.FAILED and not self.roster.places[place].is_serving:
            self._failure[place] = outcome.read_report(frame.payloads[0])
        elif frame.kind == FrameKind.METRICS and self._workers[place].hello is not None:
            data = frame.payloads[0]
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise FrameError("metrics in several pieces")
            self._driver.stats.stages[self.stage].sent_metrics.sent(place, bytes(data))
        else:
            raise FrameError(f"it must not send {frame.kind.name} now")

    def _changed_state(self, place: int, frame: Frame) -> None:
        record = self.roster.places[place]
        if record.is_guest and record.state == PlaceState.READY and frame.payloads[0] == LEAVING:
            self.turnover.retire(place)
            return
        try:
            state = PlaceState(bytes(frame.payloads[0]).decode())  # type: ignore[arg-type]
            self.roster.moved(place, state)
        except (ValueError, TypeError) as error:
            raise FrameError(f"it reports the state {frame.payloads[0]!r:.80}: {error}") from error
        if state != PlaceState.LOADING and place in self._low:  # the warm-up shows what batches cost
            self._low.pop(place).end()
        if state == PlaceState.READY:
            self._learn(frame)
            if (hello := self._workers[place].hello) is not None:
                self._driver.stats.stages[self.stage].elsewhere[place] = hello
            self._log_readiness(place)
            if not self.turnover.became_ready(place):
                self._driver.worker_ready(self.stage, place)
            self._driver.start_workers()

    def _log_readiness(self, place: int) -> None:
        now, lost_at = self._driver.clock(), self._lost_at.pop(place, None)
        if lost_at is None:
            text, since = "worker %s is ready after %.2f s", self._began[place]
        else:
            text, since = "worker %s is back after %.2f s", lost_at
        logger.info(text, self._label(place), now - since, extra=self._about(place))

    # -- ending

    def kill(self, place: int) -> None:
        """Give up a worker that hangs: its batch counts as crashed, and its successor starts when
        it is gone.
        """
        worker = self._workers.get(place)
        if worker is None:
            return
        if worker.catch_up():  # this process is late itself: the worker had sent something that was not read
            self._driver.restart_hang_timer(self.stage, place)
            return
        work = self._crew.at_work.get(place)
        if work is None:
            return  # it has just been lost
        why = work.given_up
        slow = self._crew.times.learns and work.unwanted_since < inf  # no limit was set, and no caller waits
        logger.error("worker %s hangs and is given up: %s", self._label(place), why, extra=self._about(place))
        if not self.roster.places[place].is_guest:
            self._lost_at.setdefault(place, self._driver.clock())
        self.roster.lost(self._driver.clock(), place, gone=False)
        self._hurry_if_unserved()
        worker.close_input()  # what it has not read by now it never begins: it may wake up to write down where it hangs
        has_unread_batch = worker.has_unread_batch
        worker.give_up(why, partial(self._received_too_late, place))
        if not self._hand_back(place, has_unread_batch) and slow:
            self._forgive(place, deaths=1)  # the stage is not to blame
        if self.roster.failed:
            self._fail(why)

    def kill_all(self) -> None:
        self.roster.stopping = True
        for worker in self._workers.values():
            worker.kill()

    def dismiss(self) -> None:
        """Let every worker end by itself once it has finished: the loop stands still."""
        self.roster.stopping = True
        for worker in self._workers.values():
            worker.close_input()

    def abandon(self) -> None:
        self.roster.stopping = True
        for worker in self._workers.values():
            worker.abandon()
        self._workers.clear()

    def drained(self, place: int) -> None:
        self.turnover.drained(place)

    async def stop(self, grace_s: float) -> None:
        self.roster.stopping = True
        self.turnover.fail(Unavailable("the service is stopping", code="stopped"))
        if self._timer is not None:
            self._timer.cancel()
        workers = list(self._workers.values())
        for place, worker in self._workers.items():
            if self.roster.places[place].is_serving:
                worker.close_input()
            else:
                worker.kill()  # it is loading its model, and has nothing to finish
        ends = [asyncio.ensure_future(worker.ended()) for worker in workers]
        if not ends:
            return
        _, late = await asyncio.wait(ends, timeout=grace_s)
        for worker in workers:
            worker.kill()  # the late ones, and what the others left behind
        if late:
            await asyncio.wait(late)

    # -- workers that are lost

    def _lost(self, place: int, why: str) -> None:
        self._do_without(place, why)
        stats = self._driver.stats.stages[self.stage]
        stats.elsewhere.pop(place, None)
        stats.sent_metrics.ended(place)

    def _do_without(self, place: int, why: str) -> None:
        record, loss = self.roster.places[place], self._loss_of(place, why)
        if loss.state == PlaceState.HUNG:
            self.roster.is_gone(place)  # all else has been done when it was given up
        else:
            self.roster.lost(self._driver.clock(), place)
            self._hurry_if_unserved()
        if self.roster.stopping:
            logger.info("worker %s has stopped", loss.label, extra=self._about(place))
        elif record.is_leaving:
            self._has_left(loss)
        elif record.is_guest:
            self._lost_guest(loss)
        elif record.is_new:
            self._lost_newcomer(loss)
        elif not (record.was_ready or record.is_retried):
            self._driver.start_failed(StartupError(loss.failure or self._died(place, "while loading", why)))
        else:
            self._lost_of_ours(loss)

    def _hurry_if_unserved(self) -> None:
        """Let those that load have all that they can get where no other serves any more."""
        while self._low and not self.roster.is_served:
            self._low.popitem()[1].end()

    def _loss_of(self, place: int, why: str) -> Loss:
        label, state, stats = self._label(place), self.roster.places[place].state, self._driver.stats.stages[self.stage]
        worker = self._workers.pop(place)
        self._low.pop(place, None)
        if worker.broke_protocol:
            stats.protocol_errors += 1
        report = self._failure.pop(place, None)
        failure = "" if report is None else f"{report.message}\n{report.traceback}".rstrip()
        return Loss(place, label, worker, state, why, failure)

    def _lost_of_ours(self, loss: Loss) -> None:
        self._lost_at.setdefault(loss.place, self._driver.clock())
        if loss.state != PlaceState.HUNG:
            logger.error("worker %s is lost: %s", loss.label, loss.cause, extra=self._about(loss.place))
        if loss.state == PlaceState.READY:
            self._hand_back_of(loss.place, loss.worker)
        if self.roster.failed:
            self._fail(loss.cause)
        self._driver.start_workers()

    def _lost_newcomer(self, loss: Loss) -> None:
        about = self._about(loss.place)
        logger.error("worker %s is lost before it had anything to do: %s", loss.label, loss.cause, extra=about)
        text = loss.failure or self._died(loss.place, "while loading", loss.why)
        if loss.state == PlaceState.READY:
            text = self._died(loss.place, "before it was given anything", loss.why)
        self._forget(loss.place, text)
        self._driver.start_workers()

    def _lost_guest(self, loss: Loss) -> None:
        """Take note of the end of a worker that had come by itself: its place goes with it."""
        if loss.state == PlaceState.READY:
            logger.error("worker %s is lost: %s", loss.label, loss.cause, extra=self._about(loss.place))
            self._hand_back_of(loss.place, loss.worker)
        elif loss.state != PlaceState.HUNG:
            logger.error("worker %s could not join: %s", loss.label, loss.cause, extra=self._about(loss.place))
        self._forget(loss.place, loss.cause)

    def _has_left(self, loss: Loss) -> None:
        """Take note of the end of a worker that was to go; perhaps it has died before its time."""
        about = self._about(loss.place)
        if loss.state == PlaceState.DRAINING and not self.turnover.is_ending(loss.place):
            logger.error("worker %s is lost before it had finished: %s", loss.label, loss.why, extra=about)
            self._hand_back(loss.place, loss.worker.has_unread_batch)
        else:
            logger.info("worker %s has gone", loss.label, extra=about)
        self._forget(loss.place, loss.why)
        self._driver.start_workers()

    def _died(self, place: int, when: str, why: str) -> str:
        return f"worker {self.roster.places[place].index} of stage {self.name} died {when}: {why}"

    def _hand_back(self, place: int, has_unread_batch: bool) -> bool:
        unread = self._take_unread(place, has_unread_batch)
        if unread is None:
            self._driver.worker_left(self.stage, place)
        elif self._driver.worker_lost(self.stage, place, unread):
            text = f"stage %s: two workers were lost with the same {self._unit}, which fails and is not tried again"
            logger.error(text, self.name, extra={**self._about(), "code": "request_crashed_worker"})
            self._forgive(place)
            return True
        return False

    def _hand_back_of(self, place: int, worker: Worker) -> None:
        """Have others run what a lost worker owed; no request is to blame for a silent machine."""
        if worker.fell_silent and self._is_first_silence(place):
            self._take_unread(place)
            self._driver.worker_left(self.stage, place)
        else:
            self._hand_back(place, worker.has_unread_batch)

    def _forget(self, place: int, cause: str) -> None:
        self._take_unread(place)
        for by_place in (self._began, self._failure, self._lost_at):
            by_place.pop(place, None)
        self.turnover.gone(place, cause)

    def _forgive(self, place: int, deaths: int = 2) -> None:
        """Take back deaths that were not the stage's fault; those of guests are not counted."""
        if not self.roster.places[place].is_guest:
            self.roster.forgive(self._driver.clock(), deaths)

    def _is_first_silence(self, place: int) -> bool:
        """Report whether none of the requests of a worker has met with a silent machine before.

        Then it is not to blame. A second silence with the same request may be its fault.
        """
        if not self._launch.is_idempotent:
            return False
        had = list(self._crew.at_work.get(place, ()))
        before = [request for request in self._fell_silent_with if request.state != DONE]
        self._fell_silent_with = [*before, *[request for request in had if request not in before]]
        return not any(request in before for request in had)

    def _fail(self, cause: str) -> None:
        last = cause.rpartition("\n")[2]  # of a traceback: what was raised
        text = f"stage {self.name} has failed: {MOST_DEATHS} workers in a row died without finishing a batch"
        logger.critical("%s; the last one: %s", text, last, extra={**self._about(), "code": "stage_failed"})
        error = Unavailable(f"stage {self.name} has failed", code="stage_failed", retry_after_s=FAILED_FOR_S)
        self.turnover.fail(error)
        self._driver.stage_failed(error)

    # -- the log

    def _about(self, place: int | None = None) -> dict[str, str]:
        about = {"model": self._driver.stats.name, "stage": self.name}
        if place is not None:
            stats = self._driver.stats.stages[self.stage]
            about["worker"] = stats.worker_name(place)
            if (hello := stats.elsewhere.get(place)) is not None:
                about |= hello.place_in_cluster
        return about

    def _label(self, place: int) -> str:
        where = self._workers[place].where
        return self._about(place)["worker"] + (f" ({where})" if where else "")


def new_roster(workers: int) -> Roster:
    return Roster(workers, random.random)
