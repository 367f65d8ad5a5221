"""A limit on how deep an item from outside may be nested.

Reading JSON or msgpack takes a piece of the C stack for each level. The interpreter refuses an item
that is nested too deep, unless the program has raised the recursion limit: then two megabytes of
`[` would end the process. So bodies are checked first where the limit has been raised.

Since Python 3.12 what is written in C has a limit of its own, which is larger and which no program
can raise: there the interpreter always refuses, and the check only keeps to the same levels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final

MOST_LEVELS: Final = 1000
"""The largest number of levels; it is the interpreter's own default."""

Buffer = bytes | bytearray | memoryview

_JSON_OPENERS = b"[{"
_REST_OF_JSON = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # +1 and -1, as signed bytes

_MSGPACK_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_MSGPACK_SCALARS: Final = {  # by the first byte of an item: how many bytes follow it
    **{kind: kind - 0xA0 for kind in range(0xA0, 0xC0)},
    **dict(zip(range(0xCA, 0xD9), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17), strict=True)),
}
_MSGPACK_LENGTHS: Final = {  # by the first byte: how many bytes hold the length, and how many more follow
    **dict(zip(range(0xC4, 0xCA), ((1, 0), (2, 0), (4, 0), (1, 1), (2, 1), (4, 1)), strict=True)),
    **dict(zip(range(0xD9, 0xDC), ((1, 0), (2, 0), (4, 0)), strict=True)),
}
# by the first byte: how many bytes hold the count, and how many items each of the counted has
_MSGPACK_COUNTS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def bounded(read: Callable[[Any], Any], is_deep: Callable[[Buffer], bool]) -> Callable[[Any], Any]:
    """Make a reader that raises RecursionError for bodies of which `is_deep` holds, whatever the
    recursion limit is.
    """

    def read_bounded(body: Buffer) -> Any:
        if len(body) > MOST_LEVELS and sys.getrecursionlimit() > MOST_LEVELS and is_deep(body):
            raise RecursionError(f"more than {MOST_LEVELS} levels")
        return read(body)

    read_bounded.__wrapped__ = read  # type: ignore[attr-defined]
    return read_bounded


def for_now(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a reader for the bodies at hand: without checks, if the interpreter makes them itself.

    It must not be kept, since the program may raise the recursion limit later.
    """
    if sys.getrecursionlimit() > MOST_LEVELS:
        return reader
    unchecked: Callable[[Any], Any] = getattr(reader, "__wrapped__", reader)
    return unchecked


def is_deep_json(body: Buffer) -> bool:
    """Report whether lists and objects are nested more than `MOST_LEVELS` deep.

    In a malformed body, only what comes before the first error counts. It takes time in proportion
    to the length of the body; brackets are followed one by one only if there are many.
    """
    body = bytes(body)
    if sum(body.count(opener) for opener in _JSON_OPENERS) <= MOST_LEVELS:
        return False
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_STEPS, _REST_OF_JSON)
    steps = b"".join(marks.split(b'"')[::2])  # brackets outside of strings
    return _climbs(accumulate(memoryview(steps).cast("b")))


def is_deep_msgpack(body: Buffer) -> bool:
    """Report the same of arrays and maps in msgpack."""
    body = bytes(body)
    if len(body) - len(body.translate(None, _MSGPACK_CONTAINERS)) <= MOST_LEVELS:
        return False
    missing: list[int] = []  # for each container around the position: how many of its items are still to come
    at = 0
    while at < len(body) and len(missing) <= MOST_LEVELS:
        at, inside = _next_item(body, at)
        if missing:
            missing[-1] -= 1
        missing.append(inside)
        while missing and not missing[-1]:
            missing.pop()
    return len(missing) > MOST_LEVELS


def _climbs(heights: accumulate[int]) -> bool:
    return any(map(MOST_LEVELS.__lt__, heights))


def _next_item(body: bytes, at: int) -> tuple[int, int]:
    """Return the end of the head of the item at `at`, and how many items follow inside it."""
    kind = body[at]
    at += 1
    if 0x80 <= kind < 0xA0:
        return at, (kind & 0x0F) * (2 if kind < 0x90 else 1)
    if kind in _MSGPACK_COUNTS:
        digits, each = _MSGPACK_COUNTS[kind]
        return at + digits, int.from_bytes(body[at : at + digits], "big") * each
    if kind in _MSGPACK_LENGTHS:
        digits, more = _MSGPACK_LENGTHS[kind]
        return at + digits + more + int.from_bytes(body[at : at + digits], "big"), 0
    return at + _MSGPACK_SCALARS.get(kind, 0), 0
