"""The gate for workers that join, as strangers find it: real sockets, and nothing but a bounded wait for them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carpool.engine.drive import gate as gates
from carpool.engine.drive.gate import Gate, Invitation
from carpool.engine.wire import handshake
from carpool.engine.wire.handshake import HandshakeError, Hello
from carpool.engine.worker import remote
from carpool.engine.worker.address import JoinAddress, parse_address
from carpool.engine.worker.remote import Refused, Way
from tests.support.waiting import wait_until

TOKEN = b"a token that both sides know"
ME = Hello("1.0", "digits", "Digits", host="here", pid=1)


class Visitors:
    """A gate, and who was admitted by it."""

    def __init__(self, refusal: str = "") -> None:
        self.gate = Gate(None, 5.0, "digits")
        self.admitted: list[tuple[socket.socket, Hello]] = []
        self.gate.invitations[""] = Invitation(TOKEN, lambda hello: refusal, lambda *guest: self.admitted.append(guest))
        self.address = self.gate.listen(JoinAddress(host="127.0.0.1"))

    async def close(self) -> None:
        self.gate.close()
        for sock, _ in self.admitted:
            sock.close()
        await asyncio.sleep(0)

    async def until(self, condition: Callable[[], Any]) -> None:
        await asyncio.to_thread(wait_until, condition)

    def connect(self) -> socket.socket:
        """A stranger's connection, which does not block."""
        sock = socket.create_connection(self.address[1:], timeout=10)
        sock.setblocking(False)
        return sock


def read_to_end(sock: socket.socket) -> bytes:
    """All that comes until the other side closes; reset or not."""
    sock.settimeout(10)
    data = b""
    try:
        while more := sock.recv(65536):
            data += more
    except ConnectionResetError:
        pass
    return data


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


def test_a_worker_with_the_token_is_admitted() -> None:
    """Whoever knows the token is let in, with what it says of itself."""

    async def test() -> None:
        visitors = Visitors()
        sock = await asyncio.to_thread(remote.admitted, Way(visitors.address, TOKEN), ME)
        with sock:
            await visitors.until(lambda: visitors.admitted)
            assert visitors.admitted[0][1] == ME
            assert visitors.gate.strangers == 0
        await visitors.close()

    run(test)


def test_a_worker_with_another_token_learns_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A connection with another token is closed without a word; both sides are told what may be wrong."""

    async def test() -> None:
        visitors = Visitors()
        with pytest.raises(HandshakeError, match="the service has another token"):
            await asyncio.to_thread(remote.admitted, Way(visitors.address, b"another token"), ME)
        await visitors.until(lambda: visitors.gate.strangers == 1)
        assert visitors.admitted == []
        await visitors.close()

    with caplog.at_level(logging.WARNING, "carpool"):
        run(test)
    assert "a connection from 127.0.0.1 to the gate for workers was closed: it does not know the token" in caplog.text


def test_a_refusal_is_told_in_words() -> None:
    """A worker that has proven itself, but cannot be taken, is told why, and is no stranger."""

    async def test() -> None:
        visitors = Visitors("there is no stage of that name")
        with pytest.raises(Refused, match="there is no stage of that name"):
            await asyncio.to_thread(remote.admitted, Way(visitors.address, TOKEN), ME)
        assert (visitors.gate.strangers, visitors.admitted) == (0, [])
        await visitors.close()

    run(test)


NOISE = {
    "nothing": b"",
    "half a hello": bytes(40),
    "zeros": bytes(500),
    "a request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    "no hello": bytes(64) + b"\x05\x00" + b"\x81\xa1x\x01\x00",
    "a nested hello": bytes(64) + (3004).to_bytes(2, "little") + b"\x81\xa1x" + b"\x91" * 3000 + b"\x01",
    "a hello of 4 GB": bytes(64) + b"\x05\x00" + b"\xdf\xff\xff\xff\xff",
    "a pickle": bytes(64) + b"\x20\x00" + b"\x80\x05cos\nsystem\n(S'touch /tmp/x'\ntR." + bytes(40),
    "a frame": b"cpl\x01\x04" + bytes(300),
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_noise_gets_a_greeting_and_is_closed(noise: bytes) -> None:
    """Whatever a stranger sends before it closes its side, it gets the greeting and nothing else."""

    async def test() -> None:
        visitors = Visitors()
        with visitors.connect() as sock:
            sock.send(noise)
            sock.shutdown(socket.SHUT_WR)
            data = await asyncio.to_thread(read_to_end, sock)
            assert len(data) <= handshake.GREETING_BYTES
            await visitors.until(lambda: visitors.gate.strangers == 1)
        assert visitors.admitted == []
        await visitors.close()

    run(test)


def test_a_stranger_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that says nothing, or trickles, is closed when its time is up, however busy it keeps us."""
    monkeypatch.setattr(gates, "STRANGER_S", 0.2)

    async def test() -> None:
        visitors = Visitors()
        with visitors.connect() as silent, visitors.connect() as trickling:
            while visitors.gate.strangers < 2:
                try:
                    trickling.send(b"\0")
                except OSError:
                    break
                await asyncio.sleep(0.01)
            assert len(await asyncio.to_thread(read_to_end, silent)) == handshake.GREETING_BYTES
        await visitors.close()

    run(test)


