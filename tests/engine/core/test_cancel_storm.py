"""Ten thousand callers leave at random moments, in virtual time (`python -m tests.engine.core.cancel_storm`)."""

from __future__ import annotations

import pytest

from carpool.engine.core.core import Core
from tests.engine.core.cancel_storm import main, storm


@pytest.mark.fault("F34")
def test_a_storm_leaves_nothing_behind() -> None:
    """When callers leave at every point of a request's way, none who stays is forgotten, none who
    has gone is answered, and nothing is left behind.
    """
    over = storm(10_000, seed=1)

    assert over.gone >= 10_000
    assert len(over.left) == 6
    assert min(over.left.values()) > 50
    assert over.served > 1_000


def test_the_storm_finds_who_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storm can fail: it finds a pipeline that does not hear that a caller has gone, and so
    runs a request for nobody.
    """
    monkeypatch.setattr(Core, "cancel", lambda self, now, request: setattr(request, "caller", None))

    with pytest.raises(AssertionError):
        storm(1_000, seed=1)


def test_the_command_tells_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints how many callers left where, and that the storm is over."""
    main(["--cancels", "100", "--seed", "3"])

    said = capsys.readouterr().out
    assert said.startswith("seed 3: 1")
    assert "nobody waits, nothing runs" in said
