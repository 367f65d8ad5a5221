"""Ray Serve's `@serve.batch`: a batch is sealed while its replica computes, and waits its turn.

Each replica has a queue of its own, and a router gives a request to the less loaded one of two. The
loop of the replica collects a batch until it is full, or for some time after its first request,
also while the replica computes. Then it collects the next one. So a batch that waits never grows.
Sources: Ray from 2.50 on, `python/ray/serve/batching.py`, `_BatchQueue.wait_for_batch` and
`_process_batches` (with `max_concurrent_batches` of 1), and
`python/ray/serve/_private/request_router/pow_2_router.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from random import Random

from carpool.engine.policy.base import NOTHING, Decision, Policy, View
from carpool.engine.request import QUEUED, RUNNING, Request
from carpool.simulate.contestants.sealed import in_state, size_of, together

USUAL_DELAY_S = 0.01  # Ray's `batch_wait_timeout_s`


class RayReplica:
    """The requests of one replica: an open batch, sealed ones, and those that it computes.

    Attributes:
        open: The batch that is collected.
        since: When its first request came.
        waiting: How many requests the open batch and the sealed ones have.
    """

    def __init__(self) -> None:
        self.open: list[Request] = []
        self.since = 0.0
        self.sealed: deque[list[Request]] = deque()
        self.running: list[Request] = []
        self.waiting = 0

    @property
    def inside(self) -> int:
        """How many requests wait or run."""
        return self.waiting + len(self.running)

    def put(self, now: float, request: Request, limit: int, delay_s: float) -> None:
        """Add a request that has come at `now`."""
        self.seal(now, delay_s)
        if not self.open:
            self.since = now
        self.open.append(request)
        self.waiting += 1
        if size_of(self.open, limit) >= limit:
            self._close()

    def seal(self, now: float, delay_s: float) -> None:
        """Seal the open batch if its time is up."""
        if self.open and now >= self.since + delay_s:
            self._close()

    def update(self, node: object) -> None:
        """Look at the fate of the batch that was offered last, and of the one that ran."""
        self.running = in_state(self.running, RUNNING, node)
        while self.sealed:
            batch = self.sealed[0]
            left = in_state(batch, QUEUED, node)
            if len(left) == len(batch):
                return
            self.running += in_state(batch, RUNNING, node)
            self.waiting -= len(batch) - len(left)
            self.sealed.popleft()
            if left:  # not all of it had room in one call
                self.sealed.appendleft(left)

    def remove(self, request: Request) -> None:
        """Forget a request that has left; do nothing if it is another replica's."""
        for batch in (self.open, *self.sealed):
            if request in batch:
                batch.remove(request)
                self.waiting -= 1
        self.sealed = deque(filter(None, self.sealed))

    def _close(self) -> None:
        self.sealed.append(self.open)
        self.open = []


class Ray(Policy):
    """Seal batches by replica, and send each when its replica is idle.

    There are as many replicas as workers.

    Args:
        max_queue_delay_s: The seconds after its first request when a batch is sealed; 10 ms if not
            given.
    """

    def __init__(self, max_batch_size: int | None = None, max_queue_delay_s: float | None = None) -> None:
        super().__init__(max_batch_size)
        self._delay_s = USUAL_DELAY_S if max_queue_delay_s is None else max_queue_delay_s
        self._new: list[tuple[float, Request]] = []  # and when they came
        self._replicas: list[RayReplica] = []
        self._node: object = None
        self._dice = Random(0)

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._node = requests[0].node
        self._new += [(now, request) for request in requests]

    def left(self, now: float, request: Request) -> None:
        self._new = [(when, each) for when, each in self._new if each is not request]
        for replica in self._replicas:
            replica.remove(request)

    def decide(self, view: View) -> Decision:
        now = view.now
        if view.free_in_s is not None or not len(view.queue):
            return NOTHING
        self._route(view.free + view.busy)
        wake_at = inf
        for replica in self._replicas:
            replica.seal(now, self._delay_s)
            replica.update(self._node)
            if replica.running:
                continue
            if replica.sealed and view.free:
                batch = together(replica.sealed[0], self)
                return Decision(take=size_of(batch, self.limit), chosen=batch, reason="sealed")
            if replica.open:
                wake_at = min(wake_at, replica.since + self._delay_s)
        return Decision(wake_at=wake_at)

    def _route(self, workers: int) -> None:
        """Give each new request to the less loaded one of two replicas."""
        while len(self._replicas) < workers:
            self._replicas.append(RayReplica())
        if not self._new:
            return
        for replica in self._replicas:
            replica.update(self._node)
        replicas = self._replicas[: max(1, workers)]  # those of workers that have gone finish what they have
        for now, request in self._new:
            two = self._dice.sample(replicas, 2) if len(replicas) > 1 else replicas
            min(two, key=lambda each: each.inside).put(now, request, self.limit, self._delay_s)
        self._new.clear()
