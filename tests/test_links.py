"""Every relative link in the documents leads to a file and a heading that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md"), *ROOT.glob("examples/*.md")]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def prose(page: Path) -> str:
    """Return a page without its code, where brackets mean something else."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]+`", "code", text)


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures that stay within the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, as GitHub names them, and explicit ones."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    named = [re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain]
    assert len(named) == len(set(named)), f"{page.name} has two headings with one name"
    return {*named, *re.findall(r'<a id="([^"]+)">', text)}


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name: str) -> None:
    """A link names a file of the repository; its anchor is a heading of that file."""
    page = ROOT / name
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name} links to {link}, which does not exist"
        assert not anchor or anchor in anchors(target), f"{name} links to {link}, but there is no such heading"


def test_every_page_can_be_reached_from_the_readme() -> None:
    """A reader who starts at the README finds every page in docs/ by following links."""
    found, left = set[Path](), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in found:
            found.add(page)
            targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
            left += [target for target in targets if target.suffix == ".md" and target.exists()]

    assert set(ROOT.glob("docs/**/*.md")) <= found
