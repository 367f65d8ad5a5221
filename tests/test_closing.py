"""Closing for real: whoever was held back for company is answered at once, and `close` does not wait for the delay."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

import carpool
from carpool import Service, Stage
from tests.support import models
from tests.support.http.front import post
from tests.support.http.net import Client
from tests.support.serving import serve
from tests.support.waiting import wait_until

DELAY_S = 50.0


@contextmanager
def quick() -> Iterator[None]:
    """It takes no time to speak of, as against the delay."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < DELAY_S / 2


@pytest.mark.fault("F79")
def test_a_function_for_threads() -> None:
    """Closing a function for threads ends the waiting of a ticket that nobody waits for, and of a
    caller that waits for company.
    """
    call = carpool.batch(max_batch_size=10, policy="static", max_queue_delay_s=DELAY_S)(lambda xs: [-x for x in xs])
    ticket = call.submit(3)
    answers: list[int] = []
    caller = Thread(target=lambda: answers.append(call(4)))
    with quick():
        caller.start()
        wait_until(lambda: call._driver._line.core.waiting == 2)
        call.close()
        caller.join()
        assert (ticket.result(), answers) == (-3, [-4])


@pytest.mark.fault("F79")
def test_a_function_for_tasks() -> None:
    """Closing a function for tasks ends the waiting for company of those of this loop."""

    async def main() -> int:
        @carpool.batch(max_batch_size=10, policy="static", max_queue_delay_s=DELAY_S)
        async def call(xs: list[int]) -> list[int]:
            return [-x for x in xs]

        answer = asyncio.ensure_future(call(3))
        await asyncio.sleep(0.01)
        await call.close()
        return await answer

    with quick():
        assert asyncio.run(main()) == -3


@pytest.mark.fault("F79")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_service(stages: int) -> None:
    """In a service that closes, a stage waits for what may still come of the one before it, and no
    longer.
    """
    line = [
        Stage(models.scale, name=f"s{i}", run_in="thread", max_batch_size=8, policy="static", max_queue_delay_s=DELAY_S)
        for i in range(stages)
    ]
    answers: list[float] = []
    with quick():
        with Service(*line, timeout_s=300.0).run() as service:
            callers = [Thread(target=lambda x=x: answers.append(service.predict(x))) for x in (1.0, 2.0)]
            for caller in callers:
                caller.start()
            wait_until(lambda: service.stats().stages[0].queued == 2)
        for caller in callers:
            caller.join()
    assert sorted(answers) == [2.0**stages, 2 * 2.0**stages]


@pytest.mark.fault("F79")
def test_a_server_that_is_sent_sigterm() -> None:
    """When a server that holds a request for company gets SIGTERM, the client is answered at once,
    and the server ends with status 0.
    """
    with serve("tests.support.serving_models:patient") as served, quick():
        with Client(served.port) as client:
            client.send(post(b"0.0"))
            wait_until(lambda: bool(re.search(rb"(?m)^carpool_queue_length{.*} 1", served.ask("GET", "/metrics")[1])))
            served.process.send_signal(signal.SIGTERM)
            assert client.answer().status == 200
        assert served.wait() == 0
