"""Known heads skip the parser. That may save time and nothing else: with or without it, bytes mean the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.engine.fast_paths import without
from carpool.http.app import App
from carpool.http.exchange import Exchange
from carpool.http.server_state import Limits, ServerState
from tests.effort import examples
from tests.support.http.front import Front, chunked, get, post
from tests.support.http.jump import on_a_jumping_loop, run, turns
from tests.support.http.wire import Wire

Seen = tuple[bytes, bytes, dict[bytes, bytes], bytes]


class WatchedApp(App):
    """Notes every request that one of its routes gets."""

    seen: list[Seen]

    def _make_routes(self, *of: Any) -> Any:
        self.seen = []
        return {
            path: {method: (self._watched(route), *model) for method, (route, *model) in methods.items()}
            for path, methods in super()._make_routes(*of).items()
        }

    def _watched(self, route: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        def watch(exchange: Exchange) -> None:
            head = exchange.head
            self.seen.append((head.method, head.path, dict(head.headers), bytes(exchange.body)))
            route(exchange)

        return watch


def forgetful(front: Front) -> Front:
    """The same front without its memory for heads."""
    front.state.remember = lambda raw, head: None  # type: ignore[method-assign]
    return front


async def play(front: Front, connections: list[list[bytes]]) -> tuple[list[Seen], list[bytes], list[bool]]:
    """What the app sees and each client gets, when they come one after the other with these pieces."""
    received: list[bytes] = []
    ended: list[bool] = []
    for pieces in connections:
        wire = front.connect()
        for piece in pieces:
            wire.send(piece)
            await turns(3)
        received.append(_plain(wire))
        ended.append(wire.ended)
        wire.reset()
    assert isinstance(front.app, WatchedApp)
    return front.app.seen, received, ended


def _plain(wire: Wire) -> bytes:
    return re.sub(rb"date: [^\r]*\r\n|[0-9a-f]{12}-[0-9]+", b"", bytes(wire.received))


class Deaf:
    """A reader that must not be asked."""

    at_request_start = True


@on_a_jumping_loop
async def test_a_head_seen_before_is_not_parsed_again() -> None:
    """A head that was seen before is not parsed again; if it were, the tests below would be worth
    nothing.
    """
    front = Front()
    wire = front.connect()
    wire.send(post(b"ab"))
    await turns()
    assert len(front.state.heads) == 1
    reader = wire.get_protocol()._reader  # type: ignore[attr-defined]
    wire.get_protocol()._reader = Deaf()  # type: ignore[attr-defined]
    wire.send(post(b"cd") + post(b"ef"))
    await turns()
    assert [a.body for a in wire.answers()] == [b"<ab>", b"<cd>", b"<ef>"]
    wire.get_protocol()._reader = reader  # type: ignore[attr-defined]


NEVER_KNOWN = {
    "old version": post(b"1", version="1.0"),
    "closing": post(b"1", "/predict", "Connection: close"),
    "expecting": post(b"1", "/predict", "Expect: 100-continue"),
    "chunked": chunked(b"1"),
    "with an id": post(b"1", "/predict", "X-Request-Id: abc"),
    "upgrading": get("/livez", "Connection: Upgrade", "Upgrade: x"),
    "blank line in front": b"\r\n" + post(b"1"),
    "not found": get("/nowhere"),
    "not allowed": get("/predict"),
    "long": post(b"1", "/predict", "X-Long: " + "x" * 2048),
}


@pytest.mark.parametrize("name", NEVER_KNOWN)
@on_a_jumping_loop
async def test_heads_that_are_not_kept(name: str) -> None:
    """Heads that mean more than their bytes say, that are refused, or that cost much to keep are
    not remembered.
    """
    front = Front()
    front.connect().send(NEVER_KNOWN[name])
    await turns()
    assert front.state.heads == {}


@pytest.mark.fault("F68")
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://other/predict", 200),
        ("HTTP://other:8000/predict?x=/", 200),
        ("https://[::1]/models/echo/predict", 200),
        ("http://other", 405),
        ("http://other/nowhere", 404),
        ("http://a,b/predict", 400),
    ],
)
@on_a_jumping_loop
async def test_an_address_as_for_a_proxy(target: str, status: int, known: bool) -> None:
    """A whole URI in the place of a path, which a server has to take (RFC 9112, 3.2.2), means what
    its path means, whether the head is known or not.
    """
    front = Front()
    if known:
        front.connect().send(post(b"0", target))
        await turns()
    wire = front.connect()
    wire.send(post(b"1", target))
    await turns()
    assert [a.status for a in wire.answers()] == [status]
    assert len(front.state.heads) == (status == 200)


@on_a_jumping_loop
async def test_a_refused_head_does_not_lend_its_name_to_the_next() -> None:
    """Regression: the bytes of a refused head were remembered for the request behind it."""
    front = Front()
    front.connect().send(get("/nowhere") + get("/livez"))
    wire = front.connect()
    wire.send(get("/nowhere"))
    await turns()
    assert [a.status for a in wire.answers()] == [404]


@on_a_jumping_loop
async def test_a_slow_body_does_not_spoil_its_head_for_others() -> None:
    """Regression: the time-out marked the shared head as one whose connection closes."""
    front = Front(Limits(body_s=1.0))
    slow = front.connect()
    slow.send(post(b"abcdef")[:-3])
    await slow.closed
    assert [a.status for a in slow.answers()] == [408]
    wire = front.connect()
    wire.send(post(b"ghijkl"))
    front.app.drain()  # an answer that is not a good one
    wire.send(post(b"mnopqr"))
    await turns()
    assert [(a.status, a.closes) for a in wire.answers()] == [(503, False), (503, False)]
    assert not wire.ended


@on_a_jumping_loop
async def test_known_heads_are_refused_while_draining() -> None:
    """A draining server refuses requests with heads that it knows, as it refuses others."""
    front = Front()
    wire = front.connect()
    wire.send(post(b"ab"))
    await turns()
    front.app.drain()
    wire.send(post(b"ab") + get("/readyz"))
    await turns()
    assert [a.status for a in wire.answers()] == [200, 503, 503]
    assert front.worker.seen == [b"ab"]


@on_a_jumping_loop
async def test_the_memory_is_bounded() -> None:
    """A client that changes its head with every request does not fill the memory of heads."""
    front = Front()
    wire = front.connect()
    for n in range(3000):
        wire.send(get(f"/livez?{n}"))
    assert 0 < len(front.state.heads) <= 1024
    assert len(wire.answers()) == 3000


# -- any requests in any pieces

NAMES = st.sampled_from(
    ["Accept", "Content-Type", "X-Request-Timeout-Ms", "X-Request-Priority", "X-Other", "Connection", "Expect"]
)
VALUES = st.sampled_from(
    [
        *("*/*", "application/json", "application/msgpack", "text/html", "100", "-1", "abc"),
        *("close", "keep-alive", "", "100-continue", " 5 ", "a\tb", "upgrade"),
    ]
)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=2)
TRICKS = st.sampled_from(
    [
        ("Host: test\r\n", "Host: test\n"),
        ("Host: test\r\n", "Host: test\r\n folded\r\n"),
        ("Host: test\r\n", "Host: test\r\nHost: test\r\n"),
        ("Host: test\r\n", ""),
        ("Host: test\r\n", "Host: test \r\n"),
        ("Host: ", "Host : "),
        ("Host: ", "Host:"),
        ("Host: test", "host: test"),
        ("Host: test", "Host: a, b"),
        ("Content-Length: ", "Content-Length: 0"),
        ("Content-Length: ", "Content-Length: +"),
        ("Content-Length: ", "content-length:\t"),
        ("Content-Length: ", "Transfer-Encoding: chunked\r\nContent-Length: "),
        ("Content-Length: ", "Content-Length: 1\r\nContent-Length: "),
        ("Content-Length: ", "Content_Length: "),
        (" HTTP/1.1\r\n", " HTTP/1.0\r\n"),
        (" HTTP/1.1\r\n", "  HTTP/1.1\r\n"),
        (" HTTP/1.1\r\n", " HTTP/1.1\n"),
        (" HTTP/1.1\r\n", " HTTP/1.1\r\n\r\n"),
        (" /", "  /"),
        (" /", " http://test/"),
        (" /", " HTTPS://[::1]:80/"),
        (" /", " http://a@test/"),
        ("Content-Length: ", "Content-Length: " + "0" * 20),
        ("POST", "post"),
        ("POST", "\r\nPOST"),
        ("POST", "\r\n\r\n\r\nPOST"),
        ("\r\n\r\n", "\r\n\n"),
        ("\r\n\r\n", "\n\r\n"),
        ("\r\n\r\n", "\r\n\r\n\r\n"),
        ("\r\n\r\n", "\r\r\n\r\n"),
        ("\r\n\r\n", "\r\nX: \r\n\r\n"),
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One request, mostly valid; a body may look like a request."""
    path = draw(st.sampled_from(["/predict", "/models/echo/predict", "/livez", "/readyz", "/nowhere", "/predict?x"]))
    fields = [f"{name}: {value}" for name, value in draw(FIELDS)]
    if draw(st.booleans()):
        request = get(path, *fields, method=draw(st.sampled_from(["GET", "HEAD"])))
    elif draw(st.integers(0, 5)):
        body = draw(st.sampled_from([b"", b"1", b"ab", b"\r\n\r\n", get(), post(b"x"), b"raise"]))
        request = post(body, path, *fields)
    else:
        request = chunked(*draw(st.lists(st.sampled_from([b"a", b"\r\n", get()]), max_size=2)), path=path)
    if draw(st.integers(0, 4)) == 0:
        old, new = draw(TRICKS)
        request = request.replace(old.encode(), new.encode(), 1)
    return request


