"""/metrics: numbers that add up, in both of Prometheus' formats, with labels that no client can choose."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric

from carpool import Service, Stage
from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.levels import BY_LENGTH
from carpool.engine.core.queue import Queue
from carpool.engine.observe.prometheus import render
from carpool.engine.observe.refusals import OUTCOMES, outcome_of
from carpool.engine.observe.snapshot import DURATION_BOUNDS, Durations
from carpool.engine.observe.stats import REASONS, Stats
from carpool.engine.policy import Greedy
from carpool.errors import OVERLOAD_REASONS, CarpoolError, InvalidRequest
from carpool.http.app import App
from carpool.http.codec import Refusal
from tests.effort import slow_where
from tests.support.http import models
from tests.support.http.front import Front, chunked, get, post
from tests.support.http.jobs import job
from tests.support.http.jump import on_a_jumping_loop, turns
from tests.support.http.metrics import parse, scrape, value
from tests.support.http.net import Client, Gate, RunningServer, predict, serving, waiting
from tests.support.pipelines import ask

OPEN = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def busy() -> Iterator[RunningServer]:
    """A server that has had one request of each outcome, and a few good ones."""
    gated = Service(Stage(models.Gated, max_batch_size=1, max_queue_size=1), name="gated", slo_s=10.0)
    with serving(App(gated, models.moody, max_body_bytes=1000)) as running, Gate() as gate:
        for n in range(5):
            assert predict(running.port, {"value": n}).status == 200
        with Client(running.port) as first, Client(running.port) as second, Client(running.port) as third:
            first.send(job(0, gate, path="/predict"))
            gate.knocked()
            gone = Client(running.port)
            gone.send(job(1, path="/predict"))
            running.wait_until(lambda: waiting(running.app) == 1)
            gone.reset()
            running.wait_until(lambda: waiting(running.app) == 0)
            assert second.ask(job(2, None, "X-Request-Timeout-Ms: 200", path="/predict")).status == 504
            second.send(job(3, path="/predict"))
            running.wait_until(lambda: waiting(running.app) == 1)
            assert third.ask(job(4, path="/predict")).status == 429
            gate.open()
            assert [first.answer().status, second.answer().status] == [200, 200]
        for body, status in ((b"{", 400), (b"{}", 422), (b"x" * 1001, 413)):
            with Client(running.port) as client:
                assert client.ask(post(body)).status == status
        with Client(running.port) as client:
            assert client.ask(chunked(b"x" * 1001)).status == 413
        with Client(running.port) as client:
            assert client.ask(post(b"1", "/predict", "Content-Type: image/png")).status == 415
        assert predict(running.port, "raise", "/models/moody/predict").status == 500
        yield running


@slow_where(lambda accept: accept not in ("", OPEN))
@pytest.mark.parametrize("accept", ["", OPEN, "text/plain;version=0.0.4", "*/*"])
def test_outcomes_add_up(busy: RunningServer, accept: str) -> None:
    """Every request is counted once, under its outcome."""
    metrics = scrape(busy, accept)
    counted = {
        outcome: value(metrics, "carpool_requests", "_total", model="gated", outcome=outcome)
        for outcome in (*OUTCOMES, "cancelled")
    }
    assert counted == {
        "ok": 7,
        "invalid_request": 4,
        "invalid_item": 1,
        "overloaded": 1,
        "expired": 1,
        "unavailable": 0,
        "model_error": 0,
        "cancelled": 1,
    }
    refused = {reason: value(metrics, "carpool_overloads", "_total", reason=reason) for reason in OVERLOAD_REASONS}
    assert refused == {**dict.fromkeys(OVERLOAD_REASONS, 0), "queue_full": 1}
    assert value(metrics, "carpool_requests", "_total", model="moody", outcome="model_error") == 1
    assert value(metrics, "carpool_requests", "_total") == 16


def test_numbers_agree(busy: RunningServer) -> None:
    """Histograms have as many entries as there were things to count, and gauges are back at zero in
    the end.
    """
    metrics = scrape(busy)
    gated = {"model": "gated", "stage": "Gated"}
    run_by_worker = 7 + 1 + 1  # good, unreadable and unfit; the others never got there
    assert value(metrics, "carpool_request_duration_seconds", "_count", model="gated") == 7
    assert value(metrics, "carpool_requests_within_slo", "_total", model="gated") == 7
    assert value(metrics, "carpool_queue_duration_seconds", "_count", **gated) == run_by_worker
    assert value(metrics, "carpool_batch_size", "_sum", **gated) == run_by_worker
    assert value(metrics, "carpool_batch_size", "_count", **gated) == run_by_worker
    assert value(metrics, "carpool_batches", "_total", **gated) == run_by_worker
    assert value(metrics, "carpool_batch_duration_seconds", "_count", **gated) == run_by_worker
    assert value(metrics, "carpool_workers", **gated, state="ready") == 1
    assert value(metrics, "carpool_workers", **gated) == 1
    for gauge in (
        "carpool_in_flight_requests",
        "carpool_queue_length",
        "carpool_queue_bytes",
        "carpool_in_flight_batches",
    ):
        assert value(metrics, gauge) == 0, gauge
    for name, metric in metrics.items():
        if metric.type == "histogram":
            for labels in {tuple(sorted((k, v) for k, v in s.labels.items() if k != "le")) for s in metric.samples}:
                series = [s for s in metric.samples if dict(labels).items() <= s.labels.items()]
                buckets = [s.value for s in series if s.name == f"{name}_bucket"]
                assert buckets == sorted(buckets)
                assert buckets[-1] == next(s.value for s in series if s.name == f"{name}_count")


def test_a_queue_can_be_seen(gate: Gate) -> None:
    """While requests wait, their number and bytes and what is in flight can be seen."""
    with serving(App(models.gated)) as running, Client(running.port) as first, Client(running.port) as second:
        first.send(job(0, gate, path="/predict"))
        gate.knocked()
        second.send(job(1, path="/predict") * 3)
        running.wait_until(lambda: waiting(running.app) == 3)
        metrics = scrape(running)
        assert value(metrics, "carpool_in_flight_requests") == 4
        assert value(metrics, "carpool_queue_length") == 3
        assert value(metrics, "carpool_queue_bytes") == 3 * len(json.dumps({"value": 1, "gate": ""}))
        assert value(metrics, "carpool_in_flight_batches") == 1
        gate.open()
        assert first.answer().status == 200
        assert [second.answer().status for _ in range(3)] == [200] * 3
        assert value(scrape(running), "carpool_batch_size", "_sum") == 4


def series(metrics: dict[str, Metric]) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Every name with its labels."""
    return {(s.name, tuple(sorted(s.labels.items()))) for metric in metrics.values() for s in metric.samples}


