"""Nothing is written twice: no six lines in a row of src/carpool stand anywhere else in it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import TypeGuard

SOURCE = Path(__file__).parents[1] / "src"
LINES = 6
LEAST_LETTERS = 60
"""What is shorter is mostly brackets."""


def lines_that_count(text: str) -> list[tuple[int, str]]:
    """List the lines of code with their numbers.

    Blank lines, comments and docstrings do not count, and neither do imports, overloads and
    signatures, which have to repeat.
    """
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text(node):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_overload = any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in node.decorator_list)
            last = node.end_lineno if is_overload else node.body[0].lineno - 1
            first = min([node.lineno, *[mark.lineno for mark in node.decorator_list]])
            left_out.update(range(first, (last or first) + 1))
    numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if number not in left_out]
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]


def is_text(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Report whether a statement is nothing but text, as docstrings are."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def copies(texts: dict[str, str]) -> list[list[str]]:
    """Find the blocks that stand several times: for each, where it begins."""
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, text in texts.items():
        lines = lines_that_count(text)
        for at in range(len(lines) - LINES + 1):
            block = tuple(line for _, line in lines[at : at + LINES])
            if sum(map(len, block)) >= LEAST_LETTERS:
                places[block].append(f"{name}:{lines[at][0]}")
    return [found for found in places.values() if len(found) > 1]


def test_no_block_stands_twice() -> None:
    """What two places need is written in one."""
    assert copies({str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}) == []


def test_copies_are_found() -> None:
    """Also where they are indented differently or have other comments between them; not where only five lines agree."""
    body = [f"value_{i} = function_{i}(first_argument)" for i in range(LINES)]
    indented = "if True:\n    # more\n" + "".join(f"    {line}\n" for line in body)

    assert copies({"a": "\n".join(body), "b": indented}) == [["a:1", "b:3"]]
    assert copies({"a": "\n".join(body), "b": "\n".join(body[1:])}) == []
    assert copies({"a": "from a import (\n" + "    name_of_something,\n" * 20 + ")\n"}) == []
