"""The .npy format of numpy: one array as a body. The header is read by numpy's rules but strictly:
only plain dtypes, and a shape that fits the body, before anything is made of it.
"""

from __future__ import annotations

import ast
import re
import struct
from math import prod
from typing import Any, Final

from carpool.engine.allowance import Allowance
from carpool.engine.rows import as_array
from carpool.errors import InvalidRequest, ModelError

NPY_TYPE: Final = b"application/x-npy"
_MAGIC: Final = b"\x93NUMPY"
_DESCR = re.compile(r"[<>=|]?[?bBiufc][0-9]{0,2}")
_MOST_AXES: Final = 32
_LONGEST_HEADER: Final = 4096


def array_in(body: bytes | bytearray) -> Any:
    """Return the array in a body, in memory of its own.

    Raises:
        InvalidRequest: The body is not a .npy file, or one with objects or other dtypes.
    """
    import numpy as np

    dtype, is_fortran, shape, at = _header_of(body)
    if dtype.hasobject or dtype.kind not in "biufc":
        raise InvalidRequest(f"the array is of dtype {str(dtype)!r}: only numbers and bools are read")
    count = prod(shape)
    if count * dtype.itemsize != len(body) - at:
        raise InvalidRequest(
            f"the array has {len(body) - at} bytes, but {dtype} of shape {list(shape)} takes {count * dtype.itemsize}"
        )
    Allowance(len(body)).take_array(shape or (1,), "the array")
    memory = bytearray(memoryview(body)[at:])
    array = np.frombuffer(memory, dtype) if count else np.empty(0, dtype)
    array = array.reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="), order="C", copy=False)


def _header_of(body: bytes | bytearray) -> tuple[Any, bool, tuple[int, ...], int]:
    """Return dtype, order and shape in a header, and where it ends. Raises `InvalidRequest`."""
    import numpy as np

    if bytes(body[:6]) != _MAGIC or len(body) < 10 or body[6] not in (1, 2, 3):
        raise InvalidRequest("the body is not a .npy file")
    is_short = body[6] == 1
    at = 10 if is_short else 12
    if len(body) < at:
        raise InvalidRequest("the body is not a .npy file")
    (length,) = struct.unpack_from("<H" if is_short else "<I", body, 8)
    if length > min(_LONGEST_HEADER, len(body) - at):
        raise InvalidRequest("the header of the .npy file is too long")
    try:
        header = ast.literal_eval(bytes(body[at : at + length]).decode("ascii").strip())
        descr, is_fortran, shape = header["descr"], header["fortran_order"], header["shape"]
        is_fit = len(header) == 3 and isinstance(descr, str) and _DESCR.fullmatch(descr) and type(is_fortran) is bool
        is_fit = is_fit and type(shape) is tuple and len(shape) <= _MOST_AXES
        is_fit = is_fit and all(type(n) is int and n >= 0 for n in shape) and prod(filter(None, shape)) < 2**48
        dtype = np.dtype(descr) if is_fit else None
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError, UnicodeDecodeError):
        is_fit = False
    if not is_fit:
        raise InvalidRequest("the header of the .npy file is not one of an array of numbers or bools")
    return dtype, is_fortran, shape, at + length


def as_npy(value: Any) -> bytes:
    """Return a result as a .npy file.

    Raises:
        ModelError: It is not an array of numbers or bools.
    """
    import numpy as np

    try:
        array = as_array(value)
        array = np.ascontiguousarray(array) if array.ndim else array
    except ValueError as error:
        raise ModelError(f"the result is not an array: {error}", code="bad_result") from error
    if array.dtype.kind not in "biufc":
        raise ModelError(f"the result is an array of {array.dtype}, which .npy bodies do not hold", code="bad_result")
    header = f"{{'descr': {array.dtype.str!r}, 'fortran_order': False, 'shape': {array.shape!r}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return b"".join([_MAGIC, b"\x01\x00", struct.pack("<H", len(header)), header.encode(), array.tobytes()])
