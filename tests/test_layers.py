"""The layers of `tests/layers.py`: imports go one way, and modules that decide do nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.layers import EXCEPTIONS, LAYERS, NARROW
from tests.support.sources import MODULES, PARSED, imports, nodes_of

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
SANS_IO = {"engine.policy": PURE, "engine.core": PURE, "engine.wire": PURE | WIRE}
"""What may be imported where there is no clock, lock, log or socket, and by whatever of ours is imported there."""
OUTSIDE_WORLD = frozenset({"open", "print", "input", "breakpoint", "__import__"})


def folder_of(module: str) -> str:
    """The part of the package that a module belongs to, those of the engine apart; for what lies in none, its name."""
    return ".".join(module.removeprefix("carpool.").split(".")[: 2 if module.startswith("carpool.engine.") else 1])


LAYER_OF = {name: number for number, layer in enumerate(LAYERS) for name in layer.names.split()}


def is_ours(module: str) -> bool:
    """Whether it is a module of this package; a relative import can be no other."""
    return module.split(".")[0] in ("carpool", "")


def test_every_module_has_one_layer() -> None:
    """The table lists each folder, and each file of the root, once, and none that is gone."""
    assert sorted(LAYER_OF) == sorted({folder_of(module) for module in MODULES})
    assert len(LAYER_OF) == sum(len(layer.names.split()) for layer in LAYERS)


def test_each_ring_is_one_piece() -> None:
    """The engine comes before the fronts, and the fronts before the satellites."""
    assert list(dict.fromkeys(layer.ring for layer in LAYERS)) == ["engine", "fronts", "satellites"]
    order = [["engine", "fronts", "satellites"].index(layer.ring) for layer in LAYERS]
    assert order == sorted(order)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_its_own_layer_and_those_before_it(module: str) -> None:
    """A module imports only from its own layer and from those before it, also inside functions."""
    wrong = [
        name
        for name in imports(MODULES[module])
        if is_ours(name) and (name not in MODULES or LAYER_OF[folder_of(name)] > LAYER_OF[folder_of(module)])
    ]

    assert [name for name in wrong if (module, name) not in EXCEPTIONS] == []


@pytest.mark.parametrize("folder", NARROW)
def test_a_narrow_folder_imports_little_of_the_folder_around_it(folder: str) -> None:
    """Protocols and contestants import only the named modules of the folder in which they lie."""
    around = folder.rpartition(".")[0]
    allowed = {f"{around}.{name}" for name in NARROW[folder].split()}
    inside = [module for module in MODULES if module.startswith(folder)]
    imported = {name for module in inside for name in imports(MODULES[module]) if name.startswith(f"{around}.")}

    assert len(inside) > 1
    assert {name for name in imported if not name.startswith(folder)} == allowed


def test_declaring_a_service_imports_nothing_that_runs_one() -> None:
    """A worker process, which imports the module that declares a service, does not load asyncio and the drivers."""
    program = (
        "import sys, carpool, carpool.engine.worker.main; carpool.Service(carpool.Stage(len)); print(*sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        name
        for name in found
        if name.startswith(("carpool.engine.drive", "carpool.engine.core", "carpool.http.", "asyncio"))
    }
    assert heavy <= {"carpool.engine.core", "carpool.engine.core.running_set"}  # what orders to workers are made of


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
    for importer, imported in EXCEPTIONS:
        assert imported in imports(MODULES[importer])
        assert LAYER_OF[folder_of(imported)] > LAYER_OF[folder_of(importer)]


@pytest.mark.fault("F59")
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
from carpool.engine.core import queue
from carpool.engine.core.queue import Queue
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
        return lambda: importlib.import_module("carpool.cli.demo_command").run()
from . import near
from ..core import far
"""
    expected = "__future__ time os.path carpool.engine.core.queue carpool.engine.core.queue carpool either other"
    assert [*imports(ast.parse(text))] == [
        *expected.split(),
        "deep",
        "carpool.http",
        "carpool.cli.demo_command",
        ".",
        "..core",
    ]
