"""Answers a frame with a frame: decode a batch of items, run the model on them, check and encode
its results.

An item's fault stays its own: it fails with an outcome and a report (`worker/own.py`), and the
others go on.

What is alike goes a shorter way to the same outcome: `_answer_array` is short for `_answer`,
`_decode_alike` for `_decode_each`, `_write_alike` for `_write_each`, and `Invoker.run_now` for
`Invoker.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import msgspec

from carpool.engine.call.invoke import Invoker
from carpool.engine.call.results import Again, Failed, Trouble
from carpool.engine.clock import Clock, monotonic
from carpool.engine.fast_paths import fast_path
from carpool.engine.foreign import text_of
from carpool.engine.hints import nesting, schema
from carpool.engine.hints.plain import with_arrays
from carpool.engine.http_request import RequestMaker
from carpool.engine.http_response import Response
from carpool.engine.rows import ArrayRows
from carpool.engine.turns import TURNS, Done, To
from carpool.engine.wire import arrays, payload
from carpool.engine.wire.arrays import Block
from carpool.engine.wire.frame import MAX_FRAME_BYTES, Frame, FrameKind
from carpool.engine.wire.outcome import WAY, FailureReport, Outcome, pack_response, read_report
from carpool.engine.wire.payload import (
    ARRAYS,
    CUSTOM,
    JSON,
    MSGPACK,
    OBJECT,
    OBJECTS,
    RAW,
    Memory,
    Scalars,
    adapted,
    are_scalars,
    as_scalars,
    without_adapter,
)
from carpool.engine.worker.own import ANSWER, ON, SPOTS, Expired, FailureReports, Goes, Spot, outcome_of, own
from carpool.engine.worker.program import MainProgram, unpack_type
from carpool.errors import CarpoolError, InvalidRequest, ModelError
from carpool.model import Adapter, types_of

_TIMING_S = 2.0  # once a warm-up has taken this long, no further sizes are timed
_BETWEEN_STAGES = dict.fromkeys(range(256), payload.dump)
_LISTS = dict.fromkeys(range(256), lambda value: _as_list(value))

_ANY_CUSTOM = bytes([min(format, CUSTOM) for format in range(256)])
_NOT_LAST = "only the last stage may return a Response: return a value from this stage, or raise an exception"


_OUR_OWN = MainProgram(None)


Encoders = Mapping[int, Callable[[Any], payload.Payload]]
"""The writers of results, by the encoding that callers want."""


@dataclass(slots=True, eq=False)
class _Writing:
    """How results are written that go the same way: by the encoding that the caller wants, perhaps
    by the model's own `encode`, and perhaps as `Response`s.
    """

    encoders: Encoders
    has_own: bool = False
    may_respond: bool = False


class ExampleError(Exception):
    """An example does not run through its model, or it or its result does not fit the type hint.

    Attributes:
        traceback: That of the user's code, as text.
    """

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


class BatchAnswerer:
    """Answers batches with a loaded model.

    Args:
        adapters: Make items of what is sent to addresses of their own.
        is_first: Whether requests begin here, so that clients could send the examples.
        is_last: Whether all results are answers, where it has no `spots`.
        spots: What becomes of results; each item says which one of these it is at.
        before_predict: Called before the model's part of each batch, and `after_predict` after it.
        same_process: Whether replies stay in this process, so that exceptions may go with them as
            they are.

    Attributes:
        trouble: What happened to the last batch besides its results.
    """

    def __init__(
        self,
        invoker: Invoker,
        *,
        adapters: Sequence[Adapter] = (),
        is_first: bool,
        is_last: bool,
        spots: Sequence[Spot] = (),
        before_predict: Callable[[], None] | None = None,
        after_predict: Callable[[], None] | None = None,
        main: MainProgram = _OUR_OWN,
        same_process: bool = False,
    ) -> None:
        self.traits = traits = invoker.traits
        self.trouble: list[Trouble] = []
        self._invoker = invoker
        self._adapters = adapters
        self._is_first = is_first
        self._before_predict = before_predict
        self._after_predict = after_predict
        self._main = main
        self._same_process = same_process
        self._memory = Memory()
        self._taken = {JSON: traits.input_type, MSGPACK: traits.input_type}  # types by format
        for i, adapter in enumerate(adapters):
            taken, _ = types_of(adapter)
            self._taken |= {adapted(format, i): taken for format in (JSON, MSGPACK, RAW)}
        self._decoders = schema.MadeWhenNeeded(
            {
                OBJECT: payload.load,
                RAW: schema.raw_reader(traits.input_type),
                CUSTOM: list if traits.decodes_requests else bytes,
            },
            {format: partial(_reader, format, taken) for format, taken in self._taken.items()},
        )
        self._spots = spots or ((ANSWER,) if is_last else (ON,))
        self._writings = {
            Goes.ON: _Writing(_BETWEEN_STAGES),
            Goes.LIST: _Writing(_LISTS),
            Goes.PART: _Writing(_encoders_of(traits.output_type)),
            Goes.ANSWER: _Writing(_encoders_of(traits.output_type), bool(traits.produces), may_respond=True),
        }
        self._early = [_Writing(_encoders_of(spot.answer), may_respond=True) for spot in self._spots]
        spot = self._spots[0]
        self._usual = self._writings[spot.goes[0]] if len(self._spots) == 1 and spot.ways is None else None

    # -- the warm-up

    async def warm_up(self, sizes: Sequence[int], clock: Clock = monotonic) -> list[tuple[int, float]]:
        """Run all examples, one of them alone and all in the largest batches; then time each size
        twice, within reason.

        Args:
            sizes: How many examples to time at a time, rising; none where the model takes single
                items.

        Returns:
            The sizes and the least seconds that each took, without those that there was no time for
            or that were not run in one call. What ran out of memory is in `trouble`, with the
            examples' positions in their batch.

        Raises:
            ExampleError: The user's code failed for one of them, or one of them or its result does
                not fit the model's type hints.
        """
        n = len(self.traits.examples)
        if not n:
            return []
        self.check_examples()
        largest = sizes[-1] if sizes else n
        began = clock()
        best: dict[int, float] = {}
        at_least = [(0, 1), *[(begin, largest) for begin in range(0, n, largest)]]
        timed = [(0, size) for size in [*sizes, *sizes]]
        for i, (begin, size) in enumerate(at_least + timed):
            started = clock()
            if i >= len(at_least) and started - began >= _TIMING_S:
                break
            troubles = len(self.trouble)
            indices, results, took_s = await self._run_examples(clock, begin, size)
            if len(self.trouble) == troubles:
                best[size] = min(took_s, best.get(size, took_s))
            if i < len(at_least):
                await self._check_results(indices, results)
        return [(size, best[size]) for size in sizes if size in best]

    async def warm_up_shapes(
        self, shapes: Sequence[tuple[int, int]], clock: Clock = monotonic
    ) -> list[tuple[int, float]]:
        """Run each shape (the position of an example, and how often the call has it) once, so that
        models that are compiled for it are ready; then time it. Raises what `warm_up` raises.

        Returns:
            The position of each shape that was timed, and the least seconds that it took.
        """
        best: dict[int, float] = {}
        began = clock()
        for i, (example, n) in [*enumerate(shapes), *enumerate(shapes)]:
            if i in best and clock() - began >= _TIMING_S:
                break
            troubles = len(self.trouble)
            _, _, took_s = await self._run_examples(clock, example, n, step=0)
            if len(self.trouble) == troubles:
                best[i] = min(took_s, best.get(i, took_s))
        return sorted(best.items())

    async def _run_examples(
        self, clock: Clock, begin: int, size: int, step: int = 1
    ) -> tuple[list[int], list[Any], float]:
        """Run `size` examples as one batch, beginning with one of them and starting over after the
        last; with a `step` of 0 it is the same one over and over. Return the positions of the
        examples, their results, and the seconds that it took.
        """
        examples = self.traits.examples
        indices = [(begin + step * i) % len(examples) for i in range(size)]

        async def again(positions: Sequence[int]) -> list[Any]:
            return self.examples([indices[i] for i in positions])

        values, started = self.examples(indices), clock()
        results = await self._invoker.run(values, self.trouble, again=again)
        took_s = clock() - started
        for i, value in zip(indices, results, strict=True):
            if type(value) is Failed:
                raise self.failed_example(i, value)
        return indices, results, took_s

    def failed_example(self, i: int, failed: Failed) -> ExampleError:
        _, report = outcome_of(failed.error)
        n = len(self.traits.examples)
        text = f"example {i + 1} of {n} does not run through its model: {report.message}"
        if not self._is_first:
            text += "; this is a later stage, so its examples must be what the stage before it returns"
        return ExampleError(text, report.traceback)

    def examples(self, indices: Iterable[int]) -> list[Any]:
        """Return copies of examples, since the model may write to what it gets."""
        return [own(self.traits.examples[i]) for i in indices]

    def check_examples(self) -> None:
        """Raise `ExampleError` if a client could not send one of the examples.

        What `decode` reads from bodies of the model's own format need not be what the hint says.
        """
        if not self._is_first or self.traits.accepts:
            return
        for number, example in enumerate(self.traits.examples, 1):
            why = schema.why_misfit(example, self.traits.input_type, f"example {number}")
            if why is not None:
                raise ExampleError(why, "")

    async def _check_results(self, indices: list[int], results: list[Any]) -> None:
        """Raise `ExampleError` if one of the examples' results could not be sent on in any way."""
        problems: dict[int, FailureReport] = {}
        positions = list(range(len(results)))
        for format in self._usual_formats():
            reply = Frame(FrameKind.REPLY)
            sample = [_without_turn(results[i]) for i in positions]
            await self._encode_all(sample, bytes([format]) * len(positions), inf, reply, self._of_examples)
            failed = [i for i, outcome in enumerate(reply.formats) if outcome not in (Outcome.OK, Outcome.RESPONSE)]
            for i in failed:
                problems.setdefault(positions[i], read_report(reply.payloads[i]))
            positions = [positions[i] for i in failed]
            if not positions:
                break
        if positions:
            report = problems[positions[0]]
            raise ExampleError(f"example {indices[positions[0]] + 1}: {report.message}", report.traceback)
        gives = self.traits.output_type
        if self._usual_formats() == (OBJECT,) and self._answers:
            for i, result in zip(indices, results, strict=True):
                result = _without_turn(result)
                why = None if type(result) is Response else schema.why_misfit(result, gives, "the result")
                if why is not None:
                    raise ExampleError(f"example {i + 1}: {why}", "")

    def _usual_formats(self) -> tuple[int, ...]:
        """Return the formats that clients usually ask for: each result must fit one of them."""
        if not self._answers:
            return (OBJECT,)
        if self.traits.produces:
            return (CUSTOM,)
        gives = self.traits.output_type
        if gives is bytes:
            return (RAW,)
        if gives is Any:
            return (JSON, MSGPACK, OBJECT)
        return (JSON, MSGPACK) if schema.can_travel(gives) else (OBJECT,)

    @property
    def _answers(self) -> bool:
        return any(Goes.ANSWER in spot.goes or Goes.PART in spot.goes for spot in self._spots)

    @property
    def _of_examples(self) -> _Writing:
        if self._usual is not None:
            return self._usual
        return self._writings[Goes.ANSWER if self._answers else Goes.ON]

    # -- a batch

    async def answer(self, frame: Frame) -> Frame:
        started = monotonic()
        self.trouble = []
        reply = Frame(FrameKind.REPLY, frame.batch_id, frame.ids)
        if type(frame.payloads) is not Block or not await self._answer_array(frame, started, reply):
            await self._answer(frame, started, reply)
        reply.busy_s = monotonic() - started
        return reply

    async def _answer(self, frame: Frame, started: float, reply: Frame) -> None:
        until = max(frame.deadlines)
        again = self._again(frame, until)
        alike = self._decode_alike(frame, started)
        values = await self._decode_each(frame, started, until, self.trouble) if alike is None else alike
        if self._before_predict is not None:
            self._before_predict()
        if alike is None or self._invoker.retrier.may_wait:
            results = await self._invoker.run(values, self.trouble, until=until, again=again)
        else:
            results = self._invoker.run_now(values, self.trouble, until, again)
        if self._after_predict is not None:
            self._after_predict()
        await self.encode(results, frame.accepts, reply, until)

    @fast_path("whole_arrays", declined=False)
    async def _answer_array(self, frame: Frame, started: float, reply: Frame) -> bool:
        """Answer a batch that is one array with one array, if the model takes it as it is; report
        whether it was done.

        Fast path of `_answer`: the same outcome (tests/engine/worker/test_fast_paths.py).
        """
        n = len(frame.ids)
        is_plain = frame.formats.count(OBJECT) == n and (
            frame.accepts.count(OBJECT) == n or OBJECTS.issuperset(frame.accepts)
        )
        if not (is_plain and self._usual is not None and min(frame.deadlines) > started and self._invoker.runs_arrays):
            return False
        until = max(frame.deadlines)
        again = self._again(frame, until)
        try:
            whole = frame.payloads.array()  # type: ignore[attr-defined]
        except BaseException:
            return False
        if self._before_predict is not None:
            self._before_predict()
        results = self._invoker.run_array(whole, self.trouble, until, again)
        if self._after_predict is not None:
            self._after_predict()
        if type(results) is type(whole):
            block = _as_array_block(results, copy=self._same_process)
            if block is not None:
                reply.formats, reply.payloads = bytes(n), block
                return True
            results = ArrayRows(results)
        await self.encode(results, frame.accepts, reply, until)
        return True

    async def decode(self, frame: Frame) -> list[Any]:
        """Return the values of items, with `Failed` for those that cannot be read or are late. The
        items may be read again.
        """
        now = monotonic()
        frame = msgspec.structs.replace(frame, payloads=payload.detached(frame.payloads, self._memory))
        values = self._decode_alike(frame, now)
        return await self._decode_each(frame, now, inf, self.trouble) if values is None else list(values)

    async def tear_down(self) -> None:
        await self._invoker.tear_down()

    # -- reading items

    def _again(self, frame: Frame, until: float) -> Again | None:
        """Return what reads items of a batch once more, for calls after the first; None if there
        will be none.

        What the model is given must not share memory with what is read then, nor with what is not
        this worker's: then the frame gets payloads of its own.
        """
        came, may_call_again = frame.payloads, self._invoker.may_call_again(len(frame.ids))
        if (may_call_again or self._same_process) and OBJECT in frame.formats:
            frame.payloads = payload.detached(came, self._memory)
        return self._reading_again(frame, came, until) if may_call_again else None

    def _reading_again(self, frame: Frame, came: Sequence[payload.Payload], until: float) -> Again:
        async def again(positions: Sequence[int]) -> list[Any]:
            payloads = list(came)
            piece = Frame(FrameKind.BATCH, formats=bytes([frame.formats[i] for i in positions]))
            piece.deadlines = [inf] * len(positions)
            piece.payloads = payload.detached([payloads[i] for i in positions], self._memory)
            return await self._decode_each(piece, 0.0, until, [])

        return again

    async def _decode_each(self, frame: Frame, now: float, until: float, trouble: list[Trouble]) -> list[Any]:
        values: list[Any] = []
        for format, deadline, body in zip(frame.formats, frame.deadlines, frame.payloads, strict=True):
            try:
                if deadline > now:
                    values.append(self._decode_one(format, body))
                else:
                    values.append(Failed(Expired("the deadline passed before the request's turn came")))
            except BaseException as error:  # types may have validators, which are user code
                values.append(Failed(self._as_reading_error(error, format, body)))
        if CUSTOM in frame.formats:
            await self._decode_custom(frame.formats, values, until, trouble)
        for i in range(len(self._adapters) if max(frame.formats) > CUSTOM else 0):
            values = await self._adapt(i, frame.formats, values, trouble)
        return values

    @fast_path("items_alike")
    def _decode_alike(self, frame: Frame, now: float) -> list[Any] | None:
        """Return the values of items of one format; None if they differ, or one of them cannot be
        read or has expired.

        Fast path of `_decode_each`: the same outcome, see tests/engine/worker/test_fast_paths.py.
        """
        formats, payloads = frame.formats, frame.payloads
        format = formats[0]
        if format >= CUSTOM or formats.count(format) != len(formats) or min(frame.deadlines) <= now:
            return None
        if type(payloads) is Scalars and format == OBJECT:
            return payloads[:]
        try:
            if format == OBJECT:
                if are_scalars(payloads):
                    return list(payloads)
                block = arrays.block_of(payloads, MAX_FRAME_BYTES)
                if block is not None:
                    return ArrayRows(block.array())
            decode = nesting.for_now(self._decoders[format])
            items = list(map(decode, payloads))
            return items if len(items) == len(payloads) else None  # code of items that stops an iteration ends `map`
        except BaseException:
            return None

    def _decode_one(self, format: int, body: Any) -> Any:
        try:
            return self._decoders[format](body)
        except (AttributeError, ModuleNotFoundError) as error:
            if format != OBJECT:
                raise
            return self._main.read_again(self._decoders[OBJECT], body, error)

    async def _decode_custom(self, formats: bytes, values: list[Any], until: float, trouble: list[Trouble]) -> None:
        positions = [i for i, f in enumerate(formats) if f == CUSTOM and type(values[i]) is not Failed]
        bodies = [values[i] for i in positions]
        decoded = await self._invoker.call_together(self._decode_bodies, bodies, trouble, positions, until)
        for i, value in zip(positions, decoded, strict=True):
            # an exception may be returned in the place of an item
            values[i] = Failed(_as_parser_error(value)) if issubclass(type(value), BaseException) else value

    def _decode_bodies(self, bodies: list[Any]) -> Any:
        if self.traits.decodes_requests:
            make = RequestMaker().make
            bodies = [make(bytes(head), bytes(body)) for head, body in bodies]
        try:
            return self._invoker.instance.decode(bodies)
        except ValueError as error:
            raise _as_parser_error(error) from error

    async def _adapt(self, i: int, formats: bytes, values: list[Any], trouble: list[Trouble]) -> list[Any]:
        own = [adapted(format, i) for format in (JSON, MSGPACK, RAW)]
        places = [place for place, format in enumerate(formats) if format in own]
        made = await self._invoker.for_each(self._adapters[i], [values[place] for place in places], trouble)
        values = values[:]
        for place, item in zip(places, made, strict=True):
            values[place] = item
        return values

    def _as_reading_error(self, error: BaseException, format: int, body: Any) -> BaseException:
        """Return why an item could not be read, in our own words if a client has written it."""
        if format == OBJECT:
            return error
        taken = self._taken.get(format, Any)
        if format > CUSTOM:
            format, _ = without_adapter(format)
        try:
            return schema.as_our_error(error, payload.format_name(format), taken, body)
        except BaseException:  # it has no text
            return error

    # -- writing results

    async def encode(self, results: list[Any], accepts: bytes, reply: Frame, until: float = inf) -> None:
        usual = self._usual
        if usual is None or not TURNS.isdisjoint(kinds := set(map(type, results))):
            await self._encode_turns(results, accepts, until, reply)
        else:
            await self._encode_all(results, accepts, until, reply, usual, kinds)

    async def _encode_turns(self, results: list[Any], accepts: bytes, until: float, reply: Frame) -> None:
        groups: dict[_Writing, list[int]] = {}
        outcomes, values = bytearray(len(results)), list(results)
        has_spots = len(self._spots) > 1
        for i, accept in enumerate(accepts):
            number = accept // SPOTS if has_spots else 0
            spot = self._spots[number]
            goes, way, values[i] = spot.turn(values[i])
            groups.setdefault(self._early[number] if goes is None else self._writings[goes], []).append(i)
            if goes is None:
                outcomes[i] = Outcome.DONE
            elif spot.ways is not None:
                outcomes[i] = WAY + way
        payloads: list[Any] = [b""] * len(results)
        causes: dict[int, BaseException] = {}
        for writing, places in groups.items():
            part = Frame(FrameKind.REPLY)
            own_accepts = bytes([accepts[i] % SPOTS if has_spots else accepts[i] for i in places])
            await self._encode_all([values[i] for i in places], own_accepts, until, part, writing)
            for i, outcome, body in zip(places, part.formats, part.payloads, strict=True):
                if outcome != Outcome.OK:
                    outcomes[i] = outcome
                payloads[i] = body
            causes |= {places[i]: cause for i, cause in (part.causes or {}).items()}
        reply.formats, reply.payloads = bytes(outcomes), payloads
        reply.causes = causes if self._same_process else None

    async def _encode_all(
        self,
        results: list[Any],
        accepts: bytes,
        until: float,
        reply: Frame,
        writing: _Writing,
        kinds: set[type] | None = None,
    ) -> None:
        """Put outcomes and payloads into the reply, where all results are written alike; `kinds` is
        the set of their types, if it is known.
        """
        if kinds is None:
            kinds = set(map(type, results))
        has_custom = writing.has_own and max(accepts) >= CUSTOM
        if not has_custom and Response not in kinds:
            self._write(results, accepts, kinds, reply, writing)
            return
        if has_custom and len(set(accepts)) > 1:  # the others wait while `encode` is called for those of one format
            results = [y if type(y) is Failed else own(y) for y in results]
        results = results[:]  # it may be a list of the model's own
        responses: dict[int, Response] = {}
        accepts = self._take_out_responses(results, accepts, responses, writing)
        if has_custom:
            for format in sorted(set(accepts)):
                if format >= CUSTOM:
                    await self._encode_custom(results, accepts, until, format)
            accepts = accepts.translate(_ANY_CUSTOM)
            # `encode` may return them as well
            accepts = self._take_out_responses(results, accepts, responses, writing)
        self._write(results, accepts, set(map(type, results)), reply, writing)
        outcomes, payloads = bytearray(reply.formats), list(reply.payloads)
        for i, response in responses.items():
            if outcomes[i] == Outcome.OK:
                outcomes[i] = Outcome.RESPONSE
                payloads[i] = pack_response(response, payloads[i])  # type: ignore[arg-type]
        reply.formats, reply.payloads = bytes(outcomes), payloads

    def _take_out_responses(
        self, results: list[Any], accepts: bytes, responses: dict[int, Response], writing: _Writing
    ) -> bytes:
        """Move each `Response` from `results` to `responses`, and put its value in its place.

        Returns:
            The format of each result, which is raw for responses that are given as a body.
        """
        if Response not in set(map(type, results)):
            return accepts
        formats = bytearray(accepts)
        for i, result in enumerate(results):
            if type(result) is not Response:
                continue
            if not writing.may_respond:
                results[i] = Failed(ModelError(_NOT_LAST, code="bad_result"))
            elif accepts[i] == ARRAYS:
                results[i] = result.value
            elif accepts[i] != OBJECT:  # a Python caller gets the response as it is
                responses[i] = result
                results[i] = result.value
                if result.is_body:
                    results[i] = b"" if result.value is None else result.value
                    formats[i] = RAW
        return bytes(formats)

    def _write(self, results: list[Any], accepts: bytes, kinds: set[type], reply: Frame, writing: _Writing) -> None:
        if not self._write_alike(results, accepts, kinds, reply, writing.encoders):
            self._write_each(results, accepts, reply, writing.encoders)

    def _write_each(self, results: list[Any], accepts: bytes, reply: Frame, encoders: Encoders) -> None:
        outcomes = bytearray()
        payloads: list[payload.Payload] = []
        failures = FailureReports(self._same_process)
        for value, accept in zip(results, accepts, strict=True):
            if type(value) is not Failed:
                try:
                    payloads.append(encoders[accept](value))
                    outcomes.append(Outcome.OK)
                    continue
                except BaseException as error:
                    value = Failed(error)
            outcome, body = failures.report(len(payloads), value)
            outcomes.append(outcome)
            payloads.append(body)
        reply.formats, reply.payloads, reply.causes = bytes(outcomes), payloads, failures.causes

    @fast_path("results_alike", declined=False)
    def _write_alike(
        self, results: list[Any], accepts: bytes, kinds: set[type], reply: Frame, encoders: Encoders
    ) -> bool:
        """Write results of one format; return False if formats differ, an item has failed or one
        cannot be written.

        Fast path of `_write_each`: the same outcome, see tests/engine/worker/test_fast_paths.py.
        """
        accept = accepts[0]
        if Failed in kinds or accepts.count(accept) != len(accepts):
            return False
        try:
            encode = encoders[accept]
            if encode is payload.dump or encode is as_arrays:
                block = _as_block(results, kinds)
                reply.payloads = [encode(value) for value in results] if block is None else block
            else:
                reply.payloads = [encode(value) for value in results]
        except BaseException:
            return False
        reply.formats = bytes(len(results))
        return True

    async def _encode_custom(self, results: list[Any], accepts: bytes, until: float, format: int) -> None:
        positions = [i for i, a in enumerate(accepts) if a == format and type(results[i]) is not Failed]
        values = [results[i] for i in positions]
        content_type = self.traits.produces[format - CUSTOM]
        encode = partial(self._encode_values, content_type)
        kept = dict(zip(positions, map(own, values), strict=True)) if len(values) > 1 else {}

        async def again(positions: Sequence[int]) -> list[Any]:
            return [own(kept[i]) for i in positions]

        bodies = await self._invoker.call_together(encode, values, self.trouble, positions, until, again)
        for i, body in zip(positions, bodies, strict=True):
            results[i] = Failed(body) if issubclass(type(body), BaseException) else own(body)

    def _encode_values(self, content_type: str, values: list[Any]) -> Any:
        encode = self._invoker.instance.encode
        return encode(values, content_type) if self.traits.encode_takes_type else encode(values)


