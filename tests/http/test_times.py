"""Time-outs, to the second: a client gets so long for its headers, its body, its pauses and for taking answers."""

from __future__ import annotations

import asyncio
import json

import pytest

from carpool.http.reader import LARGE_BODY
from carpool.http.server_state import Limits
from tests.support.http.front import Front, chunked, get, post
from tests.support.http.jump import on_a_jumping_loop, turns
from tests.support.http.wire import Wire

LIMITS = Limits(header_s=10.0, body_s=30.0, idle_s=75.0, write_s=20.0)


async def seconds_until_ended(wire: Wire) -> float:
    """How long the server waits before it ends its side."""
    started = asyncio.get_running_loop().time()
    while not wire.ended:  # noqa: ASYNC110  time jumps here
        await asyncio.sleep(0.5)
    return asyncio.get_running_loop().time() - started


HALF_SENT = {
    "nothing": (b"", 10.0, []),
    "blank lines": (b"\r\n\r\n", 10.0, []),
    "half a line": (b"POST /pre", 10.0, [408]),
    "half the headers": (post(b"1")[:-6], 10.0, [408]),
    "half a body": (post(b"abc")[:-1], 30.0, [408]),
    "half a large body": (post(b"x" * LARGE_BODY)[:-1], 30.0, [408]),
    "half a chunk": (chunked(b"abc")[:-8], 30.0, [408]),
    "a chunk that claims 2^64 - 1": (chunked(b"abc").replace(b"\r\n3\r\n", b"\r\nffffffffffffffff\r\n"), 30.0, [408]),
    "no last chunk": (chunked(b"abc")[:-5], 30.0, [408]),
    "half the next": (get() + get()[:-5], 10.0, [200, 408]),
    "half a body next": (get() + post(b"abc")[:-1], 30.0, [200, 408]),
}


@pytest.mark.parametrize("name", HALF_SENT)
@on_a_jumping_loop
async def test_a_request_that_stops(name: str) -> None:
    """A request that stops in the middle gets 408 when its time is up, and the connection ends; one
    that never began just ends.
    """
    data, wait_s, statuses = HALF_SENT[name]

    front = Front(LIMITS)
    wire = front.connect()
    wire.send(data)
    assert await seconds_until_ended(wire) == pytest.approx(wait_s, abs=0.5)
    assert [a.status for a in wire.answers()] == statuses
    await wire.closed
    assert front.state.bodies.held == 0
    assert front.worker.seen == []


@on_a_jumping_loop
async def test_a_request_without_a_chance_is_told_at_once() -> None:
    """A request whose time-out cannot be met gets 429 as soon as that is known, with the time after
    which it may try again.
    """
    front = Front(cost_s=4.0)
    first, running, hurried, patient = [front.connect() for _ in range(4)]
    first.send(post(b"1"))
    await asyncio.sleep(5.0)
    running.send(post(b"2"))
    await asyncio.sleep(1.0)
    hurried.send(post(b"3", "/predict", "X-Request-Timeout-Ms: 6900"))
    patient.send(post(b"4", "/predict", "X-Request-Timeout-Ms: 7100"))
    await turns()
    (refusal,) = hurried.answers()
    assert (refusal.status, refusal.headers["retry-after"]) == (429, "4")
    assert json.loads(refusal.body)["error"]["reason"] == "deadline"
    await asyncio.sleep(7.05)
    assert [a.status for a in patient.answers()] == [200]
    assert front.worker.seen == [b"1", b"2", b"4"]
    assert front.outcomes == {"ok": 3, "overloaded": 1}


@on_a_jumping_loop
async def test_a_trickle_is_too_slow() -> None:
    """A client that sends a byte now and then gets 408: the clock runs from the first byte of the
    request.
    """
    front = Front(LIMITS)
    wire = front.connect()
    loop = asyncio.get_running_loop()
    for byte in get("/livez", "X: " + "x" * 100):
        if wire.ended:
            break
        wire.send(bytes([byte]))
        await asyncio.sleep(1.0)
    assert loop.time() == pytest.approx(10.0, abs=1.0)
    assert [a.status for a in wire.answers()] == [408]


@on_a_jumping_loop
async def test_the_clock_starts_anew_for_the_body_and_the_next_request() -> None:
    """The headers, the body and the next request have a time of their own each: parts that come in
    time are in time, however long they take together.
    """
    front = Front(LIMITS)
    wire = front.connect()
    for _ in range(3):
        request = post(b"abcdef")
        wire.send(request[:20])
        await asyncio.sleep(9.0)
        wire.send(request[20:-3])
        await asyncio.sleep(29.0)
        wire.send(request[-3:])
        await asyncio.sleep(70.0)
    assert [a.status for a in wire.answers()] == [200, 200, 200]
    assert not wire.ended


@on_a_jumping_loop
async def test_an_idle_connection_is_closed() -> None:
    """A connection without a request is closed after one to two idle periods."""
    front = Front(LIMITS)
    wire = front.connect()
    wire.send(get())
    waited_s = await seconds_until_ended(wire)
    assert 75.0 <= waited_s <= 151.0
    await wire.closed


@on_a_jumping_loop
async def test_a_connection_in_use_is_not_idle() -> None:
    """A connection is not idle if it asks now and then, waits for its answer, or has sent half of a
    request.
    """
    front = Front(LIMITS, cost_s=None, timeout_s=600.0)
    asking, waiting = front.connect(), front.connect()
    waiting.send(post(b"1"))
    for _ in range(10):
        asking.send(get())
        await asyncio.sleep(28.0)
    assert not asking.ended and not waiting.ended
    assert len(asking.answers()) == 10


@on_a_jumping_loop
async def test_a_408_comes_in_its_turn() -> None:
    """A 408 does not overtake the answer to a request before it."""
    front = Front(LIMITS, cost_s=15.0)
    wire = front.connect()
    wire.send(post(b"1") + post(b"abc")[:20])
    await asyncio.sleep(14.0)
    assert wire.answers() == []
    await wire.closed
    assert [(a.status, a.closes) for a in wire.answers()] == [(200, False), (408, True)]
    assert json.loads(wire.answers()[1].body)["error"]["code"] == "request_timeout"


@on_a_jumping_loop
async def test_time_outs_leave_nothing_behind() -> None:
    """When every client has gone, no timer of theirs is left on the loop."""
    front = Front(LIMITS, cost_s=None)
    wires = [front.connect(reads=False) for _ in range(6)]
    wires[0].send(b"GET")
    wires[1].send(post(b"abc")[:-1])
    wires[2].send(post(b"1"))
    wires[2].end()
    wires[3].send(b"NONSENSE\r\n\r\n")
    wires[4].send(get("/metrics") * 40)
    await asyncio.sleep(0.5)
    for wire in wires:
        wire.reset()
    await turns()
    left = [h for h in asyncio.get_running_loop()._scheduled if not h.cancelled()]  # type: ignore[attr-defined]
    assert [h for h in left if "Connection" in repr(h)] == []
