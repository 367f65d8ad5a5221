"""Each guide is done as its reader would do it: its programs are written into a folder, its commands run there in
their order, and what they print is what the page shows.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.effort import slow_where
from tests.support.console import differences, sessions
from tests.typing.programs import programs

GUIDES = Path(__file__).parent.parent / "docs" / "guides"
PAGES = sorted(page.name for page in GUIDES.glob("*.md") if page.name != "README.md")
NEEDS = {"chat.md": "transformers"}
"""Libraries that a guide needs and that the tests' own environment does not have."""

QUICK = ("notebook.md",)
"""The guides that `make test` follows; the others start servers and import large libraries."""


@pytest.mark.timeout(300)
@slow_where(lambda page: page not in QUICK)
@pytest.mark.parametrize("page", PAGES)
def test_a_guide_does_what_it_says(page: str, tmp_path: Path) -> None:
    """A reader who writes a guide's programs and types its commands sees what the guide shows."""
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    for name, program in programs(GUIDES / page).items():
        (tmp_path / name).write_text(program)

    assert differences((GUIDES / page).read_text(), tmp_path) == []


@pytest.mark.parametrize("page", PAGES)
def test_nothing_in_a_guide_is_untried(page: str) -> None:
    """All Python in a guide is in programs, its sessions run each of them or a program that imports it, and every
    command but a server shows what it prints.
    """
    text = (GUIDES / page).read_text()
    written = programs(GUIDES / page)
    commands = " ".join(command for command, _ in sessions(text))
    tests = {Path(name).stem for name in written if name.startswith("test_") and "pytest" in commands}
    imported = {
        found for program in written.values() for found in re.findall(r"^from (\w+) import", program, re.MULTILINE)
    }

    assert len(written) == text.count("```python") >= 1
    assert {Path(name).stem for name in written} <= {*re.findall(r"\w+", commands), *imported, *tests}
    assert [command for command, output in sessions(text) if not output and not command.endswith(" &")] == []


def test_each_guide_is_in_the_list() -> None:
    """The README leads to the list of guides, which leads to every guide."""
    contents = (GUIDES / "README.md").read_text()
    readme = (GUIDES.parent.parent / "README.md").read_text()

    assert "](docs/guides/README.md)" in readme
    assert [page for page in PAGES if f"]({page})" not in contents] == []
