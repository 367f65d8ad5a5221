"""Several requests on one connection: answered in their order, and only so many at a time are taken on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from carpool.http.answer_writer import HttpExchange
from carpool.http.server_state import Limits
from tests.effort import slow_where
from tests.support.http.front import Front, get, post
from tests.support.http.jump import on_a_jumping_loop, turns


@on_a_jumping_loop
async def test_answers_keep_the_order_of_their_requests() -> None:
    """An answer that is there at once waits for the answers to the requests before it."""
    front = Front(cost_s=1.0)
    wire = front.connect()
    wire.send(post(b"1") + get("/livez") + get("/nowhere") + post(b"2"))
    await turns()
    assert bytes(wire.received) == b""
    await turns(100)
    front.worker.cost_s = 0.0
    while len(wire.answers()) < 4:
        await _second()
    assert [a.body[:3] for a in wire.answers()] == [b"<1>", b"ok\n", b'{"e', b"<2>"]


@pytest.mark.fault("F67")
@pytest.mark.parametrize("path", ["/livez", "/nowhere"])
@on_a_jumping_loop
async def test_a_long_row_behind_a_slow_request(path: str) -> None:
    """Regression: answers given at once called each other, one level deeper for each request in the row."""
    front = Front(cost_s=1.0)
    wire, other = front.connect(), front.connect()
    wire.send(post(b"1") + get(path) * 3000)
    other.send(post(b"2"))
    await _second()
    await _second()
    assert len(wire.answers()) == 3001
    assert [a.body for a in other.answers()] == [b"<2>"]


@pytest.mark.parametrize("known", [False, True])
@on_a_jumping_loop
async def test_only_so_many_are_inside(known: bool) -> None:
    """Never more than `pipelined` requests of one connection wait in the app, and reading stops
    meanwhile.
    """
    front = Front(Limits(pipelined=4), cost_s=None)
    if known:
        front.connect().send(post(b"0"))
        await turns()
        front.worker.finish()
        await turns()
    wire = front.connect()
    for n in range(1, 8):
        wire.send(post(b"%d" % n))
    await turns()
    assert front.driver.core.unanswered == 4
    assert wire.reading_paused
    for _ in range(7):
        if front.driver.core.unanswered:
            front.worker.finish()
        await turns()
        assert front.driver.core.unanswered <= 4
    assert [a.body for a in wire.answers()] == [b"<%d>" % n for n in range(1, 8)]
    assert not wire.reading_paused


@pytest.mark.fault("F67")
@slow_where(lambda row: row == 9000)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("row", [200, 9000], ids=["short", "long"])
@on_a_jumping_loop
async def test_what_waits_behind_a_slow_request_is_not_read(
    known: bool, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one read of 256 KiB made thousands of requests; now those over the limit stay bytes until then."""
    made: list[int] = []
    monkeypatch.setattr(HttpExchange, "__init__", _counted(HttpExchange.__init__, made))

    front = Front(cost_s=None)
    if known:
        front.connect().send(get("/livez"))
    wire, other = front.connect(), front.connect()
    wire.send(post(b"1"))
    made.clear()
    wire.send(get("/livez") * row)
    await turns(20)
    assert len(made) <= Limits().pipelined
    assert wire.reading_paused
    other.send(get("/livez"))
    assert len(other.answers()) == 1
    front.worker.finish()
    await turns(20 + row // 10)
    assert len(wire.answers()) == row + 1
    assert not wire.reading_paused
    wire.send(get("/livez"))
    assert len(wire.answers()) == row + 2


def _counted(init: Callable[..., None], made: list[int]) -> Callable[..., None]:
    def count(*args: Any) -> None:
        made.append(1)
        init(*args)

    return count


@slow_where(lambda known, piece: known == (piece == 10_000))
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("piece", [10_000, 250_000])
@on_a_jumping_loop
async def test_a_long_row_takes_turns_with_others(known: bool, piece: int) -> None:
    """However many requests come in one piece, other connections are served before all of them are."""
    front = Front()
    if known:
        front.connect().send(get("/livez"))
    wire, other = front.connect(), front.connect()
    row = get("/livez") * 5000
    for at in range(0, len(row), piece):
        wire.send(row[at : at + piece])
    other.send(get("/livez"))
    assert len(other.answers()) == 1
    assert len(wire.answers()) < 600
    await turns(400)
    assert len(wire.answers()) == 5000


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("behind", [False, True], ids=["first", "behind a slow one"])
@on_a_jumping_loop
async def test_long_pages_come_one_per_turn(known: bool, behind: bool) -> None:
    """However many clients ask for `/metrics` and how often, one page is written in a turn, since
    it takes milliseconds, and others have their turns.
    """
    front = Front(cost_s=None)
    if known:
        front.connect().send(get("/metrics"))
        await turns()
    wires = [front.connect() for _ in range(3)]
    for wire in wires:
        wire.send(post(b"1") * behind + get("/metrics") * 40)
    if behind:
        await turns()
        front.worker.finish()
    in_order = []
    for _ in range(30):
        before = [len(wire.answers()) for wire in wires]
        await turns(1)
        in_order += [i for i, wire in enumerate(wires) for _ in range(len(wire.answers()) - before[i])]
    assert len(in_order) <= 30 + 3 * behind
    assert min(map(in_order.count, range(3))) >= 9
    await turns(150)
    assert [len(wire.answers()) for wire in wires] == [40 + behind] * 3


@pytest.mark.parametrize("ending", ["reset", "drain"])
@on_a_jumping_loop
async def test_requests_that_were_not_read_yet(ending: str) -> None:
    """Requests that wait unread in a connection go with their client, and are still answered by a
    server that drains.
    """
    front = Front(cost_s=1.0)
    wire = front.connect()
    wire.send(post(b"1") * 40)
    await turns()
    if ending == "reset":
        wire.reset()
    else:
        front.state.drain()
    for _ in range(20):
        await _second()
    assert (wire.lost, front.state.connections) == (True, set())
    if ending == "drain":
        assert [a.status for a in wire.answers()] == [200] * 40
        assert wire.answers()[-1].closes
    else:
        assert len(front.worker.seen) <= Limits().pipelined


@on_a_jumping_loop
async def test_reading_goes_on_in_the_middle_of_a_request() -> None:
    """Bytes that were held back are read when there is room again, also if a head or body was cut
    in two.
    """
    front = Front(Limits(pipelined=2), cost_s=1.0)
    wire = front.connect()
    row = post(b"1") + post(b"2") + post(b"3") + post(b"4")
    wire.send(row[:-30])
    wire.send(row[-30:-1])
    wire.send(row[-1:] + post(b"5"))
    for _ in range(6):
        await _second()
    assert [a.body for a in wire.answers()] == [b"<1>", b"<2>", b"<3>", b"<4>", b"<5>"]


@on_a_jumping_loop
async def test_who_has_to_wait_is_not_too_slow() -> None:
    """Regression: the time for a request's headers ran on while the server did not read."""
    front = Front(Limits(pipelined=2, header_s=1.0, body_s=1.0), cost_s=5.0)
    wire = front.connect()
    wire.send(post(b"1") + post(b"2") + post(b"3") + post(b"4")[:-10])
    assert wire.reading_paused
    wire.send(post(b"4")[-10:])
    for _ in range(20):
        await _second()
    assert [a.status for a in wire.answers()] == [200, 200, 200, 200]


@on_a_jumping_loop
async def test_a_request_behind_a_refused_one_is_not_run() -> None:
    """A request whose body is not read ends the connection, and what comes behind it is not run:
    nobody knows where it would begin.
    """
    front = Front()
    wire = front.connect()
    wire.send(post(b"1") + post(b"2", "/nowhere") + post(b"3"))
    await turns()
    assert [(a.status, a.closes) for a in wire.answers()] == [(200, False), (404, True)]
    assert front.worker.seen == [b"1"]
    assert wire.ended


@on_a_jumping_loop
async def test_many_offers_to_upgrade_in_one_piece() -> None:
    """Regression: each took one level of recursion; and after `Connection: close` no more requests are taken."""
    front = Front()
    wire = front.connect()
    wire.send(get("/livez", "Connection: Upgrade", "Upgrade: websocket") * 3000)
    await turns(200)  # others have their turns meanwhile
    assert [a.status for a in wire.answers()] == [200] * 3000
    wire.send(get("/livez", "Connection: Upgrade, close", "Upgrade: websocket") + post(b"1"))
    await turns()
    assert [a.status for a in wire.answers()] == [200] * 3001
    assert front.worker.seen == []
    assert wire.lost


@pytest.mark.parametrize("before", [1, 2, 3])
@on_a_jumping_loop
async def test_an_offer_to_upgrade_where_the_row_is_cut(before: int) -> None:
    """Regression: where there was room for just the head of such a request, its body was read as the next head."""
    front = Front(Limits(pipelined=2), cost_s=None)
    wire = front.connect()
    wire.send(post(b"1") * before + post(b"23", "/predict", "Connection: Upgrade", "Upgrade: h2c") + post(b"4"))
    while len(front.worker.seen) < before + 2:
        await turns()
        front.worker.finish()
    await turns()
    assert [a.body for a in wire.answers()] == [b"<1>"] * before + [b"<23>", b"<4>"]


async def _second() -> None:
    import asyncio

    await asyncio.sleep(1.0)
