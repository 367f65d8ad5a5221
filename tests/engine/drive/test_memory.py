"""Models that cannot take a full batch: no caller notices, batches become smaller, and it can be seen."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from carpool.engine.call import retry
from carpool.engine.observe import prometheus
from carpool.engine.observe.snapshot import StageSnapshot
from tests.support import models


def sizes_since(before: StageSnapshot, after: StageSnapshot) -> list[int]:
    """The sizes of the batches that were sent in between."""
    return [n for n, count in after.batch_sizes.items() if count > before.batch_sizes.get(n, 0)]


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    "stage",
    [
        Stage(models.Narrow, max_batch_size=64, policy="greedy", workers=2),
        Stage(models.Narrow, max_batch_size=64, policy="greedy", run_in="thread"),
        Stage(models.NarrowAsync, max_batch_size=64, policy="greedy", run_in="loop"),
        Stage(models.Narrow, max_batch_size=64, policy="greedy", isolate_errors=False),
        Stage(
            models.Narrow, max_batch_size=64, policy="greedy", kwargs={"full": models.MemoryFull},
            oom_errors=["tests.support.models.MemoryFull"],
        ),
    ],
    ids=["processes", "thread", "loop", "without isolation", "an error of its own"],
)  # fmt: skip
def test_a_model_that_takes_12_of_64(stage: Stage) -> None:
    """When twelve of 64 items fit into memory every answer is right, every batch fits after three
    failures, and `stats()` and the metrics tell.
    """
    with Service(stage).run() as service:
        answers = list(service.stream(range(1200), max_in_flight=200))
        learned = service.stats().stages[0]
        more = list(service.stream(range(1000), max_in_flight=200))
        after = service.stats().stages[0]
        text = prometheus.render([service._inner.running_driver.stats], 0.0)[0].decode()

    assert [x for x, _ in answers] == [*range(1200)]
    assert [x for x, _ in more] == [*range(1000)]
    assert max(n for _, n in answers + more) <= 12
    # each worker may have had a full batch at first, and another one behind it
    assert learned.out_of_memory <= 3 + (2 * stage.workers - 1)
    assert after.out_of_memory == learned.out_of_memory
    assert max(sizes_since(learned, after)) <= 12
    assert after.safe_batch_size == 12
    assert after.restarts == 0
    assert 'carpool_safe_batch_size{model="%s",stage="%s"} 12.0' % ((stage.name,) * 2) in text
    assert f'carpool_out_of_memory_total{{model="{stage.name}",stage="{stage.name}"}} {after.out_of_memory}.0' in text


def test_what_fits_is_measured_by_size() -> None:
    """Where the stage counts rows, it is rows of which so many fit."""
    items = ["x" * (1 + i % 10) for i in range(2000)]
    with Service(Stage(models.NarrowRows, max_batch_size=1000, size=len, policy="greedy")).run() as service:
        answers = list(service.stream(items, max_in_flight=500))
        snapshot = service.stats().stages[0]

    assert max(answers) <= 100
    assert 80 <= (snapshot.safe_batch_size or 0) <= 100
    assert snapshot.out_of_memory <= 6


def test_a_warm_up_that_runs_out_of_memory_limits_the_first_batch() -> None:
    """A warm-up that runs out of memory limits the first batch, so that nobody's request is in the
    first failure.
    """

    class Warm(models.Narrow):
        examples = (1, 2)

    with Service(Stage(Warm, max_batch_size=64, policy="greedy", run_in="thread")).run() as service:
        before = service.stats().stages[0]
        assert before.safe_batch_size == 8
        assert before.out_of_memory > 0
        list(service.stream(range(30), max_in_flight=30))
        assert max(service.stats().stages[0].batch_sizes) <= 8


def test_what_must_not_run_twice_fails_once_and_goes_in_smaller_batches() -> None:
    """With `idempotent=False` a batch that is too large fails with the model's error, and the next
    ones are smaller.
    """
    stage = Stage(models.Narrow, max_batch_size=64, policy="greedy", idempotent=False)
    with Service(stage).run() as service:
        answers = list(service.stream(range(1000), max_in_flight=64, return_exceptions=True))
        snapshot = service.stats().stages[0]

    failed = [answer for answer in answers if isinstance(answer, Exception)]
    assert {type(error) for error in failed} == {carpool.ModelError}
    assert {error.type_name for error in failed} == {"MemoryError"}
    assert len(failed) <= 64 + 32 + 16 + 14 + 13
    assert snapshot.safe_batch_size in range(8, 13)


def test_oom_errors_none_makes_it_an_error_like_any_other() -> None:
    """With `oom_errors` turned off, a MemoryError is an error like any other and limits nothing."""
    how: dict[str, Any] = {"oom_errors": None, "isolate_errors": False}
    stage = Stage(models.Narrow, max_batch_size=64, policy="greedy", run_in="thread", **how)
    with Service(stage).run() as service:
        service.predict(1)
        answers = list(service.stream(range(100), max_in_flight=100, return_exceptions=True))
        snapshot = service.stats().stages[0]

    assert any(isinstance(answer, carpool.ModelError) for answer in answers)
    assert snapshot.safe_batch_size is None
    assert snapshot.out_of_memory == 0


# -- @carpool.batch


class Calls:
    """A function that takes 12 at most."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, xs: list[int]) -> list[int]:
        self.sizes.append(len(xs))
        if len(xs) > 12:
            raise MemoryError
        return [10 * x for x in xs]


