"""A worker's life: load the model, warm it up, answer batches until no more come.

    serve                        the whole life, over a link on which frames come and go
      _load                      find the model, set it up, warm it up; or report why that failed
      loop:
        link.receive             one frame: a batch
        BatchAnswerer.answer     a frame for a frame (worker/answer.py): decode the items, ...
          Invoker.run            ... preprocess, predict, postprocess (call/invoke.py), ...
            Retrier.call         ... the call of `predict` for the whole batch (call/retry.py),
              _Retry.run         or, if that fails, for parts of it,
          FailureReports         ... report what failed (worker/own.py), encode the rest
        link.send                what happened besides, if anything did; then the reply
      _tear_down                 once the link has ended

A model that answers in parts has another loop, in `worker/step_loop.py`.

It is the same for a worker process (its link is in `worker/main.py`), a thread and a task of the
loop (`drive/local_workers.py`). `Link` and `CallAnnouncer`, of which both loops have one, are in
`worker/step_loop.py`, which is imported here.
Where receiving blocks the thread instead of suspending a task, `results.run_now` runs all of it.

Between two calls a worker does as little as it can. Where calls take milliseconds its caches are
cold: a bytecode that runs once then takes 0.1 µs and more, so 1,500 of them take longer than the
send that wakes the service. Hence the fast paths for scalars and arrays in `wire/frame.py` and
`worker/answer.py`, and one call of C code for all items where possible. A second thread that sends
the answers was rejected: it waits for the interpreter's lock while the next call runs, and a crash
of that call loses the answers of the batch before it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import msgspec

from carpool.engine.call.invoke import Invoker
from carpool.engine.call.results import Failed, Trouble
from carpool.engine.call.retry import Retrier
from carpool.engine.clock import monotonic
from carpool.engine.faults import InjectedFault, WorkerPoints
from carpool.engine.foreign import as_model_error, hint_for, traceback_of
from carpool.engine.logger import logger
from carpool.engine.wire.frame import Frame, FrameError, FrameKind, in_pieces
from carpool.engine.wire.outcome import FailureReport, Outcome, pack_report
from carpool.engine.worker import program, step_loop
from carpool.engine.worker.answer import BatchAnswerer, ExampleError
from carpool.engine.worker.generators import Beside
from carpool.engine.worker.own import FailureReports, Spot, clear_own_frames, describe, own
from carpool.engine.worker.own_metrics import metrics_in_file
from carpool.engine.worker.program import Setup
from carpool.engine.worker.step_loop import CallAnnouncer, Link, StepAnswerer
from carpool.model import Adapter, AnyModel, traits_of

FindModel = Callable[[], tuple[AnyModel, Mapping[str, Any], Sequence[Adapter], Sequence[Spot]]]
"""Returns the model, its arguments, the adapters of its addresses and what becomes of its results;
may raise."""


async def serve(
    link: Link,
    setup: Setup,
    find_model: FindModel,
    fatal_errors: tuple[type[BaseException], ...] = (),
    *,
    is_ending: Callable[[], bool] = lambda: True,
    beside: Beside | None = None,
    same_process: bool = False,
) -> None:
    """Load the model and answer batches; if loading fails, report why and return.

    Args:
        link: The connection to the stage.
        setup: The worker's stage and place, and how to call the model.
        find_model: See `FindModel`.
        fatal_errors: Exceptions that end the worker instead of failing an item.
        is_ending: Whether the worker is in fact being ended; user code may raise the fatal errors
            by itself.
        beside: Has asynchronous generators run beside each other; None where there is no event loop
            on which async user code could wait.
        same_process: Whether frames that are sent over the link stay in this process.
    """
    announcer = CallAnnouncer(link)
    points = WorkerPoints(setup.place)
    retrier = Retrier(
        isolate_errors=setup.isolate_errors,
        retry_on_oom=setup.retry_on_oom,
        oom_errors=setup.oom_errors,
        fatal_errors=fatal_errors,
        is_ending=is_ending,
        may_wait=beside is not None,
        own=own,
    )
    answerer = await _load(link, setup, find_model, retrier, announcer, points, same_process, beside)
    metrics = None if same_process else metrics_in_file(setup.stage, setup.place)
    if type(answerer) is StepAnswerer:
        if metrics is not None:
            metrics.keep_writing()
        await step_loop.run(link, answerer, announcer, points)
        await _tear_down(answerer.batches, setup)
        return
    if answerer is None:
        return
    assert type(answerer) is BatchAnswerer
    idle_since = monotonic()
    while (frame := await link.receive()) is not None:
        waited_s = max(0.0, link.came_at - idle_since)
        if points.after_recv is not None:
            points.after_recv()
        announcer.begin(frame.batch_id)
        try:
            reply = await answerer.answer(frame)
        except BaseException as error:
            # the model's own errors do not come here: it is an error of carpool's
            if retrier.is_fatal(error) or isinstance(error, InjectedFault):
                raise
            reply = _all_failed(frame, error, same_process)
        reply.waited_s = waited_s
        if reply.causes:
            clear_own_frames(reply.causes.values())
        if answerer.trouble:
            _send_trouble(link, frame.batch_id, answerer.trouble)
        _send_reply(link, reply)
        if points.after_send is not None:
            points.after_send()
        if metrics is not None:
            metrics.note()
        del frame, reply  # its memory is there for the next batch, and an idle worker keeps nothing of its last one
        idle_since = monotonic()
    await _tear_down(answerer, setup)
    if metrics is not None:
        metrics.write()


# -- loading the model


async def _load(
    link: Link,
    setup: Setup,
    find_model: FindModel,
    retrier: Retrier,
    announcer: CallAnnouncer,
    points: WorkerPoints,
    same_process: bool,
    beside: Beside | None,
) -> BatchAnswerer | StepAnswerer | None:
    """Load the model and warm it up; report it and return None if that fails."""
    _send_state(link, "loading")
    what_failed = "its model could not be imported"
    try:
        model, kwargs, adapters, spots = find_model()
        what_failed = "its model could not be set up"
        invoker = Invoker(
            model,
            kwargs,
            traits_of(model, setup.batched),
            retrier,
            batched=setup.batched,
            before_next_call=announcer,
            in_predict=points.in_predict,
            allowed_batch_sizes=setup.allowed_batch_sizes,
        )
        if points.setup is not None:
            points.setup()
        await invoker.set_up()
        answerer = BatchAnswerer(
            invoker,
            adapters=adapters,
            is_first=setup.is_first,
            is_last=setup.is_last,
            spots=spots,
            before_predict=points.before_predict,
            after_predict=points.after_predict,
            main=program.MainProgram(setup.program if program.in_worker else None),
            same_process=same_process,
        )
        steps: StepAnswerer | None = None
        if answerer.traits.in_parts:
            steps = StepAnswerer(
                invoker,
                answerer,
                retrier,
                before_next_call=announcer,
                in_step=points.in_predict,
                same_process=same_process,
                beside=beside,
            )
        timings: list[bytes] = [msgspec.msgpack.encode([])]
        if answerer.traits.examples:
            _send_state(link, "warming")
            # threads share standard output with the program that they run in: it is left alone
            with contextlib.nullcontext() if same_process else hold_back_prints(setup.stage):
                timings = await _warm_up(answerer, steps, setup)
    except BaseException as error:
        if retrier.is_fatal(error):
            raise
        _send_failure(link, setup, what_failed, error)
        return None
    if answerer.trouble:
        _send_trouble(link, 0, answerer.trouble)
    _send_state(link, "ready", *timings)
    return answerer if steps is None else steps


async def _warm_up(answerer: BatchAnswerer, steps: StepAnswerer | None, setup: Setup) -> list[bytes]:
    """Run the model's examples, and return the timings as the stage gets them.

    These are the timings of batches and, where shapes were timed, those of shapes; or of steps.
    """
    if steps is not None:
        return [msgspec.msgpack.encode(await steps.warm_up(setup.most_examples))]
    timings = await answerer.warm_up(setup.warm_up)
    shapes = await answerer.warm_up_shapes(setup.warm_up_shapes)
    return [msgspec.msgpack.encode(each) for each in ((timings, shapes) if shapes else (timings,))]


def _send_failure(link: Link, setup: Setup, what_failed: str, error: BaseException) -> None:
    """Report that the worker could not start: what failed, and with which error."""
    if type(error) is ExampleError:
        what_failed, traceback = str(error), error.traceback
    else:
        traceback = describe(error)
    text = f"worker {setup.place} of stage {setup.stage} could not start: {what_failed}{hint_for(error)}"
    report = FailureReport(text, type(error).__name__, traceback)
    link.send(Frame(FrameKind.FAILED, ids=[0], formats=b"\0", payloads=[pack_report(report)]))


def _send_state(link: Link, state: str, *more: bytes) -> None:
    """Report how far the start-up has come, and what was learned from it."""
    n = 1 + len(more)
    link.send(Frame(FrameKind.STATE, ids=[0] * n, formats=bytes(n), payloads=[state.encode(), *more]))


# -- answering batches


def _all_failed(frame: Frame, error: BaseException, same_process: bool) -> Frame:
    """Return the reply to a batch that could not be answered.

    `BatchAnswerer` fails single items for errors of user code; what it lets through fails all items
    of the batch.
    """
    failed = Failed(as_model_error(error, "what the model gave or returned"))
    failures = FailureReports(same_process)
    reported = [failures.report(position, failed) for position in range(len(frame.ids))]
    return Frame(
        *(FrameKind.REPLY, frame.batch_id, frame.ids, bytes([outcome for outcome, _ in reported])),
        payloads=[body for _, body in reported],
        causes=failures.causes,
    )


def _send_reply(link: Link, reply: Frame) -> None:
    """Send a reply as one message, or as several if it is too large for one."""
    try:
        link.send(reply)
    except FrameError:  # nothing has been sent
        for piece in in_pieces(reply):
            try:
                link.send(piece)
            except FrameError as error:
                link.send(_as_unsendable(piece, error))


def _as_unsendable(reply: Frame, error: FrameError) -> Frame:
    """Return the reply in which every item has failed because its result could not be sent."""
    report = FailureReport(f"the result cannot be sent: {error}", "FrameError")
    n = len(reply.ids)
    return Frame(
        *(FrameKind.REPLY, reply.batch_id, reply.ids, bytes([Outcome.BAD_RESULT]) * n),
        payloads=[pack_report(report)] * n,
        busy_s=reply.busy_s,
        waited_s=reply.waited_s,
    )


def _send_trouble(link: Link, batch: int, trouble: list[Trouble]) -> None:
    """Report what happened to a batch besides its results, before these are sent; 0 stands for the
    warm-up.
    """
    link.send(Frame(FrameKind.TROUBLE, batch, [0], b"\0", payloads=[msgspec.msgpack.encode(trouble)]))


async def _tear_down(answerer: BatchAnswerer, setup: Setup) -> None:
    """Tear the model down. It is the last thing that this worker does, so whatever it raises is
    only logged.
    """
    try:
        await answerer.tear_down()
    except BaseException as error:
        logger.error("teardown of worker %s/%d raised:\n%s", setup.stage, setup.place, traceback_of(error).rstrip())


# -- prints of the warm-up, which no caller asked for


@contextlib.contextmanager
def hold_back_prints(stage: str) -> Iterator[None]:
    """Hold back what is printed in this process while the block runs: it goes to the log, at DEBUG.
    If the block raises, it is printed after all, since it may show why.

    Standard error is left alone, and so is what is not printed by way of `sys.stdout`.

    Args:
        stage: The name of the stage, for the log.
    """
    real = sys.stdout
    held = _HeldBack(real)
    with contextlib.redirect_stdout(held):
        try:
            yield
        except BaseException:
            real.write(held.release())
            raise
    for line in held.release().splitlines():
        logger.debug("stage %s printed in its warm-up: %s", stage, line)


class _HeldBack:
    """A stand-in for `sys.stdout`. A model may keep it (a handler of the log does), so once it is
    released it passes on what is written.
    """

    def __init__(self, real: TextIO) -> None:
        self._real = real
        self._held: list[str] | None = []

    def write(self, text: str) -> int:
        """Keep a text, or pass it on."""
        if self._held is None:
            return self._real.write(text)
        self._held.append(text)
        return len(text)

    def release(self) -> str:
        """Pass on whatever comes from now on, and return what was held back."""
        held, self._held = self._held or [], None
        return "".join(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
