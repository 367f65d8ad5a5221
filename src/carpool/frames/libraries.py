"""Makes frames of pandas and polars for models of tables, cuts them and joins them.

With declared columns, how a cell is read does not depend on what else is read in the same call:
only the type of its column counts, and types that depend on a whole column are refused.

Arrow streams are counted before they are read. A stream of few bytes can stand for a large table:
its buffers may be compressed, or be one and the same for many columns; nulls, references and empty
lists take no bytes at all. pyarrow takes the memory that the stream asks for, and there is no limit
to give it. So the sizes in the messages are read here first, and the columns are counted before
anything is made of them.
"""

from __future__ import annotations

import io
import struct
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from carpool.engine.allowance import Allowance
from carpool.engine.call.chunks import likeness
from carpool.engine.foreign import text_of
from carpool.errors import InvalidRequest, ValidationError

Columns = Mapping[str, Any]
"""The columns that a model wants: their types by their names."""

_LONGEST_NAMES = 200  # characters
_BY_KIND: dict[str, Any] = {"b": bool, "i": int, "u": int, "f": float, "O": str}


class Library(ABC):
    """A library of data frames."""

    @abstractmethod
    def read_csv(self, body: bytes, columns: Columns | None, alone: bool) -> Any:
        """Read CSV into a frame.

        Args:
            body: The body of one request, or the records of several under one header.
            columns: The columns wanted, in their order; None for all that the body has.
            alone: Whether the body is that of one request.

        Raises:
            ValidationError: A column is missing.
            Exception: The reader raises it, or the requests might be read in another way if each
                was read alone.
        """

    @abstractmethod
    def from_records(self, columns: Mapping[str, list[Any]], types: Columns | None) -> Any:
        """Make a frame of lists of values."""

    @abstractmethod
    def from_arrow(self, table: Any, columns: Columns | None) -> Any:
        """Make a frame of a pyarrow table."""

    @abstractmethod
    def value_type(self, kind: Any) -> Any:
        """Return the type that the values of a column of type `kind` have in JSON.

        Raises:
            TypeError: A column of this type cannot be declared.
        """

    @abstractmethod
    def is_frame(self, x: Any) -> bool:
        """Report whether `x` is a frame of this library."""

    @abstractmethod
    def cut(self, frame: Any, begin: int, end: int) -> Any:
        """Return the rows from `begin` to before `end` as a frame, with rows counted from 0."""

    @abstractmethod
    def join(self, frames: Sequence[Any]) -> Any:
        """Join frames that are alike into one, with rows counted from 0.

        It shares no memory with them that can be changed.
        """

    def likeness(self, frame: Any) -> Hashable:
        """Return a value equal for frames that may be joined."""
        return likeness(frame)


