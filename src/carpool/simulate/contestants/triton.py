"""Triton's dynamic batcher: preferred sizes, a delay, and payloads that grow until they are taken.

Sources: Triton's core at 73aad7c, `src/dynamic_batch_scheduler.cc`, line 488 (`GetDynamicBatch`)
and line 302 (`BatcherThread`); `src/rate_limiter.cc`, line 208 (two payloads for each instance may
lie ready); `src/instance_queue.cc`, `Dequeue` (payloads that are old enough are merged when an
instance takes one). It is as much of these as matters for requests of one shape and priority.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from carpool.engine.policy.base import NOTHING, Decision, Policy, View
from carpool.engine.request import QUEUED, Request
from carpool.simulate.contestants.sealed import in_state, size_of, together

USUAL_DELAY_S = 0.01
_READY = 2  # payloads for each instance
_ROUNDING_S = 1e-9
_SOON_S = 1e-7


class TritonPayload:
    """A batch that is ready, or becomes so.

    Attributes:
        is_saturated: Whether it grows no more.
        is_ready: Whether an instance may take it.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.is_saturated = self.is_ready = False


class Triton(Policy):
    """Form payloads as Triton's batcher does, and send the first one when a worker is free.

    Args:
        max_queue_delay_s: Triton's `max_queue_delay_microseconds`, in seconds; 10 ms if not given.
            With 0 nothing is held back.
        preferred_batch_sizes: Triton's `preferred_batch_size`; the batch limit if not given.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        max_queue_delay_s: float | None = None,
        preferred_batch_sizes: Sequence[int] = (),
    ) -> None:
        super().__init__(max_batch_size)
        self._delay_s = USUAL_DELAY_S if max_queue_delay_s is None else max_queue_delay_s
        self._preferred = frozenset(preferred_batch_sizes)
        self._new: deque[Request] = deque()
        self._ready: deque[TritonPayload] = deque()
        self._current = TritonPayload()
        self._node: object = None

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._node = requests[0].node
        self._new += requests

    def left(self, now: float, request: Request) -> None:
        for requests in (self._new, *(payload.requests for payload in self._ready)):
            if request in requests:
                requests.remove(request)

    def decide(self, view: View) -> Decision:
        now = view.now
        if view.free_in_s is not None or not len(view.queue):
            return NOTHING
        for payload in self._ready:
            payload.requests = in_state(payload.requests, QUEUED, self._node)
        self._ready = deque(payload for payload in self._ready if payload.requests)
        wake_at = self._form(now, view.free + view.busy)
        if view.free and self._ready:
            batch = together(self._merged(now), self)
            return Decision(take=size_of(batch, self.limit), chosen=batch, reason="payload")
        return Decision(wake_at=wake_at)

    def _form(self, now: float, instances: int) -> float:
        """Do the work of the batcher's thread; return when it wants to be woken."""
        while self._new:
            current = self._current
            if current.is_saturated or (current.is_ready and current not in self._ready):
                current = self._current = TritonPayload()
            if len(self._ready) >= _READY * instances:
                return inf
            n, wait_s = self._pending(now, current)
            if wait_s:
                return now + wait_s
            if not n and not current.is_saturated:
                return inf
            current.requests += [self._new.popleft() for _ in range(n)]
            if n and not current.is_ready:
                current.is_ready = True
                self._ready.append(current)
        return inf

    def _pending(self, now: float, payload: TritonPayload) -> tuple[int, float]:
        """Return how many requests join the payload now, or how long to wait."""
        preferred = self._preferred or {self.limit}
        most = max(preferred)
        held, pending, best, send_now = len(payload.requests), 0, 0, False
        for _ in self._new:
            if held + pending:
                if held + pending + 1 > most and not best:
                    best, payload.is_saturated = pending, True
                if held + pending + 1 > self.limit:
                    send_now = True
                    break
            pending += 1
            if held + pending in preferred:
                best = pending
        age_s = now - self._new[0].arrived
        is_old = 0.0 < self._delay_s <= age_s + _ROUNDING_S
        if best and not is_old:
            payload.is_saturated |= not self._delay_s
            return best, 0.0
        if send_now or held + pending >= most:
            payload.is_saturated = True
            return pending, 0.0
        may_grow = not payload.is_saturated and held and held not in preferred
        if is_old or not self._delay_s or may_grow:
            return pending, 0.0
        return 0, max(self._delay_s - age_s, _SOON_S)

    def _merged(self, now: float) -> list[Request]:
        """Return the requests for the instance that takes the first payload."""
        first, *others = self._ready
        batch = list(first.requests)
        if not self._delay_s or first.is_saturated:
            return batch
        for other in others:
            is_old = now - other.requests[0].arrived > self._delay_s
            if other.is_saturated or not is_old or len(batch) + len(other.requests) > self.limit:
                break
            batch += other.requests
        return batch
