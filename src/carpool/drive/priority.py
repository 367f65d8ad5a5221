"""Workers that load at a lower priority, so that they take no core from those that serve.

A process may always lower its priority, but it needs a permission to raise it again: a nice limit
(`LimitNICE=+0` of systemd, `ulimit -e 20`) or CAP_SYS_NICE. Where there is none, nothing is
lowered, since a worker would stay slow once it serves.

Other ways were weighed. SCHED_IDLE needs the same permission. SCHED_BATCH needs none, but leaves a
process that computes its whole share. A lower priority of the loading thread alone would be that of
all threads which libraries start meanwhile, and could not be taken from them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from functools import cache

_STEPS = 5  # one that loads gets a quarter of a core that another one wants, too
_LOWEST = 19


class LowPriority:
    """The lower priority of a process group, from now until `end`.

    Args:
        pid: The process that leads the group.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._lowered = os.getpriority(os.PRIO_PROCESS, 0)
        if may_lower():
            self._lowered = min(self._before + _STEPS, _LOWEST)
            self._set(self._lowered)

    def end(self) -> None:
        """Give all threads and processes of the group the priority that they began with.

        One that has chosen its own priority keeps that.
        """
        with contextlib.suppress(OSError):  # it has ended
            if os.getpriority(os.PRIO_PROCESS, self._pid) == self._lowered:
                self._set(self._before)

    def _set(self, nice: int) -> None:
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PGRP, self._pid, nice)


@cache
def may_lower() -> bool:
    """Report whether this process may lower a priority and raise it again.

    A thread tries it on itself: on Linux each has a priority of its own.
    """
    may = []

    def try_it() -> None:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, min(before + 1, _LOWEST))
            os.setpriority(os.PRIO_PROCESS, 0, before)
            may.append(True)

    if sys.platform == "linux":
        thread = threading.Thread(target=try_it, name="carpool-priority", daemon=True)
        with contextlib.suppress(RuntimeError):  # the system has no thread to give
            thread.start()
            thread.join()
    return bool(may)
