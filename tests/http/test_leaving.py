"""Clients that leave: by closing, by resetting, or on one side only while they wait for their answer."""

from __future__ import annotations

import asyncio
import errno

import pytest

from carpool.http.reader import LARGE_BODY
from tests.support.http.front import Front, chunked, get, post
from tests.support.http.jump import on_a_jumping_loop, turns


@pytest.mark.fault("F35")
@on_a_jumping_loop
async def test_a_half_closed_client_gets_its_answer() -> None:
    """A client that has closed its own side gets its answer, and then the connection ends."""
    front = Front(cost_s=5.0)
    wire = front.connect()
    wire.send(post(b"1") + get("/livez"))
    wire.end()
    await wire.closed
    assert [a.status for a in wire.answers()] == [200, 200]
    assert asyncio.get_running_loop().time() == pytest.approx(5.0)
    assert not wire.aborted


@on_a_jumping_loop
async def test_a_client_that_closes_without_a_question() -> None:
    """If a client closes its side and nothing is owed to it, the connection ends at once."""
    front = Front()
    wire = front.connect()
    wire.send(get())
    wire.end()
    await turns()
    assert wire.lost
    assert [a.status for a in wire.answers()] == [200]


@pytest.mark.parametrize(
    "data",
    [post(b"abc")[:-1], post(b"abc")[:20], chunked(b"abc")[:-5], post(b"x" * LARGE_BODY)[:-1]],
    ids=["body", "headers", "chunked", "large body"],
)
@on_a_jumping_loop
async def test_a_request_that_is_cut_short_is_not_run(data: bytes) -> None:
    """The end of the stream does not complete a request, which is not run then."""
    front = Front()
    wire = front.connect()
    wire.send(data)
    wire.end()
    await turns()
    assert wire.lost
    assert bytes(wire.received) == b""
    assert front.worker.seen == []
    assert front.state.bodies.held == 0


@pytest.mark.fault("F34")
@on_a_jumping_loop
async def test_a_reset_takes_queued_requests_out() -> None:
    """When a client resets, its queued requests never reach a worker, and its neighbours in the
    queue are untouched.
    """
    front = Front(cost_s=None)
    busy, gone, stays = front.connect(), front.connect(), front.connect()
    busy.send(post(b"0"))
    await turns()
    gone.send(post(b"1") + post(b"2"))
    stays.send(post(b"3"))
    gone.send(post(b"4"))
    await turns()
    gone.reset()
    front.worker.finish()
    await turns()
    front.worker.finish()
    await turns()
    assert front.worker.seen == [b"0", b"3"]
    assert front.driver.stats.cancelled == 3
    assert [a.body for a in busy.answers()] == [b"<0>"]
    assert [a.body for a in stays.answers()] == [b"<3>"]


@pytest.mark.fault("F34")
@on_a_jumping_loop
async def test_a_reset_in_the_turn_of_arrival() -> None:
    """When a client resets in the turn of the loop in which its request came, that never enters the
    queue.
    """
    front = Front()
    gone, stays = front.connect(), front.connect()
    gone.send(post(b"1"))
    stays.send(post(b"2"))
    gone.reset()
    await turns()
    assert front.worker.seen == [b"2"]
    assert [a.status for a in stays.answers()] == [200]


@pytest.mark.fault("F34")
@pytest.mark.parametrize("when", ["running", "answered in this turn"])
@on_a_jumping_loop
async def test_a_reset_while_it_runs(when: str) -> None:
    """When a client resets while its request runs, the answer is dropped without a word, and mates
    in the batch get theirs.
    """
    front = Front(cost_s=None)
    gone, stays = front.connect(), front.connect()
    gone.send(post(b"1") + post(b"2"))
    stays.send(post(b"3"))
    await turns()
    stays.send(post(b"4"))  # it waits, so the answers leave at the end of the turn, with the next batch
    await turns()
    if when == "running":
        gone.reset()
        front.worker.finish()
    else:
        front.worker.finish()
        gone.reset()
    await turns()
    front.worker.finish()
    await turns()
    assert bytes(gone.received) == b""
    assert [a.body for a in stays.answers()] == [b"<3>", b"<4>"]
    assert front.driver.core.unanswered == 0


@on_a_jumping_loop
async def test_a_client_that_has_gone_after_half_closing() -> None:
    """Closing looks like half-closing, so something is sent to a client that has ended its side; if
    a reset comes back, its request is dropped.
    """
    front = Front(cost_s=None)
    busy, gone = front.connect(), front.connect()
    busy.send(post(b"0"))
    await turns()
    gone.send(post(b"1"))
    gone.end()
    gone.socket_error = errno.ECONNRESET
    await gone.closed
    assert asyncio.get_running_loop().time() < 0.1
    assert gone.aborted
    front.worker.finish()
    await turns()
    assert front.worker.seen == [b"0"]
    assert front.driver.stats.cancelled == 1


@pytest.mark.parametrize(("version", "probes"), [("1.1", 1), ("1.0", 0)])
@on_a_jumping_loop
async def test_what_a_half_closed_client_is_sent(version: str, probes: int) -> None:
    """A half-closed client is sent one interim response, which clients of HTTP/1.1 skip; those of
    HTTP/1.0 know no such thing and are sent none.
    """
    front = Front(cost_s=60.0)
    wire = front.connect()
    wire.send(post(b"1", version=version))
    wire.end()
    await asyncio.sleep(30.0)
    assert bytes(wire.received).count(b"100 Continue") == probes
    await wire.closed
    assert [a.status for a in wire.answers()] == [504]


@on_a_jumping_loop
async def test_an_answer_that_fails_to_be_sent_harms_nobody() -> None:
    """Nothing is written to a transport that is closing, and the rest of the batch gets its
    answers.
    """
    front = Front(cost_s=None)
    gone, stays = front.connect(), front.connect()
    gone.send(post(b"1") + get())
    stays.send(post(b"2"))
    await turns()
    gone.abort()
    front.worker.finish()
    await turns()
    assert [a.status for a in stays.answers()] == [200]
    assert gone.lost and bytes(gone.received) == b""
