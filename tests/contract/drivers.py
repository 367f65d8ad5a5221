"""The drivers under contract. A new one joins with a class and a line in `DRIVERS`.

Each is started with a few settings and then offers what a caller sees: `predict` and `stream`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import tempfile
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import carpool
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Greedy
from carpool.engine.request import Request
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError, Overloaded, Unavailable, ValidationError
from carpool.http.admin import ScaleOrder
from carpool.http.server import Server
from tests.support import joining
from tests.support.promises import AsyncContract, Contract, Driven, Start


@contextlib.asynccontextmanager
async def virtual(*, cost_s: float = 0.0, max_batch_size: int = 8, workers: int = 1) -> AsyncIterator[Driven]:
    """The same core under a clock that jumps."""
    yield _Virtual(cost_s, max_batch_size, workers)


class _Virtual:
    def __init__(self, cost_s: float, max_batch_size: int, workers: int) -> None:
        core = Core([Batcher("contract", Greedy(max_batch_size), Queue())])
        self._driver = VirtualDriver(core, [lambda n: cost_s], [workers], [self._compute])
        self._model = Contract()
        self._places = list(range(workers))
        self._pumping = False
        self._pausing = False

    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        caller = _VirtualCaller()
        request = self._driver.submit(x, timeout_s if timeout_s is not None else 30.0, caller=caller)
        self._pump_soon()
        try:
            return await caller.future
        except asyncio.CancelledError:
            self._driver.core.cancel(self._driver.clock.now, request)
            raise

    async def stream(self, xs: Iterable[Any]) -> AsyncIterator[Any]:
        for answer in [asyncio.ensure_future(self.predict(x)) for x in xs]:
            yield await answer

    async def scale(self, workers: int) -> None:
        while len(self._places) < workers:
            self._places.append(self._driver.add(0))
        while len(self._places) > workers:
            self._driver.drain(0, self._places.pop())
        self._pump_soon()
        await _turns(10)

    async def pause(self, seconds: float) -> None:
        self._pausing = True
        await _turns(5)
        self._driver.run(until=self._driver.clock.now + seconds)
        await _turns(5)
        self._pausing = False
        self._pump_soon()

    def _pump_soon(self) -> None:
        """Time goes on by itself only when every task that could has had its turn."""
        if not self._pumping:
            self._pumping = True
            self._pump_task = asyncio.ensure_future(self._pump())

    async def _pump(self) -> None:
        await _turns(5)
        self._pumping = False
        if not self._pausing:
            self._driver.run()

    def _compute(self, items: list[Any]) -> list[Any]:
        """Like a worker: a batch that raises is run again one by one."""
        try:
            return self._model.answer(items)
        except ZeroDivisionError as error:
            if len(items) == 1:
                return [ModelError(str(error), type_name="ZeroDivisionError")]
            return [self._compute([item])[0] for item in items]


async def _turns(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


class _VirtualCaller:
    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(self, request: Request) -> None:
        if self.future.done():
            return
        if request.error is not None:
            self.future.set_exception(request.error)
        else:
            self.future.set_result(request.result)


def _service(cost_s: float, max_batch_size: int, workers: int, run_in: Any = "process") -> carpool.Service:
    stage = carpool.Stage(
        AsyncContract if run_in == "loop" else Contract,
        run_in=run_in,
        kwargs={"cost_s": cost_s},
        max_batch_size=max_batch_size,
        workers=workers,
        policy="greedy",
    )
    return carpool.Service(stage, name="contract")


class _Real:
    """A driver that runs in real time, so that a pause is a sleep."""

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@contextlib.asynccontextmanager
async def processes(*, cost_s: float = 0.0, max_batch_size: int = 8, workers: int = 1) -> AsyncIterator[Driven]:
    """Worker processes, called from asyncio."""
    async with _service(cost_s, max_batch_size, workers).run_async() as handle:
        yield _Tasks(handle)


@contextlib.asynccontextmanager
async def thread_stage(*, cost_s: float = 0.0, max_batch_size: int = 8, workers: int = 1) -> AsyncIterator[Driven]:
    """Workers that are threads of this process."""
    async with _service(cost_s, max_batch_size, workers, "thread").run_async() as handle:
        yield _Tasks(handle)


@contextlib.asynccontextmanager
async def loop_stage(*, cost_s: float = 0.0, max_batch_size: int = 8, workers: int = 1) -> AsyncIterator[Driven]:
    """Workers that are tasks of this loop."""
    async with _service(cost_s, max_batch_size, workers, "loop").run_async() as handle:
        yield _Tasks(handle)


@contextlib.asynccontextmanager
async def joined_workers(*, cost_s: float = 0.0, max_batch_size: int = 8, workers: int = 1) -> AsyncIterator[Driven]:
    """Worker processes that join by themselves, over TCP."""
    with tempfile.NamedTemporaryFile() as token:
        token.write(joining.TOKEN)
        token.flush()
        service = joining.contract(cost_s, max_batch_size)
        join = carpool.Join("127.0.0.1:0", token_file=token.name)
        async with service.run_async(join=join) as handle:
            with contextlib.ExitStack() as processes:
                for _ in range(workers):
                    come = joining.joined("contract", handle.join_address, Path(token.name), COST_S=str(cost_s))
                    processes.enter_context(come)
                await asyncio.to_thread(joining.wait_for_workers, handle, workers)
                yield _Tasks(handle)


class _Tasks(_Real):
    def __init__(self, handle: Any) -> None:
        self.predict = handle.predict
        self.stream = handle.stream
        self.scale = functools.partial(handle.scale, handle.service.stages[0].name)


@contextlib.asynccontextmanager
async def threads_over_processes(
    *, cost_s: float = 0.0, max_batch_size: int = 8, workers: int = 1
) -> AsyncIterator[Driven]:
    """Worker processes, called from threads."""
    handle = await asyncio.to_thread(_service(cost_s, max_batch_size, workers).start)
    try:
        yield _Threads(handle)
    finally:
        await asyncio.to_thread(handle.close)


class _Threads(_Real):
    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._pool = ThreadPoolExecutor(300)

    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        call = functools.partial(self._handle.predict, x, timeout_s=timeout_s)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def stream(self, xs: Iterable[Any]) -> AsyncIterator[Any]:
        for answer in await asyncio.to_thread(list, self._handle.stream(xs)):
            yield answer

    async def scale(self, workers: int) -> None:
        await asyncio.to_thread(self._handle.scale, "Contract", workers)


@contextlib.asynccontextmanager
async def batched_threads(*, cost_s: float = 0.0, max_batch_size: int = 8, workers: int = 1) -> AsyncIterator[Driven]:
    """`@carpool.batch` over a `def`: the callers' threads do it all."""
    model = Contract(cost_s)
    yield _BatchedThreads(
        carpool.batch(max_batch_size=max_batch_size, max_in_flight_batches=workers, isolate_errors=True)(model.predict)
    )


