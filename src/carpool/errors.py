"""What can go wrong, said once.

Every class answers three questions: whose fault it is (the class), what HTTP says (`status` and `code`), and when
trying again makes sense (`retry_after_s`). In Python all of them derive from `CarpoolError`; over HTTP only
`status`, `code` and a text of our own leave the machine. User exceptions never travel as objects: a worker sends
their type name, message and traceback as text.
"""

from __future__ import annotations

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
    """The item was read but does not fit the model's types (422). Models may raise it for an item of their own."""

    status = 422
    code = "invalid_item"


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


class ModelError(CarpoolError):
    """The user's code raised, returned something that does not fit, or died with this request twice (500).

    Attributes:
        type_name: name of the exception class in the worker, "" if it was no exception.
        traceback: the worker's traceback as text, "" if there is none.
    """

    status = 500
    code = "model_error"

    def __init__(self, message: str, *, code: str = "model_error", type_name: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.type_name = type_name
        self.traceback = traceback


class StartupError(CarpoolError):
    """A service could not start: an import, a `setup` or a warm-up failed. Its text ends with the user's traceback."""

    status = 503
    code = "startup_failed"
