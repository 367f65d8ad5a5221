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

A model that answers in parts has another loop, which steps its running set without being asked:

    serve_steps                  until no more frames come
      link.receive               what has come; it waits only if there is nothing to step
        StepAnswerer.follow      an order: decode the items of those that join, preprocess, then ...
          Runner.follow          ... stop, start and pause (worker/steps.py)
      StepAnswerer.step          one step, which is ...
        Runner.step              ... a call of the model for all that run
      _send_report               one frame with all that has come of it

One report follows each order and each step; its times leave nothing out but waiting.

It is the same for a worker process (its link is in `worker/main.py`), a thread and a task of the
loop (`drive/local_workers.py`). Where receiving blocks the thread instead of suspending a task,
`results.run_now` runs all of it.

Between two calls a worker does as little as it can. Where calls take milliseconds its caches are
cold, so 1,500 bytecodes take longer than the send that wakes the service. Hence the fast paths for
scalars and arrays in `wire/frame.py` and `worker/answer.py`, and one call of C code for all items
where possible. A second thread that sends the answers was rejected: it waits for the interpreter's
lock while the next call runs, and a crash of that call loses the answers of the batch before it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Final, Protocol, TextIO

import msgspec

from carpool.engine.call.invoke import Invoker
from carpool.engine.call.results import Failed, Trouble
from carpool.engine.call.retry import Retrier
from carpool.engine.clock import monotonic
from carpool.engine.core.running_set import EVERY_STEP, ON_LEAVING
from carpool.engine.fast_paths import fast_path
from carpool.engine.faults import InjectedFault, WorkerPoints
from carpool.engine.foreign import as_model_error, hint_for, traceback_of
from carpool.engine.forms import Form
from carpool.engine.hints import schema
from carpool.engine.logger import logger
from carpool.engine.wire import order as wire
from carpool.engine.wire import payload
from carpool.engine.wire.frame import Frame, FrameError, FrameKind, in_pieces
from carpool.engine.wire.outcome import FailureReport, Outcome, pack_report
from carpool.engine.wire.payload import ARRAYS, JSON, MSGPACK, OBJECT, RAW, size_of
from carpool.engine.worker import program
from carpool.engine.worker.answer import BatchAnswerer, ExampleError, as_arrays, as_bytes
from carpool.engine.worker.generators import BatchGenerators, Beside, ItemGenerators
from carpool.engine.worker.own import FailureReports, Spot, clear_own_frames, describe, outcome_of, own, own_part
from carpool.engine.worker.own_metrics import metrics_in_file
from carpool.engine.worker.program import Setup
from carpool.engine.worker.steps import Lineup, Measures, Outs, Row, Runner, StepModel
from carpool.errors import ModelError
from carpool.model import Adapter, AnyModel, traits_of

MOST_PART_BYTES = 64 * 2**20
"""The most bytes of one part, so that a frame can hold those of some streams."""

_REPORT_EVERY_S = 0.01  # calls that follow each other faster are not all reported
_WARM_UP_S = 2.0  # once the examples have run this long, they are stopped: some answers have no end
_NO_ORDER = wire.OrderHead()
_NOTHING: Final = Outs()


class Link(Protocol):
    """A worker's end of the connection to its stage."""

    came_at: float
    """When the first byte of the last frame came: reading the rest of the frame does not count as
    waiting.
    """

    async def receive(self) -> Frame | None:
        """Return the next frame; None once no more will come."""

    async def has_news(self) -> bool:
        """Report whether `receive` would return at once. Other tasks of a loop have their turn."""

    def send(self, frame: Frame) -> None:
        """Send one frame."""


class CallAnnouncer:
    """Announces to the stage that another call of a batch has begun, so that the hang limit is that
    of a single call; the warm-up, 0, has no limit.
    """

    def __init__(self, link: Link) -> None:
        self.batch_id = 0
        self._link = link
        self._announced_at = 0.0

    def begin(self, batch_id: int) -> None:
        """Note that a batch has come: its first call counts from when the stage has sent it."""
        self.batch_id = batch_id
        self._announced_at = monotonic()

    def __call__(self) -> None:
        now = monotonic()
        if self.batch_id and now - self._announced_at > _REPORT_EVERY_S:
            self._announced_at = now
            self._link.send(Frame(FrameKind.CALL, self.batch_id))


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
        await serve_steps(link, answerer, announcer, points)
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
    if type(error) is ExampleError:
        what_failed, traceback = str(error), error.traceback
    else:
        traceback = describe(error)
    text = f"worker {setup.place} of stage {setup.stage} could not start: {what_failed}{hint_for(error)}"
    report = FailureReport(text, type(error).__name__, traceback)
    link.send(Frame(FrameKind.FAILED, ids=[0], formats=b"\0", payloads=[pack_report(report)]))


