"""The programs in the README and the docs run as written, and print what is said there.

A block of Python that follows `<!-- runs -->` is a program; its first line names its file. All
programs of a page are written into one folder, so that one may import another. In the README and on
the start page (docs/README.md) every block of Python is one, and its output is the block of text
that follows. Other programs are imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import carpool
from bench.tools.lowest import project
from tests.effort import slow_where
from tests.support.console import differences, shown_programs
from tests.support.prepared import run
from tests.support.serving import serve
from tests.typing.programs import PAGES as WITH_PROGRAMS
from tests.typing.programs import programs as named_programs

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ("ways.md", "functions.md", "coming_from.md", "services.md", "streaming.md", "changes.md", "graphs.md")


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


@slow_where(lambda page, name: page == "coming_from.md" and name != next(iter(PROGRAMS[page])))
@pytest.mark.parametrize(("page", "name"), [(page, name) for page, found in PROGRAMS.items() for name in found])
def test_a_program_prints_what_it_says(page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `print` in a program of the docs has its output as a comment behind it, in the order in
    which they run.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # the pages tell of machines with several GPUs
    write(page, tmp_path)
    done = run("-W", "error", name, env=os.environ, cwd=tmp_path, timeout=60)

    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == re.findall(
        r"^ *print\(.*\)  # (.*)$", PROGRAMS[page][name], re.MULTILINE
    )


def test_every_section_has_programs() -> None:
    """All Python in ways.md runs, and each system in coming_from.md has a program of ours."""
    ways, coming = ((DOCS / page).read_text() for page in ("ways.md", "coming_from.md"))
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


@pytest.mark.slow
def test_a_table_is_answered_as_its_page_shows(tmp_path: Path) -> None:
    """A reader who writes the programs of tables.md and types its commands sees what the page shows."""
    for name, text in named_programs(DOCS / "tables.md").items():
        (tmp_path / name).write_text(text)

    assert differences((DOCS / "tables.md").read_text(), tmp_path) == []


# -- programs that are not run, and commands


def _imported() -> list[tuple[Path, str]]:
    """The programs of pages that nothing runs."""
    pages = [page for page in WITH_PROGRAMS if page.parent == DOCS and page.name != "README.md"]
    return [(page, name) for page in pages for name in named_programs(page) if name not in PROGRAMS.get(page.name, {})]


@slow_where(lambda page, name: page.name != "metrics.md")
@pytest.mark.parametrize(("page", "name"), _imported(), ids=lambda each: getattr(each, "name", each))
def test_a_program_that_is_not_run_can_be_imported(page: Path, name: str, tmp_path: Path) -> None:
    """The other programs of the docs are imported, beside those of their page, where their libraries are there."""
    for each, text in named_programs(page).items():
        (tmp_path / each).write_text(text)
    for needed in re.findall(r"^(?:from|import) (\w+)", named_programs(page)[name], re.MULTILINE):
        if not (tmp_path / f"{needed}.py").exists():
            pytest.importorskip(needed)
    command = [sys.executable, "-c", f"import {Path(name).stem}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)

    assert done.returncode == 0 or "sys.argv" in done.stderr, done.stderr  # it takes arguments, and got so far


def commands(page: Path) -> list[str]:
    """The code of a page that is no program, a line each: sessions, files and what stands amid the text."""
    text = page.read_text()
    blocks = re.findall(r"^ *```(?!python)\w+\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [line for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    return [line.partition(" #")[0] for line in [*lines, *(" ".join(span.split()) for span in spans)]]


def test_commands_and_their_options_exist() -> None:
    """Each `carpool …` on a page is a command with the options that are written there, each `make …` a target,
    and each `python -m …` of the repository a module.
    """
    public = (ROOT / "tests" / "public.txt").read_text().splitlines()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = []
    for page in [*WITH_PROGRAMS, *ROOT.glob("*.md")]:
        for line in commands(page):
            for command, rest in re.findall(r"(?<![\w.:/-])(carpool [a-z]+(?: (?:add|remove)\b)?)([^|;&>]*)", line):
                found += [command, *(f"{command} {flag}" for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest))]
            assert set(re.findall(r"\bmake ([a-z-]+)", line)) <= set(targets), f"{page.name}: {line}"
            for module in re.findall(r"python -m ((?:bench|tests|conformance)[\w.]*)", line):
                path = ROOT / module.replace(".", "/")
                assert path.is_dir() or path.with_suffix(".py").exists(), f"{page.name}: {line}"

    assert set(found) - set(public) == set()
    assert len(found) > 200


README = (ROOT / "README.md").read_text()
START = (DOCS / "README.md").read_text()
SHOWN_PROGRAMS = {"README": shown_programs(README), "start page": shown_programs(START)}


@pytest.mark.parametrize(
    ("name", "program", "output"),
    [pytest.param(*each, id=f"{page}-{each[0]}") for page, found in SHOWN_PROGRAMS.items() for each in found],
)
def test_a_program_of_the_first_pages_prints_what_it_shows(
    name: str, program: str, output: str, tmp_path: Path
) -> None:
    """The programs of README and start page print the block that follows; which callers share a call may differ."""
    (tmp_path / name).write_text(program)
    command = [sys.executable, "-W", "error", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == output.splitlines()[-1]
    assert sorted(re.findall(r"\d+", done.stdout)) == sorted(re.findall(r"\d+", output))


def test_all_python_on_the_first_pages_is_tried() -> None:
    """Each block is a program with a name and an output."""
    assert len(SHOWN_PROGRAMS["README"]) == README.count("```python") >= 1
    assert len(SHOWN_PROGRAMS["start page"]) == START.count("```python") >= 2


def test_the_first_pages_name_the_wheel_that_is_built() -> None:
    """The words to type name the file that `make dist` writes."""
    for text in (README, START):
        assert set(re.findall(r"carpool-([\w.]+)-py3", text)) == {carpool.__version__}


def test_the_table_of_extras_is_complete() -> None:
    """Each extra that a user may want is in the table of the start page, and no other word is."""
    (table,) = re.findall(r"^\| extra \| for \|\n\|---\|---\|\n((?:\|.*\n)+)", START, re.MULTILINE)
    extras = set(project()["optional-dependencies"]) - {"dev", "docs", "sim", "embeddings"}

    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == extras


def test_the_service_of_the_start_page_over_http(tmp_path: Path) -> None:
    """`carpool serve` and both `curl`s answer what the page shows, but for the request's id."""
    (target,) = re.findall(r"^carpool serve (\S+)", START, re.MULTILINE)
    asked = re.findall(r"^curl --json '(.*)' localhost:8000(\S+)", START, re.MULTILINE)
    shown = [json.loads(answer) for answer in re.findall(r"```json\n(.*?)```", START, re.DOTALL)]
    name, program = next(
        (name, program) for name, program, _ in SHOWN_PROGRAMS["start page"] if name == f"{target.split(':')[0]}.py"
    )
    (tmp_path / name).write_text(program)
    with serve(target, folder=tmp_path) as served:
        answers = [json.loads(served.ask("POST", path, json.loads(body))[1]) for body, path in asked]

    for answer in (*answers, *shown):
        if isinstance(answer, dict):
            del answer["error"]["request_id"]
    assert answers == shown and len(shown) == 2


