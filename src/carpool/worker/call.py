"""A batch of encoded items through a model: decode, invoke, check and encode. One item's fault stays its own.

The model is called by `invoke.py`; here its values are read from what callers sent and its results become what they
accept. What fails leaves as an outcome and a text, never as an exception object.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from carpool import nesting, schema
from carpool.clock import Clock, monotonic
from carpool.errors import DeadlineExceeded, InvalidRequest, ModelError, ValidationError
from carpool.foreign import text_of
from carpool.invoke import Invoker
from carpool.parts import Failed, Trouble
from carpool.rows import Rows
from carpool.wire import arrays, payload
from carpool.wire.frame import MAX_FRAME_BYTES, Frame, Kind
from carpool.wire.outcome import Outcome, Report, pack
from carpool.wire.payload import CUSTOM, JSON, MSGPACK, OBJECT, RAW
from carpool.worker.program import MainProgram

_TIMING_S = 2.0  # a warm-up that took so long takes no further timings
_LONGEST_LINE = 2 * 1024
_OWN_FILES = ("/carpool/worker/", "/carpool/invoke.py", "/carpool/parts.py")
_BETWEEN_STAGES = dict.fromkeys((OBJECT, JSON, MSGPACK, RAW, CUSTOM), payload.dump)

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
    ) -> None:
        self.traits = traits = invoker.traits
        self.trouble: list[Trouble] = []
        self._invoker = invoker
        self._last = last
        self._before_predict = before_predict
        self._after_predict = after_predict
        self._main = main
        takes, gives = traits.input_type, traits.output_type
        self._decoders = schema.MadeWhenNeeded(
            {OBJECT: payload.load, RAW: bytes, CUSTOM: bytes},
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
        outcomes, payloads = await self._encode(results, frame.accepts, until)
        busy_s = monotonic() - started
        return Frame(Kind.REPLY, frame.batch, frame.ids, outcomes, payloads=payloads, busy_s=busy_s)

    async def tear_down(self) -> None:
        """Let the model let go."""
        await self._invoker.tear_down()

    # -- the steps around it

    async def _decode(self, frame: Frame, now: float, until: float) -> list[Any]:
        formats, payloads = frame.formats, frame.payloads
        if formats.count(formats[0]) == len(formats) and formats[0] != CUSTOM and min(frame.deadlines) > now:
            with contextlib.suppress(BaseException):  # looked at one by one below
                block = arrays.block_of(payloads, MAX_FRAME_BYTES) if formats[0] == OBJECT else None
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
                values.append(Failed(_as_ours(error, format)))
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
        decoded = await self._invoker.together(self._decode_bodies, bodies, self.trouble, mine, until)
        for i, value in zip(mine, decoded, strict=True):
            values[i] = value

    def _decode_bodies(self, bodies: list[bytes]) -> Any:
        try:
            return self._invoker.instance.decode(bodies)
        except (ValidationError, InvalidRequest):
            raise
        except ValueError as error:  # the usual complaint of parsers: the client's fault, not the model's
            raise InvalidRequest("the body could not be decoded") from error

    async def _encode(
        self, results: list[Any], accepts: bytes, until: float
    ) -> tuple[bytes, Sequence[payload.Payload]]:
        if CUSTOM in accepts:
            await self._encode_custom(results, accepts, until)
        encoders = self._encoders if self._last else _BETWEEN_STAGES
        if accepts.count(accepts[0]) == len(accepts) and Failed not in set(map(type, results)):
            with contextlib.suppress(BaseException):  # looked at one by one below
                encode = encoders[accepts[0]]
                if encode is payload.dump and type(results) is Rows:
                    block = arrays.block_of_rows(results.whole)
                    if block is not None:
                        return bytes(len(results)), block
                return bytes(len(results)), [encode(value) for value in results]
        outcomes = bytearray()
        payloads: list[payload.Payload] = []
        packed: dict[Failed, tuple[Outcome, bytes]] = {}  # items may share one error
        for value, accept in zip(results, accepts, strict=True):
            if type(value) is not Failed:
                try:
                    payloads.append(encoders[accept](value))
                    outcomes.append(Outcome.OK)
                    continue
                except BaseException as error:
                    value = Failed(error)
            if value not in packed:
                outcome, report = _outcome_of(value.error)
                packed[value] = outcome, pack(report)
            outcome, body = packed[value]
            outcomes.append(outcome)
            payloads.append(body)
        return bytes(outcomes), payloads

    async def _encode_custom(self, results: list[Any], accepts: bytes, until: float) -> None:
        """The model's own format: one call of its `encode` for all results of the batch."""
        mine = [i for i, a in enumerate(accepts) if a == CUSTOM and type(results[i]) is not Failed]
        values = [results[i] for i in mine]
        bodies = await self._invoker.together(self._encode_values, values, self.trouble, mine, until)
        for i, body in zip(mine, bodies, strict=True):
            results[i] = body

    def _encode_values(self, values: list[Any]) -> Any:
        return self._invoker.instance.encode(values)


def _as_bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value).tobytes()  # what a class derived from bytes says of itself need not be so
    raise ModelError(f"a raw response needs bytes, but the result is {type(value).__name__}", code="bad_result")


def _as_ours(error: BaseException, format: int) -> BaseException:
    """What went wrong with reading an item, in our words where they fit: where a client has written it."""
    if format == OBJECT:
        return error
    try:
        return schema.as_our_error(error, "msgpack" if format == MSGPACK else "JSON")
    except BaseException:  # it has no text
        return error


def _outcome_of(error: BaseException) -> tuple[Outcome, Report]:
    """An exception as what became of the item: only text, whatever the exception's methods and attributes do."""
    try:
        return _told(error)
    except BaseException:
        return Outcome.MODEL_ERROR, Report(text_of(error), type(error).__name__, describe(error))


def _told(error: BaseException) -> tuple[Outcome, Report]:
    if isinstance(error, _Expired):
        return Outcome.EXPIRED, Report(str(error))
    if isinstance(error, ModelError):
        outcome = Outcome.BAD_RESULT if error.code == "bad_result" else Outcome.MODEL_ERROR
        return outcome, Report(text_of(error), str(error.type_name), str(error.traceback))
    if isinstance(error, ValidationError):
        return Outcome.INVALID_ITEM, Report(str(error) or text_of(error))
    if isinstance(error, InvalidRequest):
        return Outcome.INVALID, Report(str(error) or text_of(error))
    return Outcome.MODEL_ERROR, Report(text_of(error), type(error).__name__, describe(error))


def describe(error: BaseException) -> str:
    """The traceback as text, from the user's first frame on; an endless message is cut."""
    try:
        tb = error.__traceback__
        while tb is not None and any(part in tb.tb_frame.f_code.co_filename for part in _OWN_FILES):
            tb = tb.tb_next
        lines = traceback.TracebackException(type(error), error, tb, compact=True).format()
        return "".join([line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}...\n" for line in lines])
    except BaseException:
        return f"{type(error).__name__} (its traceback could not be read)\n"
