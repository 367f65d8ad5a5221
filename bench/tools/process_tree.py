"""A process with all that it started: who they are, what they have used, and how to end them.

Some servers give their workers process groups of their own or leave orphans, so a group is not
enough: membership is descent from the leader, or the leader's session, or having once been seen as
a member. A process is known by its number *and* its start time, so that a number used again is
never mistaken for it. Linux only: all facts are from /proc.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/PID/stat, as far as it matters here."""

    pid: int
    parent: int
    session: int
    started: int
    zombie: bool
    cpu_ticks: int  # its own and those of the children it has waited for


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none gets out of sight."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_on_sigterm() -> None:
    """Let SIGTERM unwind this process as Ctrl-C does, so that what it started is ended too."""

    def unwind(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, unwind)


def every_process() -> dict[int, Process]:
    """All processes of the machine by number."""
    found = (read_process(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return {process.pid: process for process in found if process}


def read_process(pid: int) -> Process | None:
    """The process as it is now, or None where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses, and may itself hold blanks and parentheses.
    fields = line[line.rindex(b")") + 2 :].split()
    state, parent, session, started = fields[0], int(fields[1]), int(fields[3]), int(fields[19])
    return Process(pid, parent, session, started, state == b"Z", sum(map(int, fields[11:15])))


class ProcessTree:
    """The processes that came of one leader, which must be the first of its session."""

    def __init__(self, leader: int) -> None:
        first = read_process(leader)
        if first is None:
            raise ProcessLookupError(f"no process {leader}")
        self.leader = first
        self._seen = {(first.pid, first.started)}

    def members(self) -> list[Process]:
        """Those alive now, and those that ended and still wait to be collected."""
        everyone = every_process()
        children: dict[int, list[Process]] = {}
        for process in everyone.values():
            children.setdefault(process.parent, []).append(process)

        found: dict[int, Process] = {}
        pending = [process for process in everyone.values() if self._belongs(process)]
        while pending:
            process = pending.pop()
            if process.pid not in found:
                found[process.pid] = process
                pending += children.get(process.pid, [])
        self._seen |= {(process.pid, process.started) for process in found.values()}
        return list(found.values())

    def cpu_s(self) -> float:
        """Processor time that all of them have used so far, user and system."""
        return sum(process.cpu_ticks for process in self.members()) * TICK_S

    def kill(self) -> None:
        """End what is left, the leader's group first, and return then, or after 5 seconds."""
        deadline = time.monotonic() + 5
        if self.members():
            with suppress(ProcessLookupError):
                os.killpg(self.leader.pid, signal.SIGKILL)
        while (left := self.members()) and time.monotonic() < deadline:
            for process in left:
                self._end(process)
            if all(process.zombie and process.pid == self.leader.pid for process in left):
                return  # the leader is its starter's to collect
            time.sleep(0.02)

    def _belongs(self, process: Process) -> bool:
        if (process.pid, process.started) in self._seen:
            return True
        return process.session == self.leader.pid and process.started >= self.leader.started

    def _end(self, process: Process) -> None:
        if not process.zombie:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        elif process.pid != self.leader.pid:
            with suppress(ChildProcessError):  # an orphan is ours to collect, any other its parent's
                os.waitpid(process.pid, os.WNOHANG)
