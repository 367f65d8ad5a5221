"""BLAS and OpenMP threads of real workers, as the libraries themselves tell."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from carpool import Service, Stage
from carpool.engine.worker.place import THREAD_VARIABLES, usable_cores
from tests.engine.drive.blas_models import Environment, NumpyThreads, TorchThreads

CORES = usable_cores()


def all_of(n: int | str) -> dict[str, str]:
    return dict.fromkeys(THREAD_VARIABLES, str(n))


@pytest.fixture(autouse=True)
def nothing_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_word_of_the_user_s_the_cores_are_shared(caplog: pytest.LogCaptureFixture) -> None:
    """If the user says nothing of BLAS threads, the cores are shared among the worker processes of
    all stages, and each stage has a line in the log; stages in threads count for nothing.
    """
    stages = (
        Stage(Environment, workers=2),
        Stage(lambda x: x, name="between", run_in="thread", workers=5),
        Stage(Environment, name="Second", workers=max(1, CORES - 1)),
    )
    n = 2 + stages[2].workers
    with caplog.at_level(logging.INFO, logger="carpool"), Service(*stages).run() as s:
        assert s.predict(0) == all_of(max(1, CORES // n))
    told = [record.message for record in caplog.records if "BLAS" in record.message]
    each = f"get {max(1, CORES // n)} BLAS thread{'s' if CORES // n > 1 else ''} each: {CORES} core"
    assert len(told) == 2
    for line, name in zip(told, ("Environment", "Second"), strict=True):
        assert line.startswith(f"workers of stage {name} {each}")


def test_workers_that_scale_adds_share_the_cores_with_the_others() -> None:
    """After `scale` has added workers, no process has more threads than its share of the cores."""
    with Service(Stage(Environment)).run() as s:
        s.scale("Environment", 2 * CORES)
        assert len(s.pids) == 2 * CORES
        for pid in s.pids:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                assert b"OMP_NUM_THREADS=1" in environ.read().split(b"\0")


@pytest.mark.parametrize("cpus", [None, [0]])
def test_what_is_exported_stands(cpus: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported number of threads stands, in pinned workers too, and variables that the user has
    not set are left alone.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with Service(Stage(Environment, cpus=cpus)).run() as s:
        assert s.predict(0) == {"OMP_NUM_THREADS": "3"}


def test_one_variable_stands_and_the_others_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user has set one variable that not all libraries read, it stands and the others are
    set; `env=` goes before what is exported.
    """
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    monkeypatch.setenv("BLIS_NUM_THREADS", "3")
    with Service(Stage(Environment, cpus=[0], env={"BLIS_NUM_THREADS": "4"})).run() as s:
        assert s.predict(0) == all_of(1) | {"MKL_NUM_THREADS": "3", "BLIS_NUM_THREADS": "4"}


@pytest.mark.slow
@pytest.mark.parametrize("model", [NumpyThreads, TorchThreads])
@pytest.mark.parametrize(
    ("exported", "settings", "threads"),
    [
        ({}, {}, CORES),
        ({}, {"workers": 2 * CORES}, 1),
        ({}, {"cpus": [0]}, 1),
        ({"OMP_NUM_THREADS": "1"}, {}, 1),
        ({"OMP_NUM_THREADS": "1"}, {"env": {"OMP_NUM_THREADS": "2"}}, 2),
        ({"OMP_NUM_THREADS": "2"}, {"cpus": [0]}, 2),
    ],
    ids=["alone", "shared", "pinned", "exported", "env", "exported, pinned"],
)
def test_the_libraries_follow(
    model: Any, exported: dict[str, str], settings: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of numpy's BLAS and of torch are as many as the variables say, in workers pinned
    or not.
    """
    pytest.importorskip("torch" if model is TorchThreads else "threadpoolctl")
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    with Service(Stage(model, **settings)).run() as s:
        found = s.predict(0)
    if model is NumpyThreads and "cpus" in settings:
        threads = min(threads, 1)  # OpenBLAS takes no more than there are cores to run on
    assert found == [threads] * len(found) != []
