"""The policy of a stage whose model takes single items: one call per item, several items per hop.

Sending one item to a worker process and its answer back costs a fixed hop (some 20-50 µs). When an
item takes far less than that, going one at a time would leave the worker idle most of the time. So
the number of items in one frame follows their learned time: as many as fit into `HOP_BUDGET_S` of
work, shared out evenly among the free workers. To carry megabytes is work, too. So large items go
one at a time, which also saves the copies of results that wait for frame-mates.
"""

from __future__ import annotations

from math import inf

from carpool.engine.policy.base import NOTHING, Decision, DoneBatch, Policy, QueueView, View

HOP_BUDGET_S = 0.001  # of work in one frame, about, so that no item waits long behind its frame-mates
HOP_BYTES = 10**6  # in one frame, about: to carry them takes about as long
MOST_IN_A_HOP = 128


class OneByOne(Policy):
    """Take single items; up to `per_hop` of them travel together.

    Attributes:
        item_s: Smoothed seconds of an item; None until one has run.
        per_hop: How many items may travel together now. It is asked for several times for each
            item, so it is worked out when an item has run.
    """

    lone_slack_s = -inf

    def __init__(self, max_batch_size: int | None = None, max_queue_delay_s: float | None = None) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        self.item_s: float | None = None
        self.per_hop = 1

    @property
    def limit(self) -> int:
        return self.per_hop

    def learn(self, now: float, done: DoneBatch) -> None:
        if done.is_warm_up:
            return
        item_s = done.busy_s / done.n
        if self.item_s is None or item_s > self.item_s:
            self.item_s = item_s  # slower than thought: believe it at once, others wait behind it in the frame
        else:
            self.item_s += 0.2 * (item_s - self.item_s)
        self.per_hop = max(1, min(MOST_IN_A_HOP, int(HOP_BUDGET_S / max(self.item_s, 1e-9))))

    def decide(self, view: View) -> Decision:
        queue = view.queue
        if view.free_in_s is not None:
            return self._full_ahead(queue, self._most_of(queue))
        waiting, free = len(queue), view.free
        if not free or not waiting:
            return NOTHING
        share = -(-waiting // free)
        return Decision(take=min(share, self._most_of(queue)), reason="free")

    def _most_of(self, queue: QueueView) -> int:
        """Return how many of the items that wait may travel together."""
        most = self.per_hop
        if most > 1:
            for first in queue.peek(1):  # one stands for all: they are mostly alike
                most = min(most, HOP_BYTES // max(1, first.nbytes))
        return max(1, most)
