"""Kinds of chunks that can be joined and cut up by rows, each by its own library.

A chunk's kind is recognised by the name of its type, which is then compared with the type of that
name in the library. The library is loaded, since the chunk exists, so nothing is ever imported
here. Subclasses are not recognised: what a library makes when it joins them is often of another
class, or has lost something (a masked array its mask). Only chunks that are alike (`likeness`) are
joined, so that no value, type or name changes on the way.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable
from itertools import chain
from typing import Any


def cannot_join(what: str) -> TypeError:
    return TypeError(
        f"merge=True cannot join and cut up {what}: it knows lists, numpy arrays, torch tensors, data frames and series"
        " of pandas and polars, tables, record batches and arrays of pyarrow, and dicts of these. Use one of these, or"
        " give merge= and split= functions of your own"
    )


class ChunkKind(ABC):
    """Counts, compares, joins and cuts up chunks of one type."""

    def count_rows(self, x: Any) -> int:
        return len(x)

    @abstractmethod
    def likeness(self, x: Any) -> Hashable:
        """Return what is equal in chunks that may be joined.

        Raises:
            TypeError: This one cannot be joined to any.
        """

    @abstractmethod
    def join(self, chunks: list[Any]) -> Any:
        """Return one chunk of several that are alike, one after the other."""

    def cut(self, x: Any, begin: int, end: int) -> Any:
        return x[begin:end]


class _Lists(ChunkKind):
    def likeness(self, x: Any) -> Hashable:
        return list

    def join(self, chunks: list[Any]) -> Any:
        return [row for chunk in chunks for row in chunk]


class _Dicts(ChunkKind):
    """Dicts of chunks. Dicts are alike if they have the same names in the same order, and each part
    is alike.

    Names that are equal but of different types are different names.
    """

    def count_rows(self, x: Any) -> int:
        return common_count({name: count_rows(part) for name, part in x.items()})

    def likeness(self, x: Any) -> Hashable:
        return dict, *[(type(name), name, likeness(part)) for name, part in x.items()]

    def join(self, chunks: list[Any]) -> Any:
        return {name: join([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def cut(self, x: Any, begin: int, end: int) -> Any:
        return {name: cut(part, begin, end) for name, part in x.items()}


class Axes(ChunkKind):
    """Arrays and tensors, along their first axis. The shape of their rows comes last in their
    likeness.
    """

    def count_rows(self, x: Any) -> int:
        if not x.ndim:
            raise cannot_join(f"{_name_of(type(x))} without axes")
        return len(x)


class _Arrays(Axes):
    def likeness(self, x: Any) -> Hashable:
        return (
            type(x),
            x.dtype,
            x.dtype.char,
            x.shape[1:],
        )  # equal dtypes may differ in it: long, long long

    def join(self, chunks: list[Any]) -> Any:
        # without dtype= the byte order would become the machine's own
        return sys.modules["numpy"].concatenate(chunks, dtype=chunks[0].dtype)


class _Tensors(Axes):
    def likeness(self, x: Any) -> Hashable:
        if (
            x.layout is not sys.modules["torch"].strided
            or x.is_quantized
            or x.is_nested
            or any(getattr(x, "names", ()))
        ):
            raise cannot_join("a torch tensor that is sparse, quantized, nested or has named axes")
        return type(x), x.dtype, x.device, x.requires_grad, x.shape[1:]

    def join(self, chunks: list[Any]) -> Any:
        return sys.modules["torch"].cat(chunks)


class _PandasSeries(ChunkKind):
    def likeness(self, x: Any) -> Hashable:
        return type(x), type(x.name), x.name, _pandas_dtype(x.dtype), _pandas_index(x.index), _attributes(x)

    def join(self, chunks: list[Any]) -> Any:
        return sys.modules["pandas"].concat(chunks)

    def cut(self, x: Any, begin: int, end: int) -> Any:
        return x.iloc[begin:end]  # x[…] slices by label where the labels are floats


class _PandasFrames(_PandasSeries):
    def likeness(self, x: Any) -> Hashable:
        names = (x.columns.dtype, *x.columns.names, *x.columns)
        return type(x), names, tuple(map(_pandas_dtype, x.dtypes)), _pandas_index(x.index), _attributes(x)


def _pandas_index(index: Any) -> Hashable:
    if index.nlevels == 1:
        return *index.names, _pandas_dtype(index.dtype)
    return *index.names, *[_pandas_dtype(level.dtype) for level in index.levels]


def _pandas_dtype(dtype: Any) -> Hashable:
    """Return what is equal in dtypes that may be joined.

    The order of categories counts, as their codes follow it; pandas takes categories as equal in
    any order.
    """
    categories = getattr(dtype, "categories", None)
    return dtype if categories is None else (categories.dtype, *categories, dtype.ordered)


def _attributes(x: Any) -> str:
    return repr(x.attrs) if x.attrs else ""


class _PolarsSeries(ChunkKind):
    def likeness(self, x: Any) -> Hashable:
        return type(x), x.name, x.dtype

    def join(self, chunks: list[Any]) -> Any:
        return sys.modules["polars"].concat(chunks)


class _PolarsFrames(_PolarsSeries):
    def likeness(self, x: Any) -> Hashable:
        if not x.width:
            raise cannot_join("a data frame without columns")
        return type(x), *x.schema.items()


class _ArrowTables(ChunkKind):
    """Tables of pyarrow. Each column keeps its pieces, and with them its dictionaries."""

    def likeness(self, x: Any) -> Hashable:
        if not x.num_columns:
            raise cannot_join(f"{_name_of(type(x))} without columns")
        return type(x), x.schema.serialize().to_pybytes()  # its equality ignores metadata

    def join(self, chunks: list[Any]) -> Any:
        return sys.modules["pyarrow"].concat_tables(chunks)


class _ArrowBatches(_ArrowTables):
    def likeness(self, x: Any) -> Hashable:
        _check_no_dictionary(x.schema.types, x)
        return super().likeness(x)

    def join(self, chunks: list[Any]) -> Any:
        arrow, schema = sys.modules["pyarrow"], chunks[0].schema
        columns = [arrow.concat_arrays([chunk.column(i) for chunk in chunks]) for i in range(len(schema))]
        return arrow.RecordBatch.from_arrays(columns, schema=schema)


class _ArrowColumns(ChunkKind):
    def likeness(self, x: Any) -> Hashable:
        return type(x), x.type

    def join(self, chunks: list[Any]) -> Any:
        pieces = list(chain.from_iterable([chunk.chunks for chunk in chunks]))
        return sys.modules["pyarrow"].chunked_array(pieces, type=chunks[0].type)


class _ArrowArrays(ChunkKind):
    def likeness(self, x: Any) -> Hashable:
        _check_no_dictionary([x.type], x)
        return type(x), x.type

    def join(self, chunks: list[Any]) -> Any:
        return sys.modules["pyarrow"].concat_arrays(chunks)


def _check_no_dictionary(types: list[Any], x: Any) -> None:
    if any("dictionary<" in str(of) for of in types):
        raise cannot_join(
            f"{_name_of(type(x))} with a dictionary, since joining would give it a larger dictionary and other codes"
        )


_DICTS = _Dicts()
_ARROW_ARRAYS = _ArrowArrays()
_BY_NAME: dict[tuple[str, str], ChunkKind] = {
    ("numpy", "ndarray"): _Arrays(),
    ("torch", "Tensor"): _Tensors(),
    ("pandas", "DataFrame"): _PandasFrames(),
    ("pandas", "Series"): _PandasSeries(),
    ("polars", "DataFrame"): _PolarsFrames(),
    ("polars", "Series"): _PolarsSeries(),
    ("pyarrow", "Table"): _ArrowTables(),
    ("pyarrow", "RecordBatch"): _ArrowBatches(),
    ("pyarrow", "ChunkedArray"): _ArrowColumns(),
}
_known: dict[type, ChunkKind] = {list: _Lists(), dict: _DICTS}


def kind_of(x: Any) -> ChunkKind:
    """Raises TypeError for an unknown kind."""
    return _known.get(type(x)) or _recognise(type(x))


def has_axes(x: Any) -> bool:
    """Report whether `x` is a numpy array or a torch tensor."""
    return isinstance(_BY_NAME.get((type(x).__module__, type(x).__name__)), Axes)


def _recognise(cls: type) -> ChunkKind:
    root, name = str(cls.__module__).partition(".")[0], cls.__name__
    library = sys.modules.get(root)
    kind = _BY_NAME.get((root, name))
    if kind is None and root == "pyarrow" and issubclass(cls, library.Array):  # type: ignore[union-attr]
        kind = _ARROW_ARRAYS
    if kind is None or getattr(library, name, None) is not cls:
        raise cannot_join(_name_of(cls))
    _known[cls] = kind
    return kind


def _name_of(cls: type) -> str:
    name = cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def common_count(counts: dict[Any, int]) -> int:
    """Return the number of rows that all parts of a dict have. Raises ValueError if they differ, or
    there are none.
    """
    if len(set(counts.values())) != 1:
        raise ValueError(f"all parts of a chunk must have the same number of rows, not {counts}")
    return next(iter(counts.values()))


def count_rows(x: Any) -> int:
    """Return how many rows a chunk has.

    Raises:
        TypeError: The chunk is of an unknown kind.
        ValueError: As in `common_count`.
    """
    return kind_of(x).count_rows(x)


def likeness(x: Any) -> Hashable:
    """See `ChunkKind.likeness`."""
    return kind_of(x).likeness(x)


def join(chunks: list[Any]) -> Any:
    """Join chunks that are alike to one of the same kind; a single chunk is returned as it is."""
    return chunks[0] if len(chunks) == 1 else kind_of(chunks[0]).join(chunks)


def cut(x: Any, begin: int, end: int) -> Any:
    return kind_of(x).cut(x, begin, end)
