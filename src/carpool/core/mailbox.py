"""Work that threads hand to the thread of a loop, so that none is lost when that thread ends. Sans-IO.

All calls are made under one lock of the driver's. While the loop lives, the first work since it last looked rings for
it; once it has ended, whoever posts gets the work back, to do it in its own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Work = Callable[[], object]


class Mailbox:
    """What has been posted and not been done."""

    __slots__ = ("_is_over", "_rung", "_work")

    def __init__(self) -> None:
        self._work: list[Work] = []
        self._rung = False
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the loop takes no more."""
        return self._is_over

    def post(self, work: Work) -> bool:
        """Leave some work. Whether the loop is to be rung for it, which it is not if that has been done already.

        Raises:
            ValueError: the loop has ended: the caller is to do the work itself.
        """
        if self._is_over:
            raise ValueError("the loop has ended")
        self._work.append(work)
        ring, self._rung = not self._rung, True
        return ring

    def take(self) -> Sequence[Work]:
        """All that was left, in its order; to be done now."""
        work, self._work = self._work, []
        self._rung = False
        return work

    def end(self) -> Sequence[Work]:
        """The loop has ended: no more work can be left. What was left is to be done all the same."""
        self._is_over = True
        return self.take()
