"""Models of tables: the rows of many requests in one frame and one call.

Each request gets the answers of its own rows. With `columns` declared, bodies are read together.
Without them each body is read alone, and only frames with the same columns and types are joined:
what a reader makes of "1" depends on what else is in the column, and the answer to a request must
not depend on the other requests of its batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec

from carpool.engine.allowance import Allowance
from carpool.engine.details import Detail
from carpool.engine.foreign import text_of
from carpool.engine.hints import schema
from carpool.engine.http_request import HTTPRequest
from carpool.engine.worker.own import own
from carpool.errors import CarpoolError, ModelError, ValidationError
from carpool.frames.answers import ARROW, CSV, JSON, MSGPACK, Writers, cut, plain, rows_of, with_error, with_errors
from carpool.frames.libraries import Columns, Library, lacking, table_in, type_text
from carpool.frames.sheets import NO_ROWS, Sheet, as_sheet, bad_cell, check_size, without_mark
from carpool.model import Model

_LONGEST_COMPLAINT = 200


class FrameRows:
    """The rows of one request: a part of a frame, which may hold the rows of others as well.

    Attributes:
        end: The row after the last one.
        is_single: Whether they were sent as one record, which is answered with one value.

    Raises:
        ValidationError: There are no rows.
    """

    __slots__ = ("begin", "end", "frame", "is_single")

    def __init__(self, frame: Any, begin: int, end: int, is_single: bool = False) -> None:
        if begin == end:
            raise ValidationError(NO_ROWS)
        self.frame = frame
        self.begin = begin
        self.end = end
        self.is_single = is_single


class TableModel(Model):
    """The base of `Pandas` and `Polars`."""

    is_table: ClassVar[bool] = True
    """Says that a body holds the rows of a table, with an answer for each."""

    columns: ClassVar[Columns | None] = None
    """The columns that `predict` gets, with types as the library names them.

    If they are declared, all bodies of a batch are read at once.
    """

    answer: ClassVar[str] = "answer"
    """The name of the column of answers in CSV and Arrow, if `predict` does not return a frame."""

    accepts = (CSV, JSON, MSGPACK, ARROW)
    produces = (CSV, JSON, MSGPACK, ARROW)

    body_type: ClassVar[Any]
    """The type of a body in JSON and msgpack: one record, or a list of them."""

    _library: ClassVar[Library]
    _readers: ClassVar[_Records]
    _writers: ClassVar[Writers]

    def __init_subclass__(cls, library: Library | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if library is not None:
            cls._library = library
            return
        for hook in ("preprocess", "postprocess"):
            if hasattr(cls, hook):
                raise TypeError(
                    f"{cls.__name__} is a model of tables, which cannot have {hook}: do its work in predict"
                )
        cls._readers = _Records(cls._library, cls.columns, cls)
        cls.body_type = cls._readers.kind
        cls._writers = Writers(cls.answer)
        predict = cls.__dict__.get("predict")
        if predict is not None:
            if inspect.iscoroutinefunction(predict):
                raise TypeError(f"predict of {cls.__name__}, a model of tables, must be a plain function, not async")
            cls.predict = _over_items(predict)  # type: ignore[method-assign]

    def decode(self, requests: list[HTTPRequest]) -> list[Any]:
        """Return the rows of each request, or the error that its caller gets."""
        reading = _Reading(self._library, self.columns, self._readers, len(requests))
        for i, request in enumerate(requests):
            kind = request.content_type.partition(";")[0].strip().lower()
            reading.add(i, kind or JSON, request.body)
        return reading.all()

    def encode(self, results: list[Any], content_type: str) -> list[Any]:
        """Return the answers as bodies."""
        return self._writers.write(results, content_type)


class _Values(NamedTuple):
    """The rows of one request, before they are a frame.

    Attributes:
        records: One for each row.
        names: The columns of the frame.
        is_single: Whether they were sent as one record.
        allowance: The remaining limits of the body.
    """

    records: list[Any]
    names: Collection[str]
    is_single: bool
    allowance: Allowance


class _Share(NamedTuple):
    """How many of the next rows of a frame belong to one request.

    Attributes:
        position: The position of the request in its batch.
        rows: How many rows are its own.
        is_single: Whether they were sent as one record.
    """

    position: int
    rows: int
    is_single: bool


class _Records:
    """Reads rows that come as a list of records or as one record."""

    def __init__(self, library: Library, columns: Columns | None, model: type) -> None:
        self._library = library
        self._columns = columns
        if columns is None:
            row: Any = dict[str, bool | int | float | str | None]
        else:
            if not columns or not all(isinstance(each, str) for each in columns):
                raise TypeError(
                    f"columns of {model.__name__} must be names of columns with their types, not {columns!r:.80}"
                )
            fields = [
                (f"c{i}", Annotated[library.value_type(kind), msgspec.Meta(description=type_text(kind))])
                for i, kind in enumerate(columns.values())
            ]
            new_names = {f"c{i}": column for i, column in enumerate(columns)}
            row = msgspec.defstruct(f"{model.__name__}Row", fields, rename=new_names, module=model.__module__)
        self.kind: Any = list[row] | row
        self._decoders = {JSON: schema.json_reader(self.kind), MSGPACK: schema.msgpack_reader(self.kind)}

    def decode(self, kind: str, body: bytes) -> _Values:
        try:
            return self._values(self._decoders[kind](body), Allowance(len(body)))
        except CarpoolError:
            raise
        except Exception as error:
            ours = schema.as_our_error(error, kind.rpartition("/")[2])
            raise ours from error

    def convert(self, item: Any) -> FrameRows:
        try:
            values = self._values(msgspec.convert(item, self.kind), Allowance(2**60))  # it is here already
        except msgspec.ValidationError as error:
            raise ValidationError(text_of(error)) from error
        return FrameRows(self.frame_of([values]), 0, len(values.records), values.is_single)

    def _values(self, found: Any, allowance: Allowance) -> _Values:
        is_single = type(found) is not list
        records = [found] if is_single else found
        if self._columns is not None:
            return _Values(records, self._columns, is_single, allowance)
        return _Values(records, dict.fromkeys(name for record in records for name in record), is_single, allowance)

    def frame_of(self, lists: Sequence[_Values]) -> Any:
        """Make one frame of the records of several requests, or of one if no columns are declared.

        Raises:
            InvalidRequest: It would be out of proportion to their bodies (413), as few records have
                the same columns.
        """
        names = lists[0].names
        for values in lists:
            cells = len(values.records) * len(names)
            values.allowance.take_values(cells, "the records, each with all columns,", "send those alike together")
        records = [record for values in lists for record in values.records]
        columns: dict[str, list[Any]]
        if self._columns is not None:
            columns = {name: [getattr(record, f"c{i}") for record in records] for i, name in enumerate(names)}
        else:
            columns = {name: [record.get(name) for record in records] for name in names}
        return self._library.from_records(columns, self._columns)


class _Reading:
    """The bodies of one batch, on their way to frames."""

    def __init__(self, library: Library, columns: Columns | None, records: _Records, n: int) -> None:
        self._library = library
        self._columns = columns
        self._records = records
        self._done: list[Any] = [None] * n
        self._sheets: dict[bytes, list[tuple[int, Sheet]]] = {}  # by header
        self._lists: list[tuple[int, _Values]] = []

    def add(self, index: int, kind: str, body: bytes) -> None:
        try:
            if kind == CSV:
                self._add_csv(index, body)
            elif kind == ARROW:
                frame = self._library.from_arrow(table_in(body), self._columns)
                self._done[index] = FrameRows(frame, 0, len(frame))
            else:
                self._lists.append((index, self._records.decode(kind, body)))
        except MemoryError:  # this concerns the whole batch, which is then read in smaller parts
            raise
        except Exception as error:
            self._done[index] = _complaint(error)

    def all(self) -> list[Any]:
        for header, sheets in self._sheets.items():
            self._together(sheets, lambda some, header=header: self._read_sheets(header, some))  # type: ignore[misc]
        if self._columns is None:
            for each in self._lists:
                self._together([each], self._read_lists)
        elif self._lists:
            self._together(self._lists, self._read_lists)
        return self._done

    def _add_csv(self, index: int, body: bytes) -> None:
        body = without_mark(body)
        sheet = as_sheet(body)
        check_size(body, sheet)
        if sheet is not None and self._columns is not None:
            self._sheets.setdefault(sheet.header, []).append((index, sheet))
            return
        if sheet is not None:
            body = b"%b\n%b" % (sheet.header, sheet.records)
        frame = self._read_csv(body, alone=True)
        self._done[index] = FrameRows(frame, 0, len(frame))

    def _read_csv(self, body: bytes, *, alone: bool) -> Any:
        """Read CSV; where a single body cannot be read, the error names its first bad cell."""
        try:
            return self._library.read_csv(body, self._columns, alone)
        except (CarpoolError, MemoryError):
            raise
        except Exception as error:
            cell = None
            if alone and self._columns is not None:
                cell = bad_cell(body, self._columns, partial(self._library.read_csv, alone=True))
            if cell is None:
                raise
            kind = type_text(self._columns[cell.column])  # type: ignore[index]
            text = f"row {cell.row} of the table, column {cell.column!r}: {cell.text!r:.80} does not fit {kind}"
            details: list[Detail] = [{"loc": [cell.row - 1, cell.column], "msg": text, "type": "value_error"}]
            raise ValidationError(text, details=details) from error

    def _together(self, some: list[tuple[int, Any]], read: Callable[[list[Any]], None]) -> None:
        """Read bodies at once; if that fails, in halves, so that only the guilty requests fail."""
        try:
            read(some)
        except MemoryError:
            raise
        except Exception as error:
            if len(some) == 1:
                self._done[some[0][0]] = _complaint(error)
                return
            middle = len(some) // 2
            self._together(some[:middle], read)
            self._together(some[middle:], read)

    def _read_sheets(self, header: bytes, sheets: list[tuple[int, Sheet]]) -> None:
        body = b"%b\n%b" % (header, b"".join([sheet.records for _, sheet in sheets]))
        frame = self._read_csv(body, alone=len(sheets) == 1)
        self._share(frame, [_Share(index, sheet.rows, False) for index, sheet in sheets])

    def _read_lists(self, lists: list[tuple[int, _Values]]) -> None:
        frame = self._records.frame_of([values for _, values in lists])
        self._share(frame, [_Share(index, len(values.records), values.is_single) for index, values in lists])

    def _share(self, frame: Any, shares: list[_Share]) -> None:
        bounds = [*accumulate([share.rows for share in shares], initial=0)]
        if bounds[-1] != len(frame):
            raise ValueError("it is not clear which rows belong to which request")
        for share, (begin, end) in zip(shares, pairwise(bounds), strict=True):
            try:
                self._done[share.position] = FrameRows(frame, begin, end, share.is_single)
            except ValidationError as error:
                self._done[share.position] = error


def _over_items(predict: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Turn the user's function of one frame into one of the items of a batch, or of one item."""

    def over_items(self: TableModel, items: Any) -> Any:
        if type(items) is not list:
            (result,) = _answers(self, predict, [items])
            if issubclass(type(result), BaseException):
                raise result
            return result
        return _answers(self, predict, items)

    over_items.__name__, over_items.__doc__ = predict.__name__, predict.__doc__
    return over_items


