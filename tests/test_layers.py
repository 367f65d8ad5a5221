"""The order of the modules that ARCHITECTURE.md lists: imports go one way, and what decides does nothing else."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.support.sources import MODULES, PARSED, ROOT, imports, nodes_of

EXCEPTIONS = {
    ("carpool", "carpool.http.serve"),  # likewise `carpool.serve`
    ("carpool", "carpool.ray"),  # likewise
    ("carpool.testing", "carpool.testing.serving"),  # likewise
}
"""Imports from below that are meant: who imports, and what."""

PURE = frozenset(
    {
        "__future__",
        "abc",
        "bisect",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "enum",
        "functools",
        "heapq",
        "itertools",
        "math",
        "operator",
        "typing",
    }
)
WIRE = frozenset({"ctypes", "hmac", "msgspec", "numpy", "pickle", "re", "struct", "sys"})
SANS_IO = {"policy": PURE, "core": PURE, "wire": PURE | WIRE}
"""What may be imported where there is no clock, lock, log or socket, and by whatever of ours is imported there."""
OUTSIDE_WORLD = frozenset({"open", "print", "input", "breakpoint", "__import__"})


def folder_of(module: str) -> str:
    """The part of the package that a module belongs to; for what lies in none, its own name."""
    return module.removeprefix("carpool.").split(".")[0]


def listed() -> list[str]:
    """The modules in the order of ARCHITECTURE.md: row by row, each from left to right."""
    section = (ROOT / "ARCHITECTURE.md").read_text().split("\n## Order of the modules\n")[1].split("\n## ")[0]
    names = []
    for group, modules in re.findall(r"^\| ?(.*?) ?\| (`.*?) \|", section, re.MULTILINE):
        folder = re.fullmatch(r"`([\w/]+)/`", group)
        package = f"carpool.{folder[1].replace('/', '.')}" if folder else "carpool"
        for name in re.findall(r"`(\w+)`", modules):
            names.append(package if name == "__init__" else f"{package}.{name}")
    return names


ORDER = listed()


def is_ours(module: str) -> bool:
    """Whether it is a module of this package; a relative import can be no other."""
    return module.split(".")[0] in ("carpool", "")


def test_every_module_has_one_place() -> None:
    """ARCHITECTURE.md lists all modules that there are, each once, and none that is gone."""
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_is_listed_before_it(module: str) -> None:
    """A module imports only modules that ARCHITECTURE.md lists before it, also inside functions."""
    allowed = {*ORDER[: ORDER.index(module)], *(what for who, what in EXCEPTIONS if who == module)}

    assert [name for name in imports(MODULES[module]) if is_ours(name) and name not in allowed] == []


def test_declaring_a_service_imports_nothing_that_runs_one() -> None:
    """A worker process, which imports the module that declares a service, does not load asyncio and the drivers."""
    program = "import sys, carpool, carpool.worker.main; carpool.Service(carpool.Stage(len)); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {name for name in found if name.startswith(("carpool.drive", "carpool.core", "carpool.http.", "asyncio"))}
    assert heavy <= {"carpool.core", "carpool.core.running_set"}  # what orders to workers are made of


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


def test_no_imports_make_circles() -> None:
    """A file can be read without those that use it, also where a function imports or an import is
    for types only: a protocol stands for what lies below, or what lies below is registered.
    """
    imported = {
        module: {other for other in imports(tree, with_types=True) if other in PARSED}
        for module, tree in PARSED.items()
    }

    assert circles(imported) == []


def test_circles_are_found() -> None:
    """Short and long ones, with what hangs on them left out; also one that exists for types only."""
    imported = {"a": {"b"}, "b": {"a"}, "c": {"a", "d"}, "d": {"e"}, "e": {"c", "f"}, "f": set[str]()}

    assert circles(imported) == [["a", "b"], ["c", "d", "e"]]
    text = "if TYPE_CHECKING:\n    import types_only\nelse:\n    import other"
    assert [*imports(ast.parse(text), with_types=True)] == ["types_only", "other"]


def test_each_exception_is_one() -> None:
    """Each import that is excepted is still there, and would not be allowed otherwise."""
    for who, what in EXCEPTIONS:
        assert what in imports(MODULES[who])
        assert ORDER.index(what) > ORDER.index(who)


@pytest.mark.parametrize("module", [name for name in MODULES if folder_of(name) in SANS_IO])
def test_what_decides_does_nothing_else(module: str) -> None:
    """Modules of core, policies and wire use no clock, lock, log, file or socket, neither
    themselves nor by any module that they import.
    """
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
        used = {node.id for node in nodes_of(MODULES[name]) if isinstance(node, ast.Name)}
        assert not used & OUTSIDE_WORLD, f"{name} reaches out"


def test_hidden_imports_are_found() -> None:
    """Imports in a function, in a condition, by a name as text, and relative ones are found; those
    for types only do not count.
    """
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
