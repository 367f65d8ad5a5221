"""The items of one exchange that brings several: each is a request of its own, and one answer is
written once all of them are done.

`ItemList` has the items of a list. Its answer is a list in the same order, of results and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from carpool.engine.allowance import Allowance
from carpool.engine.hints import nesting, schema
from carpool.engine.request import Request
from carpool.engine.wire.outcome import CheckedResponse
from carpool.engine.wire.payload import CUSTOM, JSON, MSGPACK, size_of
from carpool.errors import CarpoolError, ModelError
from carpool.http import entries
from carpool.http.codec import TYPES_OF_ENTRIES, format_of_entries
from carpool.http.exchange import Ask, Exchange, Head, HttpResponse, error_entry

if TYPE_CHECKING:
    from carpool.http.exchange import ServedModel


class ExchangeItem(Request):
    """One item of an exchange that brings several.

    Attributes:
        index: Its position among them, where their answers come in parts; else not set.
    """

    __slots__ = ("index", "whole")

    index: int

    def __init__(self, whole: ExchangeItems, item: object, deadline: float, nbytes: int) -> None:
        super().__init__(item, deadline, None, nbytes)
        self.whole = whole

    @property
    def companions(self) -> Sequence[Request]:
        """All items of the exchange that were submitted."""
        return self.whole.submitted

    def tell(self) -> None:
        self.whole.item_ended(self)

    def tell_part(self, part: object) -> None:
        self.whole.take_part(self, part)


class ExchangeItems:
    """The items of one exchange.

    Attributes:
        submitted: Those that are not known to be unfit; they are admitted together or not at all.
    """

    def __init__(self, exchange: Exchange, model: ServedModel) -> None:
        self.model = model
        self.items: list[ExchangeItem] = []
        self.submitted: list[Request] = []
        self._exchange = exchange
        self._missing = 0

    def begin(self) -> Sequence[Request]:
        """Return the items that are to be submitted; where there is none, answer at once."""
        self.submitted = [item for item in self.items if item.error is None]
        self._missing = len(self.submitted)
        if not self._missing:
            self._answer_and_let_go()
        return self.submitted

    def item_ended(self, item: ExchangeItem) -> None:
        """Answer the exchange if this was the last answer that was missing."""
        self._missing -= 1
        if not self._missing:
            self._answer_and_let_go()

    def take_part(self, item: ExchangeItem, part: object) -> None:
        """Take a part of an item's answer, where parts are delivered as they come."""
        raise NotImplementedError

    def _answer_and_let_go(self) -> None:
        """Answer the exchange, and refer to it and to the items no more.

        They refer to this object, too: without this, bodies and answers of megabytes would be
        there until the interpreter looks for cycles, and their memory could not be used again.
        """
        self._answer()
        self.items, self.submitted = [], []
        del self._exchange

    @property
    def refusal(self) -> Exception | None:
        """Why none of the submitted items was admitted; None if they were, or if there is none."""
        is_refused = self.submitted and not any(item.id for item in self.submitted)
        return self.submitted[0].error if is_refused else None

    @property
    def answer_bytes(self) -> int:
        """How many bytes the results hold, as far as they are bytes."""
        return sum([_nbytes(item.result) for item in self.items if item.error is None])

    def cancel(self) -> None:
        if self.model.driver is not None:
            for request in self.submitted:
                self.model.driver.cancel(request)

    def pause(self, is_paused: bool) -> None:
        if self.model.driver is not None:
            for request in self.submitted:
                if request.stream is not None:
                    self.model.driver.pause(request, is_paused)

    def _answer(self) -> None:
        raise NotImplementedError


def _nbytes(result: Any) -> int:
    return size_of(result.body if type(result) is CheckedResponse else result)


def as_entry(body: bytes, format: int) -> bytes:
    """Return an answer that a model has written itself as it stands among others, on one line.

    Raises:
        ModelError: It is not one value in this format, so that it would be taken for several.
    """
    try:
        return entries.value_in(body, format)
    except Exception as error:  # the bytes are the model's, and may be anything
        raise ModelError(f"the model wrote an answer that is {error}", code="bad_result") from None


_ENCODERS: Final[dict[int, Callable[[Any], bytes]]] = {JSON: msgspec.json.encode, MSGPACK: msgspec.msgpack.encode}
_READERS: Final = {
    JSON: nesting.bounded(msgspec.json.Decoder(list[msgspec.Raw]).decode, nesting.is_deep_json),
    MSGPACK: nesting.bounded(msgspec.msgpack.Decoder(list[msgspec.Raw]).decode, nesting.is_deep_msgpack),
}


class ItemList(ExchangeItems):
    """The items of a list.

    Args:
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
    written = [entry_of(item, ask, head) for item in items]
    return HttpResponse(200, entries.listed(written, _format_of_answer(ask)), ask.content_type)


def entry_of(item: Request, ask: Ask, head: Head) -> bytes:
    """Return an item's result, or an object with its error, as it is written among others."""
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
    return ask.accept if ask.accept < CUSTOM else format_of_entries(ask.content_type)


def split(body: bytes | bytearray, format: int, allowance: Allowance) -> list[bytes]:
    """Return the items of a list, each as it was written.

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
