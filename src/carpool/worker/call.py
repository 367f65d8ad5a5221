"""A batch of encoded items through a model: decode, invoke, check and encode. One item's fault stays its own.

The model is called by `call/invoke.py`; here its values are read from what callers sent and its results become what
they accept. What fails leaves as an outcome and a text, with the exception itself beside it: as it is where the worker
lives in its stage's process, else pickled.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from carpool import details
from carpool.call.invoke import Invoker
from carpool.call.retry import Failed, Trouble
from carpool.clock import Clock, monotonic
from carpool.details import Detail
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidRequest, ModelError, ValidationError
from carpool.foreign import text_of
from carpool.hints import nesting, schema
from carpool.http_request import RequestMaker
from carpool.http_response import Response
from carpool.rows import Rows
from carpool.wire import answer, arrays, payload
from carpool.wire.frame import MAX_FRAME_BYTES, Frame, FrameKind
from carpool.wire.outcome import FailureReport, Outcome, pack, with_cause
from carpool.wire.payload import CUSTOM, JSON, MSGPACK, OBJECT, RAW
from carpool.wire.scalars import are_scalars, as_scalars
from carpool.worker.program import MainProgram

_TIMING_S = 2.0  # a warm-up that took so long takes no further timings
_LONGEST_LINE = 2 * 1024
_HAVE_CAUSES = frozenset({Outcome.MODEL_ERROR, Outcome.BAD_RESULT})
_ROOM_FOR_CAUSES = 2**20  # bytes in one reply, however many items have failed
_OWN_FILES = ("/carpool/worker/", "/carpool/call/invoke.py", "/carpool/call/retry.py")
_BETWEEN_STAGES = dict.fromkeys(range(256), payload.dump)

_ANY_CUSTOM = bytes([min(format, CUSTOM) for format in range(256)])
_NOT_LAST = "a Response is an answer, and only the last stage gives one: return a value here, or an exception"

_OUR_OWN = MainProgram(None)


class _Expired(DeadlineExceeded):
    """Nobody waits for the item any more; user code that raises a `DeadlineExceeded` of its own has failed."""


class ExampleError(Exception):
    """An example does not run through its model.

    Attributes:
        traceback: the user's, as text.
    """

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


class Call:
    """A loaded model, ready to be called with frames.

    Args:
        invoker: calls the model.
        first, last: whether the stage decodes requests, and whether it encodes responses.
        before_predict, after_predict: called around the model's part of each batch.
        main: where classes of the parent's main program are found.
        inside: whether the replies stay in this process, so that exceptions may go with them as they are.

    Attributes:
        trouble: what there is to tell of the last batch, besides its results.
    """

    def __init__(
        self,
        invoker: Invoker,
        *,
        first: bool,
        last: bool,
        before_predict: Callable[[], None] | None = None,
        after_predict: Callable[[], None] | None = None,
        main: MainProgram = _OUR_OWN,
        inside: bool = False,
    ) -> None:
        self.traits = traits = invoker.traits
        self.trouble: list[Trouble] = []
        self._invoker = invoker
        self._last = last
        self._before_predict = before_predict
        self._after_predict = after_predict
        self._main = main
        self._inside = inside
        takes, gives = traits.input_type, traits.output_type
        self._decoders = schema.MadeWhenNeeded(
            {OBJECT: payload.load, RAW: bytes, CUSTOM: list if traits.decodes_requests else bytes},
            {JSON: lambda: schema.json_reader(takes), MSGPACK: lambda: schema.msgpack_reader(takes)} if first else {},
        )
        self._encoders = schema.MadeWhenNeeded[payload.Payload](
            {OBJECT: payload.dump, RAW: _as_bytes, CUSTOM: _as_bytes},  # by then the model's `encode` has been called
            {JSON: lambda: schema.json_writer(gives), MSGPACK: lambda: schema.msgpack_writer(gives)},
        )

    async def warm_up(self, sizes: Sequence[int], clock: Clock = monotonic) -> list[tuple[int, float]]:
        """Run all examples, one of them alone and all in the largest batches; then time each size twice, within reason.

        Args:
            sizes: how many examples to time at a time, rising; none where the model takes single items.
            clock: monotonic seconds.

        Returns:
            The sizes and the least seconds that each took, as far as they were run, and in one call. What ran out of
            memory stands in `trouble`; as places it has the examples' places in their batch.

        Raises:
            ExampleError: the user's code failed for one of them.
        """
        n = len(self.traits.examples)
        if not n:
            return []
        largest = sizes[-1] if sizes else n
        began = clock()
        best: dict[int, float] = {}
        at_least = [(0, 1), *[(begin, largest) for begin in range(0, n, largest)]]
        timed = [(0, size) for size in [*sizes, *sizes]]
        for i, (begin, size) in enumerate(at_least + timed):
            started = clock()
            if i >= len(at_least) and started - began >= _TIMING_S:
                break
            told = len(self.trouble)
            await self._run_examples(begin, size)
            took_s = clock() - started
            if len(self.trouble) == told:
                best[size] = min(took_s, best.get(size, took_s))
        return [(size, best[size]) for size in sizes if size in best]

    async def _run_examples(self, begin: int, size: int) -> None:
        """So many examples in turn, from one on, as one batch."""
        examples = self.traits.examples
        places = [(begin + i) % len(examples) for i in range(size)]
        results = await self._invoker.run([examples[i] for i in places], self.trouble)
        for place, value in zip(places, results, strict=True):
            if type(value) is Failed:
                _, report = _outcome_of(value.error)
                text = f"example {place + 1} of {len(examples)} does not run through its model: {report.message}"
                raise ExampleError(text, report.traceback)

    async def run(self, frame: Frame) -> Frame:
        """Answer a batch; the reply has the items in the order of the batch."""
        started = monotonic()
        self.trouble = []
        until = max(frame.deadlines)
        values = await self._decode(frame, started, until)
        if self._before_predict is not None:
            self._before_predict()
        results = await self._invoker.run(values, self.trouble, until=until)
        if self._after_predict is not None:
            self._after_predict()
        reply = Frame(FrameKind.REPLY, frame.batch, frame.ids)
        await self._encode(results, frame.accepts, until, reply)
        reply.busy_s = monotonic() - started
        return reply

    async def tear_down(self) -> None:
        """Let the model let go."""
        await self._invoker.tear_down()

    # -- the steps around it

    async def _decode(self, frame: Frame, now: float, until: float) -> list[Any]:
        formats, payloads = frame.formats, frame.payloads
        if formats.count(formats[0]) == len(formats) and formats[0] != CUSTOM and min(frame.deadlines) > now:
            with contextlib.suppress(BaseException):  # looked at one by one below
                if formats[0] == OBJECT:
                    if are_scalars(payloads):
                        return list(payloads)
                    block = arrays.block_of(payloads, MAX_FRAME_BYTES)
                    if block is not None:
                        return Rows(block.array())
                decode = nesting.for_now(self._decoders[formats[0]])
                return [decode(body) for body in payloads]
        values: list[Any] = []
        for format, deadline, body in zip(formats, frame.deadlines, payloads, strict=True):
            try:
                if deadline > now:
                    values.append(self._decode_one(format, body))
                else:
                    values.append(Failed(_Expired("the deadline passed before its turn came")))
            except BaseException as error:  # types may have validators, which are user code
                values.append(Failed(self._as_ours(error, format, body)))
        if CUSTOM in formats:
            await self._decode_custom(formats, values, until)
        return values

    def _decode_one(self, format: int, body: Any) -> Any:
        try:
            return self._decoders[format](body)
        except (AttributeError, ModuleNotFoundError) as error:
            if format != OBJECT:
                raise
            return self._main.read_again(self._decoders[OBJECT], body, error)

    async def _decode_custom(self, formats: bytes, values: list[Any], until: float) -> None:
        """The model's own format: one call of its `decode` for all bodies of the batch."""
        mine = [i for i, f in enumerate(formats) if f == CUSTOM and type(values[i]) is not Failed]
        bodies = [values[i] for i in mine]
        if self.traits.decodes_requests:
            make = RequestMaker().make
            bodies = [make(bytes(head), bytes(body)) for head, body in bodies]
        decoded = await self._invoker.together(self._decode_bodies, bodies, self.trouble, mine, until)
        for i, value in zip(mine, decoded, strict=True):
            # an item's own error may stand in its place
            values[i] = Failed(_of_a_parser(value)) if issubclass(type(value), BaseException) else value

    def _decode_bodies(self, bodies: list[Any]) -> Any:
        try:
            return self._invoker.instance.decode(bodies)
        except ValueError as error:
            raise _of_a_parser(error) from error

    async def _encode(self, results: list[Any], accepts: bytes, until: float, reply: Frame) -> None:
        """Put outcomes and payloads into the reply."""
        kinds = set(map(type, results))
        own = self._last and bool(self.traits.produces) and max(accepts) >= CUSTOM
        if not own and Response not in kinds:
            self._write(results, accepts, kinds, reply)
            return
        results = results[:]  # it may be a list of the model's own
        responses: dict[int, Response] = {}
        accepts = self._opened(results, accepts, responses)
        if own:
            for format in sorted(set(accepts)):
                if format >= CUSTOM:
                    await self._encode_custom(results, accepts, until, format)
            accepts = accepts.translate(_ANY_CUSTOM)
            accepts = self._opened(results, accepts, responses)  # `encode` may return them as well
        self._write(results, accepts, set(map(type, results)), reply)
        told, payloads = bytearray(reply.formats), list(reply.payloads)
        for i, response in responses.items():
            if told[i] == Outcome.OK:
                told[i] = Outcome.RESPONSE
                payloads[i] = answer.pack(response, payloads[i])  # type: ignore[arg-type]
        reply.formats, reply.payloads = bytes(told), payloads

    def _opened(self, results: list[Any], accepts: bytes, responses: dict[int, Response]) -> bytes:
        """Put what is in each response in its place; returns how all of it is to be written."""
        if Response not in set(map(type, results)):
            return accepts
        chosen = bytearray(accepts)
        for i, result in enumerate(results):
            if type(result) is not Response:
                continue
            if not self._last:
                results[i] = Failed(ModelError(_NOT_LAST, code="bad_result"))
            elif accepts[i] != OBJECT:  # a caller from Python gets it as it is
                responses[i] = result
                results[i] = result.value
                if result.is_body:
                    results[i] = b"" if result.value is None else result.value
                    chosen[i] = RAW
        return bytes(chosen)

    def _write(self, results: list[Any], accepts: bytes, kinds: set[type], reply: Frame) -> None:
        encoders = self._encoders if self._last else _BETWEEN_STAGES
        if accepts.count(accepts[0]) == len(accepts) and Failed not in kinds:
            with contextlib.suppress(BaseException):  # looked at one by one below
                encode = encoders[accepts[0]]
                block = _block_of(results, kinds) if encode is payload.dump else None
                reply.payloads = [encode(value) for value in results] if block is None else block
                reply.formats = bytes(len(results))
                return
        outcomes = bytearray()
        payloads: list[payload.Payload] = []
        failures = Failures(self._inside)
        for value, accept in zip(results, accepts, strict=True):
            if type(value) is not Failed:
                try:
                    payloads.append(encoders[accept](value))
                    outcomes.append(Outcome.OK)
                    continue
                except BaseException as error:
                    value = Failed(error)
            outcome, body = failures.told(len(payloads), value)
            outcomes.append(outcome)
            payloads.append(body)
        reply.formats, reply.payloads, reply.causes = bytes(outcomes), payloads, failures.causes

    async def _encode_custom(self, results: list[Any], accepts: bytes, until: float, format: int) -> None:
        """A format of the model's own: one call of its `encode` for all results of the batch."""
        mine = [i for i, a in enumerate(accepts) if a == format and type(results[i]) is not Failed]
        values = [results[i] for i in mine]
        kind = self.traits.produces[format - CUSTOM]
        bodies = await self._invoker.together(partial(self._encode_values, kind), values, self.trouble, mine, until)
        for i, body in zip(mine, bodies, strict=True):
            results[i] = Failed(body) if issubclass(type(body), BaseException) else body

    def _encode_values(self, kind: str, values: list[Any]) -> Any:
        encode = self._invoker.instance.encode
        return encode(values, kind) if self.traits.encode_takes_type else encode(values)

    def _as_ours(self, error: BaseException, format: int, body: Any) -> BaseException:
        """What went wrong with reading an item, in our words where they fit: where a client has written it."""
        if format == OBJECT:
            return error
        try:
            return schema.as_our_error(error, "msgpack" if format == MSGPACK else "JSON", self.traits.input_type, body)
        except BaseException:  # it has no text
            return error


