"""What workers are called, in `ps`, in `multiprocessing` and in the log, and what the log tells of their lives."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from carpool import Service, Stage
from tests.engine.drive.named import Named
from tests.support import models
from tests.support.serving import serve


def command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def test_a_worker_process_bears_its_stage_s_name_and_its_number() -> None:
    """A worker process shows its stage's name and its number in `ps`, and to the model that asks."""
    with Service(Stage(Named, workers=2, name="Digits"), name="service").run() as s:
        names = {tuple(s.predict(0)) for _ in range(20)}
        assert [command(pid)[-1] for pid in s.pids] == ["carpool Digits/0", "carpool Digits/1"]
    assert names <= {(f"carpool Digits/{i}", f"carpool Digits/{i}", "MainThread") for i in range(2)}


def test_a_thread_bears_it_likewise() -> None:
    """A worker that is a thread shows its stage's name and its number, too, while the process keeps
    its name.
    """
    with Service(Stage(Named, run_in="thread", name="Digits")).run() as s:
        assert s.predict(0) == ["MainProcess", "MainProcess", "carpool Digits/0"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("two words", "carpool two words/0"),
        pytest.param("größer", "carpool größer/0", marks=pytest.mark.slow),
        ("a\nb\0c\x1b[31m\udc80", "carpool a?b?c?[31m?/0"),
        ("x" * 300_000, "carpool " + "x" * 192),
    ],
    ids=["spaces", "umlauts", "control characters", "endless"],
)
def test_any_name_can_be_shown(name: str, shown: str) -> None:
    """Of a stage's name, what a terminal could not bear is replaced where it is shown; the worker
    itself knows its name as it is.
    """
    with Service(Stage(Named, name=name), name="odd").run() as s:
        assert s.predict(0)[0] == f"carpool {name}/0"
        assert command(s.pids[0])[-1] == shown


def test_the_log_tells_of_starts_readiness_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line at INFO for the start, the readiness and the end of each worker of any
    kind, with how long it has taken; the library adds no handler.
    """
    stages = Stage(models.double, name="first"), Stage(models.double, name="second", run_in="thread")
    with caplog.at_level(logging.INFO, logger="carpool"), Service(*stages, name="both").run() as s:
        (pid,) = s.pids
    lines = [re.sub(r"\d+\.\d\d s", "N s", record.message) for record in caplog.records if "BLAS" not in record.message]
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert {record.name for record in caplog.records} == {"carpool"}
    assert sorted(lines) == sorted(
        [
            *[f"worker first/0 (pid {pid}) {what}" for what in ("starts", "is ready after N s", "has stopped")],
            *[f"worker second/0 {what}" for what in ("starts", "is ready after N s", "has stopped")],
            "service both is ready after N s",
            "service both is closed",
        ]
    )
    assert lines[0] == f"worker first/0 (pid {pid}) starts"
    assert lines[-1] == "service both is closed"
    assert lines.index("service both is ready after N s") == len(lines) - 4
    assert logging.getLogger("carpool").handlers == []


def test_the_command_line_s_log_says_nothing_twice() -> None:
    """The log of `carpool serve` says nothing twice: each worker and each service has its lines
    once, and their output comes once.
    """
    with serve("tests.support.serving_models:talks") as served:
        served.ask("POST", "/predict", "hello")
    records = [json.loads(line) for line in served.log]
    lines = [record["message"] for record in records if record["logger"] == "carpool"]
    assert len(lines) == len(set(lines)), lines
    kinds = [re.sub(r"[\d.]+ s$|\(pid \d+\)|http://.*", "…", line) for line in lines]
    started = ["worker Talks/0 … starts", "worker Talks/0 … is ready after …", "service Talks is ready after …"]
    stopped = ["worker Talks/0 … has stopped", "service Talks is closed", "stopped"]
    assert [kind for kind in kinds if "BLAS" not in kind][1:] == [*started, "ready on …", kinds[-4], *stopped]
    printed = [record["message"] for record in records if record["logger"] == "carpool.worker"]
    assert printed.count("printed hello") == 1
