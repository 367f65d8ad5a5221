"""Workers that come and go while a service runs: scaled, reloaded and recycled under load, and what is told."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool import Service, Stage, StartupError, Unavailable
from carpool.service.thread_handle import Handle
from tests.effort import slow_where
from tests.support.changing import Callers, Pid, Versioned
from tests.support.parts import Counting, Resuming
from tests.support.processes import alive
from tests.support.waiting import wait_until

WAYS = ("process", "thread")


def ready(service: Handle) -> list[int]:
    """How many workers of each stage are ready."""
    return [stage.workers.get("ready", 0) for stage in service.stats().stages]


def versions(file: Path, run_in: Any = "process", **settings: Any) -> Stage:
    kwargs = {"file": str(file), **settings.pop("kwargs", {})}
    return Stage(Versioned, run_in=run_in, max_batch_size=8, kwargs=kwargs, **settings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where models read their version."""
    path = tmp_path / "version"
    path.write_text("1")
    return path


# -- scale


@slow_where(lambda run_in: run_in != "process")
@pytest.mark.parametrize("run_in", WAYS)
def test_workers_are_added_and_taken_away_under_load(file: Path, run_in: str) -> None:
    """No request is lost or fails while the number of workers goes up and down."""
    with Service(versions(file, run_in, kwargs={"cost_s": 0.002})).run() as service, Callers(service, 8) as callers:
        for n in (3, 1, 2, 1):
            service.scale("Versioned", n)
            assert ready(service) == [n]
            assert run_in != "process" or len(service.pids) == n
    assert callers.errors == []
    assert callers.answers == [[1]] * len(callers.answers)


def test_workers_are_added_on_the_loop() -> None:
    """A stage on the loop, and a handle for tasks, are scaled in the same way."""

    async def run() -> None:
        stage = Stage(_Slow, run_in="loop", max_batch_size=1)
        async with Service(stage).run_async() as service:
            await service.scale("_Slow", 3)
            assert await asyncio.gather(*[service.predict(i) for i in range(3)]) == [0, 1, 2]
            await service.scale("_Slow", 1)
            assert await service.predict(4) == 4
            assert service.driver is not None
            assert service.driver.stats.stages[0].workers["ready"] == 1

    asyncio.run(run())


class _Slow:
    async def predict(self, xs: list[int]) -> list[int]:
        await asyncio.sleep(0.01)
        return xs


@pytest.mark.slow
def test_a_worker_that_goes_finishes_what_it_has(file: Path) -> None:
    """The batch of a worker that is to go is answered by it, and by no other."""
    with Service(versions(file, workers=2, kwargs={"cost_s": 0.3})).run() as service:
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(service.predict([]))) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: service.stats().stages[0].running == 2 or len(answers))
        service.scale("Versioned", 1)
        for thread in threads:
            thread.join()
        assert answers == [[1], [1]]
        assert (service.stats().stages[0].restarts, ready(service)) == (0, [1])


@pytest.mark.slow
def test_workers_keep_their_index(file: Path) -> None:
    """The last workers go first; new ones get the least index that is free, and its environment."""
    stage = Stage(Pid, max_batch_size=1, workers=2, env=[{"WHO": "a"}, {"WHO": "b"}])
    with Service(stage).run() as service:
        service.scale("Pid", 3)
        service.scale("Pid", 1)
        assert {service.predict(0)[0] for _ in range(5)} == {0}
        service.scale("Pid", 2)
        wait_until(lambda: {service.predict(0)[0] for _ in range(9)} <= {0, 1})


def test_workers_that_cannot_load_are_told_of(file: Path) -> None:
    """If a worker that is added cannot load, none is, the cause is raised, and the service goes on."""
    with Service(versions(file, "thread")).run() as service:
        file.write_text("broken")
        with pytest.raises(StartupError, match="invalid literal for int"):
            service.scale("Versioned", 3)
        assert ready(service) == [1]
        assert service.predict([]) == [1]
        assert len(service.stats().stages[0].workers) == 1


@pytest.mark.parametrize(
    ("stage", "workers", "error", "text"),
    [
        ("Digits", 2, ValueError, "has no stage 'Digits'; it has Pid"),
        ("Pid", 0, ValueError, "at least 1"),
        ("Pid", (3, 2), ValueError, "more workers at least than at most"),
    ],
)
def test_what_cannot_be_scaled(stage: str, workers: Any, error: type[Exception], text: str) -> None:
    """A stage that there is not, or a number that makes no sense, is an error that says so."""
    with Service(Stage(Pid, run_in="thread", max_batch_size=1)).run() as service, pytest.raises(error, match=text):
        service.scale(stage, workers)


# -- reload


