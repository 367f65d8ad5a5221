"""What pandas and polars are each asked for: frames from CSV, records and Arrow, parts of frames, plain values.

Neither is imported before the first question. With declared columns nothing depends on what else is read in the same
call: each cell is read by the type of its column, and types that look at a whole column are refused.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from carpool.call.chunks import likeness
from carpool.errors import ValidationError

Columns = Mapping[str, Any]
"""Names and types of the columns that a model wants."""

_BY_KIND: dict[str, Any] = {"b": bool, "i": int, "u": int, "f": float, "O": str}


class Library(ABC):
    """A library of data frames."""

    @abstractmethod
    def read_csv(self, body: bytes, columns: Columns | None, alone: bool) -> Any:
        """A frame of CSV.

        Args:
            body: one request's, or of several the records under one header.
            columns: those wanted, in their order; None for all that there are.
            alone: whether it is one request's.

        Raises:
            ValidationError: a column is missing.
            Exception: what the reader raises; or it cannot be told how each would be read alone.
        """

    @abstractmethod
    def from_records(self, columns: Mapping[str, list[Any]], types: Columns | None) -> Any:
        """A frame of lists of values."""

    @abstractmethod
    def from_arrow(self, table: Any, columns: Columns | None) -> Any:
        """A frame of a pyarrow table."""

    @abstractmethod
    def value_type(self, kind: Any) -> Any:
        """What a value of a column of this type is in JSON. Raises TypeError if the type cannot be declared."""

    @abstractmethod
    def is_frame(self, x: Any) -> bool:
        """Whether it is a frame of this library."""

    @abstractmethod
    def cut(self, frame: Any, begin: int, end: int) -> Any:
        """Some rows, counted from 0."""

    @abstractmethod
    def join(self, frames: Sequence[Any]) -> Any:
        """Frames that are alike, one after the other, rows counted from 0; none shares memory that can change."""

    def likeness(self, frame: Any) -> Hashable:
        """What is equal in frames that may be joined."""
        return likeness(frame)


class PandasLibrary(Library):
    """pandas."""

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
        frame = table.to_pandas(ignore_metadata=True)
        return frame if columns is None else frame[_present(columns, frame.columns)].astype(dict(columns))

    def value_type(self, kind: Any) -> Any:
        import pandas as pd

        dtype = pd.api.types.pandas_dtype(kind)
        value = _BY_KIND.get(dtype.kind)
        if isinstance(dtype, pd.CategoricalDtype) and (
            dtype.categories is None or not all(isinstance(each, str) for each in dtype.categories)
        ):
            value = None  # its categories would be those of all who share a call
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

        if len(frames) == 1:  # a call that fails is made again: what it has changed must not be there
            return frames[0].reset_index(drop=True).copy()
        return pd.concat(frames, ignore_index=True)


def _with_whole_numbers(frame: Any, whole: Columns, alone: bool) -> Any:
    """A pandas frame whose columns of whole numbers were read as what they look like, and are now of their types.

    One "2.0" makes pandas read the column by way of floats, which are not exact beyond 2**53, and none of its readers
    notices a number that is too large for a column of few bits. Raises ValueError.
    """
    import numpy as np

    kinds = {frame[name].dtype.kind for name in whole}
    if not kinds <= set("iuf" if alone else "iu"):
        raise ValueError("a column of whole numbers holds something else")
    names = list(whole)
    with np.errstate(invalid="ignore"):
        done = frame.astype(dict(whole))
    if not (done[names] == frame[names]).all(axis=None):
        raise ValueError("a column of whole numbers holds one that it has no room for, or a fraction")
    return done


class PolarsLibrary(Library):
    """polars."""

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
    "columns cannot be of type {0!r}, which is numbers, texts or truth values of one kind, or {1}: how others are read"
    " would depend on the rows beside them. Declare text, and convert it in predict"
)


def _present(columns: Columns, found: Any) -> list[str]:
    """The wanted columns, all of which there are. Raises ValidationError."""
    missing = [name for name in columns if name not in found]
    if missing:
        raise ValidationError(f"the table lacks the columns {', '.join(missing)}"[:300])
    return list(columns)
