"""Where a server listens, and when it refuses to: ports, Unix sockets, sockets that are handed over, an address of
its own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from carpool.cli import top_command as top
from carpool.engine.drive.gate import Gate
from carpool.engine.worker.address import parse_address
from carpool.http.listener import InheritedListener, PortListener, UnixListener, listener_at
from carpool.http.serve import new_server
from carpool.http.server import notify_systemd, watchdog_s
from carpool.service.settings import ServerSettings, UsualNumber, UsualText
from tests.support.http import models
from tests.support.http.front import get, post
from tests.support.http.net import Client, RunningServer
from tests.support.http.wire import Answer


@contextmanager
def running(settings: ServerSettings) -> Iterator[RunningServer]:
    """A server by its settings, which is ready."""
    server = new_server([models.scale], settings)
    one = RunningServer(server.app)
    one.server = server
    one.listen()
    try:
        one.start()
        yield one
    finally:
        one.stop()


def test_at_the_usual_address() -> None:
    """A server listens where nobody has said where: at a host and a port of the types that defaults have."""
    with running({"host": UsualText("127.0.0.1"), "port": UsualNumber(0)}) as server, Client(server.port) as client:
        assert client.ask(get("/livez")).status == 200


def over(path: Path, data: bytes) -> Answer:
    """The answer over a Unix socket."""
    client = Client.__new__(Client)
    client.sock = socket.socket(socket.AF_UNIX)
    client.sock.settimeout(20)
    client._data = b""
    with client:
        client.sock.connect(str(path))
        return client.ask(data)


def local(data: bytes) -> bytes:
    return data.replace(b"Host: test", b"Host: localhost")


@pytest.mark.parametrize("place", ["server", "admin address", "gate"])
@pytest.mark.parametrize(
    ("host", "clients"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("::1", {"::1"}),
        ("[::1]", {"::1"}),
        ("::", {"::1", "127.0.0.1"}),
        ("[::]", {"::1", "127.0.0.1"}),
        ("0.0.0.0", {"127.0.0.1"}),
        ("localhost", {"127.0.0.1"}),
    ],
)
def test_each_place_listens_where_its_host_says(place: str, host: str, clients: set[str]) -> None:
    """The server, the address for its operators and the gate for workers take the same hosts: `::` is for both
    families, and an IPv6 address may have brackets.
    """
    if not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6 here")

    def reached(port: int) -> set[str]:
        found = set()
        for client in ("::1", "127.0.0.1"):
            with suppress(OSError):
                socket.create_connection((client, port), 5).close()
                found.add(client)
        return found

    async def reached_at_gate() -> set[str]:
        gate = Gate(None, 5.0, "digits")
        try:
            return reached(gate.listen(parse_address(f"{host}:0")).port)
        finally:
            gate.close()

    if place == "gate":
        assert asyncio.run(reached_at_gate()) == clients
    else:
        with (PortListener(host, 0) if place == "server" else listener_at(f"{host}:0")).bind() as sock:
            assert reached(sock.getsockname()[1]) == clients


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_public_address_without_keys_is_refused(host: str, tmp_path: Path) -> None:
    """A server that everybody could ask does not start, unless that is said; keys, or a client CA, are as good."""
    with pytest.raises(ValueError, match=r"everybody who reaches .* could ask: .*--insecure"):
        new_server([models.scale], ServerSettings(host=host))
    assert new_server([models.scale], ServerSettings(host=host, insecure=True)).app.access is None
    (tmp_path / "keys").write_text("a:secret\n")
    assert new_server([models.scale], ServerSettings(host=host, api_keys=str(tmp_path / "keys"))).app.access is not None


def test_keys_of_the_environment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """CARPOOL_API_KEYS has keys without a file, with commas or line breaks between them."""
    monkeypatch.setenv("CARPOOL_API_KEYS", "a:secret,b:other")
    server = new_server([models.scale], ServerSettings(host="0.0.0.0"))
    assert server.app.access is not None
    assert server.app.access.keys is not None
    assert server.app.access.keys.names == {"a", "b"}


def test_a_public_address_for_admin_needs_keys_too() -> None:
    """Metrics and dashboard are never public by accident."""
    with pytest.raises(ValueError, match=r"everybody who reaches 0\.0\.0\.0:9000 could ask"):
        new_server([models.scale], ServerSettings(admin_address="0.0.0.0:9000"))


def test_a_local_server_answers_to_local_names_only() -> None:
    """`carpool serve` on a loopback address refuses other names and foreign pages, as its default."""
    with running(ServerSettings(port=0)) as one, Client(one.port) as client:
        assert client.ask(local(post(b"21"))).body == b"42.0"
        assert client.ask(get("/metrics")).status == 421
        assert client.ask(get("/livez")).status == 200
    with running(ServerSettings(port=0, allow_host=("test",))) as one, Client(one.port) as client:
        assert client.ask(get("/metrics")).status == 200
        assert client.ask(local(get("/metrics"))).status == 421


def test_a_unix_socket_is_for_this_user_only(tmp_path: Path) -> None:
    """The socket may be used by its user from the moment that it is there, is asked by any name, and is gone
    afterwards.
    """
    path = tmp_path / "http.sock"
    with running(ServerSettings(socket=str(path))) as one:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert over(path, post(b"21")).body == b"42.0"
        assert one.server.address == f"unix:{path}"
        with pytest.raises(OSError, match="a server listens at"):
            UnixListener(path).bind()
    assert not path.exists()


def test_an_abandoned_socket_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    """A socket that nobody listens at is replaced; a file in its place is left alone."""
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    listener = UnixListener(path, 0o660)
    listener.bind().close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    path.unlink()
    path.write_text("mine")
    with pytest.raises(OSError, match="is a file"):
        UnixListener(path).bind()
    assert path.read_text() == "mine"


def test_a_socket_that_was_handed_over_is_served() -> None:
    """`--fd` serves a socket that listens already, and refuses any other descriptor."""
    with socket.create_server(("127.0.0.1", 0)) as parent:
        port = parent.getsockname()[1]
        number = os.dup(parent.fileno())
        with running(ServerSettings(fd=number)) as one, Client(port) as client:
            assert one.server.address == f"http://127.0.0.1:{port}"
            assert client.ask(local(post(b"21"))).body == b"42.0"
    read, write = os.pipe()
    with pytest.raises(OSError):
        InheritedListener(read)
    os.close(read)
    os.close(write)
    with socket.socket() as silent, pytest.raises(OSError, match="does not listen"):
        InheritedListener(silent.fileno())


def test_a_public_socket_that_was_handed_over_needs_keys() -> None:
    """A socket that systemd has bound to all addresses is as public as one that we bind."""
    with socket.create_server(("0.0.0.0", 0)) as parent, pytest.raises(ValueError, match="could ask"):
        new_server([models.scale], ServerSettings(fd=parent.fileno()))


def test_admin_has_an_address_of_its_own(tmp_path: Path) -> None:
    """Metrics and dashboard are at the admin address, with /livez and /readyz, and not at the main one."""
    path = tmp_path / "admin.sock"
    with running(ServerSettings(port=0, admin_address=f"unix:{path}")) as one, Client(one.port) as client:
        for page in ("/metrics", "/dashboard", "/dashboard/data"):
            assert client.ask(local(get(page))).status == 404
            assert over(path, get(page)).status == 200
        assert over(path, get("/readyz")).status == client.ask(local(get("/readyz"))).status == 200
        assert top.fetched(f"unix:{path}", "")["problems"] == []
        assert over(path, post(b"21")).status == 404
        assert client.ask(local(post(b"21"))).body == b"42.0"
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9000", "127.0.0.1:9000"),
        ("[::1]:9000", "[::1]:9000"),
        (":9000", "127.0.0.1:9000"),
        ("9000", "127.0.0.1:9000"),
        ("unix:/x/y", "unix:/x/y"),
        ("/x/y", "unix:/x/y"),
    ],
)
def test_addresses_as_people_write_them(text: str, address: str) -> None:
    """An address is a host with a port, a port alone, or the path of a socket."""
    assert listener_at(text).address == address


@pytest.mark.parametrize("text", ["", "localhost", "a:b", "a:99999", "9000x"])
def test_what_is_no_address(text: str) -> None:
    """Anything else is refused with an example."""
    with pytest.raises(ValueError, match="is no address: write HOST:PORT"):
        listener_at(text)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (ServerSettings(tls_key="x"), "tls_key does nothing without tls_cert"),
        (ServerSettings(socket="x", fd=3), "choose one"),
        (ServerSettings(socket="x", socket_mode="999"), "socket_mode must be permissions"),
        (ServerSettings(max_connections=0), "max_connections"),
        (ServerSettings(idle_timeout_s=0), "idle_timeout_s"),
        (ServerSettings(access_log=2), "access_log must be a share"),
        (ServerSettings(access_log_slow_ms=-1), "access_log_slow_ms must be a number of milliseconds"),
        (ServerSettings(compress="br"), "compress must be"),
        (ServerSettings(allow_host=("a:1",)), "is no name of a host"),
    ],
)
def test_settings_that_make_no_sense(settings: ServerSettings, text: str) -> None:
    """Each wrong setting is an error that names it."""
    with pytest.raises(ValueError, match=text):
        new_server([models.scale], settings)


def test_systemd_hears_when_we_are_up_and_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where systemd waits for it, it is told; elsewhere nothing happens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        notify_systemd("READY=1")
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify_systemd("READY=1")
        assert manager.recv(100) == b"READY=1"
    notify_systemd("READY=1")  # it has gone
    assert watchdog_s() is None
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    assert watchdog_s() == 1.5
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_s() is None


def test_a_server_takes_port_0() -> None:
    """Port 0 takes a free one, which the address tells."""
    listener = PortListener("127.0.0.1", 0)
    with listener.bind():
        assert listener.port > 0
        assert listener.address.endswith(f":{listener.port}")


def test_a_server_that_was_only_bound_lets_go_of_its_address() -> None:
    """A server that is stopped before it listens closes its socket."""
    server = new_server([models.scale], ServerSettings(port=0))
    server.bind()
    (sock,) = server.sockets
    asyncio.run(server.stop())
    assert sock.fileno() == -1
