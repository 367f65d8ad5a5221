"""carpool's logger, guarded against the program's handlers and filters.

Lines are written in the midst of everything, such as between a worker's death and the start of the
next one. So an exception from a handler costs its line and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class GuardedLogger(_Adapter):
    """A logger that never raises.

    Attributes:
        keep: Is called before each line, where a command has set up the log: it puts back what the
            program has taken away.
    """

    keep: ClassVar[Callable[[], None] | None] = None

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log one line, or lose it if a handler or filter raises."""
        if GuardedLogger.keep is not None:
            GuardedLogger.keep()
        if self.isEnabledFor(level):
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # handlers that show the caller must not show us
            with suppress(BaseException):
                self.logger.log(level, msg, *args, **kwargs)


logger = GuardedLogger(logging.getLogger("carpool"), {})
