"""Every program of the README, the docs and the examples is clean in `mypy --strict` and in pyright, for `make lint`.

    python -m tests.typing.programs

A program of a page is a block of Python whose first line names its file. The programs of a page lie in one folder, as
they may import each other.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from tests.typing.checkers import ROOT, mypy, pyright, stub

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def programs(page: Path) -> dict[str, str]:
    """The programs of a page, by the name of their file."""
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    named = [(re.match(r"# (\w+\.py)\n", block), block) for block in blocks]
    return {name[1]: block for name, block in named if name is not None}


def write_all(folder: Path) -> list[list[Path]]:
    """All programs as files, those of one page, and the examples, together."""
    groups: list[list[Path]] = []
    for page in PAGES:
        files = [(folder / page.stem / name, text) for name, text in programs(page).items()]
        for file, text in files:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        if files:
            groups.append([file for file, _ in files])
    shutil.copytree(ROOT / "examples", folder / "examples" / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    groups.append(sorted((folder / "examples" / "examples").glob("*.py")))
    return groups


def check(folder: Path) -> dict[str, str]:
    """What each checker has to say of them, by its name; nothing of those that are content."""
    groups = write_all(folder)
    everything = [file for group in groups for file in group]
    stubs = folder / "stubs"
    stub(everything, stubs)
    said: dict[str, str] = {}
    for group in groups:
        code, text = mypy(group, stubs, folder / "cache")
        if code:
            said["mypy --strict"] = said.get("mypy --strict", "") + text
    for mode in ("standard", "strict"):
        code, text = pyright(everything, mode, stubs, folder / f"{mode}.json")
        if code:
            said[f"pyright, {mode}"] = text
    return said


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        said = check(Path(folder))
        for checker, text in said.items():
            print(f"{checker}:\n{text.replace(folder, '').strip()}\n")
    print("types of the programs: " + (f"wrong in {', '.join(said)}" if said else "clean"))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
