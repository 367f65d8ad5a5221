"""Admission: whether a new request may join the queue, and if not, when to try again.

There are three reasons to refuse, in the order in which they are looked at: the request could never
fit, the queue is full, or the request would not make its deadline. The last saves its caller the
wait and the others the work; it is judged on arrival because later the request would only be in the
way (the same cut as the early drop of a policy, made sooner).

Estimates may be wrong, and a wrong one that refuses every request would never be corrected. So
while nothing waits and nothing runs, deadlines are not judged: such a request delays no other, and
its batch teaches the right time.
"""

from __future__ import annotations

from collections.abc import Sequence

from carpool.errors import CarpoolError, InvalidRequest, Overloaded
from carpool.policy.base import FULL, TOO_LATE
from carpool.request import Request

LEAST_RETRY_S = 0.1  # even if nothing was learned or the queue is all but empty: callers must not spin
MOST_RETRY_S = 60.0  # a prediction beyond this means nothing any more
DISPLACED = "the queue is full, and others have a higher priority"
_PAST_DEADLINE = "the request would not be answered by its deadline"
_PAST_SLO = "the request would not be answered within its SLO"


class Admission:
    """The bounds of the first queue, and the judgement of a new request.

    Args:
        max_size: How many requests may wait.
        max_bytes: How many bytes they may hold.
    """

    def __init__(self, max_size: float, max_bytes: float) -> None:
        self.max_size = max_size
        self.max_bytes = max_bytes

    def refusal(
        self,
        now: float,
        request: Request,
        *,
        queued: int,
        queued_bytes: int,
        busy: int,
        wait_s: float,
        fastest_s: float,
    ) -> CarpoolError | None:
        """Return why `request` must not join the queue; None if it may.

        A patient request (its caller waits for room, and until its deadline) is refused only if it
        could never fit.

        Args:
            now: The time.
            request: The newcomer; its bytes, deadline and patience count.
            queued: Requests that wait already.
            queued_bytes: How many bytes they hold.
            busy: Batches (or requests) that run now.
            wait_s: Predicted seconds until a worker would start it.
            fastest_s: Seconds of the fastest possible answer from then on: a batch of its own,
                there and back.
        """
        if request.nbytes > self.max_bytes:
            text = f"a request of {request.nbytes} bytes is over the queue's {self.max_bytes:.0f}"
            return InvalidRequest(text, status=413, code="too_large")
        if request.patient:
            return None
        if queued >= self.max_size or queued_bytes + request.nbytes > self.max_bytes:
            return Overloaded(FULL, retry_after_s=retry_after_s(wait_s, fastest_s), reason="queue_full")
        if (queued or busy) and now + wait_s + fastest_s > request.deadline:
            return Overloaded(_PAST_DEADLINE, retry_after_s=retry_after_s(wait_s, fastest_s), reason="deadline")
        return None

    def refusal_of_all(
        self,
        now: float,
        requests: Sequence[Request],
        *,
        queued: int,
        queued_bytes: int,
        busy: int,
        wait_s: float,
        fastest_s: float,
    ) -> CarpoolError | None:
        """Return why several requests must not join the queue together; None if they may.

        Args:
            now: The time.
            requests: The newcomers, which are equally patient.
            queued: See `refusal`, and so for the others.
            queued_bytes: How many bytes those that wait hold.
            busy: Batches (or requests) that run now.
            wait_s: Predicted seconds until a worker would start the last of them.
            fastest_s: Seconds of the fastest possible answer from then on.
        """
        nbytes = [request.nbytes for request in requests]
        if max(nbytes) > self.max_bytes or (sum(nbytes) > self.max_bytes and not requests[0].patient):
            text = f"{len(requests)} items with {sum(nbytes)} bytes are over the queue's {self.max_bytes:.0f} bytes"
            return InvalidRequest(text, status=413, code="too_large")
        if requests[0].patient:
            return None
        if queued + len(requests) > self.max_size or queued_bytes + sum(nbytes) > self.max_bytes:
            return Overloaded(FULL, retry_after_s=retry_after_s(wait_s, fastest_s), reason="queue_full")
        if (queued or busy) and now + wait_s + fastest_s > min(request.deadline for request in requests):
            return Overloaded(_PAST_DEADLINE, retry_after_s=retry_after_s(wait_s, fastest_s), reason="deadline")
        return None


def overloaded(request: Request, why: str) -> Overloaded:
    """Return the error of a request that is dropped from the queue.

    Args:
        request: The request; if it would be late, its times say whether for its SLO or its
            deadline.
        why: What the policy says, or `DISPLACED`.
    """
    if why == TOO_LATE:
        is_slo = request.due < request.deadline
        return Overloaded(_PAST_SLO, reason="slo") if is_slo else Overloaded(_PAST_DEADLINE, reason="deadline")
    return Overloaded(why, reason="queue_full" if why == FULL else "priority" if why == DISPLACED else "policy")


def retry_after_s(wait_s: float, fastest_s: float) -> float:
    """Return after how many seconds trying again makes sense.

    By then those that wait now are served, and a batch has run in between.
    """
    return min(max(wait_s, fastest_s, LEAST_RETRY_S), MOST_RETRY_S)
