"""A machine that finds nothing may be blind: each promise that is broken on purpose must be found."""

from __future__ import annotations

import pytest

from tests.fuzz.hunt import Found, hunt
from tests.fuzz.mutants import MUTANTS

_SHOWS = {
    "swap": ("wrong answer", "asked with token"),
    "forget": ("hang", ""),
    "skip": ("", "Stream"),
    "skip-part": ("wrong answer", "Parts"),
    "hang": ("hang", ""),
    "leak-thread": ("left behind", "thread Thread-"),
    "leak-descriptor": ("left behind", "descriptor of /dev/null"),
    "leak-child": ("left behind", "child sleep"),
    "leak-task": ("left behind", "task sleep"),
    "bare-error": ("wrong error", "AttributeError"),
    "complain": ("complaint", "was never awaited"),
    "wait-for-ever": ("hang", "client"),
    "swallow-end": ("wrong answer", "Stream"),
    "leak-client": ("left behind", "thread carpool client"),
}
_QUICK = ("swap", "complain")
_SLOW = ("leak-descriptor",)


@pytest.mark.parametrize(
    "name",
    [
        name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow if name in _SLOW else pytest.mark.long)
        for name in MUTANTS
    ],
)
def test_a_broken_promise_is_found(name: str) -> None:
    """Within six thousand steps the machine finds the promise that this mutant breaks."""
    kind, words = _SHOWS[name]

    def is_it(found: Found) -> bool:
        return kind in found.finding.kind and words in found.finding.what

    tally = hunt(steps=6000, seed=1, grace_s=2.0, shrink_s=0, mutant=name, until=is_it)
    assert any(map(is_it, tally.found.values())), "\n".join(tally.found)
