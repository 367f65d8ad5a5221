"""What answers the rows of `carpool score`: a service started for it, or a running server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from carpool.client.score.inputs import InputRow, candidates
from carpool.client.score.outputs import Answer
from carpool.engine.clock import monotonic
from carpool.engine.foreign import text_of
from carpool.engine.hints import schema
from carpool.errors import CarpoolError, ModelError, ValidationError
from carpool.http.codec import error_response
from carpool.http.protocols.rows import fields_of

if TYPE_CHECKING:
    from carpool.service.service import Service

LONGEST_SILENCE_S: Final = 60.0
"""A server that owes answers has failed if it sends nothing for so long. During a slow batch it
sends a sign of life every 15 s."""

_MOST_AT_ONCE = 512
_LONGEST_S = 0.2  # answers of a slow model are written this often, so that little is done again after a kill
_encode = msgspec.json.Encoder().encode


class Scorer(Protocol):
    """Answers rows."""

    fields: Sequence[str]
    """The names of the fields that answers may have, as far as they are known."""

    def answers(self, rows: Iterable[InputRow]) -> Iterator[list[Answer]]:
        """Yield the answers to rows, in their order, in lists of what came together; an empty list
        once it is ready.
        """

    def summary(self, seconds: float) -> list[str]:
        """Return what is worth knowing in the end, in lines."""


def failed(error: BaseException) -> Answer:
    """Return the answer to a row that has failed."""
    if not isinstance(error, CarpoolError):
        error = CarpoolError(text_of(error))
    response = error_response(error, error.request_id, debug=True)
    told = msgspec.json.decode(response.body)
    if isinstance(error, ModelError) and error.type_name:  # who scores a file may see it: it is their model
        told["error"]["message"] = ": ".join(filter(None, (error.type_name, told["error"]["message"])))
    told["error"]["status"] = response.status
    if not told["error"]["request_id"]:
        del told["error"]["request_id"]
    return Answer(_encode(told), True)


class _Unfit:
    """The rows that are not sent, which have their errors in their places among the answers.

    Args:
        rows: All of them.
        item_of: Makes an item of a row, or raises a `CarpoolError`.

    Attributes:
        errors: For each row without an answer its error, or None if it was sent.
    """

    def __init__(self, rows: Iterable[InputRow], item_of: Callable[[InputRow], Any]) -> None:
        self._rows = rows
        self._item_of = item_of
        self.errors: deque[Answer | None] = deque()

    def items(self) -> Iterator[Any]:
        """Yield the items of the rows that fit."""
        for row in self._rows:
            try:
                if row.problem is not None:
                    raise ValidationError(row.problem)
                item = self._item_of(row)
            except CarpoolError as error:
                self.errors.append(failed(error))
            else:
                self.errors.append(None)
                yield item

    def rest(self) -> list[Answer]:
        """Return the errors after the last answer."""
        return [error for error in self.errors if error is not None]


class ServiceScorer:
    """Starts a service and streams the rows through it. Nobody waits for an answer, so no request
    has a time-out.

    Args:
        service: The service.
    """

    def __init__(self, service: Service) -> None:
        first, last = service.takes, service.gives
        self._service = service
        self._kind = first.input_type
        self._read = schema.json_reader(first.input_type)
        self._read_packed = schema.msgpack_reader(first.input_type)
        self._write = schema.json_writer(last.output_type)
        self._handle: Any = None
        self.fields: Sequence[str] = [*(fields_of(last.output_type) or ())]

    def answers(self, rows: Iterable[InputRow]) -> Iterator[list[Answer]]:
        unfit = _Unfit(rows, self._item)
        with self._service.run() as self._handle:
            yield []
            bunch: list[Answer] = []
            told_at = monotonic()
            for result in self._handle.stream(unfit.items(), return_exceptions=True):
                while (error := unfit.errors.popleft()) is not None:
                    bunch.append(error)
                bunch.append(self._answer(result))
                if len(bunch) >= _MOST_AT_ONCE or monotonic() - told_at > _LONGEST_S:
                    yield bunch
                    bunch, told_at = [], monotonic()
            yield [*bunch, *unfit.rest()]
            self._stats = self._handle.stats()

    def _item(self, row: InputRow) -> Any:
        """Return a row as an item. Raises `CarpoolError` if it does not fit."""
        if row.line is not None:
            try:
                return self._read(row.line)
            except BaseException as error:  # types may have validators, which are user code
                raise self._as_ours(error, "JSON", row.line) from None
        if self._kind is Any:
            return next(candidates(row, Any))
        unfit: CarpoolError | None = None
        for value in candidates(row, self._kind):
            for write, read, what in (
                (schema.msgpack_bytes, self._read_packed, "msgpack"),  # it has NaN, bytes and times
                (schema.json_bytes, self._read, "JSON"),  # in which strict models take texts for times
            ):
                body = b""
                try:
                    body = write(value)
                    return read(body)
                except BaseException as error:
                    ours = self._as_ours(error, what, body)
                    if not isinstance(ours, Exception):
                        raise
                    unfit = unfit or (ours if isinstance(ours, CarpoolError) else ValidationError(text_of(ours)))
        raise unfit or ValidationError("the row has no fields")

    def _as_ours(self, error: BaseException, what: str, body: bytes) -> BaseException:
        return schema.as_our_error(error, what, self._kind, body)

    def _answer(self, result: Any) -> Answer:
        try:
            if isinstance(result, BaseException):
                raise result
            return Answer(self._write(result), False)
        except BaseException as error:
            return failed(error)

    def summary(self, seconds: float) -> list[str]:
        lines = []
        for stage, snapshot in zip(self._service.stages, self._stats.stages, strict=True):
            busy = snapshot.mean_compute_s * snapshot.batches / (stage.most_workers * seconds) if seconds else 0.0
            lines.append(
                f"{stage.name}: mean batch size {snapshot.mean_batch_size:.1f}, workers busy {min(busy, 1):.0%}"
            )
        return lines


class ServerScorer:
    """Sends the rows to a running server.

    Args:
        url: Of the server.
        model: The name of the model; None for the first one.
        connect: Makes a client of an address and the name of a model.
    """

    def __init__(self, url: str, model: str | None, connect: Callable[..., Any]) -> None:
        self._url = url
        self._client = connect(url, model=model)
        self.fields: Sequence[str] = ()

    def answers(self, rows: Iterable[InputRow]) -> Iterator[list[Answer]]:
        unfit = _Unfit(rows, self._item)
        with self._client:
            self._client.wait_until_ready()
            yield []
            for results in self._client.bunches(unfit.items(), timeout_s=LONGEST_SILENCE_S):
                bunch: list[Answer] = []
                for result in results:
                    while (error := unfit.errors.popleft()) is not None:
                        bunch.append(error)
                    bunch.append(self._answer(result))
                yield bunch
            yield unfit.rest()

    def _item(self, row: InputRow) -> msgspec.Raw:
        """Return a row as a line. Raises `ValidationError` if JSON cannot express it."""
        if row.line is not None:
            return msgspec.Raw(row.line.strip())
        try:
            return msgspec.Raw(schema.json_bytes(next(candidates(row, Any))))
        except (TypeError, ValueError) as error:
            raise ValidationError(text_of(error)) from None

    def _answer(self, result: Any) -> Answer:
        return failed(result) if isinstance(result, BaseException) else Answer(_encode(result), False)

    def summary(self, seconds: float) -> list[str]:
        return [f"server: {self._url}"]
