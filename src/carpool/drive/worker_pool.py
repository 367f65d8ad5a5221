"""The workers of one stage: started, told what to run, listened to, replaced.

Whether a worker is a process (`process.py`), a thread or a task (`inside.py`) makes no difference here: frames go out
and come in. When to replace one and when to give up is the roster's decision (`core/roster.py`); what goes into a batch
is the pipeline's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from carpool import faults
from carpool.call.retry import Trouble
from carpool.core.batcher import Batch
from carpool.core.reply import Reply
from carpool.core.roster import MOST_DEATHS, PlaceState, Roster, Starts
from carpool.drive.inside import LoopWorker, ThreadWorker
from carpool.drive.launch import Launch
from carpool.drive.output import LineSink, guarded
from carpool.drive.process import WorkerProcess
from carpool.drive.trouble import FAILED_FOR_S
from carpool.errors import ModelError, StartupError, Unavailable
from carpool.logger import logger
from carpool.wire import outcome
from carpool.wire.arrays import Block
from carpool.wire.frame import Frame, FrameError, FrameKind, in_pieces
from carpool.wire.outcome import Outcome
from carpool.wire.payload import OBJECT, Payload
from carpool.wire.response import unpack_response
from carpool.wire.scalars import Scalars

if TYPE_CHECKING:
    from carpool.drive.aio import Driver


T = TypeVar("T")

_OUTCOMES = frozenset(Outcome)
_GOOD = frozenset({Outcome.OK, Outcome.RESPONSE})


class Worker(Protocol):
    """One worker as its stage sees it."""

    broke_protocol: bool
    """Whether it has sent what it must not send; it is ended for that."""

    @property
    def pid(self) -> int | None:
        """Its process, if it has one of its own."""

    @property
    def untouched(self) -> bool:
        """Whether the model cannot have seen the batch that the worker was given last."""

    def send(self, frame: Frame) -> None:
        """Give it a frame."""

    def close_input(self) -> None:
        """Tell it that nothing more will come: it finishes, tears down and ends."""

    def catch_up(self) -> bool:
        """Hear what it has sent already; whether there was anything."""

    def give_up(self, why: str, heard: Callable[[Frame], None]) -> None:
        """It hangs: end it soon. What it still says goes to `heard`."""

    def kill(self, why: str = "") -> None:
        """End it at once, or have nothing more to do with it where it cannot be ended."""

    def abandon(self) -> None:
        """The loop has gone or is about to go: end it and let go of everything without the loop's help."""

    async def ended(self) -> None:
        """Wait until it is gone."""


_KINDS: dict[str, Callable[[Launch, int, Callable[[Frame], None], Callable[[str], None], LineSink], Worker]] = {
    "process": WorkerProcess,
    "thread": ThreadWorker,
    "loop": LoopWorker,
}


