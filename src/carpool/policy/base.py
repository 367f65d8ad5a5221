"""What a batching policy is: told what happens, asked what to do. No clock, no IO.

A policy decides *when* to go and *with how many*; the order is the queue's, the deadlines are the
batcher's. It may be asked at any time and any number of times: `decide` must not change what the
next `decide` would say. It is the one call that every policy must have. `decide_ahead` is for
policies that know when a batch cannot get any better by waiting for its worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

from carpool.request import Request


class LevelsView(Protocol):
    """The waiting requests of one priority and key by their lengths. Reading changes nothing."""

    @property
    def key(self) -> Hashable:
        """The key."""

    @property
    def allowance_s(self) -> float:
        """Seconds from the admission of each request to its due time; 0 if that differs."""

    @property
    def earliest_due(self) -> float:
        """When the first of its requests is due; infinity if none waits."""

    def rising(self) -> list[tuple[int, Iterable[Request], int]]:
        """Return each level of nearly equal lengths, the shortest first.

        Each has the longest length in it, its requests in the order of their arrival, and how many
        they are.
        """


class QueueView(Protocol):
    """What a policy may see of a queue. Reading changes nothing."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def peek(self, n: int) -> list[Request]:
        """Return the next `n` requests, in the order in which they would be taken."""

    @property
    def lanes(self) -> int:
        """How many priorities, keys and buckets wait side by side.

        With one, requests wait in the order of their dues, and any of them may share a batch.
        """

    @property
    def size(self) -> int:
        """Sum of the sizes of the waiting requests."""

    @property
    def weighted(self) -> bool:
        """Whether some of the waiting requests have a size other than 1."""

    @property
    def by_length(self) -> bool:
        """Whether requests have lengths or keys, so that there are `levels`."""

    @property
    def lengths_vary(self) -> bool:
        """Whether requests have lengths, and there have ever been two of different lengths."""

    @property
    def levels(self) -> Sequence[LevelsView]:
        """The requests that may go next by their lengths, for each key; empty without either."""

    @property
    def earliest_due(self) -> float:
        """When the next request should be answered, by its SLO or its deadline.

        Infinity when none waits.
        """

    @property
    def oldest_arrival(self) -> float:
        """When the request that has waited longest arrived; infinity when none waits."""

    @property
    def earliest_deadline(self) -> float:
        """When the next request expires; infinity when none waits."""


TOO_LATE = "the request would not be answered within its SLO or by its deadline"
FULL = "the queue is full"


def checked_slo(slo_s: float | None) -> float | None:
    """Return an objective in seconds, or None for none. Raises ValueError if it is not positive."""
    if slo_s is not None and not slo_s > 0:
        raise ValueError(f"slo_s must be a positive number of seconds, not {slo_s!r}")
    return slo_s


class Decision(NamedTuple):
    """What to do now.

    While a service closes, and no new request can come, nothing is held back: if a worker is free,
    what waits goes although `take` is 0.

    Attributes:
        drop: Queued requests to refuse, because they cannot be in time, or for another
            `drop_reason`.
        take: How much, from the head of the queue, to run as one batch now, in units of the
            requests' sizes (which are 1 unless users say otherwise); 0 for nothing. A request that
            is larger than this by itself goes alone.
        reason: Why the batch goes now, one of a small fixed set of words (a metric label).
        wake_at: When to ask again although nothing happened; None if only an event can change the
            answer.
        drop_reason: What the callers of the refused requests are told.
        chosen: The queued requests that go, where they are not those at the head; `take` is then
            the sum of their sizes. They must have one key.
    """

    drop: Sequence[Request] = ()
    take: int = 0
    reason: str = ""
    wake_at: float | None = None
    drop_reason: str = TOO_LATE
    chosen: Sequence[Request] = ()


NOTHING = Decision()


