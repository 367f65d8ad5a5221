"""One HTTP request and the answer that it is owed: the noun that the app and both its fronts share.

`RequestIds` are for requests whose clients have given them none, and `Notes` record one request
while it is inside, for the log and for traces.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec

from carpool.engine.core.running_set import stream_of
from carpool.engine.foreign import as_model_error
from carpool.engine.http_request import Field
from carpool.engine.request import DONE, NEW, Lane, Request
from carpool.engine.wire.outcome import CheckedResponse
from carpool.engine.wire.payload import JSON
from carpool.errors import CarpoolError, ModelError
from carpool.http import entries
from carpool.http.streaming import Delivery, Framing, framed

if TYPE_CHECKING:
    from carpool.engine.allowance import Allowance
    from carpool.engine.drive.aio import Driver
    from carpool.engine.observe.picture import Branch
    from carpool.service.declaration import Declaration
    from carpool.service.handle import AsyncHandle
    from carpool.service.weigh import Weigher

T = TypeVar("T")

JSON_TYPE = b"application/json"
REQUEST_ID = b"x-request-id"
LARGE = 2**18
"""Bytes of a body or of results from which on a thread reads it or makes an answer: this takes some
milliseconds, and the way there and back 0.1 ms."""
_FIT_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
_STATUSES_WITHOUT_BODY = frozenset({204, 304})

WANTED_HEADERS = frozenset(
    {
        b"accept",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"host",
        REQUEST_ID,
        b"x-request-priority",
        b"x-request-timeout-ms",
    }
)
"""The headers that the app looks at, besides its `key_headers`; others are passed on only if it
`wants_heads`."""


class HttpResponse(NamedTuple):
    """An answer to an HTTP request, whichever front it leaves by."""

    status: int
    body: bytes | bytearray | memoryview
    content_type: bytes = JSON_TYPE
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def describes_its_body(self) -> bool:
        """Whether it has headers about its body, as most statuses allow (RFC 9110, 8.6)."""
        return self.status not in _STATUSES_WITHOUT_BODY


class ErrorResponder(Protocol):
    """Puts the outcome of a request into HTTP, as the app does."""

    request_ids: RequestIds

    def error(self, head: Head | None, error: Exception) -> HttpResponse:
        """Return the response to a request that ended with `error`."""

    def plain_error(self, head: Head | None, error: Exception) -> HttpResponse:
        """Return the response to a request that ended with `error`, never in a protocol's words."""

    @property
    def compresses(self) -> bool:
        """Whether answers may be compressed."""

    def compressed(self, head: Head, response: HttpResponse) -> HttpResponse:
        """Return an answer in a coding that its client accepts, or as it is."""

    def route_raised(self, exchange: Exchange, error: BaseException) -> None:
        """Answer 500 because a route raised, whatever it raised; no other request is affected."""


class ServedModel(Protocol):
    """A model as the app serves it.

    Attributes:
        weigher: Weighs the items; None if each counts for one.
    """

    name: str
    driver: Driver | None
    handle: AsyncHandle | None
    weigher: Weigher | None

    @property
    def service(self) -> Declaration:
        """The declaration of the service."""

    def allowance(self, nbytes: int) -> Allowance:
        """Return the limits of the objects that a body of so many bytes may become."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The wish of a request for a model, as `App.admit` reads it off its head.

    Attributes:
        format: How the body is to be decoded (see `wire/payload.py`).
        packed: The whole head, for a model whose `decode` asks for it; empty otherwise.
        framing: How the answer is written in parts; None if the client takes the whole answer.
        stream_s: The most seconds that an answer in parts may take, as the client says.
        is_bulk: Whether the body is lines with an item each, which are taken as they come.
    """

    endpoint: ServedModel
    responder: ErrorResponder
    format: int
    accept: int
    timeout_s: float
    lane: Lane
    content_type: bytes
    packed: bytes = b""
    framing: Framing | None = None
    stream_s: float = inf
    is_bulk: bool = False