def _answers(model: TableModel, predict: Callable[..., Any], items: list[Any]) -> list[Any]:
    """Call `predict` once for each group of frames that can be joined.

    Returns:
        The answers of each item, or the error of one with rows that cannot be read.
    """
    library = model._library
    results: list[Any] = [None] * len(items)
    known: dict[int, Hashable] = {}  # the likeness of each frame, by its id
    groups: dict[Hashable, list[tuple[int, FrameRows]]] = {}
    for index, item in enumerate(items):
        try:
            rows = _as_rows(model, item)
            if id(rows.frame) not in known:
                known[id(rows.frame)] = library.likeness(rows.frame)
        except Exception as error:
            results[index] = error
        else:
            groups.setdefault(known[id(rows.frame)], []).append((index, rows))
    for group in groups.values():
        order = {frame: i for i, frame in enumerate(dict.fromkeys(id(rows.frame) for _, rows in group))}
        group.sort(key=lambda each: (order[id(each[1].frame)], each[1].begin))
        frame = library.join(_runs(library, [rows for _, rows in group]))
        _answer_group(predict(model, frame), len(frame), group, items, results)
        if len(groups) > 1:  # the call for the next group may fill the same memory again
            for index, _ in group:
                results[index] = own(results[index])
    return results


def _as_rows(model: TableModel, item: Any) -> FrameRows:
    """Return the rows of an item, which came over HTTP or from Python. Raises ValidationError."""
    if type(item) is FrameRows:
        return item
    if model._library.is_frame(item):
        if model.columns is not None:
            missing = [name for name in model.columns if name not in item.columns]
            if missing:
                raise lacking("frame", missing, item.columns)
            item = item[list(model.columns)]
        return FrameRows(item, 0, len(item))
    if isinstance(item, list | Mapping):
        return model._readers.convert(item)
    raise ValidationError(f"a table is a frame, a list of records or one record, not {type(item).__name__}")


