"""However the bytes of a stream are cut, the same requests are understood and the same bytes are answered."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.http.reader import LARGE_BODY
from tests.effort import examples, share
from tests.support.http.front import Front, chunked, get, post
from tests.support.http.jump import on_a_jumping_loop, turns
from tests.support.http.wire import Wire

LARGE = b"x" * LARGE_BODY
_DATE = re.compile(rb"date: [^\r]*\r\n")
_ID = re.compile(rb"[0-9a-f]{12}-[0-9]+")


@dataclass(frozen=True)
class Stream:
    """What one client sends, and what must become of it.

    Attributes:
        data: The bytes.
        bodies: The items that reach the model, in order.
        statuses: Of the answers, in order.
        methods: Of the requests, where not all are POST.
        stays: Whether the connection is kept.
        known: Sent on another connection before, so that its heads are known.
    """

    data: bytes
    bodies: list[bytes]
    statuses: list[int]
    methods: list[str] | None = field(default=None, kw_only=True)
    stays: bool = field(default=True, kw_only=True)
    known: bytes = field(default=b"", kw_only=True)


STREAMS = {
    "get": Stream(get("/livez"), [], [200]),
    "head": Stream(get("/livez", method="HEAD"), [], [200], methods=["HEAD"]),
    "post": Stream(post(b"[1, 2]"), [b"[1, 2]"], [200]),
    "empty body": Stream(post(b""), [b""], [200]),
    "query": Stream(post(b"1", "/predict?a=b"), [b"1"], [200]),
    "chunked": Stream(chunked(b"abc", b"d" * 20), [b"abc" + b"d" * 20], [200]),
    "chunked with trailers": Stream(chunked(b"abc", trailers=("X-Sum: 1", "X-More: 2")), [b"abc"], [200]),
    "two": Stream(post(b"one") + post(b"two"), [b"one", b"two"], [200, 200]),
    "mixed": Stream(
        get("/livez") + chunked(b"1") + get("/readyz", method="HEAD") + post(b"2"),
        [b"1", b"2"],
        [200, 200, 200, 200],
        methods=["GET", "POST", "HEAD", "POST"],
    ),
    "one fails": Stream(post(b"1") + post(b"raise") + post(b"3"), [b"1", b"raise", b"3"], [200, 500, 200]),
    "blank lines": Stream(b"\r\n\r\n" + post(b"1") + b"\r\n" + post(b"2"), [b"1", b"2"], [200, 200]),
    "old": Stream(post(b"1", version="1.0"), [b"1"], [200], stays=False),
    "old that stays": Stream(
        post(b"1", "/predict", "Connection: keep-alive", version="1.0") * 2, [b"1", b"1"], [200, 200]
    ),
    "expect": Stream(post(b"abc", "/predict", "Expect: 100-continue"), [b"abc"], [200]),
    "close": Stream(post(b"1", "/predict", "Connection: close"), [b"1"], [200], stays=False),
    "data after close": Stream(post(b"1", "/predict", "Connection: close") + post(b"2"), [b"1"], [200], stays=False),
    "upgrade": Stream(get("/livez", "Connection: Upgrade", "Upgrade: websocket") + post(b"1"), [b"1"], [200, 200]),
    "upgrade with body": Stream(
        post(b"abc", "/predict", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c") + post(b"1"),
        [b"abc", b"1"],
        [200, 200],
    ),
    "not found": Stream(get("/nowhere") + post(b"1"), [b"1"], [404, 200], methods=["GET", "POST"]),
    "not found with body": Stream(post(b"1", "/nowhere") + post(b"2"), [], [404], stays=False),
    "bad second": Stream(post(b"1") + b"NONSENSE\r\n\r\n" + post(b"2"), [b"1"], [200, 400], stays=False),
    "bad chunk": Stream(chunked(b"abc").replace(b"3\r\n", b"g\r\n"), [], [400], stays=False),
    "known": Stream(post(b"xyz"), [b"xyz"], [200], known=post(b"abc")),
    "known, twice": Stream(post(b"xy") * 2, [b"xy", b"xy"], [200, 200], known=post(b"ab")),
    "known, then another": Stream(
        post(b"xy") + post(b"z") + post(b"xy"), [b"xy", b"z", b"xy"], [200] * 3, known=post(b"ab")
    ),
    "known after blank line": Stream(b"\r\n" + post(b"xy") * 2, [b"xy", b"xy"], [200, 200], known=post(b"ab")),
    "known get": Stream(get("/livez") * 2, [], [200, 200], known=get("/livez")),
    "known head": Stream(
        get("/livez", method="HEAD") * 2,
        [],
        [200, 200],
        methods=["HEAD", "HEAD"],
        known=get("/livez", method="HEAD"),
    ),
    "known, then chunked": Stream(post(b"xy") + chunked(b"z"), [b"xy", b"z"], [200, 200], known=post(b"ab")),
}


async def answer(stream: Stream, pieces: list[bytes], pause: bool) -> tuple[list[bytes], bytes, Wire]:
    """What the model sees and the client gets when the stream comes in `pieces`, with or without time in between."""
    front = Front()
    if stream.known:
        before = front.connect()
        before.send(stream.known)
        await turns()
        front.worker.seen.clear()
    wire = front.connect()
    for piece in pieces:
        wire.send(piece)
        if pause:
            await turns(4)
    await turns(4 + 4 * len(stream.statuses))
    assert front.state.bodies.held == 0
    received = _ID.sub(b"ID", _DATE.sub(b"", bytes(wire.received)))
    return front.worker.seen, received, wire


def check(stream: Stream, wire: Wire, seen: list[bytes]) -> None:
    """The stream is answered as its author says."""
    answers = wire.answers(stream.methods)
    assert [a.status for a in answers] == stream.statuses
    assert seen == stream.bodies
    assert wire.ended != stream.stays
    assert answers[-1].closes != stream.stays


@pytest.mark.parametrize("name", STREAMS)
@on_a_jumping_loop
async def test_every_split_in_two(name: str) -> None:
    """A stream that is cut in two anywhere, with the pieces in one turn of the loop or far apart,
    is answered with the same bytes.
    """
    stream = STREAMS[name]

    whole = await answer(stream, [stream.data], False)
    check(stream, whole[2], whole[0])
    last = len(stream.data) - 1
    for i in Random(name).sample(range(1, last + 1), share(last)):  # the quick run leaves most of them out
        for pause in (False, True):
            seen, received, _ = await answer(stream, [stream.data[:i], stream.data[i:]], pause)
            assert (seen, received) == whole[:2], (i, pause)


@pytest.mark.parametrize("name", STREAMS)
@on_a_jumping_loop
async def test_one_byte_at_a_time(name: str) -> None:
    """A stream that comes byte by byte is answered with the same bytes."""
    stream = STREAMS[name]

    whole = await answer(stream, [stream.data], False)
    for pause in (False, True):
        seen, received, _ = await answer(stream, [bytes([b]) for b in stream.data], pause)
        assert (seen, received) == whole[:2]


@examples(150)
@given(name=st.sampled_from(sorted(STREAMS)), data=st.data())
@on_a_jumping_loop
async def test_splits_in_many(name: str, data: Any) -> None:
    """A stream that is cut in any number of places is answered with the same bytes."""
    stream = STREAMS[name]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream.data) - 1), max_size=12)))
    pieces = [stream.data[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream.data)], strict=True)]

    whole = await answer(stream, [stream.data], False)
    for pause in (False, True):
        seen, received, _ = await answer(stream, pieces, pause)
        assert (seen, received) == whole[:2]


HEAD_OF_LARGE = len(post(LARGE)) - len(LARGE)
LARGE_STREAMS = {
    "large": Stream(post(LARGE) + post(b"1"), [LARGE, b"1"], [200, 200]),
    "large, old": Stream(post(LARGE, version="1.0"), [LARGE], [200], stays=False),
    "large, expected": Stream(post(LARGE, "/predict", "Expect: 100-continue"), [LARGE], [200]),
    "large, upgrade": Stream(
        post(LARGE, "/predict", "Connection: Upgrade", "Upgrade: h2c") + post(b"1"), [LARGE, b"1"], [200, 200]
    ),
    "large after known": Stream(post(b"xy") + post(LARGE), [b"xy", LARGE], [200, 200], known=post(b"ab")),
    "large, chunked": Stream(chunked(LARGE, LARGE) + post(b"1"), [LARGE * 2, b"1"], [200, 200]),
    "two large": Stream(post(LARGE) * 2, [LARGE, LARGE], [200, 200]),
}


@pytest.mark.parametrize("name", LARGE_STREAMS)
@on_a_jumping_loop
async def test_a_large_body_is_cut_anywhere(name: str) -> None:
    """A large body is received beside the parser, which does not show wherever the stream is cut:
    in the heads, at the borders or within.
    """
    stream = LARGE_STREAMS[name]
    size = len(stream.data)
    near_border = {
        border + d for border in (HEAD_OF_LARGE, LARGE_BODY, HEAD_OF_LARGE + LARGE_BODY) for d in range(-3, 4)
    }
    cuts = {*range(1, 150, 7), *range(1, size, 9973), *near_border, *range(size - 100, size, 9)}

    whole = await answer(stream, [stream.data], False)
    check(stream, whole[2], whole[0])
    places = sorted(c for c in cuts if 0 < c < size)
    for cut in Random(name).sample(places, share(len(places))):  # the quick run leaves most of them out
        seen, received, _ = await answer(stream, [stream.data[:cut], stream.data[cut:]], True)
        assert (seen, received) == whole[:2], cut
    thirds = [stream.data[i : i + 1000] for i in range(0, size, 1000)]
    seen, received, _ = await answer(stream, thirds, True)
    assert (seen, received) == whole[:2]
