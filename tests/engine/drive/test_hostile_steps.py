"""Workers of steps that break the protocol: ended, replaced and counted; their streams go on, part for part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from carpool import ModelError, Service, Stage
from tests.effort import slow_where
from tests.engine.drive.hostile_steps import ATTACKS, COLLECTED, ENDS_EARLY, FAILS, TRUNCATED, HostileSteps, N
from tests.support.parts import up_to
from tests.support.waiting import wait_until

QUICK = ("zeros", "a stream that it never had", "a stream twice", "an order from the future")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One worker, which is replaced after each attack."""
    stage = Stage(HostileSteps, max_batch_size=4, kwargs={"diary": str(tmp_path_factory.mktemp("diary"))})
    with Service(stage, timeout_s=30).run() as service:
        yield service


def counts(service: Any) -> tuple[int, int]:
    stage = service.stats().stages[0]
    return stage.restarts, stage.protocol_errors


@slow_where(lambda name: name not in QUICK)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_worker_of_steps_that_breaks_the_protocol_is_replaced(
    service: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that sends what it must not is replaced and counted; its stream goes on without a
    part that is missing, double or wrong, and so does the next one.
    """
    restarts, errors = counts(service)
    if name == COLLECTED:
        assert service.predict(name) == up_to(N)
    elif name in FAILS:
        with service.predict_stream(name) as parts, pytest.raises(ModelError, match="could not be read"):
            list(parts)
    else:
        with service.predict_stream(name) as parts:
            assert list(parts) == up_to(4 if name in ENDS_EARLY else N)
    assert service.predict("next") == up_to(N)
    wait_until(lambda: counts(service) == (restarts + 1, errors + 1))
    assert service.predict("and the next") == up_to(N)
    assert [record.name for record in caplog.records if record.name != "carpool"] == []  # no exception in a callback


@pytest.mark.slow
def test_a_worker_of_steps_that_ends_in_the_midst_of_a_report_has_crashed(service: Any) -> None:
    """Half a report counts for nothing, and is no offence: its worker has crashed."""
    restarts, errors = counts(service)
    with service.predict_stream(TRUNCATED) as parts:
        assert list(parts) == up_to(N)
    assert counts(service) == (restarts + 1, errors)
