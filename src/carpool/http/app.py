"""The app: what each address means and what each outcome is in HTTP. It knows no socket and no server.

Two doors lead here, our own HTTP/1.1 connection (`connection.py`) and ASGI (`asgi.py`). Each brings an `Exchange`: it
asks `admit` once the headers are there, reads the body if nothing speaks against it, and calls `handle`; the answer
comes back through `Exchange.respond`, now or later.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import re
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from carpool.clock import monotonic
from carpool.core.roster import PlaceState
from carpool.drive.output import LineSink, print_line
from carpool.errors import CarpoolError, InvalidRequest, ModelError, Unavailable
from carpool.foreign import text_of, traceback_of
from carpool.hints import schema
from carpool.http import asgi, openapi
from carpool.http.codec import Formats, Refusal, allow, as_json, content_length, error_response, too_large
from carpool.http.exchange import Exchange, Head, HttpResponse
from carpool.http_request import pack_head
from carpool.logger import logger
from carpool.observe.log import printable
from carpool.request import DEFAULT_LANE, Lane
from carpool.service.settings import LARGEST_PRIORITY, at_least, flag, function, not_negative
from carpool.service.weigh import weigher_of
from carpool.wire.payload import CUSTOM

if TYPE_CHECKING:
    from carpool.drive.aio import Driver
    from carpool.service.handle import AsyncHandle
    from carpool.service.service import Service


_REQUEST_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
_CHECK_TIMEOUT_S = 5.0
_PLAIN = b"text/plain; charset=utf-8"


class Endpoint:
    """A service as the app serves it.

    Attributes:
        handle: the running service; driver: takes its requests. Both None until it is started.
        weigher: of its items, if they do not all count for one.
        checked_at: when its example last ran through it.
    """

    def __init__(self, service: Service, output: LineSink) -> None:
        self.service = service
        self.output = output
        self.name = service.name
        self.formats = Formats(service.stages[0].traits, service.stages[-1].traits)
        self.weigher = weigher_of(service.stages[0])
        self.handle: AsyncHandle | None = None
        self.driver: Driver | None = None
        self.checked_at = 0.0

    async def start(self) -> None:
        """Start the service; its workers have run the examples when this returns."""
        self.handle = self.service.run_async(output=self.output)
        await self.handle.start()
        self.driver = self.handle.driver
        self.checked_at = monotonic()

    async def stop(self, drain: bool) -> None:
        """Stop it, if it was started."""
        if self.handle is not None:
            await self.handle.close(drain)

    def forget(self) -> None:
        """It has been stopped, and may be started anew."""
        self.handle = self.driver = None

    @property
    def problem(self) -> str | None:
        """Why the model could not answer now; None if it could."""
        if self.driver is None:
            return f"{self.name} is starting"
        if self.driver.has_failed:
            return f"{self.name} has failed"
        for stage in self.driver.stats.stages:
            if stage.roster is not None and stage.roster.failed:
                return f"stage {stage.name} of {self.name} has failed"
            if not stage.workers[PlaceState.READY]:
                return f"stage {stage.name} of {self.name} has no worker that is ready"
        return None

    def is_stale(self, idle_s: float) -> bool:
        """Whether there has been no good answer for so long that its example should be tried."""
        if self.driver is None or not self.service.stages[0].traits.examples:
            return False
        return monotonic() - max(self.driver.stats.last_ok_at, self.checked_at) > idle_s

    async def try_example(self) -> str | None:
        """Run an example through the model; what is wrong, or None."""
        assert self.handle is not None
        try:
            await self.handle.predict(self.service.stages[0].traits.examples[0], timeout_s=_CHECK_TIMEOUT_S)
        except Exception as error:
            logger.error("model %s no longer answers its example: %s", self.name, error)
            return f"{self.name} no longer answers its example"
        self.checked_at = monotonic()
        return None


Route = Callable[[Exchange], None]


class App:
    """An HTTP app for one or several services, to run under `carpool serve` or any ASGI server.

    Args:
        services: the first one also answers at `/predict`.
        when_full: "refuse" a request with 429 while the queue is full, or let it "wait" until its deadline.
        timeout_status: status of a missed deadline, 504 or 408.
        max_body_bytes: largest request body.
        debug: whether error bodies show the texts of user exceptions.
        idle_check_s: after so long without a good answer, `/readyz` runs an example through the model.
        output: what to do with each line that a worker prints.

    Raises:
        ValueError: a setting is out of range, or two services have one name.
        TypeError: a setting is of the wrong kind, or a hint cannot be read from JSON or msgpack.
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
    ) -> None:
        _check_services(services)
        if when_full not in ("refuse", "wait"):
            raise ValueError(f'when_full must be "refuse" or "wait", not {when_full!r}')
        if timeout_status not in (504, 408):
            raise ValueError(f"timeout_status must be 504 or 408, not {timeout_status!r}")
        function("output", output, "a worker's name, whether it is an error, and a line")
        self.max_body_bytes = at_least("max_body_bytes", max_body_bytes, 1)
        self.endpoints = [Endpoint(service, output) for service in services]
        self.wants_heads = any(endpoint.formats.wants_heads for endpoint in self.endpoints)
        self.refusing: CarpoolError | None = Unavailable("the service is starting", code="starting")
        self._draining = False
        self._wait = when_full == "wait"
        self._timeout_status = timeout_status
        self._debug = flag("debug", debug)
        self._idle_check_s = not_negative("idle_check_s", idle_check_s)
        self._ids = (f"{secrets.token_hex(4)}-{n}" for n in itertools.count(1))
        self._document: bytes | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # on which it was started
        self._starting: asyncio.Task[None] | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self._routes = self._make_routes()

    @property
    def services(self) -> list[Service]:
        """The services, in order."""
        return [endpoint.service for endpoint in self.endpoints]

    # -- life

    async def start(self) -> None:
        """Start all services; until then requests are answered 503. An app that was stopped is started anew.

        Raises:
            StartupError: a worker could not load its model.
            RuntimeError: it is running.
        """
        await self._become_new()
        await self._begin()

    def drain(self) -> None:
        """Answer 503 from now on, not ready; requests inside go on."""
        self._draining = True
        self.refusing = Unavailable("the service is shutting down", code="draining")
        for endpoint in self.endpoints:
            if endpoint.driver is not None:
                endpoint.driver.close(self.refusing)

    async def stop(self, drain: bool = True) -> None:
        """Stop all services; with `drain` the requests inside are answered first."""
        self.drain()
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*[endpoint.stop(drain) for endpoint in self.endpoints])

    async def failed(self) -> None:
        """Once started: wait until none of the services can answer any more."""
        await asyncio.gather(*[endpoint.handle.failed() for endpoint in self.endpoints if endpoint.handle is not None])

    async def ensure_started(self, *, anew: bool = False) -> None:
        """Start if that has not been done: at the first request where there is no lifespan, in a mounted app say.

        Where the event loop that it was started on has ended, it is started anew: test clients without a lifespan run
        each request on a loop of its own.

        Args:
            anew: whether to start once more after it was stopped, as a second lifespan asks for; else it stays so.

        Raises:
            StartupError: a worker could not load its model; each time if need be.
            RuntimeError: it runs on another event loop, which is still there.
        """
        if (anew and self._draining) or self.is_elsewhere:
            await self._become_new()
        if self._starting is None and not self._draining:
            asgi.warn_of_siblings()
            self._begin()
        if self._starting is not None:
            await asyncio.shield(self._starting)

    def _begin(self) -> asyncio.Task[None]:
        """The start, of which there is one however many wait for it."""
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = self._loop.create_task(self._start())
        return self._starting

    async def _start(self) -> None:
        try:
            if not self._draining:
                await asyncio.gather(*[endpoint.start() for endpoint in self.endpoints])
            if self._draining:
                raise Unavailable("the service was closed while it was starting", code="draining")
        except BaseException:
            await self.stop(drain=False)
            raise
        self.refusing = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether it was started on another event loop than the present one."""
        return self._loop is not None and self._loop is not asyncio.get_running_loop()

    async def _become_new(self) -> None:
        """Forget a life that is over. Raises RuntimeError if it is not."""
        if self._loop is None:
            return
        if self.is_elsewhere and not self._loop.is_closed():
            raise RuntimeError("this app was started on another event loop, which is still running: use it there")
        if not (self._draining or self.is_elsewhere):
            raise RuntimeError("this app is running already")
        life = self._starting
        if life is not None and not self.is_elsewhere:
            await asyncio.wait([life])  # if it was stopped on the way, it ends what it had begun
        await asyncio.gather(*[endpoint.stop(drain=False) for endpoint in self.endpoints])
        if self._starting is not life:
            return  # somebody else was faster
        for endpoint in self.endpoints:
            endpoint.forget()
        self.refusing = Unavailable("the service is starting", code="starting")
        self._loop = self._starting = None
        self._draining = False

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """ASGI."""
        await asgi.serve(self, scope, receive, send)

    # -- a request

    def admit(self, head: Head) -> HttpResponse | None:
        """Look at method, address and headers. A response means no; None means: read the body, call `handle`."""
        try:
            methods = self._routes.get(head.path)
            if methods is None:
                raise Refusal(404, "not_found")
            if head.method not in methods:
                raise Refusal(405, "method_not_allowed", headers=allow(name.decode() for name in methods))
            head.app = self
            head.route, endpoint = methods[head.method]
            head.endpoint = endpoint
            if content_length(head.headers) > self.max_body_bytes:
                raise too_large(self.max_body_bytes)
            if endpoint is not None:
                self._admit_predict(head, endpoint)
        except CarpoolError as error:
            return self.refuse(head, error)
        return None

    def refuse(self, head: Head | None, error: CarpoolError) -> HttpResponse:
        """The answer to a request that is not let in, or broken off before it was complete; counted for its model."""
        if head is not None and head.endpoint is not None and head.endpoint.driver is not None:
            head.endpoint.driver.stats.refused(error)
        return self.error(head, error)

    def handle(self, exchange: Exchange) -> None:
        """Answer an admitted exchange whose body has been read."""
        try:
            exchange.head.route(exchange)
        except BaseException as error:
            self.route_raised(exchange, error)

    def route_raised(self, exchange: Exchange, error: BaseException) -> None:
        """The guard of all routes: one that raised is a 500, whatever it raised, and nobody else hears of it.

        A door that calls `head.route` by itself calls this in the same way as `handle` does.
        """
        path = printable(repr(exchange.head.path))
        logger.error("%s could not be answered:\n%s", path, printable(traceback_of(error)))
        exchange.respond(self.refuse(exchange.head, CarpoolError("a route raised an error")))

    def gone(self, exchange: Exchange) -> None:
        """The client has closed its connection: whatever is still queued for it is not run."""
        endpoint = exchange.head.endpoint
        if endpoint is not None and endpoint.driver is not None:
            endpoint.driver.cancel(exchange)

    def error(self, head: Head | None, error: Exception) -> HttpResponse:
        """The answer to a request that ended with `error`."""
        given = head.headers.get(b"x-request-id", b"") if head is not None else b""
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else next(self._ids)
        if isinstance(error, ModelError):
            message = printable(text_of(error)).replace("\n", "\\n")
            logger.error("request %s: %s\n%s", request_id, message, printable(error.traceback))
        try:
            return error_response(error, request_id, timeout_status=self._timeout_status, debug=self._debug)
        except BaseException as broken:  # it is of a class of the user's, and its status or time says nothing
            logger.error("request %s: its error cannot be told:\n%s", request_id, printable(traceback_of(broken)))
            return error_response(CarpoolError("the error cannot be told"), request_id)

    def _admit_predict(self, head: Head, endpoint: Endpoint) -> None:
        headers = head.headers
        if self.refusing is not None:
            raise copy.copy(self.refusing)  # each raise adds its frames to the traceback of what it raises
        if headers.get(b"content-encoding", b"identity") != b"identity":
            text = "compressed request bodies are not read"
            raise InvalidRequest(text, status=415, code="unsupported_media_type")
        head.format, head.accept = endpoint.formats.choose(headers.get(b"content-type"), headers.get(b"accept"))
        timeout = headers.get(b"x-request-timeout-ms")
        limit = endpoint.service.timeout_s
        head.timeout_s = limit if timeout is None else min(limit, _milliseconds(timeout))
        priority = headers.get(b"x-request-priority")
        head.lane = DEFAULT_LANE if priority is None else _lane(priority)
        head.content_type = endpoint.formats.types[head.accept]
        if endpoint.formats.wants_heads and head.format == CUSTOM:
            head.packed = pack_head(head.path, head.query, head.fields)
            head.route = self._predict_request

    # -- the routes

    def _make_routes(self) -> dict[bytes, dict[bytes, tuple[Route, Endpoint | None]]]:
        """By address and method: who answers, and the model asked."""
        routes: dict[bytes, dict[bytes, tuple[Route, Endpoint | None]]] = {
            path: {b"GET": (route, None), b"HEAD": (route, None)}
            for path, route in (
                (b"/livez", self._livez),
                (b"/readyz", self._readyz),
                (b"/metrics", self._metrics),
                (b"/openapi.json", self._openapi),
            )
        }
        routes[b"/predict"] = {b"POST": (self._predict, self.endpoints[0])}
        for endpoint in self.endpoints:
            routes[openapi.predict_path(endpoint.name).encode()] = {b"POST": (self._predict, endpoint)}
        return routes

    def _predict(self, exchange: Exchange) -> None:
        head = exchange.head
        driver = head.endpoint.driver  # type: ignore[union-attr]
        weigher = head.endpoint.weigher  # type: ignore[union-attr]
        if weigher is not None:
            try:
                exchange.size = weigher.of_encoded(exchange.body, exchange.format)
            except CarpoolError as error:
                exchange.respond(self.refuse(head, error))
                return
        exchange.deadline = driver.clock() + head.timeout_s  # type: ignore[union-attr]
        exchange.patient = self._wait
        driver.submit(exchange)  # type: ignore[union-attr]

    def _predict_request(self, exchange: Exchange) -> None:
        """Likewise for a model whose `decode` asks for all of a request."""
        head = exchange.head
        exchange.item = [head.packed, exchange.body]
        exchange.nbytes += len(head.packed)
        self._predict(exchange)

    def _livez(self, exchange: Exchange) -> None:
        exchange.respond(HttpResponse(200, b"ok\n", _PLAIN))

    def _readyz(self, exchange: Exchange) -> None:
        stale = [endpoint for endpoint in self.endpoints if endpoint.is_stale(self._idle_check_s)]
        problem = self._problem()
        if problem is not None or not stale:
            self._respond_readiness(exchange, problem)
            return
        task = asyncio.ensure_future(self._try_examples(exchange, stale))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _try_examples(self, exchange: Exchange, endpoints: list[Endpoint]) -> None:
        problem: str | None = "the service is shutting down"
        try:
            problems = await asyncio.gather(*[endpoint.try_example() for endpoint in endpoints])
            problem = next(filter(None, problems), None)
        finally:  # also if `stop` cancels the check
            self._respond_readiness(exchange, problem)

    def _respond_readiness(self, exchange: Exchange, problem: str | None) -> None:
        if problem is None:
            exchange.respond(HttpResponse(200, b"ready\n", _PLAIN))
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
        stats = [endpoint.driver.stats for endpoint in self.endpoints if endpoint.driver is not None]
        accept = exchange.head.headers.get(b"accept", b"").decode("latin-1")
        body, content_type = prometheus.render(stats, monotonic(), accept)
        exchange.respond(HttpResponse(200, body, content_type.encode()))

    def _openapi(self, exchange: Exchange) -> None:
        if self._document is None:
            document = openapi.document(self.services, self._timeout_status, self.max_body_bytes)
            self._document = as_json(document)
        exchange.respond(HttpResponse(200, self._document))


def _check_services(services: tuple[Service, ...]) -> None:
    """Whether they can be told apart, and spoken to over HTTP. Raises ValueError or TypeError."""
    if not services:
        raise ValueError("an app needs at least one service")
    for service in services:
        if not hasattr(service, "stages"):
            raise TypeError(f"an app is of services, not {service!r}: wrap a model as App(Service(model))")
    names = [service.name for service in services]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two services are called {twice.pop()!r}: give one of them another name with name=")
    for service in services:
        _check_types(service)


def _check_types(service: Service) -> None:
    """Whether items can be read and results be written as JSON, where the model has no formats of its own for them."""
    first, last = service.stages[0].traits, service.stages[-1].traits
    if not first.accepts:
        _refuse_hint(f"{first.name} takes", first.input_type, schema.why_unreadable(first.input_type), "accepts")
    if not last.produces:
        _refuse_hint(f"{last.name} returns", last.output_type, schema.why_unwritable(last.output_type), "produces")


def _refuse_hint(who: str, hint: Any, why: str | None, own: str) -> None:
    if why is not None:
        raise TypeError(
            f"model {who} {schema.type_name(hint)} by its hint, which cannot be checked over HTTP: {why}. Give a hint"
            " that can be (of a union only one such type, or msgspec.Structs with tags), leave the hint out, or have"
            f" the model name a format of its own with {own}; Python callers need none of this"
        )


def _milliseconds(text: bytes) -> float:
    """`X-Request-Timeout-Ms` in seconds."""
    try:
        milliseconds = float(text) if text.isascii() and b"_" not in text else float("nan")
    except ValueError:
        milliseconds = float("nan")
    if not milliseconds > 0:
        raise InvalidRequest("X-Request-Timeout-Ms must be a positive number of milliseconds")
    return milliseconds / 1000


def _lane(text: bytes) -> Lane:
    """`X-Request-Priority` as a lane of the queue."""
    if not re.fullmatch(rb"[+-]?[0-9]{1,3}", text) or abs(int(text)) > LARGEST_PRIORITY:
        raise InvalidRequest(
            f"X-Request-Priority must be a whole number from -{LARGEST_PRIORITY} to {LARGEST_PRIORITY}"
        )
    return (int(text), None, 0)
