"""The items that a protocol has submitted: gathered into one response, or sent in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from carpool.engine.drive.callers import load_result
from carpool.engine.foreign import as_model_error
from carpool.engine.http_response import Response
from carpool.engine.request import DONE, Lane, Stream
from carpool.engine.wire.outcome import CheckedResponse
from carpool.engine.wire.payload import OBJECT, OBJECTS, dump, size_of
from carpool.errors import CarpoolError, ModelError
from carpool.http.codec import TYPES_OF_ENTRIES
from carpool.http.exchange import ErrorResponder, Exchange, Head, HttpResponse
from carpool.http.items import ExchangeItem, ExchangeItems, as_entry
from carpool.http.protocols.base import PartsWriter, Submission, shown_in
from carpool.http.streaming import Delivery

if TYPE_CHECKING:
    from carpool.http.endpoint import Endpoint

_HALF_A_CHARACTER: Final = "half of a character, a lone surrogate, which no UTF-8 can hold"


@dataclass(frozen=True, slots=True)
class SubmissionTerms:
    """On which terms the items of a submission are run.

    Attributes:
        model: Gets the items.
        responder: Puts errors into HTTP.
        now: The time.
        limit_s: The time that the client gives its request.
        lane: Of the items.
        patient: Whether they wait while the queue is full.
    """

    model: Endpoint
    responder: ErrorResponder
    now: float
    limit_s: float
    lane: Lane
    patient: bool


class SubmittedItems(ExchangeItems):
    """The items of a submission, whose results make one response.

    Args:
        exchange: Gets the response.
        submission: What the protocol has submitted.
        terms: On which its items are run.

    Raises:
        CarpoolError: An item cannot be sent or weighed.
    """

    def __init__(self, exchange: Exchange, submission: Submission, terms: SubmissionTerms) -> None:
        super().__init__(exchange, terms.model)
        self._submission = submission
        self._terms = terms
        limit_s = min(terms.model.service.timeout_s, submission.timeout_s, terms.limit_s)
        self.items = [self._new_item(value, terms.now + limit_s) for value in submission.items]

    def _new_item(self, value: Any, deadline: float) -> ExchangeItem:
        """Make a request of an item. Raises `CarpoolError`."""
        format, weigher = self._submission.sent_as, self._terms.model.weigher
        if format == OBJECT:
            try:
                value = dump(value)
            except BaseException as error:
                raise as_model_error(error, "an item that is pickled") from error
        item = ExchangeItem(self, value, deadline, size_of(value))
        item.format = format
        item.accept = self._submission.wanted_as
        item.lane = self._terms.lane
        item.patient = self._terms.patient
        if weigher is not None:
            weigher.weigh_encoded(item, value, format)
        return item

    def _answer(self) -> None:
        exchange, items, is_partial = self._exchange, self.items, self._submission.is_partial and self.refusal is None
        self._respond(lambda: self._responded([self._result_of(item, is_partial, exchange.head) for item in items]))

    def _respond(self, make: Callable[[], HttpResponse]) -> None:
        what = "a protocol that makes an answer of results"
        self._exchange.respond_with(self._terms.responder, self.answer_bytes, make, what)

    def _responded(self, results: list[Any]) -> HttpResponse:
        """Return what the protocol makes of the results. Raises `CarpoolError`."""
        try:
            return self._submission.respond(results)
        except BaseException as error:  # a protocol may be the user's
            raise _failure_of(error, "a protocol that makes an answer of results") from error

    def _result_of(self, item: ExchangeItem, is_partial: bool, head: Head) -> Any:
        """Return an item's result, or the text of its error for clients.

        Raises:
            CarpoolError: The item has failed, and that fails the whole.
        """
        try:
            if item.error is not None:
                raise item.error
            return result_as(item.accept, item.result)
        except CarpoolError as error:
            if not is_partial:
                raise
            return shown_in(self._terms.responder.plain_error(head, error))


class SubmittedStreams(SubmittedItems):
    """The items of a submission whose answers are sent in parts, as they come."""

    def __init__(self, exchange: Exchange, submission: Submission, terms: SubmissionTerms) -> None:
        super().__init__(exchange, submission, terms)
        assert submission.parts is not None, "a submission without a writer is not told in parts"
        self._writer: PartsWriter = submission.parts
        self._has_ended = False
        self._ended: set[int] = set()  # the positions of items whose answers have ended
        now, until = terms.now, terms.now + min(submission.timeout_s, terms.limit_s)
        exchange.fix_id(terms.responder.request_ids)
        exchange.delivery = self._delivery = Delivery(now)
        for index, item in enumerate(self.items):
            item.index = index
            if terms.model.gives.in_parts:
                item.stream = Stream(until=until)
                item.deadline = item.due = now + terms.model.service.timeout_s
        exchange.watch_silence()

    def take_part(self, item: ExchangeItem, part: object) -> None:
        """Write a part of an item's answer; if no further one is needed, none is made."""
        if self._has_ended or item.index in self._ended:
            return
        try:
            data = self._writer.part(item.index, result_as(item.accept, part))
        except BaseException as error:  # a protocol may be the user's
            self._fail(_failure_of(error, "a protocol that writes a part"))
            return
        self._write(data)
        if item.state != DONE and self._writer.is_over(item.index):
            self._end(item)
            self.model.driver.suffice(item)  # type: ignore[union-attr] # it runs, as a part has come

    def item_ended(self, item: ExchangeItem) -> None:
        """Take the end of an item's answer; of a model that returns whole answers, all of it."""
        if item.error is not None and not self._has_ended:
            self._fail(item.error)
        elif item.stream is None:
            self.take_part(item, item.result)
        self._end(item)

    def _end(self, item: ExchangeItem) -> None:
        """Write the end of an item's answer, and of all if it is the last one."""
        if self._has_ended or item.index in self._ended:
            return
        self._ended.add(item.index)
        try:
            end = self._writer.end(item.index)
            close = self._writer.close() if len(self._ended) == len(self.items) else None
        except BaseException as error:  # a protocol, or what counts for it, may be the user's
            self._fail(_failure_of(error, "a protocol that writes the end of an answer"))
            return
        self._write(end)
        if close is not None:
            self._has_ended = self._delivery.has_begun = True
            self._exchange.end_parts(close, is_whole=True)

    def _write(self, data: bytes) -> None:
        if data:
            self._delivery.has_begun = True
            self._exchange.write_part(data)

    def _fail(self, error: Exception) -> None:
        """End the answer with an error, by its status if nothing has been written."""
        self._has_ended = True
        exchange, responder = self._exchange, self._terms.responder
        if self._delivery.has_begun:
            shown = shown_in(responder.plain_error(exchange.head, error))
            exchange.end_parts(self._writer.error(shown), is_whole=True)
        else:
            exchange.respond(responder.error(exchange.head, error))
        driver = self._terms.model.driver
        for item in self.submitted:
            if driver is not None and item.state != DONE:
                driver.cancel(item)

    def _answer(self) -> None:
        """Answer a submission without items."""
        self._respond(lambda: self._submission.respond([]))


def _failure_of(error: BaseException, what: str) -> CarpoolError:
    """Return as what a request fails of which the answer could not be written.

    Args:
        error: What was raised.
        what: The code that raised it, as the subject of a sentence.
    """
    if isinstance(error, CarpoolError):
        return error
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        return ModelError(f"the model returned a text with {_HALF_A_CHARACTER}", code="bad_result")
    return as_model_error(error, what)


def result_as(format: int, result: Any) -> Any:
    """Return a result in the form in which a protocol wants it.

    Raises:
        ModelError: The model has answered with something else.
    """
    if type(result) is CheckedResponse:
        if result.content_type and result.content_type != b"application/json":
            kind = result.content_type.decode("latin-1")
            raise ModelError(f"the answer is of type {kind}, which this protocol cannot hold", code="bad_result")
        body = bytes(result.body) or b"null"
        return as_entry(body, format) if format in TYPES_OF_ENTRIES else body
    if format not in OBJECTS:
        return bytes(result)
    value = load_result(result)
    return value.value if type(value) is Response else value
