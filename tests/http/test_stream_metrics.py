"""What a scrape of /metrics says of answers in parts, and the story of one, through a real service."""

from __future__ import annotations

import json

from carpool import Service, Stage
from carpool.engine.observe.snapshot import ENDS
from carpool.http.app import App
from tests.http.streamed import asked, message, request
from tests.support.http.metrics import scrape, value
from tests.support.http.net import predict, serving
from tests.support.parts import Counting, Resuming, up_to
from tests.support.waiting import wait_until

NAMES = {"model": "counts", "stage": "Counting"}


def test_a_scrape_tells_what_streams_have_come_to() -> None:
    """Whole, failed and left streams are counted once each, and so is every part and every step that has been made."""
    log: list[tuple[str, object]] = []
    stage = Stage(Counting, max_batch_size=4, run_in="thread", kwargs={"step_s": 0.002, "log": log})
    with serving(App(Service(stage, name="counts", slo_s=30.0, part_slo_s=30.0))) as running:
        for n in (1, 5, 20):
            with asked(running.port, request(n)) as reply:
                assert list(reply.events()) == message(n)
        assert json.loads(predict(running.port, 3).body) == up_to(3)  # collected: no stream, but it has steps
        with asked(running.port, request({"n": 9, "at": 4, "raise": "bad row"})) as reply:
            assert list(reply.events())[-1][0] == "error"
        with asked(running.port, request(10**9)) as reply:
            assert next(reply.events()) == ("message", 1)
            during = scrape(running)
        wait_until(lambda: value(scrape(running), "carpool_streams", "_total", model="counts", end="cancelled") == 1)
        metrics = scrape(running)

        ends = {end: value(metrics, "carpool_streams", "_total", model="counts", end=end) for end in ENDS}
        assert {end: n for end, n in ends.items() if n} == {"complete": 3, "model_error": 1, "cancelled": 1}
        assert value(metrics, "carpool_good", "_total", model="counts") == 3
        assert value(metrics, "carpool_first_part_seconds", "_count", model="counts") == 5
        assert value(metrics, "carpool_part_seconds", "_count", model="counts") in (
            3,
            4,
        )  # did the one that left have two?
        assert 0.002 * 3 < value(metrics, "carpool_longest_gap_seconds", "_sum", model="counts") < 30.0
        assert value(metrics, "carpool_parts", "_total", **NAMES) >= 1 + 5 + 20 + 4 + 1
        steps = value(metrics, "carpool_step_seconds", "_count", **NAMES)
        assert steps == value(metrics, "carpool_batch_size", "_count", **NAMES) >= 1 + 5 + 20 + 3 + 4 + 1
        assert value(metrics, "carpool_step_seconds", "_sum", **NAMES) >= 0.002 * (steps - 1)
        assert value(metrics, "carpool_start_seconds", "_count", **NAMES) == 6
        assert value(metrics, "carpool_queue_duration_seconds", "_count", **NAMES) == 6
        assert [value(during, f"carpool_{name}", **NAMES) for name in ("running", "running_size", "paused")] == [
            1,
            1,
            0,
        ]
        assert value(metrics, "carpool_running", **NAMES) == 0 == value(metrics, "carpool_running_size", **NAMES)
        assert value(metrics, "carpool_resumed", "_total", **NAMES) == 0
        assert value(metrics, "carpool_stray_parts", "_total", **NAMES) <= 3


def test_a_service_tells_the_story_of_a_stream() -> None:
    """`s.story()` tells of a stream from Python: when it joined, its first part, and how many there were in the end."""
    stage = Stage(Resuming, max_batch_size=4, run_in="thread")
    with Service(stage, name="counts", part_slo_s=1e-9).run(journal_size=100) as s:
        with s.predict_stream(5) as parts:
            assert list(parts) == up_to(5)
        assert [entry.event for entry in s.story()] == ["admitted", "runs", "first part", "answered"]
        assert s.story()[-1].detail.startswith("after 5 parts")
        streams = s.stats().streams
    assert streams is not None and (streams.parts, streams.steps, streams.starts) == (5, 5, 1)
    assert streams.goodput == 0.0, "no model is so fast"
    assert streams.ends["complete"] == 1 and 0 < streams.mean_part_s <= streams.mean_longest_gap_s
    assert "streams: first part " in str(s.stats())
