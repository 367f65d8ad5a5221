"""A stage of steps and all who have to do with it: callers, readers that pause, workers that step or die, and time.

Each method is one thing that can happen; hypothesis chooses in `test_step_machine.py`. Orders and reports travel: a
worker reads its orders when it comes to them, and a report may lie about before it is delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random

import pytest

from carpool.core.core import Core
from carpool.core.journal import Journal
from carpool.core.lobby import MOST_LOSSES
from carpool.core.queue import Queue
from carpool.core.running_set import Part, SetReport, stream_of
from carpool.core.stepper import Stepper
from carpool.errors import DeadlineExceeded, Unavailable
from carpool.policy.steps import SetView, StepPolicy
from carpool.request import DONE, QUEUED, RUNNING, Lane, Request, Stream
from tests.support.steps import State, StubWorker, end_of, part_of


class Adversary(StepPolicy):
    """Lets in any number at any time, and finds any request late, as its dice fall."""

    def __init__(self, rows: int, dice: Random) -> None:
        super().__init__(rows)
        self.dice = dice
        self.is_kind = False

    @property
    def pace_s(self) -> float:
        return self.dice.choice([0.0, 1.0, inf])

    def join(self, now: float, heads: Sequence[Request], running: SetView) -> int:
        assert heads
        return len(heads) if self.is_kind else self.dice.randint(0, len(heads))

    def is_late(self, now: float, request: Request) -> bool:
        return not self.is_kind and self.dice.random() < 0.2

    def first_part_s(self, length: int) -> float:
        return 3.0


@dataclass(frozen=True)
class StepSpec:
    """A stage of steps."""

    rows: int
    limit: float
    resumable: bool
    idempotent: bool
    silence_s: float
    max_stream_s: float
    max_batch_time_s: float
    patience_s: float
    max_size: float
    slo_s: float | None
    journal: bool
    seed: int


@dataclass(frozen=True)
class StreamSpec:
    """A caller."""

    timeout: float
    own: bool
    size: int
    collected: bool
    lane: Lane
    patient: bool


class Listener:
    """One caller, and what it has heard."""

    def __init__(self, now: float, spec: StreamSpec) -> None:
        self.request = Request(self, now + spec.timeout, caller=self)
        self.request.size = spec.size
        self.request.lane = spec.lane
        self.request.patient = spec.patient
        self.request.stream = Stream(is_collected=spec.collected, until=now + spec.timeout if spec.own else inf)
        self.collected = spec.collected
        self.own_until = now + spec.timeout if spec.own else inf
        self.heard: list[object] = []
        self.ends = 0
        self.tells = 0  # how many workers were told of it
        self.cancelled_at = inf
        self.errors: list[Exception] = []

    def take_part(self, request: Request, part: object) -> None:
        assert request is self.request
        assert not self.ends and not self.collected and self.cancelled_at == inf
        self.heard.append(part)

    def answered(self, request: Request) -> None:
        assert request is self.request and request.state == DONE
        self.ends += 1


class StepWorld:
    """The stage, its workers and its callers."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec
        self.now = 0.0
        self.policy = Adversary(spec.rows, Random(spec.seed))
        self.stepper = Stepper(
            "steps",
            self.policy,
            Queue(spec.max_size),
            rows=spec.rows,
            limit=spec.limit,
            resumable=spec.resumable,
            silence_s=spec.silence_s,
            max_stream_s=spec.max_stream_s,
            max_batch_time_s=spec.max_batch_time_s,
            patience_s=spec.patience_s,
            idempotent=spec.idempotent,
            measure=lambda part: 1,
        )
        journal = Journal() if spec.journal else None
        self.pipeline = Core([self.stepper], slo_s=spec.slo_s, journal=journal)
        self.workers: dict[int, StubWorker] = {}
        self.post: list[tuple[StubWorker, SetReport]] = []
        self.listeners: list[Listener] = []
        self.draining: set[int] = set()
        self.aborted = False

    # -- callers

    def submit(self, specs: Sequence[StreamSpec]) -> None:
        new = [Listener(self.now, spec) for spec in specs]
        self.listeners += new
        self.pipeline.flow.submit(self.now, [listener.request for listener in new])

    def cancel(self, pick: int) -> None:
        listener = self.listeners[pick % len(self.listeners)]
        if listener.request.state in (QUEUED, RUNNING):
            self.pipeline.cancel(self.now, listener.request)
            listener.cancelled_at = self.now
            assert listener.request.state == DONE

    def pause(self, pick: int, is_paused: bool) -> None:
        listener = self.listeners[pick % len(self.listeners)]
        self.pipeline.pause(self.now, listener.request, is_paused)

    # -- workers

    def worker_ready(self, pick: int) -> None:
        place = pick % 3
        if place in self.workers:
            with pytest.raises(ValueError, match="ready already"):
                self.pipeline.worker_ready(0, place)
            return
        limit = self.spec.limit
        self.workers[place] = StubWorker(place, self.spec.rows, limit)
        self.pipeline.worker_ready(0, place)

    def _gone(self, pick: int) -> StubWorker | None:
        """Takes one of the workers away; what it has said and was not delivered is lost with it."""
        if not self.workers:
            return None
        worker = self.workers.pop(list(self.workers)[pick % len(self.workers)])
        self.post = [(sender, report) for sender, report in self.post if sender is not worker]
        self.draining.discard(worker.place)
        return worker

    def worker_lost(self, pick: int, unsent: bool) -> None:
        worker = self._gone(pick)
        if worker is None:
            return
        untold = [request for order in worker.inbox for request in order.join] if unsent else []
        before = {listener: listener.request.losses for listener in self.listeners}
        self.pipeline.worker_lost(self.now, 0, worker.place, [request.id for request in untold])
        for listener in self.listeners:
            blamed = listener.request.losses > before[listener]
            assert not (blamed and listener.request in untold)
            if blamed and listener.request.losses >= MOST_LOSSES:
                assert listener.request.state == DONE
        for request in untold:
            listener = self._listener(request)
            listener.tells -= 1

    def worker_left(self, pick: int) -> None:
        worker = self._gone(pick)
        if worker is not None:
            self.pipeline.worker_left(self.now, 0, worker.place)

    def drain(self, pick: int) -> None:
        if self.workers:
            place = list(self.workers)[pick % len(self.workers)]
            self.draining.add(place)
            self.pipeline.drain(0, place)

    def boundary(self, pick: int, dice: Random, most: int, returned: int) -> None:
        """A worker comes to a boundary: it reads orders, steps, and posts its report."""
        if not self.workers:
            return
        worker = self.workers[list(self.workers)[pick % len(self.workers)]]
        has_news = worker.follow(most)
        if worker.stopped and not has_news:
            return
        if not worker.active:
            worker.stopped = True
            self.post.append((worker, SetReport(0, worker.place, worker.seen, True)))
            return
        self.post.append((worker, worker.step(lambda state: self._outcome(state, dice), returned)))

    def _outcome(self, state: State, dice: Random) -> Part | None:
        x = dice.random()
        if x < 0.15:
            return part_of(state, last=True)
        if x < 0.2:
            return end_of(state)
        if x < 0.25:
            error = ValueError("poison")
            self._listener(state.request).errors.append(error)
            return Part(state.request.id, error=error)
        return part_of(state) if x < 0.9 else None

    def deliver(self, pick: int) -> None:
        """The oldest report of a worker arrives."""
        if self.post:
            sender = self.post[pick % len(self.post)][0]
            place = next(i for i, (worker, _) in enumerate(self.post) if worker is sender)
            _, report = self.post.pop(place)
            self.pipeline.reported(self.now, report)

    def misreport(self, pick: int) -> None:
        """A worker names a stream that it never had, or an order that was not sent: nothing is done."""
        self.poll()
        if not self.workers:
            return
        worker = self.workers[list(self.workers)[pick % len(self.workers)]]
        known = self.stepper.sets[worker.place]
        before = (known.seen, dict(known.members), self.stepper.stray_parts)
        wrong = [
            SetReport(0, worker.place, known.number + 1, False),
            SetReport(0, worker.place, known.seen, False, [Part(10_000_000, 1)]),
            SetReport(0, worker.place, known.seen, False, [Part(id, 1) for id in [*known.members][:1] * 2]),
            SetReport(0, 99, 0, False),
        ]
        for report in wrong:
            if len(report.parts) == 0 and report.seen == known.seen and report.place == worker.place:
                continue
            with pytest.raises(ValueError, match="worker"):
                self.pipeline.reported(self.now, report)
        assert before == (known.seen, dict(known.members), self.stepper.stray_parts)

    # -- time

    def wait(self, seconds: float) -> None:
        """Time passes, and the driver is punctual."""
        end = self.now + seconds
        while True:
            wake_at = self.poll()
            if wake_at > end:
                break
            self.now = max(wake_at, self.now + 2**-20)
        self.now = end

    def jump(self, seconds: float) -> None:
        self.now += seconds

    def poll(self) -> float:
        todo = self.pipeline.poll(self.now)
        for request, part in todo.parts:  # some may be of streams that join another worker in this very poll
            request.tell_part(part)
        for order in todo.orders:
            worker = self.workers[order.place]
            worker.inbox.append(order)
            assert not (order.join and order.place in self.draining)
            for request in order.join:
                assert request.state == RUNNING and self.now < request.deadline
                listener = self._listener(request)
                listener.tells += 1
                assert self.spec.idempotent or listener.tells == 1
                assert self.spec.resumable or not stream_of(request).parts
                assert stream_of(request).kept == listener.heard
        for request in todo.answer:
            request.tell()
        for stage, place in todo.drained:
            self._drained(stage, place)
        self.check_after_poll(todo.wake_at)
        for stage, place in todo.kill:
            assert stage == 0
            self.worker_lost(list(self.workers).index(place), unsent=False)
        return self.now if todo.kill else todo.wake_at

    def _drained(self, stage: int, place: int) -> None:
        """A worker that was to go has nothing left: it has followed all orders, and nothing of it is on its way."""
        assert stage == 0
        self.draining.remove(place)
        worker = self.workers.pop(place)
        assert not worker.states and not worker.inbox
        assert not [sender for sender, _ in self.post if sender is worker]

    def _listener(self, request: Request) -> Listener:
        assert isinstance(request.item, Listener)
        return request.item

    # -- the end

    def close(self) -> None:
        self.pipeline.close(Unavailable("closing"))

    def abort(self) -> None:
        self.pipeline.abort(self.now, Unavailable("aborted"))
        self.aborted = True

    # -- what must hold

    def check_always(self) -> None:
        for running in self.stepper.sets.values():
            assert len(running) <= self.spec.rows
            assert len(running) <= 1 or running.size <= self.spec.limit
            assert running.size == sum(request.size for request in running)
            assert running.resting == sum(stream_of(request).is_resting for request in running)
            for request in running:
                assert request.state == RUNNING and stream_of(request).place == running.place
        assert self.stepper.running == sum(map(len, self.stepper.sets.values()))
        kept = sum(stream_of(request).kept_bytes for listener in self.listeners for request in [listener.request])
        assert self.stepper.queue.nbytes == kept  # requests themselves weigh nothing here
        for listener in self.listeners:
            assert listener.heard == list(range(len(listener.heard)))
            assert listener.ends <= 1 and not (listener.ends and listener.cancelled_at < inf)

    def check_after_poll(self, wake_at: float) -> None:
        """Every order that was due is out: a worker which follows all of its orders steps whom it should."""
        for place, worker in self.workers.items():
            running = self.stepper.sets[place]
            assert not running.to_join and not running.to_leave
            held = set(worker.states)
            resting = {id for id, state in worker.states.items() if state.paused}
            for order in worker.inbox:
                stayed = held - set(order.leave)
                held = stayed | {request.id for request in order.join}
                resting = ((resting & stayed) | (held & set(order.pause))) - set(order.resume)
            assert running.members.keys() >= held  # the others have ended, and their report is on its way
            assert {id for id in held if stream_of(running.members[id]).is_resting} == resting & held
            if running.suspect is not None:
                assert held - resting <= {running.suspect.id}
            for id in held - resting:
                request = running.members[id]
                assert not stream_of(request).is_paused or request is running.suspect
        for listener in self.listeners:
            request = listener.request
            if listener.ends and request.error is None:
                assert request.result == (None if not listener.collected else request.result)
            if request.state in (QUEUED, RUNNING):
                assert self.now < request.deadline or wake_at <= self.now  # let in from the door too late
                if not stream_of(request).is_paused:
                    assert request.deadline <= listener.own_until
            elif listener.cancelled_at == inf:
                assert listener.ends == 1

    def settle(self) -> None:
        """All callers come to an end, however it has been before."""
        self.policy.is_kind = True
        dice = Random(0)
        for listener in self.listeners:
            self.pipeline.pause(self.now, listener.request, False)
        for _ in range(3000):
            for pick in range(3):
                if pick not in self.workers:
                    self.worker_ready(pick)
            if not any(listener.request.state in (QUEUED, RUNNING) for listener in self.listeners) and not self.post:
                break
            self.poll()
            for pick in range(len(self.workers)):
                self.boundary(pick, dice, 1000, 0)
            while self.post:
                self.deliver(0)
            self.now += 2**-10
        self.poll()
        self.check_always()
        assert self.pipeline.unanswered == 0 and self.pipeline.waiting == 0
        for worker in self.workers.values():
            worker.follow()
            assert not worker.states
        for listener in self.listeners:
            assert listener.ends == (listener.cancelled_at == inf)
            error = listener.request.error
            if isinstance(error, ValueError) and not isinstance(error, DeadlineExceeded):
                assert any(error is known for known in listener.errors)
