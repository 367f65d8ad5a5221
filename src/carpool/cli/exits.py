"""How a command ends that cannot be carried out: one line, and an exit status."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

from carpool.engine.logger import logger
from carpool.engine.observe import log

FAILED: Final = 1
USAGE_ERROR: Final = 2


def fail(text: str, status: int = USAGE_ERROR, *, traceback: str = "") -> NoReturn:
    """Exit with an error in one line, for a command that cannot be carried out.

    Where the log is JSON, the line is, too, with the traceback in it.

    Args:
        text: What is wrong, and what to change.
        status: The exit status.
        traceback: That of the user's code, if it has raised; it is shown before the text.
    """
    if log.is_json():
        told = f"{text}\n{traceback}".rstrip()
        logger.critical("%s", told, extra={"code": "startup_failed"})
    log.flush()  # lines that are still on their way come first
    if not log.is_json():
        print(f"{traceback}carpool: {text}", file=sys.stderr)
    raise SystemExit(status) from None
