"""Clients of answers in parts that leave, close half of the connection, do not read or ask for much, at both doors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carpool import Service, Stage
from carpool.http import asgi
from carpool.http.app import App
from carpool.http.streaming import Delivery
from tests.http.streamed import DOORS, Reply, asked, counting, message, request
from tests.support.http.both_fronts import both_fronts
from tests.support.http.net import serving
from tests.support.parts import Counting, Once, Resuming, up_to
from tests.support.waiting import PATIENCE_S, wait_until


def leave(port: int, item: Any, after: int, how: str) -> None:
    """Ask, read some events, and close the connection by FIN or RST."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(request(item))
        read = b""
        while read.count(b"data: ") < after:
            data = sock.recv(65536)
            assert data, "the connection has ended"
            read += data
        if how == "RST":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """The ports of both doors of one service that counts."""
    with counting() as (ports, _):
        yield ports


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("after", [0, 1, 9, 10])
def test_a_client_may_leave_at_any_moment(after: int, how: str) -> None:
    """Before the first part, in the middle, before the last part and just at the end: the stream is
    stopped once, its row is free, and nothing is left inside.
    """
    with counting(step_s=0.002, max_batch_size=1) as (ports, log):
        for port in ports.values():
            log.clear()
            leave(port, 10 if after > 5 else 10**9, after, how)
            with asked(port, request(3)) as reply:
                assert list(reply.events()) == message(3)
            stops = [each for each in log if each[0] == "stop"]
            assert len(stops) == len(set(stops)) <= 2 and ("stop", 3) in stops
            starts = {each[1] for each in log if each[0] == "start"}
            assert {each[1] for each in stops} == starts, "a stream that was started was not stopped"


@pytest.mark.parametrize("item", [20, {"n": 3, "at": 0, "hang": 0.2}])
def test_a_client_that_ends_its_side_gets_all_answers(item: Any) -> None:
    """A client that sends no more may still read: a stream, and what was pipelined behind it, come
    to their ends, and an interim response is all that may come before the head.
    """
    n = item if isinstance(item, int) else item["n"]
    with counting(step_s=0.001) as (ports, _):  # noqa: SIM117
        with socket.create_connection(("127.0.0.1", ports["our own"]), timeout=PATIENCE_S) as sock:
            sock.sendall(request(item) + request(4))
            sock.shutdown(socket.SHUT_WR)
            reply = Reply(sock)
            if reply.status == 100:
                reply = reply.follows_on()
            assert list(reply.events()) == message(n)
            reply = reply.follows_on()
            assert list(reply.events()) == message(4)
            assert not reply._receive()


@pytest.mark.parametrize("door", DOORS)
def test_requests_on_one_connection_after_each_other(door: str) -> None:
    """A connection serves streams and whole answers one after the other."""
    with counting() as (ports, _), asked(ports[door], request(5)) as reply:
        for n in range(1, 6):
            assert list(reply.events()) == message(5 if n == 1 else n)
            reply._sock.sendall(request(7, "application/json"))
            reply = reply.follows_on()
            assert json.loads(reply.body()) == up_to(7)
            reply._sock.sendall(request(n + 1))
            reply = reply.follows_on()
        assert list(reply.events()) == message(6)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "GET"])
def test_other_methods_start_no_stream(method: str) -> None:
    """HEAD and GET are refused and OPTIONS is answered as ever, whatever `Accept` says."""
    with counting() as (ports, log):
        for port in ports.values():
            head = f"{method} /predict HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nConnection: close\r\n\r\n"
            with asked(port, head.encode()) as reply:
                assert (
                    reply.status == (204 if method == "OPTIONS" else 405) and "post" in reply.headers["allow"].lower()
                )
        assert log == []


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("text/event-stream;q=0.5", "text/event-stream"),
        ("TEXT/Event-Stream ; charset=utf-8", "text/event-stream"),
        ("text/html, application/xhtml+xml, text/event-stream;q=0.9, */*;q=0.8", "text/event-stream"),
        ("application/x-ndjson, text/event-stream", "application/x-ndjson"),
        ("text/event-stream, application/x-ndjson", "text/event-stream"),
        ("application/json, text/event-stream", "application/json"),
        ("*/*;q=0.1, text/event-stream", "application/json"),
        ("text/event-stream;q=0", "application/json"),
        ("text/event-stream; q=0.000, application/x-ndjson", "application/x-ndjson"),
        ("text/event-stream;q=0, */*", "application/json"),
        ("text/*", "application/json"),
        (",,;q=,", "application/json"),
    ],
)
def test_the_first_type_that_the_model_writes_counts(ports: dict[str, int], accept: str, expected: str) -> None:
    """Of several types the first one that there is counts; one of quality 0 is not wanted."""
    for port in ports.values():
        with asked(port, request(2, accept)) as reply:
            assert (reply.status, reply.headers["content-type"]) == (200, expected)
            assert reply.body()


