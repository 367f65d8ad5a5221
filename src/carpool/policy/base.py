"""What a batching policy is: told what happens, asked what to do. Four calls, no clock, no IO.

A policy decides *when* to go and *with how many*; the order is the queue's, the deadlines are the batcher's. It may
be asked at any time and any number of times: `decide` must not change what the next `decide` would say. One more call,
`decide_ahead`, is for policies that know when a batch cannot get any better by waiting for its worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from carpool.request import Request


class QueueView(Protocol):
    """What a policy may see of a queue. Reading changes nothing."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def peek(self, n: int) -> list[Request]:
        """The next `n` requests, in the order in which they would be taken."""

    @property
    def lanes(self) -> int:
        """How many priorities, keys and buckets wait side by side; with one, requests wait in the order of their dues,
        and any of them may share a batch."""

    @property
    def size(self) -> int:
        """Sum of the sizes of the waiting requests."""

    @property
    def earliest_due(self) -> float:
        """When the next request should be answered, by its SLO or its deadline; infinity when nobody waits."""

    @property
    def oldest_arrival(self) -> float:
        """When the request that has waited longest arrived; infinity when nobody waits."""

    @property
    def earliest_deadline(self) -> float:
        """When the next request expires; infinity when nobody waits."""


TOO_LATE = "the request would not make its deadline"
FULL = "the queue is full"


class Decision(NamedTuple):
    """What to do now.

    Attributes:
        drop: queued requests to refuse, because they cannot make it, or for another `drop_reason`.
        take: how much, from the head of the queue, to run as one batch now, in units of the requests' sizes (which are
            1 unless users say otherwise); 0 for nothing. A request that is larger than this by itself goes alone.
        reason: why the batch goes now, one of a small fixed set of words (a metric label).
        wake_at: when to ask again although nothing happened; None if only an event can change the answer.
        drop_reason: what the callers of those that are refused are told.

    While a service closes, and nobody can come any more, nothing is held back: if a worker is free, what waits goes
    although `take` is 0.
    """

    drop: Sequence[Request] = ()
    take: int = 0
    reason: str = ""
    wake_at: float | None = None
    drop_reason: str = TOO_LATE


NOTHING = Decision()


class Policy(ABC):
    """Base of all policies. `decide` is the policy; the other calls tell it what it may learn from, or ask why.

    Args:
        max_batch_size: most that one batch may hold; None means the stage's.
        max_queue_delay_s: longest time to hold a request back only to fill a batch; None means the stage's.

    Attributes:
        hop_s: smoothed seconds that a batch spends on its way to the worker and back, on top of `busy_s`; the batcher
            keeps it.
        ahead_s: seconds that a request will still need once it has left this stage: waits and batches of the stages
            behind it; the pipeline keeps it. A policy that plans for due times leaves `hop_s + ahead_s` of them.
        allowed_batch_sizes: if given, smaller batches are padded up to the next of these, so they cost as much; rising,
            the last one is the stage's limit.
        overload: what to look after while more comes than can be served: "goodput" (as many in time as possible) or
            "latency" (those that are served, soon). Filled in with the service's setting.
        slo_s: the service's SLO, if it has one and the policy was not given another.
    """

    def __init__(self, max_batch_size: int | None = None, max_queue_delay_s: float | None = None) -> None:
        self.max_batch_size = max_batch_size
        self.max_queue_delay_s = max_queue_delay_s
        self.hop_s = 0.0
        self.ahead_s = 0.0
        self.allowed_batch_sizes: Sequence[int] | None = None
        self.overload = "goodput"
        self.slo_s: float | None = None

    def arrived(self, now: float, request: Request) -> None:
        """A request has joined the queue."""

    def arrived_together(self, now: float, requests: Sequence[Request]) -> None:
        """Several requests have joined the queue at one moment: what drivers call. The same as `arrived` for each."""
        for request in requests:
            self.arrived(now, request)

    def left(self, now: float, request: Request) -> None:
        """A queued request was cancelled or has expired."""

    def completed(self, now: float, n: int, size: int, busy_s: float, ok: bool) -> None:
        """A batch of `n` requests with sizes summing to `size` has run for `busy_s` seconds."""

    def trained(self, n: int, size: int, busy_s: float) -> None:
        """Before the first request, a worker's warm-up ran `n` examples with sizes summing to `size` in `busy_s`.

        Only user code was timed, neither decoding nor encoding; each worker tells once per size.
        """

    @abstractmethod
    def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:
        """What to do with `queue`, with `free` idle workers that may take a batch and `busy` ones at work."""

    def decide_ahead(self, now: float, queue: QueueView, free_in_s: float) -> Decision:
        """What to hand to a worker that is still busy, since waiting for it could not make the batch any better.

        Only `take` and `reason` count. A policy that does not say anything here has all wait until a worker is free.

        Args:
            now: the time.
            queue: what waits; all of it has one priority, key and bucket.
            free_in_s: when the worker should be free, by what its stage's batches took.
        """
        return NOTHING

    def _full_ahead(self, queue: QueueView) -> Decision:
        """What to say there if a batch is as good as it can be when it is full."""
        limit = self.limit
        return Decision(take=limit, reason="full") if queue.size >= limit else NOTHING

    def lets_go(self, slack_s: float) -> bool:
        """Whether a request of size 1 would go at once that came now, is due in `slack_s`, and found nobody waiting and
        nobody at work: if so, `decide` need not be asked, and `went_alone` tells of it afterwards.

        For policies for which that is quick to tell. It changes nothing, as `decide` does not; by default it is False,
        and a class that overrides `decide`, `arrived`, `completed` or `limit` is not asked unless it overrides this and
        `went_alone` too.
        """
        return False

    def went_alone(self, began: float, now: float, busy_s: float, ok: bool) -> None:
        """A request came when `lets_go` said so, went at once, and is done: the same as `arrived` and `decide` at
        `began`, and `completed` now."""

    @property
    def limit(self) -> int:
        """Most that one batch may hold, in units of the requests' sizes."""
        return self.max_batch_size or 1

    def predicted_wait_s(self, waiting: int, workers: int) -> float | None:
        """Seconds until a worker takes up what has `waiting` units queued ahead of it, besides what runs already.

        None, if the policy knows no better than the batcher, which goes by the smoothed time of recent batches.
        """
        return None

    def explain(self, now: float) -> dict[str, Any]:
        """Why it decides as it does, for people, `stats()` and metrics.

        These keys mean the same everywhere: `rule` (the word for what decided last), `hop_s`, `cost_s` (learned seconds
        of a batch, by size), `arrival_rate` (units per second) and `expected_batch_size`. Others are the policy's own.
        """
        return {"policy": type(self).__name__.lower(), "max_batch_size": self.limit, "hop_s": self.hop_s}
