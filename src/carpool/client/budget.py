"""When a client tries again: what may be retried, how long it waits, and how often in all. Sans-IO.

Retries of many clients make an overload worse. So they are a share of the requests: each request
earns a tenth of a retry. A few are lent in the beginning, for a server that is just starting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import random
from typing import Final

SHARE: Final = 0.1
"""Retries per request."""

_LENT: Final = 3.0
_MOST_SAVED: Final = 100.0
_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 5.0
RETRIED: Final = frozenset({429, 503})
"""The statuses after which the same request may be sent once more: it was not run."""

_NOT_RUN_CODES: Final = frozenset({"overloaded", "starting", "draining", "too_many_connections", "not_ready", ""})


class RetryBudget:
    """How many retries a client has left.

    Attributes:
        requests: How many requests were made.
        retries: How many of them were sent again.
    """

    def __init__(self) -> None:
        self.requests = self.retries = 0
        self._saved = _LENT
        self._owed = _LENT  # of what was lent, which is paid back first

    def note_request(self) -> None:
        """Earn a share of a retry by a new request."""
        self.requests += 1
        if self._owed > 0:
            self._owed -= SHARE
        else:
            self._saved = min(self._saved + SHARE, _MOST_SAVED)

    def take(self) -> bool:
        """Take a retry out of the budget; report whether there was one."""
        if self._saved < 1:
            return False
        self._saved -= 1
        self.retries += 1
        return True


def is_retried(status: int, code: str) -> bool:
    """Report whether a request that was answered like this was not run, and may be sent again."""
    return status in RETRIED and code in _NOT_RUN_CODES


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return how long a server wants a client to wait; None if it does not say."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def wait_s(attempt: int, asked_s: float | None, dice: Callable[[], float] = random) -> float:
    """Return how long to wait before a retry: what the server asks, or twice as long each time,
    spread so that clients do not come back together.

    Args:
        attempt: How often the request was sent, from 1.
        asked_s: What the server asks; None if it does not say.
        dice: A number from 0 to 1.
    """
    if asked_s is not None:
        return asked_s * (1 + 0.25 * dice())
    doubled_s: float = _FIRST_WAIT_S * 2.0 ** (attempt - 1)
    return min(doubled_s, _LONGEST_WAIT_S) * (0.5 + 0.5 * dice())
