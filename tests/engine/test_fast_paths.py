"""Fast paths are all in one table, and with each of them switched off the answers are the same."""

from __future__ import annotations

import re

import pytest

from bench.fast_paths.paths import PATHS, Path, counting
from carpool.engine.fast_paths import without
from tests.support.sources import ROOT, SOURCE, text_of

ROUNDS = 20  # a worker is lent after some calls


def marked() -> set[str]:
    """The names of the fast paths in the sources."""
    texts = [text_of(path) for path in (SOURCE / "carpool").rglob("*.py")]
    return {name for text in texts for name in re.findall(r'@fast_path\("(\w+)"', text)}


def test_the_table_has_all() -> None:
    """Each fast path that is marked in the sources is a row of the table, and each row is one."""
    assert sorted(path.name for path in PATHS) == sorted(marked())


def test_each_shows_in_a_figure() -> None:
    """Each row names a heading of the page with the benchmarks."""
    headings = set(re.findall("^#+ (.*)$", (ROOT / "docs/benchmarks.md").read_text(), re.MULTILINE))

    assert {path.figure for path in PATHS} <= headings


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_without_it_the_answers_are_the_same(path: Path) -> None:
    """The work that a fast path is measured by goes by it, and has the same answers without it."""
    with counting(path.name) as taken:
        answers = path.workload(ROUNDS)
    assert taken
    assert answers
    with without(path.name):
        assert path.workload(ROUNDS) == answers
