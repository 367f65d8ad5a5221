"""The buffers of a connection to a worker elsewhere: as large as asked for, or as large as the kernel finds useful."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

import pytest

from carpool.engine.worker import address

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which buffers are fixed")


@contextlib.contextmanager
def connected() -> Iterator[list[socket.socket]]:
    """Both ends of a connection over TCP."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        yield [ours, theirs]


def fixed(sock: socket.socket) -> int:
    """Which of a socket's buffers the kernel leaves at the size that they were given: 1 for sending, 2 for hearing."""
    return sock.getsockopt(socket.SOL_SOCKET, address._SO_BUF_LOCK)


@ON_LINUX
@pytest.mark.parametrize(("asked_for", "fixed_ones"), [(2**30, 0), (64 * 1024, 3)], ids=["cut", "granted"])
def test_a_buffer_that_was_cut_may_grow(asked_for: int, fixed_ones: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that cuts buffers to less than was asked for lets those grow further that nobody has
    set: so one that was cut counts as such, or large frames would travel in many small pieces.
    """
    monkeypatch.setattr(address, "_TCP_BUFFER_BYTES", asked_for)
    with connected() as ends:
        for sock in ends:
            address.tune(sock, 5.0)
            assert fixed(sock) == fixed_ones


@ON_LINUX
def test_a_system_that_cannot_let_buffers_grow_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """On kernels that do not know the option the connection is set up all the same."""
    monkeypatch.setattr(address, "_SO_BUF_LOCK", 2**15)
    with connected() as ends:
        for sock in ends:
            address.tune(sock, 5.0)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
