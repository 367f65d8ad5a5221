"""Sums up for the log what was refused, was late, broke off or went on elsewhere; and the outcomes
of a request, each with its errors and its text for clients.

An overloaded service refuses thousands of requests a second. The first refusal of a kind has a line
at once, and those that follow are summed up every ten seconds. The caller asks for the lines that
are due and writes them; this file has no clock and no log.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

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

EVERY_S = 10.0
"""The least time between two lines about one reason."""

_MOST_REASONS = 32  # at a time; texts of policies and codes of users' errors are not ours to bound
_LONGEST_REASON = 200
_ENDING = frozenset({"starting", "draining", "stopped"})  # codes: nothing is wrong with the service
_TEXTS = {
    "invalid_request": "the request could not be read",
    "too_large": "the body is too large",
    "unsupported_media_type": "the model does not read the content type",
    "invalid_item": "the item does not fit the model",
    "bad_http": "the request is not valid HTTP",
    "too_many_connections": "as many connections are open as may be",
    "request_timeout": "the request did not arrive in time",
    "deadline_exceeded": "the deadline passed before the answer was ready",
    "starting": "the service is starting",
    "draining": "the service is shutting down",
    "stopped": "the service has stopped",
    "worker_lost": "the worker that had the request died",
    "stage_failed": "a stage has failed",
    "model_error": "the model raised an error",
    "bad_result": "the model returned what it must not",
    "request_crashed_worker": "a second worker was lost with the request",
    "out_of_memory": "there was no memory to receive the result",
}
_SUSPICIOUS = "a worker was lost with the request, which may be why, and the deadline passed before it had run again"


class Reason(NamedTuple):
    """Why requests are refused or late.

    Attributes:
        status: Of the answer in HTTP; 0 where there is none of this kind.
        verb: What was done to the requests.
        is_alarming: Whether the service has trouble; else its callers have, or it starts or ends.
    """

    status: int
    code: str
    text: str
    verb: str
    is_alarming: bool


_FOREIGN = Reason(500, "model_error", _TEXTS["model_error"], "failed", True)
_WENT_ON = Reason(0, "resumed", "they go on from the parts that they have had", "resumed", False)
_OTHER = Reason(500, "other", "other reasons", "refused", True)


class Summary(NamedTuple):
    """One line; `period_s` is since the last one about the reason, None if this is the first."""

    reason: Reason
    requests: int
    period_s: float | None

    def __str__(self) -> str:
        reason = self.reason
        period = "" if self.period_s is None else f" in the last {max(self.period_s, 1):.0f} s"
        status = f" ({reason.status})" if reason.status else ""
        return f"{reason.verb} {self.requests}{status}{period}: {reason.text}"


class Refusals:
    """Counts refusals by reason, each open until `EVERY_S` seconds have passed without any.

    Attributes:
        is_due: Whether a reason has been opened that has had no line yet.
    """

    def __init__(self) -> None:
        self.is_due = False
        self._counts: dict[Reason, int] = {}  # since the last line about each
        self._told: dict[Reason, float] = {}  # when that was

    def count(self, error: Exception) -> None:
        """Count a request that ended with `error`; errors of models are logged elsewhere."""
        if isinstance(error, ModelError) or not isinstance(error, CarpoolError):
            return
        self._note(_reason_of(error))

    def broke_off(self, error: Exception) -> None:
        """Count a stream that ended with `error` after its first part, whoever raised it."""
        reason = _reason_of(error) if isinstance(error, CarpoolError) else _FOREIGN
        text = f"after the first part, {reason.text}"
        self._note(reason._replace(text=text, verb="broke off", is_alarming=reason.code not in _ENDING))

    def went_on(self, streams: int) -> None:
        if streams:
            self._note(_WENT_ON, streams)

    def _note(self, reason: Reason, times: int = 1) -> None:
        if reason not in self._counts:
            if len(self._counts) >= _MOST_REASONS:
                reason = _OTHER
            if reason not in self._told:
                self.is_due = True
        self._counts[reason] = self._counts.get(reason, 0) + times

    def take(self, now: float, *, everything: bool = False) -> Sequence[Summary]:
        """Return the lines that are due at `now`, or all at the end; each refusal is in one of
        them.
        """
        self.is_due = False
        lines = []
        for reason, count in list(self._counts.items()):
            told = self._told.get(reason)
            if told is not None and now < told + EVERY_S and not (everything and count):
                continue
            if count:
                lines.append(Summary(reason, count, None if told is None else now - told))
                self._counts[reason] = 0
                self._told[reason] = now
            else:
                del self._counts[reason], self._told[reason]
        return lines

    @property
    def wake_at(self) -> float:
        """When to ask for lines again, even if nothing happens until then."""
        return min(self._told.values(), default=inf) + EVERY_S


def _reason_of(error: CarpoolError) -> Reason:
    """Return why a request ended with `error`, whose class may be a user's."""
    try:
        status, code = int(error.status), str(error.code)
        if type(error) is Overloaded:
            text = str(error)
        elif type(error) is DeadlineExceeded and error.worker_lost:
            text = _SUSPICIOUS
        else:
            text = _TEXTS.get(code, code)
        is_trouble = isinstance(error, Overloaded | DeadlineExceeded | Unavailable) or code == "too_many_connections"
        is_alarming = is_trouble and code not in _ENDING
        if isinstance(error, DeadlineExceeded):
            verb = "gave up"
        else:
            verb = "failed" if isinstance(error, Unavailable) and is_alarming else "refused"
        return Reason(status, code[:_LONGEST_REASON], text[:_LONGEST_REASON], verb, is_alarming)
    except BaseException:  # attributes that make no sense
        return _OTHER


OUTCOMES = ("ok", "invalid_request", "invalid_item", "overloaded", "expired", "unavailable", "model_error")
"""What can become of a request, besides `cancelled`: a closed set, fit to be a metric label."""

MODEL_MESSAGES: Final = {
    "model_error": "The model raised an error.",
    "bad_result": "The model returned a result that does not fit its declaration.",
}
"""The texts for clients of a model's error, by its code, in the place of its own text."""

_LONGEST_MESSAGE = 300  # a message may name a field, and clients choose how long the names are
_LONGEST_LIST = 1000  # that of a 415, which lists what is read, and of a 406
_LISTING = ("unsupported_media_type", "not_acceptable")
_OBJECT_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")  # in the `repr` of an object, and of no use to clients

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
    for kind in type(error).__mro__:
        if kind in _OUTCOME_OF:
            return _OUTCOME_OF[kind]
    if not isinstance(error, CarpoolError):
        return "model_error"
    if isinstance(error, HTTPError):
        return "invalid_item" if error.status < 500 else "model_error"
    return "invalid_request" if error.status < 500 else "unavailable"


def text_for_clients(error: Exception, *, debug: bool = False) -> str | None:
    """Return the text of an error if clients may read it (with `debug`, any text); else None."""
    if not (debug or isinstance(error, InvalidRequest | ValidationError | DeadlineExceeded | HTTPError)):
        return None
    text = text_of(error)
    if isinstance(error, ModelError):
        text = text.removeprefix(f"{error.type_name}: ")
    most = _LONGEST_LIST if getattr(error, "code", "") in _LISTING else _LONGEST_MESSAGE
    return _OBJECT_ADDRESS.sub("", text[:most])
