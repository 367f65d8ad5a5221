"""One call of the user's model: encoded items in, encoded results out, and one item's fault stays its own.

    decode -> preprocess -> predict -> postprocess -> check and encode

Every step works on the items that are still sound; an item that fails turns into a `Failure` and the rest go on. A
batch call that raises is split in halves and run again, breadth first, so that only the guilty items fail.
"""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from carpool import schema
from carpool.errors import InvalidRequest, ModelError, ValidationError
from carpool.model import AnyModel, Traits
from carpool.wire import payload
from carpool.wire.frame import Frame, Kind
from carpool.wire.outcome import Outcome, Report, pack
from carpool.wire.payload import CUSTOM, JSON, MSGPACK, OBJECT, RAW

_ALL_BAD = 4  # so many parts of one level fail, and none succeeds: the batch is bad, not an item
_OWN_FILES = ("/carpool/worker/",)
_BETWEEN_STAGES = dict.fromkeys((OBJECT, JSON, MSGPACK, RAW, CUSTOM), payload.dump)


class Failure:
    """Takes the place of an item's value once it has failed."""

    __slots__ = ("outcome", "report")

    def __init__(self, outcome: Outcome, report: Report) -> None:
        self.outcome = outcome
        self.report = report


class Call:
    """A loaded model, ready to be called with frames.

    Args:
        model: what the user gave.
        kwargs: for its constructor, or for each call of a function.
        traits: what `traits_of` read off it.
        batched: whether `predict` takes a list.
        first, last: whether the stage decodes requests, and whether it encodes responses.
        isolate_errors: whether a batch that raises is split to find the guilty items.
        calling: told before each call of `predict`, but for the first of a frame.
    """

    def __init__(
        self,
        model: AnyModel,
        kwargs: dict[str, Any],
        traits: Traits,
        *,
        batched: bool,
        first: bool,
        last: bool,
        isolate_errors: bool,
        calling: Callable[[], None] = lambda: None,
    ) -> None:
        self.traits = traits
        self._batched = batched
        self._last = last
        self._isolate = isolate_errors
        self._calling = calling
        self._calls = 0
        if isinstance(model, type):
            self.instance: Any = model(**kwargs)
            setup = getattr(self.instance, "setup", None)
            if setup is not None:
                setup()
            self._predict: Callable[[Any], Any] = self.instance.predict
        else:
            self.instance = None
            self._predict = functools.partial(model, **kwargs) if kwargs else model
        self._preprocess = getattr(self.instance, "preprocess", None)
        self._postprocess = getattr(self.instance, "postprocess", None)
        self._decoders: dict[int, Callable[[Any], Any]] = {OBJECT: payload.load, RAW: bytes, CUSTOM: bytes}
        if first:
            self._decoders[JSON] = schema.json_reader(traits.input_type)
            self._decoders[MSGPACK] = schema.msgpack_reader(traits.input_type)
        self._encoders: dict[int, Callable[[Any], payload.Payload]] = {
            OBJECT: payload.dump,
            JSON: schema.json_writer(traits.output_type),
            MSGPACK: schema.msgpack_writer(traits.output_type),
            RAW: _as_bytes,
            CUSTOM: _as_bytes,  # by then the model's `encode` has been called
        }

    def warm_up(self, max_batch_size: int) -> None:
        """Run the examples, once one by one and once as a full batch. Raises what the user's code raises."""
        examples = self.traits.examples
        if not examples:
            return
        sizes = {1, max_batch_size} if self._batched else {1}
        for size in sorted(sizes):
            values: list[Any] = [examples[i % len(examples)] for i in range(size)]
            for value in self._run(values):
                if isinstance(value, Failure):
                    raise ModelError(value.report.message, traceback=value.report.traceback)

    def run(self, frame: Frame) -> Frame:
        """Answer a batch; the reply has the items in the order of the batch."""
        started = time.monotonic()
        values = self._decode(frame, started)
        results = self._run(values)
        outcomes, payloads = self._encode(results, frame.accepts)
        busy_s = time.monotonic() - started
        return Frame(Kind.REPLY, frame.batch, frame.ids, outcomes, payloads=payloads, busy_s=busy_s)

    def teardown(self) -> None:
        """Let the model let go."""
        teardown = getattr(self.instance, "teardown", None)
        if teardown is not None:
            teardown()

    # -- the steps

    def _decode(self, frame: Frame, now: float) -> list[Any]:
        formats, payloads = frame.formats, frame.payloads
        if formats.count(formats[0]) == len(formats) and formats[0] != CUSTOM and min(frame.deadlines) > now:
            decode = self._decoders[formats[0]]
            with contextlib.suppress(Exception):  # looked at one by one below
                return [decode(body) for body in payloads]
        values: list[Any] = []
        for format, deadline, body in zip(formats, frame.deadlines, payloads, strict=True):
            try:
                if deadline > now:
                    values.append(self._decoders[format](body))
                else:
                    values.append(Failure(Outcome.EXPIRED, Report("the deadline passed before its turn came")))
            except Exception as error:
                values.append(_failure(schema.as_our_error(error, "msgpack" if format == MSGPACK else "JSON")))
        if CUSTOM in formats:
            self._decode_custom(formats, values)
        return values

    def _decode_custom(self, formats: bytes, values: list[Any]) -> None:
        """The model's own format: one call of its `decode` for all bodies of the batch."""
        mine = [i for i, f in enumerate(formats) if f == CUSTOM and not isinstance(values[i], Failure)]
        bodies = [values[i] for i in mine]
        for i, value in zip(mine, self._together(self._decode_bodies, bodies), strict=True):
            values[i] = value

    def _decode_bodies(self, bodies: list[bytes]) -> Any:
        try:
            return self.instance.decode(bodies)
        except (ValidationError, InvalidRequest):
            raise
        except ValueError as error:  # the usual complaint of parsers: the client's fault, not the model's
            raise InvalidRequest("the body could not be decoded") from error

    def _run(self, values: list[Any]) -> list[Any]:
        """The hooks and `predict` over decoded items."""
        self._calls = 0
        if self._preprocess is not None:
            values = self._each(self._preprocess, values)
        if self._batched:
            results = self._predict_batch(values)
        else:
            results = self._each(self._counted(self._predict), values)
        if any(issubclass(kind, BaseException) for kind in set(map(type, results))):
            # an item's own error, returned in its place
            results = [_failure(y) if isinstance(y, BaseException) else y for y in results]
        if self._postprocess is None:
            return results
        postprocess: Callable[..., Any] = self._postprocess
        if not self.traits.postprocess_takes_x:
            return self._each(postprocess, results)
        pairs = [y if isinstance(y, Failure) else (y, x) for y, x in zip(results, values, strict=True)]
        return self._each(lambda pair: postprocess(*pair), pairs)

    def _predict_batch(self, values: list[Any]) -> list[Any]:
        if Failure not in set(map(type, values)):
            return self._together(self._predict, values)
        sound = [value for value in values if not isinstance(value, Failure)]
        answers = iter(self._together(self._predict, sound) if sound else ())
        return [v if isinstance(v, Failure) else next(answers) for v in values]

    def _each(self, step: Callable[[Any], Any], values: list[Any]) -> list[Any]:
        """`step` for each sound item by itself."""
        done: list[Any] = []
        for value in values:
            if value.__class__ is Failure:
                done.append(value)
                continue
            try:
                done.append(step(value))
            except BaseException as error:
                done.append(_failure(error))
        return done

    def _together(self, function: Callable[[list[Any]], Any], items: list[Any]) -> list[Any]:
        """`function` over all items at once; if it raises, over smaller and smaller parts.

        Breadth first: of n items with one bad one this takes 1 + 2·log2(n) calls. Once a level of four parts or more
        fails as a whole, no part is to blame and all of them get their error.
        """
        function = self._counted(function)
        results: list[Any] = [None] * len(items)
        parts = [(0, len(items))]
        while parts:
            failed: list[tuple[int, int, Failure]] = []
            for begin, end in parts:
                try:
                    results[begin:end] = _as_results(function(items[begin:end]), end - begin)
                except BaseException as error:
                    failed.append((begin, end, _failure(error)))
            hopeless = not self._isolate or (len(failed) == len(parts) >= _ALL_BAD)
            parts = []
            for begin, end, failure in failed:
                if hopeless or end - begin == 1 or failure.outcome == Outcome.BAD_RESULT:
                    results[begin:end] = [failure] * (end - begin)
                else:
                    middle = (begin + end) // 2
                    parts += [(begin, middle), (middle, end)]
        return results

    def _counted(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Report every call of a frame but the first, so that the hang limit is one of a single call."""

        def call(x: Any) -> Any:
            if self._calls:
                self._calling()
            self._calls += 1
            return function(x)

        return call

    def _encode(self, results: list[Any], accepts: bytes) -> tuple[bytes, list[payload.Payload]]:
        if CUSTOM in accepts:
            self._encode_custom(results, accepts)
        encoders = self._encoders if self._last else _BETWEEN_STAGES
        if accepts.count(accepts[0]) == len(accepts) and Failure not in set(map(type, results)):
            encode = encoders[accepts[0]]
            with contextlib.suppress(Exception):  # looked at one by one below
                return bytes(len(results)), [encode(value) for value in results]
        outcomes = bytearray()
        payloads: list[payload.Payload] = []
        for value, accept in zip(results, accepts, strict=True):
            if not isinstance(value, Failure):
                try:
                    payloads.append(encoders[accept](value))
                    outcomes.append(Outcome.OK)
                    continue
                except BaseException as error:
                    value = _failure(error)
            outcomes.append(value.outcome)
            payloads.append(pack(value.report))
        return bytes(outcomes), payloads

    def _encode_custom(self, results: list[Any], accepts: bytes) -> None:
        """The model's own format: one call of its `encode` for all results of the batch."""
        mine = [i for i, a in enumerate(accepts) if a == CUSTOM and not isinstance(results[i], Failure)]
        if mine:
            bodies = self._together(self.instance.encode, [results[i] for i in mine])
            for i, body in zip(mine, bodies, strict=True):
                results[i] = body


def _as_results(returned: Any, n: int) -> list[Any]:
    """What a batch call returned, as a list of `n` results.

    Raises:
        ModelError: it is no sequence, or one of another length.
    """
    if isinstance(returned, list):
        results: list[Any] = returned
    elif hasattr(returned, "unbind") and hasattr(returned, "detach"):  # a torch tensor
        tensor = returned.detach().cpu()
        # a row of its own memory each: pickling a view would take the whole batch along
        results = tensor.tolist() if tensor.ndim == 1 else [row.clone() for row in tensor]
    elif hasattr(returned, "tolist") and hasattr(returned, "ndim"):  # a numpy array
        results = returned.tolist() if returned.ndim <= 1 else list(returned)
    elif isinstance(returned, Sequence) and not isinstance(returned, str | bytes | bytearray):
        results = list(returned)
    else:
        kind = returned.__class__.__name__
        text = f"a batch of {n} needs a sequence of {n} results, but the model returned {kind}"
        raise ModelError(text, code="bad_result")
    if not isinstance(results, list) or len(results) != n:
        got = len(results) if isinstance(results, list) else "a single value"
        text = f"a batch of {n} needs {n} results, but the model returned {got}"
        raise ModelError(text, code="bad_result")
    return results


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return value if isinstance(value, bytes) else bytes(value)
    kind = value.__class__.__name__
    raise ModelError(f"a raw response needs bytes, but the result is {kind}", code="bad_result")


def _failure(error: BaseException) -> Failure:
    """An exception as an item's failure: only text, whatever the exception's methods do."""
    if isinstance(error, ModelError):
        outcome = Outcome.BAD_RESULT if error.code == "bad_result" else Outcome.MODEL_ERROR
        return Failure(outcome, Report(str(error), error.type_name, error.traceback))
    if isinstance(error, ValidationError):
        return Failure(Outcome.INVALID_ITEM, Report(str(error)))
    if isinstance(error, InvalidRequest):
        return Failure(Outcome.INVALID, Report(str(error)))
    try:
        message = str(error)
    except BaseException:
        message = "(the exception's text could not be read)"
    return Failure(Outcome.MODEL_ERROR, Report(message, type(error).__name__, describe(error)))


def describe(error: BaseException) -> str:
    """The traceback as text, from the user's first frame on."""
    try:
        tb = error.__traceback__
        while tb is not None and any(part in tb.tb_frame.f_code.co_filename for part in _OWN_FILES):
            tb = tb.tb_next
        return "".join(traceback.format_exception(type(error), error, tb))
    except BaseException:
        return f"{type(error).__name__} (its traceback could not be read)\n"
