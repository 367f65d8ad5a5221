"""Writes for `carpool score` an answer for each row, in their order, and how far it came."""

from __future__ import annotations

import csv
import os
import stat
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Protocol

import msgspec

from carpool.client.score.inputs import MISSING_ARROW, MIXED, NOTHING, Kind, arrow_type, csv_reader, kind_of, merged
from carpool.http import entries

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_PIECE: Final = 2**20
_ROW_GROUP: Final = 8 * 2**20
"""How many bytes of answers in JSON are about a row group of Parquet."""
_RESULT: Final = "result"
_MOST_HELD: Final = 10_000
"""How many rows of a CSV file may fail before its header is written without a good answer."""


class Answer(NamedTuple):
    """The outcome of a row.

    Attributes:
        result: The result as JSON; the object with the error, if there is none.
        is_error: Whether the row has failed.
    """

    result: bytes
    is_error: bool


class Place(NamedTuple):
    """Where an earlier run has written of a row that it has failed.

    Attributes:
        row: Its number, from 1.
        begin: The first byte.
        end: The byte after its last one.
    """

    row: int
    begin: int
    end: int


class EarlierRun(NamedTuple):
    """How far an earlier run came.

    Attributes:
        rows: How many answers are there.
        nbytes: How many bytes of the file they take.
        failed: Those of them that are errors.
        header: Of a CSV file.
    """

    rows: int
    nbytes: int
    failed: list[Place]
    header: list[str]


NOT_BEGUN: Final = EarlierRun(0, 0, [], [])


