"""The access log, Server-Timing, ids, traces and compression: what answers get besides being written."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from carpool.engine.observe.log import JsonLines
from carpool.http.app import App
from carpool.http.compression import Compression
from carpool.http.endpoint import predict_path
from carpool.http.exchange import HttpResponse, InStage, Notes
from carpool.http.observer import server_timing
from tests.support.http import models
from tests.support.http.both_fronts import asked, both_fronts
from tests.support.http.front import Front, get, post
from tests.support.http.jump import on_a_jumping_loop, turns
from tests.support.http.net import Client
from tests.support.waiting import wait_until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def observed() -> Iterator[tuple[int, int]]:
    """The ports of both fronts of an app that logs each request and tells times."""
    app = App(models.scale, models.two_steps, models.echo, access_log=1.0, server_timing=True, compress="gzip")
    with both_fronts(app) as (ours, asgi):
        yield ours.port, asgi.port


@pytest.fixture(params=[0, 1], ids=["own", "asgi"])
def port(request: pytest.FixtureRequest, observed: tuple[int, int]) -> int:
    found: int = observed[request.param]
    return found


def test_a_request_without_a_key_has_its_path_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is refused before its body is read has its method and path in the access log, too."""
    (tmp_path / "keys").write_text("me:a-long-enough-key\n")
    app = App(models.scale, access_log=1.0, api_keys=tmp_path / "keys")
    with caplog.at_level(logging.INFO), both_fronts(app) as (ours, asgi):
        assert [asked(front.port, post(b"3", "/predict")).status for front in (ours, asgi)] == [401, 401]
    assert [(line["method"], line["path"], line["status"]) for line in lines(caplog)] == [("POST", "/predict", 401)] * 2


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """The access log as JSON."""
    records = [record for record in caplog.records if record.name == "carpool.access"]
    return [json.loads(JsonLines().format(record)) for record in records]


