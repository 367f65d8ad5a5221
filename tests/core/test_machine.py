"""The core under everything that can happen to it, in any order: a state machine driven by hypothesis.

Callers come, leave and expire; workers answer whole, in part, in any order, wrongly, late or never; time goes by. The
stub workers compute on what they were *sent*, so an answer given to the wrong caller shows. The rules that must hold
are in `check_always` and `check_after_poll`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool.core.batcher import INFINITY, Batch, Batcher
from carpool.core.journal import Journal
from carpool.core.pipeline import Pipeline
from carpool.core.queue import Queue
from carpool.errors import DeadlineExceeded, InvalidRequest, ModelError, Overloaded, Unavailable
from carpool.policy import Greedy, OneByOne, Policy, Static
from carpool.request import DONE, NEW, QUEUED, RUNNING, Request
from tests.core.stub import state_of

Item = tuple[int, ...]
"""A request's number, then the index of each stage that has worked on it."""


class Ask:
    """One caller, and what it has heard."""

    def __init__(self, number: int, deadline: float, nbytes: int, priority: int, patient: bool) -> None:
        self.number = number
        self.request = Request((number,), deadline, caller=self, nbytes=nbytes)
        self.request.lane = (priority, None, 0)
        self.request.patient = patient
        self.nbytes = nbytes
        self.told = 0
        self.cancelled = False
        self.tries: dict[int, int] = {}  # per stage, how many workers were given it
        self.errors: list[Exception] = []  # that workers have answered with

    def answered(self, request: Request) -> None:
        assert request is self.request
        self.told += 1

    @property
    def inside(self) -> bool:
        return self.request.state in (QUEUED, RUNNING)


@dataclass
class Sent:
    """What a stub worker was given and has not answered."""

    batch: Batch
    id: int
    items: dict[int, Item]
    call_started: float
    killed: bool = False


@dataclass(frozen=True)
class StageSpec:
    """A stage to be made."""

    policy: str = "greedy"
    limit: int = 1
    delay_s: int = 0
    max_size: float = INFINITY
    max_bytes: float = INFINITY
    max_batch_time_s: float = INFINITY
    idempotent: bool = True
    workers: int = 1

    def make(self) -> Batcher:
        policy: Policy
        if self.policy == "greedy":
            policy = Greedy(self.limit)
        elif self.policy == "static":
            policy = Static(self.limit, float(self.delay_s))
        else:
            policy = OneByOne()
        queue = Queue(self.max_size, self.max_bytes)
        times = {"max_batch_time_s": self.max_batch_time_s, "idempotent": self.idempotent}
        return Batcher("stage", policy, queue, **times)  # type: ignore[arg-type]


@dataclass(frozen=True)
class AskSpec:
    """A request to be made."""

    timeout: float = INFINITY
    nbytes: int = 0
    priority: int = 0
    patient: bool = True
    cancelled: bool = False


def or_endless(least: int, most: int) -> st.SearchStrategy[float]:
    return st.one_of(st.just(INFINITY), st.integers(least, most).map(float))


stage_specs = st.builds(
    StageSpec,
    policy=st.sampled_from(["greedy", "static", "one by one"]),
    limit=st.integers(1, 4),
    delay_s=st.integers(0, 6),
    max_size=or_endless(1, 6),
    max_bytes=or_endless(4, 12),
    max_batch_time_s=or_endless(2, 9),
    idempotent=st.booleans(),
    workers=st.integers(1, 3),
)
ask_specs = st.builds(
    AskSpec,
    timeout=or_endless(0, 12),
    nbytes=st.integers(0, 6),
    priority=st.sampled_from([0, 0, 1, -1]),
    patient=st.booleans(),
    cancelled=st.sampled_from([False] * 7 + [True]),
)
picks = st.integers(0, 10_000)
times_s = st.sampled_from([2**-14, 2**-20, 1.0])


