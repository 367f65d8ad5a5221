"""The two kinds of pools: of stages that answer in batches, and of those that answer in parts,
whose workers step their running sets without being asked.

A reply is checked, and its errors are taken out, before the driver gets it: workers of other
machines may send anything, so each function raises FrameError for what cannot be.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from carpool.engine.call.results import Trouble
from carpool.engine.core.batch import DONE_EARLY, Batch, Reply
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.graph import JOIN, Node
from carpool.engine.core.running_set import FAILED, LAST, Order, Parts, SetReport, stream_of
from carpool.engine.core.stepper import Stepper
from carpool.engine.drive.process import WorkerProcess
from carpool.engine.drive.worker_pool import WorkerPool
from carpool.engine.logger import logger
from carpool.engine.request import Request
from carpool.engine.wire import order as wire
from carpool.engine.wire import outcome
from carpool.engine.wire.arrays import Block
from carpool.engine.wire.frame import Frame, FrameError, FrameKind, in_pieces
from carpool.engine.wire.outcome import WAY, Outcome, unpack_response
from carpool.engine.wire.payload import LARGE, OBJECTS, Payload, Scalars
from carpool.engine.worker.own import SPOTS
from carpool.errors import ModelError, Unavailable


class BatchPool(WorkerPool):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batcher = cast(Batcher, self._crew)
        # What each worker has not been sent yet, by place: the other pieces of its batch, then
        # the batches ahead, whole or in pieces.
        self._unsent: dict[int, list[Frame]] = {}

    def run(self, batch: Batch) -> None:
        requests = batch.requests
        frame = Frame(
            FrameKind.BATCH,
            batch.id,
            batch.ids,
            bytes([r.format for r in requests]),
            bytes([r.accept + SPOTS * r.node.spot for r in requests])
            if self._has_spots
            else bytes([r.accept for r in requests]),
            [r.deadline for r in requests],
            [r.item for r in requests],  # type: ignore[misc]
            batch.started,
        )
        if batch.place in self._unsent:
            self._unsent[batch.place] += in_pieces(frame)
            return
        worker = self._workers[batch.place]
        if (
            batch.ahead
            and worker.send_ahead is not None
            and sum([r.nbytes for lying in self.batcher.ahead[batch.place] for r in lying]) >= LARGE
        ):
            self._unsent[batch.place] = in_pieces(frame)
            self._send_ahead(batch.place)
            return
        try:
            worker.send(frame)
        except FrameError:  # it is too large for one message, and nothing has been sent
            self._unsent[batch.place] = in_pieces(frame)
            if self.batcher.in_flight.get(batch.place) is batch:
                self._send_next(batch.place)  # else it lies ahead, and goes once its turn comes
        if self._after_dispatch is not None:
            self._after_dispatch()

    def _send_ahead(self, place: int) -> None:
        """Have the batch that comes next go to its worker, on a network once that begins to answer.

        Of those ahead it is the first, as a worker reads only one when it has answered.
        """
        batch, pieces = self.batcher.ahead[place][0], self._unsent[place]
        if pieces[0].ids != batch.ids:
            return
        with contextlib.suppress(FrameError):  # it is tried again once the worker has answered, and fails then
            worker = self._workers[place]
            (worker.send_ahead or worker.send)(pieces[0])
            pieces.pop(0)
            if not pieces:
                del self._unsent[place]

    def _send_next(self, place: int) -> None:
        """Send the next piece of a batch that is too large for one message, once the one before is
        answered. An item that is too large by itself fails alone.
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

    def lend(self, place: int, recall: Callable[[], None]) -> tuple[WorkerProcess, socket.socket] | None:
        """Lend the socket of a worker that has nothing to do; None if it cannot be lent. See
        `WorkerProcess.lend`.
        """
        worker = self._workers.get(place)
        if not isinstance(worker, WorkerProcess) or self._after_dispatch is not None or self._before_reply is not None:
            return None
        sock = worker.lend(recall)
        return None if sock is None else (worker, sock)

    # -- what the workers send

    def _received(self, place: int, frame: Frame) -> None:
        if frame.kind == FrameKind.REPLY:
            self._replied(place, frame)
        elif frame.kind == FrameKind.CALL:
            self._batch_of(place, frame)
            self._driver.call_started(self.stage, place, frame.batch_id)
        elif frame.kind == FrameKind.TROUBLE and frame.payloads:
            self._troubled(place, frame)
        else:
            super()._received(place, frame)

    def _batch_of(self, place: int, frame: Frame) -> Batch:
        batch = self.batcher.in_flight.get(place)
        if batch is None or batch.id != frame.batch_id:
            raise FrameError(f"{frame.kind.name} for batch {frame.batch_id}, which it does not have")
        return batch

    def _replied(self, place: int, frame: Frame) -> None:
        batch = self._batch_of(place, frame)
        if frame.ids == batch.ids:
            frame.ids = batch.ids  # compared once more later, and quicker with itself
        else:
            check_ids(frame.ids, batch.ids)
        if not (0.0 <= frame.busy_s < inf and 0.0 <= frame.waited_s < inf):
            raise FrameError(f"a reply after {frame.busy_s} s of work and {frame.waited_s} s of waiting")
        if type(frame.payloads) is Block:
            frame.payloads = frame.payloads.separate()
        errors: dict[int, Exception] | None = None
        turns: dict[int, object] | None = None
        if frame.no_memory:
            errors = self._not_received(frame)
        else:
            if frame.formats.count(Outcome.OK) != len(frame.formats):
                turns = turns_of(frame, batch)
                errors = errors_of(frame, batch)
            if type(frame.payloads) is Scalars and self._ends:
                check_takers(frame, batch)
        if self._before_reply is not None:
            self._before_reply()
        self.roster.finished_batch()
        busy_s, waited_s = frame.busy_s, frame.waited_s
        if self.count_calls is not None:
            self.count_calls(place, len(frame.ids))
        reply = Reply(self.stage, place, frame.batch_id, frame.ids, frame.payloads, errors, busy_s, waited_s, turns)
        self._driver.completed(reply)
        if place in self._unsent:
            if self._is_waiting_for_more(place):
                self._send_next(place)
            elif place in self.batcher.ahead:
                self._send_ahead(place)

    def _not_received(self, frame: Frame) -> dict[int, Exception]:
        logger.error(
            "stage %s: no memory to receive the results of %d requests", self.name, len(frame.ids), extra=self._about()
        )
        text = f"there was no memory to receive the result from stage {self.name}"
        frame.payloads = [b""] * len(frame.ids)
        return {i: Unavailable(text, code="out_of_memory") for i in range(len(frame.ids))}

    def _is_waiting_for_more(self, place: int) -> bool:
        batch = self.batcher.in_flight.get(place)
        if batch is None:
            return False
        return sum([len(piece.ids) for piece in self._unsent[place] if piece.batch_id == batch.id]) == len(batch.ids)

    @cached_property
    def _has_spots(self) -> bool:
        return any(node.spot for node in self.batcher.lobby.nodes)

    @cached_property
    def _ends(self) -> bool:
        nodes = self.batcher.lobby.nodes
        return any(node.ends or any(way.after in (None, JOIN) for way in node.ways) for node in nodes)

    def _troubled(self, place: int, frame: Frame) -> None:
        trouble = decoded(frame.payloads[0], list[Trouble])
        try:
            if self.roster.places[place].is_serving:
                batch = self._batch_of(place, frame)
                if len(batch) != batch.n:  # of a piece of it, so its positions are not those in the batch
                    trouble = [msgspec.structs.replace(each, ran_out=[], fitted=[]) for each in trouble]
                self._driver.troubled(self.batcher, place, frame.batch_id, trouble)
            elif all(n == size for n, size in self._launch.warm_up.items()):  # else the first batches will show it
                self._driver.troubled_in_warm_up(self.batcher, trouble)
        except ValueError as error:
            raise FrameError(str(error)) from error

    def _learn(self, frame: Frame) -> None:
        now = self._driver.clock()
        for payload in frame.payloads[1:2]:
            for n, busy_s in decoded(payload, list[tuple[int, float]]):
                if n not in self._launch.warm_up or not 0.0 <= busy_s < inf:
                    raise FrameError(f"a warm-up of {n} items in {busy_s} s")
                self.batcher.trained(now, n, self._launch.warm_up.get(n, n), busy_s)
        shapes = self._launch.warm_up_shapes
        for payload in frame.payloads[2:]:
            for i, busy_s in decoded(payload, list[tuple[int, float]]):
                if not 0 <= i < len(shapes) or not 0.0 <= busy_s < inf:
                    raise FrameError(f"a warm-up of shape {i} in {busy_s} s")
                self.batcher.trained(now, shapes[i].n, shapes[i].n, busy_s, shapes[i].length)

    # -- workers that go

    def _take_unread(self, place: int, has_unread_batch: bool = False) -> Collection[int] | None:
        unsent = {id for piece in self._unsent.pop(place, ()) for id in piece.ids}
        return None if has_unread_batch and place not in self.batcher.ahead else unsent  # else the one ahead is unread


