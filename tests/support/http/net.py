"""Real servers and real clients: a server on a thread of its own, raw sockets, and gates that hold models back."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from carpool.http.app import App
from carpool.http.server import Server
from carpool.http.server_state import Limits
from tests.support.http.front import post
from tests.support.http.wire import Answer, read_answers
from tests.support.waiting import PATIENCE_S, wait_until

T = TypeVar("T")


class RunningServer:
    """Our own server around an app, on a loop in a thread of its own.

    Args:
        app: What to serve.
        limits: Of its connections.
        loop: A uvloop, or asyncio's own.
    """

    def __init__(
        self,
        app: App,
        limits: Limits | None = None,
        loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    ) -> None:
        self.app = app
        self.server = Server(app, port=0, limits=limits)
        self.loop = loop()
        self.starting: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    @property
    def port(self) -> int:
        return self.server.port

    def listen(self) -> None:
        """Accept connections; the services are not started yet."""
        self._thread.start()
        self.wait(self.server.listen())

    def start(self) -> None:
        """Start the services, and wait until they are ready."""
        self.wait(self.app.start())

    def stop(self) -> None:
        """Drain and end."""
        try:
            self.wait(self.server.stop())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(PATIENCE_S)
            self.loop.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the server's loop do something, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def call(self, function: Callable[[], T]) -> T:
        """Have the server's loop call something."""

        async def call() -> T:
            return function()

        return self.wait(call())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true on the server's loop."""
        wait_until(lambda: self.call(condition))

    def outcomes(self, service: int = 0) -> dict[str, int]:
        """How often each outcome was counted, `cancelled` too."""
        handle = self.app.endpoints[service].handle
        assert handle is not None
        counts = self.call(handle.stats).outcomes
        return {name: n for name, n in counts.items() if n}

    @property
    def pids(self) -> list[int]:
        """The worker processes."""
        return [pid for endpoint in self.app.endpoints if endpoint.handle is not None for pid in endpoint.handle.pids]


def waiting(app: App, service: int = 0) -> int:
    """How many requests wait in a service's queues; to be asked on the app's loop."""
    driver = app.endpoints[service].driver
    assert driver is not None
    return driver.core.waiting


@contextmanager
def serving(app: App, limits: Limits | None = None, **options: Any) -> Iterator[RunningServer]:
    """A server that is ready, and is drained in the end."""
    running = RunningServer(app, limits, **options)
    running.listen()
    try:
        running.start()
        yield running
    finally:
        running.stop()


class Client:
    """A raw client: sends bytes, reads answers strictly."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        """All of it; a server that has already refused and gone is none of our business."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(data)

    def ask(self, data: bytes, method: str = "POST") -> Answer:
        """Send a request and read its answer."""
        self.send(data)
        return self.answer(method)

    def answer(self, method: str = "POST") -> Answer:
        """The next answer; interim ones are skipped."""
        while True:
            head = self._read_until(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 100"):
                break
        (blank,) = read_answers(head, ["HEAD"])
        length = 0 if method == "HEAD" or blank.is_silent else int(blank.headers["content-length"])
        while len(self._data) < length:
            self._receive()
        body, self._data = self._data[:length], self._data[length:]
        return Answer(blank.status, blank.headers, body)

    def end(self) -> None:
        """Send no more, but go on reading."""
        self.sock.shutdown(socket.SHUT_WR)

    def at_end(self) -> bool:
        """Whether the server ends its side without another byte; a reset counts too."""
        try:
            return not self._data and not self.sock.recv(1)
        except ConnectionResetError:
            return True

    def reset(self) -> None:
        """Close with a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.sock.close()

    def _read_until(self, mark: bytes) -> bytes:
        while mark not in self._data:
            self._receive()
        found, mark, self._data = self._data.partition(mark)
        return found + mark

    def _receive(self) -> None:
        data = self.sock.recv(256 * 1024)
        if not data:
            raise ConnectionResetError("the server has ended its side")
        self._data += data


def predict(port: int, item: Any, path: str = "/predict", *headers: str) -> Answer:
    """Ask once, in JSON."""
    with Client(port) as client:
        return client.ask(post(json.dumps(item).encode(), path, *headers))


def code_of(answer: Answer) -> str:
    """The error code of an answer."""
    code = json.loads(answer.body)["error"]["code"]
    assert isinstance(code, str)
    return code


class Gate:
    """Holds models back that knock at it, see `models.wait_at`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gate-")
        self.path = str(Path(self._folder.name) / "gate")
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(self.path)
        self._sock.listen(64)
        self._sock.settimeout(PATIENCE_S)
        self._waiting: list[socket.socket] = []

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()
        while self._waiting:
            self.open()
        self._folder.cleanup()

    def knocked(self) -> None:
        """Wait until a model has come to the gate."""
        self._waiting.append(self._sock.accept()[0])

    def open(self) -> None:
        """Let the first one that waits go on."""
        with self._waiting.pop(0) as sock, suppress(BrokenPipeError):  # its worker may have died
            sock.send(b"!")
