"""A worker's life: load the model, warm it up, answer batches until there are no more.

The same for a worker process, a thread and a task of the loop; what differs is the link over which frames come and go.
Where receiving blocks the thread instead of suspending the task, `parts.run_now` runs it all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from carpool.faults import WorkerPoints
from carpool.invoke import Invoker
from carpool.model import AnyModel, traits_of
from carpool.parts import Caller, Trouble
from carpool.wire.frame import Frame, FrameError, Kind
from carpool.wire.outcome import Outcome, Report, pack
from carpool.worker import program
from carpool.worker.call import Call, ExampleError, describe
from carpool.worker.setup import Setup

_REPORT_EVERY_S = 0.01  # calls that follow each other faster need no report each


class Link(Protocol):
    """A worker's end of the connection to its stage."""

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
        now = time.monotonic()
        if self.batch and now - self._last > _REPORT_EVERY_S:
            self._last = now
            self._link.send(Frame(Kind.CALL, self.batch))


async def serve(
    link: Link,
    setup: Setup,
    find_model: Callable[[], tuple[AnyModel, Mapping[str, Any]]],
    through: tuple[type[BaseException], ...] = (),
    *,
    may_wait: bool = False,
) -> None:
    """Load the model and answer batches; if loading fails, say why and return.

    Args:
        link: to the stage.
        setup: which stage, and how to call the model.
        find_model: gives the model and its arguments; may raise.
        through: exceptions that end the worker instead of failing an item.
        may_wait: whether there is an event loop on which async user code can wait.
    """
    reports = _CallReports(link)
    points = WorkerPoints(setup.worker)
    caller = Caller(
        isolate_errors=setup.isolate_errors,
        halve=setup.halve,
        oom_errors=setup.oom_errors,
        through=through,
        may_wait=may_wait,
    )
    call = await _load(link, setup, find_model, caller, reports, points)
    if call is None:
        return
    idle_since = time.monotonic()
    while (frame := await link.receive()) is not None:
        waited_s = time.monotonic() - idle_since
        if points.after_recv is not None:
            points.after_recv()
        reports.batch = frame.batch
        reply = await call.run(frame)
        reply.waited_s = waited_s
        if call.trouble:
            _tell(link, frame.batch, call.trouble)
        try:
            link.send(reply)
        except FrameError as error:  # the results are too large for one message; nothing has been sent
            link.send(_refusal(reply, f"the results cannot be sent: {error}"))
        if points.after_send is not None:
            points.after_send()
        idle_since = time.monotonic()
    await call.tear_down()


async def _load(
    link: Link,
    setup: Setup,
    find_model: Callable[[], tuple[AnyModel, Mapping[str, Any]]],
    caller: Caller,
    reports: _CallReports,
    points: WorkerPoints,
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
        )
        timings: list[tuple[int, float]] = []
        if call.traits.examples:
            _say(link, "warming")
            timings = await call.warm_up(setup.warm_up)
    except caller.through:
        raise
    except BaseException as error:
        if isinstance(error, ExampleError):
            step = str(error)
        text = f"worker {setup.worker} of stage {setup.stage} could not start: {step}"
        details = getattr(error, "traceback", "") or describe(error)
        report = Report(text, type(error).__name__, details)
        link.send(Frame(Kind.FAILED, ids=[0], formats=b"\0", payloads=[pack(report)]))
        return None
    if call.trouble:
        _tell(link, 0, call.trouble)
    _say(link, "ready", msgspec.msgpack.encode(timings))
    return call


def _tell(link: Link, batch: int, trouble: list[Trouble]) -> None:
    """What happened to a batch besides its results, before they are sent; 0 for the warm-up."""
    link.send(Frame(Kind.TROUBLE, batch, [0], b"\0", payloads=[msgspec.msgpack.encode(trouble)]))


def _refusal(reply: Frame, text: str) -> Frame:
    """A reply in which every item has failed."""
    n = len(reply.ids)
    body = pack(Report(text, "FrameError"))
    return replace(reply, formats=bytes([Outcome.BAD_RESULT]) * n, payloads=[body] * n)


def _say(link: Link, state: str, *more: bytes) -> None:
    """How far start-up has come, and what was learned on the way."""
    n = 1 + len(more)
    link.send(Frame(Kind.STATE, ids=[0] * n, formats=bytes(n), payloads=[state.encode(), *more]))
