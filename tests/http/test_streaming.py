"""Answers in parts over HTTP, by our own server and through ASGI, read by a parser of the tests' own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from carpool.engine.drive.callers import PAUSE_BYTES
from carpool.http.app import App
from tests.effort import slow_where
from tests.http.streamed import DOORS, Reply, asked, counting, message, request
from tests.support.http.both_fronts import both_fronts
from tests.support.http.net import serving
from tests.support.parts import Counting, Once, Resuming, up_to
from tests.support.waiting import PATIENCE_S, wait_until


def test_parts_come_as_events_and_lines_by_both_fronts() -> None:
    """Each part is an event or a line, and the end says how many there were; the whole answer is
    there for those who ask for it; nobody may keep a copy.
    """
    with counting() as (ports, _):
        for port in ports.values():
            with asked(port, request(5)) as reply:
                assert list(reply.events()) == message(5)
                assert reply.status == 200 and reply.headers["content-type"] == "text/event-stream"
                assert reply.headers["cache-control"] == "no-store" and reply.headers["x-accel-buffering"] == "no"
            with asked(port, request(2, "application/x-ndjson", x_request_id="mine")) as reply:
                assert [json.loads(line) for line in reply.lines()] == [{"part": 1}, {"part": 2}, {"end": {"parts": 2}}]
                assert reply.headers["content-type"] == "application/x-ndjson"
                assert reply.headers["x-request-id"] == "mine"
            for accept in ("application/json", "*/*", "application/json, text/event-stream"):
                with asked(port, request(3, accept)) as reply:
                    assert json.loads(reply.body()) == [1, 2, 3]
                    assert reply.headers["content-type"] == "application/json"


def test_a_generator_streams_like_steps() -> None:
    """A generator for each item is told in the same way."""
    with counting(Once) as (ports, _):
        for port in ports.values():
            with asked(port, request(4)) as reply:
                assert list(reply.events()) == message(4)


def test_parts_are_told_as_they_come() -> None:
    """A part is with the client before the next one is made."""
    with counting(step_s=0.02) as (ports, log):
        for port in ports.values():
            with asked(port, request(20)) as reply:
                events = reply.events()
                assert next(events) == ("message", 1)
                assert sum(each[0] == "step" for each in log) < 20
                assert list(events) == message(20)[1:]
            log.clear()


@pytest.mark.parametrize(
    ("item", "headers", "status", "code"),
    [
        ({"n": 9, "at": 0, "raise": "at once"}, {}, 500, "model_error"),
        (9, {"content_type": "text/plain"}, 415, "unsupported_media_type"),
        ({"n": 9, "at": 0, "hang": 0.3}, {"x_request_timeout_ms": "100"}, 504, "deadline_exceeded"),
    ],
)
def test_what_fails_before_the_first_part_has_a_status(
    item: Any, headers: dict[str, str], status: int, code: str
) -> None:
    """A failure before the first part is answered as for any request."""
    with counting() as (ports, _):
        for port in ports.values():
            data = request(item, **headers)
            if "content_type" in headers:
                data = data.replace(b"Content-Type: application/json\r\n", b"")
            with asked(port, data) as reply:
                body = json.loads(reply.body())
                assert (reply.status, body["error"]["code"]) == (status, code)
                assert reply.headers["content-type"] == "application/json"


def test_what_fails_later_is_told_and_never_looks_whole() -> None:
    """A failure after the first part is an `error` event or line in the place of the end, with code
    and request id, and the connection serves the next request.
    """
    item = {"n": 9, "at": 2, "raise": "later"}
    with counting() as (ports, _):
        for port in ports.values():
            with asked(port, request(item, x_request_id="me") + request(2)) as reply:
                *parts, (kind, told) = reply.events()
                assert parts == message(2)[:2] and kind == "error"
                assert told["error"]["code"] == "model_error" and told["error"]["request_id"] == "me"
                assert "later" not in str(told)
                if port == ports["our own"]:
                    assert list(reply.follows_on().events()) == message(2)
            with asked(port, request(item, "application/x-ndjson")) as reply:
                *lines, last = [json.loads(line) for line in reply.lines()]
                assert lines == [{"part": 1}, {"part": 2}] and list(last) == ["error"]


@slow_where(lambda door: door == DOORS[1])
@pytest.mark.parametrize("door", DOORS)
def test_a_client_may_bound_the_whole_stream(door: str) -> None:
    """`X-Request-Timeout-Ms` bounds all of the answer: what is late is told, and the place is free."""
    with counting(step_s=0.005, max_batch_size=1) as (ports, log):
        with asked(ports[door], request(10**6, x_request_timeout_ms="1000")) as reply:
            *parts, (kind, told) = reply.events()
            assert parts and kind == "error" and told["error"]["code"] == "deadline_exceeded"
        wait_until(lambda: ("stop", 10**6) in log)


def test_pipelined_answers_keep_their_order() -> None:
    """A streamed answer waits for those before it, and those behind it wait for its end."""
    with counting(step_s=0.002) as (ports, _):
        several = request(9) + request(2) + request(3, "application/json") + request(4, "application/x-ndjson")
        with asked(ports["our own"], several) as reply:
            assert list(reply.events()) == message(9)
            reply = reply.follows_on()
            assert list(reply.events()) == message(2)
            reply = reply.follows_on()
            assert json.loads(reply.body()) == [1, 2, 3]
            assert len(list(reply.follows_on().lines())) == 5


def test_a_client_of_http_1_0_reads_to_the_end() -> None:
    """HTTP/1.0 has no chunks: the connection ends where the answer does."""
    with counting() as (ports, _), asked(ports["our own"], request(3, version="1.0")) as reply:
        assert list(reply.events()) == message(3)
        assert "transfer-encoding" not in reply.headers and reply.headers["connection"] == "close"


def test_a_client_that_closes_is_served_to_the_end() -> None:
    """`Connection: close` closes after the end of the stream, not before."""
    with counting() as (ports, _), asked(ports["our own"], request(3, connection="close")) as reply:
        assert list(reply.events()) == message(3) and reply.is_whole
        assert reply.headers["connection"] == "close" and not reply._receive()


def test_a_model_that_answers_whole_is_a_stream_of_one() -> None:
    """Asked for a stream, a model that returns gives one part and the end."""
    with both_fronts(App(Service(Stage(lambda x: {"got": x}, name="whole", run_in="thread")))) as doors:
        for door in doors:
            with asked(door.port, request(1)) as reply:
                assert list(reply.events()) == [("message", {"got": 1}), ("end", {"parts": 1})]
            with asked(door.port, request(1, "application/x-ndjson")) as reply:
                assert list(reply.lines()) == ['{"part": {"got":1}}', '{"end": {"parts": 1}}']


class Bytes(Counting):
    """Its parts are bytes."""

    def step(self, states: list[dict[str, Any]]) -> list[bytes]:  # type: ignore[override]
        return super().step(states)


def test_bytes_are_streamed_as_they_are_or_in_base64() -> None:
    """Parts of bytes are a body of unknown length, which breaks off where it fails; in events they
    are base64.
    """
    with counting(Bytes) as (ports, _):
        for port in ports.values():
            with asked(port, request({"n": 3, "bytes": 2}, "application/octet-stream")) as reply:
                assert reply.body() == b"\1\1\2\2\3\3" and reply.headers["content-type"] == "application/octet-stream"
            with asked(port, request({"n": 1, "bytes": 2})) as reply:
                assert next(reply.events()) == ("message", "AQE=")
            item = {"n": 3, "bytes": 2, "at": 1, "raise": "broken"}
            with asked(port, request(item, "application/octet-stream")) as reply:
                pieces = reply.pieces()
                assert next(pieces) == b"\1\1"
                with pytest.raises(AssertionError, match="the connection has ended"):
                    next(pieces)
                assert not reply.is_whole


@pytest.mark.parametrize("door", DOORS)
def test_a_client_that_leaves_frees_its_place(door: str) -> None:
    """When its client closes the connection, a stream is stopped and the next one has its place."""
    with counting(step_s=0.002, max_batch_size=1) as (ports, log):
        with asked(ports[door], request(10**9)) as reply:
            assert next(reply.events()) == ("message", 1)
        with asked(ports[door], request(3)) as reply:
            assert list(reply.events()) == message(3)
        assert log.index(("stop", 10**9)) < log.index(("start", 3))


def test_that_a_client_of_events_has_left_is_found_out_at_once() -> None:
    """A client that closes looks as if it only sent no more, so it is sent a comment, which tells before the
    next part: the step that was under way is the last one.
    """
    with counting() as (ports, log):
        with asked(ports["our own"], request({"n": 10**9, "at": 1, "hang": 1.0})) as reply:
            assert next(reply.events()) == ("message", 1)
        wait_until(lambda: ("stop", 10**9) in log)
        assert log.count(("step", [10**9])) == 2


def test_a_client_of_events_that_only_sends_no_more_gets_all_of_them() -> None:
    """What it is sent to find out is a comment, which every reader of events skips."""
    with counting(step_s=0.01) as (ports, _), socket.create_connection(("127.0.0.1", ports["our own"])) as sock:
        sock.settimeout(PATIENCE_S)
        sock.sendall(request(20))
        reply = Reply(sock)
        events = reply.events()
        first = next(events)
        sock.shutdown(socket.SHUT_WR)
        rest = list(events)
        assert [first, *[each for each in rest if each[0]]] == message(20) and reply.is_whole
        assert ("", "alive") in rest


@pytest.mark.parametrize("door", DOORS)
def test_a_client_that_does_not_read_is_paused(door: str) -> None:
    """A client that reads nothing has its stream paused with bounded memory; the others keep their
    pace, and it gets every part once it reads.
    """
    nbytes, n = 64 * 1024, 200
    with counting(Bytes) as (ports, log):  # noqa: SIM117
        with socket.create_connection(("127.0.0.1", ports[door]), timeout=PATIENCE_S) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 * 1024)
            sock.sendall(request({"n": n, "bytes": nbytes}, "application/octet-stream"))

            def made() -> int:
                return sum(n in each[1] for each in log if each[0] == "step")

            wait_until(lambda: made() > 10)
            with asked(ports[door], request({"n": 400, "bytes": 1})) as other:
                assert len(list(other.events())) == 401
            before = made()
            assert before * nbytes < 16 * 2**20, "it was not paused"
            time.sleep(0.05)
            assert made() == before
            assert Reply(sock).body() == b"".join(bytes([i % 256]) * nbytes for i in up_to(n))


def test_a_pipelined_stream_whose_turn_has_not_come_is_paused() -> None:
    """Of a stream that waits behind another answer no more than a mebibyte is made ahead."""
    with counting(Bytes, step_s=0.001) as (ports, log):
        first, second = {"n": 700, "bytes": 1}, {"n": 100, "bytes": 64 * 1024}
        with asked(ports["our own"], request(first) + request(second)) as reply:
            events = reply.events()
            for _ in range(690):
                next(events)
            assert sum(100 in each[1] for each in log if each[0] == "step") < 2 * PAUSE_BYTES // (64 * 1024)
            assert len(list(events)) == 11
            assert len(list(reply.follows_on().events())) == 101


def test_a_long_silence_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that hears nothing for a while gets the head, and a comment now and then; what fails
    after that is an event.
    """
    for module in ("answer_writer", "asgi"):
        monkeypatch.setattr(f"carpool.http.{module}.SILENCE_S", 0.1)
    with counting() as (ports, _):
        for port in ports.values():
            with asked(port, request({"n": 2, "at": 1, "hang": 0.4})) as reply:
                events = list(reply.events())
                assert [each for each in events if each[0]] == message(2) and ("", "alive") in events
            with asked(port, request({"n": 2, "at": 0, "hang": 0.4})) as reply:
                events = list(reply.events())
                assert events[0] == ("", "alive") and [each for each in events if each[0]] == message(2)


