"""The programs in the docs run as written, and print what their comments say.

A block of Python that follows `<!-- runs -->` is a program; its first line names its file. All programs of a page lie
in one folder, so that one may import another.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serving import serve

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("ways.md", "coming_from.md")


def programs(page: str) -> dict[str, str]:
    """The programs of a page, by file name."""
    found: dict[str, str] = {}
    for text in re.findall(r"<!-- runs -->\n```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name, f"a program of {page} does not begin with its file name:\n{text}"
        assert name[1] not in found, f"two programs of {page} are called {name[1]}"
        found[name[1]] = text
    return found


PROGRAMS = {page: programs(page) for page in PAGES}


def write(page: str, folder: Path) -> None:
    """All programs of a page into a folder."""
    for name, text in PROGRAMS[page].items():
        (folder / name).write_text(text)


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, found in PROGRAMS.items() for name in found])
def test_a_program_prints_what_it_says(page: str, name: str, tmp_path: Path) -> None:
    """Every `print` in a program of the docs has its output as a comment behind it, in the order in
    which they run.
    """
    write(page, tmp_path)
    command = [sys.executable, "-W", "error", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"^ *print\(.*\)  # (.*)$", PROGRAMS[page][name], re.MULTILINE)


def test_every_section_has_programs() -> None:
    """All Python in ways.md runs, and each system in coming_from.md has a program of ours."""
    ways, coming = ((DOCS / page).read_text() for page in PAGES)
    assert len(PROGRAMS["ways.md"]) == ways.count("```python") >= 6
    for section in coming.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        assert "<!-- runs -->" in section, f"{title}: no program of ours"
    assert len(PROGRAMS["coming_from.md"]) == coming.count("<!-- runs -->") >= 6


def test_the_service_of_the_page_over_http(tmp_path: Path) -> None:
    """The service of the page runs by `carpool serve` as the page says, from the folder of its
    programs.
    """
    page = (DOCS / "ways.md").read_text()
    (target,) = re.findall(r"^carpool serve (\S+)", page, re.MULTILINE)
    write("ways.md", tmp_path)
    with serve(target, folder=tmp_path) as served:
        status, body, _ = served.ask("POST", "/predict", [0.0, 3.0, 4.0])
        refused, why, _ = served.ask("POST", "/predict", [0.0, "x"])

    assert (status, json.loads(body)) == (200, 5.0)
    assert (refused, json.loads(why)["error"]["code"]) == (422, "invalid_item")
