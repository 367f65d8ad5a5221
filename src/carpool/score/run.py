"""What answers the rows of `carpool score`: a service started for it, or a running server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from carpool.clock import monotonic
from carpool.errors import CarpoolError, ModelError
from carpool.foreign import text_of
from carpool.hints import schema
from carpool.http.codec import error_response
from carpool.score.inputs import InputRow, as_value
from carpool.score.outputs import Answer

if TYPE_CHECKING:
    from carpool.service.service import Service

_MOST_AT_ONCE = 512
_LONGEST_S = 0.2  # answers of a slow model are written this often, so that little is done again after a kill
_encode = msgspec.json.Encoder().encode


class Scorer(Protocol):
    """Answers rows."""

    def answers(self, rows: Iterable[InputRow]) -> Iterator[list[Answer]]:
        """Yield the answers to rows, in their order, in lists of what came together."""

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


class ServiceScorer:
    """Starts a service and streams the rows through it.

    Args:
        service: The service.
        run: Starts it, and returns its handle.
    """

    def __init__(self, service: Service) -> None:
        first, last = service.stages[0].traits, service.stages[-1].traits
        self._service = service
        self._kind = first.input_type
        self._read = schema.json_reader(first.input_type)
        self._write = schema.json_writer(last.output_type)
        self._handle: Any = None

    def answers(self, rows: Iterable[InputRow]) -> Iterator[list[Answer]]:
        unfit: deque[Answer | None] = deque()  # for each row why it was not sent, or None

        def items() -> Iterator[Any]:
            for row in rows:
                try:
                    item = self._item(row)
                except CarpoolError as error:
                    unfit.append(failed(error))
                else:
                    unfit.append(None)
                    yield item

        with self._service.run() as self._handle:
            bunch: list[Answer] = []
            told_at = monotonic()
            for result in self._handle.stream(items(), return_exceptions=True):
                while (answer := unfit.popleft()) is not None:
                    bunch.append(answer)
                bunch.append(self._answer(result))
                if len(bunch) >= _MOST_AT_ONCE or monotonic() - told_at > _LONGEST_S:
                    yield bunch
                    bunch, told_at = [], monotonic()
            yield [*bunch, *[answer for answer in unfit if answer is not None]]
            self._stats = self._handle.stats()

    def _item(self, row: InputRow) -> Any:
        """Return a row as an item. Raises `CarpoolError` if it does not fit."""
        line = row.line
        try:
            if line is None:
                line = schema.json_bytes(as_value(row, self._kind))
            return self._read(line)
        except BaseException as error:  # types may have validators, which are user code
            ours = schema.as_our_error(error, "JSON", self._kind, line or b"")
            if isinstance(ours, CarpoolError):
                raise ours from None
            raise

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

    def answers(self, rows: Iterable[InputRow]) -> Iterator[list[Answer]]:
        def items() -> Iterator[Any]:
            for row in rows:
                yield msgspec.Raw(row.line.strip()) if row.line is not None else as_value(row, Any)

        with self._client:
            self._client.wait_until_ready()
            for bunch in self._client.bunches(items()):
                yield [
                    failed(each) if isinstance(each, BaseException) else Answer(_encode(each), False) for each in bunch
                ]

    def summary(self, seconds: float) -> list[str]:
        return [f"server: {self._url}"]
