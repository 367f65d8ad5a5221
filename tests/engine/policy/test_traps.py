"""The traps that the default policy was seen in: it leaves each of them within five seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.policies.traps import TRAPS, Trap
from carpool.engine.policy import Adaptive
from tests.effort import slow_where

QUICK = ("slow start", "fast for a while")


@slow_where(lambda trap: trap.name not in QUICK)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_it_is_left(trap: Trap) -> None:
    """From five seconds after the end of what has led into it on, the goodput is as without it."""
    assert replace(trap, dice=1).figure(lambda scenario: Adaptive(scenario.limit)) >= trap.least
