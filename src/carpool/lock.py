"""A lock that knows who holds it, so that taking it twice is an error at once and not a deadlock."""

from __future__ import annotations

import os
import threading
import weakref


class Lock:
    """Like `threading.Lock`, to be shared by several `@carpool.batch` functions or with code of one's own.

    The thread that holds it and asks for it again gets a `RuntimeError`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        _locks.add(self)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; False if it could not be had in time. Raises RuntimeError if this thread holds it."""
        if self._is_owned():
            raise RuntimeError("this thread holds the lock already")
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner = threading.get_ident()
        return True

    def release(self) -> None:
        """Let go of the lock."""
        self._owner = None
        self._lock.release()

    def locked(self) -> bool:
        """Whether somebody holds it."""
        return self._lock.locked()

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _is_owned(self) -> bool:  # the name that RLock gives it
        return self._owner == threading.get_ident()

    def _start_anew(self) -> None:
        if not self._is_owned():
            self._lock = threading.Lock()
            self._owner = None


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child there is only the thread that forked: what another one held nobody would release."""
    for lock in list(_locks):
        lock._start_anew()


os.register_at_fork(after_in_child=_forked)
