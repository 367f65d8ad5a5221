"""How the tests are laid out: no test module is imported by another, and what folders share is in `tests/support/`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import ROOT

TESTS = ROOT / "tests"
SHARED = "tests.effort"
"""The one helper beside tests that all folders use: with `conftest.py` it decides how much a run tries."""


def module_of(path: Path) -> str:
    """What a file is called when it is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def folder_of(module: str) -> str:
    """The package that a module lies in."""
    return module.rpartition(".")[0]


def is_test(module: str) -> bool:
    """Whether pytest collects a module."""
    return module.rpartition(".")[2].startswith("test_")


MODULES = {module_of(path): path for path in TESTS.rglob("*.py")}
FOLDERS = {module_of(path) for path in TESTS.rglob("__init__.py")}
FOLDERS_WITH_TESTS = {folder_of(module) for module in MODULES if is_test(module)}


def is_beside_tests(module: str) -> bool:
    """Whether it is a module in a folder of tests, and not itself a folder."""
    return folder_of(module) in FOLDERS_WITH_TESTS and module not in FOLDERS


IMPORT = re.compile(
    r"^[ \t]*(from[ \t]+[\w.]+[ \t]+import[ \t]+(?:\([^)]*\)|[^(\n]*)|import[ \t]+[\w., \t]+)$", re.MULTILINE
)
"""What looks like a statement that imports; it may also be the line of a text."""


def may_break_a_rule(module: str) -> bool:
    """Whether a module has to be parsed: it may import a test module, or a helper of other tests, or relatively.

    To parse all modules would take as long as fifty tests.
    """
    harmless = re.compile(rf"(from|import) +(tests\.support|tests\.effort|{re.escape(folder_of(module))})\b")
    for statement in IMPORT.findall(MODULES[module].read_text()):
        if re.match(r"from +\.", statement) or "test_" in statement:
            return True
        if re.search(r"\btests\b", statement) and not harmless.match(statement):
            return True
    return False


def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements in a tree, without a look at the expressions in them, in which nothing is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node
            yield from statements(node)


def imported_by(module: str) -> Iterator[str]:
    """The modules of the tests that a module imports, at its top or deeper."""
    for node in statements(tree_of(module)):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(parent), level=0):
                names = [parent, *(f"{parent}.{alias.name}" for alias in node.names)]
            case ast.ImportFrom():
                raise AssertionError(f"{module} has a relative import: write out where it is from")
            case _:
                continue
        yield from (name for name in names if name in MODULES)


def test_no_module_imports_a_test_module() -> None:
    """A test module may be changed, moved or deleted with no look at any other: what others need is a helper."""
    found = {
        (module, name) for module in filter(may_break_a_rule, MODULES) for name in imported_by(module) if is_test(name)
    }
    assert found == set(), "move what is imported to tests/support/, or to a module of the folder that is not a test"


def test_helpers_that_folders_share_are_in_support() -> None:
    """A helper that lies beside tests is for those of its own folder only."""
    found = {
        (module, name)
        for module in filter(may_break_a_rule, MODULES)
        for name in imported_by(module)
        if is_beside_tests(name) and folder_of(name) != folder_of(module) and name != SHARED
    }
    assert found == set(), "move what is imported to tests/support/"


@pytest.mark.parametrize(
    ("statement", "is_read"),
    [
        ("from tests.http.test_lists import x", True),
        ("    import tests.http.test_lists", True),
        ("from tests.http import (\n    models,\n    test_lists,\n)", True),
        ("from tests.engine.drive.hostile import x", True),
        ("from tests import drive", True),
        ("from . import x", True),
        ("from tests.http.talkers import x", False),
        ("from tests.support import models", False),
        ("from tests.effort import share", False),
        ("from carpool import http", False),
    ],
)
def test_what_may_break_a_rule_is_parsed(statement: str, is_read: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """No import is overlooked that could be of a test module or of another folder's helper."""
    path = tmp_path / "module.py"
    path.write_text(f"import ast\n\n{statement}\n")
    monkeypatch.setitem(MODULES, "tests.http.any", path)
    assert may_break_a_rule("tests.http.any") is is_read