@st.composite
def conversations(draw: st.DrawFn) -> list[list[bytes]]:
    """Some connections, each with some requests out of a small stock, in some pieces: heads repeat."""
    stock = draw(st.lists(requests(), min_size=1, max_size=4))
    connections = []
    for _ in range(draw(st.integers(1, 4))):
        data = b"".join(draw(st.lists(st.sampled_from(stock), min_size=1, max_size=6)))
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=4)))
        connections.append([data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)])
    return connections


@examples(600)
@given(conversations())
@on_a_jumping_loop
async def test_the_memory_never_changes_the_meaning(connections: list[list[bytes]]) -> None:
    """With the memory of heads and without it, the app sees the same requests and the clients get
    the same bytes.
    """
    with_memory = await play(Front(app=WatchedApp), connections)
    without = await play(forgetful(Front(app=WatchedApp)), connections)
    assert with_memory == without


async def conversation(
    pieces: list[bytes], pipelined: int, drains_after: int, ends: bool, reads: bool
) -> tuple[bytes, bool]:
    """What a client gets that sends these pieces, and whether its connection is closed.

    Args:
        pieces: What it sends, in turns of their own.
        pipelined: How many of its requests the app may have at a time.
        drains_after: After how many pieces the server is told to drain.
        ends: Whether the client ends its side right after the last piece.
        reads: Whether it reads at once, or only once everything has been sent.
    """
    front = Front(Limits(write_buffer_bytes=200, pipelined=pipelined))
    wire = front.connect(reads)
    for n, piece in enumerate(pieces):
        if n == drains_after:
            front.state.drain()
        wire.send(piece)
        if ends and n == len(pieces) - 1:
            wire.end()
        await turns(3)
    wire.reads = True
    while wire.unread:
        wire.read()
        await turns(3)
    return _plain(wire), wire.ended


