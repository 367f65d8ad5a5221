"""Puts the sources of the site into one folder: pages, files they link to, and the reference."""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Final

from bench import ROOT
from bench.site.reference import metrics_page, python_pages

FOLDER: Final = ROOT / "build" / "docs"
ROOT_PAGES: Final = ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md")
SHOWN: Final = {"deploy": "deploy.md", "examples": "examples.md"}
"""Folders whose files are on one page of the site each, by folder."""

_CODE: Final = re.compile(r"(^ *```.*?^ *```+$)", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"`(?:[^`\n]|\n(?!\n))*`|\[((?:[^\]\[]|\[[^\]\[]*\])*)\]\(([^)\s]+)\)")
_RANGE: Final = re.compile(r"(?<=\d) \((?=[\d.,]+-[\d.,]+\))")
_FENCE: Final = re.compile(r"^ *```")
_LANGUAGES: Final = {
    ".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".html": "html", ".conf": "nginx",
    ".service": "ini", ".socket": "ini",
}  # fmt: skip


def assemble(folder: Path = FOLDER) -> None:
    """Write all sources of the site into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {**_pages(), **_shown()}
    for name, text in {**python_pages(), **metrics_page()}.items():
        pages[name] = pages.get(name, "") + text
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in (ROOT / "docs").rglob("*"):
        if path.is_file() and path.suffix in {".png", ".svg", ".txt", ".css"}:
            target = folder / path.relative_to(ROOT / "docs")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    shutil.copyfile(Path(__file__).parent / "site.css", folder / "site.css")


def place_of(path: str) -> str | None:
    """Return where a file of the repository is on the site; None if it is not there.

    A file that is on a page with others has an anchor there.

    Args:
        path: Relative to the root, as `docs/http.md`.
    """
    if path in ROOT_PAGES:
        return path.lower()
    if path == "README.md":
        return "index.md"
    top, _, rest = path.partition("/")
    if top == "docs" and (ROOT / path).is_file():
        return re.sub(r"(^|/)README\.md$", r"\1index.md", rest)
    if top in SHOWN:
        return SHOWN[top] + (f"#{anchor_of(rest)}" if (ROOT / path).is_file() else "")
    return None


def anchor_of(name: str) -> str:
    """Return the anchor of a file on a page of files."""
    return re.sub(r"[^\w.-]", "-", name).lower()


def _pages() -> dict[str, str]:
    """Return the pages that people write, by their places."""
    found = {}
    for path in [*(ROOT / name for name in ROOT_PAGES), *(ROOT / "docs").rglob("*.md")]:
        name = str(path.relative_to(ROOT))
        place = place_of(name)
        assert place is not None
        found[place] = converted(path.read_text(encoding="utf-8"), name, place)
    return found


def _shown() -> dict[str, str]:
    """Return the pages that show the files of a folder."""
    return {page: _files(folder) for folder, page in SHOWN.items()}


def _files(folder: str) -> str:
    """Return a page with the files of a folder, each with an anchor."""
    heads = {"deploy": "Files to deploy with", "examples": "Examples"}
    about = {
        "deploy": "Templates for systemd, nginx, Docker, Kubernetes, Prometheus, Grafana and Ray: copy what you need,"
        " and see [operating](operating.md) for the order.",
        "examples": "Programs that are more than a guide shows. `carpool demo` runs the first of them.",
    }
    lines = [f"# {heads[folder]}\n", f"{about[folder]}\n"]
    paths = [path for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and path.name != "__init__.py"]
    for path in paths:
        if "__pycache__" in path.parts:
            continue
        name = str(path.relative_to(ROOT / folder))
        language = _LANGUAGES.get(path.suffix, "docker" if path.name == "Dockerfile" else "text")
        text = path.read_text(encoding="utf-8").rstrip()
        fold = "???" if text.count("\n") > 400 else None
        block = f"````{language}\n{text}\n````\n"
        lines.append(f"## {name} {{ #{anchor_of(name)} }}\n")
        if fold:
            inner = "\n".join(f"    {line}".rstrip() for line in block.splitlines())
            lines.append(f'??? note "Show the file"\n\n{inner}\n')
        else:
            lines.append(block)
    return "\n".join(lines)


def converted(text: str, name: str, place: str) -> str:
    """Return a page as the site takes it.

    Links lead to places of the site, what belongs to an item of a numbered list stands four columns
    to the right, as Python's Markdown has it, and figures may be broken before a range in brackets.

    Args:
        text: The page.
        name: Where it is in the repository.
        place: Where it is on the site.
    """
    parts = _CODE.split(_in_columns(text))
    return "".join(
        part if at % 2 else _RANGE.sub(" <wbr>(", _LINK.sub(lambda found: _link(found, name, place), part))
        for at, part in enumerate(parts)  # every second one is code
    )


def _in_columns(text: str) -> str:
    """Return a page whose numbered items have what belongs to them four columns to the right."""
    lines, in_item, is_code = [], False, False
    for line in text.splitlines():
        if re.match(r"\d+\. ", line) and not is_code:
            in_item = True
        elif line and not line.startswith("   "):
            in_item = False
        if _FENCE.match(line):
            is_code = not is_code
        lines.append(f" {line}" if in_item and line.startswith("   ") else line)
    return "\n".join(lines) + "\n"


def _link(found: re.Match[str], name: str, place: str) -> str:
    """Return a link as the site has it; its text alone if the site has nothing there."""
    text, target = found.groups()
    if text is None:  # code
        return found[0]
    if re.match(r"[a-z]+:|#", target):
        return found[0]
    path, _, anchor = target.partition("#")
    full = posixpath.normpath(posixpath.join(str(PurePosixPath(name).parent), path))
    there = place_of(full)
    if there is None:
        return text if re.search(rf"{re.escape(PurePosixPath(path).name)}", text) else f"{text} (`{full}`)"
    page, _, own = there.partition("#")
    relative = posixpath.relpath(page, str(PurePosixPath(place).parent))
    wanted = anchor or own
    return f"[{text}]({relative}{'#' + wanted if wanted else ''})"
