"""Writes the sections of the docs that programs make: each page marks the places of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from bench import ROOT

DOCS = ROOT / "docs"
END = "<!-- end -->"


def write(sections: Mapping[str, str], folder: Path = DOCS) -> None:
    """Put each section where a page has a place for it.

    The place is between `<!-- bench: name -->` and `<!-- end -->`. A section for which no page has
    a place is told of on standard error.
    """
    for name, content in sections.items():
        if (page := page_of(name, folder)) is None:
            print(f"no page in {folder} has a place for {name}: add {marker(name)} and {END}", file=sys.stderr)
            continue
        before, begin, rest = page.read_text().partition(f"{marker(name)}\n")
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{begin}{content}\n{END}{after}")


def marker(name: str) -> str:
    """The line after which a section begins."""
    return f"<!-- bench: {name} -->"


def page_of(name: str, folder: Path = DOCS) -> Path | None:
    """The page that has a place for a section."""
    pages = (page for page in sorted(folder.glob("*.md")) if f"{marker(name)}\n" in page.read_text())
    return next(pages, None)
