"""Follows the links of a site that was built: each leads to a file, and its anchor is there."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from bench import ROOT

SITE: Final = ROOT / "build" / "site"


class _Page(HTMLParser):
    """What a page links to, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.repeated: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        anchor = given.get("id") or (given.get("name") if tag == "a" else None)
        if anchor:
            if anchor in self.anchors and not anchor.startswith("__"):
                self.repeated.append(anchor)
            self.anchors.add(anchor)
        target = given.get("href") if tag in {"a", "link"} else given.get("src")
        if target:
            self.links.append(target)
            if tag != "a" and given.get("rel") not in {"canonical", "next", "prev"}:
                self.loaded.append(target)


@cache
def _page(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def pages(site: Path) -> list[Path]:
    """Return the pages of a site, but for that of errors, whose links begin at the root."""
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


def faults(site: Path) -> list[str]:
    """Return a line for each fault.

    Faults are links that lead nowhere, anchors that are there twice, and files of other sites.
    """
    found = [] if pages(site) else [f"there is no page in {site}"]
    for path in pages(site):
        name = path.relative_to(site)
        found += [f"{name}: the anchor {each} is there twice" for each in _page(path).repeated]
        loaded = filter(_is_external, _page(path).loaded)
        found += [f"{name}: {each} would be loaded from another site" for each in loaded]
        for link in dict.fromkeys(_page(path).links):
            if _is_external(link) or link.startswith("data:"):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{name}: {link} leads nowhere")
            elif anchor and target.suffix == ".html" and anchor not in _page(target).anchors:
                found.append(f"{name}: {link} has no such anchor")
    return found


def external(site: Path) -> dict[str, set[str]]:
    """Return the addresses of other sites, each with the pages that link to it."""
    found = defaultdict(set)
    for path in pages(site):
        for link in filter(_is_external, _page(path).links):
            found[link].add(str(path.relative_to(site)))
    return dict(found)


def _is_external(link: str) -> bool:
    return link.startswith(("http:", "https:", "mailto:", "//"))
