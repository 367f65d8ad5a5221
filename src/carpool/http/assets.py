"""The files of the pages for browsers: ours, and libraries of others with their licences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from carpool.http.exchange import Exchange, HttpResponse

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
        *("dashboard.html", "dashboard.js", "dashboard.css", "figures.js", "charts.js"),
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
