"""Requests, stages and workers for the tests of the core. Times are whole numbers, so that equality is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from carpool.engine.core.batch import Batch, Reply
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.content import Plain
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.policy import Decision, DoneBatch, Greedy, Policy, View
from carpool.engine.policy.base import NOTHING
from carpool.engine.request import Lane, Request


def ask(
    item: Any = "x",
    deadline: float = inf,
    *,
    priority: int = 0,
    key: Any = None,
    bucket: int = 0,
    arrived: float = 0.0,
    nbytes: int = 0,
    patient: bool = False,
) -> Request:
    """One request that nobody has seen yet."""
    request = Request(item, deadline, nbytes=nbytes)
    request.lane = Lane(priority, key, bucket)
    request.arrived = arrived
    request.patient = patient
    return request


def asks(items: Sequence[Any], deadline: float = inf, **settings: Any) -> list[Request]:
    """One request per item, all alike."""
    return [ask(item, deadline, **settings) for item in items]


class Listed(Request):
    """One of several that one caller waits for as a whole."""

    __slots__ = ("lot",)
    lot: Sequence[Request]

    @property
    def companions(self) -> Sequence[Request]:
        return self.lot


def together(requests: Sequence[Listed]) -> list[Request]:
    """The requests, as one lot."""
    for request in requests:
        request.lot = requests
    return list(requests)


def lot(items: Sequence[Any], deadline: float = inf, *, nbytes: int = 0, patient: bool = False) -> list[Request]:
    """One request per item, which are admitted together or not at all."""
    requests = [Listed(item, deadline, nbytes=nbytes) for item in items]
    for request in requests:
        request.patient = patient
    return together(requests)


def expire(queue: Queue, now: float) -> list[Request]:
    """Remove and return every request whose deadline has passed."""
    expired = queue.expired(now)
    for request in expired:
        queue.remove(request)
    return expired


def items(requests: Sequence[Request]) -> list[Any]:
    """The items of the requests."""
    return [request.item for request in requests]


def stage(
    max_batch_size: int = 4,
    *,
    policy: Policy | None = None,
    max_size: float = inf,
    max_bytes: float = inf,
    name: str = "stage",
    **settings: Any,
) -> Batcher:
    """One stage; greedy, if nothing else is said."""
    return Batcher(name, policy or Greedy(max_batch_size), Queue(max_size, max_bytes), **settings)


class Measured(Plain):
    """Content of which each result holds so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def measure(self, result: Any) -> int:
        return self.nbytes


def pipeline_of(*stages: Batcher, workers: int | Sequence[int] = 1, **settings: Any) -> Core:
    """The stages in a row with their workers, so many each, which are ready."""
    made = Core(stages, **settings)
    for index, n in enumerate([workers] * len(stages) if isinstance(workers, int) else workers):
        for worker in range(n):
            made.worker_ready(index, worker)
    return made


def step(item: Any) -> str:
    """What a stub worker makes of an item."""
    return f"{item}'"


def reply(
    to: Core,
    now: float,
    batch: Batch,
    *,
    compute: Callable[[Any], Any] = step,
    errors: dict[int, Exception] | None = None,
    busy_s: float = 0.0,
) -> None:
    """The worker of `batch` answers it as a whole; `errors` by place in the batch."""
    results = [compute(request.item) for request in batch.requests]
    to.completed(now, Reply(batch.stage, batch.place, batch.id, list(batch.ids), results, errors, busy_s))


def outcome(request: Request) -> Any:
    """The result, or the class of the error."""
    return request.result if request.error is None else type(request.error)


def assert_counts(core: Core, **expected: int) -> None:
    """The pipeline's counters of these names (`admitted`, `answered`, ...) have these values."""
    found = {name: getattr(core if name in ("waiting", "unanswered") else core.flow, name) for name in expected}
    assert found == expected


def state_of(one: Batcher) -> tuple[object, ...]:
    """All that an illegal call must leave as it was."""
    return (
        [(id(request), request.state, request.id) for request in one.queue],
        one.queue.nbytes,
        one.queue.size,
        one.running,
        one.idle,
        {worker: (batch.id, list(batch.ids)) for worker, batch in one.in_flight.items()},
        {worker: [(batch.id, list(batch.ids)) for batch in lying] for worker, lying in one.ahead.items()},
        one.late_results,
        one.stray_replies,
    )


class Scripted(Policy):
    """Says what it was told to say; remembers what it heard."""

    def __init__(self, decision: Decision, max_batch_size: int = 4) -> None:
        super().__init__(max_batch_size)
        self.decision = decision
        self.heard: list[tuple[Any, ...]] = []

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        self.heard += [("arrived", now, request.item) for request in requests]

    def left(self, now: float, request: Request) -> None:
        self.heard.append(("left", now, request.item))

    def learn(self, now: float, done: DoneBatch) -> None:
        self.heard.append(("learn", now, done.n, done.size, done.busy_s, done.ok))

    def decide(self, view: View) -> Decision:
        return self.decision if view.free_in_s is None else NOTHING
