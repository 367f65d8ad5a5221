"""Which worker am I: what each worker is told of its place in the stage, and of its own environment."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from carpool.engine.worker.place import THREAD_VARIABLES, usable_cores
from carpool.http.app import App
from tests.engine.drive.asking import Asks, AsksInThreads, AsksOnTheLoop
from tests.support.http.by_hand import ask
from tests.support.waiting import wait_until


def answers_of_all(service: Any, workers: int) -> list[dict[str, Any]]:
    """One answer of each worker, which sleep so long that all are needed."""
    answers: dict[int, dict[str, Any]] = {}

    def all_have_answered() -> bool:
        answers.update({each["index"]: each for each in service.stream([0.02] * 4 * workers)})
        return len(answers) == workers

    wait_until(all_have_answered)
    return [answers[index] for index in sorted(answers)]


@pytest.mark.parametrize("run_in", ["process", "thread"])
def test_a_worker_has_one_index_in_all_of_its_hooks(run_in: Any) -> None:
    """The workers of a stage have the indices from 0 up to their number, each the same one in
    `__init__`, in every hook and in teardown.
    """
    Asks.torn_down.clear()
    with Service(Stage(Asks, workers=2, run_in=run_in)).run() as service:
        found = [set(each["asked"].values()) for each in service.stream([0.02] * 20)]
    assert all(len(each) == 1 for each in found)
    assert set().union(*found) == {0, 1}
    if run_in == "thread":
        assert sorted(Asks.torn_down) == [0, 1]


class AsksInDecode(carpool.Model):
    accepts = ("application/json",)

    def decode(self, bodies: list[bytes]) -> list[int]:
        return [carpool.worker_index() for _ in bodies]

    def predict(self, index: int) -> int:
        return index


def test_decode_knows_the_index_too() -> None:
    """`decode`, through which bodies of HTTP requests go, has the worker's index."""
    app = App(Service(Stage(AsksInDecode, run_in="thread")))

    async def ask_once() -> tuple[int, bytes]:
        async with carpool.lifespan(app)(None):
            return await ask(app, b"1")

    assert asyncio.run(ask_once()) == (200, b"0")


def test_workers_on_the_loop_have_their_own_index_each() -> None:
    """Tasks of one loop do not mix up their indices, in setup, predict and teardown."""
    AsksOnTheLoop.torn_down.clear()
    with Service(Stage(AsksOnTheLoop, workers=3, run_in="loop")).run() as service:
        found = set(service.stream(range(30)))
    assert found <= {(0, 0), (1, 1), (2, 2)} and found
    assert sorted(AsksOnTheLoop.torn_down) == [0, 1, 2]


def test_a_worker_process_knows_its_index_before_the_model_is_imported() -> None:
    """In a worker process `worker_index()` and `CARPOOL_WORKER` of `CARPOOL_WORKERS` are there
    before the model's module is imported, and hold in threads that the model starts.
    """
    with Service(Stage(AsksInThreads, workers=3)).run() as service:
        answers = answers_of_all(service, 3)
    assert [each["at import"] for each in answers] == [0, 1, 2]
    assert [each["names"] for each in answers] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert len({each["pid"] for each in answers}) == 3


def test_a_successor_has_the_index_of_the_worker_that_died() -> None:
    """A worker that is started in the place of one that was killed has its index and environment."""
    stage = Stage(AsksInThreads, workers=2)
    with Service(stage).run() as service:
        before = answers_of_all(service, 2)
        os.kill(before[1]["pid"], signal.SIGKILL)
        wait_until(lambda: before[1]["pid"] not in service.pids and len(service.pids) == 2)
        after = answers_of_all(service, 2)
    assert after[0] == before[0]
    assert after[1]["pid"] != before[1]["pid"]
    assert after[1] | {"pid": 0} == before[1] | {"pid": 0}


def test_outside_of_workers_there_is_no_index() -> None:
    """`worker_index()` raises in the program, in its other threads and in functions of
    `@carpool.batch`, whatever is exported, and the text says where to call it.
    """

    @carpool.batch(max_batch_size=4)
    def asks(xs: list[int]) -> list[int]:
        return [carpool.worker_index() for _ in xs]

    def in_another_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(carpool.worker_index).result()

    with pytest.MonkeyPatch.context() as patch, Service(Stage(AsksOnTheLoop, run_in="loop")).run() as service:
        patch.setenv("CARPOOL_WORKER", "1")
        service.predict(1)
        for ask_outside in (carpool.worker_index, lambda: asks(1), in_another_thread):
            with pytest.raises(RuntimeError, match="is for code that runs in a worker of a service"):
                ask_outside()


def test_each_worker_may_have_variables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`env=` as a list gives each worker its own variables, and makes as many workers as it is long;
    what one of them says of BLAS threads stands for itself alone.
    """
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    stage = Stage(AsksInThreads, env=[{"FLAVOUR": "plain", "OMP_NUM_THREADS": "7"}, {"FLAVOUR": "vanilla"}])
    with Service(stage).run() as service:
        first, second = (each["env"] for each in answers_of_all(service, 2))
    assert (first["FLAVOUR"], second["FLAVOUR"]) == ("plain", "vanilla")
    assert (first["OMP_NUM_THREADS"], second["OMP_NUM_THREADS"]) == ("7", str(max(1, usable_cores() // 2)))


@pytest.mark.parametrize(
    ("exported", "devices", "seen"),
    [
        pytest.param(None, 2, ["0", "1", "0"], marks=pytest.mark.slow),
        pytest.param(None, ["cuda:1", "GPU-8932f937"], ["1", "GPU-8932f937", "1"], marks=pytest.mark.slow),
        ("5,GPU-1, 7,-1,8", ["cuda:2", [1, 0]], ["7", "GPU-1,5", "7"]),
    ],
    ids=["a count", "names", "among those that are exported"],
)
def test_each_worker_sees_its_own_devices(
    exported: str | None, devices: Any, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`devices=` sets `CUDA_VISIBLE_DEVICES` of each worker process, in turn if there are fewer
    devices than workers; numbers count what this process itself may see.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if exported is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", exported)
    with Service(Stage(AsksInThreads, workers=3, devices=devices)).run() as service:
        before = answers_of_all(service, 3)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
        os.kill(before[2]["pid"], signal.SIGKILL)
        wait_until(lambda: before[2]["pid"] not in service.pids and len(service.pids) == 3)
        after = answers_of_all(service, 3)
    assert [each["env"]["CUDA_VISIBLE_DEVICES"] for each in before] == seen
    assert [each["env"]["CUDA_VISIBLE_DEVICES"] for each in after] == seen


@pytest.mark.parametrize(
    ("exported", "sees"),
    [("3", "one device, cuda:0"), ("", "no device"), ("-1", "no device"), ("4,6,x,7", "cuda:0 to cuda:1")],
)
def test_a_device_that_is_not_visible_is_named(exported: str, sees: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that asks for a device which its own process may not see does not start, and the text
    says which one and what is exported.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", exported)
    told = rf"stage Asks: devices asks for cuda:2, but CUDA_VISIBLE_DEVICES='{exported}' is exported, .* sees {sees}$"
    with pytest.raises(carpool.StartupError, match=told), Service(Stage(Asks, devices=["cuda:2"])).run():
        pass
