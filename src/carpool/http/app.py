"""The app says what each address means, and what each outcome is in HTTP. It knows no socket.

Two fronts lead here, our own HTTP/1.1 connection (`connection.py`) and ASGI (`asgi.py`). A front
asks `admit` once it has a request's head, reads the body unless that was refused, makes an
`Exchange` of both and calls `handle`. The answer comes back through `Exchange.respond`, at once or
later.
"""

from __future__ import annotations

import asyncio
import copy
import os
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from carpool.clock import monotonic
from carpool.drive.output import LineSink, print_line
from carpool.drive.streams import Window
from carpool.errors import CarpoolError, InvalidRequest, Unavailable
from carpool.foreign import traceback_of
from carpool.hints import schema
from carpool.http import asgi, openapi
from carpool.http.access import Access, new_access
from carpool.http.addresses import Address
from carpool.http.admin import Admin
from carpool.http.assets import pages_at
from carpool.http.bulk import BULK_PRIORITY, BulkItems, feed_bulk
from carpool.http.codec import (
    Refusal,
    allow,
    as_json,
    as_routes_are,
    content_length,
    too_large,
)
from carpool.http.compressed import check_coding, expanded
from carpool.http.compression import new_compression
from carpool.http.converted import submission_of
from carpool.http.dashboard import Dashboard
from carpool.http.endpoint import Endpoint
from carpool.http.error_answers import ErrorAnswers
from carpool.http.exchange import JSON_TYPE, WANTED_HEADERS, Ask, Exchange, Head, HttpResponse, ServedModel
from carpool.http.items import ExchangeItems
from carpool.http.many import ItemList, split
from carpool.http.observer import new_observer
from carpool.http.overview import overview
from carpool.http.protocol_routes import ProtocolRoutes
from carpool.http.protocols import protocols_named
from carpool.http.protocols.base import HttpProtocol
from carpool.http.streaming import BULK, HttpStream
from carpool.http_request import pack_head
from carpool.logger import logger
from carpool.observe.log import printable
from carpool.request import DEFAULT_LANE, Lane
from carpool.service.checks import (
    LARGEST_PRIORITY,
    at_least,
    check_callable,
    flag,
    nonnegative_seconds,
    when_full_waits,
)
from carpool.service.elsewhere import Elsewhere, elsewhere_of
from carpool.service.join import Join, joins_of
from carpool.wire.payload import CUSTOM, JSON, OBJECT, without_adapter

if TYPE_CHECKING:
    from carpool.observe.own_metrics import OwnMetricsOfWorkers
    from carpool.observe.stats import Stats
    from carpool.service.service import Service


_PRIORITY = re.compile(rb"[+-]?[0-9]{1,3}")
_NOT_SHOWN = re.compile(rb"/?|/(dashboard|docs)/.*")  # the page that lists them, and files of pages
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+/?")
_TEXT_TYPE = b"text/plain; charset=utf-8"
_BULK_LANE = Lane(BULK_PRIORITY, None, 0)
_LINES_INSIDE = 1024

Route = Callable[[Exchange], None]
Target = tuple[Route, Endpoint | None, Address | None]
"""What answers at an address, and for those of models which one and where."""
Routes = dict[bytes, dict[bytes, Target]]
"""By path and method, what answers."""