def test_strangers_are_bounded_and_keep_no_worker_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many connections are let in at a time that have not proven themselves. A worker that
    comes after a crowd of them has its turn when their time is up.
    """
    monkeypatch.setattr(gates, "STRANGER_S", 0.3)
    monkeypatch.setattr(gates, "MOST_STRANGERS", 4)

    async def test() -> None:
        visitors = Visitors()
        crowd = [visitors.connect() for _ in range(11)]
        most = 0

        async def count() -> None:
            nonlocal most
            while True:
                most = max(most, len(visitors.gate._proving))
                await asyncio.sleep(0.001)

        counting = asyncio.create_task(count())
        sock = await asyncio.to_thread(remote.admitted, Way(visitors.address, TOKEN), ME)
        counting.cancel()
        sock.close()
        assert most == 4
        assert visitors.gate.strangers >= 8
        for each in crowd:
            each.close()
        await visitors.close()

    run(test)


def test_a_closed_gate_closes_what_is_under_way() -> None:
    """Strangers do not outlive the gate, and nothing listens any more."""

    async def test() -> None:
        visitors = Visitors()
        with visitors.connect() as sock:
            await visitors.until(lambda: visitors.gate._greeting)
            visitors.gate.close()
            await visitors.until(lambda: not visitors.gate._greeting)
            assert len(await asyncio.to_thread(read_to_end, sock)) == handshake.GREETING_BYTES
        with pytest.raises(ConnectionRefusedError):
            visitors.connect()

    run(test)


def test_a_unix_socket_is_its_owners_alone(tmp_path: Path) -> None:
    """The path of a gate can be opened by its owner only, replaces one that was left behind, not one
    at which something listens, and is removed in the end.
    """
    path = str(tmp_path / "gate.sock")

    async def test() -> None:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(path)
        gate = Gate(None, 5.0, "digits")
        assert gate.listen(JoinAddress(path=path)) == JoinAddress(path=path)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        second = Gate(None, 5.0, "digits")
        with pytest.raises(OSError, match="in use"):
            second.listen(JoinAddress(path=path))
        gate.close()

    run(test)
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("/run/x.sock", JoinAddress(path="/run/x.sock")),
        ("./x", JoinAddress(path="./x")),
        ("10.0.0.7:7000", JoinAddress(host="10.0.0.7", port=7000)),
        ("gpu-1:0", JoinAddress(host="gpu-1")),
        ("[::1]:80", JoinAddress(host="::1", port=80)),
    ],
)
def test_addresses(text: str, address: JoinAddress) -> None:
    """An address is a path, or a host and a port, and is written as it is read."""
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "7000", "host:", ":7000", "host:70000", "host:x", "x.sock", "host:-1", "host:٧"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """The error says how to write an address."""
    with pytest.raises(ValueError, match=r"write HOST:PORT, such as 127.0.0.1:7000, or the path of a Unix socket"):
        parse_address(text)
