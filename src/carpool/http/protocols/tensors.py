"""Tensors of the Open Inference Protocol: their datatypes, and as JSON and binary data. Sans-IO.

Whatever a client declares is checked before anything is allocated for it: a tensor is a view of the
request's body, or as long as the list in it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Any, Final, NamedTuple

from carpool.engine.allowance import Allowance
from carpool.engine.rows import as_array
from carpool.engine.wire.payload import LARGE
from carpool.errors import InvalidRequest, ModelError

DTYPES: Final = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "u2",
    "UINT32": "u4",
    "UINT64": "u8",
    "INT8": "i1",
    "INT16": "i2",
    "INT32": "i4",
    "INT64": "i8",
    "FP16": "f2",
    "FP32": "f4",
    "FP64": "f8",
    "BF16": "u2",
    "BYTES": "O",
}
"""numpy's dtype by the protocol's datatype. BF16 is raw 16 bit, as numpy has no such dtype."""

_DATATYPES: Final = {dtype: name for name, dtype in DTYPES.items() if name not in ("BF16", "BYTES", "BOOL")}
_MOST_AXES = 32
_MOST_ELEMENTS = 2**48
_LENGTH: Final = struct.Struct("<I")


class Tensor(NamedTuple):
    """A named tensor.

    Attributes:
        datatype: One of `DTYPES`.
        array: Its elements; those of BYTES are objects of type bytes or str. None if its rows lie
            apart.
        rows: The arrays that are its rows, if they lie apart; they are of one shape and dtype.
    """

    name: str
    datatype: str
    array: Any
    rows: Sequence[Any] = ()

    @property
    def shape(self) -> list[int]:
        return [len(self.rows), *self.rows[0].shape] if self.array is None else list(self.array.shape)


def check_shape(name: str, datatype: str, shape: Sequence[int]) -> int:
    """Return how many elements a tensor has.

    Raises:
        InvalidRequest: There is no such datatype, or a tensor cannot have this shape.
    """
    if datatype not in DTYPES:
        raise InvalidRequest(
            f"input {name!r} has the unknown datatype {datatype[:40]!r}: it is one of {', '.join(DTYPES)}"
        )
    if not 0 < len(shape) <= _MOST_AXES or min(shape) < 0 or prod(filter(None, shape)) > _MOST_ELEMENTS:
        raise InvalidRequest(
            f"input {name!r} has the shape {list(shape)[:_MOST_AXES]}: give 1 to {_MOST_AXES} lengths, the first of"
            " which is the number of rows"
        )
    return prod(shape)


def _take(name: str, shape: Sequence[int], allowance: Allowance) -> None:
    """Count the rows of a tensor whose data is there, and what is in them. Raises
    `InvalidRequest` (413).
    """
    allowance.check_items(shape[0], f"input {name!r}")
    allowance.take_array(shape, f"input {name!r}")


def from_binary(name: str, datatype: str, shape: Sequence[int], data: memoryview, allowance: Allowance) -> Tensor:
    """Return a tensor that came as binary data: a view of it, where it holds numbers.

    Raises:
        InvalidRequest: The data does not fit the datatype and shape, or has too many rows.
    """
    import numpy as np

    count = check_shape(name, datatype, shape)
    if datatype == "BYTES":
        texts = _texts_in(name, data, count)
        _take(name, shape, allowance)
        return Tensor(name, datatype, _objects(texts).reshape(shape))
    dtype = np.dtype(DTYPES[datatype]).newbyteorder("<")
    if count * dtype.itemsize != len(data):
        raise InvalidRequest(
            f"input {name!r} has {len(data)} bytes of data, but {datatype} of shape {list(shape)} takes"
            f" {count * dtype.itemsize}"
        )
    _take(name, shape, allowance)
    if datatype == "BOOL":  # any byte other than 0 is true, and a bool that is no 0 or 1 would be neither
        return Tensor(name, datatype, (np.frombuffer(data, np.uint8) != 0).reshape(shape))
    array = np.frombuffer(data, dtype) if count else np.empty(0, dtype)
    return Tensor(name, datatype, array.reshape(shape))


def _texts_in(name: str, data: memoryview, count: int) -> list[bytes]:
    """Return the elements of a BYTES tensor: each is its length in 4 bytes, and its bytes."""
    texts: list[bytes] = []
    at = 0
    while at < len(data):
        if at + 4 > len(data):
            raise InvalidRequest(f"input {name!r} ends within the length of an element")
        (length,) = _LENGTH.unpack_from(data, at)
        at += 4
        if at + length > len(data):
            raise InvalidRequest(
                f"input {name!r} has an element of {length} bytes, of which {len(data) - at} are there"
            )
        texts.append(bytes(data[at : at + length]))
        at += length
    _check_count(name, len(texts), count)
    return texts


def _check_count(name: str, found: int, count: int) -> None:
    if found != count:
        raise InvalidRequest(f"input {name!r} has {found} elements, but its shape takes {count}")


def _objects(values: Sequence[Any]) -> Any:
    """Return an array of objects: numpy would give each text the room of the longest one."""
    import numpy as np

    array = np.empty(len(values), object)
    array[:] = values
    return array


def from_json(name: str, datatype: str, shape: Sequence[int], data: Any, allowance: Allowance) -> Tensor:
    """Return a tensor that came as a list, flat or nested.

    Raises:
        InvalidRequest: The list does not fit the datatype and shape, or has too many rows.
    """
    import numpy as np

    count = check_shape(name, datatype, shape)
    is_text = datatype == "BYTES"
    if datatype == "BF16":
        raise InvalidRequest(f"input {name!r} is BF16, which JSON cannot express: send it as binary data")
    if not isinstance(data, list):
        raise InvalidRequest(f"input {name!r} has no list of data")
    flat = _flattened(name, data)
    _check_count(name, len(flat), count)
    if not set(map(type, flat)) <= ({str} if is_text else {bool, int, float}):
        raise InvalidRequest(f"input {name!r} is {datatype}, but its data has other values than that")
    _take(name, shape, allowance)
    array = _objects(flat) if is_text else _narrowed(name, datatype, np.array(flat))
    return Tensor(name, datatype, array.reshape(shape))


def _narrowed(name: str, datatype: str, given: Any) -> Any:
    """Return numbers from JSON in the dtype that the client names. Raises `InvalidRequest`."""
    try:
        return _as_dtype(datatype, given)
    except ValueError as error:
        raise InvalidRequest(f"input {name!r} {error}") from None


def _as_dtype(datatype: str, given: Any) -> Any:
    import numpy as np

    wanted = np.dtype(DTYPES[datatype])
    if given.dtype == wanted:
        return given
    if not given.size:
        return np.empty(given.shape, wanted)
    fitting = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[wanted.kind]
    if given.dtype.kind not in fitting:
        raise ValueError(f"is {datatype}, but its data has other values than that")
    if wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if int(given.min()) < limits.min or int(given.max()) > limits.max:
            raise ValueError(f"has numbers that are out of the range of {datatype}")
    with np.errstate(over="ignore"):
        narrowed = given.astype(wanted)
    if wanted.kind == "f" and (np.isinf(narrowed) & ~np.isinf(given)).any():
        raise ValueError(f"has numbers that are out of the range of {datatype}")
    return narrowed


def as_datatype(tensor: Tensor, datatype: str) -> Tensor:
    """Return a tensor of results in the datatype that their hint means.

    Raises:
        ModelError: It does not hold them.
    """
    if tensor.datatype == datatype:
        return tensor
    try:
        if "BYTES" in (tensor.datatype, datatype):
            raise ValueError(f"is {datatype} by its hint, but the results are {tensor.datatype}")
        if tensor.array is None:
            return Tensor(tensor.name, datatype, None, [_as_dtype(datatype, row) for row in tensor.rows])
        return Tensor(tensor.name, datatype, _as_dtype(datatype, tensor.array))
    except ValueError as error:
        raise ModelError(f"output {tensor.name!r} {error}", code="bad_result") from None


def _flattened(name: str, data: list[Any]) -> list[Any]:
    level = data
    for _ in range(_MOST_AXES):
        if not level or not isinstance(level[0], list):
            break
        if not all(isinstance(each, list) for each in level):
            raise InvalidRequest(f"the lists of input {name!r} are not nested alike")
        if len(set(map(len, level))) > 1:
            raise InvalidRequest(f"the lists of input {name!r} have different lengths")
        level = [each for inner in level for each in inner]
    return level


def to_binary(tensor: Tensor) -> list[bytes | memoryview]:
    """Return a tensor as pieces of binary data; numbers are not copied if they lie in order."""
    if tensor.datatype == "BYTES":
        texts = [_as_bytes(each) for each in tensor.array.ravel()]
        return [b"".join([part for text in texts for part in (_LENGTH.pack(len(text)), text)])]
    return [_bytes_of(array) for array in (tensor.rows if tensor.array is None else [tensor.array])]


def _bytes_of(numbers: Any) -> bytes | memoryview:
    import numpy as np

    array: Any = np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<"))
    return memoryview(array.reshape(-1)).cast("B") if array.size else b""


def elements_of(tensor: Tensor) -> Any:
    """Return the elements of a tensor, which JSON can express: a list, or a flat array.

    Raises:
        ModelError: It holds bytes that are no text, or NaN.
    """
    import numpy as np

    flat = (np.stack(tensor.rows) if tensor.array is None else tensor.array).ravel()
    if tensor.datatype == "BYTES":
        try:
            return [each if isinstance(each, str) else bytes(each).decode() for each in flat]
        except UnicodeDecodeError:
            raise ModelError(
                f"output {tensor.name!r} holds bytes that are not UTF-8: ask for it as binary data", code="bad_result"
            ) from None
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        raise ModelError(
            f"output {tensor.name!r} holds NaN or infinity, which JSON cannot express: ask for it as binary data",
            code="bad_result",
        )
    return flat


def _as_bytes(element: Any) -> bytes:
    return element.encode() if isinstance(element, str) else bytes(element)


def of_results(name: str, values: list[Any]) -> Tensor:
    """Return one tensor whose rows are results of a model.

    Args:
        values: One for each row, at least one.

    Raises:
        ModelError: They do not make one tensor.
    """
    import numpy as np

    if isinstance(values[0], str | bytes | bytearray | memoryview):
        if not all(isinstance(each, str | bytes | bytearray | memoryview) for each in values):
            raise _no_tensor(name, "some are texts and others are not")
        return Tensor(name, "BYTES", _objects([each if isinstance(each, str) else bytes(each) for each in values]))
    try:
        arrays = [as_array(each) for each in values]
        if len({each.shape for each in arrays}) > 1:
            raise _no_tensor(name, "they have different shapes; ask for one row at a time")
        dtype = arrays[0].dtype
        is_large = arrays[0].nbytes * len(arrays) >= LARGE
        if is_large and dtype.kind not in "UO" and all(each.dtype == dtype for each in arrays):
            return Tensor(name, datatype_of(name, dtype), None, arrays)  # whoever writes it copies the rows once
        stacked = np.stack(arrays)
    except ValueError as error:
        raise _no_tensor(name, str(error)) from error
    if stacked.dtype.kind == "U":
        return Tensor(name, "BYTES", stacked.astype(object))
    if stacked.dtype.kind == "O" and {str} <= set(map(type, stacked.flat)) <= {str, bool, int, float}:
        return Tensor(name, "BYTES", _objects([*map(str, stacked.flat)]).reshape(stacked.shape))
    return Tensor(name, datatype_of(name, stacked.dtype), stacked)


def datatype_of(name: str, dtype: Any) -> str:
    """Return the protocol's name of a dtype. Raises `ModelError` if it has none."""
    if dtype.kind == "b":
        return "BOOL"
    if dtype.kind in "SO":
        raise _no_tensor(name, "they are not numbers, texts or lists of these")
    found = _DATATYPES.get(dtype.str[1:])
    if found is None:
        raise _no_tensor(name, f"the protocol has no datatype for {dtype}")
    return found


def _no_tensor(name: str, why: str) -> ModelError:
    return ModelError(f"the results cannot be the rows of the tensor {name!r}: {why}", code="bad_result")