class PandasLibrary(Library):
    """The library pandas."""

    def read_csv(self, body: bytes, columns: Columns | None, alone: bool) -> Any:
        import pandas as pd

        types = dict(columns or {})
        whole = {name: each for name, each in types.items() if pd.api.types.is_integer_dtype(each)}
        rest = {name: each for name, each in types.items() if name not in whole}
        frame = pd.read_csv(io.BytesIO(body), dtype=rest, index_col=False, low_memory=False)
        if columns is None:
            return frame
        frame = frame[_present(columns, frame.columns)]
        return _with_whole_numbers(frame, whole, alone) if whole else frame

    def from_records(self, columns: Mapping[str, list[Any]], types: Columns | None) -> Any:
        import pandas as pd

        if types is None:
            return pd.DataFrame(dict(columns))
        return pd.DataFrame({name: pd.Series(values, dtype=types[name]) for name, values in columns.items()})

    def from_arrow(self, table: Any, columns: Columns | None) -> Any:
        import pandas as pd

        frame = table.to_pandas(ignore_metadata=True)
        if columns is None:
            return frame
        frame = frame[_present(columns, frame.columns)]
        texts = [name for name, each in columns.items() if _is_numpys_text(pd.api.types.pandas_dtype(each))]
        done = frame.astype({name: each for name, each in columns.items() if name not in texts})
        for name in texts:  # `astype` would write missing values as the text "None" or "nan"
            done[name] = frame[name].map(str, na_action="ignore").astype(object)
        return done

    def value_type(self, kind: Any) -> Any:
        import pandas as pd

        dtype = pd.api.types.pandas_dtype(kind)
        value = str if _is_numpys_text(dtype) else _BY_KIND.get(dtype.kind)
        if isinstance(dtype, pd.CategoricalDtype) and (
            dtype.categories is None or not all(isinstance(each, str) for each in dtype.categories)
        ):
            value = None  # its categories would be those of all requests of a batch
        if value is None:
            raise TypeError(_UNDECLARABLE.format(kind, "a pandas.CategoricalDtype with texts as its categories"))
        is_numpy = not isinstance(dtype, pd.api.extensions.ExtensionDtype)
        return value if is_numpy and dtype.kind in "biu" else value | None

    def is_frame(self, x: Any) -> bool:
        import pandas as pd

        return isinstance(x, pd.DataFrame)

    def cut(self, frame: Any, begin: int, end: int) -> Any:
        return frame.iloc[begin:end].reset_index(drop=True)

    def join(self, frames: Sequence[Any]) -> Any:
        import pandas as pd

        if len(frames) == 1:  # a copy, so that a call which fails can be made again with the same data
            return frames[0].reset_index(drop=True).copy()
        return pd.concat(frames, ignore_index=True)


def _is_numpys_text(dtype: Any) -> bool:
    """Report whether a type is what `str` means before pandas 3: objects that are texts."""
    return bool(dtype == "U")


def _with_whole_numbers(frame: Any, whole: Columns, alone: bool) -> Any:
    """Return a pandas frame in which the columns `whole` have their declared integer types.

    Before, these columns were read as what they look like. One "2.0" makes pandas read a column as
    floats, which are not exact above 2**53, and no reader of pandas notices a number that is too
    large for a column of few bits.

    Raises:
        ValueError: A value is not a whole number, or too large for the type of its column.
    """
    import numpy as np

    kinds = {frame[name].dtype.kind for name in whole}
    if not kinds <= set("iuf" if alone else "iu"):
        raise ValueError("a column of whole numbers contains something else")
    names = list(whole)
    with np.errstate(invalid="ignore"):
        done = frame.astype(dict(whole))
    if not (done[names] == frame[names]).all(axis=None):
        raise ValueError("a column of whole numbers contains a fraction, or a number that is too large for its type")
    return done


class PolarsLibrary(Library):
    """The library polars."""

    def read_csv(self, body: bytes, columns: Columns | None, alone: bool) -> Any:
        import polars as pl

        if columns is None:
            return pl.read_csv(body, infer_schema_length=None)
        frame = pl.read_csv(body, schema_overrides=dict(columns), infer_schema=False)
        return frame.select(_present(columns, frame.columns))

    def from_records(self, columns: Mapping[str, list[Any]], types: Columns | None) -> Any:
        import polars as pl

        return pl.DataFrame(dict(columns), schema=None if types is None else dict(types), infer_schema_length=None)

    def from_arrow(self, table: Any, columns: Columns | None) -> Any:
        import polars as pl

        frame: Any = pl.from_arrow(table)
        return frame if columns is None else frame.select(_present(columns, frame.columns)).cast(dict(columns))

    def value_type(self, kind: Any) -> Any:
        import polars as pl

        base = kind if isinstance(kind, type) else type(kind)
        if issubclass(base, pl.DataType):
            if base is pl.String or isinstance(kind, pl.Enum):
                return str | None
            if base is pl.Boolean:
                return bool | None
            if base.is_integer() or base.is_float():
                return (int if base.is_integer() else float) | None
        raise TypeError(_UNDECLARABLE.format(kind, "a polars.Enum"))

    def is_frame(self, x: Any) -> bool:
        import polars as pl

        return isinstance(x, pl.DataFrame)

    def cut(self, frame: Any, begin: int, end: int) -> Any:
        return frame.slice(begin, end - begin)

    def join(self, frames: Sequence[Any]) -> Any:
        import polars as pl

        return frames[0] if len(frames) == 1 else pl.concat(frames)