def cells(page: str, row: str) -> list[str]:
    """The first row of a page's tables that begins so, cut into its cells."""
    (line, *_) = re.findall(rf"^\| *{row} *\|.*$", (DOCS / page).read_text(), re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


def fact(link: str, holding: str) -> str:
    """The item of the README's lists that links there and holds a figure."""
    items = re.split(r"\n(?=\* |\n)", README)
    (found,) = [item for item in items if f"]({link})" in item and re.search(rf"(?<![\d.]){holding}(?![\d.]*\d)", item)]
    return found


def test_the_facts_of_the_readme_are_those_of_the_docs() -> None:
    """The figures of the README's three facts are rounded from the tables that they link to."""
    lone, many = (cells("benchmarks.md", rf"mosec +\| +{connections}") for connections in (1, 64))
    requests, killed = (cells("testing.md", row)[1] for row in ("requests", "workers killed in the middle of a call"))
    lost = [cells("testing.md", rf"\*\*{what}\*\*[^|]*")[1] for what in ("lost", "crossed", "duplicated")]
    ours, theirs = lone[5].split(" / ")

    assert fact("docs/benchmarks.md#http", f"{float(many[4]):.1f}")
    assert float(many[6]) == pytest.approx(1 / 3, abs=0.03)  # of the median, "about a third"
    soak = fact("docs/testing.md#the-soak", f"{float(requests.replace(',', '')) / 1e6:.1f} million")
    assert killed in soak
    assert lost == ["0", "0", "0"]
    assert f"{float(theirs):.0f} ms" in fact("docs/benchmarks.md#http", f"{ours} ms")
