"""The errors that carpool raises, each described in one place.

Every class answers three questions: whose fault it is (the class), what HTTP says (`status` and
`code`), and when trying again makes sense (`retry_after_s`). In Python all of them derive from
`CarpoolError`. Over HTTP only `status`, `code`, a text of our own and the faults of an item leave
the machine. What user code raises comes from a worker as text (type name, message and traceback);
the exception itself is the `__cause__` of a `ModelError`.

The `__cause__` of a `ModelError` is unpickled when it is asked for, since unpickling runs code of
the exception's class: the loop must not wait for that, and HTTP has no use for it. Threads ask at
once, since an interpreter that prints an uncaught exception does not. Nothing is imported for it:
code that catches a class has imported it. Stages in this process pass the exception beside the
reply (`Frame.causes`), its traceback cut to the user's frames. A request hands out its error once,
and calls drop it as they raise, so that no reference cycle keeps the objects of these frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from carpool.engine.details import Detail

__all__ = [
    "CarpoolError",
    "DeadlineExceeded",
    "InvalidRequest",
    "ModelError",
    "Overloaded",
    "StartupError",
    "Unavailable",
    "ValidationError",
]

_CAUSE: Any = BaseException.__cause__  # the descriptor of the slot that every exception has for it
_IN_THE_WORKER = "In the worker:\n"


class CarpoolError(Exception):
    """Base class of all errors that carpool raises for a request.

    Attributes:
        status: The HTTP status of the error.
        code: The error code in the HTTP response, for programs.
        retry_after_s: After how many seconds trying again makes sense; None if it is not known.
        request_id: The id under which the server's log has more; only of errors that a
            `carpool.Client` raises.
    """

    status = 500
    code = "internal_error"
    retry_after_s: float | None = None
    request_id: str = ""


class InvalidRequest(CarpoolError):
    """The request could not be read: bad syntax (400), unknown content type (415), too large (413);
    or nothing has the name that it gives (404), or writes what it accepts (406).

    Attributes:
        status: The HTTP status of the case at hand.
        code: The error code of the case at hand.
    """

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def too_large(message: str) -> InvalidRequest:
    """Return the refusal of a body that is too large, or would become so (413)."""
    return InvalidRequest(message, status=413, code="too_large")


class ValidationError(CarpoolError, ValueError):
    """The item was read but does not fit the model's types (422).

    A model may raise it too, for an item that it does not accept. It is also a `ValueError`.

    Attributes:
        details: All known faults of the item, each with `loc`, `msg` and `type`.
    """

    status = 422
    code = "invalid_item"
    details: tuple[Detail, ...] = ()

    def __init__(self, *args: object, details: Iterable[Detail] = ()) -> None:
        super().__init__(*args)
        self.details = tuple(details)


OVERLOAD_REASONS: Final = ("queue_full", "slo", "deadline", "priority", "uploads", "policy", "other")
"""What `Overloaded.reason` may be, a closed set: clients read it, and metrics have it as a label.

* `queue_full`: the first queue holds as many requests, or bytes, as it may.
* `slo`: the answer would come later than `slo_s` allows.
* `deadline`: the answer would come after the time-out, when nobody waits for it any more.
* `priority`: the queue is full, and a request of a higher priority took the place.
* `uploads`: bodies that are being received hold as much memory as they may.
* `policy`: a policy of one's own gave another reason.
* `other`: somebody else's code raised the error.
"""


class Overloaded(CarpoolError):
    """More comes than can be served, so this request was refused (429).

    Attributes:
        retry_after_s: After how many seconds trying again makes sense; None if it is not known.
        reason: Why this request was refused: "queue_full", "slo", "deadline", "priority",
            "uploads", "policy" or "other".
    """

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float | None = None, reason: str = "other") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason if reason in OVERLOAD_REASONS else "other"


class DeadlineExceeded(CarpoolError, TimeoutError):
    """The deadline passed before the answer was ready (504). It is also a `TimeoutError`.

    Attributes:
        worker_lost: Whether a worker was lost with this request, which may be why: look at it
            before you send it again.
    """

    status = 504
    code = "deadline_exceeded"
    worker_lost = False


class Unavailable(CarpoolError):
    """The service cannot take or finish the request now (503).

    It is starting or closing, the worker was lost, or a stage has failed.

    Attributes:
        code: The error code of the case at hand.
        retry_after_s: After how many seconds trying again makes sense; None if it never does.
    """

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, code: str = "unavailable", retry_after_s: float | None = 1.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class ModelError(CarpoolError):
    """User code raised, returned what does not fit, or crashed its worker twice (500).

    The text begins with the name of the exception's class. `__cause__` is the exception that user
    code raised: the exception itself where it crossed no process border, otherwise a copy. It is
    None if there was no exception, or none that could be copied. What prints the error shows the
    user's lines once: in the traceback of the cause, or in a note with the worker's traceback,
    which the copy has if the error was raised in a thread of the caller's own, and otherwise the
    error.

    Attributes:
        code: The error code of the case at hand.
        type_name: The name of the exception's class, or "" if there was no exception.
        traceback: The traceback as text, from the worker if there was one; "" if there is none.
    """

    status = 500
    code = "model_error"
    _find_cause: Callable[[], BaseException | None] | None = None

    def __init__(self, message: str, *, code: str = "model_error", type_name: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.type_name = type_name
        self.traceback = traceback

    def _note_traceback(self) -> None:
        if self.traceback:
            self.add_note(_IN_THE_WORKER + self.traceback.rstrip())

    def _open_cause(self) -> None:
        """Make the copy of the cause, and give it the note with the worker's traceback."""
        cause, notes = self.__cause__, getattr(self, "__notes__", ())
        if cause is None or not (notes and notes[0].startswith(_IN_THE_WORKER)):
            return
        try:
            BaseException.add_note(cause, notes[0])
        except BaseException:  # its class may define `__notes__` in its own way
            return
        del notes[0]

    def _get_cause(self) -> BaseException | None:
        cause: BaseException | None = _CAUSE.__get__(self)
        find = self._find_cause
        if cause is None and find is not None:
            cause = find()
            self._set_cause(cause)
        return cause

    def _set_cause(self, cause: BaseException | None) -> None:
        self._find_cause = None
        _CAUSE.__set__(self, cause)

    # Making the copy runs code of the exception's class. The loop must not wait for that and HTTP
    # has no use for it, so it is made when somebody asks.
    __cause__ = property(_get_cause, _set_cause)


class StartupError(CarpoolError):
    """A service could not start: an import, a `setup` or a warm-up failed.

    Its text ends with the traceback of the user's code.
    """

    status = 503
    code = "startup_failed"
