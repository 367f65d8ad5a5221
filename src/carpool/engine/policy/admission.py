"""Admission: whether new requests may join the queue, and if not, when to try again.

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

from carpool.engine.policy.base import FULL, TOO_LATE
from carpool.engine.request import Request
from carpool.errors import CarpoolError, InvalidRequest, Overloaded

LEAST_RETRY_S = 0.1  # even if nothing was learned or the queue is all but empty: callers must not spin
UNSERVED_RETRY_S = 1.0  # while a stage has no worker: starting one and loading its model takes at least about as long
MOST_RETRY_S = 60.0  # a prediction beyond this means nothing any more
DISPLACED = "the queue is full, and others have a higher priority"
_PAST_DEADLINE = "the request would not be answered by its deadline"
_PAST_SLO = "the request would not be answered within its SLO"


class Admission:
    """The bounds of the first queue, and the judgement of new requests.

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
        lot: Sequence[Request],
        *,
        queued: int,
        queued_bytes: int,
        busy: int,
        wait_s: float,
        fastest_s: float,
    ) -> CarpoolError | None:
        """Return why a lot must not join the queue; None if it may.

        Patient requests (their caller waits for room, and until the deadline) are refused only if
        they could never fit.

        Args:
            now: The time.
            lot: The newcomers, which are equally patient and have one deadline; or the only one.
            queued: Requests that wait already.
            queued_bytes: How many bytes they hold.
            busy: Batches (or requests) that run now.
            wait_s: Predicted seconds until a worker would start the last of the lot.
            fastest_s: Seconds of the fastest possible answer from then on: a batch of its own,
                there and back.
        """
        first, n = lot[0], len(lot)
        is_patient = first.patient
        nbytes = first.nbytes if n == 1 else sum([request.nbytes for request in lot])
        if nbytes > self.max_bytes and (not is_patient or max([request.nbytes for request in lot]) > self.max_bytes):
            what = f"a request of {nbytes} bytes is" if n == 1 else f"{n} items with {nbytes} bytes are"
            text = f"{what} over the queue's {self.max_bytes:.0f}" + (" bytes" if n > 1 else "")
            return InvalidRequest(text, status=413, code="too_large")
        if is_patient:
            return None
        if queued + n > self.max_size or queued_bytes + nbytes > self.max_bytes:
            return Overloaded(FULL, retry_after_s=retry_after_s(wait_s, fastest_s), reason="queue_full")
        if (queued or busy) and now + wait_s + fastest_s > first.deadline:
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
