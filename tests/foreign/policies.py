"""Policies that raise: their stage fails, loudly, and so does the line of a batch function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from carpool.engine.policy import Decision, DoneBatch, Static, View
from carpool.engine.request import Request
from tests.foreign import models
from tests.foreign.batches import Batched
from tests.foreign.models import good
from tests.foreign.services import refused_to_start
from tests.foreign.table import BATCH_TASKS, BATCH_THREADS, BATCHES, SERVICES, THREADS, Way, left_out, place
from tests.foreign.ways import Refused, Told, closing, logged, raised_by
from tests.support.kinds import KINDS, fail, is_of

AHEAD, LONE, WARM_UP = "decide for a busy worker", "learn of a lone request", "learn of a warm-up"


class Switch:
    """Says where a policy raises; its copies share it.

    Attributes:
        at: Which of its methods does, if any; hits: how often it has.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.at = ""
        self.hits = 0

    def __deepcopy__(self, memo: object) -> Switch:
        return self

    def trip(self, at: str) -> None:
        """Raise, if this is the place."""
        if self.at == at:
            self.hits += 1
            fail(self.kind)


class Raises(Static):
    """A policy that raises where its switch says."""

    def __init__(self, switch: Switch, max_queue_delay_s: float = 0.01) -> None:
        super().__init__(max_queue_delay_s=max_queue_delay_s)
        self.switch = switch

    def decide(self, view: View) -> Decision:
        self.switch.trip("decide" if view.free_in_s is None else AHEAD)
        return super().decide(view)

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        self.switch.trip("arrived")

    def left(self, now: float, request: Request) -> None:
        self.switch.trip("left")

    def learn(self, now: float, done: DoneBatch) -> None:
        self.switch.trip(WARM_UP if done.is_warm_up else LONE if done.is_alone else "learn")

    @property
    def limit(self) -> int:
        self.switch.trip("limit")
        return super().limit

    @property
    def lone_slack_s(self) -> float:  # type: ignore[override]
        self.switch.trip("lone_slack_s")
        return -inf if self.switch.at == LONE else inf

    def explain(self, now: float) -> dict[str, Any]:
        self.switch.trip("explain")
        return super().explain(now)


def stage_failed(told: Told) -> None:
    """The answer to all who are inside, and all who come later."""
    assert told.code == "stage_failed", told


