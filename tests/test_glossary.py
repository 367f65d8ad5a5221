"""The glossary: one word for one thing, and one class for each word that names a class."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.glossary import GLOSSARY

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


CLASSES = {each.word: each.classes.split() for each in GLOSSARY}
SOURCE = ROOT / "src"


def test_each_word_is_explained_once() -> None:
    """It has about 50 words, and each of them once."""
    assert 20 <= len(CLASSES) == len(GLOSSARY) <= 50
    assert {"request", "batch", "stage", "batcher", "worker", "place", "lane", "deadline", "due", "SLO"} <= set(CLASSES)


@pytest.mark.parametrize(("word", "names"), CLASSES.items())
def test_a_word_names_classes_that_exist_once(word: str, names: list[str]) -> None:
    """No other class has the name, and the class has not gone."""
    assert {name: classes(SOURCE)[name] for name in names} == dict.fromkeys(names, 1), word


def test_no_class_is_named_by_two_words() -> None:
    """One thing has one word."""
    named = Counter(name for names in CLASSES.values() for name in names)
    assert [name for name, times in named.items() if times > 1] == []


def test_no_two_classes_share_a_name() -> None:
    """A reader who looks for a class finds one, in all of the package; private ones may repeat."""
    assert [name for name, times in classes(SOURCE).items() if times > 1 and not name.startswith("_")] == []


def test_classes_are_counted(tmp_path: Path) -> None:
    """The count of classes finds one that exists twice, also in a condition."""
    (tmp_path / "one.py").write_text("class Batch: ...\n")
    (tmp_path / "two.py").write_text("if True:\n    class Batch: ...\nclass Queue: ...\n")
    assert classes(tmp_path) == {"Batch": 2, "Queue": 1}
