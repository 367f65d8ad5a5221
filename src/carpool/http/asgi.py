"""The ASGI front: serves the app under uvicorn and the like, or mounted in FastAPI or Starlette.

Its client is known as far as the server's `receive` and `send` show it.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

from carpool.engine.clock import monotonic
from carpool.engine.logger import logger
from carpool.errors import StartupError
from carpool.http.access import SINGLE
from carpool.http.bulk import feed_bulk, wants_more_of_bulk
from carpool.http.codec import Refusal, as_routes_are, too_large
from carpool.http.exchange import Exchange, Head, HttpResponse
from carpool.http.streaming import SILENCE_S, Delivery

if TYPE_CHECKING:
    from carpool.http.routes import AppView

Scope = MutableMapping[str, Any]

_WATCH_AFTER_S = 0.005  # most answers are quicker, and watching whether the client leaves costs a task


class AsgiExchange(Exchange):
    """An exchange whose response is awaited.

    Attributes:
        news: Set when there is more of an answer in parts, or an ordinary response.
        is_unread: Whether the rest of the body of a bulk request is not read.
    """

    __slots__ = ("app", "has_ended", "is_broken", "is_unread", "news", "response", "room")

    room: asyncio.Event

    def __init__(self, app: AppView, head: Head, body: bytes | bytearray) -> None:
        super().__init__(head, body)
        self.app = app
        self.response: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        self.has_ended = self.is_broken = self.is_unread = False

    def want_more(self) -> None:
        self.room.set()

    def leave_body_unread(self) -> None:
        self.is_unread = True
        self.room.set()

    @property
    def ordinary(self) -> HttpResponse | None:
        """The response, once there is one that is not in parts."""
        return self.response.result() if self.response.done() else None

    def respond(self, response: HttpResponse) -> None:
        if not self.response.done():
            self.response.set_result(response)
            if self.delivery is not None:
                self.news.set()

    def watch_silence(self) -> None:
        self.news = asyncio.Event()

    def write_part(self, data: bytes) -> None:
        assert self.delivery is not None
        if self.delivery.hold(data):
            self.app.pause(self, True)
        self.news.set()

    def end_parts(self, data: bytes, *, is_broken: bool = False) -> None:
        assert self.delivery is not None
        self.delivery.hold(data)
        self.has_ended, self.is_broken = True, is_broken
        self.news.set()


def lifespan(*apps: AppView) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """Return a lifespan for the app in which others are mounted.

    Use it as `FastAPI(lifespan=carpool.lifespan(model_app))`. It starts the services before the
    first request and stops them after the last. Without it, a mounted app starts at its first
    request and stops when its process does.

    Args:
        apps: The mounted apps.
    """

    @asynccontextmanager
    async def run(host: Any) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for app in apps:
                stack.push_async_callback(app.stop)
                await app.ensure_started(anew=True)
            yield

    return run


async def serve(app: AppView, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(app, receive, send)
    elif scope["type"] == "http":
        with suppress(ClientStalled):  # the server closes, as the answer is not complete
            await _request(app, scope, receive, within_limits(send))
    else:
        raise RuntimeError(f"carpool speaks HTTP, not {scope['type']}")


@functools.cache
def warn_of_siblings() -> None:
    """Warn once if this may be one of several server processes, each of which batches alone."""
    one_of_several = (
        multiprocessing.parent_process() is not None
        or os.environ.get("WEB_CONCURRENCY", "1") != "1"
        or "gunicorn" in sys.modules
    )
    if one_of_several:
        logger.warning(
            "this process was started by a server that may run several of them: each would load the models again and"
            " form smaller batches of its own. Run one server process, and give the stages workers= instead"
        )


async def _lifespan(app: AppView, receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            try:
                await app.ensure_started(anew=True)
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await app.stop()
            await send({"type": "lifespan.shutdown.complete"})
            return


async def _request(app: AppView, scope: Scope, receive: Receive, send: Send) -> None:
    headers = {name: value for name, value in scope["headers"] if name in app.wanted_headers}
    head = Head(scope["method"].encode(), _path(scope), headers)
    if app.access is not None and _has_twice(scope["headers"]):
        refusal = app.refuse(head, Refusal(400, "bad_http"))
        await send_response(refusal, send, refusal.headers, head_only=head.method == b"HEAD")
        return
    if app.wants_heads:
        head.query = scope.get("query_string") or b""
        head.fields = [(bytes(name).lower(), bytes(value).strip(b" \t")) for name, value in scope["headers"]]
    try:
        if app.access is not None:
            app.access.refresh_now_and_then()
        if app.refusing is not None or app.is_elsewhere:
            await app.ensure_started()
        response = app.admit(head)
    except StartupError as error:
        logger.error("the app cannot start: %s", error)
        response = app.error(head, error)
    exchange = AsgiExchange(app, head, b"")
    if response is None:
        response = await _handle(app, exchange, receive, send)
    if response is not None:
        if app.observer is not None:
            response = app.observer.answering(exchange, response, monotonic())
        sent = head.echoed(response.headers, app.request_ids)
        await send_response(response, send, sent, head_only=head.method == b"HEAD")


def _has_twice(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Report whether a header that says who asks is there more than once."""
    names = [name for name, _ in headers if name in SINGLE]
    return len(names) > len(set(names))