@pytest.mark.slow
def test_large_parts_and_many_parts() -> None:
    """A part of 10 MB arrives as it was made, and so do 100,000 small ones."""
    with counting(Once) as (ports, _):
        for port in ports.values():
            with asked(port, request(100_000, "application/x-ndjson")) as reply:
                lines = list(reply.lines())
                assert [json.loads(line)["part"] for line in lines[:-1]] == up_to(100_000)
                assert json.loads(lines[-1]) == {"end": {"parts": 100_000}}

    class Raw(Counting):
        def step(self, states: list[dict[str, Any]]) -> list[bytes]:  # type: ignore[override]
            return super().step(states)

    with counting(Raw) as (ports, _):
        for port in ports.values():
            with asked(port, request({"n": 3, "bytes": 10 * 2**20}, "application/octet-stream")) as reply:
                assert reply.body() == b"".join(bytes([i]) * (10 * 2**20) for i in up_to(3))


@pytest.mark.slow
def test_readers_that_never_read_cost_others_nothing() -> None:
    """Four of ten clients never read large parts: the others get all of theirs meanwhile, what is
    kept for the four is bounded, and their rows are free once they have left.
    """
    nbytes = 64 * 1024
    with counting(step_s=0.001, max_batch_size=16) as (ports, log):
        for port in ports.values():
            log.clear()
            deaf = []
            for i in range(4):
                sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
                sock.sendall(request({"n": 10**6 + i, "bytes": nbytes}))
                deaf.append(sock)
            for _ in range(3):
                with asked(port, request(200)) as reply:
                    assert list(reply.events()) == message(200)
            for i in range(4):
                made = sum(10**6 + i in each[1] for each in log if each[0] == "step")
                assert 0 < made * nbytes < 16 * 2**20
            for sock in deaf:
                sock.close()
            wait_until(lambda: sum(each[0] == "stop" and each[1] >= 10**6 for each in log) == 4)


def test_a_server_that_drains_ends_endless_streams_in_time() -> None:
    """What goes on after `timeout_s` of draining ends with an `error` event, and the server ends."""
    service = Service(Stage(Counting, run_in="thread", max_batch_size=2, kwargs={"step_s": 0.002}), timeout_s=1.0)
    with serving(App(service)) as own, asked(own.port, request(10**9)) as reply:
        events = reply.events()
        assert next(events) == ("message", 1)
        stopping = asyncio.run_coroutine_threadsafe(own.server.stop(), own.loop)
        *parts, (kind, told) = events
        assert parts == [("message", i) for i in up_to(len(parts) + 1)[1:]]
        assert kind == "error" and told["error"]["code"] == "stopped" and reply.is_whole
        stopping.result(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Resuming", "Counting"])
def test_sigterm_lets_streams_end_and_kills_amid_it_are_survived(model: str, tmp_path: Path) -> None:
    """After SIGTERM a stream goes on to its end and new ones are refused; if its worker is killed
    then, it goes on by `resume`, or says `worker_lost`.
    """
    port_file = tmp_path / "port"
    program = f"""
import asyncio, carpool
from carpool.http import asgi
from carpool.http.app import App
from carpool.http.streaming import Delivery
from carpool.http.server import Server
from tests.support.parts import {model}

async def main():
    stage = carpool.Stage({model}, max_batch_size=4, kwargs={{"step_s": 0.005}})
    server = Server(App(carpool.Service(stage, timeout_s=20.0)), port=0)
    def ready():
        open({str(port_file)!r}, "w").write(f"{{server.port}} {{server.app.endpoints[0].handle.pids[0]}}\\n")
    await server.run(ready)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            wait_until(lambda: port_file.exists() and port_file.read_text().endswith("\n"))
            port, worker = map(int, port_file.read_text().split())
            with asked(port, request(200)) as reply:
                events = reply.events()
                assert next(events) == ("message", 1)
                process.send_signal(signal.SIGTERM)
                time.sleep(0.1)
                os.kill(worker, signal.SIGKILL)
                told = [("message", 1), *events]
            if model == "Resuming":
                assert told == message(200)
            else:
                assert told[:-1] == message(200)[: len(told) - 1]
                assert told[-1][0] == "error" and told[-1][1]["error"]["code"] == "worker_lost"
                assert told[-1][1]["error"]["status"] == 503
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_a_client_that_stands_still_and_goes_on_loses_nothing() -> None:
    """A client that stops reading in mid-stream, as one that got SIGSTOP, gets every part in the
    end, at both doors.
    """
    n, nbytes = 60, 128 * 1024
    with both_fronts(App(Service(Stage(Resuming, run_in="thread", max_batch_size=2)))) as doors:
        for door in doors:
            with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as sock:
                sock.sendall(request({"n": n, "bytes": nbytes}, "application/x-ndjson"))
                reply = Reply(sock)
                lines = reply.lines()
                next(lines)
                time.sleep(0.3)
                assert len(list(lines)) == n


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_that_comes_with_news_is_not_lost(turns: int) -> None:
    """An ASGI call that is cancelled ends, though something has come for its client just then."""

    async def main() -> None:
        exchange: Any = SimpleNamespace(news=asyncio.Event(), has_ended=False, ordinary=None)
        waiting = asyncio.ensure_future(asgi._wait_for_part(exchange, Delivery(0.0), b""))
        await asyncio.sleep(0.01)
        exchange.news.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=PATIENCE_S)
        assert waiting.cancelled()

    asyncio.run(main())
