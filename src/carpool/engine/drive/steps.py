"""The workers of a stage that answers in parts: orders go out, and parts come in.

A worker steps its running set without being asked, so nothing here waits for a step, and no step
for anything here. All else about workers is as in `worker_pool.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, cast

from carpool.engine.core.running_set import FAILED, LAST, Order, Parts, SetReport, stream_of
from carpool.engine.core.stepper import Stepper
from carpool.engine.drive.batches import decoded, unpacked_response
from carpool.engine.drive.worker import Work
from carpool.engine.drive.worker_pool import WorkerPool
from carpool.engine.logger import logger
from carpool.engine.request import Request
from carpool.engine.wire import order as wire
from carpool.engine.wire import outcome
from carpool.engine.wire.frame import Frame, FrameError, FrameKind
from carpool.engine.wire.outcome import Outcome
from carpool.engine.worker.ways import SPOTS
from carpool.errors import ModelError


class _Sent(NamedTuple):
    """An order that its worker has not followed yet, as far as is known.

    Attributes:
        number: The order's.
        ids: Of the streams that join.
        length: The sum of their lengths.
    """

    number: int
    ids: Sequence[int]
    length: int


class StepPool(WorkerPool):
    """The executor of a stage that answers in parts."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stepper = cast(Stepper, self._crew)
        self._sent: dict[int, deque[_Sent]] = {}  # by place: the orders that workers have not followed yet

    def send(self, order: Order) -> None:
        """Send an order to its worker."""
        joining = [_joining(request) for request in order.join]
        head = wire.OrderHead(list(order.leave), list(order.pause), list(order.resume), order.ask)
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
        """Send an order that is too large for one message as several with one number.

        A stream whose item is too large by itself fails; the others do not, nor does the worker.
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

    def _heard(self, place: int, frame: Frame) -> None:
        if frame.kind == FrameKind.PARTS:
            self._reported(place, frame)
        elif frame.kind == FrameKind.CALL:
            self._driver.call_started(self.stage, place, frame.batch_id)
        elif frame.kind in (FrameKind.REPLY, FrameKind.TROUBLE):
            raise FrameError(f"{frame.kind.name} from a worker that is sent orders")
        else:
            super()._heard(place, frame)

    def _reported(self, place: int, frame: Frame) -> None:
        """Pass a report on to the driver, once it has been checked."""
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
        """Pass the timings of the warm-up on to the stage's policy."""
        now = self._driver.clock()
        for payload in frame.payloads[1:]:
            for timing in decoded(payload, list[wire.StepTiming]):
                if timing.rows < 1 or not (0.0 <= timing.step_s < inf and 0.0 <= timing.start_s < inf):
                    raise FrameError(f"a warm-up that cannot be: {timing}")
                self._stepper.trained_steps(now, timing.rows, timing.step_s, timing.rows, timing.start_s)

    def _length_started(self, place: int, seen: int) -> int:
        """Return the sum of the lengths of the streams that were started up to an order."""
        sent = self._sent.get(place, ())
        length = 0
        while sent and sent[0].number <= seen:
            length += sent.popleft().length
        return length

    def _heard_too_late(self, place: int, frame: Frame) -> None:
        """Count late parts of a worker that was given up: others have its streams by now."""
        if frame.kind == FrameKind.PARTS:
            self._stepper.late_results += len(frame.ids) - 1
            self._workers[place].kill()

    # -- workers that go

    def moves_out(self, is_late: bool) -> bool:
        return is_late or self._stepper.resumable

    def _requests_of(self, place: int) -> list[Request]:
        running = self._stepper.sets.get(place)
        return [] if running is None else list(running)

    def _work_of(self, place: int) -> Work | None:
        return self._stepper.sets.get(place)

    def _forget(self, place: int, cause: str) -> None:
        self._sent.pop(place, None)
        super()._forget(place, cause)

    def _hand_back(self, place: int, has_unread_batch: bool) -> bool:
        """Have the streams of a lost worker go on elsewhere, or fail.

        Returns:
            Whether a stream is to blame for the loss.
        """
        sent = self._sent.pop(place, None)
        unsent = set(sent[-1].ids) if has_unread_batch and sent else ()  # it has not read its last order
        if self._driver.worker_lost(self.stage, place, unsent):
            text = "stage %s: two workers were lost with the same stream, which fails and is not tried again"
            logger.error(text, self.name, extra={**self._about(), "code": "request_crashed_worker"})
            self._forgive(place)
            return True
        return False

    def _hand_back_unblamed(self, place: int) -> None:
        self._sent.pop(place, None)
        super()._hand_back_unblamed(place)


def _joining(request: Request) -> wire.Joining:
    """Return a request as it is sent to a worker whose running set it joins."""
    item: Any = request.item
    kept: Any = stream_of(request).kept
    accept = request.accept + SPOTS * request.node.spot
    return wire.Joining(request.id, request.format, accept, _takes(request), request.deadline, item, kept)


def _takes(request: Request) -> int:
    """Return what the caller of a stream takes: `WHOLE`, `PARTS` or `BOTH`."""
    stream = stream_of(request)
    return wire.WHOLE if stream.is_collected else wire.BOTH if stream.is_told_both else wire.PARTS


def _length(request: Request) -> int:
    return 1 if request.stream is None else request.stream.length


def _parts_of(frame: Frame, report: wire.ReportHead, members: Mapping[int, Request]) -> Parts:
    """Return what a worker says of its streams.

    Raises:
        FrameError: It says what cannot be.
    """
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
            if id in members and _takes(members[id]) != wire.PARTS:
                raise FrameError(f"an end without the answer of request {id}")
        elif kind == Outcome.RESPONSE:
            what[i], values[i] = LAST, unpacked_response(values[i], members.get(id))
        elif kind != wire.BACK:
            what[i], values[i] = FAILED, outcome.unpack_error(kind, values[i], causes.get(i + 1))
    return Parts(ids, what, values, kept)