async def _handle(app: AppView, exchange: AsgiExchange, receive: Receive, send: Send) -> HttpResponse | None:
    """Read the body of an admitted request and have it answered.

    Returns None if the client leaves, or if the answer was sent in parts.
    """
    if exchange.head.ask is not None and exchange.head.ask.is_bulk:
        return await _answer_bulk(exchange, receive, send)
    body = await _body(receive, app.max_body_bytes)
    if body is None:
        return None
    if len(body) > app.max_body_bytes:
        return app.refuse(exchange.head, too_large(app.max_body_bytes))
    exchange.item, exchange.nbytes = body, len(body)
    app.handle(exchange)
    if exchange.delivery is not None:
        leaving = asyncio.ensure_future(disconnected(receive))
        return await _answer_in_parts(exchange, leaving, send)
    try:
        return await _answer(exchange, receive)
    finally:
        if not exchange.response.done():  # the client has left, or the server has cancelled this call
            app.cancel(exchange)


async def _answer_bulk(exchange: AsgiExchange, receive: Receive, send: Send) -> HttpResponse | None:
    exchange.room = asyncio.Event()
    exchange.item = []
    exchange.app.handle(exchange)
    if exchange.ordinary is not None:
        return exchange.ordinary
    feeding = asyncio.ensure_future(_feed(exchange, receive))
    try:
        return await _answer_in_parts(exchange, feeding, send)
    finally:
        feeding.cancel()


async def _feed(exchange: AsgiExchange, receive: Receive) -> BaseException | None:
    """Feed a bulk request to its end, then wait until the client leaves; see `disconnected`."""
    try:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            if message.get("body"):
                feed_bulk(exchange, message["body"])
            if not message.get("more_body"):
                feed_bulk(exchange, None)
                return await disconnected(receive)
            while not wants_more_of_bulk(exchange) and not exchange.is_unread:
                exchange.room.clear()
                await exchange.room.wait()
            if exchange.is_unread:
                return await disconnected(receive)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error


async def _answer_in_parts(
    exchange: AsgiExchange, leaving: asyncio.Future[BaseException | None], send: Send
) -> HttpResponse | None:
    """Send an answer in parts as they come; return the response if it is an ordinary one.

    Args:
        leaving: Ends when the client leaves, with what the server's `receive` has raised.

    Raises:
        BaseException: The server's `receive` or `send` raised it.
        ClientStalled: The client takes nothing.
        BrokenAnswer: The answer is broken off; the server closes the connection.
    """
    sending = asyncio.ensure_future(_send_parts(exchange, send))
    try:
        await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            failure = leaving.result()  # perhaps the CancelledError that `receive` raised
            if failure is not None:
                raise failure
            return None
        response, failure = sending.result()
        if failure is not None:
            raise failure
        return response
    finally:
        leaving.cancel()
        sending.cancel()
        if not exchange.has_ended and exchange.ordinary is None:
            exchange.app.cancel(exchange)


async def _send_parts(exchange: AsgiExchange, send: Send) -> tuple[HttpResponse | None, BaseException | None]:
    """Send parts until the end; return the response if it is an ordinary one, and what the server's
    `send` has raised.
    """
    delivery, ask = exchange.delivery, exchange.head.ask
    assert ask is not None and ask.framing is not None and delivery is not None
    framing, observer, nbytes = ask.framing, exchange.app.observer, 0
    try:
        while True:
            await _wait_for_part(exchange, delivery, framing.alive)
            if exchange.ordinary is not None:
                return exchange.ordinary, None
            if not delivery.is_head_written:
                delivery.is_head_written = delivery.has_begun = True
                headers = [(b"content-type", framing.content_type), (b"x-content-type-options", b"nosniff")]
                ids = exchange.app.request_ids if observer is None else None
                headers += exchange.head.echoed(framing.headers, ids)
                if observer is not None:
                    given = {name for name, _ in headers}
                    added = observer.headers(exchange, monotonic(), has_ended=False)
                    headers += [header for header in added if header[0] not in given]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            has_ended, is_broken = exchange.has_ended, exchange.is_broken
            is_last = has_ended and not is_broken
            data = delivery.take_held()
            nbytes += len(data)
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if is_broken:
                return None, BrokenAnswer("the answer broke off after some of its parts were sent")
            if has_ended:
                if observer is not None:
                    observer.answered(exchange, 200, nbytes, monotonic())
                return None, None
            if delivery.unread.go_on():
                exchange.app.pause(exchange, False)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