class Head:
    """A request's head, as it was received, and as the app reads it.

    Equal heads mean the same, so a front may keep them and use them for several requests.

    Attributes:
        headers: By name in lower case; only those in `WANTED_HEADERS` and what the front needs.
        query: The part of the address behind the `?`; kept only by an app that `wants_heads`.
        fields: All headers; kept only by an app that `wants_heads`.
        ask: The wish of the request, and the model that is asked; set by `App.admit`, None for the
            app's own pages.
        model: The model that is asked; None for pages, and where the body will say it.
        extra: Headers that each answer to it has; set by `App.admit`.
        in_own_words: Words error responses, at an address of a protocol; None elsewhere.
    """

    __slots__ = (
        "ask",
        "caller",
        "extra",
        "fields",
        "headers",
        "in_own_words",
        "method",
        "model",
        "path",
        "query",
        "route",
    )

    def __init__(
        self,
        method: bytes,
        path: bytes,
        headers: Mapping[bytes, bytes],
        query: bytes = b"",
        fields: Sequence[Field] = (),
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.query = query
        self.fields = fields
        self.route: Callable[[Exchange], None] = _not_admitted
        self.ask: Ask | None = None
        self.model: ServedModel | None = None
        self.caller = ""
        self.extra: tuple[tuple[bytes, bytes], ...] = ()
        self.in_own_words: Callable[[HttpResponse], HttpResponse] | None = None

    @property
    def request_id(self) -> bytes:
        """The id that the client has given its request; empty if there is none that is fit."""
        given = self.headers.get(REQUEST_ID, b"")
        return given if _FIT_ID.fullmatch(given) else b""

    def echoed(
        self, headers: tuple[tuple[bytes, bytes], ...], ids: RequestIds | None
    ) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers of an answer, with those of each answer to this head, and with an id.

        Args:
            ids: Gives an id where the client has given none; None where another one does that.
        """
        headers += self.extra
        if any(name == REQUEST_ID for name, _ in headers):
            return headers
        given = self.request_id
        if not given and ids is not None:
            given = ids.new()
        return ((REQUEST_ID, given), *headers) if given else headers


class Exchange(Request):
    """A request that came over HTTP and takes its answer itself. Each front has its own `respond`.

    Attributes:
        delivery: How far its answer in parts has come on its way; None if it has none.
        notes: The notes of its times and stages; only an app with an `Observer` sets it.
    """

    __slots__ = ("delivery", "head", "notes")

    delivery: Delivery | None
    notes: Notes

    def __init__(self, head: Head, body: bytes | bytearray = b"") -> None:
        Request.__init__(self, body, inf, None, len(body))
        self.head = head
        self.delivery = None

    @property
    def body(self) -> bytes | bytearray:
        """The body, as long as no stage has worked on it."""
        return self.item  # type: ignore[return-value]

    @property
    def client_host(self) -> str | None:
        """The address of the client; empty on a Unix socket, None where it is not known."""
        return None

    def fix_id(self, ids: RequestIds) -> None:
        """Give the request an id, unless its client has given one.

        The head of an answer in parts has it, and so has the error that ends the answer.
        """
        if not self.head.request_id:
            head = self.head = copy.copy(self.head)  # others may have it, too
            head.headers = {**head.headers, REQUEST_ID: ids.new()}

    def has_room_at(self, model: ServedModel) -> bool:
        """Count its connection for the model that its body asks, and report whether there is room.

        Where connections are not ours to count, there is.
        """
        return True

    def respond(self, response: HttpResponse) -> None:
        """Send the response to the client."""
        raise NotImplementedError

    def respond_with(self, responder: ErrorResponder, nbytes: int, make: Callable[[], HttpResponse], what: str) -> None:
        """Send the response that `make` returns; where it is large it is made in a thread.

        So one client's answer of many megabytes holds up nobody else's.

        Args:
            nbytes: How many bytes the results have of which it is made.
            what: The maker, for the log.
        """
        if nbytes < LARGE:
            self.respond(self._made(responder, make, what))
            return

        def made() -> HttpResponse:
            return responder.compressed(self.head, self._made(responder, make, what))

        self.work_beside(responder, nbytes, made, self.respond)

    def work_beside(
        self, responder: ErrorResponder, nbytes: int, work: Callable[[], T], then: Callable[[T], object]
    ) -> None:
        """Call `then` with the result of `work`; where that is much, `work` runs in a thread.

        So one client's body or answer of many megabytes holds up nobody else's. `then` is called on
        the loop, and not if the client has left by then. An error of `work` is up to the caller
        where there is little to do, and otherwise raised by a route.

        Args:
            work: Does the work; it uses nothing that belongs to the loop.
        """
        if nbytes < LARGE:
            then(work())
            return
        was_new = self.state == NEW  # `App.cancel` ends new requests
        try:
            working = asyncio.get_running_loop().run_in_executor(None, work)
        except RuntimeError:  # the loop is about to end, and takes no more work for its threads
            then(work())
            return

        def done(worked: asyncio.Future[T]) -> None:
            if worked.cancelled() or (was_new and self.state == DONE):
                return
            try:
                then(worked.result())
            except BaseException as error:  # as `App.handle` does for an error that is raised at once
                responder.route_raised(self, error)

        working.add_done_callback(done)

    def read_beside(
        self,
        responder: ErrorResponder,
        nbytes: int,
        read: Callable[[], T],
        then: Callable[[T], object],
        refuse: Callable[[CarpoolError], HttpResponse],
    ) -> None:
        """Call `then` with the content that `read` finds in a body, as `work_beside` does."""

        def tried() -> tuple[T] | CarpoolError:
            try:
                return (read(),)
            except CarpoolError as error:
                return error

        def go_on(outcome: tuple[T] | CarpoolError) -> None:
            if isinstance(outcome, CarpoolError):
                self.respond(refuse(outcome))
            else:
                then(outcome[0])

        self.work_beside(responder, nbytes, tried, go_on)

    def _made(self, responder: ErrorResponder, make: Callable[[], HttpResponse], what: str) -> HttpResponse:
        try:
            return make()
        except CarpoolError as error:
            return responder.error(self.head, error)
        except BaseException as error:  # a protocol may be the user's
            return responder.error(self.head, as_model_error(error, what))

    def watch_silence(self) -> None:
        """Send keep-alives while no parts come."""

    def write_part(self, data: bytes) -> None:
        """Send a part to the client, behind the head of the response if it is the first."""
        raise NotImplementedError

    def end_parts(self, data: bytes, *, is_broken: bool = False) -> None:
        """Send the end of an answer in parts.

        Args:
            is_broken: Whether the body is broken off, and does not end in good order.
        """
        raise NotImplementedError

    def want_more(self) -> None:
        """Have more of the body of a bulk request sent."""

    def hold(self, nbytes: int) -> None:
        """Count how many bytes of the body of a bulk request are in memory, where that is ours.

        Raises:
            Overloaded: They are too many.
        """

    def leave_body_unread(self) -> None:
        """Have nothing more read of the body of a bulk request, which is broken off."""

    def tell_part(self, part: object) -> None:
        ask, delivery = self.head.ask, self.delivery
        assert ask is not None and ask.framing is not None, "parts are sent to those who asked for them"
        assert delivery is not None
        delivery.has_begun = True
        self.write_part(framed(ask.framing, part))

    def tell(self) -> None:
        ask, result, delivery = self.head.ask, self.result, self.delivery
        assert ask is not None, "the driver answers only what a model was asked"
        if delivery is not None and delivery.has_begun:
            assert ask.framing is not None, "parts are sent to those who asked for them"
            self._tell_end(ask, ask.framing)
        elif self.error is not None:
            self.respond(ask.responder.error(self.head, self.error))
        elif type(result) is CheckedResponse:
            content_type = result.content_type or ask.content_type
            self.respond(HttpResponse(result.status, result.body, content_type, result.headers))
        elif ask.framing is None and len(result) >= LARGE and ask.responder.compresses:  # type: ignore[arg-type]
            whole = HttpResponse(200, result, ask.content_type)  # type: ignore[arg-type]
            self.respond_with(ask.responder, len(whole.body), lambda: whole, "the server")
        elif ask.framing is None:
            self.respond(HttpResponse(200, result, ask.content_type))  # type: ignore[arg-type]
        elif result is None:  # it was made in parts, of which there are none
            self._tell_end(ask, ask.framing)
        else:
            body = framed(ask.framing, result) + ask.framing.with_end(1)
            self.respond(HttpResponse(200, body, ask.framing.content_type, ask.framing.headers))

    def _tell_end(self, ask: Ask, framing: Framing) -> None:
        """End an answer in parts, whose status has been sent already.

        That of a model which returns whole answers is a single part.
        """
        assert self.delivery is not None
        self.delivery.has_begun = True
        error, result, last = self.error, self.result, b""
        if type(result) is CheckedResponse:
            result, error = _part_of(result, framing)
        if error is not None:
            end = b""
            if framing.error:
                end = framing.error % error_entry(ask.responder.error(self.head, error), JSON)
            self.end_parts(end, is_broken=not end)
            return
        if result is not None:
            last = framed(framing, result)
        self.end_parts(last + framing.with_end(1 if last else stream_of(self).parts))


def error_entry(response: HttpResponse, accept: int, **more: object) -> bytes:
    """Return the body of an error response as an entry, with its status."""
    shown = msgspec.json.decode(response.body)["error"]
    return entries.of_error({**shown, "status": response.status, **more}, accept)


def _part_of(response: CheckedResponse, framing: Framing) -> tuple[bytes | None, ModelError | None]:
    """Return a response of the model's own as a part, or an error if it cannot be one."""
    kind = response.content_type or JSON_TYPE
    if response.status == 200 and kind == JSON_TYPE and framing.format == JSON:
        try:
            return entries.value_in(bytes(response.body) or b"null", JSON), None
        except ValueError as error:
            text = f"the model wrote an answer that is {error}"
    else:
        about = f"of status {response.status} and type {kind.decode('latin-1')}"
        text = f"the model returned a response of its own {about}, after events had begun"
    return None, ModelError(text, code="bad_result")


def _not_admitted(exchange: Exchange) -> None:
    raise RuntimeError("the request was handled before `App.admit` had seen its head")


class RequestIds:
    """Gives each request another id: a part that is drawn at random once, and a number.

    A good answer on the fast path writes both by itself (`AnswerWriter.answer_now`), since a call
    and an object less are the difference between a cost that can be measured and one that cannot.
    """

    def __init__(self) -> None:
        self.start = f"{secrets.token_hex(6)}-".encode()
        self.next_number: Callable[[], int] = itertools.count(1).__next__

    def new(self) -> bytes:
        """Return the id of another request."""
        return b"%b%d" % (self.start, self.next_number())


@dataclass(slots=True)
class InStage:
    """How a request fared in one stage; in a graph, at one place.

    Attributes:
        left: When it left the stage; None if that is not known, as in a row of stages, where it
            came to the next one then, or while it is there.
        branches: In which branches of a graph the place is, the outermost first.
        items: How many of its items came there, where it has become several; the times are from the
            first to the last of them, and the batch is that of the latest.
    """

    stage: str
    arrived: float
    started: float
    batch: int
    n: int
    left: float | None = None
    branches: tuple[Branch, ...] = ()
    items: int = 1


class Notes:
    """The notes of one request while it is inside.

    Attributes:
        trace: The id of its trace, as W3C has it.
        span: The id of our span in it.
        tracing: The span itself, where spans are made.
    """

    __slots__ = ("began", "request_id", "span", "stages", "trace", "tracing")

    def __init__(self, began: float, trace: bytes, span: bytes) -> None:
        self.began = began
        self.stages: list[InStage] = []
        self.trace = trace
        self.span = span
        self.tracing: Any = None
        self.request_id = b""

    def with_ends(self, now: float) -> list[tuple[InStage, float]]:
        """Return the notes of each stage, and the time at which the request left it."""
        arrivals = [each.arrived for each in self.stages[1:]] + [now]
        return [
            (each, arrival if each.left is None else each.left)
            for each, arrival in zip(self.stages, arrivals, strict=False)
        ]