T = TypeVar("T")

_OUTCOMES = frozenset(Outcome)
_NO_ERROR = frozenset({Outcome.OK, Outcome.RESPONSE, Outcome.DONE})
_HAVE_RESULTS = frozenset({Outcome.OK, Outcome.DONE, WAY})


def check_ids(ids: Sequence[int], owed: Sequence[int]) -> None:
    if not ids or len(set(ids)) < len(ids):
        raise FrameError("a reply that answers nothing, or a request twice")
    foreign = set(ids).difference(owed)
    if foreign:
        raise FrameError(f"a reply to request {min(foreign)}, which is not in the batch")


def check_takers(frame: Frame, batch: Batch) -> None:
    """Raise FrameError if a scalar is for a caller that takes bytes."""
    if OBJECTS.issuperset([request.accept for request in batch.requests]):
        return
    takers = dict(zip(batch.ids, batch.requests, strict=True))
    for id, what in zip(frame.ids, frame.formats, strict=True):
        if takers[id].accept not in OBJECTS and _ends(takers[id], what):
            raise FrameError("a scalar for a caller that takes bytes")


def _ends(request: Request, what: int) -> bool:
    node: Node = request.node
    if what == Outcome.DONE or type(node) is not Node:
        return what == Outcome.DONE
    if what < WAY:
        return node.ends
    after = node.ways[what - WAY].after
    return after is None or (after is JOIN and node.block is not None and node.block.ends)


