"""How a command ends that cannot be carried out: one line of text, and an exit status."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

FAILED: Final = 1
USAGE_ERROR: Final = 2


def fail(text: str, status: int = USAGE_ERROR) -> NoReturn:
    """Exit with an error in one line, for a command that cannot be carried out."""
    print(f"carpool: {text}", file=sys.stderr)
    raise SystemExit(status) from None
