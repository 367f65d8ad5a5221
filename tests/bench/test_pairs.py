"""`python -m bench.pairs`: two trees in turns."""

from __future__ import annotations

import pytest

from bench import ROOT
from bench.pairs import Row, Turn, checked_out, measure


def test_a_ratio_is_the_median_over_pairs() -> None:
    """Above 1 the working tree is faster, whatever other work slowed both sides of a pair."""
    former = [Turn(2.0, 4.0), Turn(20.0, 4.0), Turn(3.0, 4.0)]
    row = Row("tasks", former, [Turn(1.0, 2.0), Turn(10.0, 4.0), Turn(3.0, 1.0)])
    assert row.ratio == 2.0
    assert row.cpu_ratio == 2.0


@pytest.mark.slow
def test_both_trees_are_measured() -> None:
    """A revision is checked out, measured by the programs of this tree, and gone afterwards."""
    with checked_out("HEAD") as tree:
        (row,) = measure({"former": tree, "this": ROOT}, 2, 0.2, "thread_alone")
        assert tree.exists()
    assert not tree.exists()
    assert len(row.former) == len(row.this) == 2
    assert row.ratio > 0
