"""Entries of docstrings begin with a capital letter."""

from __future__ import annotations

from bench.tools.entries import corrected, files
from tests.support.sources import ROOT

BEFORE = '''
def read(path: str) -> str:
    """Return what is there.

    ARGS:
        path: where it is: of a
            file: any.
        *more: `read` means nothing here.
        kind: msgpack or JSON.

    RAISES:
        OSError: there is nothing.
    """
    names: dict[str, str] = {}
    note: str = ""
'''.replace("ARGS", "Args").replace("RAISES", "Raises")
AFTER = BEFORE.replace("path: where", "path: Where").replace("OSError: there", "OSError: There")


def test_entries_begin_with_a_capital_letter() -> None:
    """What `Args`, `Attributes` and `Raises` say of each name is written as sentences are, in the whole tree."""
    wrong = [str(path.relative_to(ROOT)) for path in files() if corrected(text := path.read_text()) != text]
    assert wrong == [], "run python -m bench.tools.entries"


def test_only_entries_are_corrected() -> None:
    """Lines that an entry goes on with, code, and words that have no capital letter stay as they are."""
    assert corrected(BEFORE) == AFTER
    assert corrected(AFTER) == AFTER