def _without_turn(result: Any) -> Any:
    if type(result) is Done:
        return result.answer
    return result.item if type(result) is To else result


def _encoders_of(gives: Any) -> Encoders:
    """Return what writes results of a type for callers; the model's `encode` is called before."""
    return schema.MadeWhenNeeded[payload.Payload](
        {OBJECT: payload.dump, ARRAYS: as_arrays, CUSTOM: as_bytes},
        {
            JSON: lambda: schema.json_writer(unpack_type(gives)),
            MSGPACK: lambda: schema.msgpack_writer(unpack_type(gives)),
            RAW: lambda: _as_text if unpack_type(gives) is str else as_bytes,
        },
    )


def _as_list(value: Any) -> payload.Payload:
    """Return a list as a payload that can be taken apart. Raises ModelError if it is none."""
    if not isinstance(value, list | tuple):
        kind = type(value).__name__
        raise ModelError(f"ForEach takes a list, and has been given {kind}", code="bad_result")
    return payload.join([payload.dump(each) for each in value], None)


def _reader(format: int, taken: Any) -> Callable[[Any], Any]:
    if format > CUSTOM:
        format, _ = without_adapter(format)
    if format == RAW:
        return schema.raw_reader(taken)
    return schema.msgpack_reader(taken) if format == MSGPACK else schema.json_reader(taken)


