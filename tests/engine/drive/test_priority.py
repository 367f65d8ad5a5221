"""Workers that load beside others have a lower priority where they can have their own one back."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import ROOT
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no priority is lowered")
libc = ctypes.CDLL(None)

USUAL = min(os.getpriority(os.PRIO_PROCESS, 0), 10)  # from the lowest priority nothing could be lowered
THERE_AND_BACK = "import os; old = os.nice(0); os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, old)"


def be_usual() -> None:
    """Have what is executed next begin with the usual priority, whatever that of the tests is."""
    os.setpriority(os.PRIO_PROCESS, 0, USUAL)


def renounce() -> None:
    """Have what is executed next lack any permission to raise its priority, too, as most users do."""
    import resource

    be_usual()
    pr_capbset_drop, cap_sys_nice = 24, 23
    libc.prctl(pr_capbset_drop, cap_sys_nice, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))


def _may_be_usual() -> bool:
    """Report whether a process may have the usual priority."""
    try:
        return subprocess.run([sys.executable, "-c", ""], preexec_fn=be_usual).returncode == 0
    except subprocess.SubprocessError:
        return False


may_be_usual = _may_be_usual()


def goes_there_and_back(prepare: Callable[[], None] = be_usual) -> bool:
    command = [sys.executable, "-c", THERE_AND_BACK]
    return subprocess.run(command, capture_output=True, preexec_fn=prepare).returncode == 0


def run(
    tmp_path: Path, *more: str, is_lowered: bool = True, prepare: Callable[[], None] = be_usual
) -> list[dict[str, Any]]:
    """What `priorities.py` prints, of both workers, in order."""
    command = [sys.executable, "-m", "tests.engine.drive.priorities", str(is_lowered), str(tmp_path / "first")]
    done = subprocess.run(
        [*command, str(PATIENCE_S), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_S,
        preexec_fn=prepare,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    assert all(answer["ids"] > 3 for answer in answers)  # threads of the worker's and the model's, and the child
    return answers


@pytest.fixture
def usual() -> int:
    """The usual nice value; a test is skipped that needs permission to go back to it."""
    if not may_be_usual or not goes_there_and_back():
        pytest.skip("needs root, or a nice limit")
    return USUAL


def test_a_worker_that_loads_beside_others_has_a_lower_priority_until_it_has_loaded(tmp_path: Path, usual: int) -> None:
    """A worker has a lower priority while it loads beside one that serves; when it serves itself,
    all of its threads and child processes have the usual one. The first worker never has another.
    """
    first, second = run(tmp_path)
    assert (first["loading"], first["serving"]) == (usual, [usual])
    assert (second["loading"], second["serving"]) == (min(usual + 5, 19), [usual])


@pytest.mark.slow
def test_a_worker_has_its_priority_back_when_no_other_serves_any_more(tmp_path: Path, usual: int) -> None:
    """A worker that loads at a lower priority has the usual one back as soon as the last one that
    serves is lost; the successor of that one starts with the usual one.
    """
    first, second = run(tmp_path, "kill")
    assert (first["loading"], first["serving"]) == (usual, [usual])
    assert (second["loading"], second["hurried"], second["serving"]) == (min(usual + 5, 19), usual, [usual])


@pytest.mark.skipif(not may_be_usual, reason="runs at the lowest priority, and may not raise it")
def test_no_worker_has_a_lower_priority_that_it_could_not_lose(tmp_path: Path) -> None:
    """Where a process may not raise its priority, no worker is started with a lower one."""
    assert not goes_there_and_back(renounce)
    first, second = run(tmp_path, is_lowered=False, prepare=renounce)
    assert (first["loading"], first["serving"]) == (second["loading"], second["serving"]) == (USUAL, [USUAL])
