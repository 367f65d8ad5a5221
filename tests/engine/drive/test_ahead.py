"""Batches ahead on a real driver: what does not reach its worker, what is cut in pieces, and what a close leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import carpool
from carpool import Service, Stage, Static
from carpool.engine.core import ahead
from carpool.engine.core.batch import Batch
from carpool.engine.drive.pools import BatchPool
from carpool.engine.wire import frame
from carpool.service.handle import AsyncHandle
from tests.engine.drive.sleeper import LONG, Slow

BOUND_S = 10.0


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch goes ahead at any time of a call, not only within 20 ms of its end, which a loop with little of the
    processor may miss.
    """
    monkeypatch.setattr(ahead, "_LEAD_S", BOUND_S)


def stage(**settings: Any) -> Stage:
    return Stage(Slow, max_batch_size=2, policy=Static(2, 0.01), **settings)


def with_service(of: Stage, ask: Callable[[AsyncHandle], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Service(of, timeout_s=BOUND_S).run_async() as service:
            await asyncio.gather(*[service.predict(b"x") for _ in range(2)])  # it is known what a batch takes
            await ask(service)

    asyncio.run(main())


async def outcomes(service: AsyncHandle, items: list[bytes]) -> list[Any]:
    """The results, and the codes of errors."""
    given = await asyncio.gather(*[service.predict(item) for item in items], return_exceptions=True)
    return [getattr(one, "code", one) for one in given]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([b"a" * 6000] * 2 + [b"b" * 4000] * 2, ["too_large"] * 2 + [4000] * 2),
        ([b"a" * 6000] * 2 + [b"b" * 4] * 8, ["too_large"] * 2 + [4] * 8),
    ],
    ids=["in pieces", "in their order"],
)
def test_what_follows_a_batch_that_cannot_be_sent(
    items: list[bytes], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a batch cannot be sent, the one that lay ahead behind it takes its place, and goes before
    all others.
    """

    async def ask(service: AsyncHandle) -> None:
        monkeypatch.setattr(frame, "MAX_FRAME_BYTES", 5000)  # in this process only
        assert await outcomes(service, items) == expected
        snapshot = service.stats().stages[0]
        assert (snapshot.protocol_errors, snapshot.restarts) == (0, 0)

    with_service(stage(), ask)


@pytest.mark.usefixtures("_soon")
def test_a_batch_ahead_that_cannot_be_handed_over_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ahead that cannot be handed over fails alone; the one under way is answered, and
    counted once.
    """
    run = BatchPool.run

    def run_or_not(self: BatchPool, batch: Batch) -> None:
        if batch.ahead:
            raise MemoryError
        run(self, batch)

    async def ask(service: AsyncHandle) -> None:
        before = service.stats().stages[0].batches
        monkeypatch.setattr(BatchPool, "run", run_or_not)
        assert await outcomes(service, [LONG] * 2 + [b"x"] * 2) == [4, 4, "unavailable", "unavailable"]
        assert service.stats().stages[0].batches == before + 1

    with_service(stage(), ask)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("run_in", ["process", "thread"])
def test_a_close_that_drains_nothing_leaves_the_batch_ahead_unrun(run_in: Any, tmp_path: Any) -> None:
    """When a service closes without draining, the worker ends once the present call does and tears
    down, without running the batch ahead.
    """
    file = tmp_path / "seen"
    file.touch()

    async def main() -> None:
        of = stage(run_in=run_in, kwargs={"file": str(file)})
        service = Service(of, timeout_s=BOUND_S).run_async()
        await service.start()
        await asyncio.gather(*[service.predict(b"x") for _ in range(2)])
        inside = [asyncio.ensure_future(service.predict(x)) for x in (LONG, LONG, b"x", b"x")]
        for _ in range(1000):  # until the first call runs and the second batch has gone ahead
            if service.running_driver.core.batchers[0].ahead and file.read_text().count("ran") == 2:
                break
            await asyncio.sleep(0.002)
        await service.close(drain=False)
        assert [type(one) for one in await asyncio.gather(*inside, return_exceptions=True)] == [carpool.Unavailable] * 4

    asyncio.run(main())
    assert file.read_text().split("\n")[:-1] == ["ran", "ran", "torn down"]
