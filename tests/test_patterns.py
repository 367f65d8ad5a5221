"""No regular expression takes more than linear time, whatever it is given: twice the input, twice the time."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import pytest

from carpool.http.codec import Formats
from carpool.model import traits_of
from carpool.simulate import specs
from tests.support.http.front import nothing

SOURCE = Path(__file__).parents[1] / "src"
SIZES = (2**11, 2**14)
MOST_S = 0.05
"""Of the processor, for 16 Ki characters: linear ones take a hundredth of it, quadratic ones three times as much."""

CALLS = ["compile", "search", "match", "fullmatch", "findall", "finditer", "split", "sub", "subn"]


class Use(NamedTuple):
    """A regular expression in the source.

    Attributes:
        place: Module and function; methods: what is done with it.
        pattern: None where it is put together when it is used.
    """

    place: str
    methods: tuple[str, ...]
    pattern: str | bytes | None


def uses() -> Iterator[Use]:
    """Every call of `re` in the sources."""
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text()
        if "import re\n" not in source:
            continue
        for function, node in calls(ast.parse(source), "module"):
            methods: tuple[str, ...] = (node.func.attr,)  # type: ignore[attr-defined]
            if methods == ("compile",):
                compiled = re.escape(ast.unparse(node.func))
                (name,) = re.findall(rf"^(\w+)(?:: Final)? = {compiled}\(", line_of(source, node), re.M)
                methods = tuple(sorted(set(re.findall(rf"\b{name}\.(\w+)\(", source))))
            pattern = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            yield Use(f"{path.stem}.{function}", methods, pattern)  # type: ignore[arg-type]


def line_of(source: str, node: ast.Call) -> str:
    """The line in which a pattern gets its name."""
    return source.splitlines()[node.lineno - 1]


def calls(tree: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    """The calls of `re` below a node, with the function that each is in."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("re"), attr=name)) if name in CALLS:
                yield inside, node
        yield from calls(node, inside)


ALL = list(uses())
PUT_TOGETHER: dict[str, Callable[[str], object]] = {
    "specs.split": lambda text: specs.split(text, "+", ["a", "ab"]),
}
"""Those whose pattern is known only when they run, by what runs them."""

PUMPS = 'a0/,;=:+ \n"{}'


def seconds(work: Callable[[str], object], text: str) -> float:
    """Of the processor, so that a machine with other things to do does not count."""
    started = time.thread_time()
    work(text)
    return time.thread_time() - started


def assert_linear(work: Callable[[str], object], beginnings: set[str], pumps: str = PUMPS) -> None:
    """Whatever is repeated behind whatever beginning, and does not match in the end."""
    for beginning in sorted(beginnings):
        for pump in [*pumps, *{beginning, beginning[-2:], beginning[:2]} - {""}]:
            for size in SIZES:  # the smaller ones first, so that a bad pattern is found before it takes for ever
                text = beginning + pump * (size // len(pump)) + "\0"
                assert seconds(work, text) < MOST_S, (beginning, pump, size)


def beginnings_of(pattern: str) -> set[str]:
    """Texts that match as far as they go: of each part one, and the shortest number of it."""
    found = [""]
    for part in parser.parse(pattern):
        found.append(found[-1] + example_of(part))
    return set(found)


def example_of(part: tuple[Any, Any]) -> str:
    """The shortest text that one part of a pattern matches, or near enough."""
    kind, value = part
    if kind is kinds.LITERAL:
        return chr(value)
    if kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT):
        return "".join(map(example_of, value[2])) * max(1, min(value[0], 3))
    if kind is kinds.SUBPATTERN:
        return "".join(map(example_of, value[3]))
    if kind is kinds.BRANCH:
        return "".join(map(example_of, value[1][0]))
    if kind is kinds.IN:
        return next(c for c in (*PUMPS, "x", *map(chr, range(256))) if re.fullmatch(_class(value), c))
    return {kinds.ANY: "x", kinds.NOT_LITERAL: "x"}.get(kind, "")


def _class(members: list[tuple[Any, Any]]) -> str:
    """The source of a set of characters."""
    text = ""
    for kind, value in members:
        if kind is kinds.NEGATE:
            text += "^"
        elif kind is kinds.LITERAL:
            text += re.escape(chr(value))
        elif kind is kinds.RANGE:
            text += f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
        else:
            text += {kinds.CATEGORY_SPACE: r"\s", kinds.CATEGORY_DIGIT: r"\d", kinds.CATEGORY_WORD: r"\w"}[value]
    return f"[{text}]"


def ways(pattern: str, methods: tuple[str, ...]) -> Callable[[str], object]:
    """What is done with a pattern, one after the other."""
    compiled = re.compile(pattern, re.MULTILINE)
    calls = [partial(compiled.sub, "") if method == "sub" else getattr(compiled, method) for method in methods]
    return lambda text: [call(text) for call in calls]


@pytest.mark.fault("F63")
@pytest.mark.parametrize("use", [use for use in ALL if use.pattern is not None], ids=str)
def test_patterns_are_linear(use: Use) -> None:
    """Regression: 31 KB of `Accept` took two seconds, in which nobody else was served."""
    pattern = use.pattern.decode("latin-1") if isinstance(use.pattern, bytes) else use.pattern
    assert pattern is not None
    assert_linear(ways(pattern, use.methods), beginnings_of(pattern))


@pytest.mark.parametrize("place", PUT_TOGETHER)
def test_patterns_that_are_put_together_are_linear(place: str) -> None:
    """Regular expressions that are put together take linear time when they are called as they are
    used.
    """
    assert_linear(PUT_TOGETHER[place], {"", "a", "+a", "+", "a:", ",a="})


def test_every_pattern_is_tried() -> None:
    """Every regular expression in the source is tried: one that is put together when it is used has
    to be added to the table here.
    """
    assert {use.place for use in ALL if use.pattern is None} == set(PUT_TOGETHER)
    assert len(ALL) > 5
    assert all(use.methods for use in ALL)


def test_the_trial_finds_what_it_looks_for() -> None:
    """The trial finds patterns that are known to take quadratic time, or worse."""
    for pattern in (r"[^,;\s]+/[^,;\s]+", r"x\s*\s*y"):
        with pytest.raises(AssertionError):
            assert_linear(ways(pattern, ("findall",)), beginnings_of(pattern))


@pytest.mark.parametrize("beginning", ["", "a/b", "a/b;q=", '"', "application/json; charset="])
def test_the_content_types_of_a_request(beginning: str) -> None:
    """Content types are read in linear time by all that reads them, with the memory for those seen
    before passed by.
    """
    formats = Formats(traits_of(nothing, False), traits_of(nothing, False))
    reads = lambda text: formats._writes(text.encode(), 0, b"a/b")  # noqa: E731  two of a kind
    assert_linear(reads, {beginning})

    def types(text: str) -> object:
        with pytest.raises(Exception, match="content type"):
            formats._reads(b"image/x;" + text.encode())
        return None

    assert_linear(types, {beginning})
