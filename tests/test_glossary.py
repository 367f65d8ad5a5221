"""The glossary of ARCHITECTURE.md: one word for one thing, and one class for each word that names a class."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@cache
def classes(folder: Path) -> Counter[str]:
    """Count how many classes, and aliases of types at the top of a module, have each name in a folder."""
    found: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] += 1
    return found


def entries(text: str) -> dict[str, list[str]]:
    """Read the words of a glossary, each with the classes that it names."""
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.*?) \| .+ \|$", text.split("\n## Glossary\n")[1], re.MULTILINE)
    return {word: re.findall(r"`(\w+)`", names) for word, names in rows}


GLOSSARY = entries((ROOT / "ARCHITECTURE.md").read_text())
SOURCE = ROOT / "src"


def test_the_glossary_is_read() -> None:
    """It has about 40 words, and each of them once."""
    assert 20 <= len(GLOSSARY) <= 60
    assert {"request", "batch", "stage", "batcher", "worker", "place", "lane", "deadline", "due", "SLO"} <= set(
        GLOSSARY
    )


@pytest.mark.parametrize(("word", "names"), GLOSSARY.items())
def test_a_word_names_classes_that_exist_once(word: str, names: list[str]) -> None:
    """No other class has the name, and the class has not gone."""
    assert {name: classes(SOURCE)[name] for name in names} == dict.fromkeys(names, 1), word


def test_no_class_is_named_by_two_words() -> None:
    """One thing has one word."""
    named = Counter(name for names in GLOSSARY.values() for name in names)
    assert [name for name, times in named.items() if times > 1] == []


def test_no_two_classes_share_a_name() -> None:
    """A reader who looks for a class finds one, in all of the package; private ones may repeat."""
    assert [name for name, times in classes(SOURCE).items() if times > 1 and not name.startswith("_")] == []


def test_what_is_gone_is_found(tmp_path: Path) -> None:
    """The glossary's own reader: a class that is missing, and one that exists twice."""
    (tmp_path / "one.py").write_text("class Batch: ...\n")
    (tmp_path / "two.py").write_text("if True:\n    class Batch: ...\nclass Queue: ...\n")
    text = (
        "# x\n## Glossary\n\n| word | class | what |\n|---|---|---|\n| **batch** | `Batch` | b |\n| **key** |  | k |\n"
    )

    assert classes(tmp_path) == {"Batch": 2, "Queue": 1}
    assert entries(text) == {"batch": ["Batch"], "key": []}
