"""Work that threads hand to the thread of a loop, so that none is lost with it. Sans-IO.

All calls are made under one lock of the driver's. While the loop lives, the first work since it
last looked is to wake it; once it has ended, a thread that posts work is to do it itself.

The thread of a loop empties the mailbox after the loop has stopped. Later work is done by the
thread that brings it, which meets a stopped driver and gets its answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Work = Callable[[], object]


class Mailbox:
    """The work that has been posted and not been taken."""

    __slots__ = ("_is_over", "_is_woken", "_work")

    def __init__(self) -> None:
        self._work: list[Work] = []
        self._is_woken = False
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the loop takes no more."""
        return self._is_over

    def post(self, work: Work) -> bool:
        """Leave some work, and report whether the loop must be woken for it.

        It need not be if it has been woken already and has not looked since.

        Raises:
            ValueError: The loop has ended: the caller is to do the work itself.
        """
        if self._is_over:
            raise ValueError("the loop has ended")
        self._work.append(work)
        must_wake, self._is_woken = not self._is_woken, True
        return must_wake

    def take(self) -> Sequence[Work]:
        """Remove and return all that was posted, in its order, to be done now."""
        work, self._work = self._work, []
        self._is_woken = False
        return work

    def end(self) -> Sequence[Work]:
        """Note that the loop has ended, and return what was posted, to be done all the same.

        From now on no work can be posted.
        """
        self._is_over = True
        return self.take()
