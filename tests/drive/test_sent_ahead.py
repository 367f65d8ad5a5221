"""What is sent ahead to a worker on a network: nothing large, since it does not read while it is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from carpool import Service, Stage
from carpool.core.batch import Batch
from carpool.core.pipeline import Pipeline
from carpool.core.roster import Roster, Starts
from carpool.drive import worker_pool
from carpool.drive.aio import Driver
from carpool.drive.batches import BatchPool
from carpool.observe.stats import Stats
from carpool.request import DONE, Request
from carpool.service import assemble
from carpool.wire.frame import Frame, FrameKind
from carpool.wire.payload import LARGE
from tests.support import models


class Recorder:
    """A worker that keeps what it is sent, and is told what to say."""

    pid = None
    hello = None
    where = ""
    broke_protocol = fell_silent = takes_large_ahead = has_unread_batch = False

    def __init__(self, launch: Any, place: int, heard: Callable[[Frame], None], lost: Any, sink: Any) -> None:
        self.heard = heard
        self.lost = lost
        self.sent: list[int] = []

    def send(self, frame: Frame) -> None:
        self.sent.append(frame.batch_id)

    def reply(self, batch_id: int, ids: list[int]) -> None:
        self.heard(Frame(FrameKind.REPLY, batch_id, ids, bytes(len(ids)), payloads=[b"x"] * len(ids)))


def ready(worker: Recorder) -> None:
    for name in (b"loading", b"ready"):
        worker.heard(Frame(FrameKind.STATE, 0, [0], b"\0", payloads=[name]))


def pool(idempotent: bool = True) -> tuple[BatchPool, Driver, Recorder]:
    """A stage of one worker, which is ready."""
    service = Service(Stage(models.scale, max_batch_size=1, policy="greedy", idempotent=idempotent))
    pipeline = Pipeline([assemble._batcher(service, service.stages[0], None)])
    roster = Roster(1, lambda: 0.0)
    driver = Driver(pipeline, Stats("ahead", pipeline, [roster], [False]), clock=lambda: 0.0)
    launch = assemble.launch(service, 0, None, 1)
    made = BatchPool(0, launch, driver, roster, Starts([roster], 1), lambda *line: None)
    driver.executors = [made]
    made.start()
    worker: Any = made._workers[0]
    ready(worker)
    return made, driver, worker


def asked(driver: Driver, nbytes: int) -> Request:
    request = Request(b"x" * nbytes, float("inf"), nbytes=nbytes)
    driver.submit(request)
    driver.poll()
    return request


def ahead(made: BatchPool, driver: Driver) -> Batch:
    """Send the request that waits ahead, whatever the batcher thinks of it."""
    batcher = driver.pipeline.batchers[0]
    batch = batcher._make(0.0, 1, "full", 0, ahead=True)
    batcher.ahead[0] = batch
    made.run(batch)
    return batch


@pytest.mark.parametrize(
    ("nbytes", "takes_large", "goes"), [(LARGE, False, False), (LARGE, True, True), (9, False, True)]
)
def test_a_large_batch_goes_ahead_only_where_it_harms_nobody(
    nbytes: int, takes_large: bool, goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a worker on a network, a large batch goes only when the one before it is answered, and then at once."""
    monkeypatch.setitem(worker_pool._KINDS, "process", Recorder)
    monkeypatch.setattr(Recorder, "takes_large_ahead", takes_large)

    async def test() -> None:
        made, driver, worker = pool()
        first, second = asked(driver, 9), asked(driver, nbytes)
        batch = ahead(made, driver)
        assert worker.sent == ([1, 2] if goes else [1])
        worker.reply(1, [first.id])
        assert worker.sent == [1, 2]
        worker.reply(2, batch.ids)
        assert first.state == second.state == DONE

    asyncio.run(test())


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_second_silence_is_held_against_a_request(idempotent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose worker fell silent waits again like any other. If that happens once more it is
    a suspect. One that must not run twice fails at once.
    """
    monkeypatch.setitem(worker_pool._KINDS, "process", Recorder)
    monkeypatch.setattr(Recorder, "fell_silent", True)

    async def test() -> None:
        made, driver, worker = pool(idempotent)
        request = asked(driver, 9)
        worker.lost("nothing has been heard of its machine")
        assert (request.state == DONE, request.losses) == ((False, 0) if idempotent else (True, 1))
        if idempotent:
            successor: Any = made._workers[0]
            ready(successor)
            assert len(successor.sent) == 1
            successor.lost("nothing has been heard of its machine")
            assert (request.state == DONE, request.losses) == (False, 1)

    asyncio.run(test())
