"""Where the results of a worker go: on, or to the caller.

A stage may stand at several places of a graph. As far as its workers see them, places differ in
what becomes of a result, and alike ones are one `Spot`. Each item comes with the number of its
spot, beside the encoding that its caller wants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from carpool.engine.call.results import Failed
from carpool.engine.foreign import as_model_error
from carpool.engine.turns import Done, To
from carpool.errors import CarpoolError, ModelError

SPOTS: Final = 16
"""How many spots a stage may have. In a message an item's spot times this is added to the byte that
says how its caller wants the result."""


class Goes(Enum):
    """The fate of a result."""

    ON = "on"  # another stage gets it, or a join
    LIST = "list"  # it is a list whose items go on one by one
    ANSWER = "answer"  # it is the answer
    PART = "part"  # it is a part of the answer, which a join makes


def chosen(choose: Callable[[Any], str], item: object, known: str) -> str:
    """Return the name that a `choose=` of the user's returns for an item.

    Args:
        choose: The user's function.
        item: What it is called with.
        known: All names that there are, as they are shown in an error.

    Raises:
        CarpoolError: It raises; what is no error of ours becomes a `ModelError`.
    """
    try:
        return choose(item)
    except CarpoolError:
        raise
    except BaseException as error:
        raise as_model_error(error, f"choose= of the Route to {known}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """The ways on from a place, of which each result takes one.

    Attributes:
        choose: Names the way for a result; None if results name it themselves, as `To`.
        by_name: For each name the position of the way among all those of the place, or further ways
            of which one is taken.
    """

    choose: Callable[[Any], str] | None
    by_name: Mapping[str, Ways | int]

    def find(self, name: object, item: object) -> int:
        """Return the position of the way of a result.

        Args:
            name: What the result names; None if it names none.
            item: The result.

        Raises:
            CarpoolError: There is no such way, or `choose` raises.
        """
        if name is None:
            if self.choose is None:
                raise self._unknown("no branch was named: return To(branch, item), or give Route a choose=")
            name = chosen(self.choose, item, ", ".join(map(repr, self.by_name)))
        try:
            way = self.by_name[name]  # type: ignore[index]
        except (KeyError, TypeError):
            raise self._unknown(f"there is no branch {name!r:.80}") from None
        return way.find(None, item) if type(way) is Ways else way  # type: ignore[return-value]

    def _unknown(self, text: str) -> ModelError:
        return ModelError(f"{text}; there are {', '.join(map(repr, self.by_name))}", code="bad_result")


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """What becomes of the results at some places of a stage.

    Attributes:
        goes: Of each way on; there is one, unless a `Route` follows.
        ways: How a result takes one of several; None if no `Route` follows.
        answer: The type of the service's answers.
        no_early: Why no result may be the answer by itself; empty if it may.
    """

    goes: tuple[Goes, ...]
    ways: Ways | None = None
    answer: Any = Any
    no_early: str = ""

    def turn(self, result: Any) -> tuple[Goes | None, int, Any]:
        """Return what becomes of a result, the position of its way, and the result without what
        says so. Of an early answer there is no way, and the first is None.
        """
        kind = type(result)
        if kind is Failed:
            return Goes.ON, 0, result
        if kind is Done:
            if self.no_early:
                return Goes.ON, 0, Failed(ModelError(self.no_early, code="bad_result"))
            return None, 0, result.answer
        name = None
        if kind is To:
            name, result = result.branch, result.item
            if self.ways is None:
                text = f"a result names {name!r:.80} as its branch, and no Route follows"
                return Goes.ON, 0, Failed(ModelError(text, code="bad_result"))
        if self.ways is None:
            return self.goes[0], 0, result
        try:
            way = self.ways.find(name, result)
        except BaseException as error:
            return Goes.ON, 0, Failed(error)
        return self.goes[way], way, result


def choosers(spots: Sequence[Spot]) -> list[Callable[[Any], str]]:
    """Return the functions by which results at some spots find their ways."""
    found, ways = [], [spot.ways for spot in spots if spot.ways is not None]
    while ways:
        each = ways.pop()
        ways += [inner for inner in each.by_name.values() if isinstance(inner, Ways)]
        if each.choose is not None:
            found.append(each.choose)
    return found


ON: Final = Spot((Goes.ON,))
ANSWER: Final = Spot((Goes.ANSWER,))
