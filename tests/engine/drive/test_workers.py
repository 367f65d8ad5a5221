"""Worker processes: what runs in them, how they start, talk and end."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import carpool
from carpool import Service, Stage
from tests.effort import slow_where
from tests.support import models
from tests.support.output import Output

# -- what can be a model


@slow_where(lambda item, answer: answer in (30.0, -3.0, 6.0))
@pytest.mark.parametrize(
    ("stage", "item", "answer"),
    [
        (Stage(models.double), 3, 6),
        (Stage(models.scale, max_batch_size=4), 3.0, 6.0),
        (Stage(models.scale, max_batch_size=4, kwargs={"factor": 10}), 3.0, 30.0),
        (Stage(functools.partial(models.scale, factor=-1), max_batch_size=4), 3.0, -3.0),
        (Stage(models.Callable()), 1, 101),
        (Stage(models.Affine, max_batch_size=4, kwargs={"slope": 2, "shift": 1}), 1.0, {"x": 1.5, "y": 4.0}),
        (Stage(models.MovesPoints, max_batch_size=4), models.Point(1, 2), models.Point(2, 2)),
        (Stage(models.Tensors, max_batch_size=4), 4, 8),
    ],
    ids=["function", "batch function", "kwargs", "partial", "object", "class", "dataclass items", "array results"],
)
def test_models_of_every_kind(stage: Stage, item: Any, answer: Any) -> None:
    """A model may be a class, a function, a partial or any callable, with its kwargs and hooks."""
    with Service(stage).run() as service:
        assert service.predict(item) == answer


SCRIPT = """
    import carpool

    class Item:
        def __init__(self, value): self.value = value

    class Plus(carpool.Model):
        def predict(self, item): return Item(item.value + 1)

    service = carpool.Service(Plus)
    print("imported as", __name__)
    if __name__ == "__main__":
        with service.run() as s:
            answer = s.predict(Item(1))
            print("answer", type(answer) is Item, answer.value)
"""


@slow_where(lambda how: how == "module")
@pytest.mark.parametrize("how", ["script", "module"])
def test_a_model_of_main(how: str, tmp_path: Path) -> None:
    """A model that is defined in the program itself is found by running its file under another
    name, and its results can be unpickled.
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(SCRIPT))
    command = ["program.py"] if how == "script" else ["-m", "program"]

    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "answer True 2" in done.stdout
    assert "imported as __mp_main__" in done.stdout  # the worker's own print


ITEM_OF_MAIN = """
    import os, sys
    from dataclasses import dataclass
    import carpool
    from keeping import Keep

    @dataclass
    class Item:
        value: int

    if __name__ != "__main__":
        print("imported", flush=True)
        if os.environ["HOW"] == "exits":
            sys.exit("not here")
        if os.environ["HOW"] == "lacks":
            del Item

    if __name__ == "__main__":
        with carpool.Service(carpool.Stage(Keep, max_batch_size=4)).run() as s:
            for x in (1, Item(2), Item(3), 4):
                try:
                    print("answer", s.predict(x), flush=True)
                except carpool.ModelError as error:
                    print("error", error, flush=True)
"""