def _send_state(link: Link, state: str, *more: bytes) -> None:
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
    try:
        link.send(reply)
    except FrameError:  # nothing has been sent
        for piece in in_pieces(reply):
            try:
                link.send(piece)
            except FrameError as error:
                link.send(_as_unsendable(piece, error))


def _as_unsendable(reply: Frame, error: FrameError) -> Frame:
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


# -- answers in parts


class StepAnswerer:
    """Follows orders and makes steps with a loaded model, and puts what comes of them into frames.

    Args:
        retrier: Knows which errors end the worker.
        same_process: Whether frames stay in this process.
    """

    def __init__(
        self,
        invoker: Invoker,
        batches: BatchAnswerer,
        retrier: Retrier,
        *,
        before_next_call: Callable[[], None],
        in_step: Callable[[], None] | None = None,
        same_process: bool = False,
        beside: Beside | None = None,
    ) -> None:
        traits = invoker.traits
        self.number = 0
        self._invoker = invoker
        self.batches = batches
        self._same_process = same_process
        self._keeps = traits.can_resume
        self._postprocesses = hasattr(invoker.instance, "postprocess")
        self._runner = Runner(
            _step_model(invoker, retrier, beside),
            retrier,
            can_resume=traits.can_resume,
            postprocess=getattr(invoker.instance, "postprocess", None),
            postprocess_takes_x=traits.postprocess_takes_x,
            collect=invoker.instance.collect if traits.collects else None,
            before_next_call=before_next_call,
            in_step=in_step,
        )
        gives = traits.part_type
        self._part_encoders: Mapping[int, Callable[[Any], payload.Payload]] = schema.MadeWhenNeeded[payload.Payload](
            {OBJECT: payload.dump, ARRAYS: as_arrays, RAW: as_bytes},
            {JSON: lambda: schema.json_writer(gives), MSGPACK: lambda: schema.msgpack_writer(gives)},
        )

    @property
    def has_running(self) -> bool:
        return self._runner.has_running

    async def follow(self, frame: Frame) -> tuple[wire.OrderHead, Outs]:
        began, measures = monotonic(), self._runner.measures
        started, start_s = measures.started, measures.start_s
        order, joining = wire.read_order(frame)
        self.number = frame.batch_id
        rows, outs = await self._rows_of(joining)
        outs.extend(await self._runner.follow(order, rows))
        if measures.started > started:
            measures.start_s = start_s + monotonic() - began
        return order, outs

    async def step(self) -> Outs:
        return await self._runner.step()

    async def stop_all(self) -> None:
        await self._runner.stop_all()

    # -- streams that join

    async def _rows_of(self, joining: list[wire.Joining]) -> tuple[list[Row], Outs]:
        rows: list[Row] = []
        outs = Outs()
        values = await self._values_of(joining) if joining else []
        for each, value in zip(joining, values, strict=True):
            row = Row(each.id, value, each.accept, each.takes, again=partial(self._value_of, each))
            if type(value) is not Failed:
                try:
                    row.raw = [payload.load(part) for part in each.parts]
                    row.n_parts = len(row.raw)
                except BaseException as error:  # a part may have a `__setstate__`, which is the user's
                    value = Failed(error)
            if type(value) is Failed:
                outs.add(row, wire.LAST, value)
            else:
                rows.append(row)
        return rows, outs

    async def _value_of(self, each: wire.Joining) -> Any:
        (value,) = await self._values_of([each._replace(deadline=inf)])
        return value

    async def _values_of(self, joining: list[wire.Joining]) -> list[Any]:
        n = len(joining)
        items = Frame(
            FrameKind.BATCH,
            0,
            [each.id for each in joining],
            bytes([each.format for each in joining]),
            bytes(n),
            [each.deadline for each in joining],
            [each.item for each in joining],
        )
        return await self._invoker.preprocess(await self.batches.decode(items), [])

    # -- what goes back

    async def pack(self, outs: Outs) -> Outs:
        """Return what has come of streams as it is sent.

        A stream whose part cannot be packed fails, and leaves the set.
        """
        packed = self._pack_plain(outs) if outs.values else outs
        if packed is not None:
            return packed
        packed, failures = Outs(), FailureReports(self._same_process)
        packed.causes = failures.causes
        failed: set[int] = set()
        for row, kind, value, raw in outs:
            if row.id in failed:
                continue
            if type(value) is not Failed:
                try:
                    await self._pack_one(row, kind, value, raw, packed)
                    continue
                except BaseException as error:
                    value = Failed(error)
                    await self._runner.leave(row.id)
            failed.add(row.id)
            packed.add(row, *failures.report(len(packed) + 1, value), 0)
        return packed

    @fast_path("parts_alike")
    def _pack_plain(self, outs: Outs) -> Outs | None:
        """Return what has come as it is sent if it is parts only, all in one encoding; else None.

        Fast path of `_pack_one`: the same outcome, see tests/engine/worker/test_fast_paths.py.
        """
        if outs.lineup is None and outs.has_ends:
            return None
        lineup, values = outs.lineup or Lineup(outs.rows), outs.values
        accept = lineup.accept
        if accept < 0 or (self._keeps and (accept != OBJECT or self._postprocesses)):
            return None
        payloads: Any = None
        if accept == OBJECT:
            payloads = payload.as_scalars(values, set(map(type, values)))
        if payloads is None:
            try:
                payloads = list(map(self._part_encoders[accept], values))
                if max(map(size_of, payloads)) > MOST_PART_BYTES:
                    return None
            except BaseException:  # `_pack_one` finds out whose it is
                return None
        packed = Outs()
        packed.rows, packed.kinds, packed.values, packed.lineup = outs.rows, outs.kinds, payloads, lineup
        return packed

    async def _pack_one(self, row: Row, kind: int, value: Any, raw: Any, packed: Outs) -> None:
        if kind in (wire.END, wire.BACK):
            packed.add(row, kind, b"", 0)
        elif kind == wire.LAST and row.takes != wire.TAKES_PARTS:
            reply = Frame(FrameKind.REPLY)
            await self.batches.encode([value], bytes([row.accept]), reply)
            outcome = reply.formats[0]
            packed.add(row, wire.LAST if outcome == Outcome.OK else outcome, reply.payloads[0], 0)
            if reply.causes and packed.causes is not None:
                packed.causes[len(packed)] = reply.causes[0]
        else:
            part = self._part_encoders[row.accept](value)
            if size_of(part) > MOST_PART_BYTES:
                text = f"a part may have {MOST_PART_BYTES // 2**20} MiB at most, and one has {size_of(part):,} bytes"
                raise ModelError(text, code="bad_result")
            if self._keeps and (row.accept != OBJECT or self._postprocesses):
                packed.add(row, kind, *wire.with_kept(part, payload.dump(raw)))
            else:
                packed.add(row, kind, part, 0)

    def take_measures(self) -> Measures:
        measures, self._runner.measures = self._runner.measures, Measures()
        return measures

    # -- the warm-up

    async def warm_up(self, most: int) -> list[wire.StepTiming]:
        """Run all examples, one of them alone and then as many together as may be, within reason.

        Returns:
            What starting each of these sets and one step of it have taken.

        Raises:
            ExampleError: The user's code failed for one of them, or one of them or a part of its
                answer does not fit the model's type hints.
        """
        examples = self._invoker.traits.examples
        self.batches.check_examples()
        n = len(examples)
        timings: list[wire.StepTiming] = []
        for places in [range(1), *[range(i, min(i + most, n)) for i in range(0, n, most)]]:
            until = monotonic() + _WARM_UP_S
            values = await self._invoker.preprocess(self.batches.examples(places), [])
            rows: list[Row] = []
            for i, value in zip(places, values, strict=True):
                self._check_example(i, value)
                rows.append(Row(i, value, OBJECT, wire.TAKES_PARTS, again=partial(self._example, i)))
            outs = await self._runner.follow(_NO_ORDER, rows)
            measures, least_s = self.take_measures(), inf
            while True:
                for row, kind, value, _ in outs:
                    self._check_example(row.id, value)
                    if kind != wire.END:
                        self._check_part(row.id, value)
                if not self._runner.has_running or monotonic() > until:
                    break
                outs = await self._runner.step()
                step = self.take_measures()
                if step.stepped == len(rows):
                    least_s = min(least_s, step.step_s)
            await self._runner.stop_all()
            if measures.started == len(rows) and least_s < inf:
                timings.append(wire.StepTiming(len(rows), least_s, measures.start_s))
        return timings

    async def _example(self, i: int) -> Any:
        (value,) = await self._invoker.preprocess(self.batches.examples([i]), [])
        return value

    def _check_example(self, i: int, value: Any) -> None:
        if type(value) is Failed:
            raise self.batches.failed_example(i, value)

    def _check_part(self, i: int, part: Any) -> None:
        """Raise `ExampleError` if a part could not be sent on as clients ask for it."""
        gives = self._invoker.traits.part_type
        problem: BaseException | None = None
        for format in (RAW,) if gives is bytes else (JSON, MSGPACK) if schema.can_travel(gives) else (OBJECT,):
            try:
                self._part_encoders[format](part)
                return
            except BaseException as error:
                problem = problem or error
        if gives is Any:
            return  # Python callers can have it
        assert problem is not None
        _, report = outcome_of(problem)
        raise ExampleError(f"example {i + 1}: {report.message}", report.traceback)


