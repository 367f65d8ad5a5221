"""The responses to failed requests: under which id, what the log says, and the same for routes of
other web frameworks.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from carpool.engine.foreign import text_of, traceback_of
from carpool.engine.logger import logger
from carpool.engine.observe.log import printable
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError
from carpool.http.asgi import ClientStalled, Receive, Scope, Send, send_response, within_limits
from carpool.http.codec import error_response
from carpool.http.exchange import HttpResponse, RequestIds
from carpool.service.checks import flag

_REQUEST_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")

AsgiResponse = Callable[[Scope, Receive, Send], Awaitable[None]]


class ErrorAnswers:
    """Puts errors into HTTP.

    Args:
        timeout_status: Status of a missed deadline, 504 or 408.
        debug: Whether error bodies show the texts of user exceptions.

    Raises:
        ValueError: `timeout_status` is neither of them.
        TypeError: `debug` is not a bool.
    """

    def __init__(self, timeout_status: int, debug: bool) -> None:
        if timeout_status not in (504, 408):
            raise ValueError(f"timeout_status must be 504 or 408, not {timeout_status!r}")
        self.timeout_status = timeout_status
        self._debug = flag("debug", debug)
        self.ids = RequestIds()

    def response(self, given_id: bytes, error: Exception, model: str = "", caller: str = "") -> HttpResponse:
        """Return the response to a request that ended with `error`; log an error of a model."""
        request_id = given_id.decode() if _REQUEST_ID.fullmatch(given_id) else self.ids.new().decode()
        known = {"request_id": request_id, "model": model, "caller": caller}
        about = {name: value for name, value in known.items() if value}
        if isinstance(error, ModelError):
            message = printable(text_of(error)).replace("\n", "\\n")
            about["code"] = error.code
            line = f"{message}\n{printable(error.traceback)}".rstrip()
            logger.error("request %s: %s", request_id, line, extra=about)
        elif type(error) is DeadlineExceeded and error.worker_lost:
            about["code"] = error.code
            text = "request %s may have killed its worker, and had no answer when it was to run again: %s"
            logger.warning(text, request_id, printable(text_of(error)), extra=about)
        try:
            return error_response(error, request_id, timeout_status=self.timeout_status, debug=self._debug)
        except BaseException as broken:  # a user's class of errors, with attributes that make no sense
            text = "request %s: its error could not be read:\n%s"
            logger.error(text, request_id, printable(traceback_of(broken)), extra=about)
            return error_response(CarpoolError("the error could not be read"), request_id)


class HasErrorHandlers(Protocol):
    """An app that takes error handlers, such as one of FastAPI or Starlette."""

    def add_exception_handler(self, exc_class_or_status_code: Any, handler: Any) -> None:
        """Have errors of a class answered by a handler."""


def install_error_handlers(app: HasErrorHandlers, *, timeout_status: int = 504, debug: bool = False) -> None:
    """Have carpool's errors in routes of a FastAPI or Starlette app answered as our server does.

    Each `CarpoolError` that a route raises, also by awaiting a batched function or a service, gets
    its status, a JSON body with its `code`, `X-Request-Id`, and `Retry-After` where trying again
    makes sense; the app's middleware sees the response like any other. Call it before the first
    request.

    Args:
        app: The app.
        timeout_status: Status of a missed deadline, 504 or 408.
        debug: Whether error bodies show the texts of user exceptions.

    Raises:
        ValueError: `timeout_status` is neither of them.
        TypeError: `debug` is not a bool, or the app is of another kind, such as Flask's.
    """
    if not hasattr(app, "add_exception_handler"):
        raise TypeError(
            f"install_error_handlers is for FastAPI and Starlette apps, and this is a {type(app).__name__}:"
            ' in Flask register a handler for carpool.CarpoolError, as "HTTP" in the docs shows'
            " (errors in your own routes)"
        )
    answers = ErrorAnswers(timeout_status, debug)

    async def handler(request: Any, error: Exception) -> AsgiResponse:
        if request.scope["type"] != "http":  # a websocket has no statuses any more
            raise error
        given = next((value for name, value in request.scope["headers"] if name.lower() == b"x-request-id"), b"")
        response = answers.response(given, error)
        head_only = request.scope["method"] == "HEAD"

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            with suppress(ClientStalled):
                await send_response(response, within_limits(send), response.headers, head_only)

        return respond

    app.add_exception_handler(CarpoolError, handler)
