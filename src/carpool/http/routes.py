"""The routes of an app: which function answers a request, by its head, and how models answer.

`HeadAdmission` judges requests by their heads, before their bodies are read. It looks up in the
table of routes which function answers at a path with a method, and reads off the head what is asked
of which model (`Ask`). `PredictRoutes` has the functions at the addresses of models. They are
called once the body has been received, and make of it requests to the model's driver.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from carpool.engine.drive.streams import StreamWindow
from carpool.engine.request import DEFAULT_LANE, Lane, Stream
from carpool.engine.wire.payload import CUSTOM, OBJECT
from carpool.errors import CarpoolError, InvalidRequest
from carpool.http.access import Access
from carpool.http.bulk import BULK_PRIORITY, BulkItems, feed_bulk
from carpool.http.codec import (
    TYPES_OF_ENTRIES,
    NotReady,
    allow,
    as_routes_are,
    content_length,
    format_of_entries,
    not_allowed,
    nothing_here,
    too_large,
)
from carpool.http.compression import check_coding, expanded
from carpool.http.converted import submission_of
from carpool.http.endpoint import Address, Endpoint
from carpool.http.exchange import JSON_TYPE, Ask, ErrorResponder, Exchange, Head, HttpResponse, ServedModel
from carpool.http.items import ItemList, split
from carpool.http.observer import Observer
from carpool.http.protocol_routes import ProtocolRoutes
from carpool.http.protocols.base import ShownRoute
from carpool.http.shares import ConnectionShares
from carpool.http.streaming import BULK, Delivery
from carpool.service.checks import LARGEST_PRIORITY
from carpool.service.weigh import Weigher

if TYPE_CHECKING:
    from carpool.engine.observe.own_metrics import OwnMetricsOfWorkers
    from carpool.engine.observe.stats import Stats
    from carpool.service.service import Service

_PRIORITY = re.compile(rb"[+-]?[0-9]{1,3}")
_USUALLY_EXPANDED = 16  # times its size a body becomes at most, but for those that are made to
_BULK_LANE = Lane(BULK_PRIORITY, None, 0)
_LINES_INSIDE = 1024

T = TypeVar("T")


class AppView(ErrorResponder, Protocol):
    """The app as the modules on which it builds see it; there is one kind, `App`, which explains
    these attributes and methods.
    """

    endpoints: list[Endpoint]
    coming: list[Endpoint]
    routes: Routes
    max_body_bytes: int
    accepts_compressed: bool
    wants_heads: bool
    wanted_headers: frozenset[bytes]
    root_path: str
    is_tls: bool
    access: Access | None
    observer: Observer | None
    own_metrics: OwnMetricsOfWorkers | None
    connection_shares: ConnectionShares | None
    refusing: CarpoolError | None

    # -- fronts call these

    @property
    def is_elsewhere(self) -> bool: ...

    async def ensure_started(self, *, anew: bool = False) -> None: ...

    async def stop(self, drain: bool = True) -> None: ...

    def admit(self, head: Head) -> HttpResponse | None: ...

    def refuse(self, head: Head | None, error: CarpoolError) -> HttpResponse: ...

    def handle(self, exchange: Exchange) -> None: ...

    def cancel(self, exchange: Exchange) -> None: ...

    def pause(self, exchange: Exchange, is_paused: bool) -> None: ...

    # -- routes and pages call these

    def refusal_of(self, endpoint: ServedModel | None) -> CarpoolError | None: ...

    @property
    def served(self) -> list[Endpoint]: ...

    def problems(self) -> dict[str, str]: ...

    def unreadiness(self, problems: Mapping[str, str]) -> NotReady | None: ...

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None: ...

    def running_stats(self) -> list[Stats]: ...

    def protocol_routes(self) -> Sequence[ShownRoute]: ...

    # -- orders to add and remove services call these

    def new_endpoint(self, service: Service, *, is_first: bool) -> Endpoint: ...

    def check_addresses(self, endpoints: Sequence[Endpoint]) -> None: ...

    def serve_at(self, endpoints: Sequence[Endpoint]) -> None: ...


class HeadAdmission:
    """Judges requests to the addresses of one table.

    Args:
        access: Who may ask; None if everybody may.
        protocols: Has further addresses; None where there are none.
    """

    def __init__(
        self,
        app: AppView,
        models: PredictRoutes,
        routes: Routes,
        access: Access | None,
        protocols: ProtocolRoutes | None = None,
    ) -> None:
        self._app = app
        self._models = models
        self._routes = routes
        self._access = access
        self._protocols = protocols
        self._there = what_is_there(routes, app.root_path)

    def admit(self, head: Head) -> HttpResponse | None:
        """See `App.admit`."""
        access, routes = self._access, self._routes
        endpoint: Endpoint | None = None
        try:
            if access is not None and (answer := access.check(head)) is not None:
                return answer
            methods = routes.get(head.path) or routes.get(as_routes_are(head.path))
            if methods is None:
                if self._protocols is None or not self._protocols.admit(head):
                    raise nothing_here(*self._there)
                self._admit_to_protocol(head, self._protocols)
                head.route = self._watched(head, head.route, access)
                return None
            if head.method not in methods:
                raise not_allowed([name.decode() for name in methods])
            route, endpoint, address = methods[head.method]
            head.model = endpoint
            is_bulk = address is not None and address.is_bulk(head.headers.get(b"content-type", b""))
            if content_length(head.headers) > self._app.max_body_bytes and not is_bulk:
                raise too_large(self._app.max_body_bytes)
            if endpoint is not None and address is not None:
                head.ask = self._ask(head, endpoint, address, is_bulk=is_bulk)
                if is_bulk:
                    route = self._models.predict_bulk
                elif head.ask.packed and not address.is_list:
                    route = self._models.predict_whole_request
                elif head.ask.format == OBJECT:
                    route = partial(self._models.predict_converted, endpoint)
                route = self._expanding(head.headers, route)
            head.route = self._watched(head, route, access)  # mostly the route itself
        except CarpoolError as error:
            if endpoint is not None:
                count_refusal(endpoint, error)
            return self._app.error(head, error)
        return None

    def _watched(self, head: Head, route: Handler, access: Access | None) -> Handler:
        if access is not None and access.keys is not None:
            route = access.counted(head, route)
        return route if self._app.observer is None else self._app.observer.noted(route)

    def _admit_to_protocol(self, head: Head, protocols: ProtocolRoutes) -> None:
        headers = head.headers
        if content_length(headers) > self._app.max_body_bytes:
            raise too_large(self._app.max_body_bytes)
        if head.method != b"POST":
            return
        self._check_taken(None)
        self._check_coding(headers)
        head.route = self._expanding(headers, head.route)
        timeout, priority = headers.get(b"x-request-timeout-ms"), headers.get(b"x-request-priority")
        head.ask = protocols.ask(
            inf if timeout is None else _seconds(timeout), DEFAULT_LANE if priority is None else _lane(priority)
        )

    def _check_taken(self, endpoint: Endpoint | None) -> None:
        refusal = self._app.refusal_of(endpoint)
        if refusal is not None:
            raise copy.copy(refusal)  # each raise adds its frames to the traceback of its error

    def _check_coding(self, headers: Mapping[bytes, bytes], *, is_bulk: bool = False) -> None:
        coding = headers.get(b"content-encoding", b"identity")
        if coding == b"identity":
            return
        if not self._app.accepts_compressed or is_bulk:
            text = "compressed request bodies are not read: send the body without Content-Encoding"
            raise InvalidRequest(text, status=415, code="unsupported_media_type")
        check_coding(coding)

    def _expanding(self, headers: Mapping[bytes, bytes], route: Handler) -> Handler:
        """Return a route that expands the body before another one, if the body is compressed."""
        coding = headers.get(b"content-encoding", b"identity")
        return route if coding == b"identity" else partial(self._expand, coding, route)

    def _expand(self, coding: bytes, route: Handler, exchange: Exchange) -> None:
        app, body = self._app, exchange.body

        def go_on(data: bytes) -> None:
            exchange.item, exchange.nbytes = data, len(data)
            route(exchange)

        exchange.read_beside(
            app,
            _USUALLY_EXPANDED * len(body),
            lambda: expanded(body, coding, app.max_body_bytes),
            go_on,
            lambda error: app.refuse(exchange.head, error),
        )

    def _ask(self, head: Head, endpoint: Endpoint, address: Address, *, is_bulk: bool) -> Ask:
        headers, formats = head.headers, address.formats
        self._check_taken(endpoint)
        self._check_coding(headers, is_bulk=is_bulk)
        usual, framing = DEFAULT_LANE, None
        sent, wanted = headers.get(b"content-type"), headers.get(b"accept")
        if is_bulk:
            format, accept = address.choose(sent, wanted, is_bulk=True)
            framing, usual = BULK, _BULK_LANE
        elif address.takes_converted(sent, wanted):
            format, accept = OBJECT, OBJECT
        else:
            format, accept = address.choose(sent, wanted)
            framing = formats.framing(wanted)
        timeout, limit = headers.get(b"x-request-timeout-ms"), endpoint.service.timeout_s
        entry = TYPES_OF_ENTRIES[format_of_entries(sent)] if is_bulk or address.is_list else None
        wants_head = formats.wants_heads and format == CUSTOM
        return Ask(
            endpoint=endpoint,
            responder=self._app,
            format=format,
            accept=accept if framing is None or is_bulk else framing.format,
            timeout_s=limit if timeout is None else min(limit, _seconds(timeout)),
            lane=_lane_of(endpoint, headers, usual),
            content_type=formats.types.get(accept, JSON_TYPE),
            packed=formats.packed(head, entry) if wants_head else b"",
            framing=framing,
            stream_s=inf if timeout is None else _seconds(timeout),
            is_bulk=is_bulk,
        )


def count_refusal(endpoint: ServedModel, error: CarpoolError) -> None:
    if endpoint.driver is not None:
        endpoint.driver.refused(error)


def _seconds(text: bytes) -> float:
    try:
        milliseconds = float(text) if text.isascii() and b"_" not in text else float("nan")
    except ValueError:
        milliseconds = float("nan")
    if not milliseconds > 0:
        raise InvalidRequest("X-Request-Timeout-Ms must be a positive number of milliseconds")
    return milliseconds / 1000


def _lane_of(endpoint: Endpoint, headers: Mapping[bytes, bytes], usual: Lane) -> Lane:
    """Return where a request with these headers waits: its priority, and its key if that is one."""
    text, key = headers.get(b"x-request-priority"), endpoint.key_header
    lane = usual if text is None else _lane(text)
    if key is not None and key in headers:
        lane = lane._replace(key=headers[key].decode("latin-1"))
    return lane


def _lane(text: bytes) -> Lane:
    if not _PRIORITY.fullmatch(text) or abs(int(text)) > LARGEST_PRIORITY:
        raise InvalidRequest(
            f"X-Request-Priority must be a whole number from -{LARGEST_PRIORITY} to {LARGEST_PRIORITY}"
        )
    return Lane(int(text), None, 0)


_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+/?")

Handler = Callable[[Exchange], None]
"""Answers an exchange, now or later."""
Target = tuple[Handler, Endpoint | None, Address | None]
"""The function at an address; at the address of a model also the model and the `Address`."""
Routes = dict[bytes, dict[bytes, Target]]
"""The functions that answer, by path and method."""


def of_pages(pages: Mapping[bytes, Handler]) -> Routes:
    return {path: {b"GET": (page, None, None), b"HEAD": (page, None, None)} for path, page in pages.items()}


def of_orders(orders: Mapping[bytes, Handler]) -> Routes:
    return {path: {b"POST": (order, None, None)} for path, order in orders.items()}


def add_models(routes: Routes, endpoints: Sequence[Endpoint], predict: Handler, predict_list: Handler) -> None:
    """Add the addresses of models to a table.

    Args:
        predict: Answers where a body is an item.
        predict_list: Answers where a body is a list of items.

    Raises:
        ValueError: Something else answers at one of the addresses.
    """
    for endpoint in endpoints:
        for address in endpoint.addresses:
            if address.key in routes:
                raise ValueError(f"routes names {address.path} twice: give one of them another path")
            route = predict_list if address.is_list else predict
            routes[address.key] = {b"POST": (route, endpoint, address)}


def add_options(routes: Routes, for_operators: Routes, root_path: str) -> None:
    """Have each address list its methods, and repeat those for clients below a root path.

    The others are nowhere else, so that a rule of a proxy for their paths keeps all of them.
    """
    if root_path:
        routes.update({root_path.encode() + path: methods for path, methods in routes.items()})
    for path, methods in for_operators.items():
        if path in routes:
            raise ValueError(f"routes names {path.decode()}, which is an address of the server: choose another path")
        routes[path] = methods
    for methods in routes.values():
        methods[b"OPTIONS"] = (_tell_methods(*[name for name in methods if name != b"OPTIONS"], b"OPTIONS"), None, None)
    # of the server as a whole (RFC 9110, 9.3.7)
    routes[b"*"] = {b"OPTIONS": (_tell_methods(b"GET", b"HEAD", b"POST", b"OPTIONS"), None, None)}


def _tell_methods(*methods: bytes) -> Handler:
    """Make a route that lists the methods of an address."""
    response = HttpResponse(204, b"", headers=allow(name.decode() for name in methods))
    return lambda exchange: exchange.respond(response)


class WhatIsThere(NamedTuple):
    """The answer to a client that asked at an address where nothing is."""

    owner: str
    paths: list[str]
    more: str = ""


def what_is_there(routes: Routes, root_path: str) -> WhatIsThere:
    """Return the addresses of a table that help: where models answer, or the pages if it has no
    models.

    Args:
        routes: The table.
        root_path: The path that a proxy puts before each address.
    """
    targets = [target for methods in routes.values() for target in methods.values()]
    paths = dict.fromkeys(address.path for _, _, address in targets if address is not None and not address.is_list)
    if not paths:
        return WhatIsThere("There are", [path.decode() for path in routes])
    more = f"; GET {root_path}/ lists all addresses" if b"/" in routes else ""
    return WhatIsThere("Models answer POST requests at", [root_path + path for path in paths], more)


def check_root_path(path: str) -> str:
    """Return the path that a proxy puts before each address, without a slash at its end.

    Raises ValueError.
    """
    if path and (not _ROOT_PATH.fullmatch(path) or path == "/"):
        raise ValueError(f"root_path must begin with a slash, such as /api, not {path!r}")
    return path.rstrip("/")


class PredictRoutes:
    """The routes of an app's models."""

    def __init__(self, app: AppView, protocols: ProtocolRoutes, is_patient: bool) -> None:
        self._app = app
        self._protocols = protocols
        self._is_patient = is_patient

    def predict(self, exchange: Exchange, is_weighed: bool = False) -> None:
        """Hand a request to its model's driver, once its size is noted on it.

        Only the deadline is set here. By when the SLO wants it answered, the core says.
        """
        ask = exchange.head.ask
        assert ask is not None
        driver, weigher = ask.endpoint.driver, ask.endpoint.weigher
        assert driver is not None
        if not is_weighed:
            exchange.format = ask.format
            exchange.accept = ask.accept
            exchange.lane = ask.lane
            if weigher is not None:
                self._weigh(weigher, exchange)
                return
        exchange.deadline = driver.clock() + ask.timeout_s
        exchange.patient = self._is_patient
        if ask.framing is not None:
            _ask_for_parts(exchange, ask, driver.clock())
        driver.submit(exchange)

    def _weigh(self, weigher: Weigher, exchange: Exchange) -> None:
        body = exchange.body
        self._with(
            exchange,
            lambda: weigher.weigh_encoded(exchange, body, exchange.format),
            lambda _: self.predict(exchange, is_weighed=True),
        )

    def predict_whole_request(self, exchange: Exchange) -> None:
        """Hand over a request to a model whose `decode` asks for the head beside the body."""
        ask = exchange.head.ask
        assert ask is not None
        exchange.item = [ask.packed, exchange.body]
        exchange.nbytes += len(ask.packed)
        self.predict(exchange)

    def predict_converted(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """Convert the body of a request, and hand its items to the model's driver."""
        headers, body = exchange.head.headers, exchange.body
        sent, wanted = headers.get(b"content-type"), headers.get(b"accept")
        self._with(
            exchange,
            lambda: submission_of(endpoint, body, sent, wanted),
            lambda submission: self._protocols.submit(exchange, submission),
        )

    def predict_list(self, exchange: Exchange) -> None:
        """Hand the items of a list to their model's driver."""
        ask = exchange.head.ask
        assert ask is not None
        driver, weigher, body = ask.endpoint.driver, ask.endpoint.weigher, exchange.body
        assert driver is not None
        format = format_of_entries(exchange.head.headers.get(b"content-type"))

        def listed() -> ItemList:
            bodies = split(body, format, ask.endpoint.allowance(len(body)))
            whole = ItemList(exchange, ask, bodies, driver.clock() + ask.timeout_s, self._is_patient)
            if weigher is not None:
                for item, own in zip(whole.items, bodies, strict=True):
                    try:
                        weigher.weigh_encoded(item, own, format)
                    except CarpoolError as error:
                        item.error = error
            return whole

        def submit(whole: ItemList) -> None:
            for item in whole.items:
                if isinstance(item.error, CarpoolError):
                    driver.refused(item.error)
            exchange.item = whole  # for `cancel`
            driver.submit_all(whole.begin())

        self._with(exchange, listed, submit)

    def _with(self, exchange: Exchange, read: Callable[[], T], then: Callable[[T], object]) -> None:
        head = exchange.head
        exchange.read_beside(self._app, exchange.nbytes, read, then, lambda error: self._app.refuse(head, error))

    def predict_bulk(self, exchange: Exchange) -> None:
        ask = exchange.head.ask
        assert ask is not None
        driver, handle = ask.endpoint.driver, ask.endpoint.handle
        assert driver is not None
        exchange.fix_id(ask.responder.request_ids)
        window = StreamWindow(_LINES_INSIDE, _LINES_INSIDE) if handle is None else handle.window(None)
        soon = asyncio.get_running_loop().call_soon
        unfed = exchange.item if type(exchange.item) is list else []
        exchange.item = BulkItems(exchange, ask, driver, window, self._app.max_body_bytes, soon)
        for piece in unfed:
            feed_bulk(exchange, piece)


def _ask_for_parts(exchange: Exchange, ask: Ask, now: float) -> None:
    """Have an answer sent in parts; that of a model which makes none is a single one."""
    exchange.fix_id(ask.responder.request_ids)
    exchange.stream = Stream(until=now + ask.stream_s)
    exchange.delivery = Delivery(now)
    exchange.watch_silence()
    service = ask.endpoint.service
    if service.gives.in_parts:
        exchange.deadline = now + service.timeout_s
