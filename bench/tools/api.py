"""Writes docs/api.md, the reference of the public names, from their signatures and docstrings.

`python -m bench.tools.api` writes the page, and `tests/test_api_page.py` fails where it is stale.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from types import ModuleType
from typing import Any, Final, NamedTuple

from bench.tools.docs import DOCS

PAGE: Final = DOCS / "api.md"
COMMAND: Final = "python -m bench.tools.api"

MODULES: Final = ("carpool", "carpool.types", "carpool.http", "carpool.testing", "carpool.frames")
"""The modules of the page.

`carpool.policy` and `carpool.simulate` have pages in words, and `carpool.ray` (docs/ray.md) cannot
be imported where Ray is missing.
"""

_HEAD: Final = f"""# Reference of the Python API

Every public name with its docstring, made by `{COMMAND}`: change
the docstrings, not this page. How the parts work together is in [models](models.md),
[services](services.md), [functions](functions.md), [streaming](streaming.md) and [HTTP](http.md); policies are in
[policies](policies.md), and `carpool --help` describes the command line.
"""
_SECTION: Final = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
_ENTRY: Final = re.compile(r"^    (\*{0,2}[A-Za-z_][\w.]*): (.*)$")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_LONGEST_LINE: Final = 100


class Named(NamedTuple):
    """A public name.

    Attributes:
        name: As users write it.
        found: What it stands for.
    """

    name: str
    found: Any


def page() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *[line for module in MODULES for line in _module(module)]])


def _module(name: str) -> Iterator[str]:
    """Yield the lines about a module."""
    module = importlib.import_module(name)
    yield f"## {name}\n"
    yield f"{_text(module)}\n"
    for each in public(module):
        yield from _named(each)


def public(module: ModuleType) -> list[Named]:
    """Return the names of a module that the page has, in the order of the alphabet."""
    found = [Named(name, getattr(module, name)) for name in module.__all__]
    return [Named(f"{module.__name__}.{each.name}", each.found) for each in found if not inspect.ismodule(each.found)]


def _named(each: Named) -> Iterator[str]:
    """Yield the lines about one name."""
    yield f"### `{each.name}`\n"
    if not callable(each.found):
        yield f"A constant: `{_ADDRESS.sub('', repr(each.found))}`.\n"
        return
    yield from _signature(each.name.rpartition(".")[2], each.found)
    yield f"{_text(each.found)}\n"
    if inspect.isclass(each.found):
        for name, method in _methods(each.found):
            yield f"#### `{each.name.rpartition('.')[2]}.{name}`\n"
            if not isinstance(method, property):
                yield from _signature(name, method)
            yield f"{_text(method)}\n"


def _methods(of: type) -> Iterator[Named]:
    """Yield the public methods and properties of a class that have docstrings, as they stand there.

    Those that a class of the page has which this one is derived from are told there.
    """
    bases = [each for each in of.__mro__[1:] if each in _classes()]
    seen = {name for base in bases for name in dir(base)}
    for owner in of.__mro__:
        if not owner.__module__.startswith("carpool"):
            continue
        for name, member in vars(owner).items():
            function = getattr(member, "__func__", member)
            if (
                name.startswith("_")
                or name in seen
                or not (inspect.isfunction(function) or isinstance(member, property))
            ):
                continue
            seen.add(name)
            if function.__doc__:
                yield Named(name, function)


@functools.cache
def _classes() -> frozenset[type]:
    """Return the classes that the page has."""
    modules = [importlib.import_module(name) for name in MODULES]
    return frozenset(each.found for module in modules for each in public(module) if inspect.isclass(each.found))


def _signature(name: str, of: Any) -> Iterator[str]:
    """Yield a code block with a signature, which has a line for each argument if it is long."""
    if inspect.isclass(of) and (issubclass(of, Enum) or not _is_made_by_ours(of)):
        return
    signature = inspect.signature(of)
    arguments = [each for each in signature.parameters.values() if each.name != "self"]
    shown = [_ADDRESS.sub("", str(each).replace("'", "")) for each in arguments]
    shown = _with_stars(arguments, shown)
    returned = signature.return_annotation
    gives = (
        "" if inspect.isclass(of) or returned is inspect.Signature.empty else f" -> {_ADDRESS.sub('', str(returned))}"
    )
    line = f"{name}({', '.join(shown)}){gives}"
    if len(line) > _LONGEST_LINE:
        line = "\n".join([f"{name}(", *[f"    {each}," for each in shown], f"){gives}"])
    yield f"```text\n{line}\n```\n"


def _is_made_by_ours(of: type) -> bool:
    """Report whether the arguments of a class are ours: those of a builtin are up to Python."""
    return not issubclass(of, BaseException) or inspect.isfunction(of.__init__)


def _with_stars(arguments: list[inspect.Parameter], shown: list[str]) -> list[str]:
    """Return arguments with the marks of those that are positional or by name only."""
    lines = list(shown)
    kinds = [each.kind for each in arguments]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        lines.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        lines.insert(kinds.count(inspect.Parameter.POSITIONAL_ONLY), "/")
    return lines


def _text(of: Any) -> str:
    """Return a docstring in Markdown: its sections become lists."""
    lines, is_listing = [], False
    for line in (inspect.getdoc(of) or "").splitlines():
        if heading := _SECTION.match(line):
            is_listing = True
            lines.append(f"**{heading[1]}**\n")
        elif is_listing and (entry := _ENTRY.match(line)):
            lines.append(f"* `{entry[1]}`: {entry[2]}")
        elif is_listing and line.startswith("    "):
            lines.append("  " + line.strip())
        else:
            is_listing = is_listing and not line
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
