"""How the tests are laid out: no test module is imported by another, and what folders share is in `tests/support/`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


@cache  # and not read when tests are collected, which each process does
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
    found = {(module, name) for module in MODULES for name in imported_by(module) if is_test(name)}
    assert found == set(), "move what is imported to tests/support/, or to a module of the folder that is not a test"


def test_helpers_that_folders_share_are_in_support() -> None:
    """A helper that lies beside tests is for those of its own folder only."""
    found = {
        (module, name)
        for module in MODULES
        for name in imported_by(module)
        if is_beside_tests(name) and folder_of(name) != folder_of(module) and name != SHARED
    }
    assert found == set(), "move what is imported to tests/support/"
