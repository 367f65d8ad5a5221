"""Writes the pages of docs/ that are made from tables and markers in the tests.

    .venv/bin/python -m tests.pages

`tests/test_pages.py` fails while one of them is stale.
"""

from __future__ import annotations

from typing import Final

from tests.faults import FAULTS, marked, numbers
from tests.foreign.places import PLACES
from tests.glossary import GLOSSARY
from tests.support.sources import ROOT

DOCS: Final = ROOT / "docs"
COMMAND: Final = "python -m tests.pages"

_FAULTS: Final = """# The register of faults

Each fault that a test makes happen, and how; `python -m tests.pages` writes this page. The promises that hold in spite
of them are in [testing.md](testing.md#what-is-promised), beside [the soak](testing.md#the-soak) and
[the tools for tests of your own](testing.md#for-your-own-parts).
"""

_FOREIGN: Final = """# Code that is not ours

The places where carpool calls code that others have written, and the fate of an exception at each;
`python -m tests.pages` writes this page. Each place catches all of `BaseException` once. The outcome depends on the
place and not on the kind of exception, except where the last column says so. The kinds are Exception, StopIteration,
StopAsyncIteration, GeneratorExit, CancelledError, KeyboardInterrupt, SystemExit, MemoryError, RecursionError, and one
whose `str` raises. A test walks the table: each place, by each driver and each way into it, with each kind. Every call
ends by its deadline, the next request is served, workers live, and closing ends.

In services "its item fails" means a `ModelError` that names the kind, for this item alone. In `@carpool.batch` it means
that the callers of the bad items get the exception itself, or with `idempotent=False` those of its whole batch. There
are no other callbacks: a caller waits for a future or a lock of carpool's own.

| place | guarded in | outcome | kinds that end otherwise |
|---|---|---|---|
"""

_GLOSSARY: Final = """# Glossary

One word for one thing, in code, docs and messages; `python -m tests.pages` writes this page. A word with a class names
that class and no other.

| word | class | meaning |
|---|---|---|
"""


def faults() -> str:
    """Return the register of faults, with the files of the tests that name each."""
    by_number, lines = marked(), [_FAULTS]
    for section, found in FAULTS.items():
        lines += [f"## {section}\n", "| | fault | how it is made | tests |", "|---|---|---|---|"]
        for each in found:
            files = dict.fromkeys(file for number in numbers(each) for file in by_number.get(number, ()))
            tests = [*([each.also] if each.also else []), *(f"`{file}`" for file in files)]
            lines.append(f"| {each.numbers} | {each.fault} | {each.how} | {', '.join(tests)} |")
        lines.append("")
    return "\n".join(lines)


def foreign_code() -> str:
    """Return the table of code that is not ours."""
    rows = [
        f"| {each.name} | {_files(each.guarded_in)} | {each.outcome} | {each.otherwise} |\n".replace(" |  |", " | |")
        for each in PLACES
    ]
    return _FOREIGN + "".join(rows)


def _files(names: str) -> str:
    """Return files of the package as code; nowhere if there are none."""
    return ", ".join(f"`{name}`" for name in names.split(", ")) if names else "nowhere"


def glossary() -> str:
    """Return the glossary."""
    return _GLOSSARY + "".join(
        f"| **{each.word}** | {' '.join(f'`{name}`' for name in each.classes.split())} | {each.meaning} |\n"
        for each in GLOSSARY
    )


PAGES: Final = {"faults.md": faults, "foreign-code.md": foreign_code, "glossary.md": glossary}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
