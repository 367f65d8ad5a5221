"""The site of the documentation: its sources are complete, and its links are followed. `make docs` builds it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import carpool
from bench.site.reference import GROUPS, SOURCE, exported, file_of, metrics, modules, names_of, public
from bench.site.sources import ROOT_PAGES, assemble, converted, place_of
from bench.site.walk import external, faults
from carpool import version
from carpool.http.codec import MESSAGES, Refusal, error_response
from tests.support.models import Affine

ROOT = Path(__file__).parent.parent
IMPORTED = [name for name in modules() if name not in {"carpool.hf", "carpool.ray"}]
"""Those that need no large library; the others are read from their files."""


# -- the reference of Python names


def test_each_public_name_is_on_one_page() -> None:
    """No public name is left out of the reference, and none is on two pages."""
    placed = [name for group in GROUPS for name in names_of(group)]

    assert sorted(placed) == sorted(public())
    assert len(placed) > 100


@pytest.mark.parametrize("name", IMPORTED)
def test_the_names_are_those_of_the_modules(name: str) -> None:
    """The lists that are read from files are those that Python has, and each name has a docstring of its own."""
    module = importlib.import_module(name)

    assert exported(name) == [each for each in module.__all__ if not inspect.ismodule(getattr(module, each))]
    for each in exported(name):
        found = getattr(module, each)
        assert (not inspect.isroutine(found) and not inspect.isclass(found)) or found.__doc__, each


@pytest.mark.parametrize("name", sorted(set(modules()) - set(IMPORTED)))
def test_names_that_need_a_library_have_docstrings(name: str) -> None:
    """The classes and functions of modules that need torch or Ray have docstrings."""
    path = file_of(name)
    assert path is not None
    texts = [path.read_text(), *(each.read_text() for each in path.parent.glob("*.py") if path.name == "__init__.py")]
    nodes = [node for text in texts for node in ast.parse(text).body]
    named = {node.name: node for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    for each in exported(name):
        assert ast.get_docstring(named[each]), each


def test_the_table_of_metrics_has_those_of_a_service() -> None:
    """Each metric that a service has is in the table, with its labels, and no name is there twice."""
    listed = {each.name: set(each.labels) for each in metrics()}
    with carpool.Service(carpool.Stage(Affine, max_batch_size=4, run_in="thread")).run() as service:
        service.predict(1)
        families = [family for family in carpool.collector(service).collect() if family.samples]

    assert len(listed) == len(metrics()) > 50
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert set(family.samples[0].labels) - {"le"} == listed[name], name
    assert len(families) > 10


# -- pages and links


@pytest.fixture(scope="module")
def assembled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the site."""
    folder = tmp_path_factory.mktemp("docs")
    assemble(folder)
    return folder


def test_every_page_is_in_the_navigation_once(assembled: Path) -> None:
    """The navigation lists each page of the site, and has the five sections."""

    def pages(of: Any) -> Iterator[str]:
        match of:
            case str():
                yield of
            case list():
                for each in of:
                    yield from pages(each)
            case dict():
                for each in of.values():
                    yield from pages(each)

    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = list(pages(nav))

    assert sorted(listed) == sorted(str(path.relative_to(assembled)) for path in assembled.rglob("*.md"))
    assert [next(iter(each)) for each in nav] == ["Start", "Guides", "Understand", "Reference", "Operate"]


def test_files_to_deploy_with_are_on_the_site(assembled: Path) -> None:
    """Each file of deploy/ is on a page, as it is, with an anchor."""
    page = (assembled / "deploy.md").read_text()
    paths = [path for path in (ROOT / "deploy").rglob("*") if path.is_file() and path.suffix != ".pyc"]

    assert len(paths) >= 10
    for path in paths:
        place = place_of(str(path.relative_to(ROOT)))
        assert place is not None and f"{{ #{place.partition('#')[2]} }}" in page
        assert path.read_text().splitlines()[0] in page


