"""Locks that are held while a batch function runs: our own, which records the thread that holds it,
and any other.

Taking our own twice in one thread is an error at once, not a deadlock.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from carpool.engine.clock import monotonic
from carpool.engine.type_hints import signature_of


class Lock:
    """Like `threading.Lock`, to be shared by several `@carpool.batch` functions or with other code
    of yours.

    A thread that holds it and asks for it again gets a `RuntimeError`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        _locks.add(self)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return False if it was not free in time.

        Raises:
            RuntimeError: This thread holds it already.
        """
        if self._is_owned():
            raise RuntimeError("this thread holds the lock already: release it before you take it again")
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner = threading.get_ident()
        return True

    def release(self) -> None:
        """Release the lock."""
        self._owner = None
        self._lock.release()

    def locked(self) -> bool:
        """Report whether a thread holds the lock."""
        return self._lock.locked()

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _is_owned(self) -> bool:  # RLock calls it so
        return self._owner == threading.get_ident()

    def _reset(self) -> None:
        if not self._is_owned():
            self._lock = threading.Lock()
            self._owner = None


class ExecutionLock(Protocol):
    """What a leader holds while the function runs."""

    def acquire(self, *, timeout: float) -> bool:
        """Take the lock; return False if it was not free within `timeout` seconds."""

    def release(self) -> None:
        """Release the lock."""


class WithoutTimeout:
    """Makes an `ExecutionLock` of a lock without timeouts: a lock that comes too late is
    released again.
    """

    def __init__(self, enter: Callable[[], Any], leave: Callable[[], Any]) -> None:
        self._enter = enter
        self._leave = leave

    def acquire(self, *, timeout: float) -> bool:
        until = monotonic() + timeout
        if self._enter() is False:
            return False
        if monotonic() <= until:
            return True
        self._leave()
        return False

    def release(self) -> None:
        self._leave()


def execution_lock(lock: Any, name: str) -> ExecutionLock:
    """Return the user's lock, of whatever kind, as one that a leader can take.

    Args:
        lock: Has `acquire` and `release`, or `__enter__` and `__exit__`.
        name: The name of the function that the lock is for.

    Raises:
        TypeError: It is not a lock, or can be held only once.
    """
    kind = type(lock)
    entered = callable(getattr(kind, "__enter__", None)) and callable(getattr(kind, "__exit__", None))
    acquire, release = getattr(lock, "acquire", None), getattr(lock, "release", None)
    acquired = callable(acquire) and callable(release) and not inspect.iscoroutinefunction(acquire)
    if isinstance(lock, type) or not (entered or acquired):
        raise TypeError(
            f"the execution_lock of {name} must be a carpool.Lock, a threading.Lock or an RLock, or anything else that"
            f" has acquire and release or works in a with statement, not {lock!r}"
        )
    if isinstance(lock, contextlib._GeneratorContextManager):
        raise TypeError(
            f"the execution_lock of {name} must be one that can be held more than once, but {lock!r} was made by a"
            " @contextmanager function and can be held only once: give an object with __enter__ and __exit__"
        )
    if acquired and _takes_timeout(acquire):
        return lock  # type: ignore[no-any-return]
    if entered:
        return WithoutTimeout(lambda: [kind.__enter__(lock)], lambda: kind.__exit__(lock, None, None, None))
    assert callable(acquire) and callable(release)
    return WithoutTimeout(acquire, release)


def is_async_lock(lock: object) -> bool:
    kind = type(lock)
    return not isinstance(lock, type) and hasattr(kind, "__aenter__") and hasattr(kind, "__aexit__")


def is_owned(lock: object) -> bool:
    """Report whether this thread holds the lock; False for kinds of locks that do not record it."""
    return isinstance(lock, _KNOW_OWNER) and lock._is_owned()


def can_be_tried(lock: object) -> bool:
    """Report whether the lock can be asked for without waiting; others may raise, or wait all the
    same.
    """
    return type(lock) in (Lock, *_BUILT_IN)


def _takes_timeout(acquire: Any) -> bool:
    if isinstance(getattr(acquire, "__self__", None), _BUILT_IN):
        return True
    try:
        parameters = signature_of(acquire).parameters
    except (TypeError, ValueError):
        return False
    return "timeout" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


_KNOW_OWNER: Any = (Lock, type(threading.RLock()))
_BUILT_IN = (type(threading.Lock()), type(threading.RLock()))  # these have no signature to look at

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forked() -> None:
    """Reset the locks in a forked child. Only the thread that forked is there; no other would
    release what it held.
    """
    for lock in list(_locks):
        lock._reset()


os.register_at_fork(after_in_child=_forked)
