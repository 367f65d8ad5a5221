"""Ten thousand callers leave at random moments, in virtual time (a million: `python -m tests.core.cancel_storm`)."""

from __future__ import annotations

import pytest

from carpool.core.pipeline import Pipeline
from tests.core.cancel_storm import main, storm


def test_a_storm_leaves_nothing_behind() -> None:
    """They leave from everywhere, and neither is anybody forgotten nor answered who has gone."""
    over = storm(10_000, seed=1)

    assert over.gone >= 10_000
    assert len(over.left) == 6
    assert min(over.left.values()) > 50
    assert over.served > 1_000


def test_the_storm_finds_who_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline that does not hear that a caller has gone runs a request for nobody: the storm is no idle wind."""
    monkeypatch.setattr(Pipeline, "cancel", lambda self, now, request: setattr(request, "caller", None))

    with pytest.raises(AssertionError):
        storm(1_000, seed=1)


def test_the_command_tells_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    """How many left where, and that it is over."""
    main(["--cancels", "100", "--seed", "3"])

    said = capsys.readouterr().out
    assert said.startswith("seed 3: 1")
    assert "nobody waits, nothing runs" in said