class Case:
    """How to have a policy asked something.

    Attributes:
        n: How many callers it takes.
        settings: Of the stage or the function; max_queue_delay_s: of the policy.
        timeout_s: Of the calls, if they are to end early.
        answered: What the calls may end with besides.
    """

    def __init__(
        self,
        n: int = 3,
        max_queue_delay_s: float = 0.01,
        timeout_s: float | None = None,
        answered: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.n = n
        self.max_queue_delay_s = max_queue_delay_s
        self.timeout_s = timeout_s
        self.answered = answered
        self.settings = settings


def asked(switch: Switch, ask: Callable[[], list[Told]]) -> list[Told]:
    """How calls ended in which the policy was asked; that takes some luck where callers are threads."""
    for _ in range(50):
        told = ask()
        if switch.hits:
            return told
    raise AssertionError("it was never asked")


CASES = {
    "decide": Case(),
    AHEAD: Case(6, answered=[""], max_batch_size=1),
    "arrived": Case(),
    "left": Case(1, 30.0, 0.02, ["deadline_exceeded"]),
    "learn": Case(answered=[""]),
    "limit": Case(answered=[""]),
}
ASKED = [*THREADS, "loop by AsyncHandle"]
ALONE = ("lone_slack_s", LONE)
SAME = "policies run in the coordinator, whatever the workers are: threads stand for all"


def row(at: str) -> str:
    """The place of a call in the table."""
    call, _, of_what = at.partition(" ")
    return f"policies: `{call}` {of_what}".rstrip()


def ask_a_line(way: Way, kind: str, at: str, case: Case) -> None:
    """The line of a batch function fails: for those inside and all later, and the log says so."""
    switch = Switch(kind)
    settings = {} if case.timeout_s is None else {"timeout_s": case.timeout_s}
    policy = Raises(switch, case.max_queue_delay_s)
    batched = Batched(way, models.slow, policy=policy, **case.settings, **settings)
    with logged() as log, closing(batched):
        switch.at = at
        told = asked(switch, lambda: batched.ask(*map(good, range(case.n))))
        if "threads" in way.name and kind == "KeyboardInterrupt":
            assert any(is_of(each.error, kind) for each in told), told  # as if it were Ctrl-C in this thread
            switch.at = ""
            assert batched.ask(good(4))[0].code in ("", "deadline_exceeded")
            return
        for each in told:
            assert each.code in ["stage_failed", *case.answered], each
        stage_failed(batched.ask(good(1))[0])
        assert any(KINDS[kind].__name__ in text for text in log.texts(level=50)), log.texts()


for at in ALONE:

    @place(row(at), BATCH_THREADS)
    def policy_alone(way: Way, kind: str, at: str = at) -> None:
        """The line fails as if `decide` had raised."""
        ask_a_line(way, kind, at, Case(1, answered=[""] if at == LONE else []))

    left_out(row(at), [*SERVICES, *BATCH_TASKS], "only threads run an item without a queue")

for at, case in CASES.items():
    asked_by = THREADS if at == AHEAD else ASKED

    @place(row(at), asked_by)
    def policy(way: Way, kind: str, at: str = at, case: Case = case) -> None:
        """Its stage fails, for those inside and all later; the log and `/readyz` say so, and closing ends."""
        switch = Switch(kind)
        model = models.slow_async if way.run_in == "loop" else models.slow
        service = way.service(model, policy=Raises(switch, case.max_queue_delay_s), **case.settings)
        with logged() as log, closing(way.open(service)) as door:
            switch.at = at
            for each in asked(switch, lambda: door.ask(*map(good, range(case.n)), timeout_s=case.timeout_s)):
                assert each.code in ["stage_failed", *case.answered], each
            stage_failed(door.ask(good(1))[0])
            assert any(KINDS[kind].__name__ in text for text in log.texts(level=50)), log.texts()
            if not way.door.endswith("Handle"):
                ready = door.get("/readyz").error
                assert isinstance(ready, Refused) and ready.status == 503

    left_out(row(at), [name for name in SERVICES if name not in asked_by], SAME)
    if at == AHEAD:
        left_out(row(at), BATCHES, "there callers run batches themselves, when they are free")
        continue

    @place(row(at), BATCHES)
    def policy_of_batch(way: Way, kind: str, at: str = at, case: Case = case) -> None:
        """So does the line of a batch function."""
        ask_a_line(way, kind, at, case)


@place(row(WARM_UP), ASKED)
def trained(way: Way, kind: str) -> None:
    """It is told of the warm-up: the service does not start."""
    switch = Switch(kind)
    switch.at = WARM_UP
    model = models.AsyncWarm if way.run_in == "loop" else models.Warm
    refused_to_start(raised_by(lambda: way.open(way.service(model, policy=Raises(switch))).close()), kind)
    assert switch.hits


@place(row("explain"), ASKED)
def explain(way: Way, kind: str) -> None:
    """Only statistics ask: they show the error, and all else goes on."""
    switch = Switch(kind)
    model = models.slow_async if way.run_in == "loop" else models.slow
    with closing(way.open(way.service(model, policy=Raises(switch)))) as door:
        switch.at = "explain"
        assert KINDS[kind].__name__ in str(door.stats().stages[0].policy)
        if not way.door.endswith("Handle"):
            assert door.get("/metrics").error is None
        assert [told.value for told in door.ask(good(1), good(2), good(3))] == [10, 20, 30]


for at in (WARM_UP, "explain"):
    left_out(row(at), [name for name in SERVICES if name not in ASKED], SAME)
left_out(row(WARM_UP), BATCHES, "batch functions have no warm-up")
left_out(row("explain"), BATCHES, "nobody can ask a batch function for its statistics")
