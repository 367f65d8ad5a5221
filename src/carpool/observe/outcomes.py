"""What can become of a request, and which error is counted as which of these outcomes."""

from __future__ import annotations

from carpool.errors import (
    OVERLOAD_REASONS,
    CarpoolError,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    Overloaded,
    Unavailable,
    ValidationError,
)
from carpool.http_response import HTTPError

OUTCOMES = ("ok", "invalid_request", "invalid_item", "overloaded", "expired", "unavailable", "model_error")
"""What can become of a request, besides `cancelled`: a closed set, fit to be a metric label."""

_OUTCOME_OF: dict[type[Exception], str] = {
    InvalidRequest: "invalid_request",
    ValidationError: "invalid_item",
    Overloaded: "overloaded",
    DeadlineExceeded: "expired",
    Unavailable: "unavailable",
    ModelError: "model_error",
}


def reason_of(error: Exception) -> str:
    """Return for which of `OVERLOAD_REASONS` an error says that its request was refused.

    Its class may be a user's, and its attribute anything.
    """
    try:
        reason = getattr(error, "reason", "other")
    except BaseException:
        return "other"
    return reason if type(reason) is str and reason in OVERLOAD_REASONS else "other"


def outcome_of(error: Exception) -> str:
    """Return the outcome as which an error is counted."""
    for kind in type(error).__mro__:
        if kind in _OUTCOME_OF:
            return _OUTCOME_OF[kind]
    if not isinstance(error, CarpoolError):
        return "model_error"
    if isinstance(error, HTTPError):
        return "invalid_item" if error.status < 500 else "model_error"
    return "invalid_request" if error.status < 500 else "unavailable"
