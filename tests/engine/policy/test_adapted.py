"""Policies of the interface that carpool had before: what they decide and hear is what it was then."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest

import carpool
from carpool.engine.policy import Decision, Greedy, Policy, QueueView, Static, View, adapted, new_policy
from carpool.engine.policy.adapted import Adapted
from carpool.engine.policy.base import NOTHING, name_of
from carpool.engine.request import Request
from carpool.simulate import run
from carpool.testing import PolicyError, check_policy
from tests.support.view import ahead_of, done, view_of, waiting, warm_up

FORMER = r"decide takes \(now, queue, free, busy\)"


class Former(Policy):
    """Greedy, as it was written then, with notes of all that it hears."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.heard: list[Any] = []

    def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:  # type: ignore[override]
        n = min(queue.size, self.limit) if free else 0
        return Decision(take=n, reason="full" if n == self.limit else "free" if n else "")

    def decide_ahead(self, now: float, queue: QueueView, free_in_s: float) -> Decision:
        self.heard.append(("ahead", free_in_s, self.gap_s, self.running))  # type: ignore[attr-defined]
        return self._full_ahead(queue)

    def arrived(self, now: float, request: Request) -> None:  # type: ignore[override]
        self.heard.append(("arrived", request.arrived))

    def arrived_together(self, now: float, requests: Sequence[Request]) -> None:
        super().arrived_together(now, requests)  # type: ignore[misc]
        self.heard.append(("together", len(requests)))

    def served(self, now: float, n: int, longest: int, *about: Any) -> None:
        self.heard.append(("served", n, longest))

    def completed(self, now: float, n: int, size: int, busy_s: float, ok: bool) -> None:
        self.heard.append(("completed", n, size, busy_s, ok, self.hop_s, self.last_hop_s))  # type: ignore[attr-defined]

    def trained(self, n: int, size: int, busy_s: float) -> None:
        self.heard.append(("trained", n, size, busy_s))

    def trained_at(self, n: int, longest: int, busy_s: float) -> None:
        self.heard.append(("trained at", n, longest, busy_s))


class Lazy(Policy):
    """One that has nothing but a rule."""

    def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:  # type: ignore[override]
        return Decision(take=min(queue.size, self.limit) if free else 0, reason="free" if free and queue.size else "")


def test_it_decides_as_ever() -> None:
    """Behind the adapter a policy comes to the same batches as its twin of the present interface."""
    settings: Any = {"arrivals": "poisson:rho=0.9", "cost": "affine:a=4ms,b=1ms", "duration_s": 5, "seed": 3}
    with pytest.warns(DeprecationWarning, match=FORMER):
        former = run(Former(), **settings).to_dict()
    assert {**former, "policy": "greedy"} == run("greedy", **settings).to_dict()


def test_it_hears_what_it_did() -> None:
    """Each call of the present interface becomes the calls of then, and all attributes are there."""
    former = Former(4)
    policy = Adapted(former)
    queue = waiting(1.0, 2.0)
    policy.learn(0.0, warm_up(2, 6, 0.5))
    policy.learn(0.0, warm_up(2, 2, 0.5, longest=7))
    policy.arrived(2.0, queue.peek(2))
    assert policy.decide(view_of(2.0, queue, 1, 0, hop_s=0.25)) == Decision(take=2, reason="free")
    policy.learn(3.0, done(2, 2, 0.75, True, longest=9, hop_s=0.125))
    assert policy.decide(ahead_of(3.0, queue, 1.5, gap_s=0.5, running=3)) is NOTHING
    assert former.heard == [
        ("trained", 2, 6, 0.5),
        ("trained at", 2, 7, 0.5),
        *[("arrived", 1.0), ("arrived", 2.0), ("together", 2)],
        ("served", 2, 9),
        ("completed", 2, 2, 0.75, True, 0.25, 0.125),
        ("ahead", 1.5, 0.5, 3),
    ]
    assert policy.lone_slack_s == inf
    assert policy.explain(0.0) == {"policy": "Former", "max_batch_size": 4, "hop_s": 0.0}
    assert name_of(policy) == "Former"


def test_what_it_does_not_override_does_nothing() -> None:
    """A policy that has only a rule is told nothing that it could not bear."""
    policy = Adapted(Lazy(4))
    policy.arrived(1.0, waiting(1.0).peek(1))
    policy.left(1.0, waiting(1.0).peek(1)[0])
    for each in (warm_up(1, 1, 0.5), warm_up(1, 1, 0.5, longest=3), done(1, 1, 0.5, True, longest=3)):
        policy.learn(1.0, each)
    assert policy.decide(ahead_of(1.0, waiting(1.0), 0.5)) is NOTHING
    assert not policy.predicts


def test_who_still_has_one_is_warned_at_its_line() -> None:
    """The warning is about the line of the user's own `decide`, where the policy is declared."""
    with pytest.warns(DeprecationWarning, match=f"Former.{FORMER}") as caught:
        carpool.Service(carpool.Stage(abs, max_batch_size=4, policy=Former()))
    assert caught[0].filename == __file__
    assert caught[0].lineno == inspect.getsourcelines(Former.decide)[1]


def test_a_former_policy_is_checked_too() -> None:
    """`check_policy` examines a policy of either interface."""

    class TakesTooMuch(Lazy):
        def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:  # type: ignore[override]
            return Decision(take=self.limit + 1, reason="free") if free and queue.size else NOTHING

    with pytest.warns(DeprecationWarning, match=FORMER):
        check_policy(Lazy, schedules=20)
    with pytest.warns(DeprecationWarning, match=FORMER), pytest.raises(PolicyError, match="takes"):
        check_policy(TakesTooMuch, schedules=20)


class OldRule(Greedy):
    """Overrides the rule of a built-in policy as it was written then."""

    def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:  # type: ignore[override]
        return super().decide(now, queue, free, busy)  # type: ignore[call-arg, arg-type]


class OldLessons(Static):
    """Listens to a call that built-in policies do not have any more."""

    def completed(self, now: float, n: int, size: int, busy_s: float, ok: bool) -> None:
        raise AssertionError("nobody calls this")


@pytest.mark.parametrize(
    ("policy", "text"),
    [(OldRule(), "OldRule derives from Greedy, which has no decide"), (OldLessons(), "Static, which has no completed")],
    ids=["decide", "completed"],
)
def test_what_would_not_be_called_is_refused(policy: Policy, text: str) -> None:
    """A class that changes a built-in policy by calls that are gone is refused where it is declared."""
    with pytest.raises(TypeError, match=text):
        new_policy(policy, 4)
    with pytest.raises(TypeError, match=text):
        carpool.Service(carpool.Stage(abs, max_batch_size=4, policy=policy))


def test_a_policy_of_the_present_interface_is_itself() -> None:
    """Nothing is put before a policy that needs no adapter, whatever else its class has."""

    class Own(Policy):
        def decide(self, view: View) -> Decision:
            return NOTHING

        def completed(self) -> None:
            """Do something of its own."""

    for policy in (Own(), Static(), Greedy()):
        assert adapted(policy) is policy
