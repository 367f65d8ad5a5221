"""The pages about a server: health, metrics, models, their description in OpenAPI, the dashboard.

The dashboard is a page, the figures of the last ten minutes, and those of each second as
server-sent events. The files of the pages are ours, and libraries of others with their licences.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from carpool.engine.clock import monotonic
from carpool.engine.observe.figures import DEATHS_S, EVERY_S, PastFigures, figures, problems
from carpool.engine.observe.stats import Stats
from carpool.engine.request import DEFAULT_LANE
from carpool.engine.wire.payload import JSON
from carpool.http import openapi
from carpool.http.codec import NotReady, Refusal, as_json
from carpool.http.endpoint import Endpoint
from carpool.http.exchange import Ask, ErrorResponder, Exchange, HttpResponse, ServedModel
from carpool.http.openapi import overview
from carpool.http.routes import AppView, Handler
from carpool.http.streaming import SSE, Delivery

if TYPE_CHECKING:
    from carpool.engine.drive.aio import Driver

_NOT_SHOWN = re.compile(rb"/?|/(dashboard|docs)/.*|/models/.*")
"""The page that lists them, files of pages, and those that are listed below their model."""

_TEXT_TYPE = b"text/plain; charset=utf-8"


class StatusPages:
    """The pages about one app.

    Attributes:
        idle_check_s: After how long without a good answer `/readyz` runs an example.
    """

    def __init__(self, app: AppView, idle_check_s: float, timeout_status: int) -> None:
        self._app = app
        self.idle_check_s = idle_check_s
        self._timeout_status = timeout_status
        self._document: bytes | None = None

    def forget_document(self) -> None:
        """Describe the addresses anew, since they have changed."""
        self._document = None

    def livez(self, exchange: Exchange) -> None:
        exchange.respond(HttpResponse(200, b"ok\n", _TEXT_TYPE))

    def readyz(self, exchange: Exchange) -> None:
        """Answer whether some model would answer a request, with the models that would not."""
        self._find_problems(self._app.served, partial(self._respond_readiness, exchange))

    def ready_page(self, endpoint: Endpoint) -> Handler:
        return lambda exchange: self._find_problems([endpoint], partial(self._respond_model, exchange, endpoint.name))

    def _find_problems(self, endpoints: Sequence[Endpoint], then: Callable[[dict[str, str]], None]) -> None:
        """Call `then` with the reasons why models do not answer, by their names.

        Those of `endpoints` that have had no good answer for some time answer an example first.
        """
        problems = self._app.problems()
        idle = [each for each in endpoints if each.name not in problems and each.is_stale(self.idle_check_s)]
        if idle and self._app.unreadiness(problems) is None:
            self._app.run_beside(self._try_examples(idle, then))
        else:
            then(problems)

    async def _try_examples(self, endpoints: Sequence[Endpoint], then: Callable[[dict[str, str]], None]) -> None:
        found: Sequence[str | None] = ()
        try:
            found = await asyncio.gather(*[endpoint.try_example() for endpoint in endpoints])
        finally:  # `stop` may cancel the check
            tried = {each.name: problem for each, problem in zip(endpoints, found, strict=False) if problem is not None}
            then({**self._app.problems(), **tried})

    def _respond_readiness(self, exchange: Exchange, problems: dict[str, str]) -> None:
        unready = self._app.unreadiness(problems)
        if unready is not None:
            self._respond_unready(exchange, unready)
            return
        text = "ready\n"
        if self._may_see_models(exchange):
            text += "".join([f"not ready: {problem}\n" for problem in problems.values()])
        exchange.respond(HttpResponse(200, text.encode(), _TEXT_TYPE))

    def _respond_model(self, exchange: Exchange, name: str, problems: dict[str, str]) -> None:
        unready = self._app.unreadiness(problems)
        if unready is not None and unready.code == "draining":
            self._respond_unready(exchange, unready)
        elif name in problems:
            code = "not_ready" if unready is None else unready.code
            self._respond_unready(exchange, NotReady(code, {name: problems[name]}))
        else:
            exchange.respond(HttpResponse(200, b"ready\n", _TEXT_TYPE))

    def _respond_unready(self, exchange: Exchange, unready: NotReady) -> None:
        shown = unready if self._may_see_models(exchange) else NotReady(unready.code)
        exchange.respond(self._app.error(exchange.head, shown))

    def _may_see_models(self, exchange: Exchange) -> bool:
        return not self._needs_key or exchange.head.caller != ""

    def metrics(self, exchange: Exchange) -> None:
        try:
            from carpool.engine.observe import prometheus
        except ImportError:
            exchange.respond(self._app.error(exchange.head, Refusal(501, "metrics_unavailable")))
            return
        access, own, accept = self._app.access, self._app.own_metrics, exchange.head.headers.get(b"accept", b"")
        more: list[Any] = [] if access is None else [prometheus.CallerMetrics(access.requests, access.rejected)]
        if (shares := self._app.connection_shares) is not None:
            held = {each.name: shares.held.get(each, 0) for each in self._app.served}
            more.append(prometheus.ConnectionMetrics(held, shares.refused))
        if own is not None:
            running = [endpoint.handle for endpoint in self._app.endpoints if endpoint.handle is not None]
            stages = [stage for each in self._app.endpoints for stage in each.service.stages]
            has_own_stages = any(stage.run_in != "process" for stage in stages)
            pids = [pid for handle in running for pid in handle.pids]
            sent = [stage.sent_metrics for stats in self._app.running_stats() for stage in stats.stages]
            own.seen(pids, sent, has_own_stages=has_own_stages)
            more.append(own)
        body, content_type = prometheus.render(self._app.running_stats(), monotonic(), accept.decode("latin-1"), more)
        exchange.respond(HttpResponse(200, body, content_type.encode()))

    def overview(self, exchange: Exchange) -> None:
        root = self._app.root_path.encode()
        shown = [
            path
            for path, methods in self._app.routes.items()
            if b"GET" in methods
            and not (root and root + path in self._app.routes)  # of two it is the one below the root path
            and not _NOT_SHOWN.fullmatch(path.removeprefix(root))
        ]
        pages = sorted(path.decode() for path in shown)
        text = overview(
            self._app.served,
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
        if self._document is None:
            document = openapi.document(
                self._app.served,
                self._timeout_status,
                self._app.max_body_bytes,
                self._app.root_path,
                needs_key=self._needs_key,
                of_protocols=self._app.protocol_routes(),
            )
            self._document = as_json(document)
        exchange.respond(HttpResponse(200, self._document))


_PATH = b"/dashboard"
_EVERY_S = 1.0
_MOST_VIEWERS = 32
_UNCACHED = ((b"cache-control", b"no-store"),)
_EVENTS = SSE._replace(end=b"", error=b"")


class _Source:
    """Stands for a model and its driver, where the answer in parts is the figures."""

    name = "dashboard"
    weigher = None

    def __init__(self, viewers: dict[Exchange, bool]) -> None:
        self._viewers = viewers

    @property
    def driver(self) -> Driver:
        """Itself: only the methods below are called."""
        return cast("Driver", self)

    def pause(self, exchange: Exchange, is_paused: bool) -> None:
        """Send no more figures to a viewer that does not take them, or go on."""
        if exchange in self._viewers:
            self._viewers[exchange] = is_paused

    def cancel(self, exchange: Exchange) -> None:
        """Forget a viewer that has left."""
        self._viewers.pop(exchange, None)

    def refused(self, error: Exception) -> None:
        """Take note of nothing: it is no model that refuses."""


class Dashboard:
    """The dashboard of an app."""

    def __init__(self, stats: Callable[[], Sequence[Stats]], responder: ErrorResponder) -> None:
        self._stats = stats
        self._viewers: dict[Exchange, bool] = {}  # and whether each is paused
        self._past = PastFigures()
        self._timer: asyncio.TimerHandle | None = None  # of what viewers are sent
        self._sampler: asyncio.TimerHandle | None = None
        self._ask = Ask(
            endpoint=cast(ServedModel, _Source(self._viewers)),
            responder=responder,
            format=JSON,
            accept=JSON,
            timeout_s=inf,
            lane=DEFAULT_LANE,
            content_type=SSE.content_type,
            framing=_EVENTS,
        )
        self.pages: dict[bytes, Callable[[Exchange], None]] = {
            **dict(pages_at(_PATH)),
            _PATH + b"/data": self._data,
            _PATH + b"/history": self._history,
            _PATH + b"/events": self._events,
        }

    def begin(self) -> None:
        """Keep the figures of each few seconds from now on, on the running loop."""
        self._past = PastFigures()
        self._sampler = asyncio.get_running_loop().call_later(EVERY_S, self._sample)

    def close(self) -> None:
        for timer in (self._timer, self._sampler):
            if timer is not None:
                timer.cancel()
        self._timer = self._sampler = None
        viewers = list(self._viewers)
        self._viewers.clear()
        for exchange in viewers:
            exchange.end_parts(b"")

    def _sample(self) -> None:
        self._past.note(figures(self._stats(), monotonic()))
        self._sampler = asyncio.get_running_loop().call_later(EVERY_S, self._sample)

    def _data(self, exchange: Exchange) -> None:
        exchange.respond(HttpResponse(200, self._message(), headers=_UNCACHED))

    def _history(self, exchange: Exchange) -> None:
        exchange.respond(HttpResponse(200, self._past.as_json(), headers=_UNCACHED))

    def _events(self, exchange: Exchange) -> None:
        if len(self._viewers) >= _MOST_VIEWERS or exchange.head.method != b"GET":
            exchange.respond(HttpResponse(204, b""))
            return
        now = monotonic()
        exchange.head.ask = self._ask
        exchange.delivery = Delivery(now)
        exchange.watch_silence()
        self._viewers[exchange] = False
        self._send(exchange, self._message())
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._viewers:
            return
        message = self._message()
        for exchange, is_paused in list(self._viewers.items()):
            if not is_paused:
                self._send(exchange, message)
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._tick)

    def _send(self, exchange: Exchange, message: bytes) -> None:
        assert exchange.delivery is not None
        exchange.delivery.written_at = monotonic()
        exchange.tell_part(message)

    def _message(self) -> bytes:
        now = figures(self._stats(), monotonic())
        lately, earlier = self._past.before(now["time"]), self._past.before(now["time"], DEATHS_S)
        return as_json({"figures": now, "problems": problems(lately, now, earlier)})


_FOLDER = Path(__file__).parent / "pages"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    b" base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
_PAGES = {
    b"/dashboard": (
        *("dashboard.html", "dashboard.js", "dashboard.css", "figures.js", "charts.js", "graph.js"),
        *("uPlot.iife.min.js", "uPlot.min.css", "icon.svg"),
    ),
    b"/docs": ("docs.html", "docs.css", "docs.js", "icon.svg"),
}


def pages_at(path: bytes) -> Iterator[tuple[bytes, Callable[[Exchange], None]]]:
    """Yield the addresses of a page and of the files that it loads, with their functions."""
    page, *files = _PAGES[path]
    yield path, _file(page)
    for name in files:
        yield path + b"/" + name.encode(), _file(name)


def _file(name: str) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.respond(_response(name))


@cache
def _response(name: str) -> HttpResponse:
    return HttpResponse(200, (_FOLDER / name).read_bytes(), _TYPES[Path(name).suffix], _HEADERS)
