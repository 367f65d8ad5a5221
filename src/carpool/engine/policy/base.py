"""What a batching policy is: five calls, and one view with all that it may know. No clock, no IO.

    decide(view) -> Decision     what to do now
    arrived(now, requests)       these have joined the queue
    left(now, request)           this one leaves the queue without being taken
    learn(now, done)             a batch is done: all that is known of it is written on it
    explain(now) -> dict         why it decides as it does

A policy decides *when* to go and *with how many*; the order is the queue's, the deadlines are the
batcher's. It may be asked at any time and any number of times: `decide` must not change what the
next `decide` would say. It is the one call that every policy must have. Two attributes are read
between the calls, `limit` and `lone_slack_s`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

from carpool.engine.request import Request


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


@dataclass(slots=True, eq=False)
class View:
    """All that a policy may know of its stage.

    A stage has one, which it fills in anew for each question. A policy may keep it: what does not
    belong to a question (from `running` to `batch_work_s`) holds between the questions, too.

    Attributes:
        queue: What waits, without the keys that may get no more workers; it must not be changed.
        now: The time.
        free: How many idle workers may take a batch.
        busy: How many workers run one.
        free_in_s: None where the question is about an idle worker. Else it is about one that is
            busy, and should be free in so many seconds, by what the stage's batches took. To take
            something then makes sense where waiting for that worker could not make the batch any
            better. Only `take` and `reason` count. A batch that takes all that waits, and is below
            the limit, goes as late as it may.
        warm_keys: The keys that the idle workers have served last.
        safe_padded_size: The most that a batch's count times its longest length may be which is
            known to fit into memory, or is worth a try; infinity while nothing has run out of it.
        running: How many requests the workers have, those of the batch included that is just done.
        onward_s: Seconds that a request will still need once it has left this stage: waits and
            batches of the stages behind it. A policy that plans for due times leaves `hop_s +
            onward_s` of them.
        hop_s: Smoothed seconds that a batch spends on its way to the worker and back, on top of
            `busy_s`.
        gap_s: Smoothed seconds that a worker is idle between two batches unless one goes ahead;
            0 where none may.
        runs_ahead: Whether a batch may go to a worker that is still busy.
        request_work_s: Seconds for which the coordinator's thread works for each request, as
            learned: to read it, to have it in a batch, to write its answer. They count while it
            waits for a core, too, and so does whatever else runs on its thread. A share of each
            where a service has several stages. 0 where it is not measured: while little comes, in
            a service with a stage that answers in parts, and where callers' threads do the work.
        batch_work_s: Those for each batch besides: to decide, to write it, to read its reply.
            Batches of all workers wait for this one thread.
    """

    queue: QueueView
    now: float = 0.0
    free: int = 1
    busy: int = 0
    free_in_s: float | None = None
    warm_keys: Collection[Hashable] = ()
    safe_padded_size: float = inf
    running: int = 0
    onward_s: float = 0.0
    hop_s: float = 0.0
    gap_s: float = 0.0
    runs_ahead: bool = False
    request_work_s: float = 0.0
    batch_work_s: float = 0.0


class DoneBatch(Protocol):
    """A batch that is done, or a call of a warm-up, for a policy to learn from.

    It must not be kept.

    Attributes:
        started: When its worker got to it.
        n: How many requests it had.
        size: The sum of their sizes.
        longest: The longest of their lengths; 0 where requests have none.
        busy_s: Seconds that the worker spent on it. In services with workers that includes decoding
            and encoding, but not in a warm-up, where only user code is timed.
        hop_s: Seconds that it spent on its way to the worker and back besides.
        ok: Whether none of its requests failed.
        is_switch: Whether its worker had served another key before.
        ahead: Whether it was handed over while its worker was still busy, so that some of its way
            is not in `hop_s`.
        is_alone: Whether it is a lone request that went by `lone_slack_s`, with no request to look
            at: neither `arrived` nor `decide` was called for it.
        is_warm_up: Whether it is a call of a warm-up. These come before the first request, for each
            worker once per size. Where the stage has `length=`, others come besides, which have
            run one example of the length `longest` over and over.
    """

    started: float
    n: int
    size: int
    longest: int
    busy_s: float
    hop_s: float
    ok: bool
    is_switch: bool
    ahead: bool

    @property
    def is_alone(self) -> bool: ...

    @property
    def is_warm_up(self) -> bool: ...

    @property
    def requests(self) -> Sequence[Request]:
        """Return those that it still had when its last part was answered."""

    @property
    def is_first(self) -> bool:
        """Whether it was the first one of about its size, and length, on its worker.

        It may have been slow for that reason. Only those count that a policy has asked this of.
        """


class Policy(ABC):
    """Base of all policies.

    `decide` is the policy; the other calls say what it may learn from, or ask for its reasons. No
    request is to be kept once it has left the queue: when it has been answered, it may be used
    again for another item.

    Args:
        max_batch_size: Most that one batch may hold; None means the stage's.
        max_queue_delay_s: Longest time to hold a request back only to fill a batch; None means the
            stage's.

    Attributes:
        allowed_batch_sizes: If given, smaller batches are padded up to the next of these, so they
            cost as much; rising, the last one is the stage's limit.
        max_padded_size: The most that the count of a batch times its longest length may be;
            infinity for no limit.
        allowed_lengths: If given, the lengths of batches are padded up to the next of these, which
            rise.
        overload: What matters while more comes than can be served: "goodput" (answer as many as
            possible in time) or "latency" (answer those that are served soon). Filled in with the
            service's setting.
        slo_s: The service's SLO, if it has one and the policy was not given another.
    """

    def __init__(self, max_batch_size: int | None = None, max_queue_delay_s: float | None = None) -> None:
        self.max_batch_size = max_batch_size
        self.max_queue_delay_s = max_queue_delay_s
        self.allowed_batch_sizes: Sequence[int] | None = None
        self.max_padded_size = inf
        self.allowed_lengths: Sequence[int] | None = None
        self.overload = "goodput"
        self.slo_s: float | None = None

    def __init_subclass__(cls, **settings: Any) -> None:
        """Set `lone_slack_s` to infinity in a class that changes the rule and does not set it.

        The slack that it would inherit lets lone requests go without a call of the changed rule.
        """
        super().__init_subclass__(**settings)
        if "lone_slack_s" not in vars(cls) and not _RULE.isdisjoint(vars(cls)):
            cls.lone_slack_s = inf  # type: ignore[method-assign, assignment]

    @property
    def limit(self) -> int:
        """Most that one batch may hold, in units of the requests' sizes."""
        return self.max_batch_size or 1

    @property
    def lone_slack_s(self) -> float:
        """How much time a lone request must have to go at once, without a question.

        A request of size 1 that finds the queue empty and all workers idle goes alone if it is due
        in no less than this; afterwards `learn` gets a batch with `is_alone`. Infinity, which is
        the default, has `decide` asked in any case. It may change in `learn` and `arrived` only. A
        class that overrides `decide`, `arrived`, `learn` or `limit`, and not this, has the default.
        """
        return inf

    @abstractmethod
    def decide(self, view: View) -> Decision:
        """Return what to do with `view.queue`."""

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        """Note that requests have joined the queue at one moment."""

    def left(self, now: float, request: Request) -> None:
        """Note that a request leaves the queue without being taken, or has just left it.

        It was cancelled, has expired, made room for a higher priority, or was dropped by this
        policy's own decision.
        """

    def learn(self, now: float, done: DoneBatch) -> None:
        """Learn from a batch, or from a call of a warm-up."""

    def cost_s(self, size: int) -> float | None:
        """Return the learned seconds of a batch of `size`, with its way; None if it has none."""
        return None

    def explain(self, now: float) -> dict[str, Any]:
        """Return why it decides as it does, for people, `stats()` and metrics.

        These keys mean the same everywhere: `rule` (the word for what decided last), `cost_s`
        (learned seconds of a batch, by size), `arrival_rate` (units per second) and
        `expected_batch_size` (the largest batch that is made on purpose). Others are the policy's
        own. `stats()` adds `hop_s` beside `policy`, and `request_work_s` and `batch_work_s` where
        they are known, see `View`.
        """
        return {"policy": name_of(self), "max_batch_size": self.limit}

    def most_padded(self, view: View) -> float:
        """Return the most that the count of a batch times its longest length may be now."""
        return min(self.max_padded_size, view.safe_padded_size)

    def _full_ahead(self, queue: QueueView, limit: int | None = None) -> Decision:
        """Return what goes to a busy worker where a full batch is as good as a batch can be.

        Where lengths vary, a better one may still come together.

        Args:
            queue: What waits.
            limit: What a full batch holds, if not `limit`.
        """
        limit = limit or self.limit
        return Decision(take=limit, reason="full") if queue.size >= limit and not queue.lengths_vary else NOTHING


_RULE = frozenset(("decide", "arrived", "learn", "limit"))


def name_of(policy: Policy) -> str:
    """Return a policy's name as users write it: as a stage names it, or the name of their class."""
    kind = type(getattr(policy, "former", policy))
    return kind.__name__.removesuffix("Steps").lower() if kind.__module__.startswith(__package__) else kind.__name__
