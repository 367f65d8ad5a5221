"""The ways to code that is not ours: each driver behind each of its doors, and one question for all of them.

`ask` gives several items at the same time and says how each call ended. It waits no longer than a caller may be kept
waiting, and raises `Hangs` where one is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import carpool
from carpool.http.app import App
from carpool.http.server import Server

T = TypeVar("T")

TIMEOUT_S = 5.0
"""Of every service and batch function here."""

LIMIT_S = TIMEOUT_S + 1.0
"""Until when every call must have ended."""

START_LIMIT_S = 60.0
"""Until when a service must have started, or have failed to; a start takes as long as the machine does."""


class Told(NamedTuple):
    """How a call ended: with a value, or with an error, which has a code if it is one of ours."""

    value: Any = None
    code: str = ""
    error: BaseException | None = None


class Hangs(AssertionError):
    """A call did not end in time."""


def all_at_once(calls: Sequence[Callable[[], Any]], limit_s: float = LIMIT_S) -> list[Told]:
    """Calls in threads of their own; how each ended."""
    told: list[Told | None] = [None] * len(calls)

    def one(i: int) -> None:
        try:
            told[i] = Told(calls[i]())
        except BaseException as error:
            told[i] = of_error(error)

    threads = [threading.Thread(target=one, args=(i,), name="asks", daemon=True) for i in range(len(calls))]
    until = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    ended = [each for each in told if each is not None]
    if len(ended) < len(calls):
        raise Hangs(f"{len(calls) - len(ended)} of {len(calls)} calls had not ended after {limit_s} s")
    return ended


def of_error(error: BaseException) -> Told:
    """A call that raised."""
    code = error.code if isinstance(error, carpool.CarpoolError | Refused) else type(error).__name__
    return Told(code=code, error=error)


def within(call: Callable[[], T], limit_s: float = LIMIT_S) -> T:
    """What a call returns or raises, in time."""
    (told,) = all_at_once([call], limit_s)
    if told.error is not None:
        raise told.error
    return told.value  # type: ignore[no-any-return]


def raised_by(call: Callable[[], object]) -> BaseException:
    """What a call raises, which it must."""
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


class LoopThread:
    """An event loop in a thread of its own, which callers' tasks run on."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.complaints: list[str] = []
        self.died: BaseException | None = None
        self.loop.set_exception_handler(lambda _, context: self.complaints.append(repr(context)))
        self._thread = threading.Thread(target=self._run, name="a caller's loop", daemon=True)
        self._thread.start()

    def ask(self, work: Sequence[Callable[[], Awaitable[Any]]], limit_s: float = LIMIT_S) -> list[Told]:
        """Tasks that begin in one turn of the loop; how each ended."""

        async def one(what: Callable[[], Awaitable[Any]]) -> Told:
            try:
                return Told(await what())
            except BaseException as error:
                return of_error(error)

        async def together() -> list[Told]:
            return list(await asyncio.gather(*[one(what) for what in work]))

        ended = asyncio.run_coroutine_threadsafe(together(), self.loop)
        until = time.monotonic() + limit_s
        while not ended.done():
            if self.died is not None:
                raise Hangs(f"the loop ended with {type(self.died).__name__}: nobody is answered any more")
            if time.monotonic() > until:
                raise Hangs(f"the calls had not ended after {limit_s} s")
            with contextlib.suppress(TimeoutError):
                return ended.result(0.2)
        return ended.result()

    def wait(self, work: Callable[[], Coroutine[Any, Any, T]], limit_s: float = LIMIT_S) -> T:
        """What one task returns or raises."""
        (told,) = self.ask([work], limit_s)
        if told.error is not None:
            raise told.error
        return told.value  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the loop; whatever still runs there was left behind."""

        async def others() -> list[str]:
            return [repr(task) for task in asyncio.all_tasks() if task.get_name() != "asks" and not task.done()]

        async def look() -> list[str]:
            asyncio.current_task().set_name("asks")  # type: ignore[union-attr]
            left = await others()
            for _ in range(100):
                if len(left) <= 1:  # the one that asks
                    break
                await asyncio.sleep(0.01)
                left = await others()
            return left[1:] if len(left) > 1 else []

        left = asyncio.run_coroutine_threadsafe(look(), self.loop).result(LIMIT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LIMIT_S)
        self.loop.close()
        assert not left, f"tasks were left behind: {left}"
        assert not self.complaints, self.complaints

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        except BaseException as error:
            self.died = error


class Door(Protocol):
    """A service that runs, as its callers see it."""

    pids: list[int]

    def ask(self, *items: Any, timeout_s: float | None = None) -> list[Told]:
        """How calls for these items ended, which were made at the same time."""

    def close(self) -> None:
        """Stop the service."""


class HandleDoor:
    """Threads that call a `Handle`."""

    def __init__(self, service: carpool.Service, *others: carpool.Service, **options: Any) -> None:
        self.handle = within(lambda: service.start(**options), START_LIMIT_S)

    @property
    def pids(self) -> list[int]:
        return self.handle.pids

    def ask(self, *items: Any, timeout_s: float | None = None) -> list[Told]:
        return all_at_once([lambda x=x: self.handle.predict(x, timeout_s=timeout_s) for x in items])  # type: ignore[misc]

    def stats(self) -> Any:
        return within(self.handle.stats)

    def close(self) -> None:
        within(self.handle.close)


class AsyncHandleDoor:
    """Tasks that await an `AsyncHandle`."""

    def __init__(self, service: carpool.Service, *others: carpool.Service, **options: Any) -> None:
        self.loop = LoopThread()
        try:
            self.handle = self.loop.wait(lambda: self._start(service, options), START_LIMIT_S)
        except BaseException:
            self.loop.close()
            raise

    @property
    def pids(self) -> list[int]:
        return self.handle.pids

    def ask(self, *items: Any, timeout_s: float | None = None) -> list[Told]:
        return self.loop.ask([lambda x=x: self.handle.predict(x, timeout_s=timeout_s) for x in items])  # type: ignore[misc]

    def stats(self) -> Any:
        async def ask() -> Any:
            return self.handle.stats()

        return self.loop.wait(ask)

    def close(self) -> None:
        self.loop.wait(self.handle.close)
        self.loop.close()

    async def _start(self, service: carpool.Service, options: dict[str, Any]) -> Any:
        handle = service.run_async(**options)
        await handle.start()
        return handle


class _AppDoor:
    """An app of one service, or several."""

    def __init__(self, *services: carpool.Service, **options: Any) -> None:
        self.loop = LoopThread()
        self.app = App(*services, debug=True, **options)
        try:
            self.loop.wait(self._start, START_LIMIT_S)
        except BaseException:
            self.loop.wait(self._stop)
            self.loop.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [pid for endpoint in self.app.endpoints if endpoint.handle is not None for pid in endpoint.handle.pids]

    def stats(self, service: int = 0) -> Any:
        async def ask() -> Any:
            handle = self.app.endpoints[service].handle
            assert handle is not None
            return handle.stats()

        return self.loop.wait(ask)

    def ask(
        self,
        *items: Any,
        timeout_s: float | None = None,
        name: str = "hooks",
        path: str = "",
        content_type: str = "application/json",
    ) -> list[Told]:
        headers = {"content-type": content_type}
        if timeout_s is not None:
            headers["x-request-timeout-ms"] = str(1000 * timeout_s)
        path = path or (f"/models/{name}/predict" if len(self.app.endpoints) > 1 else "/predict")
        bodies = [json.dumps(x).encode() for x in items]
        return self.loop.ask([lambda body=body: self.request("POST", path, body, headers) for body in bodies])  # type: ignore[misc]

    def get(self, path: str) -> Told:
        """Ask for another address of the server."""
        (told,) = self.loop.ask([lambda: self.request("GET", path, b"", {})])
        return told

    async def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Any:
        """Ask once. The answer to what failed is raised."""
        raise NotImplementedError

    async def _start(self) -> None:
        raise NotImplementedError

    async def _stop(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.loop.wait(self._stop)
        self.loop.close()


class Refused(Exception):
    """An answer over HTTP that is none of 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status = status
        error = json.loads(body)["error"]
        self.code = str(error["code"])
        self.message = str(error["message"])


