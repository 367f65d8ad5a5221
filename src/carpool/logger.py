"""carpool's log, guarded: its handlers and filters are the program's, and one that raises loses its line and no more.

Lines are written in the midst of everything: on the loop that all callers wait for, between a worker's death and the
start of the next. Whatever came out of a handler there would break off more than the line is worth.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class GuardedLogger(_Adapter):
    """A logger that never raises."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """One line, if it can be had."""
        if self.isEnabledFor(level):
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # who called us, for those who show places
            with suppress(BaseException):
                self.logger.log(level, msg, *args, **kwargs)


logger = GuardedLogger(logging.getLogger("carpool"), {})
