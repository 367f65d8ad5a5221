"""A worker's life: load the model, warm it up, answer batches until there are no more.

The same for a worker process, a thread and a task of the loop; what differs is the link over which frames come and go.
Where receiving blocks the thread instead of suspending the task, `parts.run_now` runs it all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from carpool.call.invoke import Invoker
from carpool.call.retry import Failed, Retrier, Trouble
from carpool.clock import monotonic
from carpool.faults import InjectedFault, WorkerPoints
from carpool.foreign import as_model_error, traceback_of
from carpool.logger import logger
from carpool.model import AnyModel, traits_of
from carpool.wire.frame import Frame, FrameError, FrameKind, in_pieces
from carpool.wire.outcome import FailureReport, Outcome, pack
from carpool.worker import program
from carpool.worker.call import Call, ExampleError, Failures, describe, let_go
from carpool.worker.setup import Setup

_REPORT_EVERY_S = 0.01  # calls that follow each other faster need no report each


class Link(Protocol):
    """A worker's end of the connection to its stage."""

    heard_at: float
    """When the first byte of the last frame came; what it takes to read the rest of it is no waiting."""

    async def receive(self) -> Frame | None:
        """The next frame; None once no more will come."""

    def send(self, frame: Frame) -> None:
        """Send one frame."""


class _CallReports:
    """Tells the stage that another call has begun, so that its hang limit is one of a single call."""

    def __init__(self, link: Link) -> None:
        self.batch = 0  # of which the calls are; 0 for the warm-up, which has no limit
        self._link = link
        self._last = 0.0

    def __call__(self) -> None:
        now = monotonic()
        if self.batch and now - self._last > _REPORT_EVERY_S:
            self._last = now
            self._link.send(Frame(FrameKind.CALL, self.batch))


async def serve(
    link: Link,
    setup: Setup,
    find_model: Callable[[], tuple[AnyModel, Mapping[str, Any]]],
    through: tuple[type[BaseException], ...] = (),
    *,
    meant: Callable[[], bool] = lambda: True,
    may_wait: bool = False,
    inside: bool = False,
) -> None:
    """Load the model and answer batches; if loading fails, say why and return.

    Args:
        link: to the stage.
        setup: which stage, and how to call the model.
        find_model: gives the model and its arguments; may raise.
        through: exceptions that end the worker instead of failing an item.
        meant: whether one of these does end it; see `retry.Retrier`.
        may_wait: whether there is an event loop on which async user code can wait.
        inside: whether what is sent over the link stays in this process.
    """
    reports = _CallReports(link)
    points = WorkerPoints(setup.worker)
    caller = Retrier(
        isolate_errors=setup.isolate_errors,
        halve=setup.halve,
        oom_errors=setup.oom_errors,
        through=through,
        meant=meant,
        may_wait=may_wait,
    )
    call = await _load(link, setup, find_model, caller, reports, points, inside)
    if call is None:
        return
    idle_since = monotonic()
    while (frame := await link.receive()) is not None:
        waited_s = max(0.0, link.heard_at - idle_since)
        if points.after_recv is not None:
            points.after_recv()
        reports.batch = frame.batch
        reply = await _answer(call, frame, caller, inside)
        reply.waited_s = waited_s
        if reply.causes:
            let_go(reply.causes.values())
        if call.trouble:
            _tell(link, frame.batch, call.trouble)
        _send(link, reply)
        if points.after_send is not None:
            points.after_send()
        idle_since = monotonic()
    await _tear_down(call, setup)


async def _tear_down(call: Call, setup: Setup) -> None:
    """Let the model let go. It is the last thing that this worker does, so whatever it raises is only told."""
    try:
        await call.tear_down()
    except BaseException as error:
        logger.error("teardown of worker %s/%d raised:\n%s", setup.stage, setup.worker, traceback_of(error).rstrip())


