"""The order of the modules that ARCHITECTURE.md lists: imports go one way, and what decides does nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

EXCEPTIONS = {
    ("carpool", "carpool.http"),  # `carpool.http` without an import of its own; only when it is asked for
    ("carpool", "carpool.http.asgi"),  # likewise `carpool.lifespan`
    ("carpool", "carpool.simulate"),  # likewise
}
"""Imports from below that are meant: who imports, and what."""

PURE = frozenset(
    {
        "__future__",
        "abc",
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "enum",
        "functools",
        "itertools",
        "math",
        "operator",
        "typing",
    }
)
SANS_IO = {"policy": PURE, "core": PURE, "wire": PURE | {"ctypes", "msgspec", "numpy", "pickle", "re", "struct", "sys"}}
"""What may be imported where there is no clock, lock, log or socket, and by whatever of ours is imported there."""
OUTSIDE_WORLD = frozenset({"open", "print", "input", "breakpoint", "__import__"})


def module_name(path: Path) -> str:
    """What a file is called when it is imported."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """The part of the package that a module belongs to; for what lies in none, its own name."""
    return module.removeprefix("carpool.").split(".")[0]


def says_something(tree: ast.Module) -> bool:
    """Whether there is anything but a docstring."""
    return any(not isinstance(node, ast.Expr) for node in tree.body)


PARSED = {module_name(path): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
MODULES = {name: tree for name, tree in PARSED.items() if says_something(tree)}


def listed() -> list[str]:
    """The modules in the order of ARCHITECTURE.md: row by row, each from left to right."""
    section = (ROOT / "ARCHITECTURE.md").read_text().split("\n## Order of the modules\n")[1].split("\n## ")[0]
    names = []
    for group, modules in re.findall(r"^\| ?(.*?) ?\| (`.*?) \|", section, re.MULTILINE):
        folder = re.fullmatch(r"`(\w+)/`", group)
        package = f"carpool.{folder[1]}" if folder else "carpool"
        for name in re.findall(r"`(\w+)`", modules):
            names.append(package if name == "__init__" else f"{package}.{name}")
    return names


ORDER = listed()


def imports(tree: ast.AST, with_types: bool = False) -> Iterator[str]:
    """Full names of the modules that are imported, at the top or anywhere deeper.

    Args:
        tree: where to look.
        with_types: whether to count imports that are for types only.
    """
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")) if not with_types:
                for other in node.orelse:
                    yield from imports(ast.Module([other], []))
            case ast.Import():
                yield from [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module), level=0):
                for alias in node.names:
                    inner = f"{module}.{alias.name}"
                    yield inner if inner in PARSED else module
            case ast.ImportFrom():
                yield "." * node.level + (node.module or "")
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
                yield module
            case _:
                yield from imports(node, with_types)


def is_ours(module: str) -> bool:
    """Whether it is a module of this package; a relative import can be no other."""
    return module.split(".")[0] in ("carpool", "")


def test_every_module_has_one_place() -> None:
    """ARCHITECTURE.md lists all that there are, each once, and nothing that is gone."""
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_is_listed_before_it(module: str) -> None:
    """Also inside functions."""
    allowed = {*ORDER[: ORDER.index(module)], *(what for who, what in EXCEPTIONS if who == module)}

    assert [name for name in imports(MODULES[module]) if is_ours(name) and name not in allowed] == []


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others."""

    def reached_from(module: str) -> set[str]:
        reached: set[str] = set()
        found = [module]
        while found:
            new = imported[found.pop()] - reached
            reached |= new
            found += new
        return reached

    reached = {module: reached_from(module) for module in imported}
    groups = {frozenset(other for other in reached[each] if each in reached[other]) for each in imported}
    return sorted(map(sorted, groups - {frozenset()}))


def test_imports_for_types_make_no_circles() -> None:
    """A file can be read without those that use it: a protocol stands for what lies below."""
    imported = {module: set(imports(tree, with_types=True)) & PARSED.keys() for module, tree in PARSED.items()}

    assert circles(imported) == []


def test_circles_are_found() -> None:
    """Short and long ones, with what hangs on them left out; also one that exists for types only."""
    imported = {"a": {"b"}, "b": {"a"}, "c": {"a", "d"}, "d": {"e"}, "e": {"c", "f"}, "f": set[str]()}

    assert circles(imported) == [["a", "b"], ["c", "d", "e"]]
    text = "if TYPE_CHECKING:\n    import types_only\nelse:\n    import other"
    assert [*imports(ast.parse(text), with_types=True)] == ["types_only", "other"]


def test_each_exception_is_one() -> None:
    """What is excepted is there, and would not be allowed otherwise."""
    for who, what in EXCEPTIONS:
        assert what in imports(MODULES[who])
        assert ORDER.index(what) > ORDER.index(who)


@pytest.mark.parametrize("module", [name for name in MODULES if folder_of(name) in SANS_IO])
def test_what_decides_does_nothing_else(module: str) -> None:
    """No clock, lock, log, file or socket: neither in such a module nor in any that it imports."""
    allowed = SANS_IO[folder_of(module)]
    reached, found = {module}, [module]
    while found:
        name = found.pop()
        for imported in imports(MODULES[name]):
            if not is_ours(imported):
                assert imported.split(".")[0] in allowed, f"{name} imports {imported}"
            elif imported not in reached:
                reached.add(imported)
                found.append(imported)
        used = {node.id for node in ast.walk(MODULES[name]) if isinstance(node, ast.Name)}
        assert not used & OUTSIDE_WORLD, f"{name} reaches out"


def test_hidden_imports_are_found() -> None:
    """In a function, in a condition, by a name as text, relative; but not those for types only."""
    text = """
from __future__ import annotations
import time as clock, os.path
from carpool.core import queue
from carpool.core.queue import Queue
from carpool import Service
if TYPE_CHECKING:
    import never
elif True:
    import either
else:
    import other
if typing.TYPE_CHECKING:
    import never
class A:
    def f(self):
        try:
            with x:
                import deep
        except ImportError:
            importlib.import_module("carpool.http")
        return lambda: importlib.import_module("carpool.demo").run()
from . import near
from ..core import far
"""
    expected = "__future__ time os.path carpool.core.queue carpool.core.queue carpool either other"
    assert [*imports(ast.parse(text))] == [*expected.split(), "deep", "carpool.http", "carpool.demo", ".", "..core"]
