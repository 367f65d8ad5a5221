"""The requests that wait in one stage: how they come, leave, expire and are dropped.

The policy of a stage may be the user's, and is guarded here, once: what it raises goes to
`on_fault`, and from then on the stage is served greedily, until its service ends. So nothing has to
be undone, and no code has to find out whose error it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from carpool.core.batch import Expiry
from carpool.core.quarantine import suspect
from carpool.core.queue import Queue
from carpool.policy.adapted import Adapted
from carpool.policy.base import Policy, View
from carpool.policy.greedy import Greedy
from carpool.request import QUEUED, Request


class StageRequests:
    """The queue of one stage, and what its policy is told of the requests in it.

    Args:
        name: The stage's name.
        policy: Decides when and how many; owned by this stage alone.
        queue: Where requests wait.
        stage: The position of the stage; the pipeline sets it.
        idempotent: Whether a request may be run once more when its worker is lost.
        weigh: Writes on a request what the result of the stage before counts for in this one: its
            size, if that is not 1, its length and its key. It may raise a `CarpoolError`.

    Attributes:
        view: What the policy is asked with.
        batch_limit: The policy's limit, as of its last decision or lesson.
        on_fault: Is called with the stage's name and what its policy has raised, and may raise
            that; the driver sets it. Without it what policies raise is raised.
        next_max_size: The most results that the next stage can ever take at once; the pipeline sets
            it.
        closing: Whether no request can join the queue any more, so that nothing is held back for
            company; the pipeline sets it.
        nodes: Its places in the graphs of services, which the core sets. Requests of all of them
            share batches; those of a stage by itself have None for their node.
        entered: How many requests have joined the queue.
        wake_at: When to ask again what to do although nothing happened; None for never.
        attention_at: No request expires and no worker hangs before this.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        queue: Queue,
        *,
        stage: int,
        idempotent: bool,
        weigh: Callable[[Request, object], None] | None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.queue = queue
        self.stage = stage
        self.view = View(queue)
        try:
            self.batch_limit = policy.limit
        except BaseException:  # as its first decision will show once more
            self.batch_limit = policy.max_batch_size or 1
        self.on_fault: Callable[[str, BaseException], None] | None = None
        self.idempotent = idempotent
        self.weigh = weigh or _counts_for_one
        self.next_max_size = inf
        self.nodes: list[Any] = [None]
        self.closing = False
        self.entered = 0
        self.wake_at: float | None = None
        self.attention_at = inf
        self._know(policy)

    # -- the policy

    def _know(self, policy: Policy) -> None:
        """Note what a policy has to be told."""
        kind = type(policy)
        self._policy_listens = kind.arrived is not Policy.arrived
        self._policy_learns = kind.learn is not Policy.learn
        self._predictor = policy if isinstance(policy, Adapted) and policy.predicts else None

    def _failed(self, error: BaseException) -> None:
        """Serve greedily from now on, without the policy, as it has raised."""
        if self.on_fault is None:
            raise error
        self.on_fault(self.name, error)
        former, policy = self.policy, self._substitute()
        policy.allowed_batch_sizes, policy.allowed_lengths = former.allowed_batch_sizes, former.allowed_lengths
        policy.max_padded_size = former.max_padded_size
        self.policy = policy
        self._know(policy)

    def _substitute(self) -> Policy:
        """Return the policy of a stage of which the own one has raised."""
        return Greedy(self.batch_limit)

    def _tell(self, call: Callable[..., object], *about: object) -> None:
        """Make a call of the policy that returns nothing."""
        try:
            call(*about)
        except BaseException as error:
            self._failed(error)

    # -- requests come and go

    def enter(
        self, now: float, requests: Sequence[Request], soonest: float | None = None, nbytes: int | None = None
    ) -> None:
        """Put requests in the queue of this stage; their `node` and `arrived` must be set already.

        Args:
            now: The time.
            requests: At least one.
            soonest: The earliest of their deadlines, if it is known.
            nbytes: How many bytes they hold, if they are alike (see `Queue.push_alike`).
        """
        if soonest is None:
            soonest = min([request.deadline for request in requests])
        if soonest < self.attention_at:
            self.attention_at = soonest
        self.entered += len(requests)
        if nbytes is None:
            self.queue.push(requests)
        else:
            self.queue.push_alike(requests, nbytes)
        if self._policy_listens:
            self._tell(self.policy.arrived, now, requests)

    def put_back(self, now: float, requests: Sequence[Request]) -> None:
        """Let requests of a worker that has gone wait again, in their old places."""
        self.queue.put_back(requests)
        known = [request for request in requests if not request.losses]  # the policy is not told of those in quarantine
        if known:
            self._tell(self.policy.arrived, now, known)

    def quarantine(self, requests: Sequence[Request]) -> None:
        """Let requests wait again, each to be run alone, as one of them may have killed its worker.

        They wait in their old places. The policy is not told, neither now nor when they have run:
        they do not arrive, and it does not decide on them.
        """
        for request in requests:
            suspect(request)
        self.queue.put_back(requests)

    def leave(self, now: float, request: Request) -> None:
        """Remove a queued request whose caller has gone; it is now done."""
        self.queue.remove(request)
        self._tell(self.policy.left, now, request)

    def in_the_way(self, request: Request) -> list[Request]:
        """Return the requests that must give up their places to a new one, if the queue is full.

        A batch of each priority stays, or half of a queue that is smaller than two batches.
        """
        return self.queue.in_the_way(request, max(1, int(min(self.batch_limit, self.queue.max_size / 2))))

    def displace(self, now: float, request: Request) -> None:
        """Remove a queued request for one of a higher priority; it is now done."""
        self._tell(self.policy.left, now, request)
        self.queue.evict(request)

    def may_run_again(self, request: Request) -> bool:
        """Report whether a request may be run once more after its worker was lost."""
        return self.idempotent

    def late_unserved(self, now: float, since: float) -> tuple[list[Request], float]:
        """Return the queued requests that are late as no worker has been there `since`.

        See `is_late_unserved`. Also returns when the next one of the others will be late.
        """
        late, next_due = [], inf
        for request in self.queue:
            if is_late_unserved(now, request, since):
                late.append(request)
            elif now < request.due < next_due:
                next_due = request.due
        return late, next_due

    @property
    def _whose_policy(self) -> str:
        return f"policy {type(getattr(self.policy, 'former', self.policy)).__name__} of stage {self.name}"

    def _check_queued(self, requests: Sequence[Request], what_it_does: str) -> None:
        """Raise RuntimeError if some of the requests that the policy names cannot be taken."""
        if len(set(requests)) < len(requests) or any(r.state != QUEUED or r.node not in self.nodes for r in requests):
            raise RuntimeError(f"{self._whose_policy} {what_it_does} what is not queued")

    def drop(self, now: float, requests: Sequence[Request]) -> None:
        """Remove queued requests that are not to be served."""
        for request in requests:
            self._tell(self.policy.left, now, request)
        for request in requests:
            self.queue.remove(request)

    def _expire_queued(self, now: float) -> list[Expiry]:
        """Remove the queued requests whose deadlines have passed."""
        waited = self.queue.expired(now)
        self.drop(now, waited)
        return [Expiry(request, None) for request in waited]


def is_late_unserved(now: float, request: Request, since: float) -> bool:
    """Report whether a request is late for its SLO while no worker can serve it.

    One that waits is late when it is due. One that comes has no chance if workers have been away
    for as long as it has time: they will hardly be back in less.

    Args:
        now: The time.
        request: One that waits; its deadline is looked at elsewhere.
        since: Since when there has been no worker.
    """
    due = request.due
    return due < request.deadline and (due <= now or due - request.arrived <= request.arrived - since)


def _counts_for_one(request: Request, result: object) -> None:
    request.size = 1
