"""Window: a worker takes a first request and then waits for more: mosec, LitServe, TorchServe.

The timer starts when an idle worker takes the first request, so that one which has already queued
behind a busy worker is held again. Sources: mosec at 124694b, `src/protocol.rs`, line 270
(`get_batch`); LitServe at 1311d5b, `src/litserve/loops/base.py`, line 99 (`collate_requests`);
TorchServe, `Model.pollBatch`. One worker collects at a time, as TorchServe's lock has it. In mosec
and LitServe all idle workers collect, and share what comes.
"""

from __future__ import annotations

from carpool.engine.policy.base import NOTHING, Decision, Policy, View
from carpool.engine.request import Request

USUAL_DELAY_S = 0.01  # mosec's `max_wait_time`


class Window(Policy):
    """Send a batch when it is full, or some time after an idle worker has taken its first request.

    Args:
        max_queue_delay_s: The seconds for which a worker waits for more; 10 ms if not given.
    """

    def __init__(self, max_batch_size: int | None = None, max_queue_delay_s: float | None = None) -> None:
        super().__init__(max_batch_size)
        self._delay_s = USUAL_DELAY_S if max_queue_delay_s is None else max_queue_delay_s
        self._first: tuple[Request, float] | None = None  # the request that a worker took first, and its arrival
        self._since = 0.0  # when the worker took it

    def decide(self, view: View) -> Decision:
        queue, now = view.queue, view.now
        waiting = queue.size
        if view.free_in_s is not None or not view.free or not waiting:
            return NOTHING
        head = queue.peek(1)[0]
        first = (head, head.arrived)
        if first != self._first:
            self._first, self._since = first, now
        until = self._since + self._delay_s
        if waiting < self.limit and now < until:
            return Decision(wake_at=until)
        return Decision(take=min(waiting, self.limit), reason="window")
