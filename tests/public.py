"""What is public: names of Python with their arguments, commands, settings, metrics and codes of errors, a line each.

    .venv/bin/python -m tests.public

writes `tests/public.txt`, and `tests/test_public.py` fails where it is not what the code has. A line that goes away
breaks somebody's program: docs/upgrading.md says when that is allowed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final, get_overloads

from bench.site.reference import MEMBERS, metrics, modules, public
from carpool.cli import add_simulator, cli
from carpool.http.codec import MESSAGES
from carpool.service.settings import NAMES

LIST: Final = Path(__file__).parent / "public.txt"
COMMAND: Final = "python -m tests.public"
LARGE: Final = frozenset({"carpool.hf", "carpool.ray"})
"""Modules that need a large library: only their names are listed."""


def lines() -> list[str]:
    """Return all that is public, in order."""
    add_simulator()
    found = {line for name in public() for line in _python(name)}
    found |= {name for name in modules() if name != "carpool"}
    found |= {f"setting {name}" for name in NAMES}
    found |= {f"metric {each.name}{{{','.join(each.labels)}}}" for each in metrics()}
    found |= {f"error {code}" for code in MESSAGES}
    found |= set(_commands(cli, "carpool"))
    return sorted(found)


def _python(name: str) -> Iterator[str]:
    """Yield a name of Python, its arguments, and the public methods and properties of a class."""
    module, _, short = name.rpartition(".")
    yield name
    if module in LARGE:
        return
    found = getattr(importlib.import_module(module), short)
    if inspect.isclass(found):
        is_ours = inspect.isfunction(found.__init__) and not issubclass(found, Enum)
        yield from _arguments(name, found) if is_ours else ()
        for owner in found.__mro__:
            if owner.__module__.startswith("carpool"):
                for each, member in vars(owner).items():
                    function = getattr(member, "__func__", member)
                    is_shown = each in MEMBERS.get(name, (each,)) and not each.startswith("_")
                    if is_shown and (function is None or getattr(function, "__doc__", None)):
                        yield f"{name}.{each}"
                        yield from _arguments(f"{name}.{each}", function) if inspect.isfunction(function) else ()
    elif inspect.isfunction(found):
        for each in (found, *get_overloads(found)):
            yield from _arguments(name, each)
        settings = vars(importlib.import_module(found.__module__)).get("BatchSettings")  # those of `batch`
        yield from (f"{name}({each}=)" for each in (settings.__annotations__ if settings else ()))


def _arguments(name: str, of: Any) -> Iterator[str]:
    """Yield a line for each argument that can be given by name."""
    for each in inspect.signature(of).parameters.values():
        if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY} and each.name not in {"self", "cls"}:
            yield f"{name}({each.name}=)"


def _commands(of: Any, words: str) -> Iterator[str]:
    """Yield the commands and their flags."""
    for name in of:
        if name.startswith("-"):
            continue
        inner = of[name]
        yield f"{words} {name}"
        yield from _commands(inner, f"{words} {name}")
        if inner.default_command is not None:
            for argument in inner.assemble_argument_collection():
                yield from (
                    f"{words} {name} {flag}"
                    for flag in argument.names
                    if flag.startswith("--") and "--empty" not in flag
                )


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in lines()))
