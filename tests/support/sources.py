"""The modules of `src/carpool` as syntax trees, and what each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


PARSED = {module_name(path): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
MODULES = {name: tree for name, tree in PARSED.items() if says_something(tree)}


def imports(tree: ast.AST, with_types: bool = False) -> Iterator[str]:
    """List the full names of the modules that are imported, at the top or anywhere deeper.

    Args:
        tree: Where to look.
        with_types: Whether to count imports that are for types only.
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
