"""How much of a batch an item takes up, where users say so with `size=`: rows, tokens, pixels.

This is the only reason for which the coordinator opens an item by itself; without `size=` it forwards what it never
reads. An item that cannot be weighed fails alone, before it joins a queue.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable
from typing import Any

from carpool import schema
from carpool.errors import CarpoolError, ModelError
from carpool.stage import Stage
from carpool.wire import payload
from carpool.wire.payload import JSON, MSGPACK, OBJECT, RAW


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
        except Exception as error:
            kind = type(error).__name__
            text = "".join(traceback.format_exception(error))
            raise ModelError(f"size= of {self._name} raised {kind}: {error}", type_name=kind, traceback=text) from error
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
        except Exception as error:
            ours: BaseException = schema.as_our_error(error, "msgpack" if format == MSGPACK else "JSON")
            if format == OBJECT or not isinstance(ours, CarpoolError):
                text = f"an item of {self._name} cannot be read for its size=: {error}"
                ours = ModelError(text, type_name=type(error).__name__)
            raise ours from error
        return self.of(x)


def weigher_of(stage: Stage) -> Weigher | None:
    """What weighs the items of a stage; None if all count for one."""
    return None if stage.size is None else Weigher(stage.size, f"stage {stage.name}", stage.traits.input_type)


def units(returned: Any, whose: str) -> int:
    """What a size function has returned, as a number of at least 1: an empty item takes a place all the same.

    Raises:
        ModelError: it is no whole number, or a negative one.
    """
    try:
        size = operator.index(returned)
    except TypeError:
        size = -1
    if size < 0:
        text = f"size= of {whose} returned {returned!r:.80}: it must return a whole number of at least 1"
        raise ModelError(text, code="bad_result")
    return size or 1