@slow_where(lambda how: how == "exits")
@pytest.mark.parametrize(
    ("how", "answers"),
    [
        ("is fine", ["answer 1", r"answer Item\(value=2\)", r"answer Item\(value=3\)", "answer 4"]),
        ("exits", ["answer 1", *["error .* put the class into a module .* SystemExit: not here"] * 2, "answer 4"]),
        ("lacks", ["answer 1", *["error .* define it at the top level of a module.* 'Item'.*"] * 2, "answer 4"]),
    ],
)
def test_an_item_of_a_class_of_main(how: str, answers: list[str], tmp_path: Path) -> None:
    """If an item is of a class of the main file, the worker of a model from another module imports
    that file, once.
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(ITEM_OF_MAIN))
    (tmp_path / "keeping.py").write_text(
        "import carpool\nclass Keep(carpool.Model):\n    def predict(self, xs): return xs\n"
    )

    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "HOW": how},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("answer", "error"))]
    assert all(re.fullmatch(expected, line) for expected, line in zip(answers, lines, strict=True))
    assert done.stdout.count("imported") == 1


def test_a_program_without_a_main_guard_is_told(tmp_path: Path) -> None:
    """A program that starts a service at import time would start it in its workers, too: it gets an
    error that says what to write.
    """
    (tmp_path / "program.py").write_text(
        "import carpool\ndef f(x): return x\nwith carpool.Service(f).run() as s: s.predict(1)\n"
    )

    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode != 0
    assert 'if __name__ == "__main__":' in done.stderr


@pytest.mark.parametrize("model", [lambda x: x, type("Local", (carpool.Model,), {"predict": lambda self, x: x})])
def test_a_model_that_cannot_be_found_is_refused(model: Any) -> None:
    """A model that is a lambda or a local class is refused, with the advice to define it at the top
    level of a module.
    """
    with pytest.raises(TypeError, match="top level of a module"):
        Service(model).start()


# -- start and end


def test_setup_runs_once_in_each_worker_and_teardown_at_the_end(tmp_path: Path) -> None:
    """Each worker constructs its model in its own process, sets it up once, and tears it down when
    the service closes.
    """
    diary = tmp_path / "diary"
    stage = Stage(models.Affine, workers=2, max_batch_size=2, kwargs={"diary": str(diary)})
    with Service(stage).run() as service:
        list(service.stream([1.0] * 50))
        pids = service.pids

    events = [line.split() for line in diary.read_text().splitlines()]

    assert sorted(int(pid) for event, pid in events if event == "setup") == sorted(pids)
    assert sorted(int(pid) for event, pid in events if event == "teardown") == sorted(pids)
    assert os.getpid() not in pids


def test_examples_warm_a_worker_up_before_it_is_ready() -> None:
    """Before a worker is ready its examples run alone and as a full batch, and then several sizes
    are timed.
    """
    with Service(Stage(models.CountsWarmUp, max_batch_size=8)).run() as service:
        assert service.predict(1) == [1, 8, 1, 2, 4, 8, 1, 2, 4, 8]


@pytest.mark.parametrize("run_in", ["process", "thread"])
def test_the_warm_up_trains_the_policy(run_in: Any) -> None:
    """The policy learns each worker's timings of the warm-up, with the sizes of the examples,
    before the first request.
    """
    policy = models.Trainee()
    stage = Stage(models.CountsWarmUp, max_batch_size=48, size=lambda x: x, policy=policy, workers=2, run_in=run_in)

    async def main() -> list[tuple[int, int, float]]:
        async with Service(stage).run_async() as service:
            await service.predict(1)
            return service.running_driver.core.crews[0].lobby.policy.lessons  # type: ignore[attr-defined,no-any-return]

    lessons = asyncio.run(main())

    # 7, 8, 9 in turn: of 12 units one fits, of 24 three, of 48 six
    assert sorted((n, size) for n, size, _ in lessons) == [(1, 7), (1, 7), (3, 24), (3, 24), (6, 48), (6, 48)]
    assert all(0 < busy_s < 10 for _, _, busy_s in lessons)


@pytest.mark.fault("F27")
@pytest.mark.parametrize(
    ("model", "told"),
    [
        (models.RaisesInSetup, "FileNotFoundError: the weights are missing"),
        (models.DiesInSetup, "exited with code 3"),
        (
            models.BadExample,
            r"example 1 of 1 does not run through its model: ZeroDivisionError: division by zero\n.*ZeroDivisionError",
        ),
    ],
)
def test_a_worker_that_cannot_load_ends_the_start(model: Any, told: str) -> None:
    """If a worker cannot load, the start fails with the user's traceback and leaves no process
    behind.
    """
    handle = Service(model).run()

    with pytest.raises(carpool.StartupError, match=f"(?s){told}"):
        handle.start()

    assert handle.pids == []


@pytest.mark.fault("F27")
def test_an_example_of_a_later_stage_that_is_one_of_the_first_says_so() -> None:
    """Where a later stage cannot run its examples, which may be inherited from a model of the first
    one, the error says what they must be.
    """
    stages = [Stage(Pairs, max_batch_size=4, run_in="thread"), Stage(Firsts, max_batch_size=4, run_in="thread")]
    with pytest.raises(carpool.StartupError, match="its examples must be what the stage before it returns"):
        Service(*stages).run().start()
    with Service(stages[0], Stage(FirstsOfNone, max_batch_size=4, run_in="thread")).run() as service:
        assert service.predict(3.0) == 3.0


class Pairs(carpool.Model):
    examples = (1.0, 2.0)

    def predict(self, xs: list[float]) -> list[Any]:
        return [(x, "pair") for x in xs]


class Firsts(Pairs):
    def predict(self, xs: list[Any]) -> list[Any]:
        return [x[0] for x in xs]


class FirstsOfNone(Firsts):
    examples = ()


def test_a_handle_starts_once() -> None:
    """Starting a handle a second time is an error; a new handle from the same service can be
    started.
    """
    service = Service(models.double)
    handle = service.start()
    with pytest.raises(RuntimeError, match="started before"):
        handle.start()
    handle.close()
    handle.close()

    with service.run() as again:
        assert again.predict(2) == 4


def test_a_closed_service_says_so() -> None:
    """Calls after `close` fail at once and say that the service is closed."""
    handle = Service(models.double).start()
    handle.close()

    with pytest.raises(carpool.Unavailable, match="has stopped"):
        handle.predict(1)


# -- settings of a stage


def test_workers_share_the_work_and_run_where_they_are_told() -> None:
    """`workers`, `cpus` and `env` reach the processes, and BLAS thread counts follow the cores."""
    stage = Stage(models.Pid, cpus=[0, [0, 1]], env={"FLAVOUR": "vanilla"})
    with Service(stage).run() as service:
        answers = list(service.stream([0.01] * 40))

    assert stage.workers == 2
    assert len({answer["pid"] for answer in answers}) == 2
    assert {(*answer["cores"], answer["threads"]) for answer in answers} == {(0, "1"), (0, 1, "2")}
    assert {answer["flavour"] for answer in answers} == {"vanilla"}


def test_a_pinned_coordinator_does_not_pin_its_workers() -> None:
    """`Service(cpus=)` pins the loop's thread for as long as the service runs, and its workers run
    anywhere.
    """
    before = os.sched_getaffinity(0)
    with Service(models.Pid, cpus=0).run() as service:
        assert set(service.predict(0.0)["cores"]) == before
        assert os.sched_getaffinity(0) == before

    assert os.sched_getaffinity(0) == before


def test_prints_and_logs_come_through_under_the_workers_name() -> None:
    """Lines from stdout, stderr, logging and C code in a worker come through one by one, under the
    worker's name.
    """
    output = Output()
    with Service(Stage(models.Talks, name="talker")).run(output=output) as service:
        service.predict("one")

    assert {worker for worker, _, _ in output.lines} == {"talker/0"}
    assert [line for _, is_error, line in output.lines if not is_error] == ["hello from setup", "printed one", "from C"]
    assert "complained one" in output.texts
    assert any("logged one" in line for line in output.texts)


# -- what comes back


@pytest.mark.fault("F38", "F39")
@slow_where(lambda how: how not in ("few", "scalar"))
@pytest.mark.parametrize("how", ["few", "many", "none", "text", "dict", "generator", "scalar"])
def test_a_batch_must_return_a_sequence_of_as_many_results(how: str) -> None:
    """A model that does not return a sequence of as many results fails its batch with one clear
    error, and the worker goes on.
    """
    with Service(Stage(models.Wrong, max_batch_size=4)).run() as service:
        with pytest.raises(
            carpool.ModelError, match=r"must return (a sequence of )?1 result, but the model returned"
        ) as caught:
            service.predict(how)
        assert (type(caught.value), caught.value.code) == (carpool.ModelError, "bad_result")
        assert caught.value.__cause__ is None
        assert service.predict("tuple") == "tuple"
        assert service.stats().stages[0].restarts == 0


def test_a_batch_may_return_an_array() -> None:
    """A batch may return an array, which is split along its first axis; numpy scalars become
    builtins.
    """
    with Service(Stage(models.Wrong, max_batch_size=4)).run() as service:
        number = service.predict("array")
        row = service.predict("matrix")

    assert (number, type(number)) == (0, int)
    assert row.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.fault("F42", "F43")
@slow_where(lambda how: how not in ("exit", "unpicklable"))
@pytest.mark.parametrize("how", ["exit", "interrupt", "mute", "long", "two arguments", "unpicklable"])
def test_whatever_user_code_raises_is_one_error(how: str) -> None:
    """Whatever user code raises is one error with bounded text for its callers, never a hang and
    never a lost worker.
    """
    with Service(models.Raises).run() as service:
        with pytest.raises(carpool.ModelError) as caught:
            service.predict(how)
        assert len(str(caught.value)) + len(caught.value.traceback) < 40_000
        assert service.predict("fine") == "fine"


def test_a_model_error_carries_the_workers_traceback() -> None:
    """A `ModelError` carries the worker's traceback as text, from the user's first frame on, and
    the type's name.
    """
    with Service(models.RaisesInPredict).run() as service, pytest.raises(carpool.ModelError) as caught:
        service.predict(0)

    assert caught.value.type_name == "ZeroDivisionError"
    assert caught.value.traceback.startswith("Traceback (most recent call last):\n")
    assert "models.py" in caught.value.traceback
    assert "worker/answer.py" not in caught.value.traceback


def test_guilty_items_of_a_batch_fail_alone() -> None:
    """A batch that raises is split and run again, so that only guilty items fail; with
    `isolate_errors=False` it fails as a whole.
    """
    items = [*range(20), -1, *range(20, 31)]
    with Service(Stage(models.PoisonedBatch, max_batch_size=32)).run() as service:
        answers = list(service.stream(items, return_exceptions=True))
    assert [isinstance(a, carpool.ModelError) for a in answers] == [x < 0 for x in items]

    with Service(Stage(models.PoisonedBatch, max_batch_size=32, isolate_errors=False)).run() as service:
        service.predict(0)
        answers = list(service.stream(items, return_exceptions=True))
    assert sum(isinstance(a, carpool.ModelError) for a in answers) > 1


# -- large items


def test_arrays_of_every_size_pass_unharmed_and_writable() -> None:
    """Arrays of every size go through two stages and back with equal contents, each in memory of
    its own.
    """
    arrays = [np.arange(n, dtype=np.float64) for n in (1, 10, 8191, 8192, 100_000, 750_000)]
    service = Service(Stage(models.Stamp, name="one"), Stage(models.Stamp, name="two"))
    with service.run() as handle:
        answers = list(handle.stream(arrays * 3))

    for array, answer in zip(arrays * 3, answers, strict=True):
        expected = array.copy()
        expected[0] += 2
        np.testing.assert_array_equal(answer, expected)
        answer[0] = -1.0  # writable
    assert not any(np.shares_memory(a, b) for i, a in enumerate(answers) for b in answers[:i])


def test_an_item_larger_than_the_queue_is_refused() -> None:
    """An item that is larger than the queue gets an error that names the size, and does not wait
    for ever.
    """
    with Service(Stage(models.double, max_queue_bytes=1000)).run() as service:
        with pytest.raises(carpool.InvalidRequest, match="over the queue's 1000"):
            service.predict(b"x" * 2000)
        assert service.predict(1) == 2
