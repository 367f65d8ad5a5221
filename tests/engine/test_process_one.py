"""carpool as process 1 of a container: signals reach it from the start, orphans are reaped, its status is its own.

A container here is a namespace of process ids, where `unshare` (util-linux) may make one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import children, command_of
from tests.support.waiting import PATIENCE_S, wait_until

PROGRAM = """
import pathlib, time
import carpool
pathlib.Path("importing").touch()
time.sleep({seconds})
class Double(carpool.Model):
    def predict(self, x: float) -> float:
        return 2 * x
service = carpool.Service(carpool.Stage(Double, join={join}))
"""
AS_INIT = """
import ctypes, os, signal, subprocess, sys, time
from carpool.engine.process_one import become_init
ctypes.CDLL(None).prctl(36, 1)  # orphans of this process become its children, as those of process 1 do
become_init()
{child}
"""
ORPHANS = """
for _ in range(3):
    subprocess.run(["sh", "-c", "true &"], check=True)
while len(open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()) > 1:
    time.sleep(0.01)
"""
WAITS = """
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(60)
"""
IN_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
COMMANDS = {
    "module": (sys.executable, "-m", "carpool"),
    "script": (str(Path(sys.executable).with_name("carpool")),),
}


def container() -> tuple[str, ...]:
    """What a command stands behind to be process 1; the test is skipped where that cannot be."""
    command = IN_CONTAINER if os.getuid() == 0 else (IN_CONTAINER[0], "--user", "--map-root-user", *IN_CONTAINER[1:])
    with contextlib.suppress(OSError):
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    pytest.skip("unshare may make no namespace here")


@contextlib.contextmanager
def as_process_one(*command: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command as process 1: the process of `unshare`, which ends as it does, and the id of the command."""
    with subprocess.Popen([*container(), *command], cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: any(command[-1] in command_of(pid, 1000) for pid in children(process.pid)))
            yield process, children(process.pid)[0]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("child", "status"),
    [
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        (ORPHANS, 0),
        (WAITS, 5),
        ("assert os.getpgrp() == os.getpid() != os.getppid()", 0),
        ("assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])", 0),
    ],
    ids=["status", "killed", "orphans", "signal", "group", "mask"],
)
def test_an_init_reaps_passes_signals_on_and_ends_as_its_child(child: str, status: int) -> None:
    """An init reaps what others leave behind, passes on what it is sent, and ends with the status of its child."""
    program = [sys.executable, "-c", AS_INIT.format(child=child)]
    assert subprocess.run(program, timeout=PATIENCE_S, check=False).returncode == status


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_signal_while_the_program_is_imported_is_not_lost(kind: str, tmp_path: Path) -> None:
    """SIGTERM to `carpool serve` as process 1 ends it although its program is still being imported."""
    (tmp_path / "program.py").write_text(PROGRAM.format(seconds=600, join=False))
    with as_process_one(*COMMANDS[kind], "serve", "--port=0", "program:service", folder=tmp_path) as (process, pid):
        wait_until((tmp_path / "importing").exists)
        os.kill(pid, signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_a_server_drains_as_process_one(tmp_path: Path) -> None:
    """SIGTERM to process 1 is that of the server, which then ends in good order with status 0."""
    (tmp_path / "program.py").write_text(PROGRAM.format(seconds=0, join=False))
    command = (*COMMANDS["module"], "serve", "--port=0", "program:service")
    with as_process_one(*command, folder=tmp_path) as (process, pid):
        assert process.stderr is not None
        while "ready on" not in process.stderr.readline():
            pass
        os.kill(pid, signal.SIGTERM)
        assert "stopped" in process.stderr.read()
        assert process.wait(PATIENCE_S) == 0


def test_a_worker_that_waits_for_its_service_ends_at_once(tmp_path: Path) -> None:
    """SIGTERM to `carpool worker` as process 1 ends it with status 0 while nothing listens where it connects."""
    (tmp_path / "program.py").write_text(PROGRAM.format(seconds=0, join=True))
    waits = ("--connect=./nowhere", "--wait-s=600", "--log-level=debug", "program:service")
    with as_process_one(*COMMANDS["module"], "worker", *waits, folder=tmp_path) as (process, pid):
        assert process.stderr is not None
        while "cannot be reached yet" not in process.stderr.readline():
            pass
        os.kill(pid, signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