def turns_of(frame: Frame, batch: Batch) -> dict[int, object] | None:
    """Return where results go that say so themselves, by position; None if none does.

    Their outcomes become those of any result.
    """
    outcomes = frame.formats
    if max(outcomes) < Outcome.DONE and Outcome.RESPONSE not in outcomes:
        return None
    turns: dict[int, object] = {}
    requests = dict(zip(batch.ids, batch.requests, strict=True))
    for i, (id, what) in enumerate(zip(frame.ids, outcomes, strict=True)):
        node = requests[id].node
        if what == Outcome.DONE:
            turns[i] = DONE_EARLY
        elif what >= WAY and type(node) is Node:  # else its caller has gone
            if what - WAY >= len(node.ways):
                raise FrameError(f"a result takes way {what - WAY} of {len(node.ways)}")
            turns[i] = node.ways[what - WAY]
        elif what == Outcome.RESPONSE and type(node) is Node and not node.is_last:
            turns[i] = DONE_EARLY  # only an early answer may be one
    if type(frame.payloads) is Scalars and not _HAVE_RESULTS.issuperset([min(each, WAY) for each in outcomes]):
        raise FrameError("a failure or a response that is reported as a scalar")
    return turns or None


def errors_of(frame: Frame, batch: Batch) -> dict[int, Exception] | None:
    """Return the errors in a reply, by position, and unpack its responses."""
    outcomes = frame.formats
    unknown = {each for each in outcomes if each < WAY} - _OUTCOMES
    if unknown:
        raise FrameError(f"a reply with outcome {max(unknown)}")
    if _HAVE_RESULTS.issuperset([min(each, WAY) for each in outcomes]):
        return None
    if type(frame.payloads) is Scalars:
        raise FrameError("a failure or a response that is reported as a scalar")
    if Outcome.RESPONSE in outcomes:
        _unpack_responses(frame, batch)
    failed = [i for i, what in enumerate(frame.formats) if what not in _NO_ERROR and what < WAY]
    causes, frame.causes = frame.causes or {}, None  # the worker keeps its reply until it has the next one
    errors: dict[int, Exception] = {
        i: outcome.unpack_error(frame.formats[i], frame.payloads[i], causes.get(i)) for i in failed
    }
    return errors or None


