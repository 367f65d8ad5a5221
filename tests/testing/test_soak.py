"""The soak itself, for a few seconds: clients, nemesis, journals and checks work together on a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos.soak import soak
from bench.chaos.targets import target


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    """In a short soak workers are killed in the middle of calls, and every request has its own
    answer.
    """
    shown: list[float] = []
    outcome = soak(target("carpool"), 6.0, 7, tmp_path, lambda gone, clients, faults: shown.append(gone), warm_up_s=1.0)

    findings = outcome.findings
    assert findings.wrongs.examples == []
    assert findings.requests > 500
    assert findings.killed_in_call >= 1
    assert findings.faults["kill"] >= findings.killed_in_call
    assert findings.ended["ok"]["200"] > 400
    assert outcome.healthy
    assert outcome.metrics == []
    assert outcome.exit_code == 0
    assert shown
