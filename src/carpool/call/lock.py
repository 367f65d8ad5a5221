"""Locks that are held while a batch function runs: one of ours, which knows who holds it, and any other.

To take ours twice is an error at once and not a deadlock.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from carpool.clock import monotonic


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


class ExecutionLock(Protocol):
    """What a leader holds while the function runs."""

    def acquire(self, *, timeout: float) -> bool:
        """Take it; False if it could not be had within so many seconds."""

    def release(self) -> None:
        """Give it back."""


class Entered:
    """A lock that cannot be waited for within a time, as an `ExecutionLock`: if it came too late, it is given back."""

    def __init__(self, enter: Callable[[], Any], leave: Callable[[], Any]) -> None:
        self._enter = enter
        self._leave = leave

    def acquire(self, *, timeout: float) -> bool:
        """Wait for it as long as it takes."""
        until = monotonic() + timeout
        if self._enter() is False:
            return False
        if monotonic() <= until:
            return True
        self._leave()
        return False

    def release(self) -> None:
        """Give it back."""
        self._leave()


def execution_lock(lock: Any, name: str) -> ExecutionLock:
    """A lock of the user's, of whatever kind, as what a leader takes.

    Args:
        lock: has `acquire` and `release`, or `__enter__` and `__exit__`.
        name: of the function that it is for.

    Raises:
        TypeError: it is nothing of the kind, or can be held but once.
    """
    kind = type(lock)
    entered = callable(getattr(kind, "__enter__", None)) and callable(getattr(kind, "__exit__", None))
    acquire, release = getattr(lock, "acquire", None), getattr(lock, "release", None)
    acquired = callable(acquire) and callable(release) and not inspect.iscoroutinefunction(acquire)
    if isinstance(lock, type) or not (entered or acquired):
        raise TypeError(
            f"the execution_lock of {name} must be a carpool.Lock, a threading.Lock or an RLock, or anything else that"
            f" has acquire and release or can stand in a with statement, not {lock!r}"
        )
    if isinstance(lock, contextlib._GeneratorContextManager):
        raise TypeError(
            f"the execution_lock of {name} must be one that can be held again and again, which {lock!r} cannot, as it"
            " was made by a @contextmanager function: give an object with __enter__ and __exit__"
        )
    if acquired and _takes_timeout(acquire):
        return lock  # type: ignore[no-any-return]
    if entered:
        return Entered(lambda: [kind.__enter__(lock)], lambda: kind.__exit__(lock, None, None, None))
    assert callable(acquire) and callable(release)
    return Entered(acquire, release)


def is_owned(lock: object) -> bool:
    """Whether this thread holds the lock, as far as its kind can tell."""
    return isinstance(lock, _KNOWING) and lock._is_owned()


def can_be_tried(lock: object) -> bool:
    """Whether one can ask for it with no time to wait, and be told no; others may raise, or wait all the same."""
    return type(lock) in (Lock, *_BUILT_IN)


def _takes_timeout(acquire: Any) -> bool:
    """Whether one can say how long to wait."""
    if isinstance(getattr(acquire, "__self__", None), _BUILT_IN):
        return True
    try:
        parameters = inspect.signature(acquire).parameters
    except (TypeError, ValueError):
        return False
    return "timeout" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


_KNOWING: Any = (Lock, type(threading.RLock()))
_BUILT_IN = (type(threading.Lock()), type(threading.RLock()))  # these have no signature to look at

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child there is only the thread that forked: what another one held nobody would release."""
    for lock in list(_locks):
        lock._start_anew()


os.register_at_fork(after_in_child=_forked)