@on_a_jumping_loop
async def test_no_client_can_make_series() -> None:
    """Random addresses, methods, priorities, types and ids make no series beyond those that there
    are from the first answer on.
    """
    dice = random.Random(7)

    def word() -> str:
        return "".join(dice.choices(string.ascii_letters, k=8))

    front = Front()

    async def now() -> dict[str, Metric]:
        wire = front.connect()
        wire.send(get("/metrics"))
        await turns()
        (answer,) = wire.answers()
        return parse(answer.body, answer.headers["content-type"])

    before = await now()
    for _ in range(200):
        for request in (
            get(f"/{word()}", method=dice.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])),
            get(f"/models/{word()}/predict"),
            get("/predict").replace(b"GET", word().upper().encode()),
            post(word().encode(), "/predict", f"X-Request-Priority: {dice.randint(-200, 200)}"),
            post(b"1", "/predict", f"Content-Type: {word()}/{word()}", f"Accept: {word()}/{word()}"),
            post(b"1", "/predict", f"X-Request-Id: {word()}", f"X-Request-Timeout-Ms: {dice.randint(-5, 500)}"),
            post(b"raise", f"/predict?{word()}"),
        ):
            wire = front.connect()
            wire.send(request)
            await turns(4)
            wire.reset()
    after = await now()
    assert series(after) == series(before)
    assert value(after, "carpool_requests", "_total", outcome="ok") > 0


def test_labels_are_closed_sets(busy: RunningServer) -> None:
    """Models and stages are labelled as they are declared, and outcomes, reasons and states are
    from fixed lists.
    """
    allowed = {
        "model": {"gated", "moody"},
        "stage": {"Gated", "Moody"},
        "outcome": {*OUTCOMES, "cancelled"},
        "reason": {*REASONS, *OVERLOAD_REASONS},
        "policy": {"greedy", "adaptive"},
        "rule": {"", *REASONS},
        "n": {"1", "max"},
        "state": {"starting", "loading", "warming", "ready", "draining", "hung", "dead"},
    }
    for metric in scrape(busy).values():
        for sample in metric.samples:
            for name, label in sample.labels.items():
                assert name == "le" or label in allowed[name]


def test_what_a_policy_explains_is_exported() -> None:
    """What a policy explains is exported as numbers that mean the same for every policy, with the
    smallest and the largest of the learned costs.
    """

    class Wise(Greedy):
        def explain(self, now: float) -> dict[str, Any]:
            return {
                "policy": "wise",
                "rule": "size",
                "hop_s": 0.25,
                "cost_s": {1: 0.5, 16: 2.0, 64: 4.0},
                "arrival_rate": 120.0,
                "expected_batch_size": 17,
                "mood": "good",
            }

    core = Core([Batcher("one", Wise(64), Queue()), Batcher("two", Greedy(8), Queue())])
    stats = Stats("both", core, [None, None], [False, False])
    metrics = parse(*render([stats], 0.0))

    assert {s.labels["n"]: s.value for s in metrics["carpool_policy_batch_cost_seconds"].samples} == {
        "1": 0.5,
        "max": 4.0,
    }
    assert [
        (s.name, s.labels.get("stage"), s.value)
        for name in ("hop_seconds", "arrival_rate", "expected_batch_size")
        for s in metrics[f"carpool_policy_{name}"].samples
    ] == [
        ("carpool_policy_hop_seconds", "one", 0.25),
        ("carpool_policy_hop_seconds", "two", 0.0),
        ("carpool_policy_arrival_rate", "one", 120.0),
        ("carpool_policy_expected_batch_size", "one", 17.0),
    ]
    assert value(metrics, "carpool_policy_info", stage="one", policy="wise", rule="size") == 1
    assert value(metrics, "carpool_policy_info", stage="two", policy="greedy", rule="") == 1
    assert stats.snapshot(0.0).stages[0].policy["mood"] == "good"


