"""What a model of tables returns, one answer for each row.

The answers are counted, cut up for the requests, turned into plain values, and written in the
format that the client wants.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any, Final

from carpool.call import chunks
from carpool.errors import ModelError
from carpool.foreign import text_of
from carpool.hints import schema

CSV: Final = "text/csv"
JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
ARROW: Final = "application/vnd.apache.arrow.stream"


def rows_of(answer: Any) -> int:
    """Return how many answers there are. Raises ModelError if `answer` has no rows."""
    try:
        return chunks.count_rows(answer)
    except TypeError as error:
        text = f"predict of a table must return a series, an array, a list or a frame, not {type(answer).__name__}"
        raise ModelError(text, code="bad_result") from error


def cut(answer: Any, begin: int, end: int) -> Any:
    """Return the answers from `begin` to before `end`, with rows counted from 0."""
    part = chunks.cut(answer, begin, end)
    return part.reset_index(drop=True) if hasattr(part, "reset_index") else part


def plain(answer: Any) -> list[Any]:
    """Return the answers as plain Python values: a dict for each row of a frame."""
    if type(answer) is list:
        return answer
    if hasattr(answer, "to_dicts"):  # a frame of polars
        return answer.to_dicts()  # type: ignore[no-any-return]
    if hasattr(answer, "iloc") and answer.ndim == 2:  # a frame of pandas
        columns = [_plain_series(answer.iloc[:, i]) for i in range(answer.shape[1])]
        return [dict(zip(answer.columns, row, strict=True)) for row in zip(*columns, strict=True)]
    if hasattr(answer, "iloc"):
        return _plain_series(answer)
    if hasattr(answer, "to_pylist"):
        return answer.to_pylist()  # type: ignore[no-any-return]
    return answer.tolist() if hasattr(answer, "tolist") else answer.to_list()  # type: ignore[no-any-return]


def _plain_series(series: Any) -> list[Any]:
    """Return the values of a pandas series, with None for what its type calls missing."""
    values: list[Any] = series.tolist()
    if hasattr(series.dtype, "na_value"):
        return [None if gone else value for value, gone in zip(values, series.isna().tolist(), strict=True)]
    return values


class Writers:
    """Writes answers in each format that clients may ask for.

    Args:
        name: The name of the column in CSV and Arrow for answers that are not records.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._by_type: dict[str, Callable[[Any], bytes]] = {
            CSV: self._as_csv,
            JSON: schema.json_writer(Any),
            MSGPACK: schema.msgpack_writer(Any),
            ARROW: self._as_arrow,
        }

    def write(self, results: list[Any], content_type: str) -> list[Any]:
        """Return a body for each result, or an error in place of one that cannot be written."""
        write = self._by_type[content_type]
        bodies: list[Any] = []
        for result in results:
            try:
                is_plain = result is None or isinstance(result, list | dict | str | int | float | bool)
                bodies.append(write(result if is_plain else plain(result)))
            except ModelError as error:
                bodies.append(error)
            except Exception as error:
                text = f"the answer cannot be written as {content_type}: {text_of(error)}"
                bodies.append(ModelError(text, code="bad_result"))
        return bodies

    def _as_csv(self, result: Any) -> bytes:
        """Write answers as CSV, where missing values are empty."""
        columns = self._columns(result)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(
            ["" if value is None or value != value else value for value in row]
            for row in zip(*columns.values(), strict=True)
        )
        return text.getvalue().encode()

    def _as_arrow(self, result: Any) -> bytes:
        """Write answers as an Arrow stream."""
        import pyarrow as pa

        table = pa.table(self._columns(result))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]

    def _columns(self, result: Any) -> dict[str, list[Any]]:
        """Return the answers by the names of their columns."""
        rows = result if type(result) is list else [result]
        if rows and type(rows[0]) is dict:
            return {str(name): [row[name] for row in rows] for name in rows[0]}
        if rows and type(rows[0]) is list:
            return {f"{self._name}_{i}": [row[i] for row in rows] for i in range(len(rows[0]))}
        return {self._name: rows}
