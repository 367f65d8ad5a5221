"""Policies that raise, anywhere and anything: their stage goes on without them, and the driver hears of it once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from carpool.engine.core.batch import Batch
from carpool.engine.core.core import Core
from carpool.engine.policy import Decision, DoneBatch, Policy, View
from carpool.engine.request import DONE, Request
from carpool.errors import ModelError, Unavailable
from tests.support.pipelines import Scripted, ask, asks, outcome, pipeline_of, reply, stage

CALLS = ("decide", "arrived", "left", "learn", "limit")
KINDS: tuple[type[BaseException], ...] = (
    *(ValueError, RuntimeError, StopIteration, GeneratorExit, KeyboardInterrupt, SystemExit, RecursionError),
)


class Raising(Policy):
    """A plain policy of batches of two, which drops what is marked; from the n-th time that `call` is made, it raises
    each time."""

    def __init__(self, call: str, n: int, kind: type[BaseException]) -> None:
        super().__init__(2)
        self.call = call
        self._left = n
        self._kind = kind
        self.raised = False

    def _may(self, call: str) -> None:
        if call == self.call:
            self._left -= 1
            self.raised = self.raised or self._left < 0
        if self.raised and call == self.call:
            raise self._kind("of the policy")

    def decide(self, view: View) -> Decision:
        queue = view.queue
        if view.free_in_s is not None:
            self._may("decide ahead")
            return self._full_ahead(queue)
        self._may("decide")
        drop = [request for request in queue if request.item == "drop"]
        return Decision(drop, min(2, queue.size - len(drop)) if view.free else 0, "free")

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._may("arrived")

    def left(self, now: float, request: Request) -> None:
        self._may("left")

    def learn(self, now: float, done: DoneBatch) -> None:
        self._may("learn")

    @property
    def limit(self) -> int:
        self._may("limit")
        return 2


class Story:
    """A small run in which everything happens to a pipeline of two stages, with one policy or two."""

    def __init__(self, first: Policy, second: Policy) -> None:
        self.line = pipeline_of(
            stage(policy=first, max_size=4, name="a"), stage(policy=second, max_size=4, name="b"), workers=[2, 1]
        )
        self.faults: list[tuple[str, type[BaseException]]] = []
        for batcher in self.line.crews:
            batcher.lobby.on_fault = lambda name, error: self.faults.append((name, type(error)))
        self.given: list[Request] = []
        self.gone: list[Request] = []
        self.told: Counter[Request] = Counter()
        self.sent: list[Batch] = []

    def steps(self) -> list[Callable[[], object]]:
        """What happens, one after the other."""
        core = self.line
        low, cancelled = ask("low", priority=-1), ask("cancelled")
        return [
            lambda: core.crews[0].trained(0, 1, 1, 0.5),
            lambda: self.submit(0, [ask("1"), ask("2"), ask("3", 9), ask("4")]),
            lambda: self.poll(0),
            lambda: self.submit(1, [ask("5", 3), low, cancelled, ask("drop")]),
            lambda: self.submit(1, [ask("high", priority=5), ask("patient", patient=True), ask("6")]),
            lambda: self.submit(1, [ask("never", 1.5), ask("7", patient=True), ask("8", patient=True)]),
            lambda: self.cancel(2, cancelled),
            lambda: self.poll(4),
            lambda: self.answer(5),
            lambda: self.poll(5),
            lambda: core.worker_left(6, 0, 0),
            lambda: core.worker_lost(6, 0, 1),
            lambda: self.poll(6),
            lambda: core.worker_ready(0, 0),
            lambda: core.worker_ready(0, 1),
            lambda: self.poll(7),
            lambda: self.answer(8),
            lambda: self.poll(10),
            lambda: self.submit(11, asks(["9", "10", "11"], 60)),
            lambda: self.poll(11),
            lambda: self.submit(12, asks(["12", "13", "drop"], 13)),
            lambda: core.close(Unavailable("closed")),
            lambda: self.poll(14),
            lambda: self.answer(15),
        ]

    def submit(self, now: float, requests: list[Request]) -> None:
        self.given += requests
        self.line.flow.submit(now, requests)

    def cancel(self, now: float, request: Request) -> None:
        self.gone.append(request)
        self.line.cancel(now, request)

    def poll(self, now: float) -> None:
        todo = self.line.poll(now)
        self.sent += todo.run
        self.told.update(todo.answer)

    def answer(self, now: float) -> None:
        """Each worker that has a batch replies."""
        for batch in [batch for batch in self.sent if self._is_at_work(batch)]:
            self.sent.remove(batch)
            reply(self.line, now, batch)

    def _is_at_work(self, batch: Batch) -> bool:
        return self.line.crews[batch.stage].in_flight.get(batch.place) is batch

    def end(self) -> None:
        """As a driver that aborts soon after it has heard of a fault."""
        self.line.abort(20, Unavailable("the policy is broken"))
        self.poll(20)
        self.submit(21, asks("late", patient=True))
        for batch in [batch for one in self.line.crews for batch in one.handed_over]:
            reply(self.line, 22, batch)
        self.poll(23)


@pytest.mark.fault("F73")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("where", [0, 1])
def test_a_stage_goes_on_without_its_policy(call: str, kind: type[BaseException], where: int) -> None:
    """Whichever call of a policy raises, and at whichever time, nothing is raised to who drives the
    stage, its driver hears of it once, and each request is answered once.
    """
    n = 0
    while True:
        broken = Raising("", n, kind)
        whole = Raising("", 0, kind)
        story = Story(*((broken, whole) if where == 0 else (whole, broken)))
        broken.call = call
        for step in story.steps():
            step()
        story.end()

        assert {request.item for request in story.given if request.state != DONE} == set()
        for request in story.given:
            assert story.told[request] == (request not in story.gone), (n, request.item)
        assert (story.line.unanswered, story.line.waiting) == (0, 0)
        assert story.faults == ([("ab"[where], kind)] if broken.raised else [])
        if not broken.raised:
            break
        n += 1
    assert n or where


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_goes_ahead_by_a_policy_that_raises(kind: type[BaseException]) -> None:
    """If a policy raises when it is asked for a batch ahead, the stage goes on: the greedy rule says
    what goes to the busy worker, and those that lie ahead already are answered.
    """
    policy = Raising("decide ahead", 2, kind)
    core = pipeline_of(stage(policy=policy, runs_ahead=True), workers=2)
    faults: list[str] = []
    core.crews[0].lobby.on_fault = lambda name, error: faults.append(name)
    core.crews[0].times.usual_s = 2**-6  # as if it had run before
    requests = asks(map(str, range(8)))
    core.flow.submit(0, requests)
    assert len(core.poll(0).run) == 2
    core.poll(2**-6 - 2**-8)
    assert faults == ["stage"]
    now = 1.0
    while core.unanswered:
        for batch in list(core.crews[0].in_flight.values()):
            reply(core, now, batch)
        now += 1.0
        core.poll(now)
    assert [outcome(request) for request in requests] == [f"{i}'" for i in range(8)]


def test_without_a_driver_that_takes_faults_they_are_raised() -> None:
    """In a pipeline of which nobody takes the faults, as in a simulation, a policy's error is raised."""
    core = pipeline_of(stage(policy=Raising("decide", 0, LookupError)))
    core.flow.submit(0, asks("a"))
    with pytest.raises(LookupError, match="of the policy"):
        core.poll(0)


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (Decision(take=3, reason="free"), "asked for a batch of 3 with 1 free workers and a limit of 2"),
        (Decision(take=-1), "asked for a batch of -1"),
        (Decision(drop=asks("z")), "drops what is not queued"),
        (Decision(take=1, reason="free", chosen=asks("z")), "chooses what is not queued"),
        (None, "'NoneType' object has no attribute 'take'"),
    ],
    ids=["too much", "negative", "drop", "chosen", "nothing"],
)
def test_what_is_not_possible_is_a_fault(decision: Any, text: str) -> None:
    """A policy that asks for what cannot be is done without, too, and nothing of its decision is done."""
    core = pipeline_of(stage(policy=Scripted(decision, 2)))
    faults: list[str] = []
    core.crews[0].lobby.on_fault = lambda name, error: faults.append(str(error))
    requests = asks("abc")
    core.flow.submit(0, requests)
    (batch,) = core.poll(0).run
    assert len(faults) == 1
    assert text in faults[0]
    assert batch.requests == requests[:2]


