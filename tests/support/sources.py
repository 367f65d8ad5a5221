"""The modules of `src/carpool` as syntax trees, and what each of them imports.

A module is parsed when its tree is asked for, and not when tests are collected, which each process of a run does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


def module_name(path: Path) -> str:
    """What a file is called when it is imported."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def says_something(tree: ast.Module) -> bool:
    """Whether there is anything but a docstring."""
    return any(not isinstance(node, ast.Expr) for node in tree.body)


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


class Trees(Mapping[str, ast.Module]):
    """The trees of modules, by their names.

    Args:
        paths: The files, by the names of their modules.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.paths = paths

    def __getitem__(self, name: str) -> ast.Module:
        return parsed(self.paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def mentioning(self, word: str) -> dict[str, ast.Module]:
        """The trees of the modules in whose text a word stands, so that no other one is parsed."""
        return {name: self[name] for name, path in self.paths.items() if word in text_of(path)}


PARSED = Trees({module_name(path): path for path in SOURCE.rglob("*.py")})
MODULES = Trees(
    {name: path for name, path in PARSED.paths.items() if path.name != "__init__.py" or says_something(parsed(path))}
)
"""Those that hold more than a docstring, which only the `__init__` of a folder may not."""


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree."""
    return list(ast.walk(tree))


@cache
def imports(tree: ast.AST, with_types: bool = False) -> list[str]:
    """List the full names of the modules that are imported, at the top or anywhere deeper.

    Args:
        tree: Where to look.
        with_types: Whether to count imports that are for types only.
    """
    return list(_imports(tree, with_types))


def _imports(tree: ast.AST, with_types: bool) -> Iterator[str]:
    left = [tree]
    while left:
        node = left.pop()
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")) if not with_types:
                left += reversed(node.orelse)
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
                left += reversed(list(ast.iter_child_nodes(node)))