def _unpack_responses(frame: Frame, batch: Batch) -> None:
    requests = dict(zip(batch.ids, batch.requests, strict=True))
    answers: list[Any] = list(frame.payloads)
    for i, what in enumerate(frame.formats):
        if what == Outcome.RESPONSE:
            answers[i] = unpacked_response(answers[i], requests[frame.ids[i]])
    frame.payloads = answers


def unpacked_response(payload: Payload, request: Request | None) -> object:
    """Return a response of the model's own; no request is given if that has left. Raises
    FrameError.
    """
    if request is not None and request.accept in OBJECTS:
        raise FrameError("a response to a caller that speaks no HTTP")
    try:
        return unpack_response(payload)
    except ValueError as error:
        raise FrameError(str(error)) from error


def decoded(payload: Payload, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as error:
        raise FrameError(f"it cannot be read: {error}") from error


class _Sent(NamedTuple):
    """An order that its worker may not have followed yet: its number, the streams that join by it,
    and the sum of their lengths.
    """

    number: int
    ids: Sequence[int]
    length: int


class StepPool(WorkerPool):
    _unit = "stream"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stepper = cast(Stepper, self._crew)
        self._sent: dict[int, deque[_Sent]] = {}  # by place: the orders that workers have not followed yet

    def send(self, order: Order) -> None:
        joining = [_joining(request) for request in order.join]
        head = wire.OrderHead(list(order.leave), list(order.pause), list(order.resume), order.stop_when)
        sent = self._sent.setdefault(order.place, deque())
        sent.append(_Sent(order.number, [each.id for each in joining], sum(_length(request) for request in order.join)))
        worker = self._workers[order.place]
        try:
            try:
                frame = wire.order_frame(order.number, head, joining)
                frame.made_at = self._driver.clock()
                worker.send(frame)
            except FrameError:  # it is too large for one message, and nothing has been sent
                self._send_in_pieces(order, head, joining)
        except BaseException as error:  # say, no memory for it: the worker must not go on without it
            logger.exception("an order could not be handed to worker %s", self._label(order.place))
            worker.kill(f"an order could not be handed to it: {type(error).__name__}")
        if self._after_dispatch is not None:
            self._after_dispatch()

    def _send_in_pieces(self, order: Order, head: wire.OrderHead, joining: list[wire.Joining]) -> None:
        """Send an order that is too large for one message as several with one number. A stream
        whose item is too large by itself fails alone.
        """
        worker = self._workers[order.place]
        failed: dict[int, ModelError] = {}
        for each in joining:
            try:
                worker.send(wire.order_frame(order.number, wire.OrderHead(is_whole=False), [each]))
            except FrameError as error:
                text = f"the item cannot be sent to stage {self.name}: {error}"
                failed[each.id] = ModelError(text, code="too_large")
        worker.send(wire.order_frame(order.number, head, []))
        if failed:
            running = self._stepper.sets[order.place]
            said = Parts([*failed], bytes([FAILED]) * len(failed), [*failed.values()])
            self._driver.reported(SetReport(self.stage, order.place, running.seen, False, said))

    # -- what the workers send

    def _received(self, place: int, frame: Frame) -> None:
        if frame.kind == FrameKind.PARTS:
            self._reported(place, frame)
        elif frame.kind == FrameKind.CALL:
            self._driver.call_started(self.stage, place, frame.batch_id)
        elif frame.kind in (FrameKind.REPLY, FrameKind.TROUBLE):
            raise FrameError(f"{frame.kind.name} from a worker that is sent orders")
        else:
            super()._received(place, frame)

    def _reported(self, place: int, frame: Frame) -> None:
        if frame.no_memory:
            raise FrameError("there is no memory to receive its report")
        running = self._stepper.sets.get(place)
        if running is None and self.roster.places[place].is_leaving:
            self._stepper.late_results += len(frame.ids) - 1  # others have its streams by now
            return
        if running is None:
            raise FrameError("a report before it is ready")
        report = wire.read_report(frame)
        if self._before_reply is not None:
            self._before_reply()
        parts = _parts_of(frame, report, running.members)
        if report.stepped or report.started:
            self.roster.finished_batch()
            if self.count_calls is not None:
                self.count_calls(place, 1)
        length = self._length_started(place, frame.batch_id)
        done = (report.stepped, report.step_s, length, report.start_s)
        try:
            self._driver.reported(SetReport(self.stage, place, frame.batch_id, report.stopped, parts, *done))
        except ValueError as error:
            raise FrameError(str(error)) from error

    def _learn(self, frame: Frame) -> None:
        now = self._driver.clock()
        for payload in frame.payloads[1:]:
            for timing in decoded(payload, list[wire.StepTiming]):
                if timing.rows < 1 or not (0.0 <= timing.step_s < inf and 0.0 <= timing.start_s < inf):
                    raise FrameError(f"a warm-up that cannot be: {timing}")
                self._stepper.trained_steps(now, timing.rows, timing.step_s, timing.rows, timing.start_s)

    def _length_started(self, place: int, seen: int) -> int:
        sent = self._sent.get(place, ())
        length = 0
        while sent and sent[0].number <= seen:
            length += sent.popleft().length
        return length

    # -- workers that go

    def moves_out(self, is_late: bool) -> bool:
        return is_late or self._stepper.resumable

    def _take_unread(self, place: int, has_unread_batch: bool = False) -> Collection[int] | None:
        sent = self._sent.pop(place, None)
        return sent[-1].ids if has_unread_batch and sent else ()  # it has not read its last order


def _joining(request: Request) -> wire.Joining:
    item: Any = request.item
    kept: Any = stream_of(request).kept
    accept = request.accept + SPOTS * request.node.spot
    return wire.Joining(request.id, request.format, accept, _takes(request), request.deadline, item, kept)


def _takes(request: Request) -> int:
    stream = stream_of(request)
    return wire.TAKES_WHOLE if stream.is_collected else wire.TAKES_BOTH if stream.is_told_both else wire.TAKES_PARTS


def _length(request: Request) -> int:
    return 1 if request.stream is None else request.stream.length


def _parts_of(frame: Frame, report: wire.ReportHead, members: Mapping[int, Request]) -> Parts:
    """Return what a worker says of its streams."""
    ids, kinds, payloads = frame.ids[1:], frame.formats[1:], frame.payloads[1:]
    if not report.buffers and kinds.count(wire.MORE) == len(kinds):
        return Parts(ids, kinds, payloads)
    causes, frame.causes = frame.causes or {}, None
    what = bytearray(kinds)
    values: list[Any] = list(payloads)
    kept: list[Any] = list(payloads) if report.buffers else []
    for i, (id, kind) in enumerate(zip(ids, kinds, strict=True)):
        if kind == wire.MORE or kind == wire.LAST:
            if kept and report.buffers[i]:
                values[i], kept[i] = wire.split_kept(values[i], report.buffers[i])
        elif kind == wire.END:
            if id in members and _takes(members[id]) != wire.TAKES_PARTS:
                raise FrameError(f"an end without the answer of request {id}")
        elif kind == Outcome.RESPONSE:
            what[i], values[i] = LAST, unpacked_response(values[i], members.get(id))
        elif kind != wire.BACK:  # it is the `Outcome` with which the stream has failed
            what[i], values[i] = FAILED, outcome.unpack_error(kind, values[i], causes.get(i + 1))
    return Parts(ids, what, values, kept)