@pytest.mark.parametrize(
    ("model", "goes_on"), [(Resuming, True), pytest.param(Counting, False, marks=pytest.mark.slow)]
)
def test_a_worker_that_is_killed_in_mid_stream(model: Any, goes_on: bool) -> None:
    """With `resume` the stream goes on, part for part; without it an event says `worker_lost`."""
    with serving(App(Service(Stage(model, max_batch_size=4, kwargs={"step_s": 0.002})))) as own:
        with asked(own.port, request(200)) as reply:
            events = reply.events()
            assert next(events) == ("message", 1)
            os.kill(own.pids[0], signal.SIGKILL)
            told = [("message", 1), *events]
        if goes_on:
            assert told == message(200)
        else:
            assert told[:-1] == message(200)[: len(told) - 1]
            assert told[-1][0] == "error" and told[-1][1]["error"]["code"] == "worker_lost"


def test_a_server_that_drains_lets_streams_end() -> None:
    """A server that shuts down refuses new requests, and lets streams come to their ends."""
    with serving(App(Service(Stage(Counting, run_in="thread", max_batch_size=2, kwargs={"step_s": 0.002})))) as own:
        with asked(own.port, request(150)) as reply:
            events = reply.events()
            assert next(events) == ("message", 1)
            stopping = asyncio.run_coroutine_threadsafe(own.server.stop(), own.loop)
            assert list(events) == message(150)[1:]
        stopping.result(PATIENCE_S)


