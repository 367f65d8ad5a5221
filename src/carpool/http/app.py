"""The app says what each address means, and what each outcome is in HTTP. It knows no socket.

Two fronts lead here, our own HTTP/1.1 connection (`connection.py`) and ASGI (`asgi.py`). A front
asks `admit` once it has a request's head, reads the body unless that was refused, makes an
`Exchange` of both and calls `handle`. The answer comes back through `Exchange.respond`, at once or
later.

`App` puts together what does the work: `app_life.py` starts and stops its services, `admission.py`
judges heads by the table of `routes.py`, `predict_routes.py` answers at the addresses of models,
`protocol_routes.py` at those of protocols, and `status_pages.py` and `dashboard.py` show pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Literal

from carpool.engine.clock import monotonic
from carpool.engine.drive.output import LineSink, print_line
from carpool.engine.foreign import text_of, traceback_of
from carpool.engine.logger import logger
from carpool.engine.observe.log import printable
from carpool.engine.request import DONE, NEW
from carpool.errors import CarpoolError
from carpool.http import asgi
from carpool.http.access import Access, new_access
from carpool.http.addresses import ready_path
from carpool.http.admin import Admin
from carpool.http.admission import HeadAdmission, count_refusal
from carpool.http.app_life import AppLife
from carpool.http.asgi_client import Receive, Send
from carpool.http.assets import pages_at
from carpool.http.codec import as_routes_are
from carpool.http.compression import new_compression
from carpool.http.dashboard import Dashboard
from carpool.http.endpoint import Endpoint
from carpool.http.error_answers import ErrorAnswers
from carpool.http.exchange import WANTED_HEADERS, Exchange, Head, HttpResponse
from carpool.http.items import ExchangeItems
from carpool.http.observer import Lines, new_observer
from carpool.http.predict_routes import PredictRoutes
from carpool.http.protocol_lists import ShownRoute
from carpool.http.protocol_routes import ProtocolRoutes
from carpool.http.protocols import protocols_named
from carpool.http.protocols.base import HttpProtocol
from carpool.http.routes import Handler, Routes, add_models, add_options, check_root_path, of_orders, of_pages
from carpool.http.servable import check_services
from carpool.http.service_list import ServiceList
from carpool.http.shares import ConnectionShares
from carpool.http.status_pages import StatusPages
from carpool.service.checks import at_least, check_callable, flag, nonnegative_seconds, when_full_waits
from carpool.service.elsewhere import Elsewhere, elsewhere_of
from carpool.service.join import Join, joins_of

if TYPE_CHECKING:
    from carpool.engine.observe.own_metrics import OwnMetricsOfWorkers
    from carpool.engine.observe.stats import Stats
    from carpool.engine.request import DONE, NEW
from carpool.service.service import Service


class App(AppLife):
    """An HTTP app for one or several services, to run under `carpool serve` or any ASGI server.

    Args:
        services: What to serve; the first service also answers at `/predict`.
        when_full: "refuse" a request with 429 while the queue is full, or let it "wait" until its
            deadline.
        timeout_status: Status of a missed deadline, 504 or 408.
        max_body_bytes: Size of the largest request body.
        debug: Whether error bodies show the texts of user exceptions.
        idle_check_s: Once there has been no good answer for this long, `/readyz` runs an example
            through the model.
        output: What to do with each line that a worker prints.
        join: Where workers of stages with `join=True` connect: a `Join`, or the path of a Unix
            socket. Only one of the services can have such stages.
        on: Where worker processes run: "ray", or a `carpool.ray.Cluster`; None for this machine.
        api_keys: The file with the keys of those who may ask; CARPOOL_API_KEYS may have further
            ones. Without either, everybody may ask.
        allow_host: The names by which clients may call the server; empty if any will do.
        cors_origin: The sites whose pages may ask; empty for none but the server's own.
        open_readyz: Whether `/readyz` needs no key, as `/livez` never does.
        root_path: What a proxy puts before each path, such as `/api`; it may also cut it off.
        has_admin_address: Whether the pages for those who run the server are at another address.
        access_log: The share of requests that get a line in the log `carpool.access`, from 0 to 1;
            errors always do, probes that are answered 200 never.
        access_log_slow_ms: A request that takes longer gets a line whatever the share; None for no
            such line.
        server_timing: Whether answers have `Server-Timing`.
        trace: Whether spans are made for OpenTelemetry.
        compress: The codings in which answers may be sent, such as `zstd,gzip`; empty for none.
        compress_from_bytes: The size of the smallest answer that is compressed.
        protocols: Which protocols of other servers are spoken besides, by their names or as objects
            ("Protocols" in the docs); None for all that carpool knows, as far as they fit the
            models.
        accept_compressed: Whether compressed request bodies are read.

    Attributes:
        max_body_bytes: Size of the largest request body.
        accepts_compressed: Whether compressed request bodies are read.
        access: Who may ask; None if everybody may.
        observer: Watches requests and their answers; None if nothing asks for it.
        request_ids: Gives ids to requests that bring none.
        own_metrics: The metrics that models have of their own; None if nobody collects them.
        root_path: What a proxy puts before each path.
        is_tls: Whether the server that runs it speaks TLS; the server says so.
        wanted_headers: The headers that the app or one of its protocols looks at.
        endpoints: The services as the app serves them, in order.
        wants_heads: Whether a model of the app asks for whole requests.
        key_headers: The headers by which requests of a model may not share a batch; see `key=`.
        refusing: Why requests are refused now; None while the services run.
        admin: Changes the services while they run.
        on_new_routes: What is called when services have been added or removed.
        shares: The `share` of each service.
        connection_shares: How many connections of our own server each service has; None under
            another one.
        routes: What answers, by path and method.

    Raises:
        ValueError: A setting is out of range, or two services have one name.
        TypeError: A setting has the wrong type, or JSON and msgpack cannot express a type hint.
        OSError: The file of keys cannot be read.
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
        access_log_slow_ms: float | None = None,
        server_timing: bool = False,
        trace: bool = False,
        compress: str = "",
        compress_from_bytes: int = 1024,
        protocols: Sequence[str | HttpProtocol] | None = None,
        accept_compressed: bool = False,
    ) -> None:
        check_services(services)
        check_callable("output", output, "a worker's name, whether it is an error, and a line")
        joins, self._elsewhere = joins_of(services, join), elsewhere_of(on)
        self._output = output
        self._errors = ErrorAnswers(timeout_status, debug)
        compression = new_compression(compress, compress_from_bytes)
        lines = Lines(access_log, inf if access_log_slow_ms is None else access_log_slow_ms / 1000)
        super().__init__(
            [
                Endpoint(service, output, joins[i], self._elsewhere, is_first=i == 0)
                for i, service in enumerate(services)
            ],
            new_observer(lines, server_timing, trace, compression, self._errors.ids),
        )
        self.request_ids = self._errors.ids
        self.max_body_bytes = at_least("max_body_bytes", max_body_bytes, 1)
        self.accepts_compressed = flag("accept_compressed", accept_compressed)
        self.root_path = check_root_path(root_path)
        self.is_tls = False
        self.access = new_access(api_keys, allow_host, cors_origin, open_readyz=open_readyz, root_path=self.root_path)
        self.own_metrics: OwnMetricsOfWorkers | None = None
        self._make_pages(nonnegative_seconds("idle_check_s", idle_check_s))
        self._named_protocols = protocols_named(protocols)
        self._has_admin_address = has_admin_address
        self._is_patient = when_full_waits(when_full)
        self.on_new_routes: list[Callable[[], None]] = []
        self.connection_shares: ConnectionShares | None = None
        self.serve_at(self.endpoints)

    def _make_pages(self, idle_check_s: float) -> None:
        """Make what answers at the addresses that belong to no model."""
        self.admin = Admin(self.endpoints, self.error, self.run_beside, ServiceList(self))
        self._pages = StatusPages(self, idle_check_s, self._errors.timeout_status)
        self._dashboard = Dashboard(self.running_stats, self)
        self._at_start.append(self._dashboard.begin)
        self._at_stop.append(self._dashboard.close)
        self._admin_pages: dict[bytes, Handler] = {b"/metrics": self._pages.metrics, **self._dashboard.pages}

    def new_endpoint(self, service: Service, *, is_first: bool) -> Endpoint:
        """Make an endpoint of a service that is added. Raises ValueError if workers must join."""
        (join,) = joins_of([service], None)
        return Endpoint(service, self._output, join, self._elsewhere, is_first=is_first)

    def check_addresses(self, endpoints: Sequence[Endpoint]) -> None:
        """Raise ValueError if these services cannot all have their addresses."""
        try:
            self._tables(endpoints)
        except ValueError:
            raise
        except BaseException as error:  # a protocol may be the user's
            raise ValueError(f"a protocol has no addresses for it: {text_of(error)}") from error

    def serve_at(self, endpoints: Sequence[Endpoint]) -> None:
        """Answer at the addresses of these services from now on, and of no others.

        Raises:
            ValueError: Two of them have one address.
        """
        self._protocols, self._models, self.routes = self._tables(endpoints)
        self._admission = HeadAdmission(self, self._models, self.routes, self.access, self._protocols)
        self._note_wanted_headers(endpoints)
        self.shares: dict[object, float] = {endpoint: endpoint.service.share for endpoint in endpoints}
        self._pages.forget_document()
        for endpoint in endpoints:
            if self.observer is not None and endpoint.driver is not None:
                self.observer.watch(endpoint.driver)
        for note in self.on_new_routes:
            note()
        self.services_changed()

    def _tables(self, endpoints: Sequence[Endpoint]) -> tuple[ProtocolRoutes, PredictRoutes, Routes]:
        """Make what answers at addresses of services. Raises ValueError if two share one."""
        served = tuple(endpoints)
        protocols = ProtocolRoutes(
            self._named_protocols, served, self, self.problem, is_patient=self._is_patient, root_path=self.root_path
        )
        models = PredictRoutes(self, protocols, self._is_patient)
        routes = self._make_routes(served, models)
        for path in protocols.replaced:
            routes.pop(path, None)
            routes.pop(self.root_path.encode() + path, None)
        return protocols, models, routes

    def _note_wanted_headers(self, endpoints: Sequence[Endpoint]) -> None:
        """Note which headers the app, its protocols, keys and observer look at."""
        self.wants_heads = any(endpoint.formats.wants_heads for endpoint in endpoints)
        keys = [endpoint.key_header for endpoint in endpoints]
        self.key_headers = frozenset([key for key in keys if key is not None])
        lookers = [each.wanted_headers for each in (self.access, self.observer) if each is not None]
        self.wanted_headers = WANTED_HEADERS.union(self.key_headers, self._protocols.headers, *lookers)

    @property
    def services(self) -> list[Service]:
        """The services, in order."""
        return [endpoint.service for endpoint in self.endpoints]

    async def __call__(self, scope: asgi.Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        await asgi.serve(self, scope, receive, send)

    # -- one request

    def admit(self, head: Head) -> HttpResponse | None:
        """Judge a request by its method, address and headers.

        Returns the response if the request is refused. Otherwise returns None and sets `head.route`
        and, for a model's address, `head.ask`; the front reads the body next and calls `handle`.
        """
        return self._admission.admit(head)

    def refuse(self, head: Head | None, error: CarpoolError) -> HttpResponse:
        """Return the response to a request that is broken off after its admission, and count it.

        Args:
            head: The request's head; None if it was not received.
            error: Why the request is refused.
        """
        if head is not None and head.model is not None:
            count_refusal(head.model, error)
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
        path, model = printable(repr(exchange.head.path)), exchange.head.model
        about = {"code": "internal_error", **({} if model is None else {"model": model.name})}
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
        if self.observer is not None:
            self.observer.left(exchange, monotonic())
        ask, item = exchange.head.ask, exchange.item
        if isinstance(item, ExchangeItems):
            item.cancel()
        elif ask is not None and ask.endpoint.driver is not None:
            ask.endpoint.driver.cancel(exchange)
        if exchange.state == NEW:
            exchange.state = DONE  # its body may be being read in a thread

    def protocol_routes(self) -> Sequence[ShownRoute]:
        """Return the addresses of protocols that fit the models."""
        return self._protocols.shown()

    def error(self, head: Head | None, error: Exception) -> HttpResponse:
        """Return the response to a request that ended with `error`."""
        response = self.plain_error(head, error)
        if head is None or head.protocol is None:
            return response
        return self._protocols.in_words_of(head.protocol, response)

    def plain_error(self, head: Head | None, error: Exception) -> HttpResponse:
        """Return the response to a request that ended with `error`, never in a protocol's words."""
        if head is None:
            return self._errors.response(b"", error)
        model = head.model.name if head.model is not None else ""
        return self._errors.response(head.request_id, error, model, head.caller)

    @property
    def compresses(self) -> bool:
        """Whether answers may be compressed."""
        return self.observer is not None and self.observer.compresses

    def compressed(self, head: Head, response: HttpResponse) -> HttpResponse:
        """Return an answer in a coding that its client accepts, or as it is."""
        return response if self.observer is None else self.observer.compressed(head, response)

    # -- the routes

    def _make_routes(self, endpoints: Sequence[Endpoint], models: PredictRoutes) -> Routes:
        """Return, by path and method, what answers. Raises ValueError if two services share one."""
        pages = {
            b"/livez": self._pages.livez,
            b"/readyz": self._pages.readyz,
            b"/openapi.json": self._pages.openapi,
            **dict(pages_at(b"/docs")),
            b"/": self._pages.overview,
            **{as_routes_are(ready_path(each.name).encode()): self._pages.ready_page(each) for each in endpoints},
        }
        routes = of_pages(pages)
        for_operators = {} if self._has_admin_address else self._operators_routes()
        add_models(routes, endpoints, models.predict, models.predict_list)
        add_options(routes, for_operators, self.root_path)
        return routes

    def _operators_routes(self) -> Routes:
        """Return what answers where those who run the server ask."""
        return {**of_pages(self._admin_pages), **of_orders(self.admin.routes)}

    def admin_admission(self, access: Access | None) -> HeadAdmission:
        """Return what judges the requests at the address of those who run the server."""
        pages = of_pages({b"/livez": self._pages.livez, b"/readyz": self._pages.readyz})
        return HeadAdmission(self, self._models, {**pages, **self._operators_routes()}, access)

    def running_stats(self) -> list[Stats]:
        """Return the statistics of the services that run."""
        return [endpoint.driver.stats for endpoint in self.endpoints if endpoint.driver is not None]
