"""A list of items as one HTTP request: each has a place of its own in the queue, and a result or an
error of its own in the answer, which is a list in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, compress, islice
from typing import Any, Final

import msgspec

from carpool.errors import CarpoolError, InvalidRequest, ModelError
from carpool.hints import nesting, schema
from carpool.http.codec import TYPES_OF_ENTRIES, format_of_entries
from carpool.http.exchange import Ask, Exchange, Head, HttpResponse
from carpool.http.items import ExchangeItem, ExchangeItems, as_entry
from carpool.request import Request
from carpool.wire.payload import CUSTOM, JSON, MSGPACK
from carpool.wire.response import CheckedResponse

_MARKS = b'[]{},"'
_NO_MARKS = bytes(set(range(256)) - set(_MARKS))
_STEPS = bytes.maketrans(b"[{]},", b"\x01\x01\xff\xff\x00")  # +1 and -1, as signed bytes
_COMMAS = bytes.maketrans(b"[{]},", b"\x00\x00\x00\x00\x01")
_ENCODERS: Final[dict[int, Callable[[Any], bytes]]] = {JSON: msgspec.json.encode, MSGPACK: msgspec.msgpack.encode}
_READERS: Final = {
    JSON: nesting.bounded(msgspec.json.Decoder(list[msgspec.Raw]).decode, nesting.is_deep_json),
    MSGPACK: nesting.bounded(msgspec.msgpack.Decoder(list[msgspec.Raw]).decode, nesting.is_deep_msgpack),
}


class ItemList(ExchangeItems):
    """The items of a list.

    Args:
        exchange: Is answered once all items are.
        ask: What is asked of which model.
        bodies: Of the items.
        deadline: Of all of them.
        patient: Whether they wait while the queue is full.
    """

    def __init__(self, exchange: Exchange, ask: Ask, bodies: Sequence[bytes], deadline: float, patient: bool) -> None:
        super().__init__(exchange, ask.endpoint)
        self._ask = ask
        packed = ask.packed
        self.items = [
            ExchangeItem(self, [packed, body] if packed else body, deadline, len(packed) + len(body)) for body in bodies
        ]
        for item in self.items:
            item.format = ask.format
            item.accept = ask.accept
            item.lane = ask.lane
            item.patient = patient

    def _answer(self) -> None:
        if self.refusal is not None:
            self._exchange.respond(self._ask.responder.error(self._exchange.head, self.refusal))
            return
        body = _ENCODERS[_format_of_answer(self._ask)](
            [msgspec.Raw(entry_of(item, self._ask, self._exchange.head)) for item in self.items]
        )
        self._exchange.respond(HttpResponse(200, body, self._ask.content_type))


def entry_of(item: Request, ask: Ask, head: Head) -> bytes:
    """Return an item's result, or an object with its error, as it is written among others.

    Args:
        item: Is done.
        ask: What was asked of which model.
        head: Of the request.
    """
    result = item.result
    if item.error is not None:
        return _error_entry(item.error, ask, head)
    format = _format_of_answer(ask)
    if type(result) is not CheckedResponse:
        body: bytes = bytes(result)  # type: ignore[call-overload]
        if ask.accept < CUSTOM:
            return body
    elif result.content_type and result.content_type not in (ask.content_type, TYPES_OF_ENTRIES[format]):
        kind = result.content_type.decode("latin-1")
        text = f"the answer is of type {kind}, which a list cannot hold: ask for it by itself"
        return _error_entry(ModelError(text, code="bad_result"), ask, head)
    else:
        body = bytes(result.body) or _ENCODERS[format](None)
    try:
        return as_entry(body, format)
    except ModelError as error:
        return _error_entry(error, ask, head)


def _format_of_answer(ask: Ask) -> int:
    """Return in what the list of the answers is written: JSON or MSGPACK."""
    return ask.accept if ask.accept < CUSTOM else format_of_entries(ask.content_type)


def _error_entry(error: Exception, ask: Ask, head: Head) -> bytes:
    """Return the body that an error has in an answer of its own, with its status added."""
    response = ask.responder.error(head, error)
    entry = msgspec.json.decode(response.body)
    entry["error"]["status"] = response.status
    return _ENCODERS[_format_of_answer(ask)](entry)


def split(body: bytes | bytearray, format: int, most: float) -> list[bytes]:
    """Return the items of a list, each as it was written.

    Args:
        body: The list.
        format: JSON or MSGPACK.
        most: How many items it may have.

    Raises:
        InvalidRequest: The body is malformed (400), or the list is too long (413).
        ValidationError: It is no list.
    """
    count_past = _msgpack_is_longer if format == MSGPACK else _json_is_longer
    if count_past(body, most):
        text = f"the list has more than {most:.0f} items, which is all that the queue holds: send several lists"
        raise InvalidRequest(text, status=413, code="too_large")
    try:
        return [bytes(item) for item in _READERS[format](body)]
    except BaseException as error:
        ours = schema.as_our_error(error, "msgpack" if format == MSGPACK else "JSON", list[Any], body)
        if not isinstance(ours, CarpoolError):
            raise
        raise ours from None


def _json_is_longer(body: bytes | bytearray, most: float) -> bool:
    """Report whether a list has more items, which is not to be found out by making an object of
    each. It takes linear time.
    """
    if body.count(b",") < most:
        return False
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    marks = b"".join(marks.split(b'"')[::2])  # those outside of strings
    levels = compress(accumulate(memoryview(marks.translate(_STEPS)).cast("b")), marks.translate(_COMMAS))
    commas = filter((1).__eq__, levels)  # between the items of the list
    return next(islice(commas, int(most) - 1, None), None) is not None


def _msgpack_is_longer(body: bytes | bytearray, most: float) -> bool:
    """Report the same by the number of items with which a list begins."""
    kind = body[:1]
    digits = {b"\xdc": 2, b"\xdd": 4}.get(bytes(kind), 0)
    return int.from_bytes(body[1 : 1 + digits], "big") > most
