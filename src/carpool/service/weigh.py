"""How much of a batch an item takes up (rows, tokens, pixels), as a user's `size=` says.

This is the only reason for the coordinator to open an item; without `size=` it forwards items
unread. An item that cannot be weighed fails alone, before it joins a queue.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from carpool.errors import CarpoolError, ModelError
from carpool.foreign import as_model_error, text_of, traceback_of
from carpool.hints import schema
from carpool.service.stage import Stage
from carpool.wire import payload
from carpool.wire.payload import JSON, MSGPACK, OBJECT, RAW

LARGEST_SIZE = 2**53
"""Sizes are added up and divided, sometimes as floats, which are exact up to this."""


class Weigher:
    """Applies a stage's `size=` to items, in whatever form they come.

    Args:
        size: The user's function.
        name: The name of the stage, for error texts.
        input_type: The type of the stage's items, to read those that come as JSON or msgpack.
    """

    def __init__(self, size: Callable[[Any], int], name: str, input_type: Any) -> None:
        self._size = size
        self._name = name
        self._input_type = input_type
        self._readers = schema.MadeWhenNeeded(
            {OBJECT: payload.load, RAW: bytes},
            {JSON: lambda: schema.json_reader(input_type), MSGPACK: lambda: schema.msgpack_reader(input_type)},
        )

    def of(self, x: Any) -> int:
        """Return the size of an item; 0 counts as 1.

        Raises:
            ModelError: The user's function raised, or did not return a whole number from 0 on.
        """
        try:
            returned = self._size(x)
        except CarpoolError:
            raise
        except BaseException as error:  # nothing that user code raises may break the loop
            raise as_model_error(error, f"size= of {self._name}") from error
        return units(returned, self._name)

    def of_encoded(self, item: Any, format: int = OBJECT) -> int:
        """Return the size of an item that is still encoded.

        Args:
            item: A request's body, or the result of the previous stage.
            format: How it is encoded, as `carpool.wire.payload` numbers formats.

        Raises:
            ValidationError: It does not fit the model's types.
            InvalidRequest: It is malformed.
            ModelError: The user's function failed (see `of`), or a pickled item cannot be read in
                this process.
        """
        try:
            x = self._readers[format](item)
        except BaseException as error:  # reading runs code of the item's types
            what = "msgpack" if format == MSGPACK else "JSON"
            ours = schema.as_our_error(error, what, self._input_type, item)
            if format == OBJECT or not isinstance(ours, CarpoolError):
                text = f"an item of {self._name} cannot be read for its size=: {text_of(error)}"
                ours = ModelError(text, type_name=type(error).__name__, traceback=traceback_of(error))
            raise ours from error
        return self.of(x)


def weigher_of(stage: Stage) -> Weigher | None:
    """Return what weighs the items of a stage, or None if each counts as one."""
    return None if stage.size is None else Weigher(stage.size, f"stage {stage.name}", stage.traits.input_type)


def units(returned: Any, whose: str) -> int:
    """Return what a size function has returned as an int of at least 1.

    A size of 0 counts as 1, since an empty item is an item of the batch all the same.

    Args:
        returned: What the function returned.
        whose: The stage or function that it belongs to, for error texts.

    Raises:
        ModelError: It is not a whole number, it is negative, or it is above `LARGEST_SIZE`.
    """
    try:
        size = int.__index__(operator.index(returned))
    except TypeError:
        size = -1
    except BaseException as error:
        raise as_model_error(error, f"what size= of {whose} returned") from error
    if not 0 <= size <= LARGEST_SIZE:
        text = f"size= of {whose} returned {_shown(returned)}: it must return a whole number from 0 to 2**53"
        raise ModelError(text, code="bad_result")
    return size or 1


def _shown(returned: Any) -> str:
    """Return the beginning of the value's `repr`, or its type if `repr` raises."""
    try:
        return f"{returned!r:.80}"
    except BaseException:
        return f"an object of type {type(returned).__name__}"
