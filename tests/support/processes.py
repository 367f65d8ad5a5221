"""Which processes there are, what this one holds, and children that a test forks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.waiting import PATIENCE_S


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def existing(pids: Sequence[int]) -> list[int]:
    """Those of the processes that exist, zombies among them."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def children(pid: int | None = None) -> list[int]:
    """The processes that a process has started and not waited for; without a number, those of this one."""
    found: list[int] = []
    for task in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command_of(pid: int, longest: int = 100) -> str:
    """The command line of a process, or why it has none."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return "(gone)"
    return command[:longest] or "(a zombie)"


def guards_of(pid: int) -> list[int]:
    """The guards among a process's children, but for one that ends just then."""
    return [child for child in children(pid) if "guard.py" in command_of(child, 10_000)]


def resident_bytes() -> int:
    """The memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_a_child(act: Callable[[], object]) -> int:
    """The exit code of a forked child that does this; it may not hang.

    Returns:
        7 if it returned None and 1 if anything else; 8 for the error that a service is of another process, 2 for any
        other error.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(7 if act() is None else 1)
        except BaseException as error:
            os._exit(8 if isinstance(error, RuntimeError) and "another process" in str(error) else 2)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")
