"""Each fast path of the core beside the slow one that it stands for: the same outcome, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.journal import Journal
from carpool.engine.policy import Decision, Greedy, Policy, QueueView, Static
from carpool.engine.policy.adapted import Adapted
from carpool.engine.request import DEFAULT_LANE, Lane, Request
from tests.support.pipelines import Listed, pipeline_of, reply, stage, together
from tests.support.properties import PROPERTY


class Prophet(Policy):
    """Greedy, of the former interface, with a prediction of its own."""

    def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:  # type: ignore[override]
        return Decision(take=min(queue.size, self.limit) if free else 0, reason="free")

    def predicted_wait_s(self, waiting: int, workers: int) -> float | None:
        return 3.0 * waiting + 1.0


POLICIES: dict[str, Callable[[int], Policy]] = {
    "greedy": Greedy,
    "static": lambda limit: Static(limit, 2.0),
    "prophet": lambda limit: Adapted(Prophet(limit)),
}


@dataclass(frozen=True)
class Service:
    """What is to be made, once for each of the twins."""

    policy: str
    limit: int
    max_size: float
    max_bytes: float
    workers: int
    stages: int
    slo_s: float | None

    def make(self) -> Core:
        settings = {"max_size": self.max_size, "max_bytes": self.max_bytes}
        first = stage(policy=POLICIES[self.policy](self.limit), **settings)
        others = [stage(self.limit) for _ in range(self.stages - 1)]
        return pipeline_of(first, *others, workers=self.workers, slo_s=self.slo_s)


LANES = (DEFAULT_LANE, Lane(1, None, 0))  # by priority; each is one object, as with drivers


@dataclass(frozen=True)
class Spec:
    """A request to be made, once for each of the twins."""

    timeout_s: float = inf
    due_in_s: float = inf
    size: int = 1
    nbytes: int = 0
    priority: int = 0
    patient: bool = False
    bulk: bool = False
    cancelled: bool = False
    n: int = 1

    def make(self, now: float, to: Side) -> list[Request]:
        """A lot of `n` requests; the first one may have been cancelled."""
        made = [Listed(len(to.requests) + i, now + self.timeout_s, nbytes=self.nbytes) for i in range(self.n)]
        for request in made:
            request.due = min(request.due, now + self.due_in_s)
            request.size, request.patient, request.bulk = self.size, self.patient, self.bulk
            request.lane = LANES[self.priority]
        if self.cancelled:
            to.core.cancel(now, made[0])
        to.requests += made
        return together(made)


class Side:
    """One of the twins, and what its drivers and callers have seen."""

    def __init__(self, service: Service) -> None:
        self.core = service.make()
        self.requests: list[Request] = []
        self.running: list[Batch] = []
        self.answers: list[Request] = []

    def play(self, now: float, step: str, argument: Any) -> None:
        if step == "submit":
            self.core.flow.submit(now, [request for spec in argument for request in spec.make(now, self)])
        elif step == "submit alike":
            alike, n = argument
            self.core.flow.submit(now, [request for _ in range(n) for request in alike.make(now, self)], alike=True)
        elif step == "cancel" and self.requests:
            self.core.cancel(now, self.requests[argument % len(self.requests)])
        elif step == "reply" and self.running:
            batch = self.running.pop(argument % len(self.running))
            reply(self.core, now, batch, compute=lambda item: item, busy_s=0.5)
        todo = self.core.poll(now)
        self.running += todo.run
        self.answers += todo.answer

    @property
    def seen(self) -> list[object]:
        """All that must be the same."""
        to = self.core
        return [
            [_told(request) for request in self.requests],
            [request.item for request in self.answers],
            [(batch.id, batch.stage, batch.place, batch.ids, batch.started, batch.reason) for batch in self.running],
            (to.flow.admitted, to.flow.refused, to.flow.answered, to.flow.cancelled, to.waiting),
            [_counted(batcher) for batcher in to.batchers],
        ]


def _told(request: Request) -> tuple[object, ...]:
    came = (
        getattr(request, "admitted", None),
        getattr(request, "arrived", None),
    )  # not set where it was cancelled before
    times = *came, request.due, request.deadline
    error = request.error
    retry_after_s = getattr(error, "retry_after_s", None)
    return (
        request.id,
        request.state,
        getattr(request.node, "name", None),
        times,
        request.result,
        type(error),
        str(error),
        retry_after_s,
    )


def _counted(batcher: Batcher) -> tuple[object, ...]:
    times = batcher.times.usual_s, batcher.times.fastest_s
    due = batcher.lobby.wake_at, batcher.lobby.attention_at
    learned = batcher.times.hop_s, *times
    queue = batcher.queue
    held = queue.count, queue.size, queue.nbytes, queue.earliest_deadline, queue.earliest_due, queue.oldest_arrival
    entered = batcher.lobby.entered, held
    return (batcher.running, batcher.idle, batcher.late_results, batcher.stray_replies, learned, due, entered)


def admits_one_by_one(side: Side) -> None:
    side.core.flow._admit_at_once = lambda now, requests, alike: False  # type: ignore[method-assign]


def submits_alike_like_others(side: Side) -> None:
    submit = side.core.flow.submit
    side.core.flow.submit = lambda now, requests, alike=False: submit(now, requests)  # type: ignore[method-assign]


def queues_one_by_one(side: Side) -> None:
    for batcher in side.core.batchers:
        push = batcher.queue.push
        batcher.queue.push_in_order = lambda requests, nbytes, dues_differ, push=push: push(requests)  # type: ignore[method-assign]


def answers_one_by_one(side: Side) -> None:
    side.core._journal = side.core._transit.journal = Journal()


def takes_all_replies_for_partial(side: Side) -> None:
    for batcher in side.core.batchers:
        batcher.completed = _in_parts(batcher)  # type: ignore[method-assign]


def _in_parts(batcher: Batcher) -> Callable[..., Sequence[Request | None]]:
    completed = batcher.completed
    return lambda now, place, batch_id, ids, *said, **more: completed(now, place, batch_id, tuple(ids), *said, **more)


services = st.builds(
    Service,
    policy=st.sampled_from(list(POLICIES)),
    limit=st.integers(1, 4),
    max_size=st.one_of(st.just(inf), st.integers(1, 9)),
    max_bytes=st.one_of(st.just(inf), st.integers(4, 12)),
    workers=st.integers(1, 2),
    stages=st.sampled_from([1, 1, 1, 2]),
    slo_s=st.sampled_from([None, 4.0, 16.0]),
)
specs = st.builds(
    Spec,
    timeout_s=st.one_of(st.just(inf), st.integers(0, 24).map(float)),
    due_in_s=st.sampled_from([inf, inf, 2.0]),
    size=st.sampled_from([1, 1, 1, 2, 5]),
    nbytes=st.sampled_from([0, 0, 1, 5]),
    priority=st.sampled_from([0, 0, 0, 1]),
    patient=st.booleans(),
    bulk=st.sampled_from([False, False, True]),
    cancelled=st.sampled_from([False] * 7 + [True]),
    n=st.sampled_from([1, 1, 1, 2, 5]),
)
alike = specs.map(lambda spec: replace(spec, size=1, cancelled=False, n=1))
steps = st.one_of(
    st.tuples(st.just("submit"), st.lists(specs, min_size=1, max_size=5)),
    st.tuples(st.just("submit alike"), st.tuples(alike, st.integers(1, 5))),
    st.tuples(st.just("reply"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
)
Script = list[tuple[float, tuple[str, Any]]]
scripts = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 3.0]), steps), max_size=25)

BY_SLO = Service("greedy", 2, inf, inf, 1, 1, 4.0)
SMALL = replace(BY_SLO, max_bytes=12)


def alike_after(first: Spec, then: Spec) -> Script:
    """Three that are alike come, then three others: sooner or later due, of two priorities, or too many."""
    return [(1.0, ("submit alike", (first, 3))), (0.0, ("submit alike", (then, 3))), *[(0.0, ("reply", 0))] * 4]


CROSSED: Script = [(0.0, ("submit", [Spec(timeout_s=5.0)])), *[(3.0, ("reply", 0))] * 6]
"""One comes that expires before others which are due earlier, or as early."""


@pytest.mark.parametrize(
    "slow",
    [
        admits_one_by_one,
        submits_alike_like_others,
        queues_one_by_one,
        answers_one_by_one,
        takes_all_replies_for_partial,
    ],
)
@PROPERTY
@given(service=services, script=scripts)
@example(service=BY_SLO, script=alike_after(Spec(timeout_s=20.0), Spec(timeout_s=5.0)))
@example(service=BY_SLO, script=alike_after(Spec(timeout_s=5.0), Spec(timeout_s=20.0)))
@example(service=BY_SLO, script=alike_after(Spec(timeout_s=9.0, bulk=True), Spec(timeout_s=9.0)))
@example(service=BY_SLO, script=alike_after(Spec(timeout_s=9.0, due_in_s=2.0), Spec(timeout_s=3.0, bulk=True)))
@example(service=BY_SLO, script=alike_after(Spec(nbytes=1, priority=1), Spec(nbytes=5, patient=True)))
@example(service=BY_SLO, script=[(1.0, ("submit", [Spec(timeout_s=t) for t in (3.0, 9.0, 20.0)])), *CROSSED])
@example(service=SMALL, script=alike_after(Spec(timeout_s=20.0), Spec(timeout_s=5.0)))
@example(service=SMALL, script=alike_after(Spec(nbytes=1, priority=1), Spec(nbytes=5, patient=True)))
def test_a_fast_path_comes_to_the_same(slow: Callable[[Side], None], service: Service, script: Script) -> None:
    """Two pipelines see the same, one without the fast path: the same states, ids, dues, answers and refusals."""
    fast, twin = Side(service), Side(service)
    slow(twin)
    now = 0.0
    for waited_s, (step, argument) in script:
        now += waited_s
        fast.play(now, step, argument)
        twin.play(now, step, argument)
        assert fast.seen == twin.seen


@PROPERTY
@given(service=services, script=scripts)
def test_the_last_of_several_is_never_predicted_to_wait_less(service: Service, script: Script) -> None:
    """A prediction never falls with what is before, and a usual batch takes no less than the fastest one."""
    side = Side(service)
    now = 0.0
    for waited_s, (step, argument) in script:
        now += waited_s
        side.play(now, step, argument)
        for batcher in side.core.batchers:
            waits_s = [batcher.predicted_wait_s(now, before) for before in range(batcher.queue.size + 8)]
            assert waits_s == sorted(waits_s)
            assert batcher.times.usual_s >= batcher.times.fastest_s


def waiting_twins(make: Callable[[], Policy], *specs: Spec) -> list[list[bool]]:
    """Whether each of the requests is admitted, after a batch of one second: by the fast path, and by the slow one."""
    told = []
    for slow in (lambda side: None, admits_one_by_one):
        side = Side(Service("greedy", 2, inf, inf, 1, 1, None))
        side.core = pipeline_of(stage(policy=make()))
        slow(side)
        side.play(0.0, "submit", [Spec()])
        side.play(1.0, "reply", 0)
        side.play(1.0, "submit", specs)
        told.append([request.error is None for request in side.requests[1:]])
    return told


def test_the_sizes_of_requests_count_on_arrival() -> None:
    """The second of two large requests cannot be in time behind the first, whichever way they come in."""
    large = Spec(timeout_s=4.0, size=8)

    assert waiting_twins(lambda: Greedy(2), large, large) == [[True, False]] * 2


def test_a_prediction_of_the_policy_counts_on_arrival() -> None:
    """It says that one is too late behind another, which the times of batches would not."""
    assert waiting_twins(lambda: Adapted(Prophet(1)), Spec(timeout_s=4.5), Spec(timeout_s=4.5)) == [[True, False]] * 2


class Breaks(Greedy):
    """Greedy, with an ear that hurts."""

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        if now:
            raise RuntimeError("no more")


def test_ids_are_unique_after_a_policy_has_raised_on_arrival() -> None:
    """Those that come as it raises, and those after them, are admitted like all others."""
    faults: list[BaseException] = []
    to = pipeline_of(stage(policy=Breaks(2)))
    to.batchers[0].lobby.on_fault = lambda name, error: faults.append(error)
    requests = first, second, third, last = [Request(n, 9.0) for n in range(4)]
    to.flow.submit(0, [first])
    to.flow.submit(1, [second, third])
    to.flow.submit(2, [last])

    assert list(map(str, faults)) == ["no more"]
    assert [request.id for request in requests] == [1, 2, 3, 4]
    assert (to.flow.admitted, to.flow.door.count, to.batchers[0].queue.count) == (4, 0, 4)
