"""Policies of the interface that carpool had before, behind the present one.

Such a policy derives from `Policy` and overrides `decide(now, queue, free, busy)`, and perhaps some
of the calls of `FormerCalls`. One that derives from a built-in policy and overrides such calls
cannot be served this way, since what it calls by `super()` has changed, too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from math import inf
from typing import Any, Final, cast

from carpool.engine.policy.base import NOTHING, Decision, DoneBatch, Policy, View
from carpool.engine.request import Request


class FormerCalls(Policy):
    """What a policy of the former interface finds at its base: calls that do nothing."""

    hop_s = last_hop_s = gap_s = onward_s = 0.0
    running = 0
    runs_ahead = is_first_call = False
    safe_padded_size = most_padded = inf  # type: ignore[assignment]
    warm_keys: Collection[Hashable] = ()

    def arrived_together(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            self.arrived(now, request)

    def completed(self, *about: Any) -> None: ...

    arrived: Any = completed
    served = trained_at = trained = completed

    def decide_ahead(self, *about: Any) -> Decision:
        return NOTHING

    def predicted_wait_s(self, waiting: int, workers: int) -> float | None:
        return None

    def explain(self, now: float) -> dict[str, Any]:
        return {**super().explain(now), "hop_s": self.hop_s}


_GONE: Final = (
    *("arrived_together", "completed", "served", "trained_at", "trained", "decide_ahead"),
    *("lets_go", "went_alone", "predicted_wait_s", "started", "stepped"),
)


def adapted(policy: Policy) -> Policy:
    """Return a policy of either interface as one of the present. Raises what `is_former` does."""
    return Adapted(policy) if is_former(type(policy)) else policy


def is_former(kind: type[Policy]) -> bool:
    """Report whether the `decide` of a class is one of the former interface.

    Raises:
        TypeError: It derives from a built-in policy and overrides calls of the former interface.
    """
    decide: Any = kind.decide
    built_in = next(base for base in kind.__mro__ if base.__module__.startswith(f"{__package__}."))
    gone = [name for name in _GONE if hasattr(kind, name)] if decide is built_in.decide else []  # type: ignore[attr-defined]
    while hasattr(decide, "__wrapped__"):
        decide = decide.__wrapped__
    code = getattr(decide, "__code__", None)
    is_old = code is not None and code.co_argcount - len(decide.__defaults__ or ()) > len(("self", "view"))
    if built_in is not Policy and (is_old or gone):
        raise TypeError(
            f"{kind.__name__} derives from {built_in.__name__}, which has no"
            f" {'decide(now, queue, free, busy)' if is_old else gone[0]} any more: write decide(view), arrived(now,"
            " requests), left(now, request), learn(now, done) and explain(now), see carpool.Policy"
        )
    return is_old


class Adapted(Policy):
    """A policy of the former interface, which is asked and told what it was then.

    Args:
        former: The policy, with all its settings.

    Attributes:
        former: The same.
    """

    def __init__(self, former: Policy) -> None:
        super().__init__(former.max_batch_size, former.max_queue_delay_s)
        self.allowed_batch_sizes = former.allowed_batch_sizes
        self.max_padded_size, self.allowed_lengths = former.max_padded_size, former.allowed_lengths
        kind = type(former)
        former.__class__ = type(kind.__name__, (kind, FormerCalls), {"__module__": kind.__module__})
        self.former: Any = former
        self._view: View | None = None

    @property
    def limit(self) -> int:
        return cast("int", self.former.limit)

    @property
    def predicts(self) -> bool:
        """Whether it says itself how long requests wait."""
        return type(self.former).predicted_wait_s is not FormerCalls.predicted_wait_s

    def decide(self, view: View) -> Decision:
        former, self._view = self.former, view
        self._show(view)
        if view.free_in_s is not None:
            return cast("Decision", former.decide_ahead(view.now, view.queue, view.free_in_s))
        return cast("Decision", former.decide(view.now, view.queue, view.free, view.busy))

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        self.former.arrived_together(now, requests)

    def left(self, now: float, request: Request) -> None:
        self.former.left(now, request)

    def learn(self, now: float, done: DoneBatch) -> None:
        former = self.former
        if done.is_warm_up:
            if done.longest:
                former.trained_at(done.n, done.longest, done.busy_s)
            else:
                former.trained(done.n, done.size, done.busy_s)
            return
        if self._view is not None:
            self._show(self._view)
        former.last_hop_s, former.is_first_call = done.hop_s, done.is_first
        if done.longest:
            former.served(now, done.n, done.longest, done.requests, done.busy_s, done.ok, done.is_switch)
        former.completed(now, done.n, done.size, done.busy_s, done.ok)

    def wait_s(self, waiting: int, workers: int) -> float | None:
        """Return how long a request waits with so much queued before it, if the policy says so."""
        return cast("float | None", self.former.predicted_wait_s(waiting, workers))

    def explain(self, now: float) -> dict[str, Any]:
        return cast("dict[str, Any]", self.former.explain(now))

    def _show(self, view: View) -> None:
        """Write on the policy all that it could read there."""
        former = self.former
        for name in ("hop_s", "gap_s", "onward_s", "running", "runs_ahead", "warm_keys", "safe_padded_size"):
            setattr(former, name, getattr(view, name))
        former.most_padded = min(former.max_padded_size, view.safe_padded_size)