@examples(300)
@given(conversations(), st.integers(1, 3), st.integers(0, 6), st.booleans(), st.booleans())
@example([[post(b"1", version="1.0")], [post(b"1", "/predict", "Connection: close")]], 3, 6, False, True)
@example([[post(b"1")]], 3, 6, True, True)
@example([[post(b"1"), post(b"2") + post(b"3")]], 1, 6, False, True)
def test_an_answer_written_at_once_is_the_same(
    connections: list[list[bytes]], pipelined: int, drains_after: int, ends: bool, reads: bool
) -> None:
    """With `answer_now` and without it, clients get the same bytes, also slow ones and while the server drains."""

    async def main() -> list[tuple[bytes, bool]]:
        return [await conversation(pieces, pipelined, drains_after, ends, reads) for pieces in connections]

    at_once = run(main())
    with without("answer_now"):
        assert run(main()) == at_once


@on_a_jumping_loop
async def test_the_listener_is_asked_to_remember() -> None:
    """A server whose memory `forgetful` has switched off keeps no head, so the comparison above
    compares.
    """
    front = forgetful(Front())
    assert isinstance(front.state, ServerState)
    wire = front.connect()
    wire.send(post(b"ab") * 3)
    await turns()
    assert front.state.heads == {}
    assert len(wire.answers()) == 3
