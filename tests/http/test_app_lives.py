"""An app may live more than once: test clients give it a lifespan, or a loop, for each test or each request."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from carpool.http.app import App
from tests.support.http.by_hand import ask
from tests.support.loops import on_a_loop
from tests.support.waiting import PATIENCE_S, wait_until


def double(xs: list[float]) -> list[float]:
    return [2 * x for x in xs]


def an_app() -> App:
    return App(Service(Stage(double, max_batch_size=8, run_in="thread"), name="double"))


async def live(app: App, body: bytes) -> tuple[int, bytes]:
    """One request between the start and the end of a lifespan."""
    said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    serving = asyncio.ensure_future(app({"type": "lifespan"}, said.get, heard.put))
    await said.put({"type": "lifespan.startup"})
    assert (await heard.get())["type"] == "lifespan.startup.complete"
    answer = await ask(app, body)
    await said.put({"type": "lifespan.shutdown"})
    assert (await heard.get())["type"] == "lifespan.shutdown.complete"
    await serving
    return answer


@pytest.mark.fault("F72")
def test_each_lifespan_starts_the_app_anew() -> None:
    """Each lifespan starts the app anew, on one loop or on several, by itself or mounted in another
    app.
    """
    app = an_app()

    async def twice() -> None:
        for x in (1, 2):
            assert await live(app, b"%d" % x) == (200, b"%d.0" % (2 * x))

    asyncio.run(twice())
    asyncio.run(twice())

    async def mounted() -> None:
        for x in (3, 4):
            async with carpool.lifespan(app)(None):
                assert await ask(app, b"%d" % x) == (200, b"%d.0" % (2 * x))

    asyncio.run(mounted())


def test_without_a_lifespan_a_request_on_a_new_loop_starts_the_app_anew() -> None:
    """Test clients that run each request on a loop of its own, without a lifespan, start the app
    anew with each loop.
    """
    app = an_app()
    for x in (1, 2, 3):
        assert asyncio.run(ask(app, b"%d" % x)) == (200, b"%d.0" % (2 * x))


@on_a_loop
async def test_an_app_that_was_stopped_stays_so_until_it_is_started() -> None:
    """An app that was stopped answers 503 to a request that comes too late, and stays stopped until
    it is started again.
    """
    app = an_app()
    await app.start()
    await app.stop()
    status, body = await ask(app, b"1")
    assert (status, b"draining" in body) == (503, True)
    await app.start()
    assert await ask(app, b"1") == (200, b"2.0")
    with pytest.raises(RuntimeError, match="running already"):
        await app.start()
    await app.stop()


@pytest.mark.fault("F72")
@on_a_loop
async def test_requests_that_come_while_an_app_is_being_started_wait_for_that_start() -> None:
    """Requests that come while an app is being started wait for that start, and there is only one,
    however many they are.
    """
    app = an_app()
    start = asyncio.ensure_future(app.start())
    await asyncio.sleep(0)
    assert await asyncio.gather(*[ask(app, b"1") for _ in range(5)]) == [(200, b"2.0")] * 5
    await start
    assert [endpoint.handle.state.name for endpoint in app.endpoints if endpoint.handle] == ["OPEN"]
    await app.stop()


@pytest.mark.fault("F72")
@on_a_loop
async def test_an_app_that_runs_on_another_loop_is_a_mistake() -> None:
    """A request to an app that runs on another loop is told of the mistake at once, instead of
    waiting for ever.
    """
    app = an_app()
    await app.start()
    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(ask(app, b"1")))
    await app.stop()


def test_an_app_that_was_stopped_is_let_go() -> None:
    """An app that was stopped is collected although a request of a batch that was never answered
    refers to it.
    """
    has_begun, may_end = threading.Event(), threading.Event()

    def block(x: float) -> None:
        has_begun.set()
        may_end.wait(PATIENCE_S)

    async def live_and_stop() -> weakref.ref[App]:
        app = App(Service(Stage(block, run_in="thread"), name="block"))
        await app.start()
        asking = asyncio.ensure_future(ask(app, b"1"))
        await asyncio.to_thread(has_begun.wait, PATIENCE_S)
        driver = app.endpoints[0].driver
        assert driver is not None
        await driver.stop(drain=False, grace_s=0.05)  # as `app.stop` does, but it gives the worker 5 s
        await app.stop(drain=False)
        assert (await asking)[0] == 503
        may_end.set()
        return weakref.ref(app)

    gone = asyncio.run(live_and_stop())
    wait_until(lambda: gc.collect() >= 0 and gone() is None)
