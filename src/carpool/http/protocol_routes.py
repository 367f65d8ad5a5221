"""Routes requests to protocols: finds their addresses, runs their items, writes their errors.

`App.admit` comes here with addresses that it does not have itself. From here on the request is one
as any other: a page if the protocol answers at once, else an exchange with items.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from carpool.engine.drive.callers import load_result
from carpool.engine.foreign import as_model_error, traceback_of
from carpool.engine.http_response import Response
from carpool.engine.logger import logger
from carpool.engine.observe.log import printable
from carpool.engine.request import DEFAULT_LANE, DONE, Lane, Stream
from carpool.engine.wire.outcome import CheckedResponse
from carpool.engine.wire.payload import CUSTOM, OBJECT, OBJECTS, dump, size_of
from carpool.errors import CarpoolError, InvalidRequest, ModelError
from carpool.http.codec import (
    TYPES_OF_ENTRIES,
    NotReady,
    Refusal,
    allow,
    as_routes_are,
    not_allowed,
    nothing_here,
    too_many_connections,
)
from carpool.http.exchange import JSON_TYPE, Ask, ErrorResponder, Exchange, Head, HttpResponse
from carpool.http.items import ExchangeItem, ExchangeItems, as_entry
from carpool.http.protocols.base import (
    HttpProtocol,
    PartsWriter,
    ProtocolRequest,
    ProtocolRoute,
    ShownError,
    ShownRoute,
    Submission,
    shown_in,
)
from carpool.http.streaming import SSE, Delivery

if TYPE_CHECKING:
    from carpool.http.endpoint import Endpoint

T = TypeVar("T")


class _Found(NamedTuple):
    """The route at a path with a method, and the model that is asked, if the path says it."""

    protocol: HttpProtocol
    route: ProtocolRoute
    model: Endpoint | None


def in_words_of(word: Callable[[HttpResponse], HttpResponse], response: HttpResponse) -> HttpResponse:
    """Return an error response in the words of a protocol, or as it is if that raises."""
    try:
        return word(response)
    except BaseException as error:  # a protocol may be the user's
        logger.error("a protocol could not word an error:\n%s", printable(traceback_of(error)))
        return response


class ProtocolRoutes:
    """The addresses of the protocols of one app.

    Args:
        protocols: In the order in which addresses are given to them.
        problem: Returns why the app could not answer now; None if it could.

    Attributes:
        headers: The names of further headers that the protocols read.
        replaced: The paths that stand in the place of those that every app has.
    """

    def __init__(
        self,
        protocols: Sequence[HttpProtocol],
        endpoints: Sequence[Endpoint],
        responder: ErrorResponder,
        problem: Callable[[], str | None],
        is_patient: bool,
        root_path: str = "",
    ) -> None:
        self._root = as_routes_are(root_path.encode())
        self._endpoints = endpoints
        self._responder = responder
        self._problem = problem
        self._is_patient = is_patient
        self._routes: dict[bytes, dict[bytes, _Found]] = {}
        self._prefixes: list[tuple[bytes, HttpProtocol]] = []
        self.headers: frozenset[bytes] = frozenset()
        self.replaced: set[bytes] = set()
        for protocol in protocols:
            self._add(protocol)
        self._prefixes.sort(key=lambda each: -len(each[0]))

    def _add(self, protocol: HttpProtocol) -> None:
        self.headers |= {name.lower().encode() for name in protocol.headers}
        self._prefixes += [(prefix.encode(), protocol) for prefix in protocol.prefixes]
        for route in protocol.routes(self._endpoints):
            key = as_routes_are(route.path.encode())
            methods = self._routes.setdefault(key, {})
            model = next((each for each in self._endpoints if each is route.model), None)
            found = _Found(protocol, route, model)
            methods.setdefault(route.method.encode(), found)
            if route.method == "GET":
                methods.setdefault(b"HEAD", found)
            if route.replaces:
                self.replaced.add(key)

    def shown(self) -> list[ShownRoute]:
        """Return the addresses that fit the models, in their order, without those that repeat
        others.
        """
        found = [each for methods in self._routes.values() for name, each in methods.items() if name != b"HEAD"]
        return [
            ShownRoute(each.protocol.name, each.route)
            for each in found
            if not each.route.is_alias and _fits(each.route)
        ]

    def admit(self, head: Head) -> bool:
        """Judge a request whose address is not one of the app's own.

        It sets `head.route`, and `head.model` if the address says which one is asked.

        Returns:
            Whether the address is one of a protocol.

        Raises:
            Refusal: There is nothing at an address below those of a protocol, or it does not have
                the method.
        """
        keys = self._readings(as_routes_are(head.path))
        found_at = [self._routes.get(key) or self._routes.get(key.rstrip(b"/") or key) for key in keys]
        methods = next((methods for methods in found_at if methods is not None), None)
        if methods is None:
            below = next((protocol for prefix, protocol in self._prefixes if keys[-1].startswith(prefix)), None)
            if below is None:
                return False
            head.in_own_words = below.in_own_words
            raise self._nothing_below(below)
        head.in_own_words = next(iter(methods.values())).protocol.in_own_words
        if head.method == b"OPTIONS":
            response = HttpResponse(204, b"", headers=allow([*map(bytes.decode, methods), "OPTIONS"]))
            head.route = lambda exchange: exchange.respond(response)
            return True
        if head.method not in methods:
            raise not_allowed([*map(bytes.decode, methods), "OPTIONS"])
        found = methods[head.method]
        head.in_own_words = found.protocol.in_own_words
        head.route = partial(self._answer, found.route)
        if head.method == b"POST":
            head.model = found.model
        return True

    def _readings(self, path: bytes) -> list[bytes]:
        """Return a path as it is, and without the root path if it is below that."""
        below = path.removeprefix(self._root)
        return [path, below] if self._root and below != path and below.startswith(b"/") else [path]

    def _nothing_below(self, protocol: HttpProtocol) -> Refusal:
        of_it = [found for methods in self._routes.values() for found in methods.values() if found.protocol is protocol]
        paths = list(dict.fromkeys(found.route.path for found in of_it if not found.route.is_alias))
        return nothing_here(f"The protocol {protocol.name} has", paths)

    def ask(self, timeout_s: float, lane: Lane) -> Ask:
        """Return what a request to a protocol asks of a model; which one, its body may say."""
        return Ask(
            endpoint=self._endpoints[0],
            responder=self._responder,
            format=OBJECT,
            accept=OBJECT,
            timeout_s=timeout_s,
            lane=lane,
            content_type=JSON_TYPE,
            framing=SSE,
        )

    def _answer(self, route: ProtocolRoute, exchange: Exchange) -> None:
        head = exchange.head
        request = ProtocolRequest(route.path, head.headers, exchange.body, self._problem())

        def go_on(answer: Submission | HttpResponse) -> None:
            if isinstance(answer, Submission):
                self.submit(exchange, answer)
            else:
                exchange.respond(answer)

        self._with(exchange, lambda: self._called(route, request), go_on)

    def _with(
        self,
        exchange: Exchange,
        read: Callable[[], T],
        then: Callable[[T], object],
        refused: Callable[[CarpoolError], object] = lambda error: None,
    ) -> None:
        def refuse(error: CarpoolError) -> HttpResponse:
            refused(error)
            return self._responder.error(exchange.head, error)

        exchange.read_beside(self._responder, exchange.nbytes, read, then, refuse)

    def _called(self, route: ProtocolRoute, request: ProtocolRequest) -> Submission | HttpResponse:
        try:
            return route.answer(request)
        except CarpoolError:
            raise
        except BaseException as error:
            raise as_model_error(error, f"the protocol at {route.path}") from error

    def submit(self, exchange: Exchange, submission: Submission) -> None:
        """Hand the items of a submission to the driver of their model."""
        model = next(each for each in self._endpoints if each is submission.model)
        driver, ask = model.driver, exchange.head.ask
        if ask is None:
            raise InvalidRequest("items are submitted by POST")
        if exchange.head.model is not model:  # the body has said which one is asked; others may have the head, too
            exchange.head = copy.copy(exchange.head)
            exchange.head.model = model
        if driver is None:
            starting = NotReady("starting", {model.name: f"{model.name} is starting"})
            exchange.respond(self._responder.error(exchange.head, starting))
            return
        try:
            if not exchange.has_room_at(model):
                raise too_many_connections()
            submission = _past_no_border(submission, model, exchange.head)
            n, allowance = len(submission.items), model.allowance(exchange.nbytes)
            is_larger = submission.waits and n > allowance.items
            if not is_larger:
                allowance.check_items(n, "this request")
            lane, is_patient = _lane(submission, model, ask, exchange.head.headers), self._is_patient or is_larger
            terms = SubmissionTerms(model, self._responder, driver.clock(), ask.timeout_s, lane, is_patient)
            whole = None if submission.parts is None else SubmittedStreams(exchange, submission, terms)
        except CarpoolError as error:
            driver.refused(error)
            exchange.respond(self._responder.error(exchange.head, error))
            return

        def begin(whole: SubmittedItems) -> None:
            exchange.item = whole
            driver.submit_all(whole.begin())

        if whole is not None:  # it watches the client from the start, which only the loop may
            begin(whole)
        else:
            self._with(exchange, lambda: SubmittedItems(exchange, submission, terms), begin, driver.refused)


def _past_no_border(submission: Submission, model: Endpoint, head: Head) -> Submission:
    """Return a submission whose items and results pass the model's own `decode` and `encode`.

    Raises:
        InvalidRequest: They cannot.
    """
    formats = model.formats
    if not (formats.owns_input or formats.owns_output or formats.wants_heads):
        return submission
    try:
        # `encode` does not write parts
        wanted_as = submission.wanted_as if submission.parts is None or not formats.owns_output else OBJECT
        sent_as, wanted_as = formats.of_made(submission.sent_as, wanted_as)
    except InvalidRequest as error:
        text = f"{error}: ask {model.name} at {model.addresses[0].path}"
        raise InvalidRequest(text, status=error.status, code=error.code) from None
    items, respond = submission.items, submission.respond
    if sent_as == CUSTOM and formats.wants_heads:
        packed = formats.packed(head, TYPES_OF_ENTRIES.get(submission.sent_as))
        items = [[packed, item] for item in items]
    if wanted_as != submission.wanted_as:
        respond = partial(_respond_with_entries, submission)
    return replace(submission, items=items, respond=respond, sent_as=sent_as, wanted_as=wanted_as)


def _respond_with_entries(submission: Submission, results: list[Any]) -> HttpResponse:
    wanted = submission.wanted_as
    return submission.respond([each if isinstance(each, ShownError) else as_entry(each, wanted) for each in results])


def _fits(route: ProtocolRoute) -> bool:
    try:
        model = route.model if route.method == "POST" else None
        holds = model is None or model.formats.holds(route.sent_as, route.wanted_as)
        return holds and (route.fits is None or bool(route.fits()))
    except BaseException as error:  # a protocol may be the user's
        logger.error("the protocol at %s could not say what fits it:\n%s", route.path, printable(traceback_of(error)))
        return False


def _lane(submission: Submission, model: Endpoint, ask: Ask, headers: Mapping[bytes, bytes]) -> Lane:
    """Return the lane of a submission's items: its priority, and its key if that is a header."""
    lane, key = ask.lane, model.key_header
    if submission.priority is not None:
        lane = Lane(submission.priority, None, 0) if submission.priority else DEFAULT_LANE
    if key is not None and key in headers:
        lane = lane._replace(key=headers[key].decode("latin-1"))
    return lane


_HALF_A_CHARACTER: Final = "half of a character, a lone surrogate, which no UTF-8 can hold"


@dataclass(frozen=True, slots=True)
class SubmissionTerms:
    """On which terms the items of a submission are run.

    Attributes:
        limit_s: The time that the client gives its request.
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
        assert submission.parts is not None, "a submission without a writer is not sent in parts"
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
            self._exchange.end_parts(close)

    def _write(self, data: bytes) -> None:
        if data:
            self._delivery.has_begun = True
            self._exchange.write_part(data)

    def _fail(self, error: Exception) -> None:
        self._has_ended = True
        exchange, responder = self._exchange, self._terms.responder
        if self._delivery.has_begun:
            shown = shown_in(responder.plain_error(exchange.head, error))
            exchange.end_parts(self._writer.error(shown))
        else:
            exchange.respond(responder.error(exchange.head, error))
        driver = self._terms.model.driver
        for item in self.submitted:
            if driver is not None and item.state != DONE:
                driver.cancel(item)

    def _answer(self) -> None:
        self._respond(lambda: self._submission.respond([]))


def _failure_of(error: BaseException, what: str) -> CarpoolError:
    """Return as what a request fails of which the answer could not be written.

    Args:
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
