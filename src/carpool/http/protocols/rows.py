"""Items of a model as rows of named tensors, and rows as items: by the model's type hints.

A TypedDict, dataclass or Struct has a tensor for each field; any other item is the row of one
tensor, which is called `input`, and results are those of `output`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from carpool.engine.hints import schema
from carpool.engine.rows import is_array_type
from carpool.engine.type_hints import hints_of, meant
from carpool.engine.wire.payload import MSGPACK, OBJECT
from carpool.errors import InvalidRequest, ModelError
from carpool.http.protocols.tensors import DTYPES, Tensor, as_datatype, datatype_of, of_results

INPUT: Final = "input"
OUTPUT: Final = "output"

_INTEGERS = frozenset(name for name in DTYPES if name.startswith(("INT", "UINT")))
_FLOATS = frozenset({"FP16", "FP32", "FP64"})
_SCALARS: Final[dict[Any, tuple[str, frozenset[str]]]] = {
    float: ("FP64", _FLOATS | _INTEGERS),
    int: ("INT64", _INTEGERS),
    bool: ("BOOL", frozenset({"BOOL"})),
    str: ("BYTES", frozenset({"BYTES"})),
    bytes: ("BYTES", frozenset({"BYTES"})),
}


class TensorColumn(NamedTuple):
    """What a tensor must be whose rows are items, or a field of them.

    Attributes:
        datatype: As metadata has it.
        shape: Of a row; -1 where any length will do.
        datatypes: All that are taken; None for any.
        is_array: Whether a row stays an array.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    kind: Any
    datatypes: frozenset[str] | None
    is_array: bool
    is_scalar: bool
    is_optional: bool = False


class TensorTable(NamedTuple):
    """What the tensors must be that make the items of a model, or are made of its results.

    Attributes:
        is_record: Whether an item has a field for each column; otherwise there is one column, and
            its rows are the items.
    """

    columns: tuple[TensorColumn, ...]
    kind: Any
    is_record: bool


def table_of(kind: Any, name: str, examples: Sequence[Any] = (), *, is_whole: bool = False) -> TensorTable:
    """Return the tensors that make items of a type.

    Args:
        is_whole: Whether the hint is that of an array of all rows, and not of one.

    Raises:
        ValueError: No tensors can; the text says why.
    """
    fields = fields_of(kind)
    if fields is None:
        column = _column(name, kind, examples[0] if len(examples) else None)
        if is_whole and (lengths := _lengths_of_arrays(kind)):
            column = column._replace(shape=lengths[1:])
        return TensorTable((column,), kind, is_record=False)
    columns = []
    for field, (type_of_field, is_optional) in fields.items():
        example = _field_of(examples[0], field) if len(examples) else None
        columns.append(_column(field, type_of_field, example)._replace(is_optional=is_optional))
    return TensorTable(tuple(columns), kind, is_record=True)


def fields_of(kind: Any) -> dict[str, tuple[Any, bool]] | None:
    """Return the fields of a record, each with its type and whether it may be left out; None if a
    type is no record.
    """
    try:
        return _fields_of(kind)
    except (NameError, AttributeError, TypeError):  # a hint that means nothing where it stands
        return None


def _fields_of(kind: Any) -> dict[str, tuple[Any, bool]] | None:
    if typing.is_typeddict(kind):
        hints = hints_of(kind, include_extras=False)
        return {name: (hint, name not in kind.__required_keys__) for name, hint in hints.items()}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return {field.encode_name: (meant(field.type), not field.required) for field in fields}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = hints_of(kind, include_extras=False)
        return {
            field.name: (
                hints[field.name],
                not (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING),
            )
            for field in dataclasses.fields(kind)
            if field.init
        }
    if isinstance(kind, type) and hasattr(kind, "model_json_schema"):
        model_fields: Mapping[str, Any] = kind.model_fields  # type: ignore[attr-defined]
        return {
            field.alias or name: (meant(field.annotation), not field.is_required())
            for name, field in model_fields.items()
        }
    return None


