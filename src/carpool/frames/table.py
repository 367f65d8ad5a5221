"""Models of tables: many requests' rows in one frame, one call, and to each request the answers of its own rows.

With `columns` declared, bodies are read together. Without them each is read alone, and only frames with the same
columns and types are joined: what a reader makes of "1" depends on what else stands in the column, and nobody's answer
may depend on who else has asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import msgspec

from carpool.errors import CarpoolError, InvalidRequest, ModelError, ValidationError
from carpool.foreign import text_of
from carpool.frames.answers import ARROW, CSV, JSON, MSGPACK, Writers, cut, plain, rows_of
from carpool.frames.libraries import Columns, Library
from carpool.frames.sheets import NO_ROWS, Sheet, as_sheet, without_mark
from carpool.hints import schema
from carpool.http_request import HTTPRequest
from carpool.model import Model

_LONGEST_COMPLAINT = 200


class FrameRows:
    """What `predict` gets of one request: some rows of a frame that it may share with others.

    Attributes:
        is_single: whether they were sent as one record, which is answered by one value.
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
    """Base of `Pandas` and `Polars`."""

    columns: ClassVar[Columns | None] = None
    """The columns that `predict` gets, and their types, as the library names them. All bodies are then read at once."""

    answer: ClassVar[str] = "answer"
    """What the column of answers is called in CSV and Arrow, where `predict` returns no frame."""

    accepts = (CSV, JSON, MSGPACK, ARROW)
    produces = (CSV, JSON, MSGPACK, ARROW)

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
                raise TypeError(f"{cls.__name__} is a model of tables, which has no {hook}: do it in predict")
        cls._readers = _Records(cls._library, cls.columns, cls.__name__)
        cls._writers = Writers(cls.answer)
        predict = cls.__dict__.get("predict")
        if predict is not None:
            if inspect.iscoroutinefunction(predict):
                raise TypeError(f"predict of {cls.__name__}, a model of tables, must be a plain function, not async")
            cls.predict = _over_items(predict)  # type: ignore[method-assign]

    def decode(self, requests: list[HTTPRequest]) -> list[Any]:
        """The rows of each request, or what is wrong with them."""
        read = _Reading(self._library, self.columns, self._readers, len(requests))
        for place, request in enumerate(requests):
            kind = request.content_type.partition(";")[0].strip().lower()
            read.add(place, kind or JSON, request.body)
        return read.all()

    def encode(self, results: list[Any], content_type: str) -> list[Any]:
        """The answers as bodies."""
        return self._writers.write(results, content_type)


class _Records:
    """Reads rows that are lists of records, or one record."""

    def __init__(self, library: Library, columns: Columns | None, name: str) -> None:
        self._library = library
        self._columns = columns
        if columns is None:
            row: Any = dict[str, bool | int | float | str | None]
        else:
            if not columns or not all(isinstance(each, str) for each in columns):
                raise TypeError(f"columns of {name} must be names of columns with their types, not {columns!r:.80}")
            fields = [(f"c{i}", library.value_type(kind)) for i, kind in enumerate(columns.values())]
            new_names = {f"c{i}": column for i, column in enumerate(columns)}
            row = msgspec.defstruct("Row", fields, rename=new_names)
        self._kind: Any = list[row] | row
        self._decoders = {JSON: schema.json_reader(self._kind), MSGPACK: schema.msgpack_reader(self._kind)}

    def decode(self, kind: str, body: bytes) -> tuple[dict[str, list[Any]], int, bool]:
        """Columns of values, how many, and whether it was one record alone."""
        try:
            return self._by_columns(self._decoders[kind](body))
        except CarpoolError:
            raise
        except Exception as error:
            ours = schema.as_our_error(error, kind.rpartition("/")[2])
            raise ours from error

    def convert(self, item: Any) -> FrameRows:
        """The same from objects."""
        try:
            values, n, is_single = self._by_columns(msgspec.convert(item, self._kind))
        except msgspec.ValidationError as error:
            raise ValidationError(text_of(error)) from error
        return FrameRows(self._library.from_records(values, self._columns), 0, n, is_single)

    def _by_columns(self, found: Any) -> tuple[dict[str, list[Any]], int, bool]:
        is_single = type(found) is not list
        records = [found] if is_single else found
        if self._columns is not None:
            names = self._columns
            return {c: [getattr(r, f"c{i}") for r in records] for i, c in enumerate(names)}, len(records), is_single
        seen = dict.fromkeys(name for record in records for name in record)
        return {name: [record.get(name) for record in records] for name in seen}, len(records), is_single


