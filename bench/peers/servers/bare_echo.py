"""The limit of HTTP: httptools on uvloop and nothing behind it.  python bare_echo.py PORT

It sends every body back. It has no batching, no worker, no limits, no time-outs, no chunked bodies
and no pipelining: a Python server over this parser cannot be faster.
"""

import asyncio
import sys
from typing import cast

import httptools
import uvloop

BIG = 65536
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"


class Echo(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self.scratch = memoryview(bytearray(BIG))
        self.parser = httptools.HttpRequestParser(self)
        self.begin()

    def begin(self) -> None:
        self.small = b""
        self.big: bytearray | None = None
        self.rest = memoryview(b"")  # the part of `big` still to come
        self.length = 0
        self.content_type = b"application/json"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.scratch if self.big is None else self.rest

    def buffer_updated(self, nbytes: int) -> None:
        if self.big is None:
            self.parser.feed_data(self.scratch[:nbytes])
            return
        # Where the length is known, a large body is received straight into its own buffer and
        # never passes the parser. That one still waits for the body, so there is a new one next.
        self.rest = self.rest[nbytes:]
        if not self.rest:
            self.parser = httptools.HttpRequestParser(self)
            self.on_message_complete()

    def on_message_begin(self) -> None:
        self.begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            self.length = int(value)
        elif name == b"content-type":
            self.content_type = value

    def on_headers_complete(self) -> None:
        if self.length > BIG:
            self.big = bytearray(self.length)
            self.rest = memoryview(self.big)

    def on_body(self, body: bytes) -> None:
        if self.big is None:
            self.small += body
        else:  # what came in one piece with the headers
            self.rest[: len(body)] = body
            self.rest = self.rest[len(body) :]

    def on_message_complete(self) -> None:
        if self.transport.is_closing():
            return
        body = self.small if self.big is None else self.big
        head = HEAD % (self.content_type, len(body))
        if self.big is None:
            self.transport.write(head + body)
        else:
            self.transport.writelines([head, body])
            self.begin()


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1])))
