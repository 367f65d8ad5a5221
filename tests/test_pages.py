"""The pages that are made from tables and markers in the tests."""

from __future__ import annotations

import re

import pytest

from tests.faults import FAULTS, marked, numbers
from tests.pages import COMMAND, DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_the_one_that_its_tables_make(name: str) -> None:
    """The page in the repository is the one that its command writes now."""
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), f"docs/{name} is stale: run {COMMAND}"


def test_every_fault_is_listed_once_and_in_order() -> None:
    """Commits and comments refer to faults by number, so none may be lost or mean two things."""
    listed = [int(number[1:]) for section in FAULTS.values() for each in section for number in numbers(each)]

    assert listed == list(range(1, len(listed) + 1)) and len(listed) >= 85


def test_every_fault_has_a_test_or_something_else_that_looks_for_it() -> None:
    """No marker names a fault that is not listed, and a fault without a marker says what else looks for it."""
    by_number = marked()
    rows = [each for section in FAULTS.values() for each in section]

    assert set(by_number) <= {number for each in rows for number in numbers(each)}
    assert [each.numbers for each in rows if not each.also and not set(numbers(each)) & set(by_number)] == []
    assert sum(len(files) for files in by_number.values()) >= 120


def test_markers_name_faults_by_number() -> None:
    """Each marker is written as the register reads it: numbers as texts."""
    text = "".join(path.read_text(encoding="utf-8") for path in DOCS.parent.glob("tests/**/test_*.py"))
    markers = re.findall(r"^ *@pytest\.mark\.fault\((.*)\)$", text, re.MULTILINE)

    assert len(markers) > 100
    assert [each for each in markers if not re.fullmatch(r'"F\d+"(, "F\d+")*', each)] == []


def test_the_map_of_the_code_stays_short() -> None:
    """ARCHITECTURE.md is read in one go: it has at most 15 KB."""
    assert len((DOCS.parent / "ARCHITECTURE.md").read_bytes()) <= 15_000