def _column(name: str, kind: Any, example: Any) -> TensorColumn:
    import numpy as np

    shape: tuple[int, ...] = () if example is None else (-1,) * np.ndim(example)
    if is_array_type(kind):
        dtype = schema.dtype_of(kind)
        shape = _lengths_of_arrays(kind) or (shape if example is not None else (-1,))
        if dtype is None:
            return TensorColumn(name, "FP32", shape, kind, None, is_array=True, is_scalar=False)
        try:
            datatype = datatype_of(name, dtype)
        except ModelError:
            raise ValueError(f"{name} is an array of {dtype}, for which the protocol has no datatype") from None
        also = {"BF16"} if datatype == "UINT16" else set()
        return TensorColumn(name, datatype, shape, kind, frozenset({datatype, *also}), is_array=True, is_scalar=False)
    if kind is Any:
        datatype, is_array = "FP64", isinstance(example, np.ndarray)
        if example is not None:
            try:
                datatype = of_results(name, [example]).datatype
            except ModelError:
                raise ValueError(f"{name} is {type(example).__name__}, which is no row of a tensor") from None
        return TensorColumn(name, datatype, shape, kind, None, is_array=is_array, is_scalar=False)
    scalar, lengths = _scalar_in(kind)
    if scalar is None:
        raise ValueError(f"{name} is {schema.type_name(kind)}, which is no row of a tensor")
    datatype, datatypes = _SCALARS[scalar]
    return TensorColumn(name, datatype, lengths, kind, datatypes, is_array=False, is_scalar=not lengths)


