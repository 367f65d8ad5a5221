"""What `carpool score` reads: rows of NDJSON, CSV and Parquet, one after the other."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

_SUFFIXES = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_PARQUET_ROWS = 4096
MISSING_ARROW = "Parquet needs a package that is missing (pyarrow): pip install 'carpool[parquet]'"


def format_of(path: str) -> str:
    """Return the format of a file by its name: "csv", "parquet", or else "ndjson"."""
    return _SUFFIXES.get(Path(path).suffix.lower(), "ndjson")


class InputRow(NamedTuple):
    """One row of the input.

    Attributes:
        line: Its JSON as it was read; None if it is a value.
        value: The fields by name; None if it is JSON.
    """

    line: bytes | None
    value: Any


class Input:
    """A file of rows, or the standard input.

    Args:
        path: Of the file; "-" for the standard input.
        format: "ndjson", "csv" or "parquet".

    Attributes:
        size: Of the file in bytes; None if it is not known.
    """

    def __init__(self, path: str, format: str) -> None:
        self._path = path
        self._format = format
        self._file: IO[bytes] | None = None
        self.size = Path(path).stat().st_size if path != "-" and Path(path).is_file() else None

    def rows(self, skipped: int = 0) -> Iterator[InputRow]:
        """Yield the rows without the first ones. Raises OSError or ValueError.

        Args:
            skipped: How many are left out.
        """
        if self._format == "parquet":
            yield from self._parquet(skipped)
            return
        self._file = sys.stdin.buffer if self._path == "-" else open(self._path, "rb")  # noqa: SIM115
        with self._file:
            rows = self._csv(self._file) if self._format == "csv" else self._lines(self._file)
            for n, row in enumerate(rows):
                if n >= skipped:
                    yield row

    @property
    def read_bytes(self) -> int:
        """How far the file has been read."""
        try:
            return 0 if self._file is None or self._path == "-" else self._file.tell()
        except (OSError, ValueError):
            return self.size or 0

    def _lines(self, file: IO[bytes]) -> Iterator[InputRow]:
        for line in file:
            if line.strip():
                yield InputRow(line, None)

    def _csv(self, file: IO[bytes]) -> Iterator[InputRow]:
        lines = iter(lambda: file.readline(), b"")  # not `for`: then there is no `tell`
        text = (line.decode("utf-8-sig" if n == 0 else "utf-8") for n, line in enumerate(lines))
        for row in csv.DictReader(text, strict=True):
            if None in row or None in row.values():
                raise ValueError(f"a row of {self._path} has another number of fields than its header")
            yield InputRow(None, row)

    def _parquet(self, skipped: int) -> Iterator[InputRow]:
        try:
            from pyarrow import parquet
        except ImportError:
            raise ValueError(MISSING_ARROW) from None
        source: Any = io.BytesIO(sys.stdin.buffer.read()) if self._path == "-" else self._path
        n = 0
        with parquet.ParquetFile(source) as file:
            for batch in file.iter_batches(_PARQUET_ROWS):
                if n + len(batch) > skipped:
                    for value in batch.to_pylist()[max(0, skipped - n) :]:
                        yield InputRow(None, value)
                n += len(batch)


def number_in(text: str) -> Any:
    """Return a field of a CSV file: a number if it is one, None if it is empty, else text."""
    if not text:
        return None
    for read in (int, float):
        try:
            value = read(text)
        except ValueError:
            continue
        return value if value == value and abs(value) != float("inf") else text
    return text


def as_value(row: InputRow, kind: Any) -> Any:
    """Return a row of a table as an item: an object of its fields, or what the type makes of it.

    Args:
        row: A row that is no JSON.
        kind: The type of the model's items; `Any` if it is not known.
    """
    fields: dict[str, Any] = row.value
    if not all(isinstance(value, str) for value in fields.values()):
        return fields
    try:
        return msgspec.to_builtins(msgspec.convert(fields, kind, strict=False)) if kind is not Any else _guessed(fields)
    except (msgspec.MsgspecError, TypeError, NotImplementedError):
        guessed = _guessed(fields)
    values = list(guessed.values())
    for candidate in (values[0] if len(values) == 1 else values, guessed):
        try:
            msgspec.convert(candidate, kind)
        except (msgspec.MsgspecError, TypeError, NotImplementedError):
            continue
        return candidate
    return guessed


def _guessed(fields: dict[str, str]) -> dict[str, Any]:
    return {name: number_in(text) for name, text in fields.items()}
