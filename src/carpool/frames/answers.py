"""The answers of a model of tables, one for each row.

An exception in the place of a row's answer, or within it, is that row's error: callers in Python
find it there, and clients its code with a text of our own.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from carpool.engine.call import chunks
from carpool.engine.foreign import as_model_error, text_of
from carpool.engine.hints import schema
from carpool.engine.hints.plain import to_builtins
from carpool.engine.logger import logger
from carpool.engine.observe.log import printable
from carpool.engine.observe.refusals import MODEL_MESSAGES, text_for_clients
from carpool.errors import CarpoolError, ModelError

CSV: Final = "text/csv"
JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
ARROW: Final = "application/vnd.apache.arrow.stream"

ERROR: Final = "error"
"""The column of the rows' errors in CSV and Arrow, which is there if a row has one; it has another
name if the model has a column of this name itself.
"""

_SCALARS: Final = frozenset({float, int, str, bool, bytes, type(None)})  # in which there is no exception


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
    if isinstance(answer, list | tuple):
        return list(answer)
    if hasattr(answer, "to_dicts"):  # a frame of polars
        return answer.to_dicts()  # type: ignore[no-any-return]
    if hasattr(answer, "iloc") and answer.ndim == 2:  # a frame of pandas
        columns = [_plain_series(answer.iloc[:, i]) for i in range(answer.shape[1])]
        return [dict(zip(answer.columns, row, strict=True)) for row in zip(*columns, strict=True)]
    if hasattr(answer, "iloc"):
        return _plain_series(answer)
    if hasattr(answer, "to_pylist"):
        return answer.to_pylist()  # type: ignore[no-any-return]
    return to_builtins(answer) if hasattr(answer, "tolist") else answer.to_list()  # type: ignore[no-any-return]


def with_errors(values: list[Any], what: str) -> list[Any]:
    """Return answers, with a `CarpoolError` in the place of each that is or has an exception.

    Those that are no fault of the client are logged, as no caller over HTTP sees their texts.
    """
    if set(map(type, values)) <= _SCALARS:
        return values
    found = [(value, _error_in(value)) for value in values]
    rows = [value if error is None else _as_carpool_error(error, what) for value, error in found]
    failed = [row for row in rows if isinstance(row, ModelError)]
    if failed:
        text = "%s returned an error for %d of %d rows; the first:\n%s"
        logger.error(text, what, len(failed), len(rows), printable(failed[0].traceback or text_of(failed[0])).rstrip())
    return rows


def with_error(value: Any) -> Any:
    """Return the answer of a single row, or the exception that it is or has."""
    error = _error_in(value)
    return value if error is None else error


def _error_in(value: Any) -> BaseException | None:
    kind = type(value)
    if issubclass(kind, BaseException):
        return value  # type: ignore[no-any-return]
    inside = value.values() if kind is dict else value if kind in (list, tuple) else ()
    if set(map(type, inside)) <= _SCALARS:
        return None
    return next((error for error in map(_error_in, inside) if error is not None), None)


def _as_carpool_error(error: BaseException, what: str) -> CarpoolError:
    return error if issubclass(type(error), CarpoolError) else as_model_error(error, what)  # type: ignore[return-value]


def _is_error(row: Any) -> bool:
    return issubclass(type(row), CarpoolError)


def _has_errors(rows: list[Any]) -> bool:
    return any(issubclass(kind, CarpoolError) for kind in set(map(type, rows)))


def _as_list(write: Callable[[Any], bytes], result: Any) -> bytes:
    if type(result) is list and _has_errors(result):
        result = [{"error": _error_of(row)} if _is_error(row) else row for row in result]
    return write(result)


def _error_of(error: CarpoolError) -> dict[str, Any]:
    message = text_for_clients(error) or MODEL_MESSAGES.get(error.code, MODEL_MESSAGES["model_error"])
    return {"code": error.code, "message": message, "status": error.status}


def _plain_series(series: Any) -> list[Any]:
    """Return the values of a pandas series, with None for values that its type calls missing."""
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
            JSON: partial(_as_list, schema.json_writer(Any)),
            MSGPACK: partial(_as_list, schema.msgpack_writer(Any)),
            ARROW: self._as_arrow,
        }

    def write(self, results: list[Any], content_type: str) -> list[Any]:
        """Return a body for each result, or an error in place of one that cannot be written."""
        write = self._by_type[content_type]
        bodies: list[Any] = []
        for result in results:
            try:
                is_plain = result is None or isinstance(result, list | dict | str | int | float | bool)
                bodies.append(write(result if is_plain else with_errors(plain(result), "predict of a table")))
            except ModelError as error:
                bodies.append(error)
            except Exception as error:
                text = f"the answer cannot be written as {content_type}: {text_of(error)}"
                bodies.append(ModelError(text, code="bad_result"))
        return bodies

    def _as_csv(self, result: Any) -> bytes:
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
        import pyarrow as pa

        table = pa.table(self._columns(result))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]

    def _columns(self, result: Any) -> dict[str, list[Any]]:
        rows = result if type(result) is list else [result]
        if not _has_errors(rows):
            return self._columns_of(rows)
        good = self._columns_of([row for row in rows if not _is_error(row)])
        values = {name: iter(column) for name, column in good.items()}
        columns: dict[str, list[Any]] = {
            name: [None if _is_error(row) else next(column) for row in rows] for name, column in values.items()
        }
        name = ERROR
        while name in columns:
            name = f"carpool_{name}"
        errors = [_error_of(row) if _is_error(row) else None for row in rows]
        columns[name] = [None if each is None else f"{each['code']}: {each['message']}" for each in errors]
        return columns

    def _columns_of(self, rows: list[Any]) -> dict[str, list[Any]]:
        if rows and type(rows[0]) is dict:
            return {str(name): [row[name] for row in rows] for name in rows[0]}
        if rows and type(rows[0]) is list:
            return {f"{self._name}_{i}": [row[i] for row in rows] for i in range(len(rows[0]))}
        return {self._name: rows}
