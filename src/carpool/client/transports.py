"""The ways of a client to what it asks beside those of httpx: an app in the same process, and bulk.

`AppTransport` lets httpx ask an ASGI app, with bodies in both directions as they come. `Duplex` is
one bulk request over a connection of its own, whose body is sent while its answer is read; general
HTTP clients send the whole body first.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import httptools
import httpx

from carpool.client.messages import broken
from carpool.client.waits import end
from carpool.errors import Unavailable
from carpool.http.asgi import BrokenAnswer

_MOST_WAITING = 16  # messages of the app that wait for the client


class AppTransport(httpx.AsyncBaseTransport):
    """Asks an app instead of a server.

    Args:
        app: The ASGI app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Begin to answer a request, up to the head of the answer."""
        asking = _Asking(self._app, request)
        try:
            status, headers = await asking.head()
        except BaseException:
            await asking.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=asking)

    async def aclose(self) -> None:
        """Stop the app, if it can be stopped."""
        stop = getattr(self._app, "stop", None)
        if stop is not None:
            await stop()


class _Asking(httpx.AsyncByteStream):
    """One request to the app; it is the body of its answer."""

    def __init__(self, app: Any, request: httpx.Request) -> None:
        self._body = aiter(request.stream)  # type: ignore[arg-type]
        self._has_body_ended = False
        self._reading: asyncio.Future[bytes | None] | None = None
        self._has_left = asyncio.Event()
        self._messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue(_MOST_WAITING)
        path = request.url.raw_path.partition(b"?")[0]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": request.url.scheme,
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": request.url.query,
            "root_path": "",
            "server": (request.url.host, request.url.port),
            "client": ("127.0.0.1", 0),
        }
        self._running = asyncio.ensure_future(self._run(app, scope))

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        message = await self._next()
        return message["status"], list(message["headers"])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._next()
            yield message.get("body", b"")
            if not message.get("more_body"):
                return

    async def _next(self) -> MutableMapping[str, Any]:
        """Return the next message of the app, or raise what it has raised, or that it broke off."""
        getting = asyncio.ensure_future(self._messages.get())
        try:
            await asyncio.wait([getting, self._running], return_when=asyncio.FIRST_COMPLETED)
            if not getting.done() and not self._messages.empty():
                await asyncio.wait([getting])
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        failure = self._running.exception()
        if failure is not None and not isinstance(failure, BrokenAnswer):
            raise failure
        raise broken("the answer")

    async def aclose(self) -> None:
        self._has_left.set()
        await end(self._running)
        if self._reading is not None:  # the app may have a task of its own that waits for it
            await end(self._reading)

    async def _run(self, app: Any, scope: dict[str, Any]) -> None:
        await app(scope, self._receive, self._messages.put)

    async def _receive(self) -> dict[str, Any]:
        if not self._has_body_ended:
            self._reading = asyncio.ensure_future(anext(self._body, None))
            data = await self._reading
            self._has_body_ended = data is None
            return {"type": "http.request", "body": data or b"", "more_body": data is not None}
        await self._has_left.wait()
        return {"type": "http.disconnect"}


_MOST_READ = 256 * 1024


class Target(NamedTuple):
    """Where a server is."""

    url: str
    uds: str | None
    tls: ssl.SSLContext | None


class _Answer:
    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.has_head = self.is_complete = False
        self.body: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True


class Duplex:
    """A bulk request on its way.

    Attributes:
        status: Of the answer.
        headers: Of the answer.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._reader = reader
        self._writer = writer
        self._answer = _Answer()
        self._parser = httptools.HttpResponseParser(self._answer)
        self._sending: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, target: Target) -> Duplex:
        """Connect. Raises OSError if that is not possible."""
        if target.uds is not None:
            return cls(*await asyncio.open_unix_connection(target.uds, limit=_MOST_READ))
        parts = urlsplit(target.url)
        port = parts.port or (443 if target.tls else 80)
        return cls(*await asyncio.open_connection(parts.hostname, port, ssl=target.tls, limit=_MOST_READ))

    async def begin(self, request: httpx.Request, body: AsyncIterator[bytes]) -> None:
        """Send the head, begin to send the body, and wait for the head of the answer."""
        lines = [b"POST %b HTTP/1.1" % request.url.raw_path, *(b"%b: %b" % each for each in request.headers.raw)]
        self._writer.write(b"\r\n".join([*lines, b"", b""]))
        self._sending = asyncio.ensure_future(self._send(body))
        while not self._answer.has_head:
            await self._read()
        self.status = self._parser.get_status_code()
        self.headers = self._answer.headers

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body of the answer as it comes.

        Raises:
            Unavailable: It broke off.
            InputFailed: The input has raised.
        """
        while True:
            if self._answer.body:
                data = b"".join(self._answer.body)
                self._answer.body.clear()
                yield data
            elif self._answer.is_complete:
                return
            else:
                await self._read()

    async def close(self) -> None:
        """Let go of the connection. What is not sent yet is not wanted any more."""
        self._writer.transport.abort()  # close() would wait for a server that has ceased to read
        if self._sending is not None:
            await end(self._sending)
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self) -> None:
        """Read a piece of the answer, or raise that the input has failed."""
        is_sending = self._is_sending()
        reading = asyncio.ensure_future(self._reader.read(_MOST_READ))
        waited: set[asyncio.Future[object]] = {reading}  # type: ignore[arg-type]
        try:
            if is_sending:
                waited.add(self._sending)  # type: ignore[arg-type]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self._is_sending()
            try:
                data = await reading
            except OSError as error:
                raise broken("the answer") from error
        finally:
            reading.cancel()
        if not data:
            raise broken("the answer")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Unavailable(f"the server's answer is not HTTP: {error}", code="broken", retry_after_s=None) from error

    def _is_sending(self) -> bool:
        """Report whether the body is still being sent. Raises `InputFailed` if it cannot be."""
        if self._sending is None or not self._sending.done():
            return self._sending is not None
        self._sending.result()
        return False

    async def _send(self, body: AsyncIterator[bytes]) -> None:
        async for data in body:
            if not await self._has_put(b"%x\r\n%b\r\n" % (len(data), data)):
                return
        await self._has_put(b"0\r\n\r\n")

    async def _has_put(self, data: bytes) -> bool:
        """Send data; report whether the server takes more. If not, its answer says why."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError:
            return False
        return True
