"""The ends of requests: each is answered once, and handed out to whoever tells its caller.

Whoever calls a method here owns the answer: the request is not done yet, and becomes so.
"""

from __future__ import annotations

from collections.abc import Sequence

from carpool.core.journal import Journal, parts_so_far
from carpool.core.trail import format_expiry
from carpool.errors import CarpoolError, DeadlineExceeded
from carpool.request import DONE, Request


class Endings:
    """Ends requests, and counts how.

    Args:
        names: Of the stages, first to last.
        journal: Records what happens to each request, if given.

    Attributes:
        answered: How many admitted requests have been answered.
        failed: How many of these answers were errors.
        refused: How many requests were not admitted.
        answers: The requests whose callers are still to be told.
    """

    def __init__(self, names: Sequence[str], journal: Journal | None) -> None:
        self.answered = 0
        self.failed = 0
        self.refused = 0
        self.answers: list[Request] = []
        self._names = names
        self._journal = journal

    def answer(self, now: float, request: Request) -> None:
        """End a request that has its result or its error."""
        request.state = DONE
        self.answered += 1
        self.answers.append(request)
        if self._journal is not None:
            outcome = "answered" if request.error is None else f"failed: {request.error}"
            self._journal.record(now, outcome, request.id, detail=parts_so_far(now, request))

    def fail(self, now: float, request: Request, error: Exception) -> None:
        """End a request with an error."""
        request.error = error
        self.failed += 1
        self.answer(now, request)

    def expire(self, now: float, request: Request, started: float | None = None, hint: str = "") -> None:
        """End a request whose deadline has passed.

        Args:
            now: The time.
            request: Knows where it is, or was last.
            started: When it was handed to its present worker; None if it is not running.
            hint: What else to tell its caller.
        """
        text = format_expiry(now, request, started, self._names)
        error = DeadlineExceeded(text + hint)
        error.worker_lost = request.losses > 0
        self.fail(now, request, error)

    def refuse(self, request: Request, error: CarpoolError) -> None:
        """End a new request that is not admitted."""
        self.refused += 1
        request.state = DONE
        request.error = error
        self.answers.append(request)

    def collect(self) -> list[Request]:
        """Return the requests whose callers are to be told, once."""
        answers, self.answers = self.answers, []
        return answers