def _of_a_parser(error: BaseException) -> BaseException:
    """What `decode` raises or returns in an item's place: a ValueError is the client's fault, not the model's."""
    kind = type(error)  # its `__class__` may be a trap
    if issubclass(kind, ValueError) and not issubclass(kind, CarpoolError):
        return InvalidRequest("the body could not be decoded")
    return error


def _block_of(results: list[Any], kinds: set[type]) -> Sequence[payload.Payload] | None:
    """Results of such types as payloads, if they travel together."""
    return arrays.block_of_rows(results.whole) if type(results) is Rows else as_scalars(results, kinds)


def _as_bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value).tobytes()  # what a class derived from bytes says of itself need not be so
    raise ModelError(f"a raw response needs bytes, but the result is {type(value).__name__}", code="bad_result")


class Failures:
    """What is told of the failed items of one batch.

    Args:
        inside: whether that stays in this process.

    Attributes:
        causes: the exceptions by place, where they may go as they are.
    """

    def __init__(self, inside: bool) -> None:
        self.causes: dict[int, BaseException] | None = {} if inside else None
        self._reports: dict[Failed, tuple[Outcome, bytes, bytes]] = {}  # without and with a cause; items may share one
        self._room = _ROOM_FOR_CAUSES

    def told(self, place: int, failed: Failed) -> tuple[Outcome, bytes]:
        """What became of an item, and the report of it."""
        if failed not in self._reports:
            self._reports[failed] = self._packed(failed.error)
        outcome, body, with_cause = self._reports[failed]
        if self.causes is not None:
            cause = _cause_of(failed.error) if outcome in _HAVE_CAUSES else None
            if cause is not None:
                self.causes[place] = cause
        elif len(with_cause) <= self._room:
            self._room -= len(with_cause)
            body = with_cause
        return outcome, body

    def _packed(self, error: BaseException) -> tuple[Outcome, bytes, bytes]:
        outcome, report = _outcome_of(error)
        body = pack(report)
        cause = _cause_of(error) if outcome in _HAVE_CAUSES else None
        if cause is None:
            return outcome, body, body
        if self.causes is not None:
            _begin_in_user_code(cause)
            return outcome, body, body
        return outcome, body, pack(with_cause(report, cause))


