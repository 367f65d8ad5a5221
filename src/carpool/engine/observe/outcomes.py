"""What can become of a request, which error is counted as which of these outcomes, and what clients
are told of it.
"""

from __future__ import annotations

import re
from typing import Final

from carpool.engine.foreign import text_of
from carpool.engine.http_response import HTTPError
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

OUTCOMES = ("ok", "invalid_request", "invalid_item", "overloaded", "expired", "unavailable", "model_error")
"""What can become of a request, besides `cancelled`: a closed set, fit to be a metric label."""

MODEL_MESSAGES: Final = {
    "model_error": "The model raised an error.",
    "bad_result": "The model returned a result that does not fit its declaration.",
}
"""What clients are told of a model's error, by its code, in the place of its own text."""

_LONGEST_MESSAGE = 300  # a message may name a field, and clients choose how long the names are
_LONGEST_LIST = 1000  # that of a 415, which lists what is read, and of a 406
_LISTING = ("unsupported_media_type", "not_acceptable")
_OBJECT_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")  # in the `repr` of an object, which tells clients nothing

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


def text_for_clients(error: Exception, *, debug: bool = False) -> str | None:
    """Return the text of an error if clients may read it; else None.

    Args:
        error: Of any kind.
        debug: Whether clients may read all texts.
    """
    if not (debug or isinstance(error, InvalidRequest | ValidationError | DeadlineExceeded | HTTPError)):
        return None
    text = text_of(error)
    if isinstance(error, ModelError):
        text = text.removeprefix(f"{error.type_name}: ")
    most = _LONGEST_LIST if getattr(error, "code", "") in _LISTING else _LONGEST_MESSAGE
    return _OBJECT_ADDRESS.sub("", text[:most])
