"""The pages of an app for those who run it, at an address of their own."""

from __future__ import annotations

from carpool.errors import CarpoolError
from carpool.http.access import Access
from carpool.http.app import App
from carpool.http.exchange import WANTED_HEADERS, Exchange, Head, HttpResponse

_LARGEST_BODY = 64 * 1024


class AdminApp:
    """What a connection asks of an app, for the pages that are not for everybody.

    Args:
        app: The app whose pages these are.
        access: Who may ask.

    Attributes:
        max_body_bytes: Size of the largest request body.
        wants_heads: Whether whole heads are kept.
        wanted_headers: The headers that are looked at.
        access: Who may ask.
        observer: Watches requests and their answers.
        request_ids: Gives ids to requests that bring none.
        root_path: What a proxy puts before each path.
        shares: Nothing, as these pages are of no service.
    """

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
        self._app = app
        self._admission = app.admin_admission(access)

    def admit(self, head: Head) -> HttpResponse | None:
        """Judge a head: return a refusal, or None if the body is to be read."""
        return self._admission.admit(head)

    def handle(self, exchange: Exchange) -> None:
        """Answer an admitted exchange whose body has been read."""
        self._app.handle(exchange)

    def route_raised(self, exchange: Exchange, error: BaseException) -> None:
        """Answer 500 because a route raised."""
        self._app.route_raised(exchange, error)

    def refuse(self, head: Head | None, error: CarpoolError) -> HttpResponse:
        """Return the response to a request that is broken off after its admission."""
        return self._app.refuse(head, error)

    def error(self, head: Head | None, error: Exception) -> HttpResponse:
        """Return the response to a request that ended with `error`."""
        return self._app.error(head, error)

    def cancel(self, exchange: Exchange) -> None:
        """Give up an exchange whose client has left."""
        self._app.cancel(exchange)

    def pause(self, exchange: Exchange, is_paused: bool) -> None:
        """Have no more parts made for a client that does not take them, or go on."""
        self._app.pause(exchange, is_paused)
