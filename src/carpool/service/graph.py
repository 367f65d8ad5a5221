"""The parts of a service: stages in a row, and between them branches, routes and lists.

An element is a stage, a list of elements (a line; an empty one hands its item on), or one of
`Parallel`, `Route` and `ForEach`. A stage may stand at several places; it is one pool of workers
then.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypedDict, Union

from carpool.engine.hints import schema
from carpool.engine.rows import is_array_type
from carpool.engine.type_hints import hints_of
from carpool.engine.wire.outcome import MOST_WAYS
from carpool.model import AnyModel, Traits
from carpool.service.checks import at_least, check_callable, header_of
from carpool.service.fits import may_fit
from carpool.service.stage import Stage

MOST_ITEMS = 1024
_NUMBERS = itertools.count(1)  # names of types differ, as they do in an OpenAPI document


class Parallel:
    """Branches that all get the same item; the next element gets all of their results.

    What follows gets a tuple in the order of the branches or, if they have names, a dict. At the
    end of a service that is the answer.

    Args:
        branches: Elements; or one dict of them, by name.
        errors: "raise": the first error of a branch fails the request, and the other branches
            are not run any further. "values": what a model or a lost worker has cost a branch is
            that branch's value: a `ModelError`, the `Unavailable` of a lost worker, or the
            `DeadlineExceeded` of an item for which two workers were given up. An `HTTPError` fails
            the request, as a model raises it for its client.

    Raises:
        ValueError: There is no branch, or `errors` is neither of the two.
        TypeError: A branch is no element, or a name is no text.
    """

    __slots__ = ("branches", "errors", "names")

    def __init__(
        self, *branches: Element | Mapping[str, Element], errors: Literal["raise", "values"] = "raise"
    ) -> None:
        self.names: tuple[str, ...] | None = None
        if len(branches) == 1 and isinstance(branches[0], Mapping):
            self.names = _names_of("Parallel", branches[0])
            branches = tuple(branches[0].values())
        if not branches:
            raise ValueError("Parallel needs at least one branch")
        if errors not in ("raise", "values"):
            raise ValueError(f'errors of Parallel must be "raise" or "values", not {errors!r}')
        self.branches: tuple[Line, ...] = tuple(line_of(branch) for branch in branches)  # type: ignore[arg-type]
        self.errors = errors

    def __repr__(self) -> str:
        if self.names is None:
            return f"Parallel({', '.join(map(in_short, self.branches))})"
        return f"Parallel({', '.join(map(_named, self.names, self.branches))})"


class Route:
    """Branches of which each item takes one.

    Args:
        branches: Elements by name.
        choose: A function of an item that returns the name of its branch. It runs in the workers of
            the stage before; at the beginning of a service, and behind a `Parallel` or a `ForEach`,
            it runs in the coordinator, which opens the item for it. Without it the stage before
            returns `To(name, item)`.
        when_full: "wait": the stage before waits until there is room in every branch. "refuse": an
            item whose branch is full is refused with `Overloaded`, and the others go on.

    Raises:
        ValueError: There is no branch, or there are too many; `choose` returns other names by its
            hint, a `Literal`; or `when_full` is neither of the two.
        TypeError: A branch is no element, a name is no text, or `choose` cannot be called, or is
            one with `async def`.
    """

    __slots__ = ("branches", "choose", "when_full")

    def __init__(
        self,
        branches: Mapping[str, Element],
        *,
        choose: Callable[[Any], str] | None = None,
        when_full: Literal["wait", "refuse"] = "wait",
    ) -> None:
        if not isinstance(branches, Mapping):
            raise TypeError(
                f'Route takes a dict of branches by name, such as {{"en": Stage(English)}}, not {branches!r}'
            )
        names = _names_of("Route", branches)
        if not names:
            raise ValueError("Route needs at least one branch")
        if len(names) > MOST_WAYS:
            raise ValueError(f"Route has {len(names)} branches: at most {MOST_WAYS} are possible")
        if choose is not None:
            check_callable("choose", choose, "an item")
            unknown = [name for name in _named_by(choose) if name not in names]
            if unknown:
                raise ValueError(
                    f"choose= of Route returns {unknown[0]!r} by its hint, and there is no such branch; there are"
                    f" {', '.join(map(repr, names))}"
                )
        if when_full not in ("wait", "refuse"):
            raise ValueError(f'when_full of Route must be "wait" or "refuse", not {when_full!r}')
        self.branches: dict[str, Line] = {name: line_of(branch) for name, branch in branches.items()}
        self.choose = choose
        self.when_full = when_full

    def __repr__(self) -> str:
        return f"Route({', '.join(map(_named, self.branches, self.branches.values()))})"


class ForEach:
    """A line that each item of a list goes through; the next element gets the list of the results.

    The items of all lists share batches. The list has the order of the items. The first error of
    one fails the request.

    Args:
        body: Elements, one after the other.
        max_items: The most items that a list may have.

    Raises:
        ValueError: There is no element, or `max_items` is no whole number of at least 1.
        TypeError: One is no element.
    """

    __slots__ = ("body", "max_items")

    def __init__(self, *body: Element, max_items: int = MOST_ITEMS) -> None:
        self.body: Line = line_of(body)
        self.max_items = at_least("max_items", max_items, 1)
        if not self.body:
            raise ValueError("ForEach needs at least one element")

    def __repr__(self) -> str:
        return f"ForEach({in_short(self.body)})"


Block: TypeAlias = Parallel | Route | ForEach
Element: TypeAlias = Union[Stage, AnyModel, Block, "Sequence[Element]"]
"""The elements of a graph."""

Line: TypeAlias = tuple[Stage | Block, ...]
"""Elements one after the other, without lists in lists and bare models."""


def line_of(element: Element) -> Line:
    """Return an element as a line. Raises TypeError if it is none."""
    if isinstance(element, Stage | Parallel | Route | ForEach):
        return (element,)
    if isinstance(element, list | tuple):
        return tuple(each for inner in element for each in line_of(inner))
    if isinstance(element, Mapping):
        raise TypeError("branches with names are those of a Parallel or a Route: a dict is no element by itself")
    return (Stage(element),)  # type: ignore[arg-type]


def _names_of(what: str, branches: Mapping[str, Any]) -> tuple[str, ...]:
    for name in branches:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{what} names a branch {name!r}: a name is a text that is not empty")
    return tuple(branches)


def _named_by(choose: Callable[[Any], str]) -> tuple[Any, ...]:
    """Return the names that a `choose=` returns by its hint; nothing if it is no `Literal`."""
    try:
        gives = hints_of(choose).get("return")
    except (NameError, AttributeError, TypeError):  # it has no hints, or they mean nothing where they stand
        return ()
    return typing.get_args(gives) if typing.get_origin(gives) is typing.Literal else ()


def in_short(line: Line) -> str:
    """Return a line as people read it."""
    return " -> ".join([each.name if isinstance(each, Stage) else repr(each) for each in line]) or "[]"


def _named(name: str, line: Line) -> str:
    return f"{name}: {in_short(line)}"


def branches_of(element: Stage | Block) -> tuple[Line, ...]:
    if isinstance(element, Parallel):
        return element.branches
    if isinstance(element, Route):
        return tuple(element.branches.values())
    return (element.body,) if isinstance(element, ForEach) else ()


def stages_in(line: Line) -> tuple[Stage, ...]:
    """Return the stages of a line, each once, in the order in which they are written."""
    found: dict[int, Stage] = {}
    for each in line:
        inner = (each,) if isinstance(each, Stage) else [s for branch in branches_of(each) for s in stages_in(branch)]
        found.update({id(stage): stage for stage in inner if id(stage) not in found})
    return tuple(found.values())


def firsts_of(line: Line) -> list[Stage]:
    """Return the stages at which items of a line may begin."""
    return list(_at_border(line, 0))


def is_line(line: Line) -> bool:
    """Report whether a line consists of stages, each at one place."""
    return all(isinstance(each, Stage) for each in line) and len(stages_in(line)) == len(line)


def with_stages(line: Line, stages: Mapping[int, Stage]) -> Line:
    """Return a line with other stages in the places of its own, which are given by their ids."""
    return tuple(_with_stages(each, stages) for each in line)


def _with_stages(element: Stage | Block, stages: Mapping[int, Stage]) -> Stage | Block:
    if isinstance(element, Stage):
        return stages[id(element)]
    inner = [with_stages(branch, stages) for branch in branches_of(element)]
    if isinstance(element, Parallel):
        named = inner if element.names is None else [dict(zip(element.names, inner, strict=True))]
        return Parallel(*named, errors=element.errors)
    if isinstance(element, Route):
        by_name = dict(zip(element.branches, inner, strict=True))
        return Route(by_name, choose=element.choose, when_full=element.when_full)
    return ForEach(*inner, max_items=element.max_items)


# -- what a service takes and gives


def traits_of_first(line: Line) -> Traits:
    """Return the traits of the first stage, or those on which the first branches agree."""
    first = line[0]
    if isinstance(first, Stage):
        return first.traits
    heads = [branch for branch in branches_of(first) if branch]
    inner = [traits_of_first(branch) for branch in heads] or [_nothing("")]
    name, examples = inner[0].name, inner[0].examples
    takes: Any
    if isinstance(first, ForEach):
        takes, examples = _list_of(inner[0].input_type), ([*examples],) if examples else ()
    elif isinstance(first, Parallel):
        takes = next((each.input_type for each in inner if each.input_type is not Any), Any)
    else:
        takes = _one_of([each.input_type for each in inner], schema.why_unreadable)
        examples = () if first.choose is None else examples
    return replace(_nothing(name), input_type=takes, examples=examples)


def traits_of_last(line: Line, name: str) -> Traits:
    """Return the traits of the last stage, or of the joint results of the last branches."""
    last = line[-1]
    if isinstance(last, Stage):
        return last.traits
    return replace(_nothing(name), output_type=_gives(line, Any), is_joined=not isinstance(last, Route))


def _nothing(name: str) -> Traits:
    return Traits(name, Any, Any, False, (), (), (), False, False)


def _joined(names: Sequence[str] | None, kinds: Sequence[Any]) -> Any:
    kinds = [Any if schema.why_unwritable(kind) is not None else kind for kind in kinds]
    if names is None:
        return tuple.__class_getitem__(tuple(kinds))
    return TypedDict(f"Joined{next(_NUMBERS)}", dict(zip(names, kinds, strict=True)))  # type: ignore[operator]


def _list_of(kind: Any) -> Any:
    return list[kind]


def _one_of(kinds: Sequence[Any], problem: Callable[[Any], str | None]) -> Any:
    """Return the union of types; `Any` if values over HTTP do not show their type."""
    different: list[Any] = []
    for kind in kinds:
        if kind not in different:
            different.append(kind)
    if not different or Any in different:
        return Any
    whole = different[0] if len(different) == 1 else Union[tuple(different)]  # noqa: UP007 - of a number of types
    return Any if problem(whole) is not None else whole


def _gives(line: Line, takes: Any) -> Any:
    kind = takes
    for element in line:
        if isinstance(element, Stage):
            kind = element.traits.output_type
        elif isinstance(element, ForEach):
            kind = _list_of(_gives(element.body, Any))
        else:
            inner = [_gives(branch, kind) for branch in branches_of(element)]
            if isinstance(element, Route):
                kind = _one_of(inner, schema.why_unwritable)
            else:
                if element.errors == "values":
                    inner = [Any] * len(inner)
                kind = _joined(element.names, inner)
    return kind


# -- what cannot work


def check_graph(line: Line) -> None:
    """Check that a graph can work.

    Raises:
        ValueError: There is no stage, two have the same name, a queue is too small for what may
            come to it, a stage that answers in parts is not the last one, a format of a model's own
            would be gone past, a `Route` has nothing that names branches, or what names them has
            none.
        TypeError: By the hints, what one stage gives is not what the next one takes.
    """
    stages = stages_in(line)
    if not stages:
        raise ValueError("a service needs at least one stage")
    names = [stage.name for stage in stages]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"two stages are called {twice[0]!r}: give one of them another name with name=, or the same Stage object at"
            " both places"
        )
    _check_places(line, (), ends=True)
    for stage in stages:
        if header_of(stage.key) is not None and (stage is not line[0] or _places(line, stage) > 1):
            raise ValueError(f"key of stage {stage.name} is a header, which only the first stage can see")
    _check_borders(line)
    _check_types(line, Any, "")
    _check_named(line)
    _check_early(line)


def _check_places(line: Line, then: Sequence[Stage], *, ends: bool) -> None:
    """Check each stage of a line against the next element, and those inside of its elements.

    Args:
        then: Where what it comes to may wait.
        ends: Whether nothing follows it but the end of a service, or a join.
    """
    for i, element in enumerate(line):
        waits, is_last = waits_at(line[i + 1 :], then), ends and i == len(line) - 1
        if isinstance(element, Stage):
            _check_place(element, waits, is_last)
        for branch in branches_of(element):
            if isinstance(element, Route):
                _check_places(branch, waits, ends=is_last)
            else:
                _check_places(branch, (), ends=True)


def waits_at(line: Line, then: Sequence[Stage]) -> list[Stage]:
    """Return the stages for which there must be room before something is made that goes to a line.

    Args:
        then: Those behind it.
    """
    if not line:
        return list(then)
    element, behind = line[0], waits_at(line[1:], then)
    if isinstance(element, Stage):
        return [element]
    if isinstance(element, Route):
        ways = [] if element.when_full == "refuse" else element.branches.values()
        return [stage for branch in ways for stage in waits_at(branch, behind)]
    heads = [] if isinstance(element, ForEach) else [waits_at(branch, ()) for branch in element.branches]
    return [*behind, *[stage for of_branch in heads for stage in of_branch]]


def _check_place(stage: Stage, waits: Sequence[Stage], is_last: bool) -> None:
    if stage.traits.in_parts and not is_last:
        raise ValueError(
            f"stage {stage.name} answers in parts, so it must be the last of its service, or of its branch: do what"
            f" follows it in postprocess of {stage.traits.name}, which gets each part"
        )
    for after in waits:
        if stage.size is None and after.max_queue_size < (stage.max_batch_size or 1):
            raise ValueError(
                f"max_queue_size of stage {after.name} ({after.max_queue_size}) is smaller than the batches of"
                f" stage {stage.name} before it ({stage.max_batch_size})"
            )


def _places(line: Line, stage: Stage) -> int:
    return sum(
        each is stage if isinstance(each, Stage) else sum(_places(branch, stage) for branch in branches_of(each))
        for each in line
    )


def _check_borders(line: Line) -> None:
    """Check that no format of a model's own is gone past at the beginning and the end of a graph.

    Raises ValueError.
    """
    if not isinstance(line[0], Stage):
        for stage in _at_border(line, 0):
            if stage.traits.accepts:
                raise ValueError(
                    f"stage {stage.name} reads a format of its own (accepts), so it must be the first stage: several"
                    " branches would get what only one of them can read"
                )
    if not isinstance(line[-1], Stage):
        for stage in _at_border(line, -1):
            if stage.traits.produces:
                raise ValueError(
                    f"stage {stage.name} writes a format of its own (produces), so it must be the last stage: what"
                    " several branches come to would go past its encode"
                )


def _at_border(line: Line, at: int) -> Iterator[Stage]:
    """Yield the stages at which a line may begin (`at` is 0) or end (-1)."""
    for element in line if at == 0 else reversed(line):
        if isinstance(element, Stage):
            yield element
            return
        for branch in branches_of(element):
            yield from _at_border(branch, at)
        if all(branches_of(element)):
            return


def _check_types(line: Line, gives: Any, whose: str) -> tuple[Any, str]:
    """Check by the hints that each element can take the results of the one before.

    Args:
        whose: Its origin, as text; empty if it comes from the caller.
    """
    before: Stage | Block | None = None
    for element in line:
        if isinstance(element, Stage):
            takes = element.traits.input_type
            if whose and not may_fit(gives, takes):
                raise TypeError(
                    f"{whose} gives {schema.type_name(gives)} by its hint, and stage {element.name} takes"
                    f" {schema.type_name(takes)}"
                )
            gives, whose = element.traits.output_type, f"stage {element.name}"
        elif isinstance(element, ForEach):
            item = _item_of(gives)
            if item is None:
                raise TypeError(f"{whose} gives {schema.type_name(gives)} by its hint, and ForEach takes a list")
            inner, _ = _check_types(element.body, item, f"the list of {whose}" if whose else "")
            gives, whose = _list_of(inner), "ForEach"
        else:
            if isinstance(element, Route) and element.choose is None and not _names_branches(before):
                where = "begins a service" if before is None else "follows what does not name its branches"
                raise ValueError(f"{element!r} {where}: give it choose=, or return To(name, item) from a stage before")
            for branch in branches_of(element):
                _check_types(branch, gives, whose)
            gives, whose = _gives((element,), gives), "Parallel" if isinstance(element, Parallel) else "Route"
        before = element
    return gives, whose


def _check_named(line: Line) -> None:
    """Check that a `Route` follows each stage that names branches by its hint, at one of its places
    at least. Raises ValueError.
    """
    followed = {id(stage) for stage, after in _followed(line, None) if isinstance(after, Route)}
    for stage in stages_in(line):
        if stage.traits.names_branches and id(stage) not in followed:
            raise ValueError(f"stage {stage.name} returns To by its hint, and no Route follows it")


def _followed(line: Line, then: Stage | Block | None) -> Iterator[tuple[Stage, Stage | Block | None]]:
    """Yield each stage of a line with the element right behind it; `then` follows the line."""
    for element, after in zip(line, (*line[1:], then), strict=False):  # an empty line has neither
        if isinstance(element, Stage):
            yield element, after
        for branch in branches_of(element):
            yield from _followed(branch, after if isinstance(element, Route) else None)


def _names_branches(element: Stage | Block | None) -> bool:
    """Report whether a result of an element may be `To`."""
    if isinstance(element, Stage):
        return element.traits.names_branches or element.traits.output_type is Any
    if isinstance(element, Route):
        return all(branch and _names_branches(branch[-1]) for branch in element.branches.values())
    return False


def _item_of(kind: Any) -> Any:
    """Return the type of the items of a list; None if it is the type of no list."""
    if kind is Any:
        return Any
    if is_array_type(kind) or (not may_fit(kind, list) and not may_fit(kind, tuple)):
        return None
    inner: tuple[Any, ...] = getattr(kind, "__args__", ())
    return inner[0] if len(inner) == 1 or inner[1:] == (...,) else Any


def _check_early(line: Line) -> None:
    """Check early answers, where they are hinted, against the last stage. Raises ValueError or
    TypeError.
    """
    last = line[-1]
    gives = traits_of_last(line, "").output_type
    for stage in stages_in(line):
        early = stage.traits.early_types
        if not early or stage is last:
            continue
        if isinstance(last, Stage) and last.traits.produces:
            raise ValueError(
                f"stage {stage.name} returns Done by its hint, which would go past encode of stage {last.name}: let the"
                " last stage give this answer, too, or leave out its produces"
            )
        for kind in early:
            if not may_fit(kind, gives):
                raise TypeError(
                    f"stage {stage.name} returns Done[{schema.type_name(kind)}] by its hint, and the service gives"
                    f" {schema.type_name(gives)}"
                )
