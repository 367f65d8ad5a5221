"""One client cannot hurt another: what a well-behaved client sees while others do their worst."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from tests.effort import share, slow_where
from tests.http.hostile_server import LARGEST
from tests.support.http.front import chunked, get, post
from tests.support.http.net import Client
from tests.support.serving import Served, run_module

FLOOR_S = 0.9
"""A median below this is good, whatever it was before: other programs on the machine may cost that much by themselves.

What the clients here did before was a wait of a second at least, a refusal, or the end of the server.
"""
MEASURED_S = share(100) / 40  # 0.4 s in the quick run
LARGE = json.dumps(list(range(20_000))).encode()  # more than a connection's share


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """`hostile_server`, in a process of its own."""
    with run_module("tests.http.hostile_server") as served:
        yield served
    assert served.process.returncode == 0, "".join(served.log[-50:])


Hostile = Callable[[int, threading.Event], None]


def asked_again(request: Callable[[int], bytes], pause_s: float = 0.02) -> Hostile:
    """Sends it, reads what comes first, and begins anew on a connection of its own."""

    def hurt(port: int, stop: threading.Event) -> None:
        n = 0
        while not stop.wait(pause_s):
            n += 1
            with Client(port) as client, suppress(ConnectionResetError):
                client.send(request(n))
                client.sock.recv(65536)

    return hurt


def held(request: bytes, connections: int, again: bool = True) -> Hostile:
    """Sends it on so many connections and does nothing more; unless `again` is false, anew where one is answered."""

    def hurt(port: int, stop: threading.Event) -> None:
        with ExitStack() as stack:
            clients: list[Client] = []
            while not stop.wait(0.05):
                while len(clients) < connections:
                    clients.append(stack.enter_context(Client(port)))
                    clients[-1].sock.settimeout(0.2)  # the server may stop reading it
                    with suppress(TimeoutError):
                        clients[-1].send(request)
                    clients[-1].sock.settimeout(0.0)
                if again:
                    clients = [client for client in clients if not has_answer(client)]

    return hurt


def has_answer(client: Client) -> bool:
    """Whether anything has come, and be it the end."""
    try:
        client.sock.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def dripping(request: bytes, connections: int) -> Hostile:
    """Sends it on so many connections, a byte at a time."""

    def hurt(port: int, stop: threading.Event) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(port)) for _ in range(connections)]
            for at in range(len(request)):
                for client in clients:
                    client.send(request[at : at + 1])
                if stop.wait(0.02):
                    return

    return hurt


def read_slowly(request: bytes, connections: int) -> Hostile:
    """Takes a little of its answers now and then."""

    def hurt(port: int, stop: threading.Event) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(port)) for _ in range(connections)]
            for client in clients:
                client.send(request)
                client.sock.settimeout(0.0)
            while not stop.wait(0.02):
                for client in clients:
                    with suppress(BlockingIOError):
                        client.sock.recv(1024)

    return hurt


def left(request: bytes, how: str) -> Hostile:
    """Sends it and goes: with a reset, or by ending its side and waiting for nothing."""

    def hurt(port: int, stop: threading.Event) -> None:
        while not stop.wait(0.02):
            client = Client(port)
            client.send(request)
            if how == "reset":
                client.reset()
            else:
                client.end()
                client.close()

    return hurt


def to(name: str, body: bytes, *headers: str) -> bytes:
    """A request to one of the models."""
    return post(body, f"/models/{name}/predict", *headers)


RAW = "Content-Type: application/octet-stream"
HOSTILE: dict[str, Hostile] = {
    "31 KB of Accept": asked_again(lambda n: to("echo", b"1", "Accept: " + "a" * 31_000 + str(n))),
    "commas in Accept": asked_again(lambda n: to("echo", b"1", "Accept: " + "," * 31_000 + str(n))),
    "31 KB of a content type": asked_again(lambda n: to("echo", b"1", f"Content-Type: a/{n};" + "charset" * 4000)),
    "heads without bodies": held(to("echo", b"x" * LARGEST)[:-LARGEST], 16),
    "bodies without their ends": held(to("echo", b"x" * LARGEST)[:-1], 16),
    "chunked bodies without their ends": held(chunked(*[b"x" * 60_000] * 30)[:-5], 16),
    "large answers, read slowly": read_slowly(to("large", b"1", RAW), 8),
    "large answers, not read": held(to("large", b"1", RAW) * 10, 4, again=False),
    "small answers, not read": held(get("/metrics") * 5000, 4, again=False),
    "endless digits of a length": asked_again(
        lambda n: to("echo", b"").replace(b"Length: 0", b"Length: " + b"0" * 9999)
    ),
    "9,000 requests behind a slow one": asked_again(lambda n: to("slow", b"1") + get() * 9000),
    "9,000 requests at once": asked_again(lambda n: get() * 9000),
    "deep JSON": asked_again(lambda n: to("echo", b"[" * LARGEST)),
    "deep JSON, closed": asked_again(lambda n: to("echo", b"[" * 500_000 + b"]" * 500_000)),
    "deep msgpack": asked_again(lambda n: to("echo", b"\x91" * LARGEST, "Content-Type: application/msgpack")),
    "a route that raises": asked_again(lambda n: get("/raise") * 2),
    "examples that cannot be told": asked_again(lambda n: get("/openapi.json")),
    "bodies that are too large": asked_again(lambda n: to("echo", b"x" * (LARGEST + 1))),
    "chunks that are too many bytes": asked_again(lambda n: chunked(*[b"x" * 60_000] * 36)),
    "slow heads": dripping(get("/livez", "X: " + "x" * 2000), 200),
    "slow bodies": dripping(to("echo", b"x" * 2000), 100),
    "half-closed": left(to("slow", b"1") * 3, "end"),
    "broken uploads": left(to("echo", b"x" * 500_000)[:-1], "reset"),
    "blank lines": asked_again(lambda n: b"\r\n" * 2**18),
    "noise": asked_again(lambda n: b"\x16\x03\x01" * 1000),
}

QUICK = ("small answers, not read", "9,000 requests behind a slow one", "deep JSON", "slow heads")
"""One of each sort, for the quick run."""


def latencies(port: int, seconds: float) -> list[float]:
    """Of a client that asks one thing after the other, small and large, and insists on right answers."""
    found = []
    end = time.monotonic() + seconds
    with Client(port) as client:
        while time.monotonic() < end or len(found) < 100:
            n = len(found)
            body = LARGE if n % 10 == 0 else b"[%d]" % n
            started = time.monotonic()
            answer = client.ask(to("echo", body))
            found.append(time.monotonic() - started)
            assert (answer.status, answer.body) == (200, body.replace(b" ", b"")), answer.body[:200]
            time.sleep(0.002)
    return found


def median(found: list[float]) -> float:
    """Half of them are at least as quick: what a machine does that stands still now and then is not seen in it."""
    return sorted(found)[len(found) // 2]


@pytest.mark.fault("F61", "F63", "F64", "F66", "F67", "F69", "F70")
@slow_where(lambda name: name not in QUICK)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_client_does_not_hurt_others(served: Served, name: str) -> None:
    """While one client does its worst, no other is refused, and their median is at most ten times
    that of a quiet moment.
    """
    quiet = median(latencies(served.port, MEASURED_S / 2))
    stop = threading.Event()

    def hurt() -> None:
        with suppress(OSError):  # what becomes of it is its own affair
            HOSTILE[name](served.port, stop)

    threads = [threading.Thread(target=hurt, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.2)
        busy = median(latencies(served.port, MEASURED_S))
    finally:
        stop.set()
        for thread in threads:
            thread.join(20.0)
    assert not any(thread.is_alive() for thread in threads)
    assert busy <= max(10 * quiet, FLOOR_S)
    assert served.process.poll() is None