class _Reading:
    """The bodies of one batch on their way to frames."""

    def __init__(self, library: Library, columns: Columns | None, records: _Records, n: int) -> None:
        self._library = library
        self._columns = columns
        self._records = records
        self._done: list[Any] = [None] * n
        self._sheets: dict[bytes, list[tuple[int, Sheet]]] = {}  # by header
        self._lists: list[tuple[int, dict[str, list[Any]], int, bool]] = []

    def add(self, place: int, kind: str, body: bytes) -> None:
        """The body of one request: read, or put with those that are read together."""
        try:
            if kind == CSV:
                self._add_csv(place, body)
            elif kind == ARROW:
                frame = self._library.from_arrow(_arrow_table(body), self._columns)
                self._done[place] = FrameRows(frame, 0, len(frame))
            else:
                values, n, is_single = self._records.decode(kind, body)
                self._lists.append((place, values, n, is_single))
        except MemoryError:  # of the whole batch, which is then read in smaller parts
            raise
        except Exception as error:
            self._done[place] = _complaint(error)

    def all(self) -> list[Any]:
        """`FrameRows`, or an error, for each."""
        for header, sheets in self._sheets.items():
            self._together(sheets, lambda some, header=header: self._read_sheets(header, some))  # type: ignore[misc]
        if self._columns is None:
            for each in self._lists:
                self._together([each], self._read_lists)
        elif self._lists:
            self._together(self._lists, self._read_lists)
        return self._done

    def _add_csv(self, place: int, body: bytes) -> None:
        body = without_mark(body)
        sheet = as_sheet(body)
        if sheet is not None and self._columns is not None:
            self._sheets.setdefault(sheet.header, []).append((place, sheet))
            return
        if sheet is not None:
            body = b"%b\n%b" % (sheet.header, sheet.records)
        frame = self._library.read_csv(body, self._columns, alone=True)
        self._done[place] = FrameRows(frame, 0, len(frame))

    def _together(self, some: list[Any], read: Callable[[list[Any]], None]) -> None:
        """Read all at once; where that fails in halves, so that only who is to blame is told."""
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
        frame = self._library.read_csv(body, self._columns, alone=len(sheets) == 1)
        self._share(frame, [(place, sheet.rows, False) for place, sheet in sheets])

    def _read_lists(self, lists: list[tuple[int, dict[str, list[Any]], int, bool]]) -> None:
        first = lists[0][1]
        columns = {name: [value for _, values, _, _ in lists for value in values[name]] for name in first}
        frame = self._library.from_records(columns, self._columns)
        self._share(frame, [(place, n, is_single) for place, _, n, is_single in lists])

    def _share(self, frame: Any, shares: list[tuple[int, int, bool]]) -> None:
        bounds = [*accumulate([n for _, n, _ in shares], initial=0)]
        if bounds[-1] != len(frame):
            raise ValueError("its rows cannot be told apart")
        for (place, _, is_single), (begin, end) in zip(shares, pairwise(bounds), strict=True):
            try:
                self._done[place] = FrameRows(frame, begin, end, is_single)
            except ValidationError as error:
                self._done[place] = error


def _over_items(predict: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """The user's function of one frame as one of the items of a batch, or of one item."""

    def over_items(self: TableModel, items: Any) -> Any:
        if type(items) is not list:
            (result,) = _answers(self, predict, [items])
            if isinstance(result, Exception):
                raise result
            return result
        return _answers(self, predict, items)

    over_items.__name__, over_items.__doc__ = predict.__name__, predict.__doc__
    return over_items


def _answers(model: TableModel, predict: Callable[..., Any], items: list[Any]) -> list[Any]:
    library = model._library
    results: list[Any] = [None] * len(items)
    known: dict[int, Hashable] = {}  # by frame: what it is like
    groups: dict[Hashable, list[tuple[int, FrameRows]]] = {}
    for place, item in enumerate(items):
        try:
            rows = _as_rows(model, item)
            if id(rows.frame) not in known:
                known[id(rows.frame)] = library.likeness(rows.frame)
        except Exception as error:
            results[place] = error
        else:
            groups.setdefault(known[id(rows.frame)], []).append((place, rows))
    for group in groups.values():
        order = {frame: i for i, frame in enumerate(dict.fromkeys(id(rows.frame) for _, rows in group))}
        group.sort(key=lambda each: (order[id(each[1].frame)], each[1].begin))
        frame = library.join(_runs(library, [rows for _, rows in group]))
        _answer_group(predict(model, frame), len(frame), group, items, results)
    return results


def _as_rows(model: TableModel, item: Any) -> FrameRows:
    """An item of a batch: of a request, or of a Python caller. Raises ValidationError."""
    if type(item) is FrameRows:
        return item
    if model._library.is_frame(item):
        if model.columns is not None:
            missing = [name for name in model.columns if name not in item.columns]
            if missing:
                raise ValidationError(f"the frame lacks the columns {', '.join(missing)}")
            item = item[list(model.columns)]
        return FrameRows(item, 0, len(item))
    if isinstance(item, list | Mapping):
        return model._readers.convert(item)
    raise ValidationError(f"a table is a frame, a list of records or one record, not {type(item).__name__}")


def _runs(library: Library, group: list[FrameRows]) -> list[Any]:
    """The frames to be joined: what lies side by side in one is taken in one piece."""
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
    """Cut up what `predict` has returned for one frame: frames get a part of it, and the others plain values."""
    found = rows_of(answer)
    if found != n:
        text = f"predict of a table of {n} rows must return as many answers, but returned {found}"
        raise ModelError(text, code="bad_result")
    values: list[Any] | None = None
    begin = 0
    for place, rows in group:
        end = begin + rows.end - rows.begin
        if type(items[place]) is FrameRows or isinstance(items[place], list | Mapping):
            if values is None:
                values = plain(answer)
            results[place] = values[begin] if rows.is_single else values[begin:end]
        else:
            results[place] = cut(answer, begin, end)
        begin = end


def _arrow_table(body: bytes) -> Any:
    import pyarrow as pa

    try:
        table = pa.ipc.open_stream(body).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidRequest(f"the body is no stream of Arrow: {_first_line(error)}") from error
    return table


def _complaint(error: Exception) -> CarpoolError:
    """What the client is told, whose body alone was read."""
    if isinstance(error, CarpoolError):
        return error
    return ValidationError(f"the table cannot be read: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return text_of(error).partition("\n")[0][:_LONGEST_COMPLAINT]
