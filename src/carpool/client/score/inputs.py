"""Reads for `carpool score` the rows of NDJSON, CSV and Parquet, one after the other.

A column of a Parquet file gets a type that keeps each of its values as it is, or JSON text where
none does. pyarrow would decide by the rows that it sees first.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

_SUFFIXES: Final = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_PARQUET_ROWS: Final = 4096
_LONGEST_FIELD: Final = 2**31 - 1
_LARGEST: Final = 2**63
MISSING_ARROW: Final = "Parquet needs a package that is missing (pyarrow): pip install 'carpool[parquet]'"
_NO_VALUES: Final[dict[str, Any]] = {}
_read_number = msgspec.json.Decoder(int | float).decode


def format_of(path: str) -> str:
    """Return the format of a file by its name: "csv", "parquet", or else "ndjson"."""
    return _SUFFIXES.get(Path(path).suffix.lower(), "ndjson")


class InputRow(NamedTuple):
    """One row of the input.

    Attributes:
        line: Its JSON as it was read; None if it is of a table.
        values: Its fields by name, in a table.
        are_texts: Whether these are texts that may stand for something else, as in CSV.
    """

    line: bytes | None
    values: dict[str, Any]
    are_texts: bool = False
    problem: str | None = None


class Input:
    """A file of rows, or the standard input.

    Args:
        path: Of the file; "-" for the standard input.
        format: "ndjson", "csv" or "parquet".

    Attributes:
        size: Of the file in bytes; None if it is not known.
    """

    def __init__(self, path: str, format: str) -> None:
        self._path = "-" if path == "/dev/stdin" else path
        self._format = format
        self._file: IO[bytes] | None = None
        self.size = Path(path).stat().st_size if self._path != "-" and Path(path).is_file() else None

    def rows(self, skipped: int = 0, but: Collection[int] = ()) -> Iterator[InputRow]:
        """Yield the rows without the first ones. Raises OSError or ValueError.

        Args:
            skipped: How many are left out.
            but: The numbers, from 1, of those among them that are not.
        """
        rows = self._rows()
        for n, row in enumerate(islice(rows, skipped), 1):
            if n in but:
                yield row
        yield from rows

    @property
    def read_bytes(self) -> int:
        """How far the file has been read."""
        try:
            return 0 if self._file is None or self.size is None else self._file.tell()
        except (OSError, ValueError):
            return self.size or 0

    def _rows(self) -> Iterator[InputRow]:
        self._file = sys.stdin.buffer if self._path == "-" else open(self._path, "rb")  # noqa: SIM115
        with self._file as file:
            if self._format == "parquet":
                yield from self._parquet(file)
            elif self._format == "csv":
                yield from self._csv(file)
            else:
                yield from self._lines(file)

    def _lines(self, file: IO[bytes]) -> Iterator[InputRow]:
        for line in file:
            if line.strip():
                yield InputRow(line, _NO_VALUES)

    def _csv(self, file: IO[bytes]) -> Iterator[InputRow]:
        with io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
            yield from self._records(csv_reader(text))

    def _records(self, reader: Any) -> Iterator[InputRow]:
        try:
            names: list[str] = next((fields for fields in reader if fields), [])
        except csv.Error as error:
            raise ValueError(f"the header of {self._path} cannot be read: {error}") from None
        if problem := _problem_of(names, len(names)):
            raise ValueError(f"the header of {self._path} cannot be read: {problem}")
        if len(set(names)) < len(names):
            raise ValueError(f"the header of {self._path} names a column twice: rename one")
        while True:
            first = reader.line_num + 1
            try:
                fields = next(reader)
                problem = _problem_of(fields, len(names))
            except StopIteration:
                return
            except csv.Error as error:
                fields, problem = [], str(error)
            if problem is not None:
                last = reader.line_num
                where = f"line {first}" if first == last else f"lines {first} to {last}"
                yield InputRow(None, {}, problem=f"{where} of {self._path}: {problem}")
            elif fields:
                yield InputRow(None, dict(zip(names, fields, strict=True)), are_texts=True)

    def _parquet(self, file: IO[bytes]) -> Iterator[InputRow]:
        try:
            from pyarrow import parquet
        except ImportError:
            raise ValueError(MISSING_ARROW) from None
        source = file if self.size is not None else io.BytesIO(file.read())  # it is read from its end
        with parquet.ParquetFile(source) as table:
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError(f"{self._path} has two columns of one name: rename one")
            for batch in table.iter_batches(_PARQUET_ROWS):
                for values in batch.to_pylist():
                    yield InputRow(None, values)


def csv_reader(lines: Iterable[str]) -> Any:
    """Return a reader of CSV that takes fields of any length and passes over no mistake."""
    csv.field_size_limit(_LONGEST_FIELD)  # it is that of all readers of this process, a command of its own
    return csv.reader(lines, strict=True)


def _problem_of(fields: list[str], n: int) -> str | None:
    """Return why the fields of a line are no row of `n` columns; None if they are."""
    if fields and len(fields) != n:
        return f"it has {len(fields)} field{'s' * (len(fields) != 1)}, and the header {n}"
    try:
        "".join(fields).encode()
    except UnicodeEncodeError:
        return "it is not UTF-8"
    return None


def candidates(row: InputRow, kind: Any) -> Iterator[Any]:
    """Yield the items that a row of a table may stand for, the likeliest first."""
    fields = row.values
    if row.are_texts:
        if kind is not Any:
            for texts in (fields, {name: text or None for name, text in fields.items()}):
                try:
                    yield msgspec.convert(texts, kind, strict=False)
                except Exception:  # types may have validators, which are user code
                    continue
            yield fields
        fields = {name: _guessed(text) for name, text in fields.items()}
    yield fields
    if kind is not Any:
        values = list(fields.values())
        yield values[0] if len(values) == 1 else values
        if row.are_texts and len(values) == 1:
            yield next(iter(row.values.values()))


def _guessed(text: str) -> Any:
    """Return the likely value of a field of a CSV file: a number as JSON writes it, None if it is
    empty, else text, such as a code that begins with zeros.
    """
    if not text:
        return None
    try:
        number = _read_number(text)
    except msgspec.DecodeError:
        return text
    return number if -_LARGEST <= number < _LARGEST or type(number) is float else text


NOTHING: Final = "null"
MIXED: Final = "mixed"
_EXACT_IN_FLOATS: Final = 2**53
_INTEGERS: Final = ("small", "int")
_ARROW: Final = {
    NOTHING: "null",
    "bool": "bool_",
    "str": "string",
    "small": "int64",
    "int": "int64",
    "float": "float64",
}


class ListOf(NamedTuple):
    """The kind of a list.

    Attributes:
        kind: The type of its elements.
    """

    kind: Kind


class Fields(NamedTuple):
    """The kind of an object.

    Attributes:
        fields: The type of each of them, in the order of their names.
    """

    fields: tuple[tuple[str, Kind], ...]


Kind = str | ListOf | Fields
"""What values are: "null", "bool", "small" (a whole number that a float can hold), "int", "float",
"str", a list, a record; or "mixed"."""


def kind_of(value: Any) -> Kind:
    """Return the kind of a value that was read from JSON."""
    if value is None:
        return NOTHING
    kind = type(value)
    if kind is int:
        return _kind_of_integers((value, value))
    if kind is list:
        return _list_kind(value)
    if kind is dict:
        fields = tuple((name, kind_of(value[name])) for name in sorted(value))
        return Fields(fields) if fields and all(each != MIXED for _, each in fields) else MIXED
    return kind.__name__


def _list_kind(values: list[Any]) -> Kind:
    kinds = set(map(type, values))
    if kinds == {int}:
        kind: Kind = _kind_of_integers(values)
    elif len(kinds) == 1 and kinds <= {float, str, bool}:
        kind = kinds.pop().__name__
    else:
        kind = merged(map(kind_of, values))
    return MIXED if kind == MIXED else ListOf(kind)


def _kind_of_integers(values: Iterable[int]) -> Kind:
    least, most = min(values), max(values)
    if least >= -_EXACT_IN_FLOATS and most <= _EXACT_IN_FLOATS:
        return "small"
    return "int" if least >= -_LARGEST and most < _LARGEST else MIXED


def merged(kinds: Iterable[Kind]) -> Kind:
    """Return the common kind of values of these kinds."""
    together: Kind = NOTHING
    for kind in kinds:
        together = _merged(together, kind)
    return together


def _merged(one: Kind, other: Kind) -> Kind:
    if one == other or other == NOTHING:
        return one
    if one == NOTHING:
        return other
    if one in _INTEGERS and other in _INTEGERS:
        return "int"
    if {"small", "float"} == {one, other}:
        return "float"
    if isinstance(one, ListOf) and isinstance(other, ListOf):
        kind = _merged(one.kind, other.kind)
        return MIXED if kind == MIXED else ListOf(kind)
    if isinstance(one, Fields) and isinstance(other, Fields):
        names = [name for name, _ in one.fields]
        if names == [name for name, _ in other.fields]:  # a field that is not there is not null
            kinds = [_merged(mine, its) for (_, mine), (_, its) in zip(one.fields, other.fields, strict=True)]
            return MIXED if MIXED in kinds else Fields(tuple(zip(names, kinds, strict=True)))
    return MIXED


def arrow_type(kind: Kind, arrow: Any) -> Any:
    """Return the type of pyarrow that holds values of a kind; texts for JSON if it is mixed."""
    if isinstance(kind, ListOf):
        return arrow.list_(arrow_type(kind.kind, arrow))
    if isinstance(kind, Fields):
        return arrow.struct([(name, arrow_type(each, arrow)) for name, each in kind.fields])
    return arrow.string() if kind == MIXED else getattr(arrow, _ARROW[kind])()
