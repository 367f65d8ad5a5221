"""The pages that tell of a server: its health, metrics, models and their description in OpenAPI."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from carpool.clock import monotonic
from carpool.http import openapi
from carpool.http.access import Access
from carpool.http.codec import NotReady, Refusal, as_json
from carpool.http.endpoint import Endpoint
from carpool.http.exchange import ErrorResponder, Exchange, HttpResponse
from carpool.http.overview import overview
from carpool.http.protocol_lists import ShownRoute
from carpool.http.routes import Routes
from carpool.observe.stats import Stats

if TYPE_CHECKING:
    from carpool.observe.own_metrics import OwnMetricsOfWorkers

_NOT_SHOWN = re.compile(rb"/?|/(dashboard|docs)/.*")  # the page that lists them, and files of pages
_TEXT_TYPE = b"text/plain; charset=utf-8"


class DescribedApp(ErrorResponder, Protocol):
    """The app of which the pages tell.

    Attributes:
        endpoints: the services as the app serves them, in order.
        access: who may ask; None if everybody may.
        own_metrics: the metrics that models have of their own; None if nobody collects them.
        root_path: what a proxy puts before each path.
        is_tls: whether the server that runs it speaks TLS.
        max_body_bytes: size of the largest request body.
        routes: what answers, by path and method.
    """

    endpoints: list[Endpoint]
    access: Access | None
    own_metrics: OwnMetricsOfWorkers | None
    root_path: str
    is_tls: bool
    max_body_bytes: int
    routes: Routes

    def unreadiness(self) -> NotReady | None:
        """Return why requests should not be sent to the app now; None if they should."""

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done beside the requests, until the app stops."""

    def running_stats(self) -> list[Stats]:
        """Return the statistics of the services that run."""

    def protocol_routes(self) -> Sequence[ShownRoute]:
        """Return the addresses of protocols that fit the models."""


class StatusPages:
    """The pages that tell of one app.

    Args:
        app: the app.
        idle_check_s: after how long without a good answer `/readyz` runs an example.
        timeout_status: status of a missed deadline.

    Attributes:
        idle_check_s: after how long without a good answer `/readyz` runs an example.
    """

    def __init__(self, app: DescribedApp, idle_check_s: float, timeout_status: int) -> None:
        self._app = app
        self.idle_check_s = idle_check_s
        self._timeout_status = timeout_status
        self._document: bytes | None = None

    def forget_document(self) -> None:
        """Describe the addresses anew, since they have changed."""
        self._document = None

    def livez(self, exchange: Exchange) -> None:
        """Tell that the process is alive."""
        exchange.respond(HttpResponse(200, b"ok\n", _TEXT_TYPE))

    def readyz(self, exchange: Exchange) -> None:
        """Tell whether requests would be answered; after an idle time an example is tried first."""
        stale = [endpoint for endpoint in self._served() if endpoint.is_stale(self.idle_check_s)]
        unready = self._app.unreadiness()
        if unready is not None or not stale:
            self._respond_readiness(exchange, unready)
            return
        self._app.run_beside(self._try_examples(exchange, stale))

    async def _try_examples(self, exchange: Exchange, endpoints: list[Endpoint]) -> None:
        unready: NotReady | None = NotReady("draining")
        try:
            problems = await asyncio.gather(*[endpoint.try_example() for endpoint in endpoints])
            found = zip([endpoint.name for endpoint in endpoints], problems, strict=True)
            models = {name: problem for name, problem in found if problem is not None}
            unready = NotReady("not_ready", models) if models else None
        finally:  # `stop` may cancel the check
            self._respond_readiness(exchange, unready)

    def _respond_readiness(self, exchange: Exchange, unready: NotReady | None) -> None:
        if unready is None:
            exchange.respond(HttpResponse(200, b"ready\n", _TEXT_TYPE))
            return
        access = self._app.access
        if access is not None and access.keys is not None and not exchange.head.caller:
            unready = NotReady(unready.code)  # a prober without a key is not told what is served here
        exchange.respond(self._app.error(exchange.head, unready))

    def metrics(self, exchange: Exchange) -> None:
        """Show the metrics, as Prometheus reads them."""
        try:
            from carpool.observe import prometheus
        except ImportError:
            exchange.respond(self._app.error(exchange.head, Refusal(501, "metrics_unavailable")))
            return
        access, own, accept = self._app.access, self._app.own_metrics, exchange.head.headers.get(b"accept", b"")
        more: list[Any] = [] if access is None else [prometheus.CallerMetrics(access)]
        if own is not None:
            running = [endpoint.handle for endpoint in self._app.endpoints if endpoint.handle is not None]
            own.seen([pid for handle in running for pid in handle.pids])
            more.append(own)
        body, content_type = prometheus.render(self._app.running_stats(), monotonic(), accept.decode("latin-1"), more)
        exchange.respond(HttpResponse(200, body, content_type.encode()))

    def _served(self) -> list[Endpoint]:
        """Return the services that take requests."""
        return [endpoint for endpoint in self._app.endpoints if not endpoint.is_leaving]

    def overview(self, exchange: Exchange) -> None:
        """Show what the server has, in plain text."""
        root = self._app.root_path.encode()
        shown = [
            path
            for path, methods in self._app.routes.items()
            if b"GET" in methods and path.startswith(root) and not _NOT_SHOWN.fullmatch(path.removeprefix(root))
        ]
        pages = sorted(path.decode() for path in shown)
        text = overview(
            self._served(),
            pages,
            self._app.protocol_routes(),
            host=exchange.head.headers.get(b"host", b""),
            root_path=self._app.root_path,
            is_tls=self._app.is_tls,
            needs_key=self._needs_key,
        )
        exchange.respond(HttpResponse(200, text.encode(), _TEXT_TYPE))

    @property
    def _needs_key(self) -> bool:
        return self._app.access is not None and self._app.access.keys is not None

    def openapi(self, exchange: Exchange) -> None:
        """Describe the addresses in OpenAPI."""
        if self._document is None:
            document = openapi.document(
                self._served(),
                self._timeout_status,
                self._app.max_body_bytes,
                self._app.root_path,
                needs_key=self._needs_key,
                of_protocols=self._app.protocol_routes(),
            )
            self._document = as_json(document)
        exchange.respond(HttpResponse(200, self._document))
