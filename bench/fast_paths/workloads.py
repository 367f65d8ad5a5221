"""Small pieces of work in one process, each of which goes by the fast paths that it is named for.

Each takes the number of its rounds and returns all answers, so that two runs can be compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any

import numpy as np

import carpool
from carpool.engine.call.results import run_now
from carpool.engine.core.batch import Reply
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.policy import Greedy
from carpool.engine.request import Request
from carpool.engine.wire.frame import Frame, FrameKind, FrameReader, encode
from carpool.engine.wire.payload import JSON, OBJECT, dump, load
from carpool.engine.worker.program import Setup, describe
from carpool.engine.worker.serve import serve
from carpool.http.server import Server

Answers = list[Any]
Workload = Callable[[int], Answers]
WIDE = 64
"""How many ask at a time."""


def double(xs: Sequence[Any]) -> list[Any]:
    return [2 * x for x in xs]


async def double_later(xs: Sequence[Any]) -> list[Any]:
    return double(xs)


# -- a worker


class Pipe:
    """A worker's end of a connection in one process, on which frames are bytes.

    Args:
        batches: The frames that come.
    """

    def __init__(self, batches: Iterable[Frame]) -> None:
        self.came_at = 0.0
        self.sent: list[Frame] = []
        self._batches = iter(batches)
        self._here, self._there = FrameReader(), FrameReader()

    async def receive(self) -> Frame | None:
        frame = next(self._batches, None)
        return None if frame is None else _across(frame, self._here)

    async def has_news(self) -> bool:
        return False

    def send(self, frame: Frame) -> None:
        self.sent.append(_across(frame, self._there))


def _across(frame: Frame, reader: FrameReader) -> Frame:
    """Return a frame as it is read at the other end."""
    data = b"".join(encode(frame))
    while data:
        buffer = reader.get_buffer()
        n = min(len(buffer), len(data))
        buffer[:n] = data[:n]
        data = data[n:]
        if frames := reader.received(n):
            return frames[0]
    raise AssertionError("a frame was not read")


def turns(items: Sequence[Any], rounds: int, model: Any = double, format: int = OBJECT) -> Answers:
    """Have a worker answer a batch of these items again and again."""
    n = len(items)
    formats, forever = bytes([format]) * n, [inf] * n
    payloads = [dump(x) for x in items] if format == OBJECT else list(items)
    frames = [Frame(FrameKind.BATCH, 1, range(1, n + 1), formats, formats, forever, payloads) for _ in range(rounds)]
    pipe = Pipe(frames)
    setup = Setup(
        *(describe(), b"", "double", 0, True, None, ()),
        is_first=True,
        is_last=True,
        isolate_errors=True,
        retry_on_oom=True,
        oom_errors=(),
        cores=None,
        log_level=None,
    )
    run_now(serve(pipe, setup, lambda: (model, {}, (), ())))
    replies = [frame for frame in pipe.sent if frame.kind == FrameKind.REPLY]
    read: Callable[[Any], Any] = load if format == OBJECT else bytes
    return [(reply.formats, [read(payload) for payload in reply.payloads]) for reply in replies]


def singles(rounds: int) -> Answers:
    """Batches of one number."""
    return turns([1.5], rounds)


def numbers(rounds: int) -> Answers:
    """Batches of numbers."""
    return turns([*map(float, range(WIDE))], rounds)


def records(rounds: int) -> Answers:
    """Batches of dicts, which are returned as they are."""
    return turns([{"x": float(x), "name": "a row"} for x in range(WIDE)], rounds, _same)


def _same(xs: list[Any]) -> list[Any]:
    return xs


def json_numbers(rounds: int) -> Answers:
    """Batches of numbers in JSON."""
    return turns([b"%d.5" % x for x in range(WIDE)], rounds, _typed, JSON)


def _typed(xs: list[float]) -> list[float]:
    return double(xs)


def rows(rounds: int) -> Answers:
    """Batches of rows of numpy, which are answered by one array."""
    answers = turns([np.full(16, x, np.float32) for x in range(WIDE)], rounds, _doubled)
    return [(formats, [row.tolist() for row in results]) for formats, results in answers]


def _doubled(xs: np.ndarray) -> np.ndarray:
    return 2 * xs


def parts(rounds: int) -> Answers:
    """Reports of a step that made a number for each stream."""
    reader, read = FrameReader(), []
    values = [b"head", *map(float, range(WIDE))]
    for _ in range(rounds):
        frame = Frame(FrameKind.PARTS, 7, range(len(values)), bytes(len(values)), payloads=values)
        read.append([load(payload) for payload in _across(frame, reader).payloads[1:]])
    return read


# -- the core


def arrivals(rounds: int, alike: bool = False) -> Answers:
    """Requests that come together, and their answers, without any driver."""
    core = Core([Batcher("double", Greedy(WIDE), Queue(1024, 2**28), max_batch_time_s=10.0)])
    core.worker_ready(0, 0)
    answers: Answers = []
    for now in range(rounds):
        core.flow.submit(now, [Request(x, now + 30.0) for x in range(WIDE)], alike)
        for batch in core.poll(now).run:
            results = double([request.item for request in batch.requests])
            core.completed(now, Reply(0, batch.place, batch.id, batch.ids, results, None, 0.001))
        answers += [request.result for request in core.poll(now).answer]
    return answers


def decisions(rounds: int) -> Answers:
    """What `Adaptive` decides where all have time."""
    policy = carpool.Adaptive(WIDE)
    core = Core([Batcher("double", policy, Queue(1024, 2**28), max_batch_time_s=10.0)])
    core.worker_ready(0, 0)
    answers: Answers = []
    now = 0.0
    for i in range(rounds):
        core.flow.submit(now, [Request(x, inf) for x in range(1 + i * 7 % WIDE)])
        todo = core.poll(now)
        for batch in todo.run:
            now += 0.002 + 0.0001 * batch.n
            core.completed(now, Reply(0, batch.place, batch.id, batch.ids, [*batch.ids], None, now - batch.started))
            answers.append(batch.n)
        now += 0.0005
    return answers


# -- batch functions


def tasks(rounds: int) -> Answers:
    """Tasks that call a function together."""

    async def run() -> Answers:
        function = carpool.batch(max_batch_size=WIDE)(double_later)
        answers: Answers = []
        for _ in range(rounds):
            answers += await asyncio.gather(*[function(x) for x in range(WIDE)])
        await function.close()
        return answers

    return asyncio.run(run())


def a_thread(rounds: int) -> Answers:
    """One thread that calls a function."""
    function = carpool.batch(max_batch_size=WIDE)(double)
    answers = [function(x) for x in range(rounds)]
    function.close()
    return answers


# -- services


def a_caller(rounds: int) -> Answers:
    """One thread that asks a worker process."""
    with carpool.Service(carpool.Stage(double, max_batch_size=WIDE)).run() as handle:
        return [handle.predict(x) for x in range(rounds)]


def streams(rounds: int) -> Answers:
    """Tasks that read streams of a model of steps."""

    async def read(handle: Any, n: int) -> Answers:
        async with handle.predict_stream(n) as stream:
            return [part async for part in stream]

    async def run() -> Answers:
        async with carpool.Service(carpool.Stage(Count, max_rows=8, run_in="loop")).run_async() as handle:
            return await asyncio.gather(*[read(handle, rounds) for _ in range(8)])

    return asyncio.run(run())


class Count(carpool.Model):
    """Counts up to its item."""

    async def start(self, ns: list[int]) -> list[list[int]]:
        return [[0, n] for n in ns]

    async def step(self, states: list[list[int]]) -> list[Any]:
        for state in states:
            state[0] += 1
        return [state[0] if state[0] <= state[1] else carpool.END for state in states]

    def stop(self, state: list[int]) -> None:
        """There is nothing to let go of."""


# -- HTTP


def http(rounds: int) -> Answers:
    """Connections that ask at the same time."""
    ask = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 3\r\n\r\n1.5"
    return asyncio.run(_served(double_later, ask, rounds, 16, b"\r\n\r\n3.0"))


def bulk(rounds: int) -> Answers:
    """One request of many lines."""
    lines = b"\n".join([b"%d" % x for x in range(WIDE * rounds)])
    head = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-ndjson\r\ncontent-length: %d\r\n\r\n"
    return [*map(unchunked, asyncio.run(_served(double_later, head % len(lines) + lines, 1, 1, b"\n0\r\n\r\n")))]


def events(rounds: int) -> Answers:
    """Connections that are answered in parts."""
    head = b"POST /predict HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\ncontent-length: %d\r\n\r\n%d"
    return [*map(unchunked, asyncio.run(_served(Count, head % (len(str(rounds)), rounds), 1, 8, b"\n0\r\n\r\n")))]


def unchunked(body: bytes) -> bytes:
    """Return a body that has come in pieces, which may have been cut anywhere."""
    pieces = []
    while body:
        size, _, body = body.partition(b"\r\n")
        n = int(size, 16)
        pieces.append(body[:n])
        body = body[n + 2 :]
    return b"".join(pieces)


async def _served(model: Any, ask: bytes, rounds: int, connections: int, end: bytes) -> Answers:
    """Serve a model, and have some connections send the same bytes in each round."""
    limit: dict[str, int] = {"max_rows": WIDE} if model is Count else {"max_batch_size": WIDE}
    app = carpool.http.App(carpool.Service(carpool.Stage(model, run_in="loop", **limit)))
    server = Server(app, port=0)
    await server.listen()
    await app.start()
    answers: Answers = []
    loop = asyncio.get_running_loop()
    connect = partial(loop.create_connection, partial(Asker, end), "127.0.0.1", server.port)
    clients = [(await connect())[1] for _ in range(connections)]
    try:
        for _ in range(rounds):
            answers += await asyncio.gather(*[client.ask(ask) for client in clients])
    finally:
        for client in clients:
            client.transport.close()
        await server.stop()
    return answers


class Asker(asyncio.Protocol):
    """Sends bytes, and waits for bytes that end with others."""

    def __init__(self, end: bytes) -> None:
        self._end = end
        self._got = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, data: bytes) -> asyncio.Future[bytes]:
        self._got, self._answer = b"", asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._got += data
        if self._got.endswith(self._end):
            self._answer.set_result(self._got.partition(b"\r\n\r\n")[2])
