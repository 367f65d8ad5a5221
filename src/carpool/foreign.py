"""What code that is not ours raises, told safely: nothing about such an exception can be relied on, not even its text.

Models, hooks, policies, sinks, inputs of streams, types and callbacks are called at few places, and each of these
catches `BaseException` and turns it into an answer with what is here. ARCHITECTURE.md lists the places.
"""

from __future__ import annotations

import traceback

from carpool.errors import ModelError

_LONGEST_TEXT = 2 * 1024


def text_of(error: BaseException) -> str:
    """The exception's own text; the name of its type where it has none, or where asking for it raises."""
    try:
        text = str.__getitem__(str(error), slice(_LONGEST_TEXT))  # it may be of a class of its own, with other methods
    except BaseException:
        return f"{type(error).__name__} (its text could not be read)"
    return text or type(error).__name__


def traceback_of(error: BaseException) -> str:
    """The traceback as text, or what can be said of it."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:
        return f"{type(error).__name__} (its traceback could not be read)\n"


def as_model_error(error: BaseException, what: str) -> ModelError:
    """What callers hear when `what`, which the user has written, raised."""
    kind = type(error).__name__
    failure = ModelError(f"{what} raised {kind}: {text_of(error)}", type_name=kind, traceback=traceback_of(error))
    failure.__cause__ = error
    return failure