@slow_where(lambda run_in: run_in != "process")
@pytest.mark.parametrize("run_in", WAYS)
def test_all_workers_are_replaced_under_load(file: Path, run_in: str) -> None:
    """After a reload only new workers answer; before it only old ones, and no request fails."""
    stage = versions(file, run_in, workers=2, kwargs={"cost_s": 0.001})
    with Service(stage).run() as service, Callers(service, 8) as callers:
        for version in (2, 3):
            old = service.pids
            file.write_text(str(version))
            service.reload()
            assert service.predict([]) == [version]
            assert not any(alive(pid) for pid in old)
            assert ready(service) == [2]
    assert callers.errors == []
    assert {answer for (answer,) in callers.answers} <= {1, 2, 3}


@slow_where(lambda run_in: run_in == "process")
@pytest.mark.parametrize("run_in", WAYS)
def test_no_request_passes_old_and_new_workers(file: Path, run_in: str) -> None:
    """In a pipeline every request has been through old workers only, or through new ones only."""
    stages = [versions(file, run_in, name=name, kwargs={"cost_s": 0.002}) for name in ("one", "two")]
    with Service(*stages).run() as service, Callers(service, 16) as callers:
        for version in (2, 3):
            file.write_text(str(version))
            service.reload()
            assert service.predict([]) == [version, version]
    assert callers.errors == []
    assert {tuple(answer) for answer in callers.answers} <= {(1, 1), (2, 2), (3, 3)}


@slow_where(lambda run_in: run_in == "process")
@pytest.mark.parametrize("run_in", WAYS)
def test_when_new_workers_fail_the_old_ones_stay(file: Path, run_in: str) -> None:
    """A version that cannot load is told of, and callers notice nothing, however often it is tried."""
    with Service(versions(file, run_in, workers=2)).run() as service, Callers(service, 4) as callers:
        before = set(service.pids)
        file.write_text("broken")
        for _ in range(2):
            with pytest.raises(StartupError, match=r"worker \d of stage Versioned .*could not be set up"):
                service.reload()
        assert set(service.pids) == before
        file.write_text("2")
        service.reload()
        assert service.predict([]) == [2]
    assert callers.errors == []


@pytest.mark.slow
def test_a_broken_version_ten_times_and_a_hundred_reloads(file: Path) -> None:
    """Reloaded a hundred times under 64 callers, no request is lost, refused or answered by a mixture; ten
    broken versions between are noticed by no caller. (With processes: tests/http/test_admin.py.)
    """
    stages = [versions(file, "thread", name=name, kwargs={"cost_s": 0.001}) for name in ("one", "two")]
    with Service(*stages).run() as service, Callers(service, 64) as callers:
        for version in range(2, 102):
            if version % 10 == 0:
                file.write_text("broken")
                with pytest.raises(StartupError):
                    service.reload()
            file.write_text(str(version))
            service.reload()
            assert service.predict([]) == [version, version]
    assert callers.errors == []
    assert all(len(set(answer)) == 1 and len(answer) == 2 for answer in callers.answers)


@pytest.mark.slow
def test_one_worker_at_a_time(file: Path) -> None:
    """A rolling reload has never more workers than before, and still loses no request."""
    with Service(versions(file, workers=2, kwargs={"cost_s": 0.001})).run() as service, Callers(service, 4) as callers:
        most = 0
        file.write_text("2")
        reloading = threading.Thread(target=lambda: service.reload(rolling=True))
        reloading.start()
        while reloading.is_alive():
            most = max(most, len(service.pids))
        reloading.join()
        assert service.predict([]) == [2]
        assert most <= 2
    assert callers.errors == []


def test_a_rolling_reload_that_fails_stops(file: Path) -> None:
    """The worker that was replaced is tried again as after a death, and the others stay."""
    with Service(versions(file, "thread", workers=2)).run() as service:
        file.write_text("broken")
        with pytest.raises(StartupError, match="invalid literal"):
            service.reload(rolling=True)
        assert service.predict([]) == [1]
        file.write_text("2")
        wait_until(lambda: ready(service) == [2])


@pytest.mark.slow
def test_a_service_that_closes_ends_its_reload(file: Path) -> None:
    """Closing a service while it is reloaded ends the new workers, too, and the reload says why it failed."""
    service = Service(versions(file, kwargs={"load_s": 0.3})).start()
    errors: list[BaseException] = []

    def reload() -> None:
        try:
            service.reload()
        except BaseException as error:
            errors.append(error)

    reloading = threading.Thread(target=reload)
    reloading.start()
    wait_until(lambda: len(service.pids) == 2)
    pids = service.pids
    service.close()
    reloading.join()
    assert [type(error) for error in errors] == [Unavailable]
    wait_until(lambda: not any(alive(pid) for pid in pids))


