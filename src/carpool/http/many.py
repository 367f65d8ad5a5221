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
from carpool.http.exchange import Ask, Exchange, Head, HttpResponse
from carpool.http.items import ExchangeItem, ExchangeItems
from carpool.request import Request
from carpool.wire import entries
from carpool.wire.payload import JSON, MSGPACK
from carpool.wire.response import CheckedResponse

_MARKS = b'[]{},"'
_NO_MARKS = bytes(set(range(256)) - set(_MARKS))
_STEPS = bytes.maketrans(b"[{]},", b"\x01\x01\xff\xff\x00")  # +1 and -1, as signed bytes
_COMMAS = bytes.maketrans(b"[{]},", b"\x00\x00\x00\x00\x01")
_ENCODERS: Final[dict[int, Callable[[Any], bytes]]] = {JSON: msgspec.json.encode, MSGPACK: msgspec.msgpack.encode}
_CONTENT_TYPES: Final = {JSON: b"application/json", MSGPACK: b"application/msgpack"}
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
        self.items = [ExchangeItem(self, body, deadline, len(body)) for body in bodies]
        for item in self.items:
            item.format = ask.format
            item.accept = ask.accept
            item.lane = ask.lane
            item.patient = patient

    def _answer(self) -> None:
        if self.refusal is not None:
            self._exchange.respond(self._ask.responder.error(self._exchange.head, self.refusal))
            return
        body = _ENCODERS[self._ask.accept](
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
        return error_entry(ask.responder.error(head, item.error), ask.accept)
    if type(result) is not CheckedResponse:
        return entries.of_result(bytes(result), ask.accept)  # type: ignore[call-overload]
    kind, body = result.content_type, bytes(result.body)
    if not kind or not body:
        return entries.of_result(body or _ENCODERS[ask.accept](None), ask.accept)
    try:
        if kind not in (ask.content_type, _CONTENT_TYPES[ask.accept]):
            raise ValueError(f"of type {kind.decode('latin-1')}")
        return entries.of_body(body, ask.accept)
    except ValueError as error:
        text = f"the answer is {error}, which a list cannot hold: ask for it by itself"
    return error_entry(ask.responder.error(head, ModelError(text, code="bad_result")), ask.accept)


def error_entry(response: HttpResponse, accept: int, **more: object) -> bytes:
    """Return the body of an error response as an entry, with its status.

    Args:
        response: The response.
        accept: The format of the entry, JSON or MSGPACK.
        more: What else is told.
    """
    told = msgspec.json.decode(response.body)["error"]
    return entries.of_error({**told, "status": response.status, **more}, accept)


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
