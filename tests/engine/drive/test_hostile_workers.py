"""Workers that break the protocol: ended, replaced and counted; what they held is run again, and nothing is shifted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from carpool import Service, Stage
from carpool.engine.observe import prometheus
from tests.effort import slow_where
from tests.engine.drive.hostile import ATTACKS, TRUNCATED, Hostile
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One worker, which is replaced after each attack."""
    stage = Stage(Hostile, kwargs={"diary": str(tmp_path_factory.mktemp("diary"))})
    with Service(stage, timeout_s=60).run() as service:
        yield service


def counts(service: Any) -> tuple[int, int]:
    stage = service.stats().stages[0]
    return stage.restarts, stage.protocol_errors


QUICK = (
    *("zeros", "a length beyond measure", "a request twice in one", "nothing", "an unknown outcome"),
    *("a block that is too short", "what only the parent says", "trouble of other items", "the reply twice"),
    "megabytes that nobody asked for",
)
"""One of each sort, for the quick run: each attack costs a worker, which takes time to start."""


@pytest.mark.fault("F49", "F50", "F51")
@slow_where(lambda name: name not in QUICK)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_worker_that_breaks_the_protocol_is_replaced(
    service: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that breaks the protocol is replaced and counted: its request is answered right, at
    once or by the successor, and so is the next one.
    """
    restarts, errors = counts(service)
    with caplog.at_level(logging.ERROR):
        assert service.predict(name) == name
        assert service.predict("next") == "next"
        wait_until(lambda: counts(service) == (restarts + 1, errors + 1))
        assert service.predict("and the next") == "and the next"

    assert [record.name for record in caplog.records if record.name != "carpool"] == []  # no exception in a callback
    (line,) = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    assert "it was killed for what it sent: " in line
    assert service.stats().stages[0].safe_batch_size is None


@pytest.mark.fault("F4")
def test_a_worker_that_ends_in_the_midst_of_a_reply_has_crashed(service: Any) -> None:
    """A worker that ends in the midst of a reply has crashed, which is no offence against the
    protocol; half an answer counts for nothing.
    """
    restarts, errors = counts(service)

    assert service.predict(TRUNCATED) == TRUNCATED
    assert counts(service) == (restarts + 1, errors)


def test_offences_are_a_metric(service: Any) -> None:
    """Offences against the protocol are counted per stage."""
    text = prometheus.render([service._inner.running_driver.stats], 0.0)[0].decode()
    assert f'carpool_protocol_errors_total{{model="Hostile",stage="Hostile"}} {counts(service)[1]}.0' in text
