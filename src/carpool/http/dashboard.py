"""The dashboard: a page, the figures of the last ten minutes, and those of each second as
server-sent events.

The files of the pages are ours, and libraries of others with their licences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, cast

from carpool.engine.clock import monotonic
from carpool.engine.observe.figures import DEATHS_S, EVERY_S, PastFigures, figures, problems
from carpool.engine.observe.stats import Stats
from carpool.engine.request import DEFAULT_LANE
from carpool.engine.wire.payload import JSON
from carpool.http.codec import as_json
from carpool.http.exchange import Ask, ErrorResponder, Exchange, HttpResponse, ServedModel
from carpool.http.streaming import SSE, Delivery

if TYPE_CHECKING:
    from carpool.engine.drive.aio import Driver

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
        """Itself: it is asked for nothing but what follows."""
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
    """The dashboard of an app.

    Args:
        stats: Returns the statistics of the services that run.
        responder: Puts an error into HTTP.

    Attributes:
        pages: What answers, by path.
    """

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
        """End the events of all viewers, since the server ends."""
        for timer in (self._timer, self._sampler):
            if timer is not None:
                timer.cancel()
        self._timer = self._sampler = None
        viewers = list(self._viewers)
        self._viewers.clear()
        for exchange in viewers:
            exchange.end_parts(b"", is_whole=True)

    def _sample(self) -> None:
        self._past.note(figures(self._stats(), monotonic()))
        self._sampler = asyncio.get_running_loop().call_later(EVERY_S, self._sample)

    def _data(self, exchange: Exchange) -> None:
        exchange.respond(HttpResponse(200, self._message(), headers=_UNCACHED))

    def _history(self, exchange: Exchange) -> None:
        exchange.respond(HttpResponse(200, self._past.as_json(), headers=_UNCACHED))

    def _events(self, exchange: Exchange) -> None:
        """Send the figures now, and then each second."""
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
        """Send the figures of this second to whoever looks."""
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
        """Return the figures and what is wrong."""
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
    """Yield the addresses of a page and of the files that it loads, and what answers there."""
    page, *files = _PAGES[path]
    yield path, _file(page)
    for name in files:
        yield path + b"/" + name.encode(), _file(name)


def _file(name: str) -> Callable[[Exchange], None]:
    """Return a route that answers with a file."""

    def respond(exchange: Exchange) -> None:
        exchange.respond(_response(name))

    return respond


@cache
def _response(name: str) -> HttpResponse:
    return HttpResponse(200, (_FOLDER / name).read_bytes(), _TYPES[Path(name).suffix], _HEADERS)
