"""How much of a batch an item takes up, where users say so with `size=`: rows, tokens, pixels.

This is the only reason for which the coordinator opens an item by itself; without `size=` it forwards what it never
reads. An item that cannot be weighed fails alone, before it joins a queue.
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
"""Sizes are added up and divided, as floats in places."""


class Weigher:
    """A stage's `size=`, applied to items in whatever form they come.

    Args:
        size: the user's function.
        name: of the stage, for error texts.
        input_type: of the stage's items, for those that come as text from outside.
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
        """The size of an item.

        Raises:
            ModelError: the user's function raised, or returned no whole number of at least 1 (0 counts for 1).
        """
        try:
            returned = self._size(x)
        except CarpoolError:
            raise
        except BaseException as error:  # nothing that user code raises may break the loop that asks
            raise as_model_error(error, f"size= of {self._name}") from error
        return units(returned, self._name)

    def of_encoded(self, item: Any, format: int = OBJECT) -> int:
        """The size of an item that is still encoded: a request's body, or the result of the stage before.

        Raises:
            ValidationError: it does not fit the model's types.
            InvalidRequest: it is malformed.
            ModelError: see `of`; or the item of our own making cannot be read here.
        """
        try:
            x = self._readers[format](item)
        except BaseException as error:  # types from outside have code of their own
            what = "msgpack" if format == MSGPACK else "JSON"
            ours = schema.as_our_error(error, what, self._input_type, item)
            if format == OBJECT or not isinstance(ours, CarpoolError):
                text = f"an item of {self._name} cannot be read for its size=: {text_of(error)}"
                ours = ModelError(text, type_name=type(error).__name__, traceback=traceback_of(error))
            raise ours from error
        return self.of(x)


def weigher_of(stage: Stage) -> Weigher | None:
    """What weighs the items of a stage; None if all count for one."""
    return None if stage.size is None else Weigher(stage.size, f"stage {stage.name}", stage.traits.input_type)


def units(returned: Any, whose: str) -> int:
    """What a size function has returned, as a number of at least 1: an empty item takes a place all the same.

    Raises:
        ModelError: it is no whole number, a negative one, or one that no batch could ever hold.
    """
    try:
        size = int.__index__(operator.index(returned))
    except TypeError:
        size = -1
    except BaseException as error:
        raise as_model_error(error, f"what size= of {whose} returned") from error
    if not 0 <= size <= LARGEST_SIZE:
        text = f"size= of {whose} returned {_shown(returned)}: it must return a whole number from 1 to 2**53"
        raise ModelError(text, code="bad_result")
    return size or 1


def _shown(returned: Any) -> str:
    """What was returned, as far as it can be shown."""
    try:
        return f"{returned!r:.80}"
    except BaseException:
        return f"an object of type {type(returned).__name__}"