def check_learned(sizes: list[int], rounds: int) -> None:
    """Three failures at most, as few calls as they take, and nothing that does not fit after them."""
    too_large = [i for i, n in enumerate(sizes) if n > 12]
    assert sum(n > 12 for n in sizes) <= 5  # three in the first batch
    assert too_large[-1] < len(sizes) / 2
    assert sum(n for n in sizes if n <= 12) == rounds * 64


def test_calls_that_share_a_function_in_threads(caplog: pytest.LogCaptureFixture) -> None:
    """No caller of a function in threads sees that a batch was too large; the log says what
    happened.
    """
    calls = Calls()
    batched = carpool.batch(max_batch_size=64, policy="greedy")(calls)
    with caplog.at_level(logging.WARNING, logger="carpool"):
        for _ in range(10):
            assert batched.many(range(64)) == [10 * x for x in range(64)]

    check_learned(calls.sizes, 10)
    assert "ran out of memory: its batches hold at most 8" in caplog.text
    assert len(caplog.records) == 1


def test_several_threads_share_what_they_have_learned() -> None:
    """Batches of several threads, each with calls of its own, share what was learned of how much
    fits.
    """
    calls = Calls()
    batched = carpool.batch(max_batch_size=64, max_in_flight_batches=2)(calls)
    wrong: list[int] = []

    def caller() -> None:
        for x in range(50):
            if batched(x) != 10 * x:
                wrong.append(x)

    threads = [threading.Thread(target=caller) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert wrong == []


def test_calls_that_share_an_async_function() -> None:
    """No caller of an `async` function sees that a batch was too large, and the next ones are
    smaller.
    """
    calls = Calls()

    @carpool.batch(max_batch_size=64, policy="greedy")
    async def batched(xs: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return calls(xs)

    async def main() -> None:
        for _ in range(10):
            assert await asyncio.gather(*[batched(x) for x in range(64)]) == [10 * x for x in range(64)]

    asyncio.run(main())
    check_learned(calls.sizes, 10)


def test_listed_errors_of_a_batched_function() -> None:
    """A batched function runs batches in smaller calls after the errors that `oom_errors` lists,
    and with none listed after no error; what is no exception class is refused.
    """

    def full(xs: list[int]) -> list[int]:
        if len(xs) > 2:
            raise models.MemoryFull
        return xs

    settings: dict[str, Any] = {"max_batch_size": 8, "policy": "greedy", "isolate_errors": False}
    assert carpool.batch(**settings, oom_errors=(models.MemoryFull,))(full).many(range(8)) == [*range(8)]
    for oom_errors in ((), None):
        with pytest.raises(models.MemoryFull):
            carpool.batch(**settings, oom_errors=oom_errors)(full).many(range(8))
    with pytest.raises(TypeError, match="oom_errors"):
        carpool.batch(oom_errors=("Full",))(full)


def test_a_method_keeps_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """All instances share one budget for running batches of a method again, although each call of
    the method makes a new bound one.
    """
    monkeypatch.setattr(retry, "MOST_RERUN_S", 1e-9)
    monkeypatch.setattr(retry, "RERUN_PER_S", 0.0)
    calls: list[int] = []

    class Service:
        @carpool.batch(max_batch_size=64, isolate_errors=True, policy="greedy")
        def predict(self, xs: list[int]) -> list[int]:
            calls.append(len(xs))
            if 5 in xs:
                raise LookupError
            return xs

    for service in (Service(), Service()):
        for _ in range(10):
            with pytest.raises(LookupError):
                service.predict.many(range(32))

    assert len(calls) == 11 + 19  # the first one is run in parts, and that is all
