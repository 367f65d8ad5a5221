"""carpool as process 1, as in a container: an init that starts the command as its child.

The kernel discards signals that process 1 has no handler for, so one that comes while the program
is imported would be lost; and whatever is left behind by others becomes a child of process 1, which
has to take note of its end. So process 1 forks before it does anything else. It passes signals on,
and ends with its child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from itertools import pairwise

_OF_OURS = frozenset(
    {
        *(signal.SIGKILL, signal.SIGSTOP),  # cannot be blocked
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
        *(signal.SIGTTIN, signal.SIGTTOU),
    }
)
"""Signals that are not passed on: they speak of what this process itself does."""


def is_command() -> bool:
    given = sys.orig_argv[1:]
    if sys.argv[:1] == ["-m"]:  # as long as what it names is being imported
        return "-mcarpool" in given or ("-m", "carpool") in pairwise(given)
    return bool(sys.argv) and os.path.basename(sys.argv[0]) == "carpool"


def become_init() -> None:
    """Fork, and return in the child; the parent passes signals on and ends with the child.

    Its exit status is the child's, or 128 + N if signal N has ended the child.
    """
    passed_on = signal.valid_signals() - _OF_OURS
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # blocked, they wait for us
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # else Ctrl-C would reach it twice: from the terminal, and from its parent
        with contextlib.suppress(OSError):  # there is no terminal
            os.tcsetpgrp(0, os.getpgrp())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        number = signal.sigwait(passed_on)
        if number == signal.SIGCHLD:
            _reap(child)
        else:
            os.kill(child, number)


def _reap(child: int) -> None:
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
