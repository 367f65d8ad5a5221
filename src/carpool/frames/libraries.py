"""What models of tables need of pandas and polars: to make frames, cut them and join them.

Neither library is imported before it is needed. With declared columns, how a cell is read does not
depend on what else is read in the same call: only the type of its column counts, and types that
depend on a whole column are refused.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from carpool.engine.call.chunks import likeness
from carpool.errors import ValidationError

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
        """Return a value that is equal for frames that may be joined."""
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
    """Return the names of the wanted columns. Raises ValidationError if one is missing."""
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
