"""How deep an item from outside may be nested, where the interpreter would not say.

Reading JSON or msgpack takes a piece of the C stack per level. As long as the recursion limit is the usual one, the
interpreter itself refuses what is nested too deep. A program that has raised the limit has told it not to, and then two
megabytes of `[` end the process. So bodies are looked over first wherever the limit has been raised, and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final

MOST_LEVELS: Final = 1000
"""As deep as the interpreter goes by itself."""

Buffer = bytes | bytearray | memoryview

_JSON_OPENERS = b"[{"
_REST_OF_JSON = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # up and down, as signed bytes

_MSGPACK_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_MSGPACK_SCALARS: Final = {  # how many bytes follow the first one
    **{kind: kind - 0xA0 for kind in range(0xA0, 0xC0)},
    **dict(zip(range(0xCA, 0xD9), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17), strict=True)),
}
_MSGPACK_LENGTHS: Final = {  # how many bytes tell the length, and how many follow besides
    **dict(zip(range(0xC4, 0xCA), ((1, 0), (2, 0), (4, 0), (1, 1), (2, 1), (4, 1)), strict=True)),
    **dict(zip(range(0xD9, 0xDC), ((1, 0), (2, 0), (4, 0)), strict=True)),
}
_MSGPACK_COUNTS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # likewise, and items per count


def bounded(read: Callable[[Any], Any], is_deep: Callable[[Buffer], bool]) -> Callable[[Any], Any]:
    """`read`, but a body for which `is_deep` is true raises RecursionError, whatever the recursion limit is."""

    def read_bounded(body: Buffer) -> Any:
        if len(body) > MOST_LEVELS and sys.getrecursionlimit() > MOST_LEVELS and is_deep(body):
            raise RecursionError(f"more than {MOST_LEVELS} levels")
        return read(body)

    read_bounded.__wrapped__ = read  # type: ignore[attr-defined]
    return read_bounded


def for_now(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same reader for a few bodies at once, without a look at each where the interpreter looks by itself."""
    if sys.getrecursionlimit() > MOST_LEVELS:
        return reader
    plain: Callable[[Any], Any] = getattr(reader, "__wrapped__", reader)
    return plain


def is_deep_json(body: Buffer) -> bool:
    """Whether lists and objects lie more than `MOST_LEVELS` deep in each other, before the first error if there is one.

    Takes time in proportion to the body; brackets are counted one by one only where there are many.
    """
    body = bytes(body)
    if sum(body.count(opener) for opener in _JSON_OPENERS) <= MOST_LEVELS:
        return False
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_STEPS, _REST_OF_JSON)
    steps = b"".join(marks.split(b'"')[::2])  # outside of the strings
    return _climbs(accumulate(memoryview(steps).cast("b")))


def is_deep_msgpack(body: Buffer) -> bool:
    """Whether arrays and maps lie more than `MOST_LEVELS` deep in each other, before the first error if there is one.

    Takes time in proportion to the body; items are looked at one by one only where many could be containers.
    """
    body = bytes(body)
    if len(body) - len(body.translate(None, _MSGPACK_CONTAINERS)) <= MOST_LEVELS:
        return False
    missing: list[int] = []  # items of the containers around the present place
    at = 0
    while at < len(body) and len(missing) <= MOST_LEVELS:
        at, inside = _item(body, at)
        if missing:
            missing[-1] -= 1
        missing.append(inside)
        while missing and not missing[-1]:
            missing.pop()
    return len(missing) > MOST_LEVELS


def _climbs(heights: accumulate[int]) -> bool:
    return any(map(MOST_LEVELS.__lt__, heights))


def _item(body: bytes, at: int) -> tuple[int, int]:
    """Where the next item begins behind the one at `at`, and how many items lie in that one."""
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
