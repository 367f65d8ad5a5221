"""What a model prints does no harm to its requests, whatever the encoding of standard output."""

from __future__ import annotations

import sys

import pytest

import carpool
from tests.support.waiting import PATIENCE_S


def prints(text: str) -> str:
    print(text)
    print(text, file=sys.stderr)
    return "printed"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_print_of_any_text_fails_no_request(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker prints half of a character, and a letter that standard output does not have, as escapes."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    with carpool.Service(carpool.Stage(prints), timeout_s=PATIENCE_S).run() as service:
        assert [service.predict(text) for text in ("\ud83d", "é")] == ["printed"] * 2
