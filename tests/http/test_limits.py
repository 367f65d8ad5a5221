"""Limits, each exactly at its border: what is just allowed is answered, one more is refused."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from carpool import Service, Stage
from carpool.engine.wire.payload import Memory
from carpool.http.app import App
from carpool.http.connection import Connection
from carpool.http.reader import LARGE_BODY, LARGEST_READ
from carpool.http.server_state import Limits
from tests.support.http.front import Front, chunked, get, post
from tests.support.http.jump import on_a_jumping_loop, turns
from tests.support.http.net import Client, code_of, serving
from tests.support.http.wire import Answer, Wire, read_answers
from tests.support.processes import resident_bytes

FIELD = 4  # ": " and the line's end


async def ask(front: Front, data: bytes, piece: int | None = None) -> Answer:
    """The one answer to `data`."""
    wire = front.connect()
    for i in range(0, len(data), piece or len(data)):
        wire.send(data[i : i + (piece or len(data))])
    await turns(10)
    (answer,) = wire.answers()
    assert wire.ended == (answer.status != 200)
    wire.reset()
    return answer


def with_header_bytes(n: int) -> bytes:
    """A request whose header lines count n bytes."""
    rest = n - len("Host") - len("test") - FIELD - len("X") - FIELD
    return get("/livez", "X: " + "x" * rest)


def with_fields(n: int) -> bytes:
    """A request with n header lines."""
    return get("/livez", *["X: y"] * (n - 1))


def with_target(n: int) -> bytes:
    """A request whose address has n bytes."""
    return get("/livez?" + "x" * (n - len("/livez?")))


SIZES = {
    "header bytes": (with_header_bytes, 32 * 1024, 431, "headers_too_large"),
    "header fields": (with_fields, 64, 431, "headers_too_large"),
    "target": (with_target, 8 * 1024, 414, "uri_too_long"),
    "body": (lambda n: post(b"x" * n), 100_000, 413, "too_large"),
    "chunked body": (lambda n: chunked(b"x" * 60_000, b"x" * (n - 60_000)), 100_000, 413, "too_large"),
    "chunks": (lambda n: chunked(*[b"x"] * (n - 1)), 65_536, 413, "too_large"),
    "trailer bytes": (
        lambda n: chunked(b"x", trailers=("X: " + "x" * (n - 45),)),
        32 * 1024,
        431,
        "headers_too_large",
    ),
}


@pytest.mark.parametrize("piece", [None, 1021])
@pytest.mark.parametrize("what", SIZES)
@on_a_jumping_loop
async def test_the_border(what: str, piece: int | None) -> None:
    """A request at a limit is answered with 200; one over it gets the status that says why, and the
    connection closes.
    """
    request, limit, status, code = SIZES[what]

    front = Front(max_body_bytes=100_000)
    assert (await ask(front, request(limit), piece)).status == 200
    answer = await ask(front, request(limit + 1), piece)
    assert (answer.status, json.loads(answer.body)["error"]["code"], answer.closes) == (status, code, True)
    assert front.state.bodies.held == 0


@pytest.mark.fault("F30")
@on_a_jumping_loop
async def test_a_body_that_is_too_large_is_not_waited_for() -> None:
    """A body that its head says is too large gets 413 at once, without `100 Continue`, and nothing
    of it is kept.
    """
    front = Front(max_body_bytes=100)
    wire = front.connect()
    wire.send(post(b"x" * 101, "/predict", "Expect: 100-continue")[:-101])
    assert b"100 Continue" not in wire.received
    assert [a.status for a in wire.answers()] == [413]
    wire.send(b"x" * 1000)
    assert front.state.bodies.held == 0
    await wire.closed


@on_a_jumping_loop
async def test_the_limit_holds_for_every_address() -> None:
    """Regression: a body of any length was received for an address that needs none."""
    front = Front(max_body_bytes=100)
    wire = front.connect()
    wire.send(get("/livez", "Content-Length: 101"))
    assert [a.status for a in wire.answers()] == [413]


@pytest.mark.fault("F64")
@pytest.mark.parametrize(
    "endless",
    [
        b"GET /livez HTTP/1.1\r\nX: ",
        b"\r\n",
        b"GET ",
        b"POST /predict HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;",
    ],
    ids=["header", "blank lines", "address", "chunk extension"],
)
@on_a_jumping_loop
async def test_what_never_ends_is_cut_off(endless: bytes) -> None:
    """Bytes that complete no line or chunk count against the limits, too, although the parser
    swallows them.
    """
    front = Front()
    wire = front.connect()
    wire.send(endless)
    filler = b"\r\n" if endless == b"\r\n" else b"x"
    for _ in range(0, 2 * LARGEST_READ, 1000):
        wire.send(filler * (1000 // len(filler)))
    assert [a.status for a in wire.answers()] in ([414], [431])
    assert wire.ended


def small_account(**limits: float) -> Front:
    """Bodies of four times the large size may be received together; a share is half of one."""
    most = 4 * LARGE_BODY
    return Front(Limits(body_bytes_in_flight=most, connections=8, **limits), max_body_bytes=most // 2)  # type: ignore[arg-type]


def statuses(*wires: Wire) -> list[int]:
    """The statuses of the answers that these connections got."""
    return [answer.status for wire in wires for answer in wire.answers()]


@pytest.mark.fault("F64")
@pytest.mark.parametrize("request_of", [post, chunked])
@on_a_jumping_loop
async def test_promised_bytes_do_not_count(request_of: Callable[[bytes], bytes]) -> None:
    """Regression: heads without bodies, sixteen of them, shut out every other client until their time was over."""
    front = small_account()
    body = b"x" * 2 * LARGE_BODY
    idle = [front.connect() for _ in range(7)]
    for wire in idle:
        wire.send(post(body)[: -len(body)])
    good = front.connect()
    for _ in range(10):
        good.send(request_of(body))
        await turns()
    assert statuses(good) == [200] * 10
    assert statuses(*idle) == []
    assert front.state.bodies.held == 0
    for wire in idle:
        wire.send(body)
    await turns()
    assert statuses(*idle) == [200] * 7


@pytest.mark.fault("F64")
@pytest.mark.parametrize("request_of", [post, chunked])
@on_a_jumping_loop
async def test_who_fills_the_memory_and_stands_still_is_ended_first(request_of: Callable[[bytes], bytes]) -> None:
    """When there is no more room for bodies, the one of which the smallest part has come lately
    gets 408.
    """
    front = small_account()
    body = b"x" * 2 * LARGE_BODY
    slow, quick, good = [front.connect() for _ in range(3)]
    slow.send(request_of(body)[:-100])
    await asyncio.sleep(1.0)
    slow.send(b"x")  # a byte now and then is no progress
    quick.send(request_of(body)[:-100])
    good.send(request_of(body))
    await turns()
    assert statuses(slow, quick, good) == [408, 200]
    assert code_of(slow.answers()[0]) == "request_timeout"
    quick.send(request_of(body)[-100:])
    await turns()
    assert statuses(quick) == [200]
    assert front.state.bodies.held == 0
    assert front.outcomes == {"ok": 2, "invalid_request": 1}
    await slow.closed


@on_a_jumping_loop
async def test_a_share_is_everybody_s_own() -> None:
    """A client within its share of the memory is neither ended nor refused, however slow it is and
    whoever needs room.
    """
    front = small_account()
    share = front.state.bodies.share
    slow = [front.connect() for _ in range(4)]
    for wire in slow:
        wire.send(chunked(b"x" * share)[:-5])
    await asyncio.sleep(5.0)
    greedy = [front.connect() for _ in range(3)]
    for wire in greedy:
        wire.send(chunked(b"x" * 2 * LARGE_BODY)[:-5])
    await asyncio.sleep(5.0)
    for wire in slow:
        wire.send(b"0\r\n\r\n")
    await turns()
    assert statuses(*slow) == [200] * 4
    assert set(statuses(*greedy)) <= {408, 429}
    assert len(statuses(*greedy)) == 2


@on_a_jumping_loop
async def test_who_is_the_slowest_itself_is_told_to_come_again() -> None:
    """If the client that needs room is itself the slowest, it gets 429 and not 408: it came in
    time, but there is no room for it among quicker ones.
    """
    front = small_account()
    trickling, quick = front.connect(), front.connect()
    body = chunked(b"x" * (LARGE_BODY + 1))[:-5]
    trickling.send(body)
    await asyncio.sleep(2.0)
    more = [quick, *[front.connect() for _ in range(4)]]
    for wire in more:
        wire.send(chunked(b"x" * (LARGE_BODY // 2))[:-5])
    more[0].send(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
    trickling.send(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
    assert statuses(*more) == []
    (answer,) = trickling.answers()
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")


@pytest.mark.fault("F30", "F65")
@on_a_jumping_loop
async def test_the_account_holds_the_largest_body_twice() -> None:
    """Regression: a body that the app lets in was always 429 where it was larger than the account."""
    front = Front(Limits(body_bytes_in_flight=LARGE_BODY), max_body_bytes=5 * LARGE_BODY)
    assert front.state.bodies.limit == 10 * LARGE_BODY
    assert (await ask(front, post(b"x" * 5 * LARGE_BODY))).status == 200
    assert Front().state.bodies.limit == Limits().body_bytes_in_flight


def test_memory_is_taken_when_it_is_filled() -> None:
    """A fresh buffer for a body takes no memory, however large it is; a part that is written takes
    memory for that part.
    """
    memory = Memory()
    before = resident_bytes()
    buffers = [memory.buffer(64 * 2**20 + n) for n in range(16)]
    assert resident_bytes() - before < 32 * 2**20
    buffers[0][: 48 * 2**20] = bytes(48 * 2**20)
    assert 32 * 2**20 < resident_bytes() - before < 128 * 2**20


@on_a_jumping_loop
async def test_connections() -> None:
    """One connection more than the limit is told 503, and when another closes there is room again."""
    front = Front(Limits(connections=3))
    first = [front.connect() for _ in range(3)]
    late = front.connect()
    late.send(get("/"))
    (answer,) = late.answers()
    assert (answer.status, answer.closes) == (503, True)
    assert json.loads(answer.body)["error"]["code"] == "too_many_connections"
    await late.closed
    first[0].reset()
    again = front.connect()
    again.send(get())
    assert [a.status for a in again.answers()] == [200]
    assert [wire.ended for wire in first[1:]] == [False, False]


@on_a_jumping_loop
async def test_a_crowd_of_connections() -> None:
    """Refused connections stay open for a moment, and those that ask for nothing until a head is due;
    with twice the limit open the oldest of both are cut off, so that their number is bounded.
    """
    front = Front(Limits(connections=3))
    wires = [front.connect() for _ in range(100)]
    await turns()
    assert len(front.state.connections) == 6
    for wire in wires[-3:]:
        await wire.closed
    assert [a.status for wire in wires[3:] for a in wire.answers()] == [503] * 3
    assert len(front.state.connections) == 0  # those with room have asked for nothing, either
    assert front.state.shares.refused == 97


@pytest.mark.parametrize("root_path", ["", "/api"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("pieces", [1, 100], ids=["whole", "byte by byte"])
@on_a_jumping_loop
async def test_a_full_server_says_that_it_is_alive(root_path: str, method: str, pieces: int) -> None:
    """/livez is 200 while as many connections are open as may be, also among a crowd of others that ask for nothing;
    the connection then closes, and nobody is counted as refused.
    """
    front = Front(Limits(connections=3), root_path=root_path)
    crowd = [front.connect() for _ in range(5)]
    for path in ("/livez", f"{root_path}/livez?x=1"):
        probe = front.connect()
        request = f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        for i in range(pieces):
            probe.send(request[i * len(request) // pieces : (i + 1) * len(request) // pieces])
        assert [(answer.status, answer.closes) for answer in read_answers(bytes(probe.received), [method])] == [
            (200, True)
        ]
        await probe.closed
    assert [wire.ended for wire in crowd[:3]] == [False] * 3
    assert front.state.shares.refused == 0


@pytest.mark.parametrize(
    "request_", [get("/readyz"), post(b"1"), b"POST /livez HTTP/1.1\r\n\r\n", b"x" * 9000, b"GET " + b"x" * 9000]
)
@on_a_jumping_loop
async def test_a_full_server_refuses_all_else_and_says_so(request_: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever else a connection asks for that has no room, it is told 503, counted, and summed up in the log."""
    front = Front(Limits(connections=1))
    front.connect()
    for _ in range(5):
        wire = front.connect()
        wire.send(request_)
        assert [answer.status for answer in wire.answers()] == [503]
    assert front.state.shares.refused == 5
    await asyncio.sleep(15)
    lines = [record.getMessage() for record in caplog.records if "as many connections" in record.getMessage()]
    assert lines == [
        "the server refused 1 (503): as many connections are open as may be",
        "the server refused 4 (503) in the last 10 s: as many connections are open as may be",
    ]


