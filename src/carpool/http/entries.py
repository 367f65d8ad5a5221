"""What stands for an item where answers stand side by side: in a list, in lines of bulk, in a file
that `carpool score` writes.

There an object whose only key is `error` is an error, and no result is one: a result that is such
an object is written as `{"result": {"error": …}}`, and so is one that looks like that already.
Servers, clients and `carpool score` share these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from carpool.engine.fast_paths import fast_path
from carpool.engine.wire.payload import JSON, MSGPACK

_ERROR: Final = "error"
_RESULT: Final = "result"
_SIGNS: Final = {JSON: (b'{"error":', b'{"result":{'), MSGPACK: (b"\x81\xa5error", b"\x81\xa6result\x81")}
"""How results begin that may be taken for errors, errors, and results in wrappers."""

_WRAPPED: Final = {JSON: b'{"result":%b}', MSGPACK: b"\x81\xa6result%b"}
_members_in: Final = {
    JSON: msgspec.json.Decoder(dict[str, msgspec.Raw]).decode,
    MSGPACK: msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode,
}
_encode: Final[dict[int, Callable[[Any], bytes]]] = {
    JSON: msgspec.json.Encoder().encode,
    MSGPACK: msgspec.msgpack.Encoder().encode,
}


def of_result(result: bytes, format: int = JSON) -> bytes:
    """Return a result as it is written among others.

    Args:
        result: As msgspec writes it.
    """
    return _WRAPPED[format] % result if _is_mistakable(result, format) else result


def of_results(results: Sequence[bytes]) -> bytes:
    """Return results in JSON as lines."""
    lines = b"\n".join([*results, b""])
    return lines if are_plain(lines) else b"\n".join([*map(of_result, results), b""])


@fast_path("plain_lines", declined=False)
def are_plain(lines: bytes) -> bool:
    """Report whether no line is an error, or a result that must be wrapped; True is certain.

    Fast path of `of_result`: the same lines, see tests/http/test_entries.py.
    """
    return not any(lines.partition(sign)[1] for sign in _SIGNS[JSON])  # the fastest way to ask


def listed(entries: Sequence[bytes], format: int) -> bytes:
    """Return a list of entries, which are joined as other threads may run meanwhile."""
    if format == MSGPACK:
        of_nones = _encode[MSGPACK]([None] * len(entries))
        return b"".join([of_nones[: len(of_nones) - len(entries)], *entries])
    return b"".join([b"[", b",".join(entries), b"]"])


def value_in(body: bytes, format: int) -> bytes:
    """Return a result that the model itself has written, in any layout, as one value on one line.

    Raises:
        ValueError: It is not one value in this format, so that it would be taken for several.
    """
    try:
        if format == MSGPACK:
            return _encode[MSGPACK](msgspec.msgpack.decode(body))
        if b"\\u" in body:  # a key may be spelled in several ways
            return _encode[JSON](msgspec.json.decode(body))
        body.decode()
        return msgspec.json.format(body, indent=-1)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not one value of {'msgpack' if format == MSGPACK else 'JSON'}: {error}") from None


def of_error(error: Mapping[str, Any], format: int = JSON) -> bytes:
    """Return an error as it is written among results."""
    return _encode[format]({_ERROR: error})


def is_error(entry: bytes) -> bool:
    """Report whether an entry in JSON is an error; one that cannot be read is none."""
    try:
        return entry.startswith(_SIGNS[JSON][0]) and len(_members_in[JSON](entry)) == 1
    except msgspec.MsgspecError:
        return False


def result_in(entry: bytes) -> bytes:
    """Return the result in an entry in JSON that is no error."""
    if entry.startswith(_SIGNS[JSON][1]) and _is_mistakable(entry, JSON):
        return bytes(_members_in[JSON](entry)[_RESULT])
    return entry


def _is_mistakable(entry: bytes, format: int) -> bool:
    """Report whether an entry is an error, or such an object in one or more wrappers."""
    while entry.startswith(_SIGNS[format]):
        members = _members_in[format](entry)
        if len(members) != 1:
            return False
        if _ERROR in members:
            return True
        entry = bytes(members[_RESULT])
    return False