_UNDECLARABLE = (
    "a column cannot be declared with type {0!r}: use a type of numbers, of text or of truth values, or {1}, because"
    " how other types are read depends on the rows beside them. Declare text, and convert it in predict"
)


def _present(columns: Columns, found: Any) -> list[str]:
    missing = [name for name in columns if name not in found]
    if missing:
        raise lacking("table", missing, found)
    return list(columns)


def lacking(what: str, missing: Sequence[str], found: Iterable[Any]) -> ValidationError:
    """Return the error of a table, or a frame, without some of the wanted columns."""
    names = [repr(name) for name in found]
    text = f"the {what} lacks the columns {', '.join(missing)}"[:_LONGEST_NAMES]
    text = f"{text}; it has {', '.join(names)}"[: 2 * _LONGEST_NAMES]
    if len(names) == 1 and any(mark in names[0] for mark in (";", "\\t", "|")):
        text += ": separate the fields with commas"
    return ValidationError(text)


def type_text(kind: Any) -> str:
    """Return the type of a column as a person would write it."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


_LONGEST_COMPLAINT = 200
_DICTIONARY, _BATCH = 2, 3  # kinds of messages
_VERSION_5: Final = 4  # of the format; before, what a message says beside its header may compress it
_UNCOMPRESSED: Final = -1
_LENGTH: Final = struct.Struct("<q")
_BUFFER: Final = struct.Struct("<qq")  # where it begins, and its length


def table_in(body: bytes) -> Any:
    """Return the table in a stream.

    Raises:
        InvalidRequest: It is malformed (400), or stands for too much (413).
    """
    import pyarrow as pa

    allowance = Allowance(len(body))

    try:
        for message in _messages(body):
            _count_buffers(message, allowance)
        stream = pa.ipc.open_stream(body)
        for field in stream.schema:
            _check_type(field.type)
        table = stream.read_all()
        table.validate()
        allowance.take_values(table.num_rows, "the rows of the table", "send fewer rows")
        for column in table.columns:
            for chunk in column.chunks:
                _count(chunk, allowance)
        table.validate(full=True)
        for column in table.columns:
            for chunk in column.chunks:
                _count_references(chunk, allowance)
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        text = text_of(error).partition("\n")[0][:_LONGEST_COMPLAINT]
        raise InvalidRequest(f"the body is not an Arrow stream: {text}") from error
    return table


# -- sizes in messages, before anything is read


class _Table:
    """A table of flatbuffers, the format in which Arrow describes a message."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        (back,) = struct.unpack_from("<i", data, at)
        self._fields = at - back
        (self._end,) = struct.unpack_from("<H", data, self._fields)

    def place(self, i: int) -> int:
        """Return where field number `i` is; 0 if it is left out."""
        if 4 + 2 * i >= self._end:
            return 0
        (offset,) = struct.unpack_from("<H", self._data, self._fields + 4 + 2 * i)
        return self._at + offset if offset else 0

    def number(self, i: int, form: str) -> int:
        """Return a number, in the form of `struct`; 0 if it is left out."""
        at = self.place(i)
        found: int = struct.unpack_from(form, self._data, at)[0] if at else 0
        return found

    def table(self, i: int) -> _Table:
        at = self.place(i)
        return _Table(self._data, at + struct.unpack_from("<I", self._data, at)[0])

    def structs(self, i: int, form: struct.Struct) -> Iterator[tuple[int, ...]]:
        at = self.place(i)
        if at:
            at += struct.unpack_from("<I", self._data, at)[0]
            (n,) = struct.unpack_from("<I", self._data, at)
            yield from form.iter_unpack(self._data[at + 4 : at + 4 + n * form.size])


def _messages(body: bytes) -> Iterator[Any]:
    import pyarrow as pa

    reader = pa.ipc.MessageReader.open_stream(pa.BufferReader(body))
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