async def _wait_for_part(exchange: AsgiExchange, delivery: Delivery, alive: bytes) -> None:
    """Wait for a part, the end or an ordinary response; after a long silence show the client that
    the connection is alive.
    """
    while not (delivery.held or exchange.has_ended or exchange.ordinary):
        exchange.news.clear()
        try:
            async with asyncio.timeout(SILENCE_S):  # `wait_for` may lose a cancellation that comes with the news
                await exchange.news.wait()
        except TimeoutError:
            if alive:
                delivery.hold(alive)


class BrokenAnswer(Exception):
    """An answer that cannot say so itself is broken off, which the server shows by closing."""


def _path(scope: Scope) -> bytes:
    """Return the path below the point where the app is mounted, quoted as in our routes."""
    path: str = scope["path"]
    if path == "*":  # `OPTIONS *` asks for the whole server
        return b"*"
    raw = (scope.get("raw_path") or b"").partition(b"?")[0]  # only here does a slash in a name differ from the others
    if unquote(raw) != path:  # it may be missing, and older routers cut their part off the path alone
        raw = quote(path).encode()
    quoted, root = as_routes_are(raw), as_routes_are(quote(scope.get("root_path", "")).encode().rstrip(b"/"))
    return quoted[len(root) :] if quoted.startswith(root + b"/") else quoted


async def _body(receive: Receive, limit: int) -> bytes | bytearray | None:
    message = await receive()
    if message["type"] != "http.request":
        return None
    if not message.get("more_body"):
        only: bytes = message.get("body", b"")
        return only
    body = bytearray(message.get("body", b""))
    while message.get("more_body") and len(body) <= limit:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
    return body


async def _answer(exchange: AsgiExchange, receive: Receive) -> HttpResponse | None:
    """Wait for the app's response, and return None if the client leaves before.

    Raises:
        BaseException: The server's `receive` raised it.
    """
    done, _ = await asyncio.wait([exchange.response], timeout=_WATCH_AFTER_S)
    if not done:
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((exchange.response, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if not exchange.response.done():
            failure = leaving.result()  # perhaps the CancelledError that `receive` raised
            if failure is not None:
                raise failure
            return None
    return exchange.response.result()


async def send_response(
    response: HttpResponse, send: Send, headers: Sequence[tuple[bytes, bytes]], head_only: bool
) -> None:
    """Send a whole response, with these headers besides those of its body."""
    body_headers = [
        (b"content-type", response.content_type),
        (b"content-length", str(len(response.body)).encode()),
    ]
    all_headers = [
        *(body_headers if response.describes_its_body else ()),
        (b"x-content-type-options", b"nosniff"),
        *headers,
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": all_headers})
    await send({"type": "http.response.body", "body": b"" if head_only else bytes(response.body)})


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SEND_S: Final = 30.0
"""Seconds for which a server may wait until its client takes one piece of an answer."""

_PIECE: Final = 64 * 1024  # a client that reads slowly, but steadily, takes so much in that time


class ClientStalled(Exception):
    """A client has taken nothing of its answer for `SEND_S`: the request is given up."""


def within_limits(send: Send) -> Send:
    """Return a `send` that passes bodies on in pieces, and gives each of them `SEND_S`, or raises
    `ClientStalled`.
    """

    async def limited(message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= _PIECE:
            await _sent(send, message)
            return
        last = (len(body) - 1) // _PIECE * _PIECE
        for at in range(0, last, _PIECE):
            await _sent(send, {**message, "body": body[at : at + _PIECE], "more_body": True})
        await _sent(send, {**message, "body": body[last:]})

    return limited


async def _sent(send: Send, message: Message) -> None:
    try:
        async with asyncio.timeout(SEND_S) as limit:
            await send(message)
    except TimeoutError:
        if not limit.expired():  # the server has raised it
            raise
        raise ClientStalled(f"the client took nothing for {SEND_S:g} s") from None


async def disconnected(receive: Receive) -> BaseException | None:
    """Wait until the client leaves.

    Whatever the server's `receive` raises is returned, since a task that raises KeyboardInterrupt
    or SystemExit would end the loop.
    """
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None