def test_the_story_is_one_of_everything() -> None:
    """The run that these tests use makes each call of a policy and gives each kind of answer."""
    heard: set[str] = set()

    class Listening(Raising):
        def _may(self, call: str) -> None:
            heard.add(call)

    story = Story(Listening("", 0, ValueError), Listening("", 0, ValueError))
    for step in story.steps():
        step()
    story.end()

    assert heard == set(CALLS)
    assert {type(request.error).__name__ for request in story.given} >= {
        *("NoneType", "DeadlineExceeded", "Overloaded", "Unavailable")
    }


def test_a_policy_that_takes_no_whole_number_changes_nothing() -> None:
    """A policy that asks for a number of requests which is not a whole one changes neither the
    queue nor the workers, and the error says so.
    """

    class Half(Policy):
        def decide(self, view: View) -> Decision:
            return Decision(take=1.5)  # type: ignore[arg-type]

    core = pipeline_of(stage(policy=Half(2)))
    core.flow.submit(0, asks("ab"))
    with pytest.raises(TypeError):
        core.poll(0)

    assert (core.waiting, core.crews[0].idle) == (2, 1)


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("kind", [*KINDS, MemoryError, _Unspeakable])
def test_an_item_that_cannot_be_weighed_fails_alone(kind: type[BaseException]) -> None:
    """Whatever `size=` of the next stage raises, the caller of that item hears of it and the others
    go on.
    """

    def weigh(request: Request, result: object) -> None:
        if result == "b'":
            raise kind("of the user")

    core: Core = pipeline_of(stage(), stage(weigh=weigh))
    requests = asks("abc")
    core.flow.submit(0, requests)
    reply(core, 1, core.poll(0).run[0])
    (batch,) = core.poll(1).run
    reply(core, 2, batch)

    results: list[Any] = [outcome(request) for request in requests]
    assert results == ["a''", ModelError, "c''"]
    assert str(requests[1].error) == f"size= of stage stage raised {kind.__name__}"
