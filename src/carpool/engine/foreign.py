"""Safe descriptions of the exceptions that other people's code raises.

Nothing about such an exception can be relied on, not even its text. docs/foreign-code.md lists the
few places where such code is called; each catches `BaseException` and turns it into an answer with
the functions below.
"""

from __future__ import annotations

import threading
import traceback

from carpool.errors import ModelError

_LONGEST_TEXT = 2 * 1024
_MAIN_THREAD_ONLY = "signal only works in main thread"


def text_of(error: BaseException) -> str:
    """Return the exception's text, or the name of its type if it has none or reading it raises."""
    return _own_text(error) or named_text_of(error)


def named_text_of(error: BaseException) -> str:
    """Return the name of the exception's type and its text, like the last line of a traceback."""
    kind, text = type(error).__name__, _own_text(error)
    if text is None:
        return f"{kind} (its text could not be read)"
    text += hint_for(error)
    return f"{kind}: {text}" if text else kind


def hint_for(error: BaseException) -> str:
    """Return what to do about an error that comes from where the code runs; empty for others."""
    text = _own_text(error)
    if text is None or not text.startswith(_MAIN_THREAD_ONLY) or threading.current_thread() is threading.main_thread():
        return ""
    return '; a worker with run_in="process" has a main thread of its own'


def _own_text(error: BaseException) -> str | None:
    try:
        return str.__getitem__(str(error), slice(_LONGEST_TEXT))  # a subclass of str may have methods that raise
    except BaseException:
        return None


def traceback_of(error: BaseException) -> str:
    """Return the traceback as text, or the name of the exception's type if reading it raises."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:
        return f"{type(error).__name__} (its traceback could not be read)\n"


def as_model_error(error: BaseException, what: str) -> ModelError:
    """Make the error that callers get when user code has raised; `what` is that code, as the
    subject of a sentence.
    """
    kind = type(error).__name__
    failure = ModelError(f"{what} raised {named_text_of(error)}", type_name=kind, traceback=traceback_of(error))
    failure.__cause__ = error
    return failure