def test_a_line_tells_what_was_asked_and_where_the_time_went(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """The line has id, status, bytes, and for each stage the time in the queue and in the batch, with its id and
    size.
    """
    with caplog.at_level(logging.INFO):
        answer = asked(port, post(b"3", predict_path(models.two_steps.name), "X-Request-Id: mine"))
    assert answer.status == 200
    (line,) = lines(caplog)
    assert (line["request_id"], line["method"], line["status"]) == ("mine", "POST", 200)
    assert line["path"] == predict_path(models.two_steps.name)
    assert line["bytes"] == len(answer.body)
    stages = line["stages"]
    assert isinstance(stages, list)
    assert len(stages) == 2
    for stage in stages:
        assert stage["batch_size"] == 1
        assert stage["queued_ms"] >= 0
        assert stage["computed_ms"] > 0
    took = line["took_ms"]
    assert isinstance(took, float)
    assert sum(stage["queued_ms"] + stage["computed_ms"] for stage in stages) <= took + 1


def test_refusals_and_pages_have_lines_too(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """What the app refuses, and its own pages, are in the log with their status; what came from outside is escaped
    and cut.
    """
    with caplog.at_level(logging.INFO):
        asked(port, post(b"{", "/models/echo/predict"))
        asked(port, get("/nowhere/%0a" + "x" * 1000), "GET")
        asked(port, get("/openapi.json"), "GET")
    assert [line["status"] for line in lines(caplog)] == [400, 404, 200]
    path = lines(caplog)[1]["path"]
    assert isinstance(path, str)
    assert len(path) <= 300
    assert all("\n" not in record.getMessage() for record in caplog.records if record.name == "carpool.access")


def test_who_is_refused_by_the_head_has_caller_and_model_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that is refused before its body is read has its caller and its model in the access log."""
    (tmp_path / "keys").write_text("me:a-long-enough-key\n")
    app = App(models.scale, access_log=1.0, api_keys=tmp_path / "keys", max_body_bytes=10)
    key, name = "Authorization: Bearer a-long-enough-key", models.scale.name
    with caplog.at_level(logging.INFO), both_fronts(app) as (ours, asgi):
        for front in (ours, asgi):
            assert asked(front.port, post(b"3", "/predict", key, "Content-Type: a/b")).status == 415
            assert asked(front.port, post(b"3" * 11, "/predict", key)).status == 413
            assert asked(front.port, post(b"3", "/nowhere", key)).status == 404
    expected = [(415, "me", name), (413, "me", name), (404, "me", None)]
    assert [(line["status"], line["caller"], line.get("model")) for line in lines(caplog)] == expected * 2


@pytest.mark.parametrize("accept", ["text/event-stream", "application/x-ndjson"])
def test_a_line_counts_all_bytes_of_a_stream(port: int, accept: str, caplog: pytest.LogCaptureFixture) -> None:
    """The bytes of an answer in parts are those of its whole body, not of its last piece."""
    with caplog.at_level(logging.INFO):
        answer = httpx.post(
            f"http://127.0.0.1:{port}{predict_path(models.scale.name)}", content=b"3", headers={"Accept": accept}
        )
        bulk = httpx.post(
            f"http://127.0.0.1:{port}{predict_path(models.scale.name)}",
            content=b"3\n" * 500,
            headers={"Content-Type": "application/x-ndjson"},
        )
        wait_until(lambda: len(lines(caplog)) == 2)
    whole, many = (int(str(line["bytes"])) for line in lines(caplog))
    assert len(answer.content) <= whole <= len(answer.content) + 20
    assert len(bulk.content) <= many <= len(bulk.content) + 10_000  # the sizes of chunks are counted, too


def test_every_answer_has_an_id_and_its_place_in_a_trace(port: int) -> None:
    """Answers repeat the client's id or have one of ours, and a trace goes on in the one that the client names."""
    for data in (post(b"21"), post(b"{"), get("/livez")):
        ids = {asked(port, data).headers["x-request-id"] for _ in range(2)}
        assert len(ids) == 2
    assert asked(port, post(b"21", "/predict", "X-Request-Id: mine")).headers["x-request-id"] == "mine"
    sent = f"00-{TRACE}-00f067aa0ba902b7-01"
    told = asked(port, post(b"21", "/predict", f"traceparent: {sent}")).headers["traceparent"]
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-01", told)
    assert told != sent
    for wrong in ("x", f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{TRACE.upper()}-00f067aa0ba902b7-01"):
        told = asked(port, post(b"21", "/predict", f"traceparent: {wrong}")).headers["traceparent"]
        assert TRACE not in told.lower()


def test_server_timing_says_where_the_time_went(port: int) -> None:
    """Each stage has its time in the queue and in the batch, and there is the time of all."""
    text = asked(port, post(b"21")).headers["server-timing"]
    assert re.fullmatch(
        r'queue;dur=[\d.]+;desc="\w+", compute;dur=[\d.]+;desc="\w+", batch;desc="1", total;dur=[\d.]+', text
    )


def test_server_timing_of_two_stages() -> None:
    """The time in a stage ends where that in the next one begins; names that a header cannot carry are changed."""
    notes = Notes(10.0, b"", b"")
    notes.stages = [InStage('a"\n', 10.0, 10.5, 1, 4), InStage("b", 11.0, 11.0, 7, 2)]
    told = server_timing(notes, 13.0).decode()
    assert told == (
        'queue;dur=500.000;desc="a__", compute;dur=500.000;desc="a__", batch;desc="4", '
        'queue;dur=0.000;desc="b", compute;dur=2000.000;desc="b", batch;desc="2", total;dur=3000.000'
    )


def test_a_large_answer_is_compressed_for_those_who_accept_it(port: int) -> None:
    """Answers above the size are compressed if the client accepts it and they get smaller, and their body is the
    same.
    """
    body = b'"' + b"carpool " * 500 + b'"'
    small = asked(port, post(body, "/models/echo/predict", "Accept-Encoding: br, gzip"))
    assert small.headers["content-encoding"] == "gzip"
    assert gzip.decompress(small.body) == body
    assert len(small.body) < len(body) / 10
    assert "accept-encoding" in small.headers["vary"]
    for line in ("X: y", "Accept-Encoding: identity", "Accept-Encoding: gzip;q=0"):
        whole = asked(port, post(body, "/models/echo/predict", line))
        assert "content-encoding" not in whole.headers
        assert whole.body == body
    assert "content-encoding" not in asked(port, post(b"21", "/predict", "Accept-Encoding: gzip")).headers


def test_what_is_compressed_already_is_left_alone() -> None:
    """Pictures, small answers, and answers that have a coding stay as they are; `*` takes the preferred one."""
    compression = Compression(["gzip"], 10)
    picture = HttpResponse(200, b"x" * 100, b"image/png")
    coded = HttpResponse(200, b"x" * 100, headers=((b"content-encoding", b"br"),))
    for response in (picture, coded, HttpResponse(200, b"x")):
        assert compression.compressed(response, b"gzip") is response
    assert compression.compressed(HttpResponse(200, b"x" * 100), b"*").headers[0] == (b"content-encoding", b"gzip")


def test_zstd_where_it_is_installed() -> None:
    """zstd comes first where the setting says so, and its package is named where it is missing."""
    try:
        import zstandard
    except ImportError:
        with pytest.raises(ValueError, match=r"carpool\[compress\]"):
            Compression(["zstd"], 10)
        return
    response = Compression(["zstd", "gzip"], 10).compressed(HttpResponse(200, b"x" * 100), b"gzip, zstd")
    assert response.headers[0] == (b"content-encoding", b"zstd")
    assert zstandard.ZstdDecompressor().decompress(bytes(response.body)) == b"x" * 100


def test_pipelined_requests_each_get_their_own(observed: tuple[int, int]) -> None:
    """Answers of one connection keep their order, and each has its own id."""
    with Client(observed[0]) as client:
        client.send(b"".join(post(str(x).encode(), "/predict", f"X-Request-Id: n{x}") for x in range(10)))
        answers = [client.answer() for _ in range(10)]
    assert [answer.headers["x-request-id"] for answer in answers] == [f"n{x}" for x in range(10)]
    assert [float(answer.body) for answer in answers] == [2.0 * x for x in range(10)]


def test_a_sample_of_the_requests_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With a share of a half about half of the requests have a line."""
    caplog.set_level(logging.INFO)
    with both_fronts(App(models.scale, access_log=0.5)) as (ours, _), Client(ours.port) as client:
        for _ in range(100):
            client.ask(post(b"3", "/predict"))
    assert 20 <= len(lines(caplog)) <= 80


PROBES = ("/livez", "/readyz", "/metrics", "/models/scale/ready", "/v2/health/live", "/v2/health/ready", "/ping")


@pytest.mark.parametrize("settings", [{"access_log": 1.0}, {"access_log": 0.001}, {"access_log_slow_ms": 60_000.0}])
def test_errors_have_a_line_and_probes_that_went_well_have_none(
    settings: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the share, what is refused or fails has a line in the log, and probes and scrapes that are answered 200
    have none; what is no probe has one by its share.
    """
    caplog.set_level(logging.INFO)
    with both_fronts(App(models.scale, **settings)) as fronts:  # type: ignore[arg-type]
        for front in fronts:
            for path in PROBES:
                assert asked(front.port, get(path)).status == 200
            assert asked(front.port, get("/openapi.json")).status == 200
            assert asked(front.port, post(b"[]", "/predict")).status == 422
            assert asked(front.port, get("/nowhere/livez")).status == 404
    told = [(line["path"], line["status"]) for line in lines(caplog)]
    assert [each for each in told if each[1] != 200] == [("/predict", 422), ("/nowhere/livez", 404)] * 2
    assert [path for path, status in told if status == 200] in (
        [["/openapi.json"] * 2] if settings.get("access_log") == 1 else [[], ["/openapi.json"]]
    )


@on_a_jumping_loop
async def test_who_leaves_and_what_is_slow_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """A client that leaves before its answer has a line with status 499, and a request that takes longer than the
    setting says has one, too, even a probe.
    """
    caplog.set_level(logging.INFO)
    front = Front(cost_s=None, access_log_slow_ms=0.0)
    wire = front.connect()
    wire.send(post(b"1"))
    await turns()
    wire.reset()
    await turns()
    slow = front.connect()
    slow.send(get("/livez"))
    assert [(line["path"], line["status"]) for line in lines(caplog)] == [("/predict", 499), ("/livez", 200)]


@on_a_jumping_loop
async def test_nothing_is_watched_unless_asked() -> None:
    """Without these settings there is no observer, batches are told to nobody, and answers take the short way."""
    front = Front()
    assert front.app.observer is None
    wire = front.connect()
    for _ in range(2):
        wire.send(post(b"1"))
        await turns()
    assert b"traceparent" not in wire.received
