"""The guard's own program: kills the workers' process groups when the service's process has died.

A worker that outlives its parent ends by itself (`main.py`), but the processes that it has started
do not: no parent-death signal reaches a worker's children. `drive/guard.py` starts it as `python -I
-S guard.py PARENT` with a pipe for its input, which names the groups that come (`+123`) and go
(`-123`); `quit` means that nothing is to be killed. When the parent dies, the pipe ends. If a child
that the parent has forked still holds the pipe open, the death is noticed by a pidfd, where the
system has them.

It imports as little as it can: it starts in 10 ms, and only 3 MB of its memory are its own.
"""

import os
import select
import signal
import sys


def main() -> None:
    """Listen until the parent says `quit` or is dead."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # the parent decides when to stop, and may take its time
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    if _listen(int(sys.argv[1]), groups):
        for group in groups:
            try:  # noqa: SIM105 - contextlib would cost as much as all else here
                os.killpg(group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
    os._exit(0)


def _listen(parent: int, groups: set[int]) -> bool:
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:  # noqa: SIM105
        poll.register(os.pidfd_open(parent), select.POLLIN)
    except (AttributeError, OSError):
        pass  # the system has no pidfds, or the parent is dead already
    is_orphan = os.getppid() != parent
    unfinished = b""
    while True:
        if not is_orphan:
            is_orphan = any(fd != 0 for fd, _ in poll.poll())
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            if is_orphan:
                return True
            continue
        if not data:
            return True
        *lines, unfinished = (unfinished + data).split(b"\n")
        for line in lines:
            if line == b"quit":
                return False
            change = groups.add if line.startswith(b"+") else groups.discard
            change(int(line[1:]))


if __name__ == "__main__":
    main()
