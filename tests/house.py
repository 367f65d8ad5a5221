"""How large the house is: files, lines of code, base classes with a single subclass, protocols, words.

    python -m tests.house            prints each figure beside its budget; the exit status is 1 where one is exceeded
    python -m tests.house --bases    prints the base classes with a single subclass, too

A budget is the size that was reached. It may fall. A change that raises one says in its commit why nothing else could
go for it.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.glossary import GLOSSARY

ROOT: Final = Path(__file__).parent.parent
SOURCES: Final = ROOT / "src" / "carpool"
NO_CODE: Final = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
BARS: Final = re.compile(r"[|:-]+")
BUDGET: Final = {
    "files": 272,
    "lines of code": 45_905,
    "bases with a single subclass": 18,
    "protocol classes": 51,
    "words of the glossary": 50,
    "words of the docs": 76_982,
}


def sources() -> Iterator[tuple[Path, str]]:
    """Yield each module and its text."""
    for path in sorted(SOURCES.rglob("*.py")):
        yield path, path.read_text()


def lines_of_code(text: str) -> int:
    """Return how many lines have code on them: no comments, docstrings or blank lines."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def classes() -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each class and those of its bases, without modules and parameters."""
    for _, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                yield node.name, names


def protocols() -> list[str]:
    """Return the names of the protocol classes."""
    return [name for name, bases in classes() if "Protocol" in bases]


def single_bases() -> dict[str, str]:
    """Return each base class of ours that has one subclass, with that; no exceptions and no protocols."""
    bases_of = dict(classes())
    below: dict[str, list[str]] = defaultdict(list)
    for name, bases in bases_of.items():
        for base in bases:
            if base in bases_of:
                below[base].append(name)

    def is_exception(name: str) -> bool:
        bases = bases_of.get(name, [])
        return any(base.endswith(("Error", "Exception")) or is_exception(base) for base in bases)

    return {
        base: some[0]
        for base, some in sorted(below.items())
        if len(some) == 1 and "Protocol" not in bases_of[base] and not is_exception(base)
    }


def words() -> int:
    """Return how many words the pages in the root and in docs/ have.

    Whatever stands between spaces is a word, in programs and tables, too. The bars and rules of tables (`|`, `---:`)
    are none.
    """
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sum(BARS.fullmatch(each) is None for page in pages for each in page.read_text().split())


def figures() -> dict[str, int]:
    """Return each figure by its name."""
    texts = [text for _, text in sources()]
    return {
        "files": len(texts),
        "lines of code": sum(map(lines_of_code, texts)),
        "bases with a single subclass": len(single_bases()),
        "protocol classes": len(protocols()),
        "words of the glossary": len(GLOSSARY),
        "words of the docs": words(),
    }


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bases", action="store_true", help="print the base classes with a single subclass, too")
    given = parser.parse_args()
    if given.bases:
        for base, only in single_bases().items():
            print(f"{base} has {only} alone")
    exceeded = False
    for name, figure in figures().items():
        exceeded = exceeded or figure > BUDGET[name]
        print(f"{name:30} {figure:7,} of {BUDGET[name]:7,}{'   EXCEEDED' if figure > BUDGET[name] else ''}")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
