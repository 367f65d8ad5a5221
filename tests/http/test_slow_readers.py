"""A client that does not take its answers is not read from either, and is dropped after a while."""

from __future__ import annotations

import asyncio

import pytest

from carpool.http.server_state import Limits
from tests.support.http.front import Front, get, post
from tests.support.http.jump import on_a_jumping_loop, turns

BIG = 100_000
LIMITS = Limits(write_buffer_bytes=BIG, write_s=20.0, idle_s=75.0)


def big_front(**settings: object) -> Front:
    """Its answers are larger than half of what may wait to be read."""
    return Front(LIMITS, answer=lambda request: b"x" * (BIG * 3 // 4), **settings)  # type: ignore[arg-type]


@pytest.mark.fault("F66")
@on_a_jumping_loop
async def test_a_slow_reader_is_held_back() -> None:
    """When enough answers wait for a client, no more of its requests are read or run until it has
    read.
    """
    front = big_front()
    wire = front.connect(reads=False)
    for _ in range(10):
        wire.send(post(b"1"))
        await turns()
    assert len(front.worker.seen) == 2
    assert wire.reading_paused
    while len(front.worker.seen) < 10:
        wire.read()
        await turns(10)
    wire.read()
    assert [len(a.body) for a in wire.answers()] == [BIG * 3 // 4] * 10
    assert not wire.ended


@on_a_jumping_loop
async def test_pipelined_requests_of_a_slow_reader_wait() -> None:
    """Of a slow reader's pipelined requests, those already read wait in the connection, and those
    in the app finish.
    """
    front = big_front(cost_s=1.0)
    wire = front.connect(reads=False)
    wire.send(post(b"1") * 40)
    await asyncio.sleep(10.0)
    assert len(front.worker.seen) <= Limits().pipelined + 2
    wire.reads = True
    wire.read()
    await asyncio.sleep(10.0)
    assert len(wire.answers()) == 40


@pytest.mark.fault("F66")
@on_a_jumping_loop
async def test_one_that_never_reads_is_dropped() -> None:
    """A client that never reads is dropped after `write_s`, and its answers are forgotten."""
    front = big_front()
    wire = front.connect(reads=False)
    wire.send(post(b"1") + post(b"2"))
    await wire.closed
    assert asyncio.get_running_loop().time() == pytest.approx(20.0, abs=0.1)
    assert wire.aborted
    assert front.state.connections == set()


@on_a_jumping_loop
async def test_one_that_reads_in_time_is_kept() -> None:
    """A client that reads in time is kept: the clock runs only while too much is waiting."""
    front = big_front()
    wire = front.connect(reads=False)
    for _ in range(5):
        wire.send(post(b"1") + post(b"2"))
        await asyncio.sleep(19.0)
        wire.read()
    await asyncio.sleep(25.0)
    assert not wire.ended
    assert len(wire.answers()) == 10


@pytest.mark.parametrize("closing", [False, True])
@on_a_jumping_loop
async def test_a_little_that_is_never_read(closing: bool) -> None:
    """Regression: an answer too small to hold anybody back kept its connection for ever."""
    front = Front(LIMITS)
    wire = front.connect(reads=False)
    wire.send(get("/livez", *(["Connection: close"] if closing else [])))
    await wire.closed
    assert asyncio.get_running_loop().time() <= 2 * LIMITS.idle_s
    assert wire.aborted


@pytest.mark.parametrize("reads", [1000, BIG // 2], ids=["slowly", "quickly"])
@on_a_jumping_loop
async def test_one_that_reads_steadily_gets_all_of_a_large_answer(reads: int) -> None:
    """Regression: an answer was cut off when `write_s` was over, however steadily it was read."""
    size = 50 * reads + BIG
    front = Front(LIMITS, answer=lambda request: b"x" * size)
    wire = front.connect(reads=False)
    wire.send(post(b"1"))
    while wire.unread or not wire.received:
        await asyncio.sleep(LIMITS.write_s - 1.0)
        wire.read(reads)
    assert [len(a.body) for a in wire.answers()] == [size]
    assert not wire.ended


@on_a_jumping_loop
async def test_one_that_stops_reading_in_the_middle_is_dropped() -> None:
    """A client that stops reading in the middle of an answer is dropped `write_s` after the last
    byte that it took, give or take a period.
    """
    front = Front(LIMITS, answer=lambda request: b"x" * 10 * BIG)
    wire = front.connect(reads=False)
    wire.send(post(b"1"))
    for _ in range(5):
        await asyncio.sleep(15.0)
        wire.read(BIG)
    await wire.closed
    assert 75.0 + LIMITS.write_s <= asyncio.get_running_loop().time() <= 75.0 + 2 * LIMITS.write_s
    assert wire.aborted


@on_a_jumping_loop
async def test_answers_that_are_added_meanwhile_are_no_reason_to_drop_a_reader() -> None:
    """A client that takes bytes is kept although further answers make what is left grow."""
    front = Front(LIMITS, cost_s=15.0, answer=lambda request: b"x" * 3 * BIG)
    wire = front.connect(reads=False)
    wire.send(post(b"1"))
    await asyncio.sleep(1.0)
    wire.send(post(b"2"))
    for _ in range(130):
        await asyncio.sleep(5.0)
        wire.read(BIG // 20)
    assert [len(a.body) for a in wire.answers()] == [3 * BIG] * 2
    assert not wire.aborted


@on_a_jumping_loop
async def test_a_refusal_behind_answers_that_are_read_slowly() -> None:
    """Regression: the moment that a refused client is listened to cut its earlier answers off, or never ended."""
    front = big_front(cost_s=1.0)
    wire = front.connect(reads=False)
    wire.send(post(b"1") + post(b"2") + b"NONSENSE\r\n\r\n")
    await asyncio.sleep(15.0)
    assert not wire.lost
    wire.read()
    assert [a.status for a in wire.answers()] == [200, 200, 400]
    await wire.closed
    assert asyncio.get_running_loop().time() <= 1.0 + 2.0 + LIMITS.write_s + 0.1


@on_a_jumping_loop
async def test_the_answers_before_a_refusal_are_read_to_their_end() -> None:
    """Answers before a refusal are written as long as the client takes something of them, however
    slowly.
    """
    front = big_front()
    wire = front.connect(reads=False)
    wire.send(post(b"1") + b"NONSENSE\r\n\r\n")
    while wire.unread or not wire.received:
        await asyncio.sleep(LIMITS.write_s - 1.0)
        wire.read(BIG // 10)
    assert [a.status for a in wire.answers()] == [200, 400]
    await wire.closed


@on_a_jumping_loop
async def test_a_slow_reader_does_not_hold_up_others() -> None:
    """A slow reader whose requests share a batch with others' does not hold up these others'
    answers.
    """
    front = big_front()
    slow, quick = front.connect(reads=False), front.connect()
    slow.send(post(b"1") + post(b"2") + post(b"3"))
    quick.send(post(b"4"))
    await turns(10)
    assert [a.status for a in quick.answers()] == [200]