class _BatchedThreads(_Real):
    def __init__(self, batched: Any) -> None:
        self._batched = batched
        self._pool = ThreadPoolExecutor(300)

    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        ticket = self._batched.submit(x)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._result, ticket, timeout_s)
        except asyncio.CancelledError:
            ticket.cancel()
            raise

    async def stream(self, xs: Iterable[Any]) -> AsyncIterator[Any]:
        for answer in await asyncio.to_thread(self._batched.many, xs):
            yield answer

    def _result(self, ticket: carpool.Ticket[Any], timeout_s: float | None) -> Any:
        try:
            return ticket.result(timeout_s)
        except DeadlineExceeded:
            ticket.cancel()
            raise
        except ZeroDivisionError as error:  # in a program the caller gets the function's own
            raise ModelError(str(error)) from error


@contextlib.asynccontextmanager
async def batched_tasks(*, cost_s: float = 0.0, max_batch_size: int = 8, workers: int = 1) -> AsyncIterator[Driven]:
    """`@carpool.batch` over an `async def`."""
    model = AsyncContract(cost_s)
    settings: dict[str, Any] = {"max_batch_size": max_batch_size, "max_in_flight_batches": workers}
    yield _BatchedTasks(carpool.batch(**settings, isolate_errors=True)(model.predict))


class _BatchedTasks(_Real):
    def __init__(self, batched: Any) -> None:
        self._batched = batched

    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._batched(x)
        except TimeoutError as error:
            raise DeadlineExceeded("no answer in time") from error
        except ZeroDivisionError as error:
            raise ModelError(str(error)) from error

    async def stream(self, xs: Iterable[Any]) -> AsyncIterator[Any]:
        for answer in await self._batched.many(xs):
            yield answer


@contextlib.asynccontextmanager
async def http(*, cost_s: float = 0.0, max_batch_size: int = 8, workers: int = 1) -> AsyncIterator[Driven]:
    """The same over HTTP, by our own server."""
    server = Server(carpool.http.App(_service(cost_s, max_batch_size, workers)), port=0)
    await server.listen()
    try:
        await server.app.start()
        yield _Http(server.port, server.app)
    finally:
        await server.stop()


class _Http(_Real):
    """A client that opens a connection per call and closes it when it is cancelled."""

    def __init__(self, port: int, app: carpool.http.App) -> None:
        self._port = port
        self._app = app

    async def scale(self, workers: int) -> None:
        await self._app.admin.scale(ScaleOrder(workers))

    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(_post(x, timeout_s))
            return await _answer(reader)
        finally:
            writer.close()

    async def stream(self, xs: Iterable[Any]) -> AsyncIterator[Any]:
        """Pipelined on one connection: HTTP answers in order."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        items = list(xs)
        for x in items:
            writer.write(_post(x, None))
        for _ in items:
            yield await _answer(reader)
        writer.close()


def _post(x: Any, timeout_s: float | None) -> bytes:
    body = json.dumps(x).encode()
    deadline = "" if timeout_s is None else f"X-Request-Timeout-Ms: {timeout_s * 1000}\r\n"
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{deadline}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _answer(reader: asyncio.StreamReader) -> Any:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    body = json.loads(await reader.readexactly(int(head.partition("content-length: ")[2].split()[0])))
    status = int(head.split()[1])
    if status == 200:
        return body
    kinds: dict[int, type[CarpoolError]] = {
        422: ValidationError,
        429: Overloaded,
        500: ModelError,
        503: Unavailable,
        504: DeadlineExceeded,
    }
    raise kinds[status](body["error"]["message"])


DRIVERS: dict[str, Start] = {
    "virtual": virtual,
    "processes": processes,
    "joined workers": joined_workers,
    "threads over processes": threads_over_processes,
    "thread stage": thread_stage,
    "loop stage": loop_stage,
    "batched threads": batched_threads,
    "batched tasks": batched_tasks,
    "http": http,
}