async def serve_steps(link: Link, answerer: StepAnswerer, announcer: CallAnnouncer, points: WorkerPoints) -> None:
    waits = True  # for an order, and not for the rest of one
    order = _NO_ORDER
    began = idle_since = monotonic()
    waited_s = 0.0
    while True:
        outs = _NOTHING
        while waits or not order.is_whole or await link.has_news():
            frame = await link.receive()
            if frame is None:
                await answerer.stop_all()
                return
            if waits:
                began = max(link.came_at, idle_since)
                waited_s = began - idle_since
            if points.after_recv is not None:
                points.after_recv()
            waits = False
            announcer.begin(frame.batch_id)
            order, followed = await answerer.follow(frame)
            outs = outs.then(followed)
        if answerer.has_running:
            outs = outs.then(await answerer.step())
        packed = await answerer.pack(outs)
        stops = order.stop_when == EVERY_STEP or (order.stop_when == ON_LEAVING and packed.has_ends)
        waits = stops or not answerer.has_running
        measures = answerer.take_measures()
        ended = monotonic()
        if measures.stepped:
            measures.step_s = max(0.0, ended - began - measures.start_s)
        began = ended  # sending this report is a part of the next step
        _send_report(link, answerer.number, measures, packed, waits, waited_s)
        if points.after_send is not None:
            points.after_send()
        waited_s = 0.0
        if waits:
            idle_since = monotonic()


