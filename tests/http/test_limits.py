"""Limits, each exactly at its border: what is just allowed is answered, one more is refused."""

from __future__ import annotations

import errno
import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from carpool import Service, Stage
from carpool.http.app import App
from carpool.http.connection import Connection
from carpool.http.listener import Limits
from carpool.http.reader import LARGE_BODY, LARGEST_READ
from tests.http.door import Door, chunked, get, post
from tests.http.jump import run, turns
from tests.http.net import Client, serving
from tests.http.wire import Answer, Wire

FIELD = 4  # ": " and the line's end


async def ask(door: Door, data: bytes, piece: int | None = None) -> Answer:
    """The one answer to `data`."""
    wire = door.connect()
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
def test_the_border(what: str, piece: int | None) -> None:
    """At the limit 200, one over it the status that says why, with the connection closed."""
    request, limit, status, code = SIZES[what]

    async def main() -> None:
        door = Door(max_body_bytes=100_000)
        assert (await ask(door, request(limit), piece)).status == 200
        answer = await ask(door, request(limit + 1), piece)
        assert (answer.status, json.loads(answer.body)["error"]["code"], answer.closes) == (status, code, True)
        assert door.listener.bodies.held == 0

    run(main())


def test_a_body_that_is_too_large_is_not_waited_for() -> None:
    """413 as soon as the head says so, without `100 Continue`, and nothing of the body is kept."""

    async def main() -> None:
        door = Door(max_body_bytes=100)
        wire = door.connect()
        wire.send(post(b"x" * 101, "/predict", "Expect: 100-continue")[:-101])
        assert b"100 Continue" not in wire.received
        assert [a.status for a in wire.answers()] == [413]
        wire.send(b"x" * 1000)
        assert door.listener.bodies.held == 0
        await wire.closed

    run(main())


def test_the_limit_holds_for_every_address() -> None:
    """Regression: a body of any length was received for an address that needs none."""

    async def main() -> None:
        door = Door(max_body_bytes=100)
        wire = door.connect()
        wire.send(get("/livez", "Content-Length: 101"))
        assert [a.status for a in wire.answers()] == [413]

    run(main())


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
def test_what_never_ends_is_cut_off(endless: bytes) -> None:
    """Bytes that complete nothing are counted too, although the parser swallows them."""

    async def main() -> None:
        door = Door()
        wire = door.connect()
        wire.send(endless)
        filler = b"\r\n" if endless == b"\r\n" else b"x"
        for _ in range(0, 2 * LARGEST_READ, 1000):
            wire.send(filler * (1000 // len(filler)))
        assert [a.status for a in wire.answers()] in ([414], [431])
        assert wire.ended

    run(main())


def test_bytes_of_all_bodies_together() -> None:
    """Large bodies that are being received share one account; who does not fit in is told to come again."""

    async def main() -> None:
        door = Door(Limits(body_bytes_in_flight=3 * LARGE_BODY))
        body = b"x" * LARGE_BODY
        slow = [door.connect() for _ in range(3)]
        for wire in slow:
            wire.send(post(body)[:-1])
        late = door.connect()
        late.send(post(body, "/predict", "Expect: 100-continue")[:-1])
        (answer,) = late.answers()
        assert (answer.status, answer.headers["retry-after"]) == (429, "2")
        assert b"100 Continue" not in late.received
        slow[0].reset()
        slow[1].send(body[-1:])
        await turns()
        assert [a.status for a in slow[1].answers()] == [200]
        assert door.listener.bodies.held == LARGE_BODY
        assert door.outcomes == {"ok": 1, "overloaded": 1}

    run(main())


def test_bytes_of_chunked_bodies_count_too() -> None:
    """Regression: they were added up but never held against the limit."""

    async def main() -> None:
        door = Door(Limits(body_bytes_in_flight=1000))
        slow, late = door.connect(), door.connect()
        slow.send(chunked(b"x" * 600)[:-5])
        late.send(chunked(b"x" * 600)[:-5])
        assert [a.status for a in late.answers()] == [429]
        slow.send(chunked(b"x")[-5:])
        await turns()
        assert [a.status for a in slow.answers()] == [200]
        assert door.listener.bodies.held == 0

    run(main())


def test_connections() -> None:
    """One more than the limit is told 503; when one closes there is room again."""

    async def main() -> None:
        door = Door(Limits(connections=3))
        first = [door.connect() for _ in range(3)]
        late = door.connect()
        (answer,) = late.answers()
        assert (answer.status, answer.closes) == (503, True)
        assert json.loads(answer.body)["error"]["code"] == "too_many_connections"
        await late.closed
        first[0].reset()
        again = door.connect()
        again.send(get())
        assert [a.status for a in again.answers()] == [200]
        assert [wire.ended for wire in first[1:]] == [False, False]

    run(main())


def test_a_crowd_of_connections() -> None:
    """Refused ones linger for a moment; with twice the limit open, more are cut off, so that all stays bounded."""

    async def main() -> None:
        door = Door(Limits(connections=3))
        wires = [door.connect() for _ in range(100)]
        await turns()
        assert len(door.listener.connections) == 6
        assert [a.status for wire in wires for a in wire.answers()] == [503] * 3
        for wire in wires[3:]:
            await wire.closed
        assert len(door.listener.connections) == 3

    run(main())


def test_refusals_are_counted() -> None:
    """What is refused before its body was read is an outcome of its model like any other."""

    async def main() -> None:
        door = Door(max_body_bytes=10)
        for request in (
            post(b"x" * 11),
            chunked(b"x" * 11),
            chunked(b"x").replace(b"\r\n1\r\n", b"\r\nz\r\n"),
            post(b"1", "/predict", "X-Request-Timeout-Ms: abc"),
            post(b"1", "/predict", "Content-Type: image/png"),
        ):
            await ask(door, request)
        await ask(door, get("/nowhere", "Connection: close"))
        assert door.outcomes == {"invalid_request": 5}

    run(main())


def length(body: bytes) -> int:
    """A model for raw bodies."""
    return len(body)


def test_an_open_connection_does_not_keep_a_body_that_was_answered() -> None:
    """60 clients stay after a request of 4 MiB each: the memory of a few bodies, and not of all, is held."""
    body = post(bytes(4 * 2**20), "/predict", "Content-Type: application/octet-stream")
    service = Service(Stage(length, run_in="thread"))
    with serving(App(service)) as running, ExitStack() as stack:
        before = resident_bytes()
        for _ in range(60):
            client = stack.enter_context(Client(running.port))
            assert client.ask(body).body == b"4194304"
        assert resident_bytes() - before < 120 * 2**20


def resident_bytes() -> int:
    """The memory of this process, which is the server's too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


class Gone(Wire):
    """A connection whose client has gone without the server having heard of it."""

    def write_eof(self) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")


def test_a_refused_client_may_be_gone_already() -> None:
    """The refusal of a connection too many raises nothing into the loop, whatever the transport says to it."""

    async def main() -> list[int]:
        door = Door(limits=Limits(connections=1))
        door.connect()
        wire = Gone(lambda: Connection(door.listener))
        return [answer.status for answer in wire.answers()]

    assert run(main()) == [503]
