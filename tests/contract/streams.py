"""The drivers under contract that answer in parts. A new one joins with a function and a line in `STREAMING`.

Each counts from 1 to its item, one number a step, with as many streams at a time as it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

import carpool
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.core.stepper import Stepper
from carpool.engine.drive.virtual import StepCosts, VirtualDriver
from carpool.engine.policy import GreedySteps
from carpool.engine.request import Request, Stream
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError
from carpool.http.app import App
from carpool.http.server import Server
from tests.support.parts import Resuming

STEP_S = 0.002

Parts = AsyncIterator[int]


class Streaming(Protocol):
    """A service that answers in parts, as its callers see it."""

    def parts(self, item: Any, timeout_s: float | None = None) -> contextlib.AbstractAsyncContextManager[Parts]:
        """The parts of an answer; leaving the block cancels."""

    async def predict(self, item: Any) -> Any:
        """The whole answer."""


Start = Callable[[int], contextlib.AbstractAsyncContextManager[Streaming]]
"""Starts a service with so many rows in its only worker, and ends it."""


class ResumingLater(Resuming):
    """The same as coroutines."""

    async def start(self, xs: list[Any]) -> Any:  # type: ignore[override]
        return Resuming.start(self, xs)

    async def step(self, states: list[Any]) -> Any:  # type: ignore[override]
        await asyncio.sleep(STEP_S)
        return super().step(states)


def _service(rows: int, run_in: Any) -> carpool.Service:
    model, step_s = (ResumingLater, 0.0) if run_in == "loop" else (Resuming, STEP_S)
    kwargs = {"step_s": step_s}
    return carpool.Service(carpool.Stage(model, max_batch_size=rows, run_in=run_in, kwargs=kwargs), name="streams")


class _Tasks:
    def __init__(self, handle: carpool.service.handle.AsyncHandle) -> None:
        self._handle = handle
        self.predict = handle.predict

    @contextlib.asynccontextmanager
    async def parts(self, item: Any, timeout_s: float | None = None) -> AsyncIterator[Parts]:
        async with self._handle.predict_stream(item, timeout_s=timeout_s) as parts:
            yield parts


def _tasks(run_in: str) -> Start:
    @contextlib.asynccontextmanager
    async def start(rows: int) -> AsyncIterator[Streaming]:
        async with _service(rows, run_in).run_async() as handle:
            yield _Tasks(handle)

    return start


class _Threads:
    """Each stream is read by a thread of its own."""

    def __init__(self, handle: carpool.service.thread_handle.Handle) -> None:
        self._handle = handle

    async def predict(self, item: Any) -> Any:
        return await asyncio.to_thread(self._handle.predict, item)

    @contextlib.asynccontextmanager
    async def parts(self, item: Any, timeout_s: float | None = None) -> AsyncIterator[Parts]:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        has_left = threading.Event()

        def read() -> None:
            try:
                with self._handle.predict_stream(item, timeout_s=timeout_s) as parts:
                    for part in parts:
                        loop.call_soon_threadsafe(inbox.put_nowait, part)
                        if has_left.is_set():
                            return
                end: Any = None
            except CarpoolError as error:
                end = error
            loop.call_soon_threadsafe(inbox.put_nowait, end)

        reading = asyncio.ensure_future(asyncio.to_thread(read))
        try:
            yield _until_end(inbox)
        finally:
            has_left.set()
            await reading


@contextlib.asynccontextmanager
async def threads(rows: int) -> AsyncIterator[Streaming]:
    """A worker process, whose streams are read by threads."""
    handle = await asyncio.to_thread(_service(rows, "process").start)
    try:
        yield _Threads(handle)
    finally:
        await asyncio.to_thread(handle.close)


class _Http:
    """A client that opens a connection per stream and reads its events."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def predict(self, item: Any) -> Any:
        reader, writer = await self._ask(item, "application/json", None)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b" 200 " in head, head
        return json.loads(body)

    @contextlib.asynccontextmanager
    async def parts(self, item: Any, timeout_s: float | None = None) -> AsyncIterator[Parts]:
        reader, writer = await self._ask(item, "text/event-stream", timeout_s)
        try:
            yield self._read(reader)
        finally:
            writer.close()

    async def _ask(
        self, item: Any, accept: str, timeout_s: float | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        body = json.dumps(item).encode()
        until = "" if timeout_s is None else f"X-Request-Timeout-Ms: {timeout_s * 1000}\r\n"
        head = f"POST /predict HTTP/1.0\r\nContent-Type: application/json\r\nAccept: {accept}\r\n{until}"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def _read(self, reader: asyncio.StreamReader) -> Parts:
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head:
            raise _error(json.loads(await reader.read()))
        while True:
            *about, data = (await reader.readuntil(b"\n\n")).rstrip().split(b"\n")
            said = json.loads(data.removeprefix(b"data: "))
            if about == [b"event: error"]:
                raise _error(said)
            if about:
                return
            yield said


def _error(body: Any) -> CarpoolError:
    kinds: dict[str, type[CarpoolError]] = {"deadline_exceeded": DeadlineExceeded, "model_error": ModelError}
    return kinds[body["error"]["code"]](body["error"]["message"])


@contextlib.asynccontextmanager
async def http(rows: int) -> AsyncIterator[Streaming]:
    """A worker process behind our own server."""
    server = Server(App(_service(rows, "process")), port=0)
    await server.listen()
    try:
        await server.app.start()
        yield _Http(server.port)
    finally:
        await server.stop()


class _Virtual:
    """The same core under a clock that jumps, whenever no task has anything else to do."""

    def __init__(self, rows: int) -> None:
        core = Core([Stepper("streams", GreedySteps(rows), Queue(), rows=rows, resumable=True)])
        costs = StepCosts(lambda length: 0.0, lambda n: STEP_S, _count)
        self._driver = VirtualDriver(core, [], [1], steps=costs)
        self._pump: asyncio.Task[None] | None = None

    async def predict(self, item: Any) -> Any:
        caller = _Caller()
        self._submit(item, caller, Stream(is_collected=True), None)
        return await caller.answer

    @contextlib.asynccontextmanager
    async def parts(self, item: Any, timeout_s: float | None = None) -> AsyncIterator[Parts]:
        caller = _Caller()
        now = self._driver.clock.now
        stream = Stream() if timeout_s is None else Stream(until=now + timeout_s)
        request = self._submit(item, caller, stream, timeout_s)
        try:
            yield _until_end(caller.inbox)
        finally:
            self._driver.core.cancel(self._driver.clock.now, request)
            self._pump_soon()

    def _submit(self, item: Any, caller: _Caller, stream: Stream, timeout_s: float | None) -> Request:
        request = self._driver.submit(item, timeout_s or 30.0, caller=caller, stream=stream)
        self._pump_soon()
        return request

    def _pump_soon(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        for _ in range(100_000):
            for _ in range(5):
                await asyncio.sleep(0)
            self._driver.run(until=self._driver.clock.now + STEP_S)
            if not self._driver.core.unanswered:
                return


class _Caller:
    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def take_part(self, request: Request, part: object) -> None:
        self.inbox.put_nowait(part)

    def answered(self, request: Request) -> None:
        self.inbox.put_nowait(request.error)
        if not self.answer.done():
            self.answer.set_result(request.result)


def _count(item: Any) -> Iterator[Any]:
    """What `Resuming` answers."""
    about = {"n": item} if isinstance(item, int) else item
    for i in range(about["n"]):
        if i == about.get("at"):
            yield ModelError(f"ValueError: {about['raise']}")
        yield i + 1


async def _until_end(inbox: asyncio.Queue[Any]) -> Parts:
    while isinstance(part := await inbox.get(), int):
        yield part
    if part is not None:
        raise part


@contextlib.asynccontextmanager
async def virtual(rows: int) -> AsyncIterator[Streaming]:
    yield _Virtual(rows)


STREAMING: dict[str, Start] = {
    "virtual": virtual,
    "processes": _tasks("process"),
    "threads over processes": threads,
    "thread stage": _tasks("thread"),
    "loop stage": _tasks("loop"),
    "http": http,
}
