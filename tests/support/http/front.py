"""Our HTTP front with everything behind it but a worker process: real app, real driver, a worker that is a stub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from carpool import ModelError, Service, Stage
from carpool.engine.core.batch import Batch, Reply
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.core.roster import PlaceState, Roster
from carpool.engine.drive.aio import Driver
from carpool.engine.observe.stats import Stats
from carpool.engine.policy import Greedy
from carpool.engine.request import Request
from carpool.http.app import App
from carpool.http.connection import Connection
from carpool.http.server_state import Limits, ServerState
from tests.support.http.wire import Wire


def nothing(x: Any) -> Any:
    """A model without types: anything that JSON can say is let in."""
    return x


def answer_to(request: Request) -> bytes:
    """What the stub worker makes of a body."""
    return b"<%b>" % bytes(request.item)  # type: ignore[arg-type]


class StubWorker:
    """Answers each batch after `cost_s`, or when `finish` is called if that is None. The body `raise` fails."""

    def __init__(self, driver: Driver, cost_s: float | None, answer: Callable[[Request], bytes]) -> None:
        self.driver = driver
        self.cost_s = cost_s
        self.answer = answer
        self.seen: list[bytes] = []
        self._batch: Batch | None = None

    def start(self) -> None:
        roster = self.driver.stats.stages[0].roster
        assert roster is not None
        roster.due(0.0)
        roster.moved(0, PlaceState.LOADING)
        roster.moved(0, PlaceState.READY)
        self.driver.worker_ready(0, 0)

    def run(self, batch: Batch) -> None:
        self._batch = batch
        self.seen += [bytes(request.item) for request in batch.requests]  # type: ignore[arg-type]
        if self.cost_s is not None:
            asyncio.get_running_loop().call_later(self.cost_s, self.finish)

    def finish(self) -> None:
        """Answer the present batch."""
        batch, self._batch = self._batch, None
        assert batch is not None
        results = [self.answer(request) for request in batch.requests]
        errors = {i: ModelError("no") for i, r in enumerate(batch.requests) if bytes(r.item) == b"raise"}  # type: ignore[arg-type]
        self.driver.completed(Reply(0, 0, batch.id, batch.ids, results, errors or None, 0.001))

    def kill(self, worker: int) -> None:
        raise AssertionError("the stub worker does not hang")

    async def stop(self, grace_s: float) -> None:
        pass


class Front:
    """A server whose app is up.

    Args:
        limits: Of the connections.
        cost_s: What a batch takes; None for "until `worker.finish()`".
        answer: What the worker makes of a request.
        queue: How many requests it may hold; timeout_s: how long each may take.
        settings: Of the app.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        cost_s: float | None = 0.0,
        answer: Callable[[Request], bytes] = answer_to,
        queue: int = 10_000,
        timeout_s: float = 30.0,
        app: type[App] = App,
        **settings: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.app = app(Service(Stage(nothing, name="echo", max_batch_size=64), timeout_s=timeout_s), **settings)
        core = Core([Batcher("echo", Greedy(64), Queue(queue))])
        stats = Stats("echo", core, [Roster(1, lambda: 0.5)], [False])
        self.driver = Driver(core, stats, clock=loop.time)
        self.worker = StubWorker(self.driver, cost_s, answer)
        self.driver.executors = [self.worker]
        self.worker.start()
        self.app.endpoints[0].driver = self.driver
        self.app.refusing = None
        self.state = ServerState(self.app, limits or Limits())

    def connect(self, reads: bool = True) -> Wire:
        """A new client."""
        return Wire(lambda: Connection(self.state), reads)

    @property
    def outcomes(self) -> dict[str, int]:
        """How often each outcome was counted."""
        return {name: n for name, n in self.driver.stats.outcomes.items() if n}


def post(body: bytes = b"", path: str = "/predict", *headers: str, version: str = "1.1") -> bytes:
    """A request as most clients write it."""
    lines = [f"POST {path} HTTP/{version}", "Host: test", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def get(path: str = "/livez", *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    """A request without a body."""
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: test", *headers, "", ""]).encode("latin-1")


def chunked(
    *chunks: bytes, path: str = "/predict", trailers: tuple[str, ...] = (), headers: tuple[str, ...] = ()
) -> bytes:
    """A request with a chunked body."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Transfer-Encoding: chunked", *headers, "", ""]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return "\r\n".join(lines).encode() + body + "\r\n".join(["0", *trailers, "", ""]).encode()
