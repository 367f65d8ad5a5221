"""docs/testing.md is complete, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from carpool import testing

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()


def test_every_test_file_that_is_named_exists() -> None:
    """Every test file that the page names exists."""
    named = set(re.findall(r"`(tests/[\w/]+\.py)", PAGE)) | set(re.findall(r"\]\(\.\./([\w/]+\.py)\)", PAGE))

    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("word", [*testing.POINTS, *testing.ACTIONS])
def test_every_point_and_action_is_described(word: str) -> None:
    """The section for users describes every fault point and action."""
    section = PAGE.partition("## For your own parts")[2]

    assert f"`{word}`" in section


@pytest.mark.parametrize("name", [name for name in testing.__all__ if name.startswith(("check_", "stub_"))])
def test_every_entry_point_is_shown(name: str) -> None:
    """The page shows every entry point of `carpool.testing`."""
    assert name in PAGE
