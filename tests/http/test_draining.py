"""The end of a server: idle connections close at once, the others after the answers that are owed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from carpool.http.app import App
from carpool.http.listener import Listener, PortListener, UnixListener
from carpool.http.server import Server
from tests.support.http import models
from tests.support.http.front import Front, get, post
from tests.support.http.jump import on_a_jumping_loop, turns
from tests.support.waiting import PATIENCE_S


@on_a_jumping_loop
async def test_idle_connections_close_at_once() -> None:
    """A server that drains closes idle connections at once, also those on which nothing was ever
    asked.
    """
    front = Front()
    silent, idle = front.connect(), front.connect()
    idle.send(get())
    front.state.drain()
    await front.state.empty()
    assert silent.lost and idle.lost
    assert [a.status for a in idle.answers()] == [200]


@pytest.mark.fault("F21")
@on_a_jumping_loop
async def test_what_is_owed_is_answered_first() -> None:
    """A connection with requests inside is closed after the last answer, which alone says so."""
    front = Front(cost_s=5.0)
    one, row = front.connect(), front.connect()
    one.send(post(b"1"))
    row.send(post(b"2") + get() + post(b"3"))
    await turns()
    front.state.drain()
    assert not one.ended and not row.ended
    await front.state.empty()
    assert [(a.status, a.closes) for a in one.answers()] == [(200, True)]
    assert [(a.status, a.closes) for a in row.answers()] == [(200, False), (200, False), (200, True)]
    assert not one.aborted and not row.aborted


@on_a_jumping_loop
async def test_a_request_on_its_way_is_answered() -> None:
    """A request of which a half is there when the server drains is read to its end and answered."""
    front = Front()
    wire = front.connect()
    wire.send(get()[:10])
    front.state.drain()
    await asyncio.sleep(1.0)
    assert not wire.ended
    wire.send(get()[10:])
    await front.state.empty()
    assert [(a.status, a.closes) for a in wire.answers()] == [(200, True)]


@on_a_jumping_loop
async def test_an_answer_before_a_request_on_its_way() -> None:
    """While draining, a connection with an answer to give and half of a further request waits for
    the rest of that, whose answer is the last.
    """
    front = Front(cost_s=1.0)
    wire = front.connect()
    wire.send(post(b"1") + post(b"2")[:-1])
    front.state.drain()
    await asyncio.sleep(2.0)
    wire.send(b"2")
    await front.state.empty()
    assert [(a.status, a.closes) for a in wire.answers()] == [(200, False), (200, True)]


@on_a_jumping_loop
async def test_abort_ends_everything() -> None:
    """`abort` ends all connections, whatever they are doing, and what is queued is not run."""
    front = Front(cost_s=None)
    wires = [front.connect() for _ in range(3)]
    wires[0].send(post(b"1"))
    await turns()
    wires[1].send(post(b"2"))
    wires[2].send(b"GET")
    await turns()
    front.state.abort()
    await front.state.empty()
    front.worker.finish()
    await turns()
    assert [wire.lost for wire in wires] == [True, True, True]
    assert front.worker.seen == [b"1"]


@on_a_jumping_loop
async def test_an_empty_listener_is_empty() -> None:
    """A server without connections has drained at once."""
    await Front().state.empty()


@on_a_jumping_loop
async def test_before_it_drains_it_serves_on() -> None:
    """A server that has announced its end is not ready, but goes on answering; it says on each
    connection that this answer is the last one there, and leaves idle connections open.
    """
    front = Front()
    idle, busy, prober = front.connect(), front.connect(), front.connect()
    front.app.announce_end()
    front.state.announce_end()
    busy.send(post(b"1"))
    prober.send(get("/readyz"))
    await turns()
    assert [(a.status, a.body, a.closes) for a in busy.answers()] == [(200, b"<1>", True)]
    assert [a.status for a in prober.answers()] == [503]
    assert busy.lost and not idle.ended
    late = front.connect()
    late.send(post(b"2"))
    await turns()
    assert [a.status for a in late.answers()] == [200]
    front.state.drain()
    await front.state.empty()
    assert idle.lost


@on_a_jumping_loop
async def test_each_refusal_is_an_exception_of_its_own() -> None:
    """While a server starts or stops, requests that it refuses leave nothing behind in it."""
    front = Front()
    front.app.drain()
    refusing = front.app.refusing
    assert refusing is not None
    for _ in range(3):
        client = front.connect()
        client.send(post(b"1"))
        assert [answer.status for answer in client.answers()] == [503]
    assert refusing.__traceback__ is None


class ConnectedTo(App):
    """An app whose clients connect when it has stopped and before the loop can accept them."""

    address: str | tuple[str, int]
    asks: bytes

    async def stop(self, drain: bool = True) -> None:
        await super().stop(drain)
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        self.clients = [socket.socket(family) for _ in range(20)]
        for client in self.clients:
            client.settimeout(PATIENCE_S)
            client.connect(self.address)
            client.sendall(self.asks)


@pytest.mark.fault("F21")
@pytest.mark.parametrize(
    "asks", [get("/readyz", "Connection: close"), post(b"1.0"), b""], ids=["page", "model", "nothing"]
)
@pytest.mark.parametrize("kind", ["port", "path"])
def test_those_whom_nobody_has_accepted_are_answered(kind: str, asks: bytes, tmp_path: Path) -> None:
    """Who has connected when a server ends, and was not accepted yet, is answered; who asks for nothing is not waited
    for, and nobody is reset.
    """
    path = tmp_path / "sock"
    listener: Listener = PortListener("127.0.0.1", 0) if kind == "port" else UnixListener(path)
    app = ConnectedTo(models.scale)
    app.asks = asks

    async def serve() -> None:
        server = Server(app, listener=listener)
        await server.listen()
        app.address = str(path) if kind == "path" else ("127.0.0.1", server.port)
        await asyncio.wait_for(server.stop(), PATIENCE_S)

    asyncio.run(serve())
    answers = []
    for client in app.clients:
        with client:
            answers.append(client.recv(65536))  # raises where the connection was reset
    assert {answer[: len(b"HTTP/1.1 503")] for answer in answers} == {asks and b"HTTP/1.1 503"}


@pytest.mark.parametrize("turns_before", range(5))
def test_those_whom_the_loop_has_just_accepted_are_closed(turns_before: int) -> None:
    """A server that ends at once closes connections, too, that the loop has accepted and not made yet."""
    client = socket.socket()

    class ConnectedOnce(App):
        async def stop(self, drain: bool = True) -> None:
            await super().stop(drain)
            client.connect(("127.0.0.1", server.port))
            await turns(turns_before)

    async def serve() -> None:
        await server.listen()
        await server.stop(drain=False)

    server = Server(ConnectedOnce(models.scale), listener=PortListener("127.0.0.1", 0))
    with client:
        asyncio.run(serve())
        gc.collect()  # a transport that nobody has closed says so as it goes
        client.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_many_who_connect_at_once_are_accepted_in_few_turns(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A turn of the loop is long under load, so the last of a thousand clients would wait for a thousand turns."""

    async def serve() -> int:
        server = Server(App(models.scale), listener=PortListener("127.0.0.1", 0))
        await server.listen()
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(400)]
        state = server._addresses[0].state
        assert state is not None
        taken = 0
        while len(state.connections) < len(clients):
            await asyncio.sleep(0)
            taken += 1
        for client in clients:
            client.close()
        await server.stop()
        return taken

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(serve()) < 20


@pytest.mark.parametrize("turns_before", [1, 2, 3])
def test_a_server_that_ends_as_it_begins_resets_nobody(turns_before: int) -> None:
    """Who has connected before a server begins to listen finds the connection closed if it ends amid that."""
    client = socket.socket()

    async def serve() -> None:
        server = Server(App(models.scale), listener=PortListener("127.0.0.1", 0))
        server.bind()
        client.connect(("127.0.0.1", server.port))
        listening = asyncio.ensure_future(server.listen())
        await turns(turns_before)
        await server._addresses[0].end(0)
        await listening

    with client:
        asyncio.run(serve())
        client.settimeout(PATIENCE_S)
        assert client.recv(1) == b""
