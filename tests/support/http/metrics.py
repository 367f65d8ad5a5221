"""What a scraper of `/metrics` finds."""

from __future__ import annotations

import prometheus_client.openmetrics.parser
import prometheus_client.parser
from prometheus_client.metrics_core import Metric

from tests.support.http.front import get
from tests.support.http.net import Client, RunningServer


def scrape(running: RunningServer, accept: str = "") -> dict[str, Metric]:
    """All metrics by name."""
    with Client(running.port) as client:
        answer = client.ask(get("/metrics", *([f"Accept: {accept}"] if accept else [])))
    assert answer.status == 200
    return parse(answer.body, answer.headers["content-type"])


def parse(body: bytes, content_type: str) -> dict[str, Metric]:
    """Read metrics as a strict scraper does."""
    parser = prometheus_client.openmetrics.parser if "openmetrics" in content_type else prometheus_client.parser
    return {metric.name: metric for metric in parser.text_string_to_metric_families(body.decode())}


def value(metrics: dict[str, Metric], name: str, sample: str = "", **labels: str) -> float:
    """The sum of the samples with these labels."""
    wanted = name + sample
    return sum(s.value for s in metrics[name].samples if s.name == wanted and labels.items() <= s.labels.items())
