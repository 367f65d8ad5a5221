"""What a program can tell of a value that has crossed between processes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np


def seen(value: Any) -> Any:
    """Return all that a program can tell of a value, to the last bit of a float."""
    if type(value) is np.ndarray:
        return "array", value.dtype.str, value.shape, value.tobytes(), value.flags.writeable
    if type(value) is float:
        return "float", struct.pack("<d", value)
    if type(value) is list:
        return "list", [seen(each) for each in value]
    return type(value), repr(value)
