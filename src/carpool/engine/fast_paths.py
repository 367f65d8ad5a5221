"""Fast paths: functions that do for most cases what other code does for all, only sooner.

Each declines, by what it returns, where it does not apply or has been switched off. So a test, and
`python -m bench fast_paths`, can do without any of them, and a mark costs nothing at a call. The
table of `bench/fast_paths` has the code that each stands for, and its gain. One that moves no
published figure goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_IS_ASYNC: Final = 0x80  # the flag of the code of an `async def`


class FastPath(NamedTuple):
    """One function of a fast path, which returns `declined` where it leaves the work to the code
    that it stands for.
    """

    function: Any
    declined: object

    def put(self, function: Callable[..., Any]) -> None:
        scope, name = self.function.__globals__, self.function.__qualname__
        if "." not in name:
            scope[name] = function
            return
        owner, name = name.split(".")
        setattr(scope[owner], name, function)

    def decline(self) -> None:
        async def declines_later(*_: object, **__: object) -> object:
            return self.declined

        is_async = self.function.__code__.co_flags & _IS_ASYNC
        self.put(declines_later if is_async else lambda *_, **__: self.declined)


FAST_PATHS: Final[dict[str, list[FastPath]]] = {}
"""The functions of each fast path that has been loaded, by its name."""


def fast_path(name: str, declined: object = None) -> Callable[[F], F]:
    """Mark a function of a fast path, which is called as if it were not marked.

    Args:
        declined: What the function returns where it has done nothing.
    """

    def mark(function: F) -> F:
        FAST_PATHS.setdefault(name, []).append(FastPath(function, declined))
        return function

    return mark


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Switch fast paths off inside the block, in this process."""
    functions = [each for name in names for each in FAST_PATHS[name]]
    try:
        for each in functions:
            each.decline()
        yield
    finally:
        for each in functions:
            each.put(each.function)
