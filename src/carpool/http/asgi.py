"""The ASGI door: the same app under uvicorn, hypercorn, granian, or mounted in FastAPI and Starlette."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, unquote_to_bytes

from carpool.errors import StartupError
from carpool.http.codec import too_large
from carpool.http.exchange import WANTED_HEADERS, Exchange, Head, HttpResponse
from carpool.logger import logger

if TYPE_CHECKING:
    from carpool.http.app import App


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_WATCH_AFTER_S = 0.005  # most answers are quicker; a watch for the client's leaving costs a task


class AsgiExchange(Exchange):
    """An exchange whose answer is awaited."""

    __slots__ = ("response",)

    def __init__(self, head: Head, body: bytes | bytearray) -> None:
        super().__init__(head, body)
        self.response: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()

    def respond(self, response: HttpResponse) -> None:
        if not self.response.done():
            self.response.set_result(response)


def lifespan(*apps: App) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """A lifespan for the app that others are mounted in: `FastAPI(lifespan=carpool.lifespan(model_app))`.

    It starts the services before the first request and stops them after the last. Without it a mounted app starts at
    its first request, and stops when its process does.
    """

    @asynccontextmanager
    async def run(host: Any) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for app in apps:
                stack.push_async_callback(app.stop)
                await app.ensure_started(anew=True)
            yield

    return run


async def serve(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """One ASGI scope: a lifespan, or a request."""
    if scope["type"] == "lifespan":
        await _lifespan(app, receive, send)
    elif scope["type"] == "http":
        await _request(app, scope, receive, send)
    else:
        raise RuntimeError(f"carpool speaks HTTP, not {scope['type']}")


@functools.cache
def warn_of_siblings() -> None:
    """Say once that several server processes, each with the app, are batchers that know nothing of each other."""
    one_of_several = (
        multiprocessing.parent_process() is not None
        or os.environ.get("WEB_CONCURRENCY", "1") != "1"
        or "gunicorn" in sys.modules
    )
    if one_of_several:
        logger.warning(
            "this process was started by a server that may run several: each would start the models anew and form"
            " batches of its own, which are smaller. One server process and workers= of the stages do better"
        )


async def _lifespan(app: App, receive: Receive, send: Send) -> None:
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


async def _request(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    headers = {name: value for name, value in scope["headers"] if name in WANTED_HEADERS}
    head = Head(scope["method"].encode(), _path(scope), headers)
    if app.wants_heads:
        head.query = scope.get("query_string") or b""
        head.fields = [(bytes(name).lower(), bytes(value).strip(b" \t")) for name, value in scope["headers"]]
    try:
        if app.refusing is not None or app.is_elsewhere:
            await app.ensure_started()
        response = app.admit(head)
    except StartupError as error:
        logger.error("the app cannot start: %s", error)
        response = app.error(head, error)
    if response is None:
        body = await _body(receive, app.max_body_bytes)
        if body is None:
            return  # the client has gone
        if len(body) > app.max_body_bytes:
            response = app.refuse(head, too_large(app.max_body_bytes))
        else:
            exchange = AsgiExchange(head, body)
            app.handle(exchange)
            try:
                response = await _answer(exchange, receive)
            finally:
                if not exchange.response.done():  # the client has left, or the server has cancelled this call
                    app.gone(exchange)
            if response is None:
                return
    await _send(response, send, head_only=head.method == b"HEAD")


def _path(scope: Scope) -> bytes:
    """The path below the point where the app is mounted, as our routes have it."""
    path: str = scope["path"]
    raw = (scope.get("raw_path") or b"").partition(b"?")[0]  # only this tells a slash in a name from other slashes
    if unquote(raw) != path:  # it may be missing, and routers of old cut their part off the path alone
        raw = quote(path).encode()
    quoted, root = _as_routes_are(raw), _as_routes_are(quote(scope.get("root_path", "")).encode().rstrip(b"/"))
    return quoted[len(root) :] if quoted.startswith(root + b"/") else quoted


def _as_routes_are(path: bytes) -> bytes:
    """Each part of a path as `predict_path` quotes a name, however it was quoted before."""
    return b"/".join([quote(unquote_to_bytes(part), safe="").encode() for part in path.split(b"/")])


async def _body(receive: Receive, limit: int) -> bytes | bytearray | None:
    """The whole body; a little more than `limit` if it is over; None if the client has gone."""
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
    """The app's answer; None if the client leaves before it is there. Raises what the server's `receive` raises."""
    done, _ = await asyncio.wait([exchange.response], timeout=_WATCH_AFTER_S)
    if not done:
        left = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((exchange.response, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
        if not exchange.response.done():
            failure = left.result()  # CancelledError, if that is what `receive` has raised
            if failure is not None:
                raise failure
            return None
    return exchange.response.result()


async def _disconnected(receive: Receive) -> BaseException | None:
    """Wait until the client leaves. What the server's own code raises is returned: some kinds would end the loop."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None


async def _send(response: HttpResponse, send: Send, head_only: bool) -> None:
    about_body = [
        (b"content-type", response.content_type),
        (b"content-length", str(len(response.body)).encode()),
    ]
    headers = [
        *(about_body if response.says_its_body else ()),
        (b"x-content-type-options", b"nosniff"),
        *response.headers,
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if head_only else bytes(response.body)})