class Policy(ABC):
    """Base of all policies.

    `decide` is the policy; the other calls tell it what it may learn from, or ask for its reasons.
    No request is to be kept once it has left the queue: when it has been answered, it may be used
    again for another item.

    Args:
        max_batch_size: Most that one batch may hold; None means the stage's.
        max_queue_delay_s: Longest time to hold a request back only to fill a batch; None means the
            stage's.

    Attributes:
        hop_s: Smoothed seconds that a batch spends on its way to the worker and back, on top of
            `busy_s`; the batcher keeps it.
        last_hop_s: The same of the batch that was completed last, not smoothed.
        gap_s: Smoothed seconds that batches spend on their way which did not lie with a busy worker
            before: about what a worker is idle between two batches unless one goes ahead. The
            batcher keeps it where batches may go ahead.
        running: How many requests the workers have been handed, as of the last `completed` or
            `decide_ahead`; the batcher keeps it.
        runs_ahead: Whether a batch may go to a worker that is still busy; the batcher keeps it.
        is_first_call: Whether the batch that is reported by `served` and `completed` was the first
            one of about its size on its worker, or was it in a stage of steps what `started` or
            `stepped` reports. It may have been slow for that reason. The batcher keeps it.
        onward_s: Seconds that a request will still need once it has left this stage: waits and
            batches of the stages behind it; the pipeline keeps it. A policy that plans for due
            times leaves `hop_s + onward_s` of them.
        allowed_batch_sizes: If given, smaller batches are padded up to the next of these, so they
            cost as much; rising, the last one is the stage's limit.
        max_padded_size: The most that the count of a batch times its longest length may be;
            infinity for no limit.
        safe_padded_size: The most of that product which is known to fit into memory, or is worth a
            try; infinity while nothing has run out of it. The batcher keeps it.
        allowed_lengths: If given, the lengths of batches are padded up to the next of these, which
            rise.
        warm_keys: The keys that the idle workers have served last; the batcher keeps it.
        overload: What matters while more comes than can be served: "goodput" (answer as many as
            possible in time) or "latency" (answer those that are served soon). Filled in with the
            service's setting.
        slo_s: The service's SLO, if it has one and the policy was not given another.
    """

    def __init__(self, max_batch_size: int | None = None, max_queue_delay_s: float | None = None) -> None:
        self.max_batch_size = max_batch_size
        self.max_queue_delay_s = max_queue_delay_s
        self.hop_s = self.last_hop_s = self.gap_s = 0.0
        self.running = 0
        self.runs_ahead = self.is_first_call = False
        self.onward_s = 0.0
        self.allowed_batch_sizes: Sequence[int] | None = None
        self.max_padded_size = self.safe_padded_size = inf
        self.allowed_lengths: Sequence[int] | None = None
        self.warm_keys: Collection[Hashable] = ()
        self.overload = "goodput"
        self.slo_s: float | None = None

    @property
    def most_padded(self) -> float:
        """The most that the count of a batch times its longest length may be now."""
        return min(self.max_padded_size, self.safe_padded_size)

    def arrived(self, now: float, request: Request) -> None:
        """Note that a request has joined the queue."""

    def arrived_together(self, now: float, requests: Sequence[Request]) -> None:
        """Note that several requests have joined the queue at one moment.

        This is what batchers call. It is the same as `arrived` for each of them.
        """
        for request in requests:
            self.arrived(now, request)

    def left(self, now: float, request: Request) -> None:
        """Note that a request leaves the queue without being taken, or has just left it.

        It was cancelled, has expired, made room for a higher priority, or was dropped by this
        policy's own decision.
        """

    def completed(self, now: float, n: int, size: int, busy_s: float, ok: bool) -> None:
        """Note that a batch of `n` requests, with sizes summing to `size`, has run for `busy_s`.

        In services with workers `busy_s` includes decoding and encoding; that of `trained` does
        not.
        """

    def served(
        self,
        now: float,
        n: int,
        longest: int,
        requests: Sequence[Request],
        busy_s: float,
        ok: bool,
        is_switch: bool = False,
    ) -> None:
        """Note that a batch of `n` requests that have lengths has run for `busy_s`.

        It comes just before `completed` for the same batch, where the stage has `length=` or
        `key=`.

        Args:
            now: The time.
            n: How many requests it had.
            longest: The longest of their lengths.
            requests: Those that it still had when its last part was answered.
            busy_s: As for `completed`.
            ok: Likewise.
            is_switch: Whether its worker had served another key before.
        """

    def trained_at(self, n: int, longest: int, busy_s: float) -> None:
        """Note that a worker's warm-up ran `n` times an example of length `longest` in `busy_s`.

        It comes besides `trained`, where the stage has `length=`.
        """

    def trained(self, n: int, size: int, busy_s: float) -> None:
        """Note that a worker's warm-up ran `n` examples with sizes summing to `size` in `busy_s`.

        It comes before the first request. Only user code was timed, neither decoding nor encoding;
        each worker reports once per size.
        """

    @abstractmethod
    def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:
        """Return what to do with `queue`.

        Args:
            now: The time.
            queue: What waits; it must not be changed.
            free: How many idle workers may take a batch.
            busy: How many workers run one.
        """

    def decide_ahead(self, now: float, queue: QueueView, free_in_s: float) -> Decision:
        """Return what to hand to a worker that is still busy.

        That makes sense where waiting for the worker could not make the batch any better. Only
        `take` and `reason` count. A batch that takes all that waits, and is below the limit, goes
        as late as it may. By default all waits until a worker is free.

        Args:
            now: The time.
            queue: What waits; all of it has one priority, key and bucket.
            free_in_s: When the worker should be free, by what its stage's batches took.
        """
        return NOTHING

    def _full_ahead(self, queue: QueueView) -> Decision:
        """Return what `decide_ahead` says where a full batch is as good as a batch can be.

        Where lengths vary, a better one may still come together.
        """
        limit = self.limit
        return Decision(take=limit, reason="full") if queue.size >= limit and not queue.lengths_vary else NOTHING

    def lets_go(self, slack_s: float) -> bool:
        """Report whether a lone request of size 1 would go at once if it came now.

        It is due in `slack_s`, and finds the queue empty and all workers idle. If so, `decide` need
        not be asked, and `went_alone` reports it afterwards.

        For policies that can tell quickly. It changes nothing, as `decide` does not. By default it
        is False, and a class that overrides `decide`, `arrived`, `completed` or `limit` is not
        asked unless it overrides this and `went_alone` too.
        """
        return False

    def went_alone(self, began: float, now: float, busy_s: float, ok: bool) -> None:
        """Note that a request came when `lets_go` said so, went at once, and is done.

        It is the same as `arrived` and `decide` at `began`, and `completed` now.
        """

    @property
    def limit(self) -> int:
        """Most that one batch may hold, in units of the requests' sizes."""
        return self.max_batch_size or 1

    def predicted_wait_s(self, waiting: int, workers: int) -> float | None:
        """Return the seconds until a worker takes up what has `waiting` units queued ahead of it.

        What runs already is not included. None, if the policy knows no better than the batcher,
        which goes by the smoothed time of recent batches.
        """
        return None

    def explain(self, now: float) -> dict[str, Any]:
        """Return why it decides as it does, for people, `stats()` and metrics.

        These keys mean the same everywhere: `rule` (the word for what decided last), `hop_s`,
        `cost_s` (learned seconds of a batch, by size), `arrival_rate` (units per second) and
        `expected_batch_size` (the largest batch that is made on purpose). Others are the policy's
        own.
        """
        return {"policy": name_of(self), "max_batch_size": self.limit, "hop_s": self.hop_s}


def name_of(policy: Policy) -> str:
    """Return a policy's name as users write it: as a stage names it, or the name of their class."""
    kind = type(policy)
    return kind.__name__.removesuffix("Steps").lower() if kind.__module__.startswith(__package__) else kind.__name__


_LONE_CALLS = ("lets_go", "went_alone")
_RULE_CALLS = ("decide", "arrived", "arrived_together", "completed", "limit")


def knows_lone_requests(kind: type[Policy]) -> bool:
    """Report whether what a class says of lone requests is meant for the rule that it follows.

    A class that overrides the rule, and not what its base says of lone requests, is to be asked
    step by step.
    """
    if kind.lets_go is Policy.lets_go:
        return False
    calls = (*_LONE_CALLS, *_RULE_CALLS)
    depth = {name: next(i for i, base in enumerate(kind.__mro__) if name in vars(base)) for name in calls}
    return max(depth[name] for name in _LONE_CALLS) <= min(depth[name] for name in _RULE_CALLS)