async def _answer(call: Call, frame: Frame, caller: Retrier, inside: bool) -> Frame:
    """The reply to a batch, whatever happens: `Call` fails items for what user code does, and this is the net below."""
    try:
        return await call.run(frame)
    except BaseException as error:
        if caller.goes_through(error) or isinstance(error, InjectedFault):  # which stands for an error of ours
            raise
        failure = as_model_error(error, "what the model gave or returned")
        failures = Failures(inside)
        n, failed = len(frame.ids), Failed(failure)
        told = [failures.told(place, failed) for place in range(n)]
        return Frame(
            *(FrameKind.REPLY, frame.batch, frame.ids, bytes([outcome for outcome, _ in told])),
            payloads=[body for _, body in told],
            causes=failures.causes,
        )


def _send(link: Link, reply: Frame) -> None:
    """Send a reply as one message, or in several where it is too large for that."""
    try:
        link.send(reply)
    except FrameError:  # nothing has been sent
        for piece in in_pieces(reply):
            try:
                link.send(piece)
            except FrameError as error:
                text = f"the result cannot be sent: {error}"
                link.send(_refusal(piece, Outcome.BAD_RESULT, FailureReport(text, "FrameError")))


async def _load(
    link: Link,
    setup: Setup,
    find_model: Callable[[], tuple[AnyModel, Mapping[str, Any]]],
    caller: Retrier,
    reports: _CallReports,
    points: WorkerPoints,
    inside: bool,
) -> Call | None:
    _say(link, "loading")
    step = "its model could not be imported"
    try:
        model, kwargs = find_model()
        step = "its model could not be set up"
        invoker = Invoker(
            model,
            kwargs,
            traits_of(model, setup.batched),
            caller,
            batched=setup.batched,
            calling=reports,
            in_predict=points.in_predict,
            allowed_batch_sizes=setup.allowed_batch_sizes,
        )
        if points.setup is not None:
            points.setup()
        await invoker.set_up()
        call = Call(
            invoker,
            first=setup.first,
            last=setup.last,
            before_predict=points.before_predict,
            after_predict=points.after_predict,
            main=program.MainProgram(setup.program if program.in_worker else None),
            inside=inside,
        )
        timings: list[tuple[int, float]] = []
        if call.traits.examples:
            _say(link, "warming")
            timings = await call.warm_up(setup.warm_up)
    except BaseException as error:
        if caller.goes_through(error):
            raise
        details = ""
        if type(error) is ExampleError:
            step, details = str(error), error.traceback
        text = f"worker {setup.worker} of stage {setup.stage} could not start: {step}"
        details = details or describe(error)
        report = FailureReport(text, type(error).__name__, details)
        link.send(Frame(FrameKind.FAILED, ids=[0], formats=b"\0", payloads=[pack(report)]))
        return None
    if call.trouble:
        _tell(link, 0, call.trouble)
    _say(link, "ready", msgspec.msgpack.encode(timings))
    return call


def _tell(link: Link, batch: int, trouble: list[Trouble]) -> None:
    """What happened to a batch besides its results, before they are sent; 0 for the warm-up."""
    link.send(Frame(FrameKind.TROUBLE, batch, [0], b"\0", payloads=[msgspec.msgpack.encode(trouble)]))


def _refusal(frame: Frame, outcome: Outcome, report: FailureReport) -> Frame:
    """A reply to a batch, or in the place of one, in which every item has failed."""
    n = len(frame.ids)
    return Frame(
        *(FrameKind.REPLY, frame.batch, frame.ids, bytes([outcome]) * n),
        payloads=[pack(report)] * n,
        busy_s=frame.busy_s,
        waited_s=frame.waited_s,
    )


def _say(link: Link, state: str, *more: bytes) -> None:
    """How far start-up has come, and what was learned on the way."""
    n = 1 + len(more)
    link.send(Frame(FrameKind.STATE, ids=[0] * n, formats=bytes(n), payloads=[state.encode(), *more]))