def _as_parser_error(error: BaseException) -> BaseException:
    """Return the error of an item for which `decode` has raised or returned one.

    A ValueError is the client's fault.
    """
    kind = type(error)  # its `__class__` may be a trap
    if issubclass(kind, ValueError) and not issubclass(kind, CarpoolError):
        return InvalidRequest("the body could not be decoded")
    return error


def _as_block(results: list[Any], kinds: set[type]) -> Sequence[payload.Payload] | None:
    """Return results of these types as payloads if they travel as one block, else None."""
    return arrays.block_of_rows(results.whole) if type(results) is ArrayRows else as_scalars(results, kinds)


def _as_array_block(array: Any, *, copy: bool) -> Block | None:
    try:
        return arrays.block_of_rows(array, copy=copy)
    except BaseException:
        return None


def as_arrays(value: Any) -> payload.Payload:
    """Return a result as builtins and arrays. Raises `ModelError` if it has none."""
    try:
        return payload.dump(with_arrays(value))
    except MemoryError:
        raise
    except Exception as error:  # the value's own code
        raise ModelError(f"the result cannot be written: {text_of(error)}", code="bad_result") from error


def _as_text(value: Any) -> bytes:
    if type(value) is str:
        return value.encode()
    if type(value) is bytes:  # of a `Response`
        return value
    kind = type(value).__name__
    raise ModelError(f"the result does not fit str: it is of type {kind}", code="bad_result")


def as_bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value).tobytes()  # a class derived from bytes may override how it is read
    kind = type(value).__name__
    raise ModelError(f"a raw response needs bytes, but the model returned an object of type {kind}", code="bad_result")
