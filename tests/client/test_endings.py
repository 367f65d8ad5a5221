"""Calls of clients end: whatever becomes of the server, the client, the process or the input."""

from __future__ import annotations

import asyncio
import gc
import gzip
import math
import os
import signal
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("httpx", reason="clients need carpool[client]")

import httpx

import carpool
from carpool import Service, Stage
from carpool.client.messages import EventReader, LineSplitter
from carpool.http.app import App
from tests.support.http.net import RunningServer, serving
from tests.support.waiting import PATIENCE_S, wait_until

SHORT_S = 0.2
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LINES = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n"
GOOD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1\r\n\r\n7"


class Server:
    """Answers each request as it is told, and keeps the connection or ends it.

    Args:
        answer: Returns the bytes of the answer to the head of a request.
        ending: "silent", "closed" or "reset".
    """

    def __init__(self, answer: Callable[[bytes], bytes], ending: str) -> None:
        self._answer = answer
        self._ending = ending
        self.heads: list[bytes] = []
        self._kept: list[socket.socket] = []
        self._keeping = threading.Lock()
        self._is_closed = False
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._sock.accept()
                with self._keeping:
                    self._kept.append(connection)
                    if self._is_closed:  # a client had come just before
                        connection.close()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        head = b""
        with suppress(OSError):
            while b"\r\n\r\n" not in head:
                head += connection.recv(65536) or b"\r\n\r\n"
            self.heads.append(head)
            connection.sendall(self._answer(head))
            if self._ending == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
            if self._ending == "closed":  # of what was sent nothing is left unread, or this would be a reset
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

    def close(self) -> None:
        with self._keeping:
            self._is_closed = True
            for sock in (self._sock, *self._kept):
                sock.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(answer: Callable[[bytes], bytes], ending: str = "silent") -> Server:
        servers.append(Server(answer, ending))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def nothing(head: bytes) -> bytes:
    return b""


def half(head: bytes) -> bytes:
    """Half of an answer: its head and a part."""
    if b"event-stream" in head:
        return EVENTS + b"9\r\ndata: 7\n\n\r\n"
    return LINES + b"2\r\n7\n\r\n" if b"ndjson" in head else WHOLE + b"7"


def rubbish(head: bytes) -> bytes:
    return b"\0rubbish\r\n\r\n"


CALLS: dict[str, Callable[[carpool.AsyncClient], Any]] = {
    "predict": lambda client: client.predict(1),
    "many": lambda client: client.predict_many([1, 2]),
    "stream": lambda client: client.predict_stream(1),
    "stream with a deadline": lambda client: client.predict_stream(1, timeout_s=SHORT_S),
    "readiness": lambda client: client.wait_until_ready(SHORT_S),
}


class SyncCalls:
    """Makes each call in a thread of its own."""

    def __init__(self, url: Any, **options: Any) -> None:
        self.client: Any = carpool.Client(url, **options)
        self.ends: dict[str, tuple[list[Any], BaseException | None]] = {}
        self._threads = [threading.Thread(target=self._call, args=each, daemon=True) for each in CALLS.items()]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _call(self, name: str, call: Callable[[Any], Any]) -> None:
        got: list[Any] = []
        try:
            answer = call(self.client)
            if isinstance(answer, Iterator):
                for each in answer:
                    got.append(each)  # what came before an error is kept
            self.ends[name] = got, None
        except BaseException as error:
            self.ends[name] = got, error

    def close(self) -> None:
        self.client.close()