@on_a_jumping_loop
async def test_refusals_are_counted() -> None:
    """A request that is refused before its body was read is counted as an outcome of its model like
    any other.
    """
    front = Front(max_body_bytes=10)
    for request in (
        post(b"x" * 11),
        chunked(b"x" * 11),
        chunked(b"x").replace(b"\r\n1\r\n", b"\r\nz\r\n"),
        post(b"1", "/predict", "X-Request-Timeout-Ms: abc"),
        post(b"1", "/predict", "Content-Type: image/png"),
    ):
        await ask(front, request)
    await ask(front, get("/nowhere", "Connection: close"))
    assert front.outcomes == {"invalid_request": 5}


def length(body: bytes) -> int:
    """A model for raw bodies."""
    return len(body)


def test_an_open_connection_does_not_keep_a_body_that_was_answered() -> None:
    """When 60 clients stay connected after a request of 4 MiB each, the memory of a few bodies is
    held, and not of all.
    """
    body = post(bytes(4 * 2**20), "/predict", "Content-Type: application/octet-stream")
    service = Service(Stage(length, run_in="thread"))
    with serving(App(service)) as running, ExitStack() as stack:
        before = resident_bytes()
        for _ in range(60):
            client = stack.enter_context(Client(running.port))
            assert client.ask(body).body == b"4194304"
        assert resident_bytes() - before < 120 * 2**20


class Gone(Wire):
    """A connection whose client has gone without the server having heard of it."""

    def write_eof(self) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")


@on_a_jumping_loop
async def test_a_refused_client_may_be_gone_already() -> None:
    """Refusing a connection too many raises nothing into the loop, whatever the transport says to
    it.
    """
    front = Front(limits=Limits(connections=1))
    front.connect()
    wire = Gone(lambda: Connection(front.state))
    wire.send(get("/"))
    assert [answer.status for answer in wire.answers()] == [503]