class HttpDoor(_AppDoor):
    """Connections to our own server."""

    async def _start(self) -> None:
        self.server = Server(self.app, port=0)
        await self.server.listen()
        await self.app.start()

    async def _stop(self) -> None:
        await self.server.stop()

    async def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            lines = [f"{method} {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            text = await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return _answer(int(head.split()[1]), text)


class AsgiDoor(_AppDoor):
    """An ASGI server's part, by hand."""

    async def _start(self) -> None:
        await self.app.ensure_started()

    async def _stop(self) -> None:
        await self.app.stop()

    async def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Any:
        call = AsgiCall(body)
        await self.app(call.scope(method, path, headers), call.receive, call.send)
        return _answer(call.status, call.body)


class AsgiCall:
    """One request of an ASGI server: what it hands out and takes."""

    def __init__(self, body: bytes = b"") -> None:
        self.status = 0
        self.body = b""
        self._messages = [{"type": "http.request", "body": body, "more_body": False}]

    def scope(self, method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        return {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": pairs}

    async def receive(self) -> dict[str, Any]:
        return self._messages.pop() if self._messages else await asyncio.Future()

    async def send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


def _answer(status: int, body: bytes) -> Any:
    if status == 200:
        return json.loads(body) if body[:1] in b'{["0123456789' else body.decode()
    raise Refused(status, body)


DOORS: dict[str, Callable[..., Any]] = {
    "Handle": HandleDoor,
    "AsyncHandle": AsyncHandleDoor,
    "HTTP": HttpDoor,
    "ASGI": AsgiDoor,
}


class Log(logging.Handler):
    """What carpool has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def texts(self, level: int = logging.WARNING) -> list[str]:
        """Lines of this level or more important ones."""
        return [record.getMessage() for record in self.records if record.levelno >= level]


@contextlib.contextmanager
def logged() -> Iterator[Log]:
    """What is logged meanwhile."""
    log = Log()
    logging.getLogger("carpool").addHandler(log)
    try:
        yield log
    finally:
        logging.getLogger("carpool").removeHandler(log)


@contextlib.contextmanager
def closing(thing: Any) -> Iterator[Any]:
    """Closed in the end, in time; not waited for where something has failed already."""
    try:
        yield thing
    except BaseException:
        threading.Thread(target=close_quietly, args=(thing,), daemon=True).start()
        raise
    thing.close()


def close_quietly(thing: Any) -> None:
    with contextlib.suppress(BaseException):
        thing.close()
