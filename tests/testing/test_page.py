"""docs/testing.md and docs/faults.md are complete, and the tests that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from carpool import testing

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()
FAULTS = (ROOT / "docs" / "faults.md").read_text()


@pytest.mark.parametrize("page", [PAGE, FAULTS], ids=["testing", "faults"])
def test_every_test_file_that_is_named_exists(page: str) -> None:
    """Every test file that a page names exists."""
    named = set(re.findall(r"`(tests/[\w/]+\.py)", page)) | set(re.findall(r"\]\(\.\./([\w/]+\.py)\)", page))

    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_fault_is_listed_once_and_in_order() -> None:
    """Commits and comments refer to faults by number, so none may be lost or mean two things."""
    rows = re.findall(r"^\| (F[^|]*) \|", FAULTS, re.MULTILINE)
    numbers = [int(number) for row in rows for number in re.findall(r"F(\d+)", row)]

    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 85


@pytest.mark.parametrize("word", [*testing.POINTS, *testing.ACTIONS])
def test_every_point_and_action_is_described(word: str) -> None:
    """The section for users describes every fault point and action."""
    section = PAGE.partition("## For your own parts")[2]

    assert f"`{word}`" in section


@pytest.mark.parametrize("name", [name for name in testing.__all__ if name.startswith(("check_", "stub_"))])
def test_every_entry_point_is_shown(name: str) -> None:
    """The page shows every entry point of `carpool.testing`."""
    assert name in PAGE