class App:
    """An HTTP app for one or several services, to run under `carpool serve` or any ASGI server.

    Args:
        services: what to serve; the first service also answers at `/predict`.
        when_full: "refuse" a request with 429 while the queue is full, or let it "wait" until its
            deadline.
        timeout_status: status of a missed deadline, 504 or 408.
        max_body_bytes: size of the largest request body.
        debug: whether error bodies show the texts of user exceptions.
        idle_check_s: once there has been no good answer for this long, `/readyz` runs an example
            through the model.
        output: what to do with each line that a worker prints.
        join: where workers of stages with `join=True` connect: a `Join`, or the path of a Unix
            socket. Only one of the services can have such stages.
        on: where worker processes run: "ray", or a `carpool.ray.Cluster`; None for this machine.
        api_keys: the file with the keys of those who may ask; CARPOOL_API_KEYS may have further
            ones. Without either, everybody may ask.
        allow_host: the names by which clients may call the server; empty if any will do.
        cors_origin: the sites whose pages may ask; empty for none but the server's own.
        open_readyz: whether `/readyz` needs no key, as `/livez` never does.
        root_path: what a proxy puts before each path, such as `/api`; it may also cut it off.
        has_admin_address: whether the pages for those who run the server are at another address.
        access_log: the share of requests that get a line in the log `carpool.access`, from 0 to 1.
        server_timing: whether answers have `Server-Timing`.
        trace: whether spans are made for OpenTelemetry.
        compress: the codings in which answers may be sent, such as `zstd,gzip`; empty for none.
        compress_from_bytes: the size of the smallest answer that is compressed.
        protocols: which protocols of other servers are spoken besides, by their names or as objects
            (docs/protocols.md); None for all that carpool knows, as far as they fit the models.
        accept_compressed: whether compressed request bodies are read.

    Attributes:
        max_body_bytes: size of the largest request body.
        access: who may ask; None if everybody may.
        observer: watches requests and their answers; None if nothing asks for it.
        own_metrics: the metrics that models have of their own; None if nobody collects them.
        root_path: what a proxy puts before each path.
        wanted_headers: the headers that the app or one of its protocols looks at.
        endpoints: the services as the app serves them, in order.
        wants_heads: whether a model of the app asks for whole requests.
        key_headers: the headers by which requests of a model may not share a batch; see `key=`.
        refusing: why requests are refused now; None while the services run.
        admin: changes the services while they run.

    Raises:
        ValueError: a setting is out of range, or two services have one name.
        TypeError: a setting has the wrong type, or JSON and msgpack cannot express a type hint.
        OSError: the file of keys cannot be read.
    """

    def __init__(
        self,
        *services: Service,
        when_full: str = "refuse",
        timeout_status: int = 504,
        max_body_bytes: int = 16 * 2**20,
        debug: bool = False,
        idle_check_s: float = 30.0,
        output: LineSink = print_line,
        join: str | Join | None = None,
        on: Literal["ray"] | Elsewhere | None = None,
        api_keys: str | os.PathLike[str] | None = None,
        allow_host: Sequence[str] = (),
        cors_origin: Sequence[str] = (),
        open_readyz: bool = False,
        root_path: str = "",
        has_admin_address: bool = False,
        access_log: float = 0.0,
        server_timing: bool = False,
        trace: bool = False,
        compress: str = "",
        compress_from_bytes: int = 1024,
        protocols: Sequence[str | HttpProtocol] | None = None,
        accept_compressed: bool = False,
    ) -> None:
        _check_services(services)
        joins, elsewhere = joins_of(services, join), elsewhere_of(on)
        self._errors = ErrorAnswers(timeout_status, debug)
        check_callable("output", output, "a worker's name, whether it is an error, and a line")
        self.max_body_bytes = at_least("max_body_bytes", max_body_bytes, 1)
        self.endpoints = [
            Endpoint(service, output, joins[i], elsewhere, is_first=i == 0) for i, service in enumerate(services)
        ]
        self.wants_heads = any(endpoint.formats.wants_heads for endpoint in self.endpoints)
        keys = [endpoint.key_header for endpoint in self.endpoints]
        self.key_headers = frozenset([key for key in keys if key is not None])
        self.refusing: CarpoolError | None = Unavailable("the service is starting", code="starting")
        self.root_path = check_root_path(root_path)
        access = new_access(api_keys, allow_host, cors_origin, open_readyz=open_readyz, root_path=self.root_path)
        self.access = access
        self.observer = new_observer(
            access_log, server_timing, trace, new_compression(compress, compress_from_bytes), self._errors.new_id
        )
        self.wanted_headers = WANTED_HEADERS.union(
            self.key_headers, *[each.wanted_headers for each in (access, self.observer) if each is not None]
        )
        self.own_metrics: OwnMetricsOfWorkers | None = None
        self._draining = False
        self._wait = when_full_waits(when_full)
        self._idle_check_s = nonnegative_seconds("idle_check_s", idle_check_s)
        self._document: bytes | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the app was started on it
        self._starting: asyncio.Task[None] | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self.admin = Admin(self.endpoints, self.error, self._run_beside)
        self._has_admin_address = has_admin_address
        self._dashboard = Dashboard(self._running_stats, self)
        self._admin_pages: dict[bytes, Route] = {b"/metrics": self._metrics, **self._dashboard.pages}
        self._accepts_compressed = flag("accept_compressed", accept_compressed)
        self._protocols = ProtocolRoutes(
            protocols_named(protocols), self.endpoints, self, self._problem, is_patient=self._wait
        )
        self.wanted_headers |= self._protocols.headers
        self._routes = self._make_routes()
        for path in self._protocols.replaced:
            self._routes.pop(path, None)

    @property
    def services(self) -> list[Service]:
        """The services, in order."""
        return [endpoint.service for endpoint in self.endpoints]

    # -- starting and stopping

    async def start(self) -> None:
        """Start all services, also once more after a stop; until then requests are answered 503.

        Raises:
            StartupError: a worker could not load its model.
            RuntimeError: the app is running already.
        """
        await self._reset()
        await self._begin()

    def drain(self) -> None:
        """Answer new requests 503 from now on, and `/readyz`, too; those inside go on."""
        self._draining = True
        self.refusing = Unavailable("the service is shutting down", code="draining")
        for endpoint in self.endpoints:
            if endpoint.driver is not None:
                endpoint.driver.close(self.refusing)

    async def stop(self, drain: bool = True) -> None:
        """Stop all services; with `drain` the requests inside are answered first."""
        self.drain()
        self._dashboard.close()
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*[endpoint.stop(drain) for endpoint in self.endpoints])

    async def failed(self) -> None:
        """Wait, once the app has started, until none of its services can answer any more."""
        await asyncio.gather(*[endpoint.handle.failed() for endpoint in self.endpoints if endpoint.handle is not None])

    async def ensure_started(self, *, anew: bool = False) -> None:
        """Start the app unless it has been started, and wait until it is up.

        A mounted app without a lifespan is started like this by its first request. If the event
        loop on which it was started has ended, it is started again, since test clients without a
        lifespan run each request on an event loop of its own.

        Args:
            anew: whether an app that was stopped is started again, as a second lifespan asks for;
                otherwise it stays stopped.

        Raises:
            StartupError: a worker could not load its model. Later calls raise it, too.
            RuntimeError: the app runs on another event loop that has not been closed.
        """
        if (anew and self._draining) or self.is_elsewhere:
            await self._reset()
        if self._starting is None and not self._draining:
            asgi.warn_of_siblings()
            self._begin()
        if self._starting is not None:
            await asyncio.shield(self._starting)

    def _begin(self) -> asyncio.Task[None]:
        """Begin to start unless that was done; return the task, for which several may wait."""
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = self._loop.create_task(self._start())
        return self._starting

    async def _start(self) -> None:
        try:
            if not self._draining:
                await asyncio.gather(*[endpoint.start() for endpoint in self.endpoints])
                if self.observer is not None:
                    for endpoint in self.endpoints:
                        if endpoint.driver is not None:
                            self.observer.watch(endpoint.driver)
            if self._draining:
                raise Unavailable("the service was closed while it was starting", code="draining")
        except BaseException:
            await self.stop(drain=False)
            raise
        self.refusing = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether the app was started on another event loop than the running one."""
        return self._loop is not None and self._loop is not asyncio.get_running_loop()

    async def _reset(self) -> None:
        """Get ready to start anew. Raises RuntimeError if the app has not been stopped."""
        if self._loop is None:
            return
        if self.is_elsewhere and not self._loop.is_closed():
            raise RuntimeError("this app was started on another event loop, which is still running: use it there")
        if not (self._draining or self.is_elsewhere):
            raise RuntimeError("this app is running already")
        starting = self._starting
        if starting is not None and not self.is_elsewhere:
            await asyncio.wait([starting])  # a start that was interrupted ends what it had begun
        await asyncio.gather(*[endpoint.stop(drain=False) for endpoint in self.endpoints])
        if self._starting is not starting:
            return  # another caller was faster
        for endpoint in self.endpoints:
            endpoint.reset()
        self.refusing = Unavailable("the service is starting", code="starting")
        self._loop = self._starting = None
        self._draining = False

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Serve one ASGI scope."""
        await asgi.serve(self, scope, receive, send)

    # -- one request

    def admit(self, head: Head) -> HttpResponse | None:
        """Judge a request by its method, address and headers.

        Returns the response if the request is refused. Otherwise returns None and sets `head.route`
        and, for a model's address, `head.ask`; the front reads the body next and calls `handle`.
        """
        return self.admit_to(head, self._routes, self.access)

    def admit_to(self, head: Head, routes: Routes, access: Access | None) -> HttpResponse | None:
        """Do what `admit` does, for these addresses and those who may ask at them."""
        endpoint: Endpoint | None = None
        try:
            if access is not None and (answer := access.check(head)) is not None:
                return answer
            methods = routes.get(head.path) or routes.get(as_routes_are(head.path))
            if methods is None:
                if routes is not self._routes:
                    raise Refusal(404, "not_found")
                self._admit_to_protocol(head)
                head.route = self._watched(head, head.route, access)
                return None
            if head.method not in methods:
                raise Refusal(405, "method_not_allowed", headers=allow(name.decode() for name in methods))
            route, endpoint, address = methods[head.method]
            is_bulk = address is not None and address.is_bulk(head.headers.get(b"content-type", b""))
            if content_length(head.headers) > self.max_body_bytes and not is_bulk:
                raise too_large(self.max_body_bytes)
            if endpoint is not None and address is not None:
                head.ask = self._ask(head, endpoint, address, is_bulk=is_bulk)
                if is_bulk:
                    route = self._predict_bulk
                elif head.ask.packed:
                    route = self._predict_whole_request
                elif head.ask.format == OBJECT:
                    route = partial(self._predict_converted, endpoint)
                route = self._expanding(head.headers, route)
            head.route = self._watched(head, route, access)
        except CarpoolError as error:
            if endpoint is not None:
                _count_refusal(endpoint, error)
            return self.error(head, error)
        return None

    def _watched(self, head: Head, route: Route, access: Access | None) -> Route:
        """Return a route that is counted for its caller and noted, where that is asked for."""
        if access is not None and access.keys is not None:
            route = access.counted(head, route)
        return route if self.observer is None else self.observer.noted(route)

    def refuse(self, head: Head | None, error: CarpoolError) -> HttpResponse:
        """Return the response to a request that is broken off after its admission, and count it.

        Args:
            head: the request's head; None if it was not received.
            error: why the request is refused.
        """
        if head is not None and head.ask is not None:
            _count_refusal(head.ask.endpoint, error)
        return self.error(head, error)

    def handle(self, exchange: Exchange) -> None:
        """Answer an admitted exchange whose body has been read."""
        try:
            exchange.head.route(exchange)
        except BaseException as error:
            self.route_raised(exchange, error)

    def route_raised(self, exchange: Exchange, error: BaseException) -> None:
        """Answer 500 because a route raised, whatever it raised; no other request is affected.

        A front that calls `head.route` by itself guards the call with this, as `handle` does.
        """
        path, ask = printable(repr(exchange.head.path)), exchange.head.ask
        about = {"code": "internal_error", **({} if ask is None else {"model": ask.endpoint.name})}
        logger.error("%s could not be answered:\n%s", path, printable(traceback_of(error)), extra=about)
        exchange.respond(self.refuse(exchange.head, CarpoolError("a route raised an error")))

    def pause(self, exchange: Exchange, is_paused: bool) -> None:
        """Have the model make no more parts for a client that does not take them, or go on."""
        ask, item = exchange.head.ask, exchange.item
        if isinstance(item, ExchangeItems):
            item.pause(is_paused)
        elif ask is not None and ask.endpoint.driver is not None:
            ask.endpoint.driver.pause(exchange, is_paused)

    def cancel(self, exchange: Exchange) -> None:
        """Give up an exchange whose client has left: if it is still queued, it is not run."""
        ask, item = exchange.head.ask, exchange.item
        if isinstance(item, ExchangeItems):
            item.cancel()
        elif ask is not None and ask.endpoint.driver is not None:
            ask.endpoint.driver.cancel(exchange)

    def error(self, head: Head | None, error: Exception) -> HttpResponse:
        """Return the response to a request that ended with `error`."""
        response = self.plain_error(head, error)
        if head is None or head.protocol is None:
            return response
        return self._protocols.in_words_of(head.protocol, response)

    def plain_error(self, head: Head | None, error: Exception) -> HttpResponse:
        """Return the same in our own words, also where a protocol is spoken."""
        if head is None:
            return self._errors.response(b"", error)
        model = head.ask.endpoint.name if head.ask is not None else ""
        return self._errors.response(head.request_id, error, model, head.caller)

    def _admit_to_protocol(self, head: Head) -> None:
        """Judge a request whose address is not one of the app's own. Raises `CarpoolError`."""
        self._protocols.admit(head)
        headers = head.headers
        if content_length(headers) > self.max_body_bytes:
            raise too_large(self.max_body_bytes)
        if head.method != b"POST":
            return
        self._check_coding(headers)
        head.route = self._expanding(headers, head.route)
        timeout, priority = headers.get(b"x-request-timeout-ms"), headers.get(b"x-request-priority")
        head.ask = self._protocols.ask(
            inf if timeout is None else _seconds(timeout), DEFAULT_LANE if priority is None else _lane(priority)
        )

    def _check_coding(self, headers: Mapping[bytes, bytes], *, is_bulk: bool = False) -> None:
        """Raise `CarpoolError` if no request is taken now, or none in this coding."""
        if self.refusing is not None:
            raise copy.copy(self.refusing)  # each raise adds its frames to the traceback of what it raises
        coding = headers.get(b"content-encoding", b"identity")
        if coding == b"identity":
            return
        if not self._accepts_compressed or is_bulk:
            text = "compressed request bodies are not read: send the body without Content-Encoding"
            raise InvalidRequest(text, status=415, code="unsupported_media_type")
        check_coding(coding)

    def _expanding(self, headers: Mapping[bytes, bytes], route: Route) -> Route:
        """Return a route that expands the body before another one, if the body is compressed."""
        coding = headers.get(b"content-encoding", b"identity")
        return route if coding == b"identity" else partial(self._expand, coding, route)

    def _expand(self, coding: bytes, route: Route, exchange: Exchange) -> None:
        try:
            exchange.item = expanded(exchange.body, coding, self.max_body_bytes)
        except CarpoolError as error:
            exchange.respond(self.refuse(exchange.head, error))
            return
        exchange.nbytes = len(exchange.body)
        route(exchange)

    def _ask(self, head: Head, endpoint: Endpoint, address: Address, *, is_bulk: bool) -> Ask:
        """Read what is asked of a model off a request's headers."""
        headers, formats = head.headers, address.formats
        self._check_coding(headers, is_bulk=is_bulk)
        usual, framing = DEFAULT_LANE, None
        sent, wanted = headers.get(b"content-type"), headers.get(b"accept")
        if is_bulk:
            format, accept, framing, usual = address.format_of_lines, JSON, BULK, _BULK_LANE
        elif address.takes_converted(sent, wanted):
            format, accept = OBJECT, OBJECT
        else:
            format, accept = address.choose(sent, wanted)
            framing = formats.framing(wanted)
        timeout, limit = headers.get(b"x-request-timeout-ms"), endpoint.service.timeout_s
        wants_head = formats.wants_heads and format == CUSTOM
        return Ask(
            endpoint=endpoint,
            responder=self,
            format=format,
            accept=accept if framing is None else framing.format,
            timeout_s=limit if timeout is None else min(limit, _seconds(timeout)),
            lane=_lane_of(endpoint, headers, usual),
            content_type=formats.types.get(accept, JSON_TYPE),
            packed=pack_head(head.path, head.query, head.fields) if wants_head else b"",
            framing=framing,
            stream_s=inf if timeout is None else _seconds(timeout),
            is_bulk=is_bulk,
        )

    # -- the routes

    def _make_routes(self) -> Routes:
        """Return, by path and method, what answers. Raises ValueError if two services share one."""
        pages = {
            b"/livez": self._livez,
            b"/readyz": self._readyz,
            b"/openapi.json": self._openapi,
            **dict(pages_at(b"/docs")),
            b"/": self._overview,
        }
        if self._has_admin_address:
            routes = _pages(pages)
        else:
            routes = {**_pages({**pages, **self._admin_pages}), **_orders(self.admin.routes)}
        for endpoint in self.endpoints:
            for address in endpoint.addresses:
                if address.key in routes:
                    raise ValueError(f"routes names {address.path} twice: give one of them another path")
                route = self._predict_list if address.is_list else self._predict
                routes[address.key] = {b"POST": (route, endpoint, address)}
        for methods in routes.values():
            methods[b"OPTIONS"] = (_tell_methods(*methods, b"OPTIONS"), None, None)
        if self.root_path:
            routes.update({self.root_path.encode() + path: methods for path, methods in routes.items()})
        # of the server as a whole (RFC 9110, 9.3.7)
        routes[b"*"] = {b"OPTIONS": (_tell_methods(b"GET", b"HEAD", b"POST", b"OPTIONS"), None, None)}
        return routes

    def admin_routes(self) -> Routes:
        """Return what answers at an address for those who run the server."""
        pages = {b"/livez": self._livez, b"/readyz": self._readyz, **self._admin_pages}
        return {**_pages(pages), **_orders(self.admin.routes)}

    def _predict(self, exchange: Exchange) -> None:
        """Hand a request to its model's driver.

        Only the deadline is set here: when the SLO has the request answered is up to the pipeline.
        """
        ask = exchange.head.ask
        assert ask is not None
        driver, weigher = ask.endpoint.driver, ask.endpoint.weigher
        assert driver is not None
        exchange.format = ask.format
        exchange.accept = ask.accept
        exchange.lane = ask.lane
        if weigher is not None:
            try:
                weigher.weigh_encoded(exchange, exchange.body, exchange.format)
            except CarpoolError as error:
                exchange.respond(self.refuse(exchange.head, error))
                return
        exchange.deadline = driver.clock() + ask.timeout_s
        exchange.patient = self._wait
        if ask.framing is not None:
            _ask_for_parts(exchange, ask, driver.clock())
        driver.submit(exchange)

    def _predict_whole_request(self, exchange: Exchange) -> None:
        """Do the same for a model whose `decode` asks for the head beside the body."""
        ask = exchange.head.ask
        assert ask is not None
        exchange.item = [ask.packed, exchange.body]
        exchange.nbytes += len(ask.packed)
        self._predict(exchange)

    def _predict_converted(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """Hand a request to its model's driver whose body is converted here."""
        headers = exchange.head.headers
        sent, wanted = headers.get(b"content-type"), headers.get(b"accept")
        try:
            submission = submission_of(endpoint, exchange.body, sent, wanted)
        except CarpoolError as error:
            exchange.respond(self.refuse(exchange.head, error))
            return
        self._protocols.submit(exchange, submission)

    def _predict_list(self, exchange: Exchange) -> None:
        """Hand the items of a list to their model's driver."""
        ask = exchange.head.ask
        assert ask is not None
        driver, weigher = ask.endpoint.driver, ask.endpoint.weigher
        assert driver is not None
        format = ask.format if ask.format < CUSTOM else without_adapter(ask.format)[0]
        try:
            bodies = split(exchange.body, format, driver.pipeline.batchers[0].queue.max_size)
        except CarpoolError as error:
            exchange.respond(self.refuse(exchange.head, error))
            return
        whole = ItemList(exchange, ask, bodies, driver.clock() + ask.timeout_s, self._wait)
        if weigher is not None:
            for item, body in zip(whole.items, bodies, strict=True):
                try:
                    weigher.weigh_encoded(item, body, format)
                except CarpoolError as error:
                    item.error = error
                    driver.refused(error)
        exchange.item = whole  # for `cancel`
        driver.submit_all(whole.begin())

    def _predict_bulk(self, exchange: Exchange) -> None:
        """Have the lines of a body taken as they come, each as an item."""
        ask = exchange.head.ask
        assert ask is not None
        driver, handle = ask.endpoint.driver, ask.endpoint.handle
        assert driver is not None
        window = Window(_LINES_INSIDE, _LINES_INSIDE) if handle is None else handle.window(None)
        soon = asyncio.get_running_loop().call_soon
        unfed = exchange.item if type(exchange.item) is list else []
        exchange.item = BulkItems(exchange, ask, driver, window, self.max_body_bytes, soon)
        for piece in unfed:
            feed_bulk(exchange, piece)

    def _livez(self, exchange: Exchange) -> None:
        exchange.respond(HttpResponse(200, b"ok\n", _TEXT_TYPE))

    def _readyz(self, exchange: Exchange) -> None:
        stale = [endpoint for endpoint in self.endpoints if endpoint.is_stale(self._idle_check_s)]
        problem = self._problem()
        if problem is not None or not stale:
            self._respond_readiness(exchange, problem)
            return
        self._run_beside(self._try_examples(exchange, stale))

    def _run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done beside the requests, until the app stops."""
        task = asyncio.ensure_future(work)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _try_examples(self, exchange: Exchange, endpoints: list[Endpoint]) -> None:
        problem: str | None = "the service is shutting down"
        try:
            problems = await asyncio.gather(*[endpoint.try_example() for endpoint in endpoints])
            problem = next(filter(None, problems), None)
        finally:  # `stop` may cancel the check
            self._respond_readiness(exchange, problem)

    def _respond_readiness(self, exchange: Exchange, problem: str | None) -> None:
        if problem is None:
            exchange.respond(HttpResponse(200, b"ready\n", _TEXT_TYPE))
        else:
            exchange.respond(self.error(exchange.head, Unavailable(problem, code="not_ready")))

    def _problem(self) -> str | None:
        if self.refusing is not None:
            return str(self.refusing)
        return next(filter(None, [endpoint.problem for endpoint in self.endpoints]), None)

    def _metrics(self, exchange: Exchange) -> None:
        try:
            from carpool.observe import prometheus
        except ImportError:
            exchange.respond(self.error(exchange.head, Refusal(501, "metrics_unavailable")))
            return
        stats = self._running_stats()
        accept = exchange.head.headers.get(b"accept", b"").decode("latin-1")
        more: list[Any] = [] if self.access is None else [prometheus.CallerMetrics(self.access)]
        if self.own_metrics is not None:
            pids = [pid for endpoint in self.endpoints if endpoint.handle is not None for pid in endpoint.handle.pids]
            self.own_metrics.seen(pids)
            more.append(self.own_metrics)
        body, content_type = prometheus.render(stats, monotonic(), accept, more)
        exchange.respond(HttpResponse(200, body, content_type.encode()))

    def _running_stats(self) -> list[Stats]:
        """Return the statistics of the services that run."""
        return [endpoint.driver.stats for endpoint in self.endpoints if endpoint.driver is not None]

    def _overview(self, exchange: Exchange) -> None:
        root = self.root_path.encode()
        shown = [
            path
            for path, methods in self._routes.items()
            if b"GET" in methods and path.startswith(root) and not _NOT_SHOWN.fullmatch(path.removeprefix(root))
        ]
        pages = sorted(path.decode() for path in shown)
        exchange.respond(HttpResponse(200, overview(self.endpoints, pages).encode(), _TEXT_TYPE))

    def _openapi(self, exchange: Exchange) -> None:
        if self._document is None:
            document = openapi.document(
                self.endpoints,
                self._errors.timeout_status,
                self.max_body_bytes,
                self.root_path,
                needs_key=self.access is not None and self.access.keys is not None,
            )
            self._document = as_json(document)
        exchange.respond(HttpResponse(200, self._document))


def _pages(pages: Mapping[bytes, Route]) -> Routes:
    """Return the entries of pages, which are only read."""
    return {path: {b"GET": (page, None, None), b"HEAD": (page, None, None)} for path, page in pages.items()}


def _orders(orders: Mapping[bytes, Route]) -> Routes:
    """Return the entries of what changes the server."""
    return {path: {b"POST": (order, None, None)} for path, order in orders.items()}


def check_root_path(path: str) -> str:
    """Return what a proxy puts before each path, without a slash at its end. Raises ValueError."""
    if path and (not _ROOT_PATH.fullmatch(path) or path == "/"):
        raise ValueError(f"root_path must begin with a slash, such as /api, not {path!r}")
    return path.rstrip("/")


def _ask_for_parts(exchange: Exchange, ask: Ask, now: float) -> None:
    """Have the answer of a model told in parts, if the model makes parts."""
    service = ask.endpoint.service
    if service.stages[-1].traits.in_parts:
        exchange.stream = HttpStream(now, now + ask.stream_s)
        exchange.deadline = now + service.timeout_s
        exchange.watch_silence()


def _tell_methods(*methods: bytes) -> Route:
    """Make a route that tells which methods an address has."""
    response = HttpResponse(204, b"", headers=allow(name.decode() for name in methods))
    return lambda exchange: exchange.respond(response)


def _count_refusal(endpoint: ServedModel, error: CarpoolError) -> None:
    """Count a refused request for its model."""
    if endpoint.driver is not None:
        endpoint.driver.refused(error)


def _check_services(services: tuple[Service, ...]) -> None:
    """Raise ValueError or TypeError unless the services have different names and items for HTTP."""
    if not services:
        raise ValueError("App needs at least one service")
    for service in services:
        if not hasattr(service, "stages"):
            raise TypeError(f"App takes services, not {service!r}: wrap a model as App(Service(model))")
    names = [service.name for service in services]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two services are called {twice.pop()!r}: give one of them another name with name=")
    for service in services:
        _check_types(service)


def _check_types(service: Service) -> None:
    """Raise TypeError if JSON cannot express the items, and the model names no format for them."""
    first, last = service.stages[0].traits, service.stages[-1].traits
    if not first.accepts:
        _check_hint(f"{first.name} takes", first.input_type, schema.why_unreadable(first.input_type), "accepts")
    if not last.produces:
        _check_hint(f"{last.name} returns", last.output_type, schema.why_unwritable(last.output_type), "produces")


def _check_hint(use: str, hint: Any, problem: str | None, attribute: str) -> None:
    if problem is not None:
        raise TypeError(
            f"model {use} {schema.type_name(hint)} by its hint, which cannot be checked over HTTP: {problem}. Give a"
            " hint that can be (of a union only one such type, or msgspec.Structs with tags), leave the hint out, or"
            f" name a format of the model's own with {attribute}. Python callers need none of this"
        )


def _seconds(text: bytes) -> float:
    """Return `X-Request-Timeout-Ms` in seconds."""
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
    """Return `X-Request-Priority` as a lane of the queue."""
    if not _PRIORITY.fullmatch(text) or abs(int(text)) > LARGEST_PRIORITY:
        raise InvalidRequest(
            f"X-Request-Priority must be a whole number from -{LARGEST_PRIORITY} to {LARGEST_PRIORITY}"
        )
    return Lane(int(text), None, 0)
