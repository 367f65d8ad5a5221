"""Whatever bytes come, nothing is raised, nothing hangs, and answers keep their order."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.request import Request
from carpool.http.reader import LARGE_BODY
from carpool.http.server_state import Limits
from tests.effort import examples
from tests.http.bad_requests import ALL
from tests.support.http.front import Front, chunked, get, post
from tests.support.http.jump import on_a_jumping_loop, turns
from tests.support.http.wire import Wire

LIMITS = Limits(header_s=10.0, body_s=30.0, idle_s=75.0, pipelined=3, body_bytes_in_flight=3 * LARGE_BODY)
LONGEST_S = 2 * LIMITS.idle_s + 60.0

SEEDS = [
    post(b"[1, 2]"),
    post(b"1", version="1.0"),
    post(b"1", "/predict", "Expect: 100-continue"),
    post(b"1", "/predict", "Connection: Upgrade", "Upgrade: h2c"),
    post(b"x" * LARGE_BODY),
    chunked(b"abc", b"d", trailers=("X: y",)),
    get("/livez"),
    get("/readyz", method="HEAD"),
    get("/metrics", "Accept: application/openmetrics-text"),
    get("/nowhere"),
    *[bad.data for bad in ALL.values() if len(bad.data) < 2000],
]
SPICES = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b"0",
    b"-1",
    b"\xff",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b"HTTP/1.1",
    b"Host: a\r\n",
]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Thousands of refusals need not be logged."""
    logger = logging.getLogger("carpool")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A few requests in a row, with some bytes of them changed, lost, doubled or put in."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(SEEDS), min_size=1, max_size=4))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.integers(0, 3))
        if how == 0:
            data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif how == 1:
            del data[at : at + draw(st.integers(1, 30))]
        elif how == 2:
            data[at:at] = draw(st.sampled_from(SPICES))
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 60))]
    return bytes(data)


def pieces_of(data: bytes, cuts: set[int]) -> list[bytes]:
    """The data, cut at these places."""
    inside = sorted(cut for cut in cuts if 0 < cut < len(data))
    return [data[a:b] for a, b in zip([0, *inside], [*inside, len(data)], strict=True)]


async def survive(front: Front, wire: Wire) -> None:
    """The connection comes to its end by itself, its answers can be read, and others are served."""
    async with asyncio.timeout(LONGEST_S):
        await wire.closed
    check_answers(wire)
    other = front.connect()
    other.send(post(b"ok"))
    await asyncio.sleep(5.0)
    assert [a.status for a in other.answers()] == [200]
    assert front.state.bodies.held == 0
    assert front.driver.core.unanswered == 0


def check_answers(wire: Wire) -> None:
    """Every byte sent belongs to a whole answer; errors are ours; nothing follows one that closes."""
    data = bytes(wire.received)
    closed = False
    while data:
        assert not closed
        head, _, rest = data.partition(b"\r\n\r\n")
        length = 0
        if not head.startswith(b"HTTP/1.1 100"):
            closed = b"\r\nconnection: close" in head
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if length and (not rest or rest.startswith(b"HTTP/1.1 ")):
            length = 0  # the answer to a HEAD
        assert len(rest) >= length
        if length and not head.startswith(b"HTTP/1.1 200"):
            assert set(json.loads(rest[:length])) == {"error"}
        data = rest[length:]


@examples(300)
@given(data=st.binary(max_size=300), cuts=st.sets(st.integers(1, 300), max_size=4))
@on_a_jumping_loop
async def test_random_bytes(data: bytes, cuts: set[int]) -> None:
    """Random bytes are refused or waited out, and raise nothing."""
    front = Front(LIMITS)
    wire = front.connect()
    for piece in pieces_of(data, cuts):
        wire.send(piece)
        await turns(2)
    await survive(front, wire)


