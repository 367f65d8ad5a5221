"""A list of items as one HTTP request: each has a place of its own in the queue, and a result or an
error of its own in the answer, which is a list in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from carpool.engine.allowance import Allowance
from carpool.engine.hints import nesting, schema
from carpool.engine.request import Request
from carpool.engine.wire.outcome import CheckedResponse
from carpool.engine.wire.payload import CUSTOM, JSON, MSGPACK
from carpool.errors import CarpoolError, ModelError
from carpool.http import entries
from carpool.http.codec import TYPES_OF_ENTRIES, format_of_entries
from carpool.http.exchange import Ask, Exchange, Head, HttpResponse, error_entry
from carpool.http.items import ExchangeItem, ExchangeItems, as_entry

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
        exchange, ask, items = self._exchange, self._ask, self.items
        if self.refusal is not None:
            exchange.respond(ask.responder.error(exchange.head, self.refusal))
            return
        exchange.respond_with(ask.responder, self.answer_bytes, lambda: _listed(items, ask, exchange.head), "a list")


def _listed(items: Sequence[Request], ask: Ask, head: Head) -> HttpResponse:
    """Return the response that lists what has become of items."""
    written = [entry_of(item, ask, head) for item in items]
    return HttpResponse(200, entries.listed(written, _format_of_answer(ask)), ask.content_type)


def entry_of(item: Request, ask: Ask, head: Head) -> bytes:
    """Return an item's result, or an object with its error, as it is written among others.

    Args:
        item: Is done.
        ask: What was asked of which model.
        head: Of the request.
    """
    result, format = item.result, _format_of_answer(ask)
    if item.error is not None:
        return error_entry(ask.responder.error(head, item.error), format)
    if type(result) is not CheckedResponse and ask.accept < CUSTOM:
        return entries.of_result(bytes(result), format)  # type: ignore[call-overload]
    try:
        body = _body_of(result, ask, format) if type(result) is CheckedResponse else bytes(result)  # type: ignore[call-overload]
        return entries.of_result(as_entry(body, format), format)
    except ModelError as error:
        return error_entry(ask.responder.error(head, error), format)


def _body_of(response: CheckedResponse, ask: Ask, format: int) -> bytes:
    """Return the body of a model's own response. Raises `ModelError` if a list cannot hold it."""
    body, kind = bytes(response.body), response.content_type
    if body and kind and kind not in (ask.content_type, TYPES_OF_ENTRIES[format]):
        text = f"the answer is of type {kind.decode('latin-1')}, which a list cannot hold: ask for it by itself"
        raise ModelError(text, code="bad_result")
    return body or _ENCODERS[format](None)


def _format_of_answer(ask: Ask) -> int:
    """Return in what the list of the answers is written: JSON or MSGPACK."""
    return ask.accept if ask.accept < CUSTOM else format_of_entries(ask.content_type)


def split(body: bytes | bytearray, format: int, allowance: Allowance) -> list[bytes]:
    """Return the items of a list, each as it was written.

    Args:
        body: The list.
        format: JSON or MSGPACK.
        allowance: Says how many items it may have.

    Raises:
        InvalidRequest: The body is malformed (400), or the list is too long (413).
        ValidationError: It is no list.
    """
    if format == MSGPACK:
        allowance.check_msgpack_list(body)
    else:
        allowance.check_json_list(body)
    try:
        return [bytes(item) for item in _READERS[format](body)]
    except BaseException as error:
        ours = schema.as_our_error(error, "msgpack" if format == MSGPACK else "JSON", list[Any], body)
        if not isinstance(ours, CarpoolError):
            raise
        raise ours from None
