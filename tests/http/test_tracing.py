"""Spans for OpenTelemetry: one for each request, and one for each batch with links to its members."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from carpool.http.app import App
from tests.support import spans
from tests.support.http import models
from tests.support.http.front import post
from tests.support.http.net import Client, RunningServer, serving
from tests.support.waiting import wait_until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[RunningServer, Any]]:
    """A server in a program that has set up OpenTelemetry, and where its spans go."""
    exporter = spans.exporter()
    with serving(App(models.scale, trace=True)) as running:
        yield running, exporter


def spans_of(exporter: Any, requests: int) -> tuple[list[Any], list[Any]]:
    """The spans of requests, and those of batches, once all are there."""

    def found(prefix: str) -> list[Any]:
        return [span for span in exporter.get_finished_spans() if span.name.startswith(prefix)]

    wait_until(lambda: len(found("POST")) >= requests and found("batch"))
    return found("POST"), found("batch")


def test_a_request_is_a_span_in_the_trace_of_its_client(traced: tuple[RunningServer, Any]) -> None:
    """The span is a child of the one that the client names, and the answer names it; it has the status and the id."""
    running, exporter = traced
    exporter.clear()
    with Client(running.port) as client:
        line = f"traceparent: 00-{TRACE}-00f067aa0ba902b7-01"
        answer = client.ask(post(b"21", "/predict", line, "X-Request-Id: mine"))
    (span,), (batch,) = spans_of(exporter, 1)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert answer.headers["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["carpool.request_id"] == "mine"
    assert [link.context.span_id for link in batch.links] == [span.context.span_id]
    assert span.start_time <= batch.start_time <= batch.end_time <= span.end_time


def test_a_batch_is_linked_to_all_its_members(traced: tuple[RunningServer, Any]) -> None:
    """Every request is linked from exactly one batch, however the batches were formed."""
    running, exporter = traced
    exporter.clear()

    def ask_often() -> None:
        with Client(running.port) as client:
            for x in range(20):
                assert client.ask(post(str(x).encode())).status == 200

    threads = [threading.Thread(target=ask_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    requests, _ = spans_of(exporter, 160)
    wait_until(lambda: sum(len(span.links) for span in spans_of(exporter, 160)[1]) == 160)
    _, batches = spans_of(exporter, 160)
    linked = [link.context.span_id for batch in batches for link in batch.links]
    assert sorted(linked) == sorted(span.context.span_id for span in requests)
    assert all(len(batch.links) == batch.attributes["carpool.batch.size"] for batch in batches)
    assert all(re.fullmatch(r"batch \w+", batch.name) for batch in batches)
