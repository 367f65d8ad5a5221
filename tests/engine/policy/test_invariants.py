"""What holds for every policy in every situation, those of the future included: they only have to be in `BY_NAME`.

The situations and what is checked are `carpool.testing.check_policy`, which users have for policies of their own.
"""

from __future__ import annotations

import functools

import pytest

from carpool.engine.policy import BY_NAME, Cork, Deadline, Decision, Greedy, OneByOne, Policy, QueueView, Static, View
from carpool.testing import PolicyError, check_policy
from carpool.testing.policy import MakePolicy
from tests.effort import share


@pytest.mark.parametrize("kind", [*BY_NAME.values(), OneByOne])
def test_whatever_happens(kind: type[Policy]) -> None:
    """Whatever happens, each decision of a policy is possible, repeatable and leads on, and in the
    end everybody was served or refused.
    """
    check_policy(kind, schedules=share(200))


VARIANTS = [
    functools.partial(Static, max_queued_batches=1),
    functools.partial(Static, allowed_batch_sizes=(2, 4), padding="down"),
    functools.partial(Static, allowed_batch_sizes=(3, 8), max_queued_batches=2),
    functools.partial(Static, from_idle=True),
    functools.partial(Static, from_idle=True, max_queued_batches=1),
    functools.partial(Cork, slo_s=0.06),
    functools.partial(Cork, slo_s=0.5),
    functools.partial(Deadline, cost_s=lambda n: 0.008 + 0.001 * n),
]


@pytest.mark.parametrize("make", VARIANTS, ids=lambda make: f"{make.func.__name__} {[*make.keywords]}")
def test_whatever_happens_with_settings(make: MakePolicy) -> None:
    """Policies with settings that a name alone does not give keep the same promises."""
    check_policy(make, schedules=share(200))


# -- the check itself: each way of breaking the contract is found


class Broken(Greedy):
    """A greedy policy with one thing wrong."""

    def decide(self, view: View) -> Decision:
        decision = super().decide(view)
        return decision if view.free_in_s is not None else self.spoil(decision, view.now, view.queue)

    def spoil(self, decision: Decision, now: float, queue: QueueView) -> Decision:
        raise NotImplementedError


class TakesTooMuch(Broken):
    def spoil(self, decision: Decision, now: float, queue: QueueView) -> Decision:
        return decision._replace(take=decision.take and self.limit + 1)


class TakesWithoutAWorker(Broken):
    def spoil(self, decision: Decision, now: float, queue: QueueView) -> Decision:
        return Decision(take=1, reason="free") if len(queue) else decision


class GivesNoReason(Broken):
    def spoil(self, decision: Decision, now: float, queue: QueueView) -> Decision:
        return decision._replace(reason="")


class DropsTwice(Broken):
    def spoil(self, decision: Decision, now: float, queue: QueueView) -> Decision:
        return Decision(drop=[queue.peek(1)[0]] * 2) if len(queue) > 2 else decision


class HoldsBackForEver(Broken):
    def spoil(self, decision: Decision, now: float, queue: QueueView) -> Decision:
        return Decision() if queue.size < self.limit else decision


class AsksAtOnce(Broken):
    def spoil(self, decision: Decision, now: float, queue: QueueView) -> Decision:
        return Decision(wake_at=now) if 0 < queue.size < self.limit else decision


class ChangesItsMind(Broken):
    asked = 0

    def spoil(self, decision: Decision, now: float, queue: QueueView) -> Decision:
        self.asked += 1
        return decision._replace(reason=f"number {self.asked}") if decision.take else decision


class RefusesEverybody(Broken):
    def spoil(self, decision: Decision, now: float, queue: QueueView) -> Decision:
        return Decision(drop=list(queue))


class TakesTooMuchAhead(Greedy):
    def decide(self, view: View) -> Decision:
        return super().decide(view) if view.free_in_s is None else Decision(take=view.queue.size + 1, reason="full")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (TakesTooMuch, "the policy takes"),
        (TakesTooMuchAhead, "ahead"),
        (TakesWithoutAWorker, "while no worker is free"),
        (GivesNoReason, "must name a reason"),
        (DropsTwice, "dropped twice"),
        (HoldsBackForEver, "does not say when to ask again"),
        (AsksAtOnce, "at once"),
        (ChangesItsMind, "asked twice"),
        (RefusesEverybody, "lone request with a lot of time is refused"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_policy_is_found(kind: type[Policy], why: str) -> None:
    """A policy that breaks a promise is named together with the seed that shows it again."""
    with pytest.raises(PolicyError, match=rf"{why}.* \(seed \d+\)") as caught:
        check_policy(kind, schedules=50)
    seed = int(str(caught.value).rpartition("seed ")[2].rstrip(")"))
    with pytest.raises(PolicyError) as again:
        check_policy(kind, schedules=1, seed=seed)
    assert str(again.value) == str(caught.value)