class Output(Protocol):
    """Where the answers go."""

    def fitted(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Return answers with an error in the place of each that the file cannot hold."""

    def write(self, answers: Sequence[Answer]) -> None:
        """Write the next answers; one that is written in part is not taken by a later run."""

    def close(self, *, is_whole: bool) -> None:
        """Take note that there are no more answers.

        Args:
            is_whole: Whether there is one for each row.
        """


# -- files


def is_open_already(path: str) -> bool:
    """Report whether a path stands for an input or output that this process has from the start: "-"
    or, for example, /dev/stdout. Opened anew, a file behind it would be begun anew.
    """
    return path in ("-", "/dev/stdin", "/dev/stdout", "/dev/stderr")


class File:
    """A file or pipe that is written without a buffer, so that a killed process loses nothing.

    Args:
        keep: How many bytes at its beginning are kept, unless it is a pipe or a device.
    """

    def __init__(self, path: str, keep: int) -> None:
        self.closed = False
        self._is_ours = not is_open_already(path)
        self._written = 0
        if self._is_ours:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        else:
            self._fd = (sys.stderr if path == "/dev/stderr" else sys.stdout).fileno()
        if self._is_ours and stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.ftruncate(self._fd, keep)
            os.lseek(self._fd, keep, os.SEEK_SET)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        nbytes = len(view)
        while view:
            view = view[os.write(self._fd, view) :]
        self._written += nbytes
        return nbytes

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        """Do nothing: nothing is kept back."""

    def close(self) -> None:
        if not self.closed and self._is_ours:
            os.close(self._fd)
        self.closed = True


class _Mended:
    """A file of answers in which those of failed rows are replaced by new ones. The old file stays
    as it is until all have come.
    """

    def __init__(self, path: str, done: EarlierRun) -> None:
        self._path = os.path.realpath(path)  # a link stays one
        self._beside = f"{self._path}.retried"
        self._upto = done.nbytes
        self._places = deque(done.failed)
        self._at = 0
        self._old = open(path, "rb")  # noqa: SIM115
        self._new = open(self._beside, "wb")  # noqa: SIM115
        os.fchmod(self._new.fileno(), os.fstat(self._old.fileno()).st_mode)

    @property
    def is_whole(self) -> bool:
        return not self._places

    def write(self, answer: bytes) -> None:
        place = self._places.popleft()
        self._copy(place.begin)
        self._new.write(answer)
        self._at = place.end

    def replace(self) -> int:
        """Put it in the place of the old file, and return how many bytes it has."""
        self._copy(self._upto)
        nbytes = self._new.tell()
        self._new.flush()
        os.fsync(self._new.fileno())
        os.replace(self._beside, self._path)
        self._old.close()
        self._new.close()
        return nbytes

    def give_up(self) -> None:
        self._old.close()
        self._new.close()
        os.unlink(self._beside)

    def _copy(self, upto: int) -> None:
        self._old.seek(self._at)
        while self._at < upto:
            piece = self._old.read(min(_PIECE, upto - self._at))
            if not piece:
                raise OSError(f"{self._path} has become shorter while it was read")
            self._new.write(piece)
            self._at += len(piece)


class RowsFile:
    """A file of NDJSON or CSV, with a row for each answer.

    Args:
        done: Its content, which stays.
        is_retried: Whether the first answers take the places of errors that are in it.
    """

    def __init__(self, path: str, rows: LineRows | SheetRows, done: EarlierRun, *, is_retried: bool = False) -> None:
        self._path = path
        self._rows = rows
        self._mended = _Mended(path, done) if is_retried and done.failed else None
        self._file = None if self._mended else File(path, done.nbytes)

    def fitted(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        return self._rows.fitted(answers)

    def write(self, answers: Sequence[Answer]) -> None:
        self._write(self._rows.written(answers))

    def close(self, *, is_whole: bool) -> None:
        if self._mended is not None:
            self._mended.give_up()
            return
        if is_whole:
            self._write(self._rows.rest())
        if self._file is not None:
            self._file.close()

    def _write(self, rows: list[bytes]) -> None:
        at = 0
        while at < len(rows) and self._mended is not None:
            self._mended.write(rows[at])
            at += 1
            if self._mended.is_whole:
                self._file, self._mended = File(self._path, self._mended.replace()), None
        if self._file is not None:
            self._file.write(b"".join(rows[at:]))


# -- what rows look like


class LineRows:
    """Rows of NDJSON: each an answer, as `carpool.http.entries` has them."""

    def fitted(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Return the answers as they are: a line can hold each."""
        return answers

    def written(self, answers: Sequence[Answer]) -> list[bytes]:
        rows = [answer.result + b"\n" for answer in answers]
        if entries.are_plain(b"".join(rows)):
            return rows
        return [(answer.result if answer.is_error else entries.of_result(answer.result)) + b"\n" for answer in answers]

    def rest(self) -> list[bytes]:
        """Return the bytes that were kept back: none."""
        return []


class SheetRows:
    """Rows of CSV: a column for each field, or `result`; and as the last one `error`, or another
    name if answers have such a field.

    The header is made of the first good answer, and of what is known of the others.
    """

    def __init__(self, header: Sequence[str], fields: Sequence[str] = ()) -> None:
        self._columns = list(header)
        self._known = frozenset(header[:-1])
        self._fields = fields
        self._is_header_due = not header
        self._held: list[Answer] = []  # they failed before there was a good one
        self._texts: list[str] = []
        self._writer = csv.writer(self, lineterminator="\r\n")  # so that both are quoted in fields

    def fitted(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Return the answers; those that the header has no columns for are errors, with their
        results.
        """
        for answer in answers:
            if not self._columns and not answer.is_error:
                value = _decode(answer.result)
                names = [*value, *self._fields] if isinstance(value, dict) and value else [_RESULT]
                self._set_columns(list(dict.fromkeys(names)))
        return [self._fitted(answer) for answer in answers]

    def _set_columns(self, fields: list[str]) -> None:
        self._columns = [*fields, _mark_beside(fields)]
        self._known = frozenset(fields)

    @property
    def _has_results(self) -> bool:
        return self._columns == [_RESULT, _mark_beside([_RESULT])]

    def _fitted(self, answer: Answer) -> Answer:
        if answer.is_error or self._has_results:
            return answer
        value = _decode(answer.result)
        if isinstance(value, dict):
            unknown = [name for name in value if name not in self._known]
            if not unknown:
                return answer
            what = f"has fields that the header of the CSV file lacks, such as {unknown[0]!r}"
        else:
            what = "is no object, and the CSV file has a column for each field"
        message = f"the answer {what}: NDJSON and Parquet have room for all answers"
        error = {"code": "bad_result", "message": message, "status": 500, _RESULT: value}
        return Answer(entries.of_error(error), True)

    def written(self, answers: Sequence[Answer]) -> list[bytes]:
        """Return a row for each answer, the first one with the header; none while all have
        failed.
        """
        self._held += answers
        if not self._columns and len(self._held) < _MOST_HELD:
            return []
        return self.rest()

    def rest(self) -> list[bytes]:
        """Return the rows of the answers that were kept back."""
        if not self._held:
            return []
        if not self._columns:
            self._set_columns([_RESULT])
        held, self._held = self._held, []
        rows = [self._written(self._row(_decode(answer.result), is_error=answer.is_error)) for answer in held]
        if self._is_header_due:
            self._is_header_due = False
            rows[0] = self._written(self._columns) + rows[0]
        return rows

    def _row(self, value: Any, *, is_error: bool) -> list[Any]:
        if is_error:
            return [*([""] * (len(self._columns) - 1)), _encode(value["error"]).decode()]
        fields = {_RESULT: value} if self._has_results else value
        return [*(_cell(fields.get(name)) for name in self._columns[:-1]), ""]

    def _written(self, row: list[Any]) -> bytes:
        self._writer.writerow(row)
        text = "".join(self._texts)
        self._texts.clear()
        return text.removesuffix("\r\n").encode() + b"\n"

    def write(self, text: str) -> None:
        self._texts.append(text)


def _mark_beside(fields: Iterable[str]) -> str:
    """Return the name of the column of errors: one that no field of the answers has."""
    taken, mark = set(fields), "error"
    while mark in taken:
        mark = f"_{mark}"
    return mark


def _cell(value: Any) -> Any:
    return _encode(value).decode() if isinstance(value, dict | list | bool) else value


class ParquetFile:
    """A Parquet file with a column for each field that any answer has, or `result`, and with
    `error`.

    The types of its columns are those of all answers. So these lie in a temporary file until all
    have come.
    """

    def __init__(self, path: str) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise ValueError(MISSING_ARROW) from None
        self._arrow, self._parquet = pyarrow, parquet
        self._file = File(path, 0)
        folder = Path(path).absolute().parent
        beside = folder if not is_open_already(path) and os.access(folder, os.W_OK) else None
        self._waiting: IO[bytes] = tempfile.TemporaryFile(dir=beside)  # noqa: SIM115
        self._kinds: dict[str, Kind] = {}

    def fitted(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        return answers

    def write(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if not answer.is_error:
                for name, value in _fields_in(answer.result).items():
                    self._kinds[name] = merged((self._kinds.get(name, NOTHING), kind_of(value)))
            self._waiting.write((b"!" if answer.is_error else b" ") + answer.result + b"\n")

    def close(self, *, is_whole: bool) -> None:
        with self._waiting:
            if is_whole or self._waiting.tell():
                self._write_all()
        self._file.close()

    def _write_all(self) -> None:
        arrow = self._arrow
        mark = _mark_beside(self._kinds)
        columns = [
            arrow.field(name, arrow_type(kind, arrow), metadata={"format": "json"} if kind == MIXED else None)
            for name, kind in self._kinds.items()
        ]
        schema = arrow.schema([*columns, arrow.field(mark, arrow.string())])
        with self._parquet.ParquetWriter(self._file, schema) as writer:
            self._waiting.seek(0)
            while lines := self._waiting.readlines(_ROW_GROUP):
                rows = [self._row(line[1:], mark, is_error=line.startswith(b"!")) for line in lines]
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))

    def _row(self, result: bytes, mark: str, *, is_error: bool) -> dict[str, Any]:
        if is_error:
            return {mark: _encode(_decode(result)["error"]).decode()}
        return {
            name: _encode(value).decode() if self._kinds[name] == MIXED else value
            for name, value in _fields_in(result).items()
        }


def _fields_in(result: bytes) -> dict[str, Any]:
    value = _decode(result)
    return value if isinstance(value, dict) else {_RESULT: value}


# -- what an earlier run has written


def done_in(path: str, format: str) -> EarlierRun:
    """Return how far an earlier run came; a last row that is not complete does not count.

    Raises:
        ValueError: The file was not written by one.
    """
    if not Path(path).exists():
        return NOT_BEGUN
    with open(path, "rb") as file:
        return _done_in_sheet(path, file) if format == "csv" else _done_in_lines(file)


def _done_in_lines(file: IO[bytes]) -> EarlierRun:
    rows = nbytes = 0
    failed: list[Place] = []
    for line in file:
        if not line.endswith(b"\n"):
            break
        rows += 1
        if entries.is_error(line):
            failed.append(Place(rows, nbytes, nbytes + len(line)))
        nbytes += len(line)
    return EarlierRun(rows, nbytes, failed, [])


def _done_in_sheet(path: str, file: IO[bytes]) -> EarlierRun:
    rows, nbytes, at = -1, 0, 0
    header: list[str] = []
    failed: list[Place] = []
    is_whole = has_ended = False

    def lines() -> Iterator[str]:
        nonlocal at, is_whole, has_ended
        for line in file:
            at += len(line)
            is_whole = line.endswith(b"\n")
            yield line.decode(errors="surrogateescape")
        has_ended = True

    try:
        for fields in csv_reader(lines()):
            if not is_whole:
                break
            rows += 1
            if not rows:
                header = fields
            elif len(fields) != len(header):
                raise ValueError(f"{path} cannot be gone on with: row {rows} has not the columns of the header")
            elif fields[-1]:
                failed.append(Place(rows, nbytes, at))
            nbytes = at
    except csv.Error as error:
        if not has_ended:  # else the last row is not complete
            raise ValueError(f"{path} cannot be gone on with: {error} after row {rows}") from None
    return EarlierRun(max(rows, 0), nbytes, failed, header)


# -- errors


class Errors:
    """The file of errors: a line for each row that has failed, with its number.

    Args:
        done: The work that was done before. Errors of later rows are dropped, since these are run
            again.
        is_retried: Whether those of earlier rows are, too: they stay until `forget` is called.
    """

    def __init__(self, path: str, done: EarlierRun, *, is_retried: bool = False) -> None:
        self._path = path
        self._held: list[bytes] | None = [] if is_retried and done.failed else None
        keep = 0
        if done.rows and Path(path).is_file():
            with open(path, "rb") as file:
                for line in file:
                    if not line.endswith(b"\n") or _decode(line)["row"] > done.rows:
                        break
                    keep += len(line)
        self._file = File(path, keep)

    def write(self, rows: Iterable[int], answers: Sequence[Answer]) -> None:
        """Write the errors among answers; it comes before the answers are written.

        Args:
            rows: Their numbers, from 1.
            answers: The next answers.
        """
        lines = [
            _encode({"row": row, **_decode(answer.result)}) + b"\n"
            for row, answer in zip(rows, answers, strict=True)
            if answer.is_error
        ]
        if self._held is not None:
            self._held += lines
        elif lines:
            self._file.write(b"".join(lines))

    def forget(self) -> None:
        """Put the errors that have come since in the place of those of earlier rows."""
        if self._held is not None:
            self._file.close()
            self._file = File(self._path, 0)
            self._file.write(b"".join(self._held))
            self._held = None

    def close(self) -> None:
        self._file.close()
