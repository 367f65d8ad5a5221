"""The policy of a stage whose model takes single items: one call per item, several items per hop.

Sending one item to a worker process and its answer back costs a fixed hop (some 20-50 µs). When an
item takes far less than that, going one at a time would leave the worker idle most of the time. So
the number of items in one frame follows their learned time: as many as fit into `HOP_BUDGET_S` of
work, shared out evenly among the free workers.
"""

from __future__ import annotations

from carpool.policy.base import NOTHING, Decision, Policy, QueueView

HOP_BUDGET_S = 0.001  # of work in one frame, about, so that no item waits long behind its frame-mates
MOST_IN_A_HOP = 128


class OneByOne(Policy):
    """Take single items; up to `per_hop` of them travel together.

    Attributes:
        item_s: Smoothed seconds of an item; None until one has run.
        per_hop: How many items may travel together now. It is asked for several times for each
            item, so it is worked out when an item has run.
    """

    def __init__(self, max_batch_size: int | None = None, max_queue_delay_s: float | None = None) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        self.item_s: float | None = None
        self.per_hop = 1

    @property
    def limit(self) -> int:
        return self.per_hop

    def completed(self, now: float, n: int, size: int, busy_s: float, ok: bool) -> None:
        item_s = busy_s / n
        if self.item_s is None or item_s > self.item_s:
            self.item_s = item_s  # slower than thought: believe it at once, others wait behind it in the frame
        else:
            self.item_s += 0.2 * (item_s - self.item_s)
        self.per_hop = max(1, min(MOST_IN_A_HOP, int(HOP_BUDGET_S / max(self.item_s, 1e-9))))

    def lets_go(self, slack_s: float) -> bool:
        return True

    def went_alone(self, began: float, now: float, busy_s: float, ok: bool) -> None:
        """Fast path of `decide` and `completed`; see tests/drive/test_lending.py."""
        self.completed(now, 1, 1, busy_s, ok)

    def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:
        waiting = len(queue)
        if not free or not waiting:
            return NOTHING
        share = -(-waiting // free)
        return Decision(take=min(share, self.per_hop), reason="free")

    def decide_ahead(self, now: float, queue: QueueView, free_in_s: float) -> Decision:
        return self._full_ahead(queue)
