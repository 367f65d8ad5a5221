"""Bulk: lines of items in, lines of answers out, while the body is still being sent."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from carpool import Service, Stage
from carpool.http.app import App
from carpool.http.server_state import Limits
from carpool.http.shares import Bodies
from tests.effort import slow_where
from tests.http.bulk_by_hand import Bulk, bulk, lines
from tests.http.streamed import Reply
from tests.support.http import models
from tests.support.http.both_fronts import both_fronts
from tests.support.http.front import chunked, get, post
from tests.support.http.net import Client, RunningServer, predict, serving
from tests.support.waiting import PATIENCE_S, wait_until


def weigh(x: float) -> int:
    return int(x)


weighed = Service(Stage(models.Scale, max_batch_size=100, size=weigh, run_in="thread"), name="weighed")
scale = Service(Stage(models.Scale, max_batch_size=64, run_in="thread"), name="scale")
moody = Service(Stage(models.Moody, max_batch_size=8, run_in="thread"), name="moody")


@pytest.fixture(scope="module")
def doors() -> Iterator[Any]:
    with both_fronts(App(scale, moody, weighed, max_body_bytes=10_000)) as both:
        yield both


@pytest.mark.parametrize("path", ["/predict", "/models/scale/predict"])
def test_each_line_is_an_item_with_an_answer_in_its_place(port: int, path: str) -> None:
    """The answers are lines in the order of the items; empty lines are none, and the last may have no end."""
    with bulk(port, path) as asking:
        asking.send(lines(1, 2) + b"\n  \r\n" + b"3\r\n4")
        asking.end()
        reply = asking.reply()
        assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson"
        assert list(reply.lines()) == ["2.0", "4.0", "6.0", "8.0"] and reply.is_whole


def test_many_more_lines_than_the_queue_holds(port: int) -> None:
    """A body has any number of lines, and may be larger than a body otherwise."""
    n = 5000
    with bulk(port) as asking:
        for at in range(0, n, 500):
            asking.send(lines(*range(at, at + 500)))
        asking.end()
        assert [float(line) for line in asking.reply().lines()] == [2.0 * i for i in range(n)]


def test_answers_come_while_the_body_is_being_sent(port: int) -> None:
    """A line is answered before the next one is sent, and pieces may end anywhere."""
    with bulk(port) as asking:
        asking.send(lines(1))
        answers = (reply := asking.reply()).lines()
        assert next(answers) == "2.0"
        asking.send(b"1")
        asking.send(b"0\n")
        assert next(answers) == "20.0"
        asking.end()
        assert list(answers) == [] and reply.is_whole


def test_a_body_of_known_length(port: int) -> None:
    """Clients may say how long the body is, and others use the connection afterwards."""
    body = lines(*range(1000))
    head = (
        f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/jsonl\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        for _ in range(2):
            sock.sendall(head.encode() + body)
            reply = Reply(sock)
            assert len(list(reply.lines())) == 1000


def test_no_lines(port: int) -> None:
    """An empty body has an empty answer."""
    with bulk(port) as asking:
        asking.end()
        assert (reply := asking.reply()).body() == b"" and reply.status == 200
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(
            b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/jsonl\r\nContent-Length: 0\r\n\r\n"
        )
        assert Reply(sock).body() == b""


def test_a_wrong_line_is_an_error_of_its_own(port: int) -> None:
    """What is wrong with a line stands in its place, with the status that it would have had alone."""
    with bulk(port) as asking:
        asking.send(b'1\n"two"\nx\n4\n')
        asking.end()
        one, two, three, four = (json.loads(line) for line in asking.reply().lines())
    assert (one, four) == (2.0, 8.0)
    assert (two["error"]["status"], two["error"]["code"]) == (422, "invalid_item")
    assert (three["error"]["status"], three["error"]["code"]) == (400, "invalid_request")
    with bulk(port, "/models/moody/predict") as asking:
        asking.send(lines("a", "raise", "bcd"))
        asking.end()
        first, raised, last = (json.loads(line) for line in asking.reply().lines())
        assert (first, last) == (1, 3) and raised["error"]["code"] == "model_error"


def test_items_are_weighed(port: int) -> None:
    """With `size=` a line that cannot be weighed fails alone, also as the first one."""
    with bulk(port, "/models/weighed/predict") as asking:
        asking.send(lines("x", 1, "y", 50))
        asking.end()
        found = [json.loads(line) for line in asking.reply().lines()]
    assert [each if isinstance(each, float) else each["error"]["status"] for each in found] == [422, 2.0, 422, 100.0]


def test_a_line_that_is_too_long_ends_the_request(port: int) -> None:
    """Those before it are answered, and the last line says why there are no more."""
    for long in (b"9" * 10_001 + b"\n", b"9" * 20_000, b"9" * 300_000):
        with bulk(port) as asking:
            asking.send(lines(1, 2))
            asking.send(long)
            reply = asking.reply()
            *good, last = (json.loads(line) for line in reply.lines())
            assert good == [2.0, 4.0] and last["error"]["code"] == "too_large"
    assert predict(port, 3).body == b"6.0"


def test_lists_and_other_addresses_take_no_lines(port: int) -> None:
    """Where a body is a list, lines are an unknown content type."""
    with bulk(port, "/predict/many") as asking:
        asking.end()
        assert asking.reply().status == 415


def test_headers_hold_for_each_item(port: int) -> None:
    """A time-out is that of each line, and ids are repeated."""
    with bulk(
        port, "/predict", "X-Request-Timeout-Ms: 20000\r\nX-Request-Id: mine\r\nX-Request-Priority: 5\r\n"
    ) as asking:
        asking.send(b"1\nx\n")
        asking.end()
        reply = asking.reply()
        _, error = (json.loads(line) for line in reply.lines())
        assert reply.headers["x-request-id"] == "mine" and error["error"]["request_id"] == "mine"


def sent_until_held_back(asking: Bulk, piece: bytes) -> int:
    """How many pieces the server takes from a client that does not read."""
    for n in range(10_000):
        try:
            asking.send(piece)
        except TimeoutError:
            return n
    return 10_000


def test_a_client_that_does_not_read_is_not_read_from(doors: Any) -> None:
    """Whoever sends without reading is held back: neither answers nor items pile up, and others are served."""
    for door in doors:
        with bulk(door.port) as asking:
            asking.sock.settimeout(0.3)
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                asking.sock.setsockopt(socket.SOL_SOCKET, buffer, 65_536)
            piece = lines(*([1 / 3] * 500))  # long lines: of short ones the system takes a million
            assert sent_until_held_back(asking, piece) < 10_000
            assert predict(door.port, 3).body == b"6.0"
            asking.sock.settimeout(PATIENCE_S)


def test_a_client_that_leaves_takes_its_items_along(doors: Any) -> None:
    """What is queued for a client that has gone is not run, and the server is quiet then."""
    running = doors[0]
    for door in doors:
        with bulk(door.port) as asking:
            asking.send(lines(*range(1000)))
            asking.reply()
        handle = running.app.endpoints[0].handle
        running.wait_until(lambda handle=handle: handle.stats().in_flight == 0)


def test_a_body_that_ends_early_has_no_whole_answer(doors: Any) -> None:
    """A client that ends its side in the middle is told so in the last line."""
    with bulk(doors[0].port) as asking:
        asking.send(lines(1))
        asking.sock.shutdown(socket.SHUT_WR)
        one, last = (json.loads(line) for line in asking.reply().lines())
        assert one == 2.0 and last["error"]["code"] == "invalid_request"


def test_a_body_that_is_not_chunked_as_it_says(doors: Any) -> None:
    """A chunk without a length ends the request, after what came before."""
    with bulk(doors[0].port) as asking:
        asking.send(lines(1))
        asking.sock.sendall(b"no length\r\n")
        one, last = (json.loads(line) for line in asking.reply().lines())
        assert one == 2.0 and last["error"]["code"] == "bad_http"


def test_a_slow_body_takes_its_time() -> None:
    """A bulk request may take longer than a body may, as long as something comes; else it is broken off."""
    with serving(App(scale), Limits(body_s=1.0)) as running, bulk(running.port) as asking:
        answers = asking.reply
        for n in range(5):
            asking.send(lines(n))
            time.sleep(0.3)
        lines_told = answers().lines()
        *good, last = (json.loads(line) for line in lines_told)
        assert good == [0.0, 2.0, 4.0, 6.0, 8.0] and last["error"]["code"] == "request_timeout"


def test_requests_of_others_go_first() -> None:
    """While a bulk request keeps the workers busy, a single request waits for one batch, not for the bulk."""
    slow = Service(Stage(models.sleepy, max_batch_size=4, run_in="thread", workers=1), name="slow")
    with serving(App(slow)) as running, bulk(running.port) as asking:
        asking.send(lines(*([0.02] * 4000)))
        wait_until(lambda: running.call(lambda: running.app.endpoints[0].handle.stats().in_flight) > 50)  # type: ignore[union-attr]
        assert predict(running.port, 0.02).status == 200
        assert running.call(lambda: running.app.endpoints[0].handle.stats().in_flight) > 50  # type: ignore[union-attr]


def test_a_draining_server_ends_a_bulk_request() -> None:
    """What was taken is answered, and the last line says that the server is shutting down."""
    with serving(App(scale)) as running, bulk(running.port) as asking:
        asking.send(lines(1))
        answers = asking.reply().lines()
        assert next(answers) == "2.0"
        running.call(running.app.drain)
        asking.send(lines(2))
        assert json.loads(next(answers))["error"]["code"] == "draining"
        assert list(answers) == []


@pytest.mark.slow
def test_memory_is_bounded_in_both_directions() -> None:
    """After a million lines the server holds hardly more than after the first hundred thousand."""
    with serving(App(scale)) as running, bulk(running.port) as asking:
        answers = asking.reply
        piece = lines(*range(1000))
        asking.send(piece)
        reply = answers().lines()
        for n in range(1000):
            if n == 100:
                early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if n:
                asking.send(piece)
            for _ in range(1000):
                next(reply)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1.1 * early


def bodies_of(running: RunningServer) -> Bodies:
    state = running.server.state
    assert state is not None
    return state.bodies


UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
LINES = "Content-Type: application/x-ndjson"


@pytest.mark.parametrize("n", [0, 1, 3, 20_000])
@pytest.mark.parametrize("is_bulk", [False, True], ids=["one item", "lines"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["of known length", "chunked"])
def test_an_offer_to_upgrade_is_passed_over(n: int, is_bulk: bool, is_chunked: bool) -> None:
    """The body behind such an offer is read like any other, however it is sent, and so is the next request."""
    echo = Service(Stage(models.Echo, max_batch_size=64, run_in="thread"), name="echo")
    body = lines(*range(n)) if is_bulk else json.dumps("x" * 5 * n).encode()
    more = (LINES,) if is_bulk else ("Content-Type: application/json",)

    def request(*offer: str) -> bytes:
        if not is_chunked:
            return post(body, "/predict", *more, *offer)
        pieces = [body[at : at + 5000] for at in range(0, len(body), 5000)]
        return chunked(*pieces, headers=(*more, *offer))

    with serving(App(echo)) as running, Client(running.port) as client:
        for _ in range(2):
            client.send(request(*UPGRADE) + get("/livez"))
            reply = Reply(client.sock)
            assert (reply.status, reply.body()) == (200, body)
            reply = Reply(client.sock, reply.rest)
            assert reply.body() == b"ok\n"


@pytest.mark.parametrize("behind", ["known", "new", "lines"])
@pytest.mark.parametrize("why", ["a line too long", "too many connections"])
def test_what_stands_behind_the_end_of_a_connection_is_not_run(
    why: str, behind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A request in the same packet as one after which the connection ends is never run, and nothing is logged."""
    ran: list[str] = []

    def note(xs: list[str]) -> list[str]:
        ran.extend(xs)
        return xs

    after = {
        "known": post(b'"z"'),
        "new": post(b'"z"', "/predict", "X-New: 1"),
        "lines": post(b'"z"\n', "/predict", LINES),
    }[behind]
    services = [Service(Stage(note, max_batch_size=8, run_in="thread"), name=name) for name in ("note", "other")]
    with serving(App(*services, max_body_bytes=1000), Limits(connections=4)) as running:
        assert predict(running.port, "a").status == 200  # so that its head is known
        held = ExitStack()
        if why == "a line too long":
            first = post(b"1" * 5000 + b"\n", "/predict", LINES)
        else:
            first = post(b'"b"', "/models/note/predict")
            for _ in range(3):
                other = held.enter_context(Client(running.port))
                assert other.ask(post(b'"b"', "/models/note/predict")).status == 200
        ran.clear()
        with held, Client(running.port) as client:
            client.send(first + after * 2)
            received = b""
            while data := client.sock.recv(65536):
                received += data
        assert received.count(b"HTTP/1.1") == 1 and not ran
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize("has_end", [False, True], ids=["no line end", "complete lines that find no room"])
def test_what_has_come_of_a_body_counts_until_it_is_inside(has_end: bool) -> None:
    """Lines that are not complete, or find no room in the queue, count among the bodies of the server: together they
    hold no more than all bodies may, whoever is slow is told so, and nothing is left on the account.
    """
    held_up = Service(
        Stage(models.sleepy, max_batch_size=1, run_in="thread", workers=1, max_queue_bytes=20_000), name="held_up"
    )
    limits = Limits(connections=16, body_bytes_in_flight=60_000)
    with serving(App(held_up, max_body_bytes=15_000), limits) as running, ExitStack() as stack:
        bodies = bodies_of(running)
        predict(running.port, 0.0)
        busy = [threading.Thread(target=predict, args=(running.port, 0.5)) for _ in range(2)]
        for each in busy:
            each.start()
        waiting = [stack.enter_context(bulk(running.port)) for _ in range(7)]
        most = 0
        for asking in waiting:
            asking.send(b"0" * 14_999 + b"\n" * has_end)
            most = max(most, running.call(lambda: bodies.held))
        assert most <= bodies.limit == 60_000
        for asking in waiting:
            with suppress(OSError):
                asking.end()
        told = [json.loads(line) for asking in waiting for line in asking.reply().lines()]
        assert has_end or {each["error"]["status"] for each in told if isinstance(each, dict)} >= {408}
        for each in busy:
            each.join()
        stack.close()
        running.wait_until(lambda: bodies.held == 0)


