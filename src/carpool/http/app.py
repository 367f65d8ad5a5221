"""The app has the meaning of each address, and the answer to each outcome in HTTP. It has no
socket.

Two fronts lead here, our own HTTP/1.1 connection (`connection.py`) and ASGI (`asgi.py`). A front
asks `admit` once it has a request's head, reads the body unless that was refused, makes an
`Exchange` of both and calls `handle`. The answer comes back through `Exchange.respond`, at once or
later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Unpack, cast

from carpool.engine.clock import monotonic
from carpool.engine.foreign import text_of, traceback_of
from carpool.engine.logger import logger
from carpool.engine.observe.log import LineSink, print_line, printable
from carpool.engine.request import DONE, NEW
from carpool.errors import CarpoolError, Unavailable
from carpool.http import asgi
from carpool.http.access import Access, new_access
from carpool.http.admin import Admin, ServiceList, check_services
from carpool.http.asgi import Receive, Send
from carpool.http.codec import NotReady, as_routes_are
from carpool.http.compression import new_compression
from carpool.http.endpoint import Endpoint, ready_path
from carpool.http.error_answers import ErrorAnswers
from carpool.http.exchange import WANTED_HEADERS, Exchange, Head, HttpResponse, ServedModel
from carpool.http.items import ExchangeItems
from carpool.http.observer import Lines, new_observer
from carpool.http.protocol_routes import ProtocolRoutes, in_words_of
from carpool.http.protocols import protocols_named
from carpool.http.protocols.base import HttpProtocol, ShownRoute
from carpool.http.routes import (
    Handler,
    HeadAdmission,
    PredictRoutes,
    Routes,
    add_models,
    add_options,
    check_root_path,
    count_refusal,
    of_orders,
    of_pages,
)
from carpool.http.server_pages import Dashboard, StatusPages, pages_at
from carpool.http.shares import ConnectionShares
from carpool.service.checks import at_least, check_callable, flag, nonnegative_seconds, when_full_waits
from carpool.service.elsewhere import Elsewhere, elsewhere_of
from carpool.service.join import Join, joins_of
from carpool.service.service import Service
from carpool.service.settings import AnswerSettings, shows, types_and_defaults

if TYPE_CHECKING:
    from carpool.engine.observe.own_metrics import OwnMetricsOfWorkers
    from carpool.engine.observe.stats import Stats


class AppSettings(AnswerSettings, total=False):
    """The settings of an `App`, which explains those that no server has."""

    max_body_bytes: Annotated[int, 16 * 2**20]
    idle_check_s: Annotated[float, 30.0]
    output: Annotated[LineSink, print_line]
    join: Annotated[str | Join | None, None]
    on: Annotated[Literal["ray"] | Elsewhere | None, None]
    has_admin_address: Annotated[bool, False]
    protocols: Annotated[Sequence[str | HttpProtocol] | None, None]


_DEFAULTS: Final = {name: default for name, (_, default) in types_and_defaults(AppSettings).items()}


class App:
    """An HTTP app for one or several services, to run under `carpool serve` or any ASGI server.

    Args:
        services: Those to serve; the first one also answers at `/predict`.
        settings: By name; each can be left out. Those of a server that are about requests and
            answers, such as `api_keys` and `compress`, are in "Settings" in the docs. Besides:
            `max_body_bytes`, the size of the largest request body.
            `idle_check_s`: once there has been no good answer for this long, `/readyz` runs an
            example through the model.
            `output`, called with each line that a worker prints.
            `join`, where workers of stages with `join=True` connect: a `Join`, or the path of a
            Unix socket. Only one of the services can have such stages.
            `on`, where worker processes run: "ray", or a `carpool.ray.Cluster`; None for this
            machine.
            `has_admin_address`, whether the pages for those who run the server are at another
            address.
            `protocols`, which protocols of other servers are spoken besides, by their names or as
            objects ("Protocols" in the docs); None for all of carpool's own, as far as they fit the
            models.

    Attributes:
        max_body_bytes: Size of the largest request body.
        accepts_compressed: Whether compressed request bodies are read.
        access: Who may ask; None if everybody may.
        observer: Watches requests and their answers; None if nothing asks for it.
        request_ids: Gives ids to requests that bring none.
        own_metrics: The metrics that models have of their own; None if nobody collects them.
        root_path: The path that a proxy puts before each address.
        is_tls: Whether the server that runs it speaks TLS; the server says so.
        wanted_headers: The headers that the app or one of its protocols looks at.
        endpoints: The services as the app serves them, in order.
        wants_heads: Whether a model of the app asks for whole requests.
        key_headers: The headers by which requests of a model may not share a batch; see `key=`.
        refusing: Why requests are refused that `refusal_of` does not except; None while all
            services run.
        coming: Services that are being started while the others run, and are not served yet.
        is_leaving: Whether the app still answers, but will be drained in a moment.
        admin: Changes the services while they run.
        on_new_routes: Functions that are called when services have been added or removed.
        shares: The `share` of each service.
        connection_shares: How many connections of our own server each service has; None under
            another one.
        routes: The functions that answer, by path and method.

    Raises:
        ValueError: A setting is out of range, or two services have one name.
        TypeError: A setting has the wrong type, or JSON and msgpack cannot express a type hint.
        OSError: The file of keys cannot be read.
    """

    @shows(AppSettings)
    def __init__(self, *services: Service, **settings: Unpack[AppSettings]) -> None:
        for name in settings:
            if name not in _DEFAULTS:
                raise TypeError(f"App.__init__() got an unexpected keyword argument {name!r}")
        chosen = cast(AppSettings, {**_DEFAULTS, **settings})
        check_services(services)
        self._output = output = chosen["output"]
        check_callable("output", output, "a worker's name, whether it is an error, and a line")
        joins, self._elsewhere = joins_of(services, chosen["join"]), elsewhere_of(chosen["on"])
        self._errors = ErrorAnswers(chosen["timeout_status"], chosen["debug"])
        compression = new_compression(chosen["compress"], chosen["compress_from_bytes"])
        slow_ms = chosen["access_log_slow_ms"]
        lines = Lines(chosen["access_log"], inf if slow_ms is None else slow_ms / 1000)
        self.endpoints = [
            Endpoint(service, output, joins[i], self._elsewhere, is_first=i == 0) for i, service in enumerate(services)
        ]
        self.observer = new_observer(lines, chosen["server_timing"], chosen["trace"], compression, self._errors.ids)
        self._begin_life()
        self.request_ids = self._errors.ids
        self.max_body_bytes = at_least("max_body_bytes", chosen["max_body_bytes"], 1)
        self.accepts_compressed = flag("accept_compressed", chosen["accept_compressed"])
        self.root_path = check_root_path(chosen["root_path"])
        self.is_tls = False
        self.access = new_access(
            chosen["api_keys"],
            chosen["allow_host"],
            chosen["cors_origin"],
            open_readyz=chosen["open_readyz"],
            root_path=self.root_path,
        )
        self.own_metrics: OwnMetricsOfWorkers | None = None
        self._make_pages(nonnegative_seconds("idle_check_s", chosen["idle_check_s"]))
        self._named_protocols = protocols_named(chosen["protocols"])
        self._has_admin_address = chosen["has_admin_address"]
        self._is_patient = when_full_waits(chosen["when_full"])
        self.on_new_routes: list[Callable[[], None]] = []
        self.connection_shares: ConnectionShares | None = None
        self.serve_at(self.endpoints)

    def _make_pages(self, idle_check_s: float) -> None:
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
        self.wants_heads = any(endpoint.formats.wants_heads for endpoint in endpoints)
        keys = [endpoint.key_header for endpoint in endpoints]
        self.key_headers = frozenset([key for key in keys if key is not None])
        lookers = [each.wanted_headers for each in (self.access, self.observer) if each is not None]
        self.wanted_headers = WANTED_HEADERS.union(self.key_headers, self._protocols.headers, *lookers)

    @property
    def services(self) -> list[Service]:
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
        """Give up an exchange whose client has left."""
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
        if head is None or head.in_own_words is None:
            return response
        return in_words_of(head.in_own_words, response)

    def plain_error(self, head: Head | None, error: Exception) -> HttpResponse:
        """Return the response to a request that ended with `error`, never in a protocol's words."""
        if head is None:
            return self._errors.response(b"", error)
        model = head.model.name if head.model is not None else ""
        return self._errors.response(head.request_id, error, model, head.caller)

    @property
    def compresses(self) -> bool:
        return self.observer is not None and self.observer.compresses

    def compressed(self, head: Head, response: HttpResponse) -> HttpResponse:
        return response if self.observer is None else self.observer.compressed(head, response)

    # -- the routes

    def _make_routes(self, endpoints: Sequence[Endpoint], models: PredictRoutes) -> Routes:
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
        return {**of_pages(self._admin_pages), **of_orders(self.admin.routes)}

    def admin_admission(self, access: Access | None) -> HeadAdmission:
        pages = of_pages({b"/livez": self._pages.livez, b"/readyz": self._pages.readyz})
        return HeadAdmission(self, self._models, {**pages, **self._operators_routes()}, access)

    def running_stats(self) -> list[Stats]:
        """Return the statistics of the services that run."""
        return [endpoint.driver.stats for endpoint in self.endpoints if endpoint.driver is not None]

    # -- its life: services are started, drained and stopped, and perhaps started once more

    def _begin_life(self) -> None:
        self.coming: list[Endpoint] = []
        self.refusing: CarpoolError | None = Unavailable("the service is starting", code="starting")
        self._draining = self.is_leaving = False
        self._loop: asyncio.AbstractEventLoop | None = None  # the app was started on it
        self._starting: asyncio.Task[None] | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self._at_start: list[Callable[[], None]] = []
        self._at_stop: list[Callable[[], None]] = []
        self._services_changed: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Start all services, also once more after a stop; until then requests are answered 503.

        Raises:
            StartupError: A worker could not load its model.
            RuntimeError: The app is running already.
        """
        await self._reset()
        await self._begin()

    def announce_end(self) -> None:
        """Have `/readyz` say from now on that the app drains, although it still answers."""
        self.is_leaving = True

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
        for end in self._at_stop:
            end()
        for task in self._checks:
            task.cancel()
        stops = [endpoint.stop(drain) for endpoint in self.endpoints]
        await asyncio.gather(*stops, *[endpoint.stop(drain=False) for endpoint in self.coming])

    async def failed(self) -> None:
        """Wait, once the app has started, until none of its services can answer any more."""
        loop = asyncio.get_running_loop()
        while healthy := [each.driver for each in self.endpoints if each.driver is not None and not each.has_failed]:
            self._services_changed = loop.create_future()
            failures = [asyncio.ensure_future(driver.failed()) for driver in healthy]
            try:
                await asyncio.wait([self._services_changed, *failures], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for failure in failures:
                    failure.cancel()

    def services_changed(self) -> None:
        """Have it noticed that services were added or removed."""
        if self._services_changed is not None and not self._services_changed.done():
            self._services_changed.set_result(None)

    async def ensure_started(self, *, anew: bool = False) -> None:
        """Start the app unless it has been started, and wait until it is up.

        A mounted app without a lifespan is started like this by its first request. If the event
        loop on which it was started has ended, it is started again, since test clients without a
        lifespan run each request on an event loop of its own.

        Args:
            anew: Whether an app that was stopped is started again, as a second lifespan asks for;
                otherwise it stays stopped.

        Raises:
            StartupError: A worker could not load its model. Later calls raise it, too.
            RuntimeError: The app runs on another event loop that has not been closed.
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
        for begin in self._at_start:
            begin()
        try:
            if not self._draining:
                await asyncio.gather(*[self._start_service(endpoint) for endpoint in self.endpoints])
            if self._draining:
                raise Unavailable("the service was closed while it was starting", code="draining")
        except BaseException:
            await self.stop(drain=False)
            raise
        self.refusing = None

    async def _start_service(self, endpoint: Endpoint) -> None:
        await endpoint.start()
        if self.observer is not None and endpoint.driver is not None:
            self.observer.watch(endpoint.driver)

    def refusal_of(self, endpoint: ServedModel | None) -> CarpoolError | None:
        """Return why a request is refused now; None if it is not.

        While the app starts, a service that is up does not wait for those that are still loading.

        Args:
            endpoint: Whom the request asks; None if its body will say.
        """
        if self.refusing is None or self._draining:
            return self.refusing
        asked = self.endpoints if endpoint is None else [endpoint]
        if any(each.driver is not None for each in asked):
            return None
        problems = self.problems()
        return NotReady("starting", {each.name: problems[each.name] for each in asked if each.name in problems})

    @property
    def is_elsewhere(self) -> bool:
        """Whether the app was started on another event loop than the running one."""
        return self._loop is not None and self._loop is not asyncio.get_running_loop()

    async def _reset(self) -> None:
        if self._loop is None:
            return
        if self.is_elsewhere and not self._loop.is_closed():
            raise RuntimeError("this app was started on another event loop, which is still running: use it there")
        if not (self._draining or self.is_elsewhere):
            raise RuntimeError("this app is running already")
        starting = self._starting
        if starting is not None and not self.is_elsewhere:
            await asyncio.wait([starting])  # a start that was interrupted ends the services that it had begun
        await asyncio.gather(*[endpoint.stop(drain=False) for endpoint in self.endpoints])
        if self._starting is not starting:
            return  # another caller was faster
        for endpoint in self.endpoints:
            endpoint.reset()
        self.refusing = Unavailable("the service is starting", code="starting")
        self._loop = self._starting = None
        self._draining = self.is_leaving = False

    @property
    def served(self) -> list[Endpoint]:
        """The services that take requests."""
        return [endpoint for endpoint in self.endpoints if not endpoint.is_leaving]

    def problems(self) -> dict[str, str]:
        problems = {endpoint.name: endpoint.problem for endpoint in self.served}
        return {name: problem for name, problem in problems.items() if problem is not None}

    def unreadiness(self, problems: Mapping[str, str]) -> NotReady | None:
        """Return why no request should be sent to the app now; None if one service would answer."""
        if self._draining or self.is_leaving:
            return NotReady("draining")
        if self.refusing is not None:
            return NotReady("starting", problems)
        return NotReady("not_ready", problems) if len(problems) == len(self.served) else None

    def problem(self) -> str | None:
        """Return why no service of the app could answer now, in words; None if one could."""
        unready = self.unreadiness(self.problems())
        return None if unready is None else str(unready)

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done beside the requests, until the app stops."""
        task = asyncio.ensure_future(work)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)


_LARGEST_BODY = 64 * 1024


class AdminApp:
    """The app of a connection to the pages that are not for everybody."""

    def __init__(self, app: App, access: Access | None) -> None:
        self.access = access
        self.max_body_bytes = _LARGEST_BODY
        self.wants_heads = False
        self.shares: dict[object, float] = {}
        self.observer = app.observer
        self.request_ids = app.request_ids
        self.root_path = app.root_path
        self.wanted_headers = WANTED_HEADERS.union(
            *[each.wanted_headers for each in (access, app.observer) if each is not None]
        )
        self.admit = app.admin_admission(access).admit
        self.handle, self.route_raised, self.refuse = app.handle, app.route_raised, app.refuse
        self.error, self.cancel, self.pause = app.error, app.cancel, app.pause
