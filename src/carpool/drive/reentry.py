"""Which threads are inside which batch functions, so that a call that waits for itself is refused.

A function may call another one, whose leader is another thread, which calls the first one: each
would wait for the other. So a thread that is inside a function, and is about to sleep in a line,
asks first whether all threads that could wake it sleep, directly or not, for what it leads.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

from carpool.drive.wakeups import ThreadWaiter


class Led(Protocol):
    """A line as this file sees it."""

    @property
    def leading_threads(self) -> list[object] | None:
        """The threads that lead it; None if one more could."""


class Sleeper(NamedTuple):
    """Where a thread sleeps while it is inside a function.

    Attributes:
        line: The line in which it sleeps.
        waiter: What it waits for there.
    """

    line: Led
    waiter: ThreadWaiter


leading: dict[int, tuple[Led, ...]] = {}
"""The lines whose functions each thread is inside of. A thread changes its own entry only."""

sleeping: dict[object, Sleeper] = {}
"""Where threads that lead another line sleep, by thread; each has an entry while it sleeps."""


def would_deadlock(line: Led, thread: int) -> bool:
    """Report whether nothing moves in a line before the thread is done with what it leads."""
    lines = [line]
    for each in lines:  # which grows
        leaders = each.leading_threads
        if leaders is None:
            return False
        for leader in leaders:
            if leader == thread:
                continue
            sleeper = sleeping.get(leader)
            if sleeper is None or not sleeper.waiter.pending:
                return False
            if sleeper.line not in lines:
                lines.append(sleeper.line)
    return True


def _forked() -> None:
    leading.clear()
    sleeping.clear()


os.register_at_fork(after_in_child=_forked)
