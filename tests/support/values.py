"""What a program can tell of a value that has crossed between processes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from carpool.engine.policy import View


def seen(value: Any) -> Any:
    """Return all that a program can tell of a value, to the last bit of a float."""
    if type(value) is np.ndarray:
        return "array", value.dtype.str, value.shape, value.tobytes(), value.flags.writeable
    if type(value) is float:
        return "float", struct.pack("<d", value)
    if type(value) is list:
        return "list", [seen(each) for each in value]
    return type(value), repr(value)


def flat(thing: Any) -> Any:
    """An object as what can be compared."""
    if isinstance(thing, int | float | str | None):
        return thing
    if isinstance(thing, View):
        return None  # not the policy's own
    if isinstance(thing, dict):
        return {key: flat(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple | set) or hasattr(thing, "popleft"):
        return [flat(each) for each in thing]
    return {name: flat(value) for name, value in vars(thing).items() if not callable(value)}