def _count_buffers(message: Any, allowance: Allowance) -> None:
    """Count the bytes of the buffers of a message, as they are when they are not compressed."""
    metadata = memoryview(message.metadata)
    about = _Table(metadata, struct.unpack_from("<I", metadata, 0)[0])
    kind = about.number(1, "<B")
    if kind not in (_DICTIONARY, _BATCH):
        return
    header = about.table(2)
    batch = header.table(1) if kind == _DICTIONARY else header
    is_compressed = batch.place(3) or (about.number(0, "<h") < _VERSION_5 and about.place(4))
    content = memoryview(message.body)
    for at, length in batch.structs(2, _BUFFER):
        if is_compressed and length:
            (expanded,) = _LENGTH.unpack(content[at : at + _LENGTH.size])
            length = length if expanded == _UNCOMPRESSED else expanded
        if length < 0:
            raise ValueError("a buffer has a negative length")
        allowance.take_bytes(length, "the columns of the table", "send fewer rows, or buffers that are not compressed")


# -- types of columns, before any is read


def _check_type(kind: Any, *, is_inside: bool = False) -> None:
    """Raise `InvalidRequest` (400) for a type that is not read: its values take no bytes, share
    those of others, or have no place in a frame.
    """
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        _check_type(kind.storage_type, is_inside=is_inside)
    elif types.is_struct(kind) and kind.num_fields:
        for field in kind:
            _check_type(field.type, is_inside=True)
    elif types.is_map(kind):
        _check_type(kind.key_type, is_inside=True)
        _check_type(kind.item_type, is_inside=True)
    elif types.is_list(kind) or types.is_large_list(kind) or (types.is_fixed_size_list(kind) and kind.list_size > 0):
        _check_type(kind.value_type, is_inside=True)
    elif types.is_dictionary(kind) and not is_inside and _is_plain(kind.value_type):
        pass
    elif not (types.is_null(kind) or _is_plain(kind)):
        text = f"columns of type {str(kind)[:_LONGEST_COMPLAINT]} are not read: send plain values"
        raise InvalidRequest(text)


def _is_plain(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return bool(kind.byte_width > 0)
    return bool(types.is_primitive(kind) or types.is_decimal(kind)) or _is_text(kind)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(kind) for test in (*tests, types.is_binary, types.is_large_binary, types.is_binary_view))


# -- columns, before anything is made of them


def _count(column: Any, allowance: Allowance) -> None:
    """Count the content that no buffer of a column shows: values without bytes, and bytes that
    several share. Its type has been checked.
    """
    import pyarrow as pa

    kind, types = column.type, pa.types
    if isinstance(column, pa.ExtensionArray):
        _count(column.storage, allowance)
    elif types.is_dictionary(kind):
        allowance.take_values(len(column.dictionary), "the dictionaries of the columns")
        allowance.take_bytes(column.dictionary.nbytes, "the dictionaries of the columns")
        _count(column.dictionary, allowance)
    elif types.is_struct(kind):
        for i in range(kind.num_fields):
            _count(column.field(i), allowance)
    elif types.is_nested(kind):
        _count(column.values, allowance)
    elif types.is_null(kind):
        allowance.take_values(len(column), "columns of nulls", "leave them out, or send fewer rows")
    elif types.is_string_view(kind) or types.is_binary_view(kind):
        _, views, *_ = column.buffers()
        lengths = memoryview(views).cast("B").cast("I")[::4] if views is not None else ()
        allowance.take_bytes(sum(lengths), "texts that share their bytes", "send each text by itself, or fewer rows")


def _count_references(column: Any, allowance: Allowance) -> None:
    """Count the texts to which a column of references refers, since whoever changes its type makes
    them. It has been checked that there is a text for each reference.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type) or not _is_text(column.type.value_type):
        return
    lengths = pc.binary_length(column.dictionary.cast(pa.large_binary()))
    n = pc.sum(lengths.take(column.indices)).as_py() or 0
    allowance.take_bytes(n, "columns of references, written out,", "send fewer rows")
