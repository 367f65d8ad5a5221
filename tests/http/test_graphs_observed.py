"""Requests that go through branches, as the log, `Server-Timing` and traces show them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from carpool import ForEach, Parallel, Route, Service, Stage
from carpool.http.app import App
from tests.support import spans
from tests.support.http.front import post
from tests.support.http.net import Client, RunningServer, serving
from tests.support.waiting import wait_until

PLACES = ["left/shared", "right/shared", "right/more", "lead", "each/shared", "last/shared"]


def plus(x: int) -> int:
    return x + 1


def lead(sides: dict[str, int]) -> list[int]:
    return [*sides.values(), 7]


def always_last(xs: list[int]) -> str:
    return "last"


def as_they_are(xs: Any) -> Any:
    return xs


def a_service() -> Service:
    shared = Stage(as_they_are, run_in="thread", name="shared", max_batch_size=8)
    return Service(
        Parallel({"left": shared, "right": [shared, Stage(plus, run_in="thread", name="more")]}),
        Stage(lead, run_in="thread", name="lead"),
        ForEach(shared),
        Route({"last": shared, "never": Stage(as_they_are, run_in="thread", name="never")}, choose=always_last),
        name="branchy",
    )


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[RunningServer, Any]]:
    """A server with all that observes, and where its spans go."""
    exporter = spans.exporter()
    with serving(App(a_service(), trace=True, server_timing=True, access_log=True)) as running:
        yield running, exporter


def test_each_branch_is_a_span(traced: tuple[RunningServer, Any]) -> None:
    """Each branch in which a request was has one span within that of the request, also a list of
    several items; a branch that it did not take has none.
    """
    running, exporter = traced
    exporter.clear()
    with Client(running.port) as client:
        assert client.ask(post(b"5")).body == b"[5,6,7]"

    def found(prefix: str) -> list[Any]:
        return [span for span in exporter.get_finished_spans() if span.name.startswith(prefix)]

    wait_until(lambda: found("POST"))
    (whole,) = found("POST")
    branches = {span.name: span for span in found("branch")}
    assert list(branches) == ["branch left", "branch right", "branch each", "branch last"]
    for span in branches.values():
        assert span.context.trace_id == whole.context.trace_id
        assert span.parent.span_id == whole.context.span_id
        assert whole.start_time <= span.start_time <= span.end_time
    assert branches["branch right"].attributes["carpool.places"] == ("right/shared", "right/more")
    assert branches["branch each"].start_time >= max(branches[f"branch {side}"].end_time for side in ("left", "right"))
    for batch in found("batch"):
        assert [link.context.span_id for link in batch.links] == [whole.context.span_id]


def test_each_place_has_its_times(traced: tuple[RunningServer, Any]) -> None:
    """`Server-Timing` has the time of each place once, also of a list, and how many items it had."""
    running, _ = traced
    with Client(running.port) as client:
        header = client.ask(post(b"5")).headers["server-timing"]
    assert re.findall(r'queue;dur=[\d.]+;desc="([^"]+)"', header) == PLACES
    assert re.findall(r'items;desc="(\d+)"', header) == ["3"]
    times = [float(each) for each in re.findall(r"dur=([\d.]+)", header)]
    assert max(times) == times[-1]


def test_the_log_has_each_place(traced: tuple[RunningServer, Any], caplog: pytest.LogCaptureFixture) -> None:
    """A line of the access log has the places where its request was, each once."""
    running, _ = traced
    with caplog.at_level(logging.INFO, "carpool.access"), Client(running.port) as client:
        client.ask(post(b"5"))
        wait_until(lambda: bool(caplog.records))
    stages: list[dict[str, Any]] = caplog.records[-1].stages  # type: ignore[attr-defined]
    assert [each["stage"] for each in stages] == PLACES
    assert [each.get("items", 1) for each in stages] == [1, 1, 1, 1, 3, 1]
