"""What others do with requests of different lengths: rules to set beside carpool's own.

They are told the true cost of a batch, which no user knows, and refuse at once what would be late
even alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from bench.shapes.workloads import Kind, Workload
from carpool.engine.core.batch import WarmUpBatch
from carpool.engine.policy import Decision, DoneBatch, Policy, QueueView, View
from carpool.engine.policy.base import NOTHING
from carpool.engine.request import QUEUED, Request
from carpool.simulate.costs import Cost, cost_of
from carpool.simulate.features import lengths_of, sample_of
from carpool.simulate.policies import policy_of

OURS = "carpool"
PLAIN = "plain order"
PLAIN_BACK = "plain order, clients back first"
_MOMENT_S = 1e-6  # in which clients that ask again at once are back


class _Told(Policy):
    """Base of rules that know the true cost."""

    def __init__(self, cost: Cost, max_batch_size: int | None = None) -> None:
        super().__init__(max_batch_size)
        self._cost = cost

    def _hopeless(self, now: float, queue: QueueView) -> list[Request]:
        """Those that would be late even alone."""
        if queue.earliest_due == float("inf"):
            return []
        return [r for r in queue if now + self._cost(1, r.length) > r.due]


class PlainOrder(_Told):
    """First come, first served; the head is refused if the batch that it would go in is late."""

    def decide(self, view: View) -> Decision:
        now, queue = view.now, view.queue
        if not view.free or not len(queue):
            return NOTHING
        waiting = list(queue)
        late = 0
        while late < len(waiting):
            batch = waiting[late : late + self.limit]
            if now + self._cost(len(batch), max(r.length for r in batch)) <= batch[0].due:
                break
            late += 1
        batch = waiting[late : late + self.limit]
        return Decision(drop=waiting[:late], take=len(batch), chosen=batch, reason="free")


class PlainOrderBack(PlainOrder):
    """Plain order in closed loops whose clients are back before the next batch goes.

    Such loops never split into groups that alternate, whose smaller batches hold less padding.
    """

    _done_at = -1.0

    def learn(self, now: float, done: DoneBatch) -> None:
        self._done_at = now

    def decide(self, view: View) -> Decision:
        if view.now == self._done_at:
            return Decision(wake_at=view.now + _MOMENT_S)
        return super().decide(view)


class WholeHead(_Told):
    """As many as the user's code may have at once, which sorts them by itself."""

    def decide(self, view: View) -> Decision:
        now, queue = view.now, view.queue
        if not view.free or not len(queue):
            return NOTHING
        hopeless = self._hopeless(now, queue)
        gone = set(map(id, hopeless))
        batch = list(islice((r for r in queue if id(r) not in gone), self.limit))
        return Decision(drop=hopeless, take=len(batch), chosen=batch, reason="free")


class Infinity(_Told):
    """The rule of Infinity (`infinity_emb` 0.0.78).

    Eight batches' worth from the head are sorted by length and cut into batches, which all run
    before anything else is looked at. Source: `inference/queue.py`, `CustomFIFOQueue`.
    """

    def __init__(self, cost: Cost, size: int, max_batch_size: int | None = None) -> None:
        super().__init__(cost, max_batch_size)
        self._size = size
        self._ready: list[list[Request]] = []

    def decide(self, view: View) -> Decision:
        now, queue = view.now, view.queue
        if not view.free or not len(queue):
            return NOTHING
        hopeless = self._hopeless(now, queue)
        gone = set(map(id, hopeless))
        kept = ([r for r in batch if r.state == QUEUED and id(r) not in gone] for batch in self._ready)
        self._ready = [batch for batch in kept if batch]
        if not self._ready:
            head = islice((r for r in queue if id(r) not in gone), 8 * self._size)
            by_length = sorted(head, key=lambda r: r.length)
            self._ready = [by_length[i : i + self._size] for i in range(0, len(by_length), self._size)]
        batch = self._ready[0] if self._ready else []
        return Decision(drop=hopeless, take=len(batch), chosen=batch, reason="free")


@dataclass(frozen=True, slots=True)
class Rule:
    """Who takes part.

    Attributes:
        policy: Makes the policy for a workload.
        changed: Makes the settings of a workload those of this rule.
    """

    policy: Callable[[Workload], Policy]
    changed: Callable[[dict[str, Any]], dict[str, Any]] = dict


def _told(make: Callable[[Cost], Policy]) -> Callable[[Workload], Policy]:
    return lambda workload: make(cost_of(workload.settings["cost"]))


def _inside(settings: dict[str, Any]) -> dict[str, Any]:
    """The user's code takes twice as many, and runs them by length in eights."""
    return {**settings, "max_batch_size": 2 * settings["max_batch_size"], "cost": settings["cost"] + "+sorted:size=8"}


def trained(workload: Workload, *, with_lengths: bool) -> Policy:
    """Our default as a warm-up leaves it: a few sizes, of short, middling and long requests."""
    settings = workload.settings
    cost, limit = cost_of(settings["cost"]), settings["max_batch_size"]
    policy = policy_of("adaptive", max_batch_size=limit, slo_s=settings["slo_s"], cost_s=cost)
    lengths = sorted(sample_of(lengths_of(settings["lengths"])))
    for n in (1, limit // 4, limit // 2, limit) * 2:
        for share in (0.1, 0.5, 0.99) if with_lengths else (0.9,):
            longest = lengths[int(share * len(lengths))]
            if with_lengths:
                policy.learn(0.0, WarmUpBatch(0.0, 0, n, n, longest, cost(n, longest)))
            policy.learn(0.0, WarmUpBatch(0.0, 0, n, n, 0, cost(n, longest)))
    return policy


RULES: dict[str, Rule] = {
    PLAIN: Rule(_told(PlainOrder)),
    PLAIN_BACK: Rule(_told(PlainOrderBack)),
    "carpool without length=": Rule(
        partial(trained, with_lengths=False), lambda settings: {**settings, "lengths_known": False}
    ),
    "sorted inside": Rule(_told(WholeHead), _inside),
    "Infinity, 8": Rule(_told(partial(Infinity, size=8))),
    "Infinity, 32": Rule(_told(partial(Infinity, size=32))),
    OURS: Rule(partial(trained, with_lengths=True)),
}
"""By name; the first one is what the others are compared with."""


def in_kind(kind: Kind, rules: Sequence[str]) -> list[str]:
    """Return those of the rules that differ from the others in workloads of a kind."""
    return [rule for rule in rules if kind == "closed" or rule != PLAIN_BACK]


def names_of(text: str) -> list[str]:
    """The rules of a list; an entry that is no name stands for those that begin so."""
    parts = [part.strip() for part in text.split(";")]
    return [name for name in RULES if name in parts or any(name.startswith(p) for p in parts if p not in RULES)]