class Core(RuleBasedStateMachine):
    """A pipeline of one to three stages and all who have to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.asks: list[Ask] = []
        self.by_id: dict[int, Ask] = {}
        self.ready: set[tuple[int, int]] = set()
        self.sent: dict[tuple[int, int], Sent] = {}
        self.past: list[tuple[int, int, int, list[int]]] = []
        self.closed = False
        self.steps = 0
        self.wake_at = INFINITY

    @initialize(specs=st.lists(stage_specs, min_size=1, max_size=3), journal=st.booleans())
    def start(self, specs: list[StageSpec], journal: bool) -> None:
        self.specs = specs
        self.pipeline = Pipeline(
            [spec.make() for spec in specs],
            measure=len,
            journal=Journal() if journal else None,  # type: ignore[arg-type]
        )
        self.stages = self.pipeline.stages
        self.workers = [(stage, worker) for stage, spec in enumerate(specs) for worker in range(spec.workers)]

    # -- callers

    @rule(specs=st.lists(ask_specs, min_size=1, max_size=5))
    def submit(self, specs: list[AskSpec]) -> None:
        new = []
        for spec in specs:
            deadline = self.now + spec.timeout
            ask = Ask(len(self.asks), deadline, spec.nbytes, spec.priority, spec.patient)
            self.asks.append(ask)
            new.append(ask)
            if spec.cancelled:
                self.pipeline.cancel(self.now, ask.request)
                ask.cancelled = True
        self.pipeline.submit(self.now, [ask.request for ask in new])
        for ask in new:
            if ask.inside:
                assert not ask.cancelled
                assert ask.request.id not in self.by_id
                self.by_id[ask.request.id] = ask

    @precondition(lambda self: self.asks)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        ask = self.asks[pick % len(self.asks)]
        ask.cancelled = ask.cancelled or ask.inside
        self.pipeline.cancel(self.now, ask.request)

    # -- workers

    @rule(pick=picks)
    def worker_ready(self, pick: int) -> None:
        absent = [worker for worker in self.workers if worker not in self.ready]
        if absent:
            worker = absent[pick % len(absent)]
            self.ready.add(worker)
            self.pipeline.worker_ready(*worker)

    @rule(pick=picks)
    def worker_lost(self, pick: int) -> None:
        there = sorted(self.ready)
        if there:
            worker = there[pick % len(there)]
            self.ready.remove(worker)
            self._forget(worker)
            self.pipeline.worker_lost(self.now, *worker)

    @precondition(lambda self: self.sent)
    @rule(pick=picks, busy_s=times_s, fail=st.sets(st.integers(0, 3), max_size=2))
    def reply(self, pick: int, busy_s: float, fail: set[int]) -> None:
        worker = sorted(self.sent)[pick % len(self.sent)]
        self._reply(worker, list(self.sent[worker].items), busy_s, fail)

    @precondition(lambda self: self.sent)
    @rule(
        pick=picks,
        busy_s=times_s,
        fail=st.sets(st.integers(0, 3), max_size=2),
        order=st.permutations(range(6)),
        foreign=st.lists(picks, max_size=2),
        n=st.integers(1, 6),
    )
    def reply_oddly(
        self, pick: int, busy_s: float, fail: set[int], order: Sequence[int], foreign: list[int], n: int
    ) -> None:
        """In any order, in part, and with answers that nobody had asked this worker for."""
        worker = sorted(self.sent)[pick % len(self.sent)]
        owed = list(self.sent[worker].items)
        ids = [*owed, *foreign, *owed[:1]]
        ids = [ids[i] for i in order if i < len(ids)]
        self._reply(worker, ids[:n], busy_s, fail)

    def _reply(self, worker: tuple[int, int], ids: list[int], busy_s: float, fail: set[int]) -> None:
        sent = self.sent[worker]
        items = dict(sent.items)
        results: list[object] = []
        errors: dict[int, Exception] = {}
        for i, id in enumerate(ids):
            item = items.pop(id, None)
            results.append("stolen" if item is None else (*item, worker[0]))
            if item is not None and i in fail:
                errors[i] = ModelError(f"of {item[0]}")
                self.by_id[id].errors.append(errors[i])
            if item is None:
                errors[i] = ModelError("stolen")
        self.pipeline.completed(self.now, *worker, sent.id, ids, results, errors or None, busy_s)
        sent.items = items
        if not items:
            self._forget(worker)

    def _forget(self, worker: tuple[int, int]) -> None:
        sent = self.sent.pop(worker, None)
        if sent is not None:
            self.past.append((*worker, sent.id, list(sent.batch.ids)))

    @precondition(lambda self: self.past)
    @rule(pick=picks, worker=picks)
    def stray_reply(self, pick: int, worker: int) -> None:
        """One that has come before, or comes from somebody else: it is dropped, and that is all."""
        stage, _, batch_id, ids = self.past[pick % len(self.past)]
        sender = worker % self.specs[stage].workers
        before = self._fingerprint(), self.stages[stage].stray_replies
        self.pipeline.completed(self.now, stage, sender, batch_id, ids, ["stolen"] * len(ids))

        assert self._fingerprint() == before[0]
        assert self.stages[stage].stray_replies == before[1] + len(ids)

    @precondition(lambda self: self.sent)
    @rule(pick=picks)
    def call_started(self, pick: int) -> None:
        worker = sorted(self.sent)[pick % len(self.sent)]
        sent = self.sent[worker]
        sent.call_started = self.now  # of no use to one that is being killed
        self.pipeline.call_started(self.now, *worker, sent.id)

    # -- the end

    @precondition(lambda self: self.steps > 25)
    @rule()
    def close(self) -> None:
        self.closed = True
        self.pipeline.close(Unavailable("closed"))

    @precondition(lambda self: self.steps > 35)
    @rule()
    def abort(self) -> None:
        self.closed = True
        self.pipeline.abort(self.now, Unavailable("aborted"))

        assert not [ask for ask in self.asks if ask.inside]

    # -- mistakes

    @rule(pick=picks)
    def mistake(self, pick: int) -> None:
        """What a driver must not do raises, and nothing has happened."""
        before = self._fingerprint()
        known = [ask.request for ask in self.asks if ask.request.id]
        if known:
            with pytest.raises(ValueError, match="was submitted before"):
                self.pipeline.submit(self.now, [Request("new", INFINITY), known[pick % len(known)]])
        if self.ready:
            worker = sorted(self.ready)[pick % len(self.ready)]
            with pytest.raises(ValueError, match="is ready already"):
                self.pipeline.worker_ready(*worker)
        if self.sent:
            worker = sorted(self.sent)[pick % len(self.sent)]
            ids = self.sent[worker].batch.ids
            with pytest.raises(ValueError, match="results for"):
                self.pipeline.completed(self.now, *worker, self.sent[worker].id, ids, ["stolen"] * (len(ids) + 1))
        assert self._fingerprint() == before

    def _fingerprint(self) -> tuple[object, ...]:
        states = [state_of(stage)[:-1] for stage in self.stages]  # without the count of stray replies
        line = self.pipeline
        told = [(ask.told, ask.request.state) for ask in self.asks]
        return states, told, line.admitted, line.refused, line.answered, line.cancelled, line.waiting

    # -- time

    @rule()
    def poll(self) -> None:
        todo = self.pipeline.poll(self.now)
        for batch in todo.run:
            self._dispatched(batch)
        for worker in todo.kill:
            sent = self.sent[worker]
            assert sent.call_started + self.specs[worker[0]].max_batch_time_s <= self.now
            assert not sent.killed
            sent.killed = True
        for request in todo.answer:
            request.tell()
            self._answered(request)
        self.wake_at = todo.wake_at
        self.check_after_poll()

    @rule(seconds=st.integers(1, 8))
    def wait(self, seconds: int) -> None:
        """As a driver waits: it looks when it was told to, and not before."""
        until = self.now + seconds
        self.poll()
        while self.wake_at <= until:
            self.now = self.wake_at
            self.poll()
        self.now = until

    def _dispatched(self, batch: Batch) -> None:
        worker = (batch.stage, batch.worker)
        assert worker in self.ready
        assert worker not in self.sent
        assert 1 <= len(batch) <= self.stages[batch.stage].policy.limit
        for request in batch.requests:
            ask = self.by_id[request.id]
            assert ask.request is request
            assert not ask.cancelled
            assert request.deadline > self.now
            assert request.item == (ask.number, *range(batch.stage))
            ask.tries[batch.stage] = ask.tries.get(batch.stage, 0) + 1
            assert ask.tries[batch.stage] <= (2 if self.specs[batch.stage].idempotent else 1)
        items = {request.id: request.item for request in batch.requests}
        self.sent[worker] = Sent(batch, batch.id, items, self.now)  # type: ignore[arg-type]

    def _answered(self, request: Request) -> None:
        """The answer is its own, and what it says is true."""
        ask = next(ask for ask in self.asks if ask.request is request)
        assert ask.told == 1
        assert not ask.cancelled
        error = request.error
        if error is None:
            assert request.result == (ask.number, *range(len(self.stages)))
        elif isinstance(error, DeadlineExceeded):
            assert request.deadline <= self.now
        elif isinstance(error, ModelError):
            assert error in ask.errors
            assert str(error) == f"of {ask.number}"
        elif isinstance(error, Overloaded):
            assert not request.patient
        elif isinstance(error, InvalidRequest):
            assert ask.nbytes > self.specs[0].max_bytes
        else:
            assert isinstance(error, Unavailable)
            assert self.closed or error.code == "worker_lost"
            if error.code == "worker_lost":
                assert ask.tries[request.stage] == (2 if self.specs[request.stage].idempotent else 1)

    # -- what must hold

    @invariant()
    def check_always(self) -> None:
        self.steps += 1
        if not hasattr(self, "pipeline"):
            return
        line = self.pipeline
        queued = [ask.request for ask in self.asks if ask.request.state == QUEUED]
        running = [ask.request for ask in self.asks if ask.request.state == RUNNING]
        cancelled = [ask for ask in self.asks if ask.cancelled and ask.request.id]

        assert line.admitted == line.answered + line.cancelled + len(queued) + len(running)
        assert line.admitted == sum(1 for ask in self.asks if ask.request.id)
        assert line.cancelled == len(cancelled)
        assert line.waiting == len(queued)
        assert line.unanswered == len(queued) + len(running)
        assert not [ask for ask in self.asks if ask.told > 1 or (ask.told and ask.cancelled)]
        assert not [ask for ask in self.asks if ask.request.state == NEW]

        for index, stage in enumerate(self.stages):
            here = {worker: sent for (at, worker), sent in self.sent.items() if at == index}
            assert sorted(map(id, stage.queue)) == sorted(id(r) for r in queued if r.stage == index)
            assert {worker: batch.id for worker, batch in stage.in_flight.items()} == {
                worker: sent.id for worker, sent in here.items()
            }
            owed = sorted(id for sent in here.values() for id in sent.items)
            assert stage.running == len(owed)
            assert {r.id for r in running if r.stage == index} <= set(owed)
            assert stage.idle == sum(1 for at, _ in self.ready if at == index) - len(here)
            first_time = [r for r in stage.queue if not r.losses]  # the others came back from lost workers
            assert len(first_time) <= stage.queue.max_size
            if index == 0:
                assert sum(r.nbytes for r in first_time) <= stage.queue.max_bytes

    def check_after_poll(self) -> None:
        """Whoever has to be told has been told, whatever can go has gone, and nobody will be forgotten."""
        for ask in self.asks:
            assert ask.told == (ask.request.state == DONE and not ask.cancelled)
        needed = [ask.request.deadline for ask in self.asks if ask.inside]
        for (index, _), sent in self.sent.items():
            if not sent.killed:
                needed.append(sent.call_started + self.specs[index].max_batch_time_s)
        for index, stage in enumerate(self.stages):
            if not stage.idle or not len(stage.queue):
                continue
            room, roomiest = self._room_after(index)
            if room < min(len(stage.queue), stage.policy.limit, roomiest):
                assert stage.running or len(self.stages[index + 1].queue)  # so that there will be room
                continue
            assert self.specs[index].policy == "static"
            assert len(stage.queue) < stage.policy.limit
            needed.append(min(r.arrived for r in stage.queue) + self.specs[index].delay_s)
        assert min(needed, default=INFINITY) > self.now
        assert self.now < self.wake_at <= min(needed, default=INFINITY)
        for request in self.pipeline.door.peek(1):
            assert not self.stages[0].queue.has_room(request.nbytes)

    def _room_after(self, index: int) -> tuple[float, float]:
        """What the next stage can take now, and what it could take if it were empty."""
        if index == len(self.stages) - 1:
            return INFINITY, INFINITY
        queue = self.stages[index + 1].queue
        room = queue.max_size - len(queue) if queue.nbytes < queue.max_bytes else 0
        return room - self.stages[index].running, queue.max_size

    def teardown(self) -> None:
        """With workers that work, everybody is answered, in a bounded number of steps."""
        if not hasattr(self, "pipeline"):
            return
        for worker in set(self.workers) - self.ready:
            self.ready.add(worker)
            self.pipeline.worker_ready(*worker)
        self.poll()
        for _ in range(20 + 20 * len(self.asks)):
            for worker in sorted(self.sent):
                self._reply(worker, list(self.sent[worker].items), 2**-14, set())
            self.wait(1)
            self.check_always()
        for ask in self.asks:
            assert not ask.inside
            assert ask.told + ask.cancelled == 1


TestCore = Core.TestCase
TestCore.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)