def _cause_of(error: BaseException) -> BaseException | None:
    """What the caller's `ModelError` comes from: the exception; what that comes from, if it is just such an error."""
    return error.__cause__ if type(error) is ModelError else error


def _outcome_of(error: BaseException) -> tuple[Outcome, FailureReport]:
    """An exception as what became of the item: only text, whatever the exception's methods and attributes do."""
    try:
        return _told(error)
    except BaseException:
        return Outcome.MODEL_ERROR, FailureReport(text_of(error), type(error).__name__, describe(error))


def _told(error: BaseException) -> tuple[Outcome, FailureReport]:
    if isinstance(error, _Expired):
        return Outcome.EXPIRED, FailureReport(str(error))
    if isinstance(error, ModelError):
        outcome = Outcome.BAD_RESULT if error.code == "bad_result" else Outcome.MODEL_ERROR
        return outcome, FailureReport(text_of(error), str(error.type_name), str(error.traceback))
    if isinstance(error, ValidationError):
        return Outcome.INVALID_ITEM, FailureReport(str(error) or text_of(error), details=_details_of(error))
    if isinstance(error, InvalidRequest):
        return Outcome.INVALID, FailureReport(str(error) or text_of(error))
    return Outcome.MODEL_ERROR, FailureReport(text_of(error), type(error).__name__, describe(error))


