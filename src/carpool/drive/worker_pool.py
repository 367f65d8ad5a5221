"""The workers of one stage: started, given batches, listened to and replaced.

Whether a worker is a process (`process.py`), a thread or a task (`local_workers.py`), or has come
by itself from somewhere else (`joined.py`), makes hardly any difference here: frames go out and
come in. The roster (`core/roster.py`) decides when to replace a worker and when to give up; the
pipeline decides what goes into a batch.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar

import msgspec

from carpool import faults
from carpool.call.results import Trouble
from carpool.core.batch import Batch
from carpool.core.reply import Reply
from carpool.core.roster import MOST_DEATHS, PlaceState, Roster, Starts
from carpool.drive.aio import Driver
from carpool.drive.joined import JoinedWorker
from carpool.drive.launch import Launch
from carpool.drive.local_workers import LoopWorker, ThreadWorker
from carpool.drive.output import LineSink, guarded
from carpool.drive.process import WorkerProcess
from carpool.drive.trouble import FAILED_FOR_S
from carpool.drive.turnover import Turnover
from carpool.errors import ModelError, StartupError, Unavailable
from carpool.logger import logger
from carpool.request import DONE, Request
from carpool.wire import outcome
from carpool.wire.arrays import Block
from carpool.wire.frame import Frame, FrameError, FrameKind, in_pieces
from carpool.wire.handshake import Hello
from carpool.wire.outcome import Outcome
from carpool.wire.payload import LARGE, OBJECT, Payload
from carpool.wire.response import unpack_response
from carpool.wire.scalars import Scalars
from carpool.worker.setup import LEAVING, NOWHERE

T = TypeVar("T")

_OUTCOMES = frozenset(Outcome)
_NO_ERROR = frozenset({Outcome.OK, Outcome.RESPONSE})


class Worker(Protocol):
    """One worker as its pool sees it.

    Attributes:
        broke_protocol: whether it has sent what it must not send; it is ended for that.
        fell_silent: whether it was lost since nothing was heard of its machine.
        takes_large_ahead: whether large frames may be sent to it while it is busy.
        hello: what it has said of itself, if it has come from somewhere else.
    """

    @property
    def broke_protocol(self) -> bool: ...
    @property
    def fell_silent(self) -> bool: ...
    @property
    def takes_large_ahead(self) -> bool: ...
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


_KINDS: dict[str, Callable[[Launch, int, Callable[[Frame], None], Callable[[str], None], LineSink], Worker]] = {
    "process": WorkerProcess,
    "thread": ThreadWorker,
    "loop": LoopWorker,
}


class Work(Protocol):
    """What a worker is at work on: a batch, or a running set.

    Attributes:
        given_up: why the worker is taken to hang; empty if it is not.
    """

    given_up: str

    @property
    def unwanted_since(self) -> float:
        """When the last of its callers went; infinity if one still waits."""


class WorkerPool:
    """The executor of a stage that runs in workers.

    Args:
        stage: the position of the stage in the pipeline.
        launch: how to start its workers.
        driver: takes readiness, losses and results.
        roster: decides which workers are to be started, and when.
        starts: how many workers of the service may load at a time.
        sink: where the workers' output goes.

    Attributes:
        stage: the position of the stage in the pipeline.
        name: the stage's.
        roster: the stage's.
        turnover: has workers of the stage come and go.
        count_calls: called with the place of a worker, how many requests it has answered, the size
            of the batch if these were all of it, else 0, and the seconds that it took; None if
            nothing wants to know.
    """

    def __init__(
        self, stage: int, launch: Launch, driver: Driver, roster: Roster, starts: Starts, sink: LineSink
    ) -> None:
        self.stage = stage
        self.name = launch.setup.stage
        self.roster = roster
        self._starts = starts
        self._launch = launch
        self._driver = driver
        self._batcher = driver.pipeline.batchers[stage]
        self._sink = guarded(sink)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # for the next start that is due

        # by place: the worker, when it was started, and why it could not load
        self._workers: dict[int, Worker] = {}
        self._began: dict[int, float] = {}
        self._failure: dict[int, outcome.FailureReport] = {}
        self._lost_at: dict[int, float] = {}  # when the last one that had been ready was lost
        self.turnover = Turnover(stage, roster, driver, self._workers, driver.start_workers, self._about)
        self.count_calls: Callable[[int, int, int, float], None] | None = None

        # by place: what the worker has not been sent yet: pieces of its batch, then the batch
        # ahead, whole or in pieces
        self._unsent: dict[int, list[Frame]] = {}

        # requests that were with a worker which fell silent
        self._fell_silent_with: list[Request] = []
        self._after_dispatch = faults.at("parent.after_dispatch")
        self._before_reply = faults.at("parent.before_reply")

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are alive."""
        return list(self.pids_by_place.values())

    @property
    def pids_by_place(self) -> dict[int, int]:
        """The process id of each worker that is alive and has a process."""
        return {place: worker.pid for place, worker in list(self._workers.items()) if worker.pid is not None}

    def start(self) -> None:
        """Start the workers that are due, as far as there is room, and the others in time."""
        now = self._driver.clock()
        for place in self.roster.due(now, self._starts.room):
            self._start(place)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self.roster.next_start()
        if now < when < inf:  # one that is due already is started as soon as another has loaded
            self._timer = self._loop.call_later(when - now, self.start)

    def run(self, batch: Batch) -> None:
        """Send a batch to its worker."""
        requests = batch.requests
        frame = Frame(
            FrameKind.BATCH,
            batch.id,
            batch.ids,
            bytes([r.format for r in requests]),
            bytes([r.accept for r in requests]),
            [r.deadline for r in requests],
            [r.item for r in requests],  # type: ignore[misc]
            batch.started,
        )
        if batch.place in self._unsent:
            self._unsent[batch.place] += in_pieces(frame)
            return
        worker = self._workers[batch.place]
        if batch.ahead and not worker.takes_large_ahead and sum([r.nbytes for r in requests]) >= LARGE:
            self._unsent[batch.place] = in_pieces(frame)
            return
        try:
            worker.send(frame)
        except FrameError:  # it is too large for one message, and nothing has been sent
            self._unsent[batch.place] = in_pieces(frame)
            if self._batcher.in_flight.get(batch.place) is batch:
                self._send_next(batch.place)  # else it lies ahead, and goes once its turn comes
        if self._after_dispatch is not None:
            self._after_dispatch()

    def _send_next(self, place: int) -> None:
        """Send the next piece of a batch that is too large for one message.

        Each piece is answered before the next one goes. An item that is too large by itself fails;
        the others of its batch do not, nor does the worker.
        """
        pieces = self._unsent[place]
        while self._unsent.get(place) is pieces:
            piece = pieces.pop(0)
            if not pieces:
                del self._unsent[place]
            try:
                self._workers[place].send(piece)
            except FrameError as error:
                n = len(piece.ids)
                text = f"the item cannot be sent to stage {self.name}: {error}"
                errors: dict[int, Exception] = {i: ModelError(text, code="too_large") for i in range(n)}
                self._driver.completed(Reply(self.stage, place, piece.batch_id, piece.ids, [None] * n, errors))
            else:
                self._driver.call_started(self.stage, place, piece.batch_id)
                return

    def kill(self, place: int) -> None:
        """Give up a worker that hangs.

        Its batch counts as crashed from now on; its successor starts when it is gone.
        """
        worker = self._workers.get(place)
        if worker is None:
            return
        if worker.catch_up():  # this process is late itself: the worker had sent something that was not read
            self._driver.spare(self.stage, place)
            return
        work = self._work_of(place)
        if work is None:
            return  # it has just been lost
        why = work.given_up
        slow = self._batcher.patience.learns and work.unwanted_since < inf  # no limit was set, and no caller waits
        logger.error("worker %s hangs and is given up: %s", self._label(place), why, extra=self._about(place))
        if not self.roster.places[place].is_guest:
            self._lost_at.setdefault(place, self._driver.clock())
        self.roster.lost(self._driver.clock(), place, gone=False)
        worker.close_input()  # what it has not read by now it never begins: it may wake up to tell where it hangs
        has_unread_batch = worker.has_unread_batch
        worker.give_up(why, partial(self._heard_too_late, place))
        if not self._hand_back(place, has_unread_batch) and slow:
            self._forgive(place, deaths=1)  # the stage is not to blame
        if self.roster.failed:
            self._fail(why)

    def why_not_admitted(self) -> str:
        """Return why no worker can join now; empty if one can."""
        return f"stage {self.name} is closing, or has failed" if self.roster.stopping or self.roster.failed else ""

    def admit(self, sock: socket.socket, hello: Hello) -> None:
        """Let a worker join that has come by itself and proven itself.

        Args:
            sock: the connection to it.
            hello: what it has said of itself.
        """
        place = self.roster.admit()
        self._began[place] = self._driver.clock()
        on_frame, on_lost = partial(self._heard, place), partial(self._lost, place)
        worker = JoinedWorker(sock, hello, on_frame, on_lost, trusts_resets=self._launch.is_idempotent)
        self._workers[place] = worker
        logger.info("worker %s joins", self._label(place), extra=self._about(place))
        setup = msgspec.structs.replace(self._launch.setup, place=place, model=b"", program=NOWHERE)
        packed, now = msgspec.msgpack.encode(setup), self._driver.clock()
        worker.send(Frame(FrameKind.SETUP, ids=[0], formats=b"\0", payloads=[packed], busy_s=now))

    def lend(self, place: int, recall: Callable[[], None]) -> tuple[WorkerProcess, socket.socket] | None:
        """Lend the socket of a worker that has nothing to do; see `WorkerProcess.lend`.

        Returns:
            The worker and its socket; None if it cannot be lent.
        """
        worker = self._workers.get(place)
        if not isinstance(worker, WorkerProcess) or self._after_dispatch is not None or self._before_reply is not None:
            return None
        sock = worker.lend(recall)
        return None if sock is None else (worker, sock)

    def _work_of(self, place: int) -> Work | None:
        """Return what a worker is at work on; None if it is idle, or gone."""
        return self._batcher.in_flight.get(place)

    def kill_all(self) -> None:
        """End every worker now."""
        self.roster.stopping = True
        for worker in self._workers.values():
            worker.kill()

    def dismiss(self) -> None:
        """Let every worker end by itself once it has finished: the loop stands still."""
        self.roster.stopping = True
        for worker in self._workers.values():
            worker.close_input()

    def abandon(self) -> None:
        """End every worker without the loop, which ends or has ended."""
        self.roster.stopping = True
        for worker in self._workers.values():
            worker.abandon()
        self._workers.clear()

    def drained(self, place: int) -> None:
        """End a worker that was to go and has nothing left to do."""
        self.turnover.drained(place)

    async def stop(self, grace_s: float) -> None:
        """End all workers; those that take longer than `grace_s` for their teardown are killed."""
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

    def _start(self, place: int) -> None:
        self._began[place] = self._driver.clock()
        on_frame, on_lost = partial(self._heard, place), partial(self._lost, place)
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

    # -- what the workers send

    def _heard(self, place: int, frame: Frame) -> None:
        if frame.kind == FrameKind.REPLY:
            self._replied(place, frame)
        elif frame.kind == FrameKind.CALL:
            self._batch_of(place, frame)
            self._driver.call_started(self.stage, place, frame.batch_id)
        elif not frame.payloads:
            raise FrameError(f"a {frame.kind.name} frame without a payload")
        elif frame.kind == FrameKind.STATE:
            self._changed_state(place, frame)
        elif frame.kind == FrameKind.TROUBLE:
            self._troubled(place, frame)
        elif frame.kind == FrameKind.FAILED and not self.roster.places[place].is_serving:
            self._failure[place] = outcome.read_report(frame.payloads[0])
        else:
            raise FrameError(f"it must not send {frame.kind.name} now")

    def _batch_of(self, place: int, frame: Frame) -> Batch:
        """Return the batch of a frame. Raises FrameError if the worker has another one, or none."""
        batch = self._batcher.in_flight.get(place)
        if batch is None or batch.id != frame.batch_id:
            raise FrameError(f"{frame.kind.name} for batch {frame.batch_id}, which it does not have")
        return batch

    def _replied(self, place: int, frame: Frame) -> None:
        """Pass a reply on to the driver, once it has been checked."""
        batch = self._batch_of(place, frame)
        if frame.ids == batch.ids:
            frame.ids = batch.ids  # compared once more later, and quicker with itself
        else:
            _check_ids(frame.ids, batch.ids)
        if not (0.0 <= frame.busy_s < inf and 0.0 <= frame.waited_s < inf):
            raise FrameError(f"a reply after {frame.busy_s} s of work and {frame.waited_s} s of waiting")
        if type(frame.payloads) is Block:
            frame.payloads = frame.payloads.separate()
        errors: dict[int, Exception] | None = None
        if frame.no_memory:
            errors = self._not_received(frame)
        elif frame.formats.count(Outcome.OK) != len(frame.formats):
            errors = self._errors_of(frame, batch)
        elif type(frame.payloads) is Scalars and self._is_last:
            _check_takers(frame.ids, batch)
        if self._before_reply is not None:
            self._before_reply()
        self.roster.finished_batch()
        busy_s, waited_s = frame.busy_s, frame.waited_s
        if self.count_calls is not None:
            n = len(frame.ids)
            self.count_calls(place, n, batch.size if n == batch.n else 0, busy_s)
        reply = Reply(self.stage, place, frame.batch_id, frame.ids, frame.payloads, errors, busy_s, waited_s)
        self._driver.completed(reply)
        if place in self._unsent and self._is_waiting_for_more(place):
            self._send_next(place)

    def _not_received(self, frame: Frame) -> dict[int, Exception]:
        """Return the errors of a reply whose payloads there was no memory for."""
        logger.error(
            "stage %s: no memory to receive the results of %d requests", self.name, len(frame.ids), extra=self._about()
        )
        text = f"there was no memory to receive the result from stage {self.name}"
        frame.payloads = [b""] * len(frame.ids)
        return {i: Unavailable(text, code="out_of_memory") for i in range(len(frame.ids))}

    def _errors_of(self, frame: Frame, batch: Batch) -> dict[int, Exception] | None:
        """Return the errors in a reply, and unpack its responses. Raises FrameError."""
        if max(frame.formats) not in _OUTCOMES:
            raise FrameError(f"a reply with outcome {max(frame.formats)}")
        if type(frame.payloads) is Scalars:
            raise FrameError("a failure or a response that is reported as a scalar")
        if Outcome.RESPONSE in frame.formats:
            self._unpack_responses(frame, batch)
        failed = [i for i, what in enumerate(frame.formats) if what not in _NO_ERROR]
        causes, frame.causes = frame.causes or {}, None  # the worker keeps its reply until it has the next one
        errors: dict[int, Exception] = {
            i: outcome.unpack_error(frame.formats[i], frame.payloads[i], causes.get(i)) for i in failed
        }
        return errors or None

    def _is_waiting_for_more(self, place: int) -> bool:
        """Report whether the worker has answered all it was sent, but not all of its batch."""
        batch = self._batcher.in_flight.get(place)
        if batch is None:
            return False
        return sum([len(piece.ids) for piece in self._unsent[place] if piece.batch_id == batch.id]) == len(batch.ids)

    @property
    def _is_last(self) -> bool:
        return self.stage == len(self._driver.pipeline.batchers) - 1

    def _unpack_responses(self, frame: Frame, batch: Batch) -> None:
        """Put the responses of a model's own in place of their payloads. Raises FrameError."""
        if not self._is_last:
            raise FrameError("a response from a stage that is not the last")
        requests = dict(zip(batch.ids, batch.requests, strict=True))
        answers: list[Any] = list(frame.payloads)
        for i, what in enumerate(frame.formats):
            if what == Outcome.RESPONSE:
                if requests[frame.ids[i]].accept == OBJECT:
                    raise FrameError("a response to a caller that speaks no HTTP")
                try:
                    answers[i] = unpack_response(answers[i])
                except ValueError as error:
                    raise FrameError(str(error)) from error
        frame.payloads = answers

    def _troubled(self, place: int, frame: Frame) -> None:
        """Learn from what happened during a batch, or during the warm-up, besides the results."""
        trouble = decoded(frame.payloads[0], list[Trouble])
        try:
            if self.roster.places[place].is_serving:
                batch = self._batch_of(place, frame)
                if len(batch) != batch.n:  # of a piece of it, so its positions are not those in the batch
                    trouble = [msgspec.structs.replace(each, ran_out=[], fitted=[]) for each in trouble]
                self._driver.troubled(self.stage, place, frame.batch_id, trouble)
            elif all(n == size for n, size in self._launch.warm_up.items()):  # else the first batches will show it
                self._driver.troubled_in_warm_up(self.stage, trouble)
        except ValueError as error:
            raise FrameError(str(error)) from error

    def _changed_state(self, place: int, frame: Frame) -> None:
        """Take note of a new state of a worker; one that is ready takes batches from now on."""
        record = self.roster.places[place]
        if record.is_guest and record.state == PlaceState.READY and frame.payloads[0] == LEAVING:
            self.turnover.retire(place)
            return
        try:
            state = PlaceState(bytes(frame.payloads[0]).decode())  # type: ignore[arg-type]
            self.roster.moved(place, state)
        except (ValueError, TypeError) as error:
            raise FrameError(f"it reports the state {frame.payloads[0]!r:.80}: {error}") from error
        if state == PlaceState.READY:
            self._learn(frame)
            if (hello := self._workers[place].hello) is not None:
                self._driver.stats.stages[self.stage].elsewhere[place] = hello
            self._log_readiness(place)
            if not self.turnover.became_ready(place):
                self._driver.worker_ready(self.stage, place)
            self._driver.start_workers()

    def _log_readiness(self, place: int) -> None:
        """Log that a worker is ready, the first one of its place or the successor of a lost one."""
        now, lost_at = self._driver.clock(), self._lost_at.pop(place, None)
        if lost_at is None:
            text, since = "worker %s is ready after %.2f s", self._began[place]
        else:
            text, since = "worker %s is back after %.2f s", lost_at
        logger.info(text, self._label(place), now - since, extra=self._about(place))

    def _learn(self, frame: Frame) -> None:
        """Pass the timings of the warm-up on to the stage's policy."""
        for payload in frame.payloads[1:2]:
            for n, busy_s in decoded(payload, list[tuple[int, float]]):
                if n not in self._launch.warm_up or not 0.0 <= busy_s < inf:
                    raise FrameError(f"a warm-up of {n} items in {busy_s} s")
                self._driver.trained(self.stage, n, self._launch.warm_up.get(n, n), busy_s)
        shapes = self._launch.warm_up_shapes
        for payload in frame.payloads[2:]:
            for i, busy_s in decoded(payload, list[tuple[int, float]]):
                if not 0 <= i < len(shapes) or not 0.0 <= busy_s < inf:
                    raise FrameError(f"a warm-up of shape {i} in {busy_s} s")
                self._driver.trained_at(self.stage, shapes[i].n, shapes[i].length, busy_s)

    def _heard_too_late(self, place: int, frame: Frame) -> None:
        """Count late results of a worker that was given up: others have its requests by now."""
        if frame.kind == FrameKind.REPLY:
            self._batcher.late_results += len(frame.ids)
            self._workers[place].kill()  # it has come back, so it need not write down where it hung

    def _lost(self, place: int, why: str) -> None:
        """Take note that a worker is gone; where it ran is forgotten once that has been logged."""
        self._do_without(place, why)
        self._driver.stats.stages[self.stage].elsewhere.pop(place, None)

    def _do_without(self, place: int, why: str) -> None:
        """Do what follows from the loss of a worker."""
        label, record, stats = self._label(place), self.roster.places[place], self._driver.stats.stages[self.stage]
        worker, state = self._workers.pop(place), record.state
        if worker.broke_protocol:
            stats.protocol_errors += 1
        failure = self._failure.pop(place, None)
        cause = why if failure is None else f"{failure.message}\n{failure.traceback}".rstrip()
        if state == PlaceState.HUNG:
            self.roster.is_gone(place)  # all else has been done when it was given up
        else:
            self.roster.lost(self._driver.clock(), place)
        if self.roster.stopping:
            logger.info("worker %s has stopped", label, extra=self._about(place))
            return
        text = cause if failure else f"worker {record.index} of stage {self.name} died while loading: {why}"
        if record.is_leaving:
            self._has_left(place, label, state, why, worker.has_unread_batch)
            return
        if record.is_guest:
            self._lost_guest(place, label, state, cause, worker)
            return
        if record.is_new:
            if state == PlaceState.READY:
                text = f"worker {record.index} of stage {self.name} died before it was given anything: {why}"
            logger.error("worker %s is lost before it had anything to do: %s", label, cause, extra=self._about(place))
            self._forget(place, text)
            self._driver.start_workers()
            return
        if not (record.was_ready or record.is_retried):
            self._driver.start_failed(StartupError(text))
            return
        self._lost_at.setdefault(place, self._driver.clock())
        if state != PlaceState.HUNG:
            logger.error("worker %s is lost: %s", label, cause, extra=self._about(place))
        if state == PlaceState.READY:
            self._hand_back_of(place, worker)
        if self.roster.failed:
            self._fail(cause)
        self._driver.start_workers()

    def _lost_guest(self, place: int, label: str, state: PlaceState, cause: str, worker: Worker) -> None:
        """Take note of the end of a worker that had come by itself: its place goes with it."""
        if state == PlaceState.READY:
            logger.error("worker %s is lost: %s", label, cause, extra=self._about(place))
            self._hand_back_of(place, worker)
        elif state != PlaceState.HUNG:
            logger.error("worker %s could not join: %s", label, cause, extra=self._about(place))
        self._forget(place, cause)

    def _hand_back_of(self, place: int, worker: Worker) -> None:
        """Have what a lost worker owed run by others; a silent machine is no fault of theirs."""
        if worker.fell_silent and self._is_first_silence(place):
            self._hand_back_unblamed(place)
        else:
            self._hand_back(place, worker.has_unread_batch)

    def _has_left(self, place: int, label: str, state: PlaceState, why: str, has_unread_batch: bool) -> None:
        """Take note of the end of a worker that was to go; perhaps it has died before its time."""
        if state == PlaceState.DRAINING and not self.turnover.is_ending(place):
            logger.error("worker %s is lost before it had finished: %s", label, why, extra=self._about(place))
            self._hand_back(place, has_unread_batch)
        else:
            logger.info("worker %s has gone", label, extra=self._about(place))
        self._forget(place, why)
        self._driver.start_workers()

    def _forget(self, place: int, cause: str) -> None:
        """Remove the place of a worker that has no successor there."""
        for by_place in (self._began, self._failure, self._lost_at, self._unsent):
            by_place.pop(place, None)
        self.turnover.gone(place, cause)

    def _hand_back(self, place: int, has_unread_batch: bool) -> bool:
        """Have what a lost worker owed run by others, or fail.

        Returns:
            Whether a request is to blame for the loss.
        """
        unsent = {id for piece in self._unsent.pop(place, ()) for id in piece.ids}
        if has_unread_batch and place not in self._batcher.ahead:  # else the one ahead is what is unread
            self._driver.worker_left(self.stage, place)
        elif self._driver.worker_lost(self.stage, place, unsent):
            text = "stage %s: two workers were lost with the same request, which fails and is not tried again"
            logger.error(text, self.name, extra={**self._about(), "code": "request_crashed_worker"})
            self._forgive(place)
            return True
        return False

    def _forgive(self, place: int, deaths: int = 2) -> None:
        """Take back deaths that were not the stage's fault; those of guests are not counted."""
        if not self.roster.places[place].is_guest:
            self.roster.forgive(self._driver.clock(), deaths)

    def _hand_back_unblamed(self, place: int) -> None:
        """Have what a worker had that has gone run by others; no request is to blame for it."""
        self._unsent.pop(place, None)
        self._driver.worker_left(self.stage, place)

    def _is_first_silence(self, place: int) -> bool:
        """Report whether none of the requests of a worker has met with a silent machine before.

        Then it is not to blame, and may run again like any other. A machine that falls silent once
        more with the same request may have been brought down by it.
        """
        if not self._launch.is_idempotent:
            return False
        had = self._requests_of(place)
        before = [request for request in self._fell_silent_with if request.state != DONE]
        self._fell_silent_with = [*before, *[request for request in had if request not in before]]
        return not any(request in before for request in had)

    def _requests_of(self, place: int) -> list[Request]:
        """Return the requests that a worker is at work on."""
        batch = self._batcher.in_flight.get(place)
        return [] if batch is None else list(batch.requests)

    def _fail(self, cause: str) -> None:
        """Fail the stage after too many deaths: no worker is started any more."""
        last = cause.rpartition("\n")[2]  # of a traceback: what was raised
        text = f"stage {self.name} has failed: {MOST_DEATHS} workers in a row died without finishing a batch"
        logger.critical("%s; the last one: %s", text, last, extra={**self._about(), "code": "stage_failed"})
        error = Unavailable(f"stage {self.name} has failed", code="stage_failed", retry_after_s=FAILED_FOR_S)
        self.turnover.fail(error)
        self._driver.stage_failed(error)

    def _about(self, place: int | None = None) -> dict[str, str]:
        """Return the fields of a log line about the stage, or about one of its workers."""
        about = {"model": self._driver.stats.name, "stage": self.name}
        if place is not None:
            stats = self._driver.stats.stages[self.stage]
            about["worker"] = stats.worker_name(place)
            if (hello := stats.elsewhere.get(place)) is not None:
                about |= hello.place_in_cluster
        return about

    def _label(self, place: int) -> str:
        """Return a worker's name for the log."""
        where = self._workers[place].where
        return self._about(place)["worker"] + (f" ({where})" if where else "")


def _check_ids(ids: Sequence[int], owed: Sequence[int]) -> None:
    """Raise FrameError if a reply is for other requests than those that are owed."""
    if not ids or len(set(ids)) < len(ids):
        raise FrameError("a reply that answers nothing, or a request twice")
    foreign = set(ids).difference(owed)
    if foreign:
        raise FrameError(f"a reply to request {min(foreign)}, which is not in the batch")


def _check_takers(ids: Sequence[int], batch: Batch) -> None:
    """Raise FrameError if a scalar is for a caller that takes bytes."""
    if max([request.accept for request in batch.requests]) == OBJECT:  # the least of all formats
        return
    accepts = {id: request.accept for id, request in zip(batch.ids, batch.requests, strict=True)}
    if any(accepts[id] != OBJECT for id in ids):
        raise FrameError("a scalar for a caller that takes bytes")


def decoded(payload: Payload, kind: type[T]) -> T:
    """Return what a worker has packed. Raises FrameError."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as error:
        raise FrameError(f"it cannot be read: {error}") from error


def new_roster(workers: int) -> Roster:
    """Return a roster whose pauses between starts are spread at random."""
    return Roster(workers, random.random)