def test_openapi_lists_the_streams() -> None:
    """The document of a model that answers in parts has both content types, with the type of a
    part; that of another has none.
    """
    for model, has_streams in ((Once, True), (len, False)):
        with serving(App(Service(Stage(model, run_in="thread")))) as own:
            with asked(own.port, b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n") as reply:
                document = json.loads(reply.body())
            contents = document["paths"]["/predict"]["post"]["responses"]["200"]["content"]
            assert ("text/event-stream" in contents, "application/x-ndjson" in contents) == (has_streams,) * 2
            if has_streams:
                assert contents["text/event-stream"]["schema"]["contentSchema"] == {"type": "integer"}
                assert contents["application/json"]["schema"] == {"type": "array", "items": {"type": "integer"}}


@pytest.mark.slow
def test_a_stream_of_many_clients() -> None:
    """Many connections at once each get their own parts, in a worker process."""

    async def main(port: int) -> None:
        async def ask(n: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(n, connection="close"))
            body = await reader.read()
            writer.close()
            said = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
            assert said == [*[b"%d" % i for i in up_to(n)], b'{"parts": %d}' % n]
            assert body.endswith(b'event: end\ndata: {"parts": %d}\n\n\r\n0\r\n\r\n' % n)

        await asyncio.gather(*[ask(n) for n in range(1, 60)])

    with serving(App(Service(Stage(Resuming, max_batch_size=16)))) as own:
        asyncio.run(main(own.port))


def test_carpool_says_what_ends_a_stream() -> None:
    """`carpool.Last` and `carpool.END` say in a text what they are."""
    assert (repr(carpool.Last(3)), repr(carpool.END)) == ("carpool.Last(3)", "carpool.END")


class OwnFormats(Counting):
    """Reads and writes texts of its own; its whole answer may have a status of its own."""

    accepts = ("text/x-count",)
    produces = "text/x-sum"

    def decode(self, bodies: list[bytes]) -> list[Any]:
        return [int(body) for body in bodies]

    def preprocess(self, x: int) -> int:
        if x < 0:
            raise carpool.HTTPError("it counts up", status=409, code="downwards")
        return x

    def collect(self, parts: list[int]) -> Any:
        return carpool.Response(sum(parts), status=203) if len(parts) == 3 else sum(parts)

    def encode(self, results: list[int]) -> list[bytes]:
        return [b"sum %d" % result for result in results]


def test_formats_and_answers_of_a_models_own() -> None:
    """`decode` and `preprocess` run before a stream starts, `encode` writes whole answers, which may
    be responses, and parts are JSON as ever.
    """
    with counting(OwnFormats) as (ports, _):
        for port in ports.values():
            data = request(4, content_type="text/x-count").replace(b"Content-Type: application/json\r\n", b"")
            with asked(port, data) as reply:
                assert list(reply.events()) == message(4)
            with asked(port, data.replace(b"Accept: text/event-stream\r\n", b"")) as reply:
                assert (reply.status, reply.body()) == (200, b"sum 10")
            with asked(port, request(3, "application/json")) as reply:
                assert (reply.status, json.loads(reply.body())) == (203, 6)
            with asked(port, request(-3)) as reply:
                assert (reply.status, json.loads(reply.body())["error"]["code"]) == (409, "downwards")