def test_links_lead_to_places_of_the_site() -> None:
    """Links to pages and files lead to their places; those to what is not on the site become text, and code stays."""
    text = "[a](../deploy/nginx.conf), [b](http.md#formats), `[c](x.md)`, [more\nlines](../SECURITY.md), "
    text += "[d](../src/x.py)\n"

    assert converted(text, "docs/ways.md", "ways.md") == (
        "[a](deploy.md#nginx.conf), [b](http.md#formats), `[c](x.md)`, [more\nlines](security.md), d (`src/x.py`)\n"
    )
    assert converted("[a](../README.md#install)\n", "docs/guides/x.md", "guides/x.md") == "[a](../index.md#install)\n"


def test_items_of_numbered_lists_keep_their_programs() -> None:
    """What belongs to a numbered item stands four columns to the right; code elsewhere stays where it is."""
    text = "1. One:\n\n   ```sh\n   a\n     b\n   ```\n\nEnd\n\n```\n1. x\n   y\n```\n"

    assert converted(text, "docs/a.md", "a.md") == (
        "1. One:\n\n    ```sh\n    a\n      b\n    ```\n\nEnd\n\n```\n1. x\n   y\n```\n"
    )


def test_a_range_may_stand_below_its_figure() -> None:
    """Cells of figures are not broken, but for the place before a range in brackets."""
    assert converted("| 3,584 (3,320-4,263) | f(1-2) |\n", "docs/a.md", "a.md") == (
        "| 3,584 <wbr>(3,320-4,263) | f(1-2) |\n"
    )


def test_all_pages_in_the_root_but_the_first_are_on_the_site() -> None:
    """The README has the start page in its place."""
    assert {*ROOT_PAGES, "README.md"} == {path.name for path in ROOT.glob("*.md")}


def test_faults_of_a_built_site_are_found(tmp_path: Path) -> None:
    """Each kind of fault has a line, and a whole page has none."""
    (tmp_path / "a.html").write_text(
        '<p id="x"><p id="x"><a href="b.html#y">1</a><a href="b.html#z">2</a><a href="c.html">3</a>'
        '<a href="https://example.com">4</a><script src="https://example.com/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="y"><a href="a.html">1</a><a href="#y">2</a>')

    assert faults(tmp_path) == [
        "a.html: the anchor x is there twice",
        "a.html: https://example.com/x.js would be loaded from another site",
        "a.html: b.html#z has no such anchor",
        "a.html: c.html leads nowhere",
    ]
    assert external(tmp_path)["https://example.com"] == {"a.html"}
    assert faults(tmp_path / "nowhere") == [f"there is no page in {tmp_path / 'nowhere'}"]


# -- errors


def codes() -> set[str]:
    """The codes of errors, as the source writes them."""
    text = "\n".join(path.read_text() for path in (SOURCE / "carpool").rglob("*.py"))
    return {*MESSAGES, *re.findall(r'\bcode(?:: str)? ?= ?"([a-z_]+)"', text)}


def test_each_code_has_an_anchor_a_cause_and_a_cure() -> None:
    """docs/errors.md has a heading for each code, and no other ones, with a status, a cause and a cure."""
    text = (ROOT / "docs" / "errors.md").read_text()
    found = re.findall(r"^### `(\w+)`\n\n\*\*(\d{3})\*\* · [^*]+\*Cure:\*\s\S", text, re.MULTILINE)

    assert sorted(code for code, _ in found) == sorted(codes())


def test_statuses_are_those_of_the_refusals() -> None:
    """The status beside a code is the one that the HTTP layer answers with."""
    text = (ROOT / "docs" / "errors.md").read_text()
    source = "\n".join(path.read_text() for path in (SOURCE / "carpool" / "http").rglob("*.py"))
    refused = re.findall(r'Refusal\((\d{3}), "(\w+)"', source)

    assert len(refused) > 10
    for status, code in refused:
        assert f"### `{code}`\n\n**{status}**" in text


def test_errors_lead_to_the_site_once_it_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address of the site an error body has no link; with one it has that of its code."""
    refusal = Refusal(401, "unauthorized")
    assert b"help" not in error_response(refusal, "1").body
    monkeypatch.setattr(version, "SITE_URL", "https://docs.example")
    assert b'"help":"https://docs.example/errors.html#unauthorized"' in error_response(refusal, "1").body
    assert b"help" not in error_response(carpool.HTTPError("no", status=400), "1").body