def _frame_of(packed: Outs, number: int, measures: Measures, stopped: bool) -> Frame:
    buffers = packed.kept if any(packed.kept) else []
    started, stepped = (measures.started, measures.start_s), (measures.stepped, measures.step_s)
    report = wire.ReportHead(stopped, *started, *stepped, buffers)
    frame = wire.parts_frame(number, report, packed.ids, packed.kinds, packed.values)
    frame.causes = packed.causes
    return frame


def _send_report(link: Link, number: int, measures: Measures, packed: Outs, stopped: bool, waited_s: float) -> None:
    frame = _frame_of(packed, number, measures, stopped)
    frame.waited_s = waited_s
    if frame.causes:
        clear_own_frames(frame.causes.values())
    try:
        link.send(frame)
    except FrameError as error:  # nothing has been sent
        middle = len(packed) // 2
        if not middle:
            failed = Failed(ModelError(f"the result cannot be sent: {error}", code="bad_result"))
            packed.kinds[0], packed.values[0] = FailureReports(False).report(1, failed)
            packed.kept = []
            link.send(_frame_of(packed, number, measures, stopped))
            return
        _send_report(link, number, Measures(), packed.part(0, middle), False, waited_s)
        _send_report(link, number, measures, packed.part(middle, len(packed)), stopped, 0.0)


def _step_model(invoker: Invoker, retrier: Retrier, beside: Beside | None) -> StepModel:
    own = partial(own_part, handed_on=hasattr(invoker.instance, "postprocess"))
    form = invoker.traits.form
    if form is Form.STEPS:
        return invoker.instance  # type: ignore[no-any-return]
    if form is Form.GENERATOR:
        return ItemGenerators(invoker.new_generator, retrier.is_fatal, own, beside)
    return BatchGenerators(invoker.new_generator, own, beside)
