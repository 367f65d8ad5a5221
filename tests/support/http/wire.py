"""A connection without a socket: the server's transport and its client in one object, and what the client reads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass

from carpool.http.reader import LARGEST_READ

_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) [A-Za-z '-]*")  # hypercorn leaves the reason out


@dataclass(frozen=True)
class Answer:
    """One response as a strict client reads it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_silent(self) -> bool:
        """Whether its status says that nothing follows, not even a length."""
        return self.status in (204, 304)

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"


def read_answers(data: bytes, methods: list[str] | None = None) -> list[Answer]:
    """Every final response in `data`, which must hold nothing else.

    Args:
        data: What a client has read.
        methods: Those of its requests, to know a HEAD.
    """
    answers: list[Answer] = []
    while data:
        head, blank, rest = data.partition(b"\r\n\r\n")
        assert blank, data
        line, *fields = head.split(b"\r\n")
        found = _STATUS_LINE.fullmatch(line)
        assert found, line
        if found[1] == b"100":
            data = rest
            continue
        headers: dict[str, str] = {}
        for field in fields:
            name, colon, value = field.decode("ascii").partition(": ")
            assert colon and name == name.lower() and (name not in headers or name == "set-cookie"), field
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        answer = Answer(int(found[1]), headers, b"")
        assert not (answer.is_silent and "content-length" in headers), data
        is_head = methods is not None and methods[len(answers)] == "HEAD"
        length = 0 if is_head or answer.is_silent else int(headers["content-length"])
        assert len(rest) >= length, data
        answers.append(Answer(int(found[1]), headers, rest[:length]))
        data = rest[length:]
    return answers


class Wire(asyncio.Transport):
    """A transport as asyncio's behave, and the client at its far end.

    Args:
        factory: Makes the protocol.
        reads: Whether the client reads whatever comes, or only by `read`.

    Attributes:
        received: What the client has read.
        ended: Whether the server has ended its side; lost: whether the connection is gone altogether.
        aborted: Whether the server has cut it off.
        reading_paused: Whether the server does not read.
        socket_error: What the socket would say of a client that has gone.
    """

    def __init__(self, factory: Callable[[], asyncio.Protocol], reads: bool = True) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self.reads = reads
        self.received = bytearray()
        self.ended = self.lost = self.aborted = self.reading_paused = False
        self.socket_error = 0
        self._unread = bytearray()  # written by the server, not yet read by the client
        self._unseen = bytearray()  # sent by the client, not yet read by the server
        self._eof_unseen = False
        self._closing = self._writing_paused = False
        self._high = 64 * 1024
        self.closed = self._loop.create_future()
        self._protocol: asyncio.Protocol | asyncio.BufferedProtocol = factory()
        self._reads_in_place = False
        self._protocol.connection_made(self)
        self._start_reading()

    # -- the client's side

    def send(self, data: bytes) -> None:
        """Bytes for the server, which reads them unless it has stopped reading."""
        self._unseen += data
        self._deliver()

    def end(self) -> None:
        """The client sends no more."""
        self._eof_unseen = True
        self._deliver()

    def reset(self) -> None:
        """The client is gone, and says so."""
        self._lose(ConnectionResetError())

    def read(self, n: int = 2**60) -> None:
        """The client reads up to n of the bytes that wait for it."""
        self.received += self._unread[:n]
        del self._unread[:n]
        if self._writing_paused and len(self._unread) <= self._high // 4:
            self._writing_paused = False
            self._protocol.resume_writing()
        if self._closing and not self._unread:
            self._loop.call_soon(self._lose, None)

    @property
    def unread(self) -> int:
        """Bytes that wait for the client."""
        return len(self._unread)

    def answers(self, methods: list[str] | None = None) -> list[Answer]:
        """The responses that the client has read."""
        return read_answers(bytes(self.received), methods)

    def _deliver(self) -> None:
        while self._unseen and not self.reading_paused and not self._closing and not self.lost:
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                assert self._reads_in_place, "a transport looks at this only when it starts to read"
                buffer = self._protocol.get_buffer(-1)
                n = min(len(buffer), len(self._unseen))
                assert n > 0
                buffer[:n] = self._unseen[:n]
                del self._unseen[:n]
                self._protocol.buffer_updated(n)
            else:
                assert not self._reads_in_place
                data = bytes(self._unseen[:LARGEST_READ])
                del self._unseen[:LARGEST_READ]
                self._protocol.data_received(data)
        if self._eof_unseen and not self._unseen and not self.reading_paused and not self._closing and not self.lost:
            self._eof_unseen = False
            if not self._protocol.eof_received():
                self.close()

    # -- the server's side: asyncio.Transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.lost and not self.ended, "written to a connection that has ended"
        self._unread += data
        if self.reads:
            self.read()
        elif len(self._unread) > self._high and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        if not self._closing:
            self._closing = self.ended = True
            if not self._unread:
                self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        if not self.lost:
            self.aborted = self._closing = self.ended = True
            self._unread.clear()
            self._loop.call_soon(self._lose, None)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        assert not self.reading_paused and not self._closing
        self.reading_paused = True

    def resume_reading(self) -> None:
        assert self.reading_paused and not self._closing
        self.reading_paused = False
        self._start_reading()
        self._loop.call_soon(self._deliver)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol | asyncio.BufferedProtocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def _start_reading(self) -> None:
        """As uvloop does: how a protocol receives is looked at here and nowhere else."""
        self._reads_in_place = isinstance(self._protocol, asyncio.BufferedProtocol)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None and low is None
        self._high = high

    def get_write_buffer_size(self) -> int:
        return len(self._unread)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self if name == "socket" else default

    def getsockopt(self, level: int, option: int) -> int:
        """As the socket that it stands for."""
        return self.socket_error

    def _lose(self, error: Exception | None) -> None:
        if not self.lost:
            self.lost = self._closing = self.ended = True
            self._protocol.connection_lost(error)
            self.closed.set_result(None)
