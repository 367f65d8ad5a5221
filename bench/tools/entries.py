"""Begins the entries of docstrings with a capital letter: those of `Args`, `Attributes` and so on.

`python -m bench.tools.entries` writes the files; `tests/test_entries.py` says when one is to be
written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from bench import ROOT

FOLDERS = ("src/carpool", "bench", "conformance", "examples", "tests")
_SECTION = re.compile(r"\s*(Args|Attributes|Raises|Yields|Returns|Parameters):")
_ENTRY = re.compile(r"(?P<indent>\s*)(?P<name>\*{0,2}[\w.]+): (?P<word>[a-z][\w.-]*)")
_NAMES = frozenset({"asyncio", "carpool", "cloudpickle", "httptools", "msgpack", "matplotlib", "msgspec", "numpy"})
"""Words that have no capital letter anywhere."""


def corrected(text: str) -> str:
    """Return the text of a module with a capital letter at the beginning of each entry."""
    lines = text.splitlines(keepends=True)
    for at in _entries(lines):
        found = _ENTRY.match(lines[at])
        if found is not None and found["word"] not in _NAMES:
            begin = found.start("word")
            lines[at] = lines[at][:begin] + lines[at][begin].upper() + lines[at][begin + 1 :]
    return "".join(lines)


def _entries(lines: list[str]) -> Iterator[int]:
    """Yield the positions of the lines with which entries begin."""
    depth: int | None = None  # the indent of the section's entries
    for at, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if _SECTION.fullmatch(line.rstrip()):
            depth = indent + 4
        elif depth is not None and line.strip() and indent < depth:
            depth = None
        elif indent == depth:
            yield at


def files() -> list[Path]:
    """Return the files whose docstrings follow the rule."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def main() -> None:
    """Write the files in which an entry begins with a small letter."""
    for path in files():
        text = path.read_text()
        if (better := corrected(text)) != text:
            path.write_text(better)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
