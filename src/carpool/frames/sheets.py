"""CSV bodies that can be read as one: which these are, and how many rows each has.

Only bodies are joined that are so plain that their number of rows is certain: every record has as
many fields as the header, quotes stand around whole fields, and all lines end in the same way.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from carpool.engine.allowance import Allowance
from carpool.errors import InvalidRequest, ValidationError

NO_ROWS = "the table has no rows"
_LARGEST_TO_TAKE_APART = 2**20  # bytes
_BOM = b"\xef\xbb\xbf"


class Sheet(NamedTuple):
    """A CSV body in two parts.

    Attributes:
        header: The first line.
        records: All other lines, each with its line end.
        rows: How many records there are.
    """

    header: bytes
    records: bytes
    rows: int


def without_mark(body: bytes) -> bytes:
    """Return a body without the byte order mark that some programs put before it.

    Raises:
        InvalidRequest: The body is empty.
    """
    body = body.removeprefix(_BOM)
    if not body.strip():
        raise InvalidRequest("the body is empty: a table needs a line of column names and at least one row")
    return body


def as_sheet(body: bytes) -> Sheet | None:
    """Return a body that may be read together with others of the same header.

    The answer is None if the body must be read alone.

    Raises:
        ValidationError: There is no record, or one has more or fewer fields than the header.
    """
    body = body.replace(b"\r\n", b"\n")
    if b"\r" in body or b"\0" in body:
        return None
    quoted = b'"' in body
    outside = _outside_quotes(body) if quoted else body
    if outside is None:
        return None
    lines = outside.removesuffix(b"\n").split(b"\n")
    if not all(map(bytes.strip, lines)):
        if quoted:
            return None
        lines = list(filter(bytes.strip, lines))
        body = b"\n".join(lines)
    if len(lines) == 1:
        raise ValidationError(NO_ROWS)
    _check_widths(lines)
    header, _, records = body.partition(b"\n")
    if header.count(b'"') % 2:
        return None  # the name of a column has two lines
    return Sheet(header, records if records.endswith(b"\n") else records + b"\n", len(lines) - 1)


def check_size(body: bytes, sheet: Sheet | None) -> None:
    """Count the cells of a body before it is read.

    Readers fill short rows up to the width of the table, and compare each name that stands in the
    header again with all others.

    Args:
        body: Without a byte order mark.

    Raises:
        InvalidRequest: It would be out of proportion to its bytes (413).
    """
    allowance = Allowance(len(body))
    if sheet is None:
        _check_cells(body, allowance)
    header = body if sheet is None else sheet.header
    names: Sequence[bytes | str] = header.split(b",")
    if sheet is None or b'"' in header:
        names = _names_in(header)
    repeated = len(names) - len(set(names))
    if repeated:
        text = "the names that stand in the header again"
        allowance.take_values(repeated * len(names), text, "give each column a name of its own")


def _check_cells(body: bytes, allowance: Allowance) -> None:
    """Count the cells of a table of which each row may be shorter than the longest one."""
    rows, width = body.count(b"\n") + body.count(b"\r") + 1, body.count(b",") + 1
    if rows * width > allowance.values:
        try:
            widths = [len(record) for record in _records_in(body)]
        except csv.Error:  # a field is too long for this reader
            pass
        else:
            rows, width = len(widths), max(widths, default=0)
    allowance.take_values(rows * width, "the table, with each row as wide as the widest,", "send rows of one width")


def _names_in(body: bytes) -> list[str]:
    try:
        return next((record for record in _records_in(body) if any(map(str.strip, record))), [])
    except csv.Error as error:
        raise ValidationError(f"the header of the table cannot be read: {error}") from None


def _records_in(body: bytes) -> Iterator[list[str]]:
    return csv.reader(io.StringIO(body.decode("utf-8", "replace"), newline=""))


class Cell(NamedTuple):
    """A cell of a table in CSV.

    Attributes:
        row: Its row, counted from 1 below the header.
        column: The name of its column.
        text: Its content.
    """

    row: int
    column: str
    text: str


def bad_cell(
    body: bytes, columns: Mapping[str, Any], read: Callable[[bytes, Mapping[str, Any]], object]
) -> Cell | None:
    """Return the first cell for which a table cannot be read; None if it is too large to be taken
    apart, or cannot be read for something else.

    Args:
        read: Reads a table with some of the columns, or raises; a row reads the same in any table.
    """
    if len(body) > _LARGEST_TO_TAKE_APART:
        return None
    try:
        header, *rows = [record for record in _records_in(body) if any(map(str.strip, record))]
    except (csv.Error, ValueError):
        return None
    if any(len(row) != len(header) for row in rows):
        return None

    def is_read(some: Sequence[Sequence[str]], wanted: Mapping[str, Any]) -> bool:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *some])
        try:
            read(text.getvalue().encode(), wanted)
        except Exception:
            return False
        return True

    before = 0
    while len(rows) > 1:
        first = rows[: len(rows) // 2]
        if is_read(first, columns):
            before += len(first)
            rows = rows[len(first) :]
        else:
            rows = first
    for name, kind in columns.items():
        if name in header and not is_read(rows, {name: kind}):
            return Cell(before + 1, name, rows[0][header.index(name)])
    return None


def _outside_quotes(body: bytes) -> bytes | None:
    """Return the text outside of quoted fields; None if quotes do not stand around whole fields."""
    parts = body.split(b'"')
    if len(parts) % 2 == 0:
        return None
    outside = parts[::2]
    last = len(outside) - 1
    for i, part in enumerate(outside):
        if not part:
            continue  # a doubled quote, or an end of the body
        if (i > 0 and part[:1] not in (b",", b"\n")) or (i < last and part[-1:] not in (b",", b"\n")):
            return None
    return b"".join(outside)


def _check_widths(lines: list[bytes]) -> None:
    width = lines[0].count(b",")
    for row, line in enumerate(lines[1:], 1):
        if line.count(b",") != width:
            raise ValidationError(
                f"row {row} of the table has {line.count(b',') + 1} fields, but its header has {width + 1}"
            )