def test_a_line_of_many_small_pieces_takes_hardly_more_than_its_bytes() -> None:
    """Pieces of a line that is not complete are not kept one by one."""
    with serving(App(scale, max_body_bytes=400_000)) as running:
        with bulk(running.port) as asking:
            asking.send(b"1")
            running.wait_until(lambda: bodies_of(running).held == 1)
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                for _ in range(20):
                    asking.sock.sendall(b"1\r\n1\r\n" * 10_000)
                running.wait_until(lambda: bodies_of(running).held == 200_001)
                after, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert after - before < 2_000_000
        running.wait_until(lambda: bodies_of(running).held == 0)


@slow_where(lambda settings: bool(settings))
@pytest.mark.parametrize("settings", [{}, {"max_batch_size": 4}], ids=["single items", "batches"])
def test_few_large_answers_are_made_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int]
) -> None:
    """While as many bytes of answers wait as may, no more lines are taken, by both fronts."""
    monkeypatch.setattr("carpool.engine.drive.streams.MOST_WAITING", 2**18)
    monkeypatch.setattr("carpool.http.bulk.MOST_WAITING", 2**18)
    made: list[int] = []

    def big(n: int) -> str:
        made.append(n)
        return "y" * n

    def bigs(ns: list[int]) -> list[str]:
        return [big(n) for n in ns]

    service = Service(Stage(bigs if settings else big, run_in="thread", **settings), name="big", timeout_s=100)
    with both_fronts(App(service)) as doors:
        for door in doors:
            made.clear()
            with bulk(door.port) as asking:
                asking.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
                asking.send(lines(*([40_000] * 1000)))
                seen = -1
                while len(made) > seen:  # nothing was made for a while
                    seen = len(made)
                    time.sleep(0.5)
                assert len(made) < 200  # most of them fill the buffers of both sides
                asking.end()
                assert sum(1 for _ in asking.reply().lines()) == 1000 == len(made)
