"""One bulk request over a connection of its own, whose body is sent while its answer is read.

General HTTP clients send the whole body first. A server that answers meanwhile would then have to
keep all answers, or stop reading; so bulk has its own few lines of HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools
import httpx

from carpool.client.messages import broken
from carpool.client.waits import end
from carpool.errors import Unavailable

_MOST_READ = 256 * 1024


class Target(NamedTuple):
    """Where a server is.

    Attributes:
        url: Its address.
        uds: The path of its Unix socket; None if it listens on a port.
        tls: How it is trusted; None without https.
    """

    url: str
    uds: str | None
    tls: ssl.SSLContext | None


class _Answer:
    """Takes what httptools finds in an answer."""

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