def _details_of(error: ValidationError) -> list[Detail]:
    """What is wrong in detail; nothing where the error's class is the user's and does not say."""
    try:
        return details.sanitized(error.details)
    except BaseException:
        return []


def _users_part(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on."""
    tb = error.__traceback__
    while tb is not None and any(part in tb.tb_frame.f_code.co_filename for part in _OWN_FILES):
        tb = tb.tb_next
    return tb


def _begin_in_user_code(error: BaseException) -> None:
    """Cut our own frames off an exception's traceback: they say nothing to the user, and they hold the batch."""
    with contextlib.suppress(BaseException):
        BaseException.with_traceback(error, _users_part(error))


def let_go(causes: Iterable[BaseException]) -> None:
    """Empty the frames of ours through which exceptions have come, now that the call has ended.

    They are reached from the user's frames, which called them; they hold the batch, and the exceptions themselves.
    """
    for cause in {id(each): each for each in causes}.values():
        with contextlib.suppress(
            BaseException
        ):  # of a frame that still runs, which the call was made from: RuntimeError
            tb = _users_part(cause)
            frame = None if tb is None else tb.tb_frame.f_back
            while frame is not None:
                if any(part in frame.f_code.co_filename for part in _OWN_FILES):
                    frame.clear()
                frame = frame.f_back


def describe(error: BaseException) -> str:
    """The traceback as text, from the user's first frame on; an endless message is cut."""
    try:
        tb = _users_part(error)
        lines = traceback.TracebackException(type(error), error, tb, compact=True).format()
        return "".join([line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}...\n" for line in lines])
    except BaseException:
        return f"{type(error).__name__} (its traceback could not be read)\n"