@examples(600)
@given(
    data=mutated(),
    cuts=st.sets(st.integers(1, 800), max_size=5),
    ends=st.booleans(),
    cost_s=st.sampled_from([0.0, 3.0]),
)
@on_a_jumping_loop
async def test_mutated_requests(data: bytes, cuts: set[int], ends: bool, cost_s: float) -> None:
    """A request with some bytes changed is answered or refused, with an end of the stream or
    without.
    """
    front = Front(LIMITS, cost_s=cost_s)
    wire = front.connect()
    for piece in pieces_of(data, cuts):
        wire.send(piece)
        await turns(2)
    if ends:
        wire.end()
    await survive(front, wire)


@examples(200)
@given(data=mutated(), after=st.integers(0, 800), reads=st.booleans())
@on_a_jumping_loop
async def test_clients_that_leave_at_any_byte(data: bytes, after: int, reads: bool) -> None:
    """A client that resets at any byte leaves nothing behind."""
    front = Front(LIMITS, cost_s=1.0)
    wire = front.connect(reads)
    wire.send(data[:after])
    await turns(2)
    wire.reset()
    await asyncio.sleep(5.0)
    assert front.state.connections == set()
    assert front.state.bodies.held == 0
    assert front.driver.core.unanswered == 0


_REQUESTS: dict[str, Callable[[int], bytes]] = {
    "post": lambda n: post(b"%d" % n),
    "chunked": lambda n: chunked(b"%d" % n),
    "fails": lambda n: post(b"raise", "/predict", f"X-Request-Id: {n}"),
    "missing": lambda n: get("/nowhere", f"X-Request-Id: {n}"),
    "get": lambda n: get("/livez"),
    "head": lambda n: get("/livez", method="HEAD"),
}
_ANSWERS: dict[str, Callable[[int], tuple[int, str]]] = {
    "post": lambda n: (200, str(n)),
    "chunked": lambda n: (200, str(n)),
    "fails": lambda n: (500, str(n)),
    "missing": lambda n: (404, str(n)),
    "get": lambda n: (200, "ok\n"),
    "head": lambda n: (200, ""),
}


@examples(200)
@given(
    kinds=st.lists(st.sampled_from(sorted(_REQUESTS)), min_size=1, max_size=30),
    cuts=st.sets(st.integers(1, 3000), max_size=6),
    stops=st.lists(st.integers(1, 3), max_size=10),
)
@on_a_jumping_loop
async def test_answers_are_in_order(kinds: list[str], cuts: set[int], stops: list[int]) -> None:
    """Of pipelined requests of all kinds, in batches that take their time, answer n belongs to
    request n.
    """
    requests = [_REQUESTS[kind](n) for n, kind in enumerate(kinds)]

    front = Front(LIMITS, cost_s=1.0, answer=lambda request: bytes(request.item))  # type: ignore[arg-type]
    wire = front.connect()
    for i, piece in enumerate(pieces_of(b"".join(requests), cuts)):
        wire.send(piece)
        await asyncio.sleep(stops[i] / 2 if i < len(stops) else 0)
    await asyncio.sleep(2.0 * len(kinds))
    answers = wire.answers(["HEAD" if kind == "head" else "POST" for kind in kinds])
    got = [(a.status, a.headers["x-request-id"] if a.status >= 400 else a.body.decode()) for a in answers]
    assert got == [_ANSWERS[kind](n) for n, kind in enumerate(kinds)]


@on_a_jumping_loop
async def test_a_model_that_answers_in_any_order() -> None:
    """Batches that finish in any order do not change the order of answers on a connection."""
    seen: list[Request] = []

    def answer(request: Request) -> bytes:
        seen.append(request)
        return bytes(request.item)  # type: ignore[arg-type]

    front = Front(LIMITS, cost_s=1.0, answer=answer)
    wire = front.connect()
    wire.send(
        post(b"1", "/predict", "X-Request-Priority: -5") + post(b"2", "/predict", "X-Request-Priority: 5") + post(b"3")
    )
    await asyncio.sleep(10.0)
    assert [a.body for a in wire.answers()] == [b"1", b"2", b"3"]
    assert [bytes(r.item) for r in seen] == [b"2", b"3", b"1"]  # type: ignore[arg-type]