# -- streams


def test_streams_that_can_resume_move(file: Path) -> None:
    """A stream of a model with `resume` goes on in a new worker, without a part lost or told twice."""
    with Service(Stage(Resuming, run_in="thread", max_batch_size=4, kwargs={"step_s": 0.01})).run() as service:
        with service.predict_stream(60) as parts:
            got = [next(parts)]
            service.reload()
            got += list(parts)
        assert got == list(range(1, 61))


@pytest.mark.slow
def test_streams_that_cannot_resume_end_in_their_worker(file: Path) -> None:
    """Other streams go on in the old worker until they end; new ones join the new worker."""
    with Service(Stage(Counting, max_batch_size=4, kwargs={"step_s": 0.01})).run() as service:
        (old,) = service.pids
        with service.predict_stream(50) as parts:
            got = [next(parts)]
            reloading = threading.Thread(target=service.reload)
            reloading.start()
            wait_until(lambda: len(service.pids) == 2)
            got += list(parts)
            reloading.join()
        assert got == list(range(1, 51))
        assert not alive(old)
        with service.predict_stream(2) as parts:
            assert list(parts) == [1, 2]


def test_streams_that_take_too_long_are_broken_off() -> None:
    """After `grace_s` a stream that cannot be resumed fails, and says why."""
    stage = Stage(Counting, run_in="thread", max_batch_size=4, kwargs={"step_s": 0.01})
    with Service(stage).run() as service, service.predict_stream(10_000) as parts:
        next(parts)
        service.reload(grace_s=0.1)
        with pytest.raises(Unavailable, match="was replaced in the midst of this answer"):
            list(parts)


# -- recycling


@slow_where(lambda limits: "max_age_s" not in limits)
@pytest.mark.parametrize(
    "limits", [{"max_calls": 20}, {"max_age_s": 0.5}, {"max_memory_mb": 1}], ids=["calls", "age", "memory"]
)
def test_worn_workers_are_replaced_under_load(file: Path, limits: dict[str, Any]) -> None:
    """A worker that is worn goes when its successor is ready, and no request fails for it."""
    with Service(versions(file, **limits)).run() as service, Callers(service, 4) as callers:
        before = set(service.pids)
        wait_until(lambda: before.isdisjoint(service.pids))
    assert callers.errors == []
    assert service.stats().stages[0].restarts == 0


def test_a_worn_worker_stays_if_its_successor_cannot_load(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the successor of a worn worker cannot load, the old one stays, and the log says why."""
    with Service(versions(file, "thread", max_age_s=0.01)).run() as service:
        file.write_text("broken")
        wait_until(lambda: "its successor could not load" in caplog.text)
        assert ready(service) == [1]
        assert service.predict([]) == [1]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_calls": 0}, "max_calls must be a whole number of at least 1"),
        ({"max_age_s": -1}, "max_age_s must be a positive"),
        ({"max_memory_mb": 0}, "max_memory_mb must be a positive number of MiB"),
        ({"max_memory_mb": 10, "run_in": "thread"}, "share the memory of this process"),
        ({"workers": (2, 1)}, "more workers at least than at most"),
        ({"workers": (1, 2, 3)}, "a pair of the fewest and the most"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], text: str) -> None:
    """Limits of workers are checked where the stage is declared."""
    with pytest.raises(ValueError, match=text):
        Stage(Pid, max_batch_size=1, **settings)


def test_a_range_is_not_for_answers_in_parts() -> None:
    """The number of workers of a model that answers in parts does not follow the load."""
    with pytest.raises(ValueError, match="answers in parts: give one number"):
        Stage(Counting, max_batch_size=4, workers=(1, 2))


# -- following the load


def test_workers_follow_the_load(file: Path) -> None:
    """With a range workers are added when more comes than one can serve, and no request fails."""
    stage = versions(file, "thread", workers=(1, 3), kwargs={"cost_s": 0.05}, policy=carpool.Greedy(1))
    with Service(stage, slo_s=0.2).run() as service, Callers(service, 8) as callers:
        assert ready(service) == [1]
        wait_until(lambda: ready(service) == [3])
    assert callers.errors == []


def test_a_fixed_number_ends_the_following_of_the_load(file: Path) -> None:
    """A number given to a running stage stays; a pair has it follow the load from then on."""
    with Service(versions(file, "thread")).run() as service:
        service.scale("Versioned", (2, 3))
        wait_until(lambda: ready(service) == [2])
        service.scale("Versioned", 1)
        assert ready(service) == [1]
        assert service._inner._made is not None
        assert service._inner._made.upkeep.stages[0].scaler is None
