"""What can go wrong, said once.

Every class answers three questions: whose fault it is (the class), what HTTP says (`status` and `code`), and when
trying again makes sense (`retry_after_s`). In Python all of them derive from `CarpoolError`; over HTTP only
`status`, `code`, a text of our own and what is wrong with an item leave the machine. User exceptions come from a worker
as text: type name, message and traceback; the exception itself is the `__cause__` of a `ModelError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from carpool.details import Detail

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


class CarpoolError(Exception):
    """Base of all errors that carpool raises for a request."""

    status = 500
    code = "internal_error"
    retry_after_s: float | None = None


class InvalidRequest(CarpoolError):
    """The request could not be read: bad syntax (400), unknown content type (415) or too large (413).

    `status` and `code` are those of the case at hand.
    """

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ValidationError(CarpoolError, ValueError):
    """The item was read but does not fit the model's types (422). Models may raise it for an item of their own.

    Attributes:
        details: every fault of the item, as far as they are known, each with `loc`, `msg` and `type`.
    """

    status = 422
    code = "invalid_item"
    details: tuple[Detail, ...] = ()

    def __init__(self, *args: object, details: Iterable[Detail] = ()) -> None:
        super().__init__(*args)
        self.details = tuple(details)


class Overloaded(CarpoolError):
    """The queue is full, or the request would not make its deadline (429). Try again after `retry_after_s`."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(CarpoolError, TimeoutError):
    """The request's deadline passed before its answer was there (504)."""

    status = 504
    code = "deadline_exceeded"


class Unavailable(CarpoolError):
    """The service cannot take or finish the request now (503): starting, draining, worker lost, stage failed."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, code: str = "unavailable", retry_after_s: float | None = 1.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


_CAUSE: Any = BaseException.__cause__  # the place that every exception has for it


class ModelError(CarpoolError):
    """The user's code raised, returned something that does not fit, or died with this request twice (500).

    `__cause__` is the exception that the user's code has raised: itself where no process was crossed, else a copy, with
    the worker's traceback as a note. It is None where there was no exception, or none that could be copied.

    Attributes:
        type_name: name of the exception class in the worker, "" if it was no exception.
        traceback: the worker's traceback as text, "" if there is none.
    """

    status = 500
    code = "model_error"
    _find_cause: Callable[[], BaseException | None] | None = None

    def __init__(self, message: str, *, code: str = "model_error", type_name: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.type_name = type_name
        self.traceback = traceback

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

    # a copy is made when somebody asks: that runs code of its class, which the loop and HTTP have no use for
    __cause__ = property(_get_cause, _set_cause)


class StartupError(CarpoolError):
    """A service could not start: an import, a `setup` or a warm-up failed. Its text ends with the user's traceback."""

    status = 503
    code = "startup_failed"