def test_a_change_of_rule_is_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """A change of the policy's rule is reported at most every ten seconds, and only to those who
    ask for it.
    """
    core = Core([Batcher("one", Greedy(64), Queue())])
    stats = Stats("both", core, [None], [False]).stages[0]

    def batch(now: float, reason: str) -> Batch:
        return Batch(1, 0, 0, [ask("x", 100.0)], 1, reason, now)

    with caplog.at_level("INFO", logger="carpool"):
        stats.started(batch(0, "free"))
    with caplog.at_level("DEBUG", logger="carpool"):
        for now, reason in ((1, "free"), (2, "full"), (3, "free"), (11, "full"), (12, "full"), (13, "free")):
            stats.started(batch(now, reason))

    told = "{'policy': 'greedy', 'max_batch_size': 64, 'hop_s': 0.0}"
    assert [record.getMessage() for record in caplog.records] == [
        f"stage one: a batch of 1 goes (full); {told}",
        f"stage one: a batch of 1 goes (free); {told}",
    ]


def test_padding_is_counted() -> None:
    """What padding adds to batches is shown as a number and as a share."""
    policy = Greedy(8)
    policy.allowed_batch_sizes = [4, 8]
    stats = Stats("padded", Core([Batcher("one", policy, Queue())]), [None], [False])
    for n in (1, 4, 5):
        stats.stages[0].started(Batch(1, 0, 0, [ask("x", 100.0) for _ in range(n)], n, "free", 0))

    assert value(parse(*render([stats], 0.0)), "carpool_padding", "_total", stage="one") == 3 + 0 + 3
    assert stats.snapshot(0.0).stages[0].padding_share == 6 / 16


@pytest.mark.parametrize(("allowed", "positions"), [(None, 3 * 20 + 100), ([32, 64], 3 * 32 + 64)])
def test_padding_by_length_is_counted(allowed: list[int] | None, positions: int) -> None:
    """What padding adds to the lengths of items is shown as a number and as a share; what is longer
    than the last allowed length is cut off to it.
    """
    policy = Greedy(8)
    policy.allowed_lengths = allowed
    stats = Stats("padded", Core([Batcher("one", policy, Queue(levels=BY_LENGTH))]), [None], [False])
    for lengths in ([5, 20, 10], [100]):
        requests = [ask("x", 100.0) for _ in lengths]
        for request, length in zip(requests, lengths, strict=True):
            request.length = length
        stats.stages[0].started(Batch(1, 0, 0, requests, len(lengths), "length", 0, longest=max(lengths)))

    computed = 35 + (100 if allowed is None else 64)
    shown = parse(*render([stats], 0.0))
    assert value(shown, "carpool_positions", "_total", stage="one") == positions
    assert value(shown, "carpool_length_padding", "_total", stage="one") == positions - computed
    assert stats.snapshot(0.0).stages[0].length_padding_share == (positions - computed) / positions


def test_head(server: RunningServer) -> None:
    """HEAD of `/metrics` has the headers of a GET and no body."""
    with Client(server.port) as client:
        answer = client.ask(get("/metrics", method="HEAD"), "HEAD")
        assert (answer.status, answer.body) == (200, b"")
        assert client.ask(get()).status == 200


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequest("x", status=413), "invalid_request"),
        (Refusal(408, "request_timeout"), "invalid_request"),
        (Refusal(503, "too_many_connections"), "unavailable"),
        (CarpoolError("x"), "unavailable"),
        (RuntimeError("x"), "model_error"),
    ],
)
def test_outcome_of_an_error(error: Exception, outcome: str) -> None:
    """Every exception is counted under one outcome, also one that is not of carpool."""
    assert outcome_of(error) == outcome


def test_durations() -> None:
    """A duration is counted in the first bucket whose bound is not below it."""
    for i, bound in enumerate(DURATION_BOUNDS):
        durations = Durations()
        durations.add(bound * 0.99)
        assert durations.counts.index(1) == i
    durations = Durations()
    durations.add(1e6, 3)
    assert durations.counts[-1] == 3
    durations.add_since(10.0, [9.0, 9.0, 8.0])
    assert durations.count == 6
    assert durations.sum_s == pytest.approx(3e6 + 4.0)
    assert Durations().mean_s == 0.0