class WorkerPool:
    """The executor of a stage that runs in workers.

    Args:
        stage: the position of the stage in the pipeline.
        launch: how to start its workers.
        driver: told of readiness, losses and results.
        roster: who is to be started, and when.
        starts: how many workers of the service may load at a time.
        sink: where the workers' output goes.
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
        self._sink = guarded(sink)
        self._workers: dict[int, Worker] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._started_once: set[int] = set()
        self._failure: dict[int, outcome.FailureReport] = {}
        self._began: dict[int, float] = {}
        # by worker: pieces of its batch, and then the one ahead as a whole or in pieces, that it has not been sent yet
        self._rest: dict[int, list[Frame]] = {}
        self._after_dispatch = faults.at("parent.after_dispatch")
        self._before_reply = faults.at("parent.before_reply")

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are alive."""
        return [worker.pid for worker in self._workers.values() if worker.pid is not None]

    def start(self) -> None:
        """Start every worker that is due, now and whenever the roster says, as far as there is room."""
        now = self._driver.clock()
        for place in self.roster.due(now, self._starts.room):
            self._start(place)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self.roster.next_start()
        if now < when < inf:  # who is due already is started as soon as another has loaded
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
        )
        if batch.place in self._rest:
            self._rest[batch.place] += in_pieces(frame)
            return
        try:
            self._workers[batch.place].send(frame)
        except FrameError:  # it is too large for one message, and nothing has been sent
            self._rest[batch.place] = in_pieces(frame)
            if self._driver.pipeline.batchers[self.stage].in_flight.get(batch.place) is batch:
                self._send_next(batch.place)  # else it lies ahead, and goes once its turn comes
        if self._after_dispatch is not None:
            self._after_dispatch()

    def _send_next(self, place: int) -> None:
        """The next piece of a batch that is too large for one message: it is answered before the one after it goes.

        An item that is too large by itself fails; its mates do not, and nor does the worker.
        """
        pieces = self._rest[place]
        while self._rest.get(place) is pieces:
            piece = pieces.pop(0)
            if not pieces:
                del self._rest[place]
            try:
                self._workers[place].send(piece)
            except FrameError as error:
                n = len(piece.ids)
                text = f"the item cannot be sent to stage {self.name}: {error}"
                errors: dict[int, Exception] = {i: ModelError(text, code="too_large") for i in range(n)}
                self._driver.completed(Reply(self.stage, place, piece.batch, piece.ids, [None] * n, errors))
            else:
                self._driver.call_started(self.stage, place, piece.batch)
                return

    def kill(self, place: int) -> None:
        """Give up a worker that hangs: its batch has crashed as of now; its successor starts when it is gone."""
        worker = self._workers.get(place)
        if worker is None:
            return
        if worker.catch_up():  # we are late ourselves: it has said something that nobody had read
            self._driver.spare(self.stage, place)
            return
        batcher = self._driver.pipeline.batchers[self.stage]
        batch = batcher.in_flight.get(place)
        if batch is None:
            return  # it has just been lost
        why = batch.given_up
        slow = batcher.patience.learns and batch.unwanted_since < inf  # nobody has set a limit, and nobody waits
        logger.error("worker %s hangs and is given up: %s", self._who(place), why)
        self.roster.lost(self._driver.clock(), place, gone=False)
        untouched = worker.untouched
        worker.give_up(why, partial(self._heard_too_late, place))
        if not self._hand_back(place, untouched) and slow:
            self.roster.forgive(self._driver.clock(), deaths=1)  # that is no fault of the stage
        if self.roster.failed:
            self._fail(why)

    def kill_all(self) -> None:
        """End every worker now."""
        self.roster.stopping = True
        for worker in self._workers.values():
            worker.kill()

    def dismiss(self) -> None:
        """The loop stands still, perhaps for good: every worker finishes and ends by itself."""
        self.roster.stopping = True
        for worker in self._workers.values():
            worker.close_input()

    def abandon(self) -> None:
        """The loop has gone or is about to go: end every worker without its help."""
        self.roster.stopping = True
        for worker in self._workers.values():
            worker.abandon()
        self._workers.clear()

    async def stop(self, grace_s: float) -> None:
        """End all workers: they may tear down for `grace_s`, then they are killed."""
        self.roster.stopping = True
        if self._timer is not None:
            self._timer.cancel()
        processes = list(self._workers.values())
        for place, worker in self._workers.items():
            if self.roster.places[place].state == PlaceState.READY:
                worker.close_input()
            else:
                worker.kill()  # it is loading its model, and has nothing to finish
        ends = [asyncio.ensure_future(worker.ended()) for worker in processes]
        if not ends:
            return
        _, late = await asyncio.wait(ends, timeout=grace_s)
        for worker in processes:
            worker.kill()  # the late ones, and what the others left behind
        if late:
            await asyncio.wait(late)

    def _start(self, place: int) -> None:
        self._began[place] = self._driver.clock()
        heard, lost = partial(self._heard, place), partial(self._lost, place)
        try:
            self._workers[place] = _KINDS[self._launch.run_in](self._launch, place, heard, lost, self._sink)
        except OSError as error:  # no process, memory or file descriptor to be had: tried again later
            logger.error("worker %s/%d cannot be started: %s", self.name, place, error)
            self.roster.not_started(self._driver.clock(), place)
            if place not in self._started_once:
                text = f"worker {place} of stage {self.name} cannot be started: {error}"
                self._driver.start_failed(StartupError(text))
        else:
            logger.info("worker %s starts", self._who(place))

    # -- what the workers say

    def _heard(self, place: int, frame: Frame) -> None:
        if frame.kind == FrameKind.REPLY:
            self._replied(place, frame)
        elif frame.kind == FrameKind.CALL:
            self._batch_of(place, frame)
            self._driver.call_started(self.stage, place, frame.batch)
        elif not frame.payloads:
            raise FrameError(f"a {frame.kind.name} frame says nothing")
        elif frame.kind == FrameKind.STATE:
            self._moved(place, frame)
        elif frame.kind == FrameKind.TROUBLE:
            self._troubled(place, frame)
        elif frame.kind == FrameKind.FAILED and self.roster.places[place].state != PlaceState.READY:
            self._failure[place] = outcome.read_report(frame.payloads[0])
        else:
            raise FrameError(f"it must not send {frame.kind.name} now")

    def _batch_of(self, place: int, frame: Frame) -> Batch:
        """The batch that a frame speaks of. Raises FrameError if it is not the one that the worker has."""
        batch = self._driver.pipeline.batchers[self.stage].in_flight.get(place)
        if batch is None or batch.id != frame.batch:
            raise FrameError(f"{frame.kind.name} for batch {frame.batch}, which it does not have")
        return batch

    def _replied(self, place: int, frame: Frame) -> None:
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
        if frame.dropped:
            logger.error("stage %s: no memory to receive the results of %d requests", self.name, len(frame.ids))
            text = f"there was no memory to receive the result from stage {self.name}"
            errors = {i: Unavailable(text, code="out_of_memory") for i in range(len(frame.ids))}
            frame.payloads = [b""] * len(frame.ids)
        elif frame.formats.count(Outcome.OK) != len(frame.formats):
            if max(frame.formats) not in _OUTCOMES:
                raise FrameError(f"a reply with outcome {max(frame.formats)}")
            if type(frame.payloads) is Scalars:
                raise FrameError("a failure or a response that is told as a scalar")
            if Outcome.RESPONSE in frame.formats:
                self._unpack_responses(frame, batch)
            failed = [i for i, what in enumerate(frame.formats) if what not in _GOOD]
            errors = {i: outcome.unpack_error(frame.formats[i], frame.payloads[i]) for i in failed} or None
            if frame.causes is not None and errors is not None:
                for i, cause in frame.causes.items():
                    errors[i].__cause__ = cause
                frame.causes = None  # the worker keeps its reply until it has the next one
        elif type(frame.payloads) is Scalars and self._is_last:
            _check_takers(frame.ids, batch)
        if self._before_reply is not None:
            self._before_reply()
        self.roster.finished_batch()
        busy_s, waited_s = frame.busy_s, frame.waited_s
        reply = Reply(self.stage, place, frame.batch, frame.ids, frame.payloads, errors, busy_s, waited_s)
        self._driver.completed(reply)
        if place in self._rest and self._is_waiting_for_more(place):
            self._send_next(place)

    def _is_waiting_for_more(self, place: int) -> bool:
        """Whether all that the worker was sent is answered, and there are more pieces of its present batch."""
        batch = self._driver.pipeline.batchers[self.stage].in_flight.get(place)
        if batch is None:
            return False
        return sum([len(piece.ids) for piece in self._rest[place] if piece.batch == batch.id]) == len(batch.ids)

    @property
    def _is_last(self) -> bool:
        return self.stage == len(self._driver.pipeline.batchers) - 1

    def _unpack_responses(self, frame: Frame, batch: Batch) -> None:
        """In place of their payloads. Raises FrameError."""
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
        """What happened to a batch besides its results, or to the warm-up."""
        trouble = _decoded(frame.payloads[0], list[Trouble])
        try:
            if self.roster.places[place].state == PlaceState.READY:
                batch = self._batch_of(place, frame)
                if len(batch) != batch.n:  # of a piece of it: places are none in the batch
                    trouble = [msgspec.structs.replace(each, ran_out=[], fitted=[]) for each in trouble]
                self._driver.troubled(self.stage, place, frame.batch, trouble)
            elif all(n == size for n, size in self._launch.warm_up.items()):  # else the first batches will tell
                self._driver.trained_with_trouble(self.stage, trouble)
        except ValueError as error:
            raise FrameError(str(error)) from error

    def _moved(self, place: int, frame: Frame) -> None:
        try:
            state = PlaceState(bytes(frame.payloads[0]).decode())  # type: ignore[arg-type]
            self.roster.moved(place, state)
        except (ValueError, TypeError) as error:
            raise FrameError(f"it says that it is {frame.payloads[0]!r:.80}: {error}") from error
        if state == PlaceState.READY:
            self._learn(frame)
            logger.info("worker %s is ready after %.2f s", self._who(place), self._driver.clock() - self._began[place])
            self._started_once.add(place)
            self._driver.worker_ready(self.stage, place)
            self._driver.start_workers()

    def _learn(self, frame: Frame) -> None:
        """What the warm-up's timings tell the stage's policy."""
        for payload in frame.payloads[1:]:
            for n, busy_s in _decoded(payload, list[tuple[int, float]]):
                if n not in self._launch.warm_up or not 0.0 <= busy_s < inf:
                    raise FrameError(f"a warm-up of {n} items in {busy_s} s")
                self._driver.trained(self.stage, n, self._launch.warm_up.get(n, n), busy_s)

    def _heard_too_late(self, place: int, frame: Frame) -> None:
        """A worker that was given up says something after all: an answer that nobody waits for from it any more."""
        if frame.kind == FrameKind.REPLY:
            self._driver.pipeline.batchers[self.stage].late_results += len(frame.ids)
            self._workers[place].kill()  # it has come back: no need to know where it hung

    def _lost(self, place: int, why: str) -> None:
        who = self._who(place)
        worker = self._workers.pop(place)
        if worker.broke_protocol:
            self._driver.stats.stages[self.stage].protocol_errors += 1
        state = self.roster.places[place].state
        failure = self._failure.pop(place, None)
        cause = why if failure is None else f"{failure.message}\n{failure.traceback}".rstrip()
        if state == PlaceState.HUNG:
            self.roster.is_gone(place)  # all else has been done when it was given up
        else:
            self.roster.lost(self._driver.clock(), place)
        if self.roster.stopping:
            logger.info("worker %s has stopped", who)
            return
        if place not in self._started_once:
            text = cause if failure else f"worker {place} of stage {self.name} died while loading: {why}"
            self._driver.start_failed(StartupError(text))
            return
        if state != PlaceState.HUNG:
            logger.error("worker %s is lost: %s", who, cause)
        if state == PlaceState.READY:
            self._hand_back(place, worker.untouched)
        if self.roster.failed:
            self._fail(cause)
        self._driver.start_workers()

    def _hand_back(self, place: int, untouched: bool) -> bool:
        """What a lost worker owed is run by others, or fails; whether that was the fault of a request."""
        unsent = {id for piece in self._rest.pop(place, ()) for id in piece.ids}
        if untouched and place not in self._driver.pipeline.batchers[self.stage].ahead:  # else that is what is unread
            self._driver.worker_left(self.stage, place)
        elif self._driver.worker_lost(self.stage, place, unsent):
            logger.error("stage %s: a request has cost two workers; it is refused and not tried again", self.name)
            self.roster.forgive(self._driver.clock())
            return True
        return False

    def _fail(self, cause: str) -> None:
        """Too many deaths: nobody is started any more."""
        last = cause.rpartition("\n")[2]  # of a traceback: what was raised
        text = f"stage {self.name} has failed: {MOST_DEATHS} workers in a row died without finishing a batch"
        logger.critical("%s; the last one: %s", text, last)
        error = Unavailable(f"stage {self.name} has failed", code="stage_failed", retry_after_s=FAILED_FOR_S)
        self._driver.stage_failed(error)

    def _who(self, place: int) -> str:
        """A worker's name in the log."""
        pid = self._workers[place].pid
        return f"{self.name}/{place}" + ("" if pid is None else f" (pid {pid})")


def _check_ids(ids: Sequence[int], owed: Sequence[int]) -> None:
    """Whether a reply that is not for the whole batch is for some of it. Raises FrameError."""
    if not ids or len(set(ids)) < len(ids):
        raise FrameError("a reply that answers nothing, or a request twice")
    foreign = set(ids).difference(owed)
    if foreign:
        raise FrameError(f"a reply to request {min(foreign)}, which is not in the batch")


def _check_takers(ids: Sequence[int], batch: Batch) -> None:
    """Whether those whose results are scalars take objects. Raises FrameError."""
    if max([request.accept for request in batch.requests]) == OBJECT:
        return
    accepts = {id: request.accept for id, request in zip(batch.ids, batch.requests, strict=True)}
    if max([accepts[id] for id in ids]) != OBJECT:
        raise FrameError("a scalar for a caller that takes bytes")


def _decoded(payload: Payload, kind: type[T]) -> T:
    """What a worker has packed. Raises FrameError."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as error:
        raise FrameError(f"it cannot be read: {error}") from error


def new_roster(workers: int) -> Roster:
    """A roster with real dice."""
    return Roster(workers, random.random)
