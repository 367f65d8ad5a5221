"""The open-loop generator: everything leaves, answers are told apart, and latency counts from the time of leaving."""

from __future__ import annotations

import argparse
import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest

from bench.reality.open_loop import BROKEN, Generator, departures, poisson_times, quantile, summary

HEAD = b"POST /predict HTTP/1.1\r\nContent-Length: 2\r\n\r\n"
REQUEST = HEAD + b"{}"
RIGHT, WRONG = b'{"y": 3.0}', b'{"y": 4.0}'


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nserver: test\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


class Answering(asyncio.Protocol):
    """Answers the n-th request of all with what `reply(n)` says; None closes the connection."""

    seen = 0
    transports: ClassVar[list[asyncio.Transport]] = []

    def __init__(self, reply: Callable[[int], bytes | None]) -> None:
        self._reply = reply
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        Answering.transports.append(transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while self._data.startswith(REQUEST):
            self._data = self._data[len(REQUEST) :]
            reply = self._reply(Answering.seen)
            Answering.seen += 1
            if reply is None:
                self._transport.close()
                return
            self._transport.write(reply)


@contextmanager
def serving(reply: Callable[[int], bytes | None]) -> Iterator[int]:
    """A server on a thread; gives its port."""
    Answering.seen = 0
    Answering.transports.clear()
    listening = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        server = await loop.create_server(lambda: Answering(reply), sock=listening)
        await over.wait()
        server.close()
        for transport in Answering.transports:
            transport.abort()
        await asyncio.sleep(0)

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def generated(port: int, times: list[float], connections: int) -> Generator:
    generator = Generator(port, [REQUEST], {"y": 3.0}, times, connections)
    generator.run()
    generator.close()
    return generator


@pytest.mark.parametrize("connections", [1, 50])
def test_every_request_leaves_and_gets_its_answer(connections: int) -> None:
    """Every request leaves in its own time and gets its answer; one connection is enough, since
    requests then follow each other on it.
    """
    times = [0.0005 * i for i in range(50)]
    with serving(lambda n: answer(200, RIGHT)) as port:
        generator = generated(port, times, connections)

    assert list(generator.status) == [200] * 50
    assert all(left >= when for left, when in zip(generator.sent, times, strict=True))
    assert all(there > left for there, left in zip(generator.finished, generator.sent, strict=True))


def test_requests_do_not_wait_for_answers() -> None:
    """All requests leave on time although none is answered before the last one has come."""
    held: list[bytes] = []

    def reply(n: int) -> bytes:
        held.append(answer(200, RIGHT))
        return b"".join(held) if n == 29 else b""

    with serving(reply) as port:
        generator = generated(port, [0.0002 * i for i in range(30)], 1)

    assert list(generator.status) == [200] * 30
    assert len(set(generator.finished)) == 1
    assert generator.pipelined == 29


def test_refusals_wrong_answers_and_broken_connections_are_told_apart() -> None:
    """Refusals, wrong answers and broken connections are counted apart, and a closed connection is
    replaced, so that the requests after it leave as well.
    """
    times = [-1.0, 0.0, 0.0, 0.0, 0.4]  # the last one is long after the connection was closed
    replies = [answer(200, RIGHT), answer(429, b"{}"), answer(200, WRONG), None, answer(200, RIGHT)]
    with serving(lambda n: replies[n]) as port:
        generator = generated(port, times, 1)

    assert list(generator.status) == [200, 429, -2, BROKEN, 200]
    given = argparse.Namespace(rate=10.0, seconds=0.2, warm_up=-0.5, slo=5.0)
    load = summary(generator, times, given, own_cpu=0.0)
    assert (load.requests, load.ok, load.good, load.refused) == (4, 1, 1, {"429": 1})
    assert (load.wrong, load.broken, load.unanswered) == (1, 1, 0)


def test_latency_counts_from_when_a_request_should_have_left() -> None:
    """Latency counts from when a request should have left: a generator that was a second late has
    not seen a fast server.
    """
    with serving(lambda n: answer(200, RIGHT)) as port:
        generator = generated(port, [-1.0, -1.0], 1)

    given = argparse.Namespace(rate=1.0, seconds=1.0, warm_up=-2.0, slo=0.5)
    load = summary(generator, [-1.0, -1.0], given, own_cpu=0.0)
    assert load.good == 0
    assert load.p50_s > 0.9 and load.late_p99_s > 0.9


def test_departures_are_the_same_with_and_without_a_warm_up() -> None:
    """Departures come at the rate asked for and are the same with and without a warm-up, so that
    the simulator can be given those that count.
    """
    times = poisson_times(1000, 20, seed=7)

    assert departures(1000, 20, 2.0, seed=7)[-len(times) :] == [2.0 + when for when in times]
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert times == sorted(times)
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
