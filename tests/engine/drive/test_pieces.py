"""What is too large for one message, or for the memory there is: each item's answer is its own all the same."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from carpool.engine.drive import process
from carpool.engine.wire import frame as wire
from carpool.engine.wire.payload import Memory
from tests.support import models
from tests.support.output import Output
from tests.support.waiting import wait_until

LIMIT = 100_000


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; the workers have the limit that there is."""
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", LIMIT)


def together(service: Any, items: list[Any]) -> list[Any]:
    """The answers to all items, which share a batch: the worker is busy until all are there."""
    pause = threading.Thread(target=service.predict, args=([0.3],))
    pause.start()
    wait_until(lambda: service.stats().stages[0].running or not pause.is_alive())
    answers = list(service.stream(items, return_exceptions=True))
    pause.join()
    return answers


class Sizes(carpool.Model):
    """Sleeps for a list; answers for bytes with their number."""

    def predict(self, xs: list[Any]) -> list[Any]:
        models.time.sleep(sum(x[0] for x in xs if isinstance(x, list)))
        return [len(x) for x in xs]


@pytest.mark.fault("F81")
@pytest.mark.usefixtures("_small")
def test_a_batch_that_does_not_fit_into_one_message_goes_in_several() -> None:
    """A batch that is too large for one message goes in several: each item that fits by itself is
    answered, one that does not fails alone, and the worker goes on.
    """
    sizes = [40_000, 70_000, 30_000, 120_000, 60_000, 1, 90_000, 130_000]
    with Service(Stage(Sizes, max_batch_size=8), timeout_s=20).run() as service:
        for _ in range(3):
            answers = together(service, [bytes(size) for size in sizes])
            assert [a for a in answers if isinstance(a, int)] == [size for size in sizes if size < LIMIT]
            errors = [a for a in answers if not isinstance(a, int)]
            assert [type(a) for a in errors] == [carpool.ModelError] * 2
            assert {a.code for a in errors} == {"too_large"}
            assert str(errors[0]).startswith("the item cannot be sent to stage Sizes: a message of 1 items")
        assert service.stats().stages[0].restarts == 0


class SmallMessages(carpool.Model):
    """Answers with so many bytes; its own process has the limit."""

    def setup(self) -> None:
        wire.MAX_FRAME_BYTES = LIMIT  # type: ignore[misc]

    def predict(self, xs: list[Any]) -> list[Any]:
        models.time.sleep(sum(x[0] for x in xs if isinstance(x, list)))
        return [b"" if isinstance(x, list) else bytes(x) for x in xs]


@pytest.mark.fault("F81")
@pytest.mark.slow
def test_results_that_do_not_fit_into_one_message_come_in_several() -> None:
    """Results that are too large for one message come in several: each that fits by itself arrives,
    one that does not fails alone, and the worker goes on.
    """
    sizes = [40_000, 70_000, 30_000, 120_000, 60_000, 1, 90_000]
    with Service(Stage(SmallMessages, max_batch_size=8), timeout_s=20).run() as service:
        for _ in range(3):
            answers = together(service, sizes)
            assert [len(a) for a in answers if isinstance(a, bytes)] == [size for size in sizes if size < LIMIT]
            assert isinstance(answers[3], carpool.ModelError)
            assert answers[3].code == "bad_result"
            assert str(answers[3]).startswith("the result cannot be sent: a message of 1 items")
        snapshot = service.stats().stages[0]
        assert (snapshot.restarts, snapshot.running, snapshot.batch_sizes.get(7)) == (0, 0, 3)


class DiesWithTheSecond(Sizes):
    def predict(self, xs: list[Any]) -> list[Any]:
        if any(len(x) == 7 for x in xs):
            models.os._exit(1)
        return super().predict(xs)


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_a_worker_that_dies_between_the_pieces() -> None:
    """If a worker dies between the pieces of a reply, requests that were answered stay so and the
    others are run once more; the new worker is sent nothing that is old.
    """
    sizes = [60_000, 60_000, 7, 60_000, 50]
    with Service(Stage(DiesWithTheSecond, max_batch_size=8), timeout_s=20).run() as service:
        answers = together(service, [bytes(size) for size in sizes])
        assert isinstance(answers[2], carpool.ModelError)
        assert answers[2].code == "request_crashed_worker"
        assert [a for i, a in enumerate(answers) if i != 2] == [60_000, 60_000, 60_000, 50]


@pytest.mark.fault("F81")
def test_kwargs_that_cannot_be_sent_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If `kwargs` are too large to be sent, the start says so and what to do instead; no process is
    left, and nothing else is told.
    """
    monkeypatch.setattr(process, "MAX_FRAME_BYTES", LIMIT)
    stage = Stage(models.scale, name="s", max_batch_size=4, kwargs={"factor": bytes(LIMIT)})
    with pytest.raises(
        carpool.StartupError, match=r"the kwargs of stage s are too large .* load what is there in setup"
    ):
        Service(stage).start()
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.fault("F81")
def test_no_memory_for_a_result_is_nobody_s_crime(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a worker has no memory to send a result its caller is told so; the worker goes on, and so
    does this process.
    """
    buffer = Memory.buffer

    def without(memory: Memory, nbytes: int) -> bytearray:
        if nbytes > 10_000_000:
            raise MemoryError
        return buffer(memory, nbytes)

    monkeypatch.setattr(Memory, "buffer", without)
    with Service(Stage(Huge, max_batch_size=4), timeout_s=20).run() as service:
        for _ in range(3):
            with pytest.raises(carpool.Unavailable) as caught:
                service.predict(20_000_000)
            assert caught.value.code == "out_of_memory"
            assert service.predict(1_000_000) == bytes(1_000_000)
        assert service.stats().stages[0].restarts == 0


class Huge(carpool.Model):
    def predict(self, sizes: list[int]) -> list[bytes]:
        return [bytes(size) for size in sizes]


@pytest.mark.slow
def test_a_sink_that_raises_does_not_hold_up_the_end_of_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    """The half line of a worker that dies goes to its sink in the midst of burying that worker; if
    the sink raises then, its successor answers all the same.
    """
    output = Output()

    def sink(worker: str, is_error: bool, line: str) -> None:
        output(worker, is_error, line)
        raise ValueError("a bug in my sink")

    stage = Stage(models.LastWords, name="m", max_batch_size=8, idempotent=False)
    with Service(stage, timeout_s=20).run(output=sink) as service:
        for _ in range(2):
            with pytest.raises(carpool.Unavailable):
                service.predict("die")
            assert service.predict(2) == 2
    assert output.texts.count("last words") == 2
    told = [record.message for record in caplog.records if "output= raised ValueError" in record.message]
    assert len(told) == 1
    assert "a bug in my sink" in told[0]


@pytest.mark.parametrize("run_in", ["process", "thread"])
def test_a_model_that_replaces_the_clock_harms_nobody(run_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that replaces the clock makes nothing expire and loses no worker: carpool took the
    clock when it was imported.
    """
    monkeypatch.setattr(models.time, "monotonic", models.time.monotonic)  # put back afterwards
    with Service(Stage(models.StopsTheClock, run_in=run_in, max_batch_size=4), timeout_s=20).run() as service:
        assert list(service.stream(range(20))) == list(range(20))
        assert service.stats().stages[0].restarts == 0
