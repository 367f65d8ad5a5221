"""Each bad request gets its refusal or a close, never a hang; and then the next client is served."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from tests.http.bad_requests import ALL, DROP, SECRET, Bad
from tests.support.http.front import Front, get, post
from tests.support.http.jump import on_a_jumping_loop, turns
from tests.support.http.net import Client, RunningServer
from tests.support.http.wire import Answer

_NEVER_SAID = (b"Traceback", b"carpool", b".py", b"/work", b"/tmp", b"0x", b"File ", SECRET.encode())


def refusal(client: Client, bad: Bad) -> Answer | None:
    """The answer to a bad request; None if the connection ends without one."""
    client.send(bad.data)
    try:
        return client.answer("HEAD" if bad.data.startswith(b"HEAD") else "POST")
    except ConnectionResetError:
        return None


def check_body(answer: Answer, had_body: bool) -> None:
    """An error in our words, short, and nothing that was sent or that is inside."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert int(answer.headers["content-length"]) < 1024
    if had_body:
        error = json.loads(answer.body)["error"]
        details = {"details"} if answer.status == 422 else set()
        assert set(error) == {"code", "message", "request_id"} | details
        assert error["request_id"] == answer.headers["x-request-id"]
        assert [text for text in _NEVER_SAID if text in answer.body] == []


@pytest.mark.fault("F68")
@pytest.mark.parametrize("name", ALL)
def test_a_bad_request(server: RunningServer, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A bad request gets its status, in our words, and disturbs nobody."""
    bad = ALL[name]
    pids = server.pids
    with caplog.at_level(logging.WARNING), Client(server.port) as client:
        answer = refusal(client, bad)
        if answer is None:
            assert DROP in bad.statuses
        else:
            assert answer.status in bad.statuses
            if answer.status != 200:
                check_body(answer, had_body=not bad.data.startswith(b"HEAD"))
            assert (answer.status == 200 and bad.closes) or answer.closes == bad.closes
            if answer.closes:
                client.end()
                assert client.at_end()
            elif not bad.closes:
                assert client.ask(get()).status == 200
    with Client(server.port) as client:
        assert client.ask(get()).status == 200
        assert client.ask(post(b"21")).body == b"42.0"
    assert server.pids == pids
    assert [record for record in caplog.records if record.exc_info] == []
    assert not Path("/tmp/carpool-canary").exists()


GOOD = {
    "no content type": post(b"21"),
    "content type in capitals": post(b"21", "/predict", "Content-Type: APPLICATION/JSON"),
    "charset": post(b"21", "/predict", 'Content-Type: application/json; charset="UTF-8"'),
    "a type of JSON": post(b"21", "/predict", "Content-Type: application/vnd.x+json"),
    "identity": post(b"21", "/predict", "Content-Encoding: identity"),
    "Accept that cannot be met": post(b"21", "/predict", "Accept: text/html"),
    "space around values": post(b"21", "/predict", "Content-Type:   application/json \t", "X-Request-Priority: 5 "),
    "space behind the host": post(b"21").replace(b"Host: test", b"Host: test \t"),
    "Expect in capitals": post(b"21", "/predict", "Expect: 100-CONTINUE"),
    "an expectation in HTTP/1.0": post(b"21", "/predict", "Expect: whatever", version="1.0"),
    "a long time-out": post(b"21", "/predict", "X-Request-Timeout-Ms: 1e99"),
    "no end of time": post(b"21", "/predict", "X-Request-Timeout-Ms: inf"),
    "highest priority": post(b"21", "/predict", "X-Request-Priority: 100"),
    "lowest priority": post(b"21", "/predict", "X-Request-Priority: -100"),
    "unknown coding header": post(b"21", "/predict", "Transfer_Encoding: chunked"),
    "a header of 9 KiB": post(b"21", "/predict", "X: " + "y" * 9 * 1024),
    "64 headers": post(b"21", "/predict", *["X: y"] * 62),
    "blank lines in front": b"\r\n\r\n" + post(b"21"),
    "h2c offer": post(b"21", "/predict", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: A"),
    "white space around the item": post(b" \r\n21\t "),
    "query": post(b"21", "/predict?a=%00&b"),
    "own id": post(b"21", "/predict", "X-Request-Id: " + "a" * 5000),
}


@pytest.mark.parametrize("name", GOOD)
def test_an_odd_request_that_is_good(server: RunningServer, name: str) -> None:
    """A request that is odd, but that the standards allow or that harms nobody, is answered."""
    with Client(server.port) as client:
        answer = client.ask(GOOD[name])
    assert (answer.status, answer.body) == (200, b"42.0")


@on_a_jumping_loop
async def test_no_interim_response_to_http_1_0() -> None:
    """A client of HTTP/1.0 gets no `100 Continue`, although it expects it, since it would take it
    for the answer.
    """
    wire = Front().connect()
    wire.send(post(b"1", "/predict", "Expect: 100-continue", version="1.0"))
    await turns()
    assert wire.received.startswith(b"HTTP/1.1 200")


def test_the_client_s_own_id_is_repeated(server: RunningServer) -> None:
    """A request id of the client's that is short and plain is repeated in the answer; any other is
    replaced by one of ours.
    """
    with Client(server.port) as client:
        given = client.ask(get("/nowhere", "X-Request-Id: my-Id_7"))
        odd = client.ask(get("/nowhere", "X-Request-Id: my<id>"))
    assert json.loads(given.body)["error"]["request_id"] == given.headers["x-request-id"] == "my-Id_7"
    assert "<" not in odd.headers["x-request-id"]


def test_one_id_for_two_requests_at_once(server: RunningServer) -> None:
    """Two requests with the same id at once get their own answers: it is a label for people."""
    with Client(server.port) as one, Client(server.port) as two:
        one.send(post(b"1", "/predict", "X-Request-Id: same"))
        two.send(post(b"2", "/predict", "X-Request-Id: same"))
        assert (one.answer().body, two.answer().body) == (b"2.0", b"4.0")


def test_a_short_body_hides_no_request(server: RunningServer) -> None:
    """Bytes behind the end of a body are the next request, which is answered in its turn."""
    hidden = get("/nowhere")
    with Client(server.port) as client:
        client.send(post(b"21") + hidden)
        assert client.answer().body == b"42.0"
        assert client.answer().status == 404
        client.send(post(b'"' + get("/livez") + b'"', "/models/echo/predict"))
        assert client.answer().status == 400
        assert client.ask(post(b"1")).body == b"2.0"


def _rss() -> int:
    """Bytes of memory that this process, in which the server runs, has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _series(server: RunningServer) -> set[str]:
    """The series that /metrics has, but for the one whose label is the rule of the last batch."""
    with Client(server.port) as client:
        lines = client.ask(get("/metrics")).body.decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith(("#", "carpool_policy_info"))}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_the_whole_table_leaves_nothing_behind(server: RunningServer) -> None:
    """All bad requests once more take no memory, and add no series to the metrics."""

    def send_all() -> None:
        for bad in ALL.values():
            with Client(server.port) as client:
                refusal(client, bad)
        with Client(server.port) as client:
            assert client.ask(post(b"21")).body == b"42.0"

    send_all()
    memory, series, pids = _rss(), _series(server), server.pids
    for _ in range(2):
        send_all()
    assert _rss() - memory < 10 * 2**20
    assert _series(server) == series
    assert server.pids == pids