def _runs(library: Library, group: list[FrameRows]) -> list[Any]:
    """Return the frames to join; rows that lie side by side in one frame are taken in one piece."""
    runs: list[tuple[Any, int, int]] = []
    for rows in group:
        if runs and runs[-1][0] is rows.frame and runs[-1][2] == rows.begin:
            runs[-1] = rows.frame, runs[-1][1], rows.end
        else:
            runs.append((rows.frame, rows.begin, rows.end))
    return [frame if end - begin == len(frame) else library.cut(frame, begin, end) for frame, begin, end in runs]


def _answer_group(
    answer: Any, n: int, group: list[tuple[int, FrameRows]], items: list[Any], results: list[Any]
) -> None:
    """Cut up the result of `predict` for one frame.

    Callers that gave frames get a part of it, and all others get plain values. Raises ModelError.
    """
    found = rows_of(answer)
    what = "predict of a table"
    if found != n:
        text = f"predict of a table of {n} rows must return as many answers, but returned {found}"
        raise ModelError(text, code="bad_result")
    values: list[Any] | None = None
    begin = 0
    for index, rows in group:
        end = begin + rows.end - rows.begin
        if type(items[index]) is FrameRows or isinstance(items[index], list | Mapping):
            if values is None:
                values = plain(answer)
            results[index] = with_error(values[begin]) if rows.is_single else with_errors(values[begin:end], what)
        elif isinstance(answer, list | tuple):
            results[index] = with_errors(list(answer[begin:end]), what)
        else:
            results[index] = cut(answer, begin, end)
        begin = end


def _complaint(error: Exception) -> CarpoolError:
    if isinstance(error, CarpoolError):
        return error
    text = text_of(error).partition("\n")[0][:_LONGEST_COMPLAINT]
    return ValidationError(f"the table cannot be read: {text}")
