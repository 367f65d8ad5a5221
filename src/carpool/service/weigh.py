"""Writes on a request the results of a user's `size=`, `length=` and `key=` for its item.

This is the only reason for the coordinator to open an item, and it opens each one once, whatever it
is asked of it; without these settings it forwards items unread. An item of which one of them cannot
be found fails alone, before it joins a queue.

Of a list of items (`http/items.py`) the coordinator finds only where each item ends.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from carpool.engine.foreign import as_model_error, text_of, traceback_of
from carpool.engine.hints import schema
from carpool.engine.request import Lane, Request
from carpool.engine.wire import payload
from carpool.engine.wire.payload import JSON, MSGPACK, OBJECT, RAW
from carpool.errors import CarpoolError, ModelError
from carpool.service.checks import Key, header_of
from carpool.service.stage import Stage

LARGEST_SIZE = 2**53
"""Sizes are added up and divided, sometimes as floats, which are exact up to this."""


_PLAIN_KEYS = (str, bytes, int, bool, float, type(None))


class Weigher:
    """Applies a stage's `size=`, `length=` and `key=` to items, in whatever form they come.

    Args:
        key: The trait that requests must have in common to share a batch: a function of an item,
            the name of a field or `header:` with that of a header; None if any may share one.
    """

    def __init__(
        self,
        size: Callable[[Any], int] | None,
        name: str,
        input_type: Any,
        length: Callable[[Any], int] | None = None,
        key: Key | None = None,
    ) -> None:
        self._size = size
        self._length = length
        self._keeps_key = isinstance(key, str) and header_of(key) is not None  # the front has set it
        self._key = key if not isinstance(key, str) else None if self._keeps_key else field_of(key)
        self._opens = size is not None or length is not None or self._key is not None
        self._name = name
        self._input_type = input_type
        self._asking = threading.RLock()  # large bodies are read in threads, and a tokenizer may bear one at a time
        self._readers = schema.MadeWhenNeeded(
            {OBJECT: payload.load, RAW: schema.raw_reader(input_type)},
            {JSON: lambda: schema.json_reader(input_type), MSGPACK: lambda: schema.msgpack_reader(input_type)},
        )

    def of(self, x: Any) -> int:
        """Return the size of an item; 0 counts as 1, and so does each item without `size=`.

        Raises:
            ModelError: The user's function raised, or did not return a whole number from 0 on.
        """
        return 1 if self._size is None else units(self._told(self._size, "size", x), self._name)

    def length_of(self, x: Any) -> int:
        """Return the length of an item; it is 1 without `length=`. Raises the errors of `of`."""
        return 1 if self._length is None else units(self._told(self._length, "length", x), self._name, "length")

    def weigh(self, request: Request, x: Any) -> None:
        """Write the size, the length and the key of its item `x` on a request.

        Raises:
            ModelError: One of the user's functions raised, or did not return what it must.
        """
        request.size = self.of(x)
        request.length = self.length_of(x)
        if self._keeps_key:
            return
        lane = request.lane
        key = None if self._key is None else valid_key(self._told(self._key, "key", x), self._name)
        if key != lane.key:
            request.lane = Lane(lane.priority, key, lane.bucket)

    def weigh_encoded(self, request: Request, item: Any, format: int = OBJECT) -> None:
        """Do the same for an item that is still encoded.

        Raises:
            ValidationError: It does not fit the model's types.
            InvalidRequest: It is malformed.
            ModelError: One of the user's functions failed (see `weigh`), or a pickled item cannot
                be read in this process.
        """
        self.weigh(request, self._opened(item, format) if self._opens else None)

    def _told(self, function: Callable[[Any], Any], setting: str, x: Any) -> Any:
        """Return the result of a user's function for an item. One thread at a time calls it."""
        try:
            with self._asking:
                return function(x)
        except CarpoolError:
            raise
        except BaseException as error:  # nothing that user code raises may break the loop
            raise as_model_error(error, f"{setting}= of {self._name}") from error

    def _opened(self, item: Any, format: int) -> Any:
        try:
            return self._readers[format](item)
        except BaseException as error:  # reading runs code of the item's types
            what = payload.format_name(format)
            ours = schema.as_our_error(error, what, self._input_type, item)
            if format == OBJECT or not isinstance(ours, CarpoolError):
                setting = "size" if self._size is not None else "length" if self._length is not None else "key"
                text = f"an item of {self._name} cannot be read for its {setting}=: {text_of(error)}"
                ours = ModelError(text, type_name=type(error).__name__, traceback=traceback_of(error))
            raise ours from error


def weigher_of(stage: Stage | None, has_keys: bool = False) -> Weigher | None:
    """Return the weigher of the items of a stage, or None if each counts as one and is like any
    other.
    """
    if stage is None or (stage.size is None and stage.length is None and stage.key is None and not has_keys):
        return None
    return Weigher(stage.size, f"stage {stage.name}", stage.traits.input_type, stage.length, stage.key)


def units(returned: Any, whose: str, setting: str = "size") -> int:
    """Return the result of a size or length function as an int of at least 1.

    0 counts as 1, since an empty item is an item of the batch all the same.

    Raises:
        ModelError: It is not a whole number, it is negative, or it is above `LARGEST_SIZE`.
    """
    try:
        size = int.__index__(operator.index(returned))
    except TypeError:
        size = -1
    except BaseException as error:
        raise as_model_error(error, f"what {setting}= of {whose} returned") from error
    if not 0 <= size <= LARGEST_SIZE:
        text = f"{setting}= of {whose} returned {_shown(returned)}: it must return a whole number from 0 to 2**53"
        raise ModelError(text, code="bad_result")
    return size or 1


def valid_key(returned: Any, whose: str) -> Hashable:
    """Return the result of a key function, if it may be a key.

    Keys are compared by the core, so they must be of Python's own plain types, or tuples of them,
    whose comparison runs no code of the user's.

    Raises:
        ModelError: It is anything else.
    """
    kind = type(returned)
    if kind in _PLAIN_KEYS:
        return returned  # type: ignore[no-any-return]
    if kind is tuple:
        return tuple([valid_key(each, whose) for each in returned])
    text = f"key= of {whose} returned {_shown(returned)}: it must return text, bytes, a number, None or a tuple of them"
    raise ModelError(text, code="bad_result")


def field_of(name: str) -> Callable[[Any], Any]:
    """Return a function that reads the field `name` of an item; None where an item has none."""

    def key(x: Any) -> Any:
        return x.get(name) if isinstance(x, Mapping) else getattr(x, name, None)

    return key


def _shown(returned: Any) -> str:
    """Return the beginning of the value's `repr`, or its type if `repr` raises."""
    try:
        return f"{returned!r:.80}"
    except BaseException:
        return f"an object of type {type(returned).__name__}"
