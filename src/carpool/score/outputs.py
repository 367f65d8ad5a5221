"""What `carpool score` writes: an answer for each row, in their order, and how far it came."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from carpool.score.inputs import MISSING_ARROW
from carpool.wire import entries

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_PIECE = 2**20


class Answer(NamedTuple):
    """What became of a row.

    Attributes:
        result: The result as JSON; the object with the error, if there is none.
        is_error: Whether the row has failed.
    """

    result: bytes
    is_error: bool


class Output(Protocol):
    """Where the answers go."""

    def write(self, answers: Sequence[Answer]) -> None:
        """Write the next answers; what is written of one in part, a later run does not take."""

    def close(self) -> None:
        """Take note that all answers were written."""


class _File:
    """A file that is written without a buffer, so that a killed process loses nothing."""

    def __init__(self, path: str, keep: int) -> None:
        if path == "-":
            self._fd = sys.stdout.fileno()
            return
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, keep)
        os.lseek(self._fd, keep, os.SEEK_SET)

    def write(self, data: bytes) -> None:
        """Write all of it."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def close(self) -> None:
        """Close it, unless it is the standard output."""
        if self._fd != sys.stdout.fileno():
            os.close(self._fd)


def _as_entry(answer: Answer) -> bytes:
    return answer.result if answer.is_error else entries.of_result(answer.result)


class LinesFile:
    """A file of lines with an answer each.

    Args:
        path: Of the file; "-" for the standard output.
        keep: How many bytes at its beginning are kept.
    """

    def __init__(self, path: str, keep: int) -> None:
        self._file = _File(path, keep)

    def write(self, answers: Sequence[Answer]) -> None:
        self._file.write(b"".join([_as_entry(answer) + b"\n" for answer in answers]))

    def close(self) -> None:
        self._file.close()


class SheetFile:
    """A CSV file with a row for each answer: a column for each field, or `result`; and as the last
    one `error`, or another name if answers have such a field.

    Args:
        path: Of the file; "-" for the standard output.
        keep: How many bytes at its beginning are kept.
        header: The header that it has already; empty for none.
    """

    def __init__(self, path: str, keep: int, header: Sequence[str]) -> None:
        self._file = _File(path, keep)
        self._columns = list(header)

    def write(self, answers: Sequence[Answer]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for answer in answers:
            value = _decode(answer.result)
            if not self._columns:
                is_record = isinstance(value, dict) and not answer.is_error
                fields = list(value) if is_record else ["result"]
                self._columns = [*fields, _mark_beside(fields)]
                writer.writerow(self._columns)
            writer.writerow(self._row(value, is_error=answer.is_error))
        self._file.write(text.getvalue().encode())

    def _row(self, value: Any, *, is_error: bool) -> list[Any]:
        if is_error:
            return [*([""] * (len(self._columns) - 1)), _encode(value["error"]).decode()]
        fields = value if isinstance(value, dict) and self._columns != ["result", "error"] else {"result": value}
        return [*(_cell(fields.get(name)) for name in self._columns[:-1]), ""]

    def close(self) -> None:
        self._file.close()


def _mark_beside(fields: Iterable[str]) -> str:
    """Return the name of the column of errors: one that no field of the answers has."""
    taken, mark = set(fields), "error"
    while mark in taken:
        mark = f"_{mark}"
    return mark


def _cell(value: Any) -> Any:
    return _encode(value).decode() if isinstance(value, dict | list | bool) else value


class ParquetFile:
    """A Parquet file with the columns of a `SheetFile`."""

    def __init__(self, path: str) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise ValueError(MISSING_ARROW) from None
        self._path = path
        self._arrow, self._parquet = pyarrow, parquet
        self._writer: Any = None
        self._mark = ""  # the column of errors

    def write(self, answers: Sequence[Answer]) -> None:
        values = [_decode(answer.result) for answer in answers]
        if not self._mark:
            good = [value for value, answer in zip(values, answers, strict=True) if not answer.is_error]
            self._mark = _mark_beside(name for value in good if isinstance(value, dict) for name in value)
        rows = [self._row(value, is_error=answer.is_error) for value, answer in zip(values, answers, strict=True)]
        if self._writer is None:
            table = self._arrow.Table.from_pylist(rows)
            if self._mark not in table.column_names or table.schema.field(self._mark).type == self._arrow.null():
                fields = [field for field in table.schema if field.name != self._mark]
                schema = self._arrow.schema([*fields, (self._mark, self._arrow.string())])
                table = self._arrow.Table.from_pylist(rows, schema=schema)
            self._writer = self._parquet.ParquetWriter(self._path, table.schema)
            self._writer.write_table(table)
        else:
            self._writer.write_table(self._arrow.Table.from_pylist(rows, schema=self._writer.schema))

    def _row(self, value: Any, *, is_error: bool) -> dict[str, Any]:
        if is_error:
            return {self._mark: _encode(value["error"]).decode()}
        return {**(value if isinstance(value, dict) else {"result": value}), self._mark: None}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Done(NamedTuple):
    """How far an earlier run came.

    Attributes:
        rows: How many answers are there.
        nbytes: How many bytes of the file they take.
        failed: How many of them are errors.
        header: Of a CSV file.
    """

    rows: int
    nbytes: int
    failed: int
    header: list[str]


NOTHING = Done(0, 0, 0, [])


def done_in(path: str, format: str) -> Done:
    """Return how far an earlier run came; a last line that is not complete does not count."""
    if not Path(path).exists():
        return NOTHING
    if format == "csv":
        return _done_in_sheet(path)
    rows = nbytes = failed = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            rows += 1
            nbytes += len(line)
            failed += entries.is_error(line)
    return Done(rows, nbytes, failed, [])


def _done_in_sheet(path: str) -> Done:
    """Return the same of a CSV file, where a line end within quotes does not end a row."""
    rows, nbytes, failed, at = -1, 0, 0, 0
    header: list[str] = []
    is_quoted, record = False, b""
    with open(path, "rb") as file:
        for line in file:
            at += len(line)
            record += line
            is_quoted ^= line.count(b'"') % 2 == 1
            if is_quoted or not line.endswith(b"\n"):
                continue
            fields = next(csv.reader([record.decode()]))
            if rows < 0:
                header = fields
            else:
                failed += bool(fields[-1])
            rows, nbytes, record = rows + 1, at, b""
    return Done(max(rows, 0), nbytes, failed, header)


class Errors:
    """The file of errors: a line for each row that has failed, with its number.

    Args:
        path: Of the file.
        upto: Errors of later rows are dropped, since these are run again.
    """

    def __init__(self, path: str, upto: int) -> None:
        keep = 0
        if upto and Path(path).exists():
            with open(path, "rb") as file:
                for line in file:
                    if not line.endswith(b"\n") or _decode(line)["row"] > upto:
                        break
                    keep += len(line)
        self._file = _File(path, keep)

    def write(self, first: int, answers: Sequence[Answer]) -> None:
        """Write the errors among answers; it comes before the answers are written.

        Args:
            first: The number of the first answer, from 1.
            answers: The next answers.
        """
        lines = [
            _encode({"row": row, **_decode(answer.result)}) + b"\n"
            for row, answer in enumerate(answers, first)
            if answer.is_error
        ]
        if lines:
            self._file.write(b"".join(lines))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
