"""At the addresses of protocols errors and lines of the log name the model that was asked."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

import carpool
from carpool.testing import served
from tests.support.waiting import PATIENCE_S

_TENSOR = {"name": "input", "datatype": "FP64", "shape": [1], "data": [1.0]}
WAYS: dict[str, tuple[str, Any]] = {
    "its own address": ("/models/second/predict", 1.0),
    "its list": ("/models/second/predict/many", [1.0]),
    "V1": ("/v1/models/second:predict", {"instances": [1.0]}),
    "OIP": ("/v2/models/second/infer", {"inputs": [_TENSOR]}),
    "OpenAI, where the body names the model": ("/v1/embeddings", {"model": "second", "input": "a"}),
}


def first(xs: list[Any]) -> list[Any]:
    return xs


def second(xs: list[Any]) -> list[Any]:
    raise ValueError("boom")


@pytest.mark.parametrize("way", WAYS)
def test_what_fails_is_said_of_the_model_that_was_asked(caplog: pytest.LogCaptureFixture, way: str) -> None:
    """The log of errors and the access log name the model that failed, and never the first one."""
    path, body = WAYS[way]
    stages = [carpool.Stage(each, max_batch_size=8, run_in="thread") for each in (first, second)]
    caplog.set_level(logging.INFO, logger="carpool")
    with served(*map(carpool.Service, stages), access_log=1.0) as client:
        answer = httpx.post(client.url + path, json=body, timeout=PATIENCE_S)
    told = [record for record in caplog.records if hasattr(record, "request_id")]
    assert "boom" in caplog.text, answer.text
    assert {record.model for record in told} == {"second"}  # type: ignore[attr-defined]
    assert len(told) == 2


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions"])
def test_what_names_no_model_is_said_of_none(caplog: pytest.LogCaptureFixture, path: str) -> None:
    """A request whose body could not be read is not said to have asked the first model."""
    stages = [carpool.Stage(each, max_batch_size=8, run_in="thread") for each in (first, second)]
    caplog.set_level(logging.INFO, logger="carpool")
    with served(*map(carpool.Service, stages), access_log=1.0) as client:
        answer = httpx.post(client.url + path, content=b"{", timeout=PATIENCE_S)
        refused = httpx.get(f"{client.url}/metrics").text
    assert answer.status_code in (400, 404, 415), answer.text
    assert [record.model for record in caplog.records if getattr(record, "path", "") == path] == [None]  # type: ignore[attr-defined]
    counts = [line for line in refused.splitlines() if line.startswith("carpool_requests_total") and "refused" in line]
    assert all(line.endswith((" 0.0", " 0")) for line in counts), counts
