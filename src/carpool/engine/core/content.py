"""What the core asks of items and results that it does not look into: to take them apart, and to
put them together.

A service gives one that works on bytes, see `service/content.py`. Here is the one for items that
are plain objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from carpool.errors import CarpoolError, ModelError


class Content(Protocol):
    """Takes items and results apart, and puts them together.

    A format says how an item has come from its caller, as in `wire/payload.py`; 0 is that of
    results. `accept` says how the caller wants its answer; it is 0 for what no caller gets. What
    cannot be done raises a `CarpoolError`.
    """

    def measure(self, result: Any) -> int:
        """Return how many bytes a result will hold while it waits."""

    def choose(self, choose: Callable[[Any], str], item: Any, format: int, known: str) -> str:
        """Return the name that a `choose=` of the user's returns for an item; `known` are all."""

    def handed_on(self, item: Any, format: int, accept: int) -> Any:
        """Return an item that no stage has been given in the form of a result."""

    def items(self, item: Any, format: int, most: float) -> list[Any]:
        """Return the items of a list, each in the format of the list; at most so many."""

    def joined(self, block: Any, results: Sequence[Any], accept: int) -> Any:
        """Return what the branches of a `Fork`, or the items of an `Each`, have come to, as one."""

    def as_value(self, error: Exception, accept: int) -> Any:
        """Return an error in the form of a result."""


class Plain:
    """The content of services whose items are plain objects."""

    def measure(self, result: Any) -> int:
        return 0

    def choose(self, choose: Callable[[Any], str], item: Any, format: int, known: str) -> str:
        try:
            return choose(item)
        except CarpoolError:
            raise
        except BaseException as error:
            kind = type(error).__name__
            raise ModelError(f"choose= of the Route to {known} raised {kind}: {error}", type_name=kind) from error

    def handed_on(self, item: Any, format: int, accept: int) -> Any:
        return item

    def items(self, item: Any, format: int, most: float) -> list[Any]:
        check_list(item, most)
        return list(item)

    def joined(self, block: Any, results: Sequence[Any], accept: int) -> Any:
        if block.names is not None:
            return dict(zip(block.names, results, strict=True))
        return tuple(results) if block.is_tuple else list(results)

    def as_value(self, error: Exception, accept: int) -> Any:
        return error


def check_list(item: object, most: float) -> None:
    """Raise ModelError unless an item is a list or a tuple of so many items at most."""
    if not isinstance(item, list | tuple):
        text = f"ForEach takes a list, and has been given {type(item).__name__}"
        raise ModelError(text, code="bad_result")
    check_length(len(item), most)


def check_length(n: int, most: float) -> None:
    """Raise ModelError if a list has too many items."""
    if n > most:
        text = f"a list for ForEach has {n} items, and max_items is {most}"
        raise ModelError(text, code="bad_result")