def _scalar_in(kind: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the scalar in a type such as `list[list[float]]`, and the lengths of the axes around
    it, -1 where the hint names none; None if there is no scalar.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        scalar, lengths = _scalar_in(args[0])
        return scalar, (_length_in(args[1:]), *lengths[1:]) if lengths[:1] == (-1,) else lengths
    if kind in _SCALARS:
        return kind, ()
    if isinstance(origin, type) and issubclass(origin, Sequence) and args:
        if set(args[1:]) <= {Ellipsis} and not (origin is tuple and len(args) == 1):
            scalar, lengths = _scalar_in(args[0])
            return scalar, (-1, *lengths)
        if origin is tuple and len(set(args)) == 1:
            scalar, lengths = _scalar_in(args[0])
            return scalar, (len(args), *lengths)
    return None, ()


def _length_in(constraints: Sequence[Any]) -> int:
    """Return the only length that constraints of a type allow; -1 if they allow several."""
    least = max([getattr(each, "min_length", None) or 0 for each in constraints])
    most = min([n for each in constraints if (n := getattr(each, "max_length", None)) is not None], default=-1)
    return most if most == least else -1


def _lengths_of_arrays(kind: Any) -> tuple[int, ...]:
    """Return the lengths that the hint of an array names, as `tuple[Literal[3], int]` does, with -1
    where any will do; empty if it says nothing of its axes.
    """
    axes = typing.get_args(typing.get_args(kind)[0]) if typing.get_args(kind) else ()
    if not all(map(_is_axis, axes)):
        return ()
    return tuple(typing.get_args(axis)[0] if typing.get_origin(axis) is typing.Literal else -1 for axis in axes)


def _is_axis(hint: Any) -> bool:
    """Report whether a hint is one of the lengths of an array: `int`, or a literal number."""
    if typing.get_origin(hint) is typing.Literal:
        literals = typing.get_args(hint)
        return len(literals) == 1 and type(literals[0]) is int
    return hint is int


def _field_of(value: Any, field: str) -> Any:
    return value.get(field) if isinstance(value, Mapping) else getattr(value, field, None)


class Items(NamedTuple):
    """Items that were made of tensors."""

    values: list[Any]
    sent_as: int


def items_of(table: TensorTable, tensors: Sequence[Tensor]) -> Items:
    """Return the items whose rows stand in tensors.

    Raises:
        InvalidRequest: The tensors are not those of the table, or a row does not fit.
    """
    given = {tensor.name: tensor for tensor in tensors}
    if len(given) != len(tensors):
        raise InvalidRequest("two inputs have one name")
    if not table.is_record and len(given) == 1:  # with one tensor, its name says nothing
        given = {table.columns[0].name: tensors[0]}
    names = [column.name for column in table.columns]
    unknown = [name for name in given if name not in names]
    missing = [column.name for column in table.columns if column.name not in given and not column.is_optional]
    if unknown or missing:
        which = f"has no input {unknown[0]!r}" if unknown else f"needs the input {missing[0]!r}"
        raise InvalidRequest(f"the model {which}: its inputs are {', '.join(map(repr, names))}")
    if len({len(tensor.array) for tensor in given.values()}) != 1:
        raise InvalidRequest("the first axis of all inputs is the rows, and the inputs have different numbers of rows")
    columns = {column.name: _values(column, given[column.name]) for column in table.columns if column.name in given}
    has_arrays = any(column.is_array for column in table.columns)
    if not table.is_record:
        (values,) = columns.values()
        return _sent(values, table.kind, has_arrays)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if has_arrays and not typing.is_typeddict(table.kind):
        return Items([schema.fitted(row, table.kind) for row in rows], OBJECT)
    return _sent(rows, table.kind, has_arrays)


def _sent(values: list[Any], kind: Any, has_arrays: bool) -> Items:
    """Return items as they are sent: as objects where the worker need not check them."""
    if has_arrays or kind in _SCALARS or kind is Any:
        return Items(values, OBJECT)
    return Items([_pack(value) for value in values], MSGPACK)


_pack: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode


def _values(column: TensorColumn, tensor: Tensor) -> list[Any]:
    array = tensor.array
    if column.datatypes is not None and tensor.datatype not in column.datatypes:
        raise InvalidRequest(f"input {tensor.name!r} is {tensor.datatype}, but the model takes {column.datatype}")
    if column.is_scalar and array.ndim > 1:
        if array.size != len(array):
            raise InvalidRequest(f"a row of input {tensor.name!r} is one value, but the shape is {list(array.shape)}")
        array = array.reshape(-1)
    if not column.is_scalar and column.kind is not Any and array.ndim - 1 != len(column.shape) and not column.is_array:
        raise InvalidRequest(
            f"a row of input {tensor.name!r} has {len(column.shape)} axes, but the shape is {list(array.shape)}"
        )
    lengths = array.shape[1:]
    if any(length not in (-1, given) for length, given in zip(column.shape, lengths, strict=False)) or (
        max(column.shape, default=-1) >= 0 and len(lengths) != len(column.shape)
    ):
        raise InvalidRequest(
            f"a row of input {tensor.name!r} has the shape {list(lengths)}, but the model takes {list(column.shape)},"
            " where -1 is any length"
        )
    if column.is_array:
        return list(array.astype(array.dtype.newbyteorder("="), copy=False))
    scalar, _ = _scalar_in(column.kind)
    if tensor.datatype == "BYTES":
        return _texts(array.tolist(), as_text=scalar is not bytes)
    if scalar is float and array.dtype.kind in "iu":
        array = array.astype("f8")
    listed: list[Any] = array.tolist()
    return listed


def _texts(values: list[Any], *, as_text: bool) -> list[Any]:
    try:
        return [
            _texts(each, as_text=as_text)
            if isinstance(each, list)
            else (each if isinstance(each, str) else each.decode())
            if as_text
            else (each.encode() if isinstance(each, str) else each)
            for each in values
        ]
    except UnicodeDecodeError:
        raise InvalidRequest("an element of a BYTES input is not UTF-8, and the model takes texts") from None


def tensors_of(table: TensorTable | None, results: list[Any]) -> list[Tensor]:
    """Return the tensors whose rows are results.

    Args:
        table: The form of the results by their hint; None if that does not say.

    Raises:
        ModelError: They cannot be rows of tensors.
    """
    if not results:
        return [] if table is None else [_empty(column, 0) for column in table.columns]
    columns = {} if table is None else {column.name: column for column in table.columns}
    if not isinstance(results[0], Mapping):
        return [_as_hinted(columns.get(OUTPUT), of_results(OUTPUT, results))]
    try:
        tensors = [of_results(str(name), [result[name] for result in results]) for name in results[0]]
    except (KeyError, TypeError) as error:
        raise ModelError(f"the results have different fields: {error}", code="bad_result") from None
    return [_as_hinted(columns.get(tensor.name), tensor) for tensor in tensors]


def _as_hinted(column: TensorColumn | None, tensor: Tensor) -> Tensor:
    if column is None or column.datatypes is None:
        return tensor
    shape, wanted = tensor.shape, column.shape
    if not (tensor.array is None or tensor.array.size) and len(shape) - 1 < len(wanted):
        return _empty(column, len(tensor.array))  # the shape of empty lists is undecided
    if not _fits_shape(column, shape[1:]):
        text = f"the results have the shape {shape[1:]}, but their hint says {list(wanted)}, where -1 is any length"
        raise ModelError(text, code="bad_result")
    return as_datatype(tensor, column.datatype)


def _fits_shape(column: TensorColumn, lengths: Sequence[int]) -> bool:
    is_exact = not column.is_array or max(column.shape, default=-1) >= 0
    if is_exact and len(lengths) != len(column.shape):
        return False
    return all(length in (-1, given) for length, given in zip(column.shape, lengths, strict=False))


def _empty(column: TensorColumn, rows: int) -> Tensor:
    import numpy as np

    shape = (rows, *(max(0, length) for length in column.shape))
    return Tensor(column.name, column.datatype, np.empty(shape, DTYPES[column.datatype]))
