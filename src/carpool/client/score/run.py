"""The command `carpool score`: reads rows, has them answered, shows how far it is, and sums up.

A service that is started for it answers the rows, or a running server.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from carpool.client.score.inputs import Input, InputRow, candidates, format_of
from carpool.client.score.outputs import (
    NOT_BEGUN,
    Answer,
    EarlierRun,
    Errors,
    LineRows,
    Output,
    ParquetFile,
    RowsFile,
    SheetRows,
    done_in,
    is_open_already,
)
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
        """Yield the answers to rows, in their order, in lists of those that came together; an empty
        list once it is ready.
        """

    def summary(self, seconds: float) -> list[str]:
        """Return the summary for the end, in lines."""


def failed(error: BaseException) -> Answer:
    """Return the answer to a row that has failed."""
    if not isinstance(error, CarpoolError):
        error = CarpoolError(text_of(error))
    response = error_response(error, error.request_id, debug=True)
    shown = msgspec.json.decode(response.body)
    if isinstance(error, ModelError) and error.type_name:  # who scores a file may see it: it is their model
        shown["error"]["message"] = ": ".join(filter(None, (error.type_name, shown["error"]["message"])))
    shown["error"]["status"] = response.status
    if not shown["error"]["request_id"]:
        del shown["error"]["request_id"]
    return Answer(_encode(shown), True)


class _Unfit:
    """The rows that are not sent, which have their errors in their places among the answers."""

    def __init__(self, rows: Iterable[InputRow], item_of: Callable[[InputRow], Any]) -> None:
        self._rows = rows
        self._item_of = item_of
        self.errors: deque[Answer | None] = deque()

    def items(self) -> Iterator[Any]:
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


_OK, _SOME_FAILED = 0, 1


class Job(NamedTuple):
    """The rows that are scored.

    Attributes:
        out: The file of answers; "-" for the standard output.
        errors: The file of errors; None for none.
        resume: Whether an earlier run is gone on with.
    """

    source: str
    out: str
    errors: str | None
    in_format: str | None
    out_format: str | None
    resume: bool
    retry_failed: bool


def score(job: Job, scorer: Scorer) -> int:
    """Run a job and return the exit status: 1 if any row has failed.

    Raises:
        ValueError: The job cannot be run; the text says what to change.
        OSError: A file cannot be read or written.
    """
    out_format = job.out_format or format_of(job.out)
    done = _done(job, out_format)
    retried = [place.row for place in done.failed] if job.retry_failed else []
    source = Input(job.source, job.in_format or format_of(job.source))
    errors = None if job.errors is None else Errors(job.errors, done, is_retried=job.retry_failed)
    output = _output(job, out_format, done, scorer.fields)
    console = Console(stderr=True, highlight=False)
    if done.rows:
        again = f"; {len(retried):,} of them had failed and are tried again" if retried else ""
        console.print(f"{done.rows:,} rows were answered before{again}")
    numbers = chain(retried, count(done.rows + 1))
    rows, n_failed, began = 0, 0 if job.retry_failed else len(done.failed), monotonic()
    is_whole = False
    try:
        with _shown(console) as progress:
            task = progress.add_task("starting", total=source.size, rate="")
            for found in scorer.answers(source.rows(done.rows, frozenset(retried))):
                if not found and not rows:
                    began = monotonic()  # it is ready
                    progress.update(task, description="scoring")
                    continue
                answers = output.fitted(found)
                if errors is not None:
                    errors.write([*islice(numbers, len(answers))], answers)
                    if rows + len(answers) >= len(retried):
                        errors.forget()
                output.write(answers)
                rows += len(answers)
                n_failed += sum([answer.is_error for answer in answers])
                rate = rows / max(monotonic() - began, 1e-9)
                progress.update(task, completed=source.read_bytes, rate=f"{rows:,} rows, {rate:,.0f}/s")
        is_whole = True
    finally:
        output.close(is_whole=is_whole)
        if errors is not None:
            errors.close()
    _sum_up(console, scorer, rows, n_failed, monotonic() - began)
    return _SOME_FAILED if n_failed else _OK


def _done(job: Job, out_format: str) -> EarlierRun:
    """Return how far an earlier run came. Raises ValueError if it cannot be gone on with."""
    if not job.resume:
        if job.retry_failed:
            raise ValueError("--retry-failed goes with --resume")
        if not is_open_already(job.out) and Path(job.out).is_file() and Path(job.out).stat().st_size:
            raise ValueError(f"{job.out} is there already: go on with --resume, or choose another --out")
        return NOT_BEGUN
    if out_format == "parquet" or not _may_be_file(job.out):
        raise ValueError("--resume needs an --out that is a file of NDJSON or CSV")
    if not _may_be_file(job.source):
        raise ValueError("--resume needs an --in that is a file, since it reads it from the beginning")
    done = done_in(job.out, out_format)
    if job.retry_failed and len(done.failed) == done.rows:
        return NOT_BEGUN  # nothing in it is kept, the header neither
    return done


def _may_be_file(path: str) -> bool:
    return not is_open_already(path) and (Path(path).is_file() or not Path(path).exists())


def _output(job: Job, format: str, done: EarlierRun, fields: Sequence[str]) -> Output:
    if format == "parquet":
        return ParquetFile(job.out)
    rows = SheetRows(done.header, fields) if format == "csv" else LineRows()
    return RowsFile(job.out, rows, done, is_retried=job.retry_failed)


def _shown(console: Console) -> Progress:
    """Return a progress display, renewed every second; there is none where no person looks."""
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")),
        *(TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TimeRemainingColumn(compact=True)),
    )
    return Progress(*columns, console=console, refresh_per_second=2, transient=True, disable=not sys.stderr.isatty())


def _sum_up(console: Console, scorer: Scorer, rows: int, n_failed: int, seconds: float) -> None:
    rate = rows / seconds if seconds else 0.0
    console.print(f"{rows:,} rows in {seconds:.1f} s, {rate:,.0f} rows/s, {n_failed:,} failed")
    for line in scorer.summary(seconds):
        console.print(line)