class AsyncCalls:
    """Makes each call in a task of its own, all on one loop in a thread."""

    def __init__(self, url: Any, **options: Any) -> None:
        self.client = carpool.AsyncClient(url, **options)
        self.ends: dict[str, tuple[list[Any], BaseException | None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self) -> None:
        self._calls = [
            asyncio.run_coroutine_threadsafe(self._call(name, call), self._loop) for name, call in CALLS.items()
        ]

    async def _call(self, name: str, call: Callable[[Any], Any]) -> None:
        got: list[Any] = []
        try:
            answer = call(self.client)
            if isinstance(answer, AsyncIterator):
                async for each in answer:
                    got.append(each)
            else:
                await answer
            self.ends[name] = got, None
        except BaseException as error:
            self.ends[name] = got, error

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.client.close(), self._loop).result(PATIENCE_S)
        wait(self._calls, PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


KINDS = pytest.mark.parametrize("kind", [SyncCalls, AsyncCalls])


@KINDS
@pytest.mark.parametrize("answer", [nothing, half, rubbish])
@pytest.mark.parametrize("ending", ["silent", "closed", "reset"])
def test_every_call_ends_whatever_becomes_of_its_answer(
    kind: Any, answer: Any, ending: str, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose server is silent, closes or resets ends by its time limit with an error of ours, and the answers
    that came before are yielded."""
    monkeypatch.setattr("carpool.client.aio._GRACE_S", 0.0)
    calls = kind(serve(answer, ending).url, timeout_s=SHORT_S)
    calls.start()
    wait_until(lambda: len(calls.ends) == len(CALLS))
    calls.close()
    for name, (got, error) in calls.ends.items():
        assert isinstance(error, carpool.CarpoolError), (name, error)
        if answer is half and ending != "reset" and name not in ("predict", "readiness"):
            assert got == [7], name
        if (answer, ending) == (nothing, "silent"):
            assert isinstance(error, carpool.DeadlineExceeded), (name, error)


@KINDS
def test_every_call_to_an_app_ends(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is answered without a socket ends by its time limit, though the model does not."""
    monkeypatch.setattr("carpool.client.aio._GRACE_S", 0.0)
    gate = threading.Event()

    def held(x: int) -> int:
        gate.wait(PATIENCE_S)
        return x

    calls = kind(App(Service(Stage(held, run_in="thread"))), timeout_s=SHORT_S)
    calls.start()
    wait_until(lambda: len(calls.ends) == len(CALLS))
    gate.set()
    calls.close()
    for name, (_, error) in calls.ends.items():
        assert isinstance(error, carpool.DeadlineExceeded) or name == "readiness", (name, error)


def test_a_refusal_that_breaks_off_is_not_waited_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a refusal of a bulk request ends by the time limit, though the input has brought nothing yet."""
    monkeypatch.setattr("carpool.client.aio._GRACE_S", 0.0)
    refusal = b"HTTP/1.1 503 X\r\ncontent-length: 10\r\n\r\nx"
    gate = threading.Event()

    def slow() -> Iterator[int]:
        gate.wait(PATIENCE_S)
        yield 1

    with carpool.Client(serve(lambda head: refusal).url, timeout_s=SHORT_S) as client:
        with pytest.raises(carpool.DeadlineExceeded):
            list(client.predict_many(slow()))
        assert not gate.is_set()
        gate.set()


@KINDS
@pytest.mark.parametrize("answer", [nothing, half])
def test_calls_under_way_end_when_their_client_is_closed(kind: Any, answer: Any, serve: Any) -> None:
    """`close` ends the calls of other threads and tasks with `Unavailable`, and later calls are refused."""
    server = serve(answer)
    calls = kind(server.url)
    calls.start()
    wait_until(lambda: len(server.heads) == len(CALLS))
    calls.close()
    wait_until(lambda: len(calls.ends) == len(CALLS))
    for name, (_, error) in calls.ends.items():
        if name == "readiness" and isinstance(error, carpool.DeadlineExceeded):
            continue  # its own time was over first
        assert isinstance(error, carpool.Unavailable) and error.code == "closed", (name, error)


async def _first_of(call: Any) -> Any:
    return await anext(call) if isinstance(call, AsyncIterator) else await call


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_client_refuses_calls(name: str) -> None:
    """After `close` each call of either client raises RuntimeError."""
    client: Any = carpool.Client()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(CALLS[name](client) or ())

    async def main() -> None:
        client = carpool.AsyncClient()
        await client.close()
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await _first_of(CALLS[name](client))

    asyncio.run(main())


# -- a server that is as it should be


def doubled(x: float) -> float:
    return 2 * x


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with serving(App(Service(Stage(doubled, run_in="thread")))) as server:
        yield server


def _url(running: RunningServer) -> str:
    return f"http://127.0.0.1:{running.port}"


def test_a_client_works_after_a_fork(running: RunningServer) -> None:
    """A client that was made before a fork answers in the child and in the parent; what the parent has begun to read
    raises in the child."""
    with carpool.Client(_url(running)) as client:
        begun = client.predict_many(range(1000))
        assert next(begun) == 0
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE_S))  # ends a child that hangs
            status = 1
            try:
                with pytest.raises(carpool.Unavailable, match="parent"):
                    list(begun)
                assert client.predict(2) == 4
                assert list(client.predict_many([1, 2])) == [2, 4]
                assert list(client.predict_stream(3)) == [6]
                client.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert list(begun) == [2 * n for n in range(1, 1000)]
        assert client.predict(2) == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unclosed, as its loop left them
def test_a_client_for_tasks_goes_with_its_loop(running: RunningServer) -> None:
    """A client for tasks that is used on another loop makes connections of its own there."""
    client = carpool.AsyncClient(_url(running))

    async def main(*, is_last: bool) -> None:
        assert await client.predict(2) == 4
        assert [y async for y in client.predict_many([1, 2])] == [2, 4]
        if is_last:
            await client.close()

    asyncio.run(main(is_last=False))
    asyncio.run(main(is_last=True))
    gc.collect()  # the connections of the first loop, which has ended


def test_a_dropped_client_for_tasks_closes_its_connections(running: RunningServer) -> None:
    """A client for tasks that is dropped while its loop goes on leaves no connection open."""

    def sockets() -> int:
        gc.collect()
        n = 0
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # that of the directory itself
                n += os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
        return n

    async def main() -> None:
        before = sockets()
        client = carpool.AsyncClient(_url(running))
        await client.predict(2)
        assert sockets() > before
        del client
        async with asyncio.timeout(PATIENCE_S):
            while sockets() > before:  # noqa: ASYNC110 # nobody reports it
                await asyncio.sleep(0.01)

    asyncio.run(main())


def _client_threads() -> int:
    return sum(thread.name.startswith("carpool client") for thread in threading.enumerate())


@pytest.mark.parametrize("what", ["idle", "many", "stream"])
def test_a_dropped_client_leaves_nothing(what: str, running: RunningServer) -> None:
    """A client that is dropped, also with an answer that is half read, ends its thread."""
    wait_until(lambda: _client_threads() == 0)
    for _ in range(3):
        client = carpool.Client(_url(running))
        client.predict(1)
        answer = client.predict_many(range(10_000)) if what == "many" else client.predict_stream(1)
        if what != "idle":
            next(answer)
        ring: list[Any] = [client, answer]
        ring.append(ring)  # only the collector finds it
        del client, answer, ring
    gc.collect()
    wait_until(lambda: _client_threads() == 0)


ERRORS = [
    KeyError("x"),
    FileNotFoundError("x"),
    TimeoutError("x"),
    ConnectionResetError("x"),
    httpx.ConnectError("x"),
    carpool.Unavailable("x", code="x", retry_after_s=None),
    RuntimeError("x"),
    SystemExit("x"),
    KeyboardInterrupt("x"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["tcp", "app"])
def test_what_an_input_raises_is_raised(where: str, error: BaseException, running: RunningServer) -> None:
    """Whatever an input raises is raised as it is, by both clients, and the next call is answered."""

    def broken() -> Iterator[int]:
        yield 1
        raise error

    async def broken_later() -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(0)
        raise error

    def server() -> Any:
        return _url(running) if where == "tcp" else App(Service(Stage(doubled, run_in="thread")))

    async def main() -> None:
        async with carpool.AsyncClient(server()) as client:
            for xs in (broken(), broken_later()):
                with pytest.raises(type(error)) as raised:
                    _ = [y async for y in client.predict_many(xs)]
                assert raised.value is error
            assert await client.predict(1) == 2

    with carpool.Client(server()) as client:
        with pytest.raises(type(error)) as raised:
            list(client.predict_many(broken()))
        assert raised.value is error and client.predict(1) == 2
    asyncio.run(main())


def test_an_input_that_raises_while_nobody_waits_is_raised_next(serve: Any) -> None:
    """What an input raises between two answers is raised in the place of the next one, however silent the server
    is."""

    async def main() -> None:
        is_answered, has_raised = asyncio.Event(), asyncio.Event()

        async def xs() -> AsyncIterator[int]:
            yield 1
            await is_answered.wait()
            has_raised.set()
            raise KeyError("input")

        async with carpool.AsyncClient(serve(half).url, timeout_s=SHORT_S) as client:
            answers = client.predict_many(xs())
            assert await anext(answers) == 7
            is_answered.set()
            await has_raised.wait()
            await asyncio.sleep(SHORT_S)  # those who send have ended
            with pytest.raises(KeyError):
                await anext(answers)

    asyncio.run(main())


@pytest.mark.parametrize("where", ["tcp", "app"])
def test_a_call_that_is_cancelled_while_its_input_ends_waits_for_it(where: str, running: RunningServer) -> None:
    """A call that is cancelled, and once more while its input cleans up, cancels the input once more and ends as
    cancelled, when nothing uses the input any more."""
    seen: list[str] = []

    async def main() -> None:
        cleans_up = asyncio.Event()

        async def xs() -> AsyncIterator[int]:
            yield 1
            try:
                await asyncio.Event().wait()
            finally:
                cleans_up.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    seen.append("ended")

        async def ask(client: carpool.AsyncClient) -> None:
            async for y in client.predict_many(xs()):
                seen.append(f"answered {y:g}")

        server = _url(running) if where == "tcp" else App(Service(Stage(doubled, run_in="thread")))
        async with carpool.AsyncClient(server) as client:
            asking = asyncio.ensure_future(ask(client))
            while not seen:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            asking.cancel()
            await cleans_up.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert seen == ["answered 2", "ended"]

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_refused_in_bulk(number: float, running: RunningServer) -> None:
    """NaN and infinities are sent by `predict` as they are, and refused by `predict_many`, which sends JSON."""
    with carpool.Client(_url(running)) as client:
        for item in (number, [1.0, number], {"x": [number]}):
            with pytest.raises(ValueError, match="NaN"):
                list(client.predict_many([item]))


def test_all_calls_keep_the_path_of_the_address(serve: Any) -> None:
    """Behind a proxy that serves below a prefix every call goes below it, with the same host and key."""
    server = serve(lambda head: GOOD, "closed")
    with carpool.Client(server.url + "/team-a/x/", api_key="k", timeout_s=SHORT_S) as client:
        for call in CALLS.values():
            with suppress(carpool.CarpoolError):
                list(call(client) or ()) if call is not CALLS["predict"] else call(client)
    heads = [head.lower().split(b"\r\n") for head in server.heads]
    assert {lines[0].split()[1] for lines in heads} == {b"/team-a/x/predict", b"/team-a/x/readyz"}
    assert all(b"host: " + server.url[7:].encode() in lines for lines in heads)
    assert all(b"authorization: bearer k" in lines for lines in heads)


# -- events


def _chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_stream_ends_with_its_end(is_compressed: bool, serve: Any) -> None:
    """A stream is over when its end has come, though the connection stays open; what was compressed is read."""
    body = b'data: 1\n\ndata: 2\n\nevent: end\ndata: {"parts": 2}\n\n'
    if is_compressed:
        body = gzip.compress(body)
    coding = b"\r\ncontent-encoding: gzip\r\n\r\n" if is_compressed else b"\r\n\r\n"
    server = serve(lambda head: EVENTS.removesuffix(b"\r\n\r\n") + coding + _chunked(body))
    with carpool.Client(server.url) as client:
        assert list(client.predict_stream(1)) == [1, 2]


def test_a_stream_that_lacks_a_part_is_broken(serve: Any) -> None:
    """An end that counts other parts than have come raises."""
    body = b'data: 1\n\nevent: end\ndata: {"parts": 2}\n\n'
    with carpool.Client(serve(lambda head: EVENTS + _chunked(body)).url) as client:
        parts = client.predict_stream(1)
        assert next(parts) == 1
        with pytest.raises(carpool.Unavailable, match="broke off"):
            next(parts)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_read_however_they_are_cut(end: bytes) -> None:
    """Pieces of any size give the same parts, and an event of several lines of data is one part."""
    lines = [b": alive", b"", b"data: [1,", b"data: 2]", b"", b"data:3", b"", b"event: end", b'data: {"parts": 2}', b""]
    body = b"".join(line + end for line in lines)
    for size in range(1, len(body) + 1):
        events = EventReader()
        parts = [part for i in range(0, len(body), size) for part in events.feed(body[i : i + size])]
        assert parts == [b"[1,\n2]", b"3"] and events.has_ended and events.failure is None


class CountedPiece(bytes):
    """A piece that counts how many bytes are searched for the ends of lines."""

    searched = 0

    def split(self, *args: Any) -> list[bytes]:  # type: ignore[override]
        CountedPiece.searched += len(self)
        return super().split(*args)


def test_a_long_line_is_searched_once() -> None:
    """Of a line that comes in many pieces each byte is searched for its end once, so twice the pieces are twice the
    work."""
    lines = LineSplitter()
    CountedPiece.searched = 0
    for _ in range(1000):
        assert lines.feed(CountedPiece(b"a" * 100)) == []
    assert lines.has_rest and lines.feed(CountedPiece(b"\nb\n")) == [b"a" * 100_000, b"b"]
    assert CountedPiece.searched == 100_003 and not lines.has_rest


async def _asks_for_a_socket_that_is_gone(self: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
    gone: Any = None
    return gone.getpeername()  # type: ignore[no-any-return]


def test_a_connection_that_is_cut_as_it_is_made_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the libraries below raise about a socket that is gone is an error of the connection."""
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", _asks_for_a_socket_that_is_gone)

    async def run() -> None:
        async with carpool.AsyncClient("http://127.0.0.1:1", retries=False) as client:
            with pytest.raises(carpool.Unavailable, match="cut as it was made"):
                await client.predict(1)
            with pytest.raises(carpool.Unavailable, match="cut as it was made"):
                [part async for part in client.predict_stream(1)]

    asyncio.run(run())


def test_a_connection_that_was_forgotten_as_it_was_made_is_closed() -> None:
    """The end of a client closes what the libraries below have lost sight of."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        client = carpool.Client(f"http://127.0.0.1:{port}")
        thread, _ = client._running()

        async def connect() -> None:
            await thread.loop.create_connection(asyncio.Protocol, "127.0.0.1", port)

        thread.run(connect())
        with listening.accept()[0] as accepted:
            client.close()
            accepted.settimeout(PATIENCE_S)
            with suppress(ConnectionResetError):
                assert accepted.recv(1) == b""
        gc.collect()
