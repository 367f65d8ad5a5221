"""The core and all who have to do with it: callers that come and go, workers that answer in any way or die, and time.

Each method is one thing that can happen; whoever calls them (hypothesis in `test_machine.py`, seeded dice in
`test_chaos.py`) chooses which and when, by numbers of which there are always enough. The stub workers compute on what
they were *sent*, so an answer given to the wrong caller shows. The rules that must hold are in `check_always` and
`check_after_poll`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf

import pytest

from carpool.core import ahead
from carpool.core.batch import Batch, Reply
from carpool.core.batcher import Batcher
from carpool.core.core import Core
from carpool.core.graph import Node
from carpool.core.journal import Journal
from carpool.core.lane_order import Suspect
from carpool.core.queue import Queue
from carpool.errors import DeadlineExceeded, InvalidRequest, ModelError, Overloaded, Unavailable
from carpool.policy import AIMD, Adaptive, Cork, Deadline, Greedy, OneByOne, Policy, Static
from carpool.request import DEFAULT_LANE, DONE, NEW, QUEUED, RUNNING, Lane, Request
from tests.support.pipelines import state_of

Item = tuple[int, ...]
"""A request's number, then the index of each stage that has worked on it."""

POLICIES: dict[str, Callable[..., Policy]] = {
    "greedy": Greedy,
    "static": Static,
    "static from idle": functools.partial(Static, from_idle=True),
    "one by one": OneByOne,
    "aimd": AIMD,
    "cork": Cork,
    "deadline": Deadline,
    "adaptive": Adaptive,
}
DROPPING = {"aimd", "cork", "deadline", "adaptive"}
"""Policies that refuse even who is patient."""

HOLDING_BACK = {"static", "static from idle", "cork", "adaptive"}
"""Policies that let requests wait beside an idle worker."""

LATE = ("slo", "deadline")


class Ask:
    """One caller, and what it has heard."""

    def __init__(self, number: int, now: float, spec: AskSpec) -> None:
        self.number = number
        self.spec = spec
        self.deadline = now + spec.timeout
        self.request = Request((number,), self.deadline, caller=self, nbytes=spec.nbytes)
        self.request.lane = spec.lane
        self.request.patient = spec.patient
        self.request.size = spec.size
        self.request.bulk = spec.bulk
        self.told = 0
        self.cancelled = False
        self.tries: dict[int, int] = {}  # per stage, how many workers were given it,
        self.lost: dict[int, int] = {}  # how many of them died with it,
        self.left: dict[int, int] = {}  # and how many left it without being lost
        self.hung: set[int] = set()  # stages in which the last one that died had been given up
        self.gone_at = inf  # when it was cancelled, or failed with all others
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
    ids: list[int]
    items: dict[int, Item]
    call_started: float
    heard: float
    killed: bool = False


@dataclass(frozen=True)
class StageSpec:
    """A stage to be made."""

    policy: str = "greedy"
    limit: int = 1
    delay_s: int = 0
    max_size: float = inf
    max_bytes: float = inf
    max_batch_time_s: float = inf
    patience_s: float = inf
    idempotent: bool = True
    workers: int = 1
    sized: bool = False
    ahead: bool = False

    def make(self) -> Batcher:
        kind = POLICIES[self.policy]
        policy = OneByOne() if kind is OneByOne else kind(self.limit, float(self.delay_s))
        return Batcher(
            "stage",
            policy,
            Queue(self.max_size, self.max_bytes),
            max_batch_time_s=self.max_batch_time_s,
            patience_s=self.patience_s,
            idempotent=self.idempotent,
            runs_ahead=self.ahead,
            weigh=_weigh if self.sized else None,
        )


@dataclass(frozen=True)
class AskSpec:
    """A request to be made."""

    timeout: float = inf
    nbytes: int = 0
    lane: Lane = DEFAULT_LANE
    patient: bool = True
    cancelled: bool = False
    size: int = 1
    bulk: bool = False


@dataclass
class World:
    """A pipeline of one to three stages and all around it."""

    specs: Sequence[StageSpec]
    journal: bool = False
    slo_s: float | None = None
    now: float = 0.0
    asks: list[Ask] = field(default_factory=list)
    by_id: dict[int, Ask] = field(default_factory=dict)
    ready: set[tuple[int, int]] = field(default_factory=set)
    sent: dict[tuple[int, int], Sent] = field(default_factory=dict)
    ahead: dict[tuple[int, int], list[Batch]] = field(default_factory=dict)
    past: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    finished: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # size and seconds of batches, per stage
    happened: set[str] = field(default_factory=set)  # that is rare
    leaving: set[tuple[int, int]] = field(default_factory=set)
    held: bool = False
    closed: bool = False
    wake_at: float = inf

    def __post_init__(self) -> None:
        self.pipeline = Core(
            [spec.make() for spec in self.specs],
            slo_s=self.slo_s,
            measure=len,  # type: ignore[arg-type]
            journal=Journal() if self.journal else None,
        )
        self.stages = self.pipeline.batchers
        self.workers = [(stage, worker) for stage, spec in enumerate(self.specs) for worker in range(spec.workers)]

    # -- callers

    def submit(self, specs: Sequence[AskSpec]) -> None:
        new = []
        for spec in specs:
            ask = Ask(len(self.asks), self.now, spec)
            self.asks.append(ask)
            new.append(ask)
            if spec.cancelled:
                self.pipeline.cancel(self.now, ask.request)
                ask.cancelled = True
        self.pipeline.flow.submit(self.now, [ask.request for ask in new])
        for ask in new:
            if ask.request.id:
                assert not ask.cancelled
                assert ask.request.id not in self.by_id
                self.by_id[ask.request.id] = ask

    def cancel(self, pick: int) -> None:
        if self.asks:
            ask = self.asks[pick % len(self.asks)]
            if ask.inside:
                ask.cancelled = True
                ask.gone_at = self.now
                self._note_if_ahead(ask.request, "was cancelled")
            self.pipeline.cancel(self.now, ask.request)

    def _note_if_ahead(self, request: Request, what: str) -> None:
        if any(request in batch.requests for lying in self.ahead.values() for batch in lying):
            self.happened.add(f"lay ahead when it {what}")

    # -- workers

    def worker_ready(self, pick: int) -> None:
        absent = [worker for worker in self.workers if worker not in self.ready]
        if absent:
            worker = absent[pick % len(absent)]
            self.ready.add(worker)
            self.pipeline.worker_ready(*worker)

    def worker_lost(self, pick: int) -> None:
        """It dies; a request that it alone had, and that was with one that died before, is to blame."""
        worker = self._gone(pick)
        if worker is None:
            return
        stage, blamed = worker[0], False
        self._lose_ahead(worker)
        sent = self._forget(worker)
        for id in sent.items if sent else ():
            ask = self.by_id[id]
            ask.lost[stage] = ask.lost.get(stage, 0) + 1
            (ask.hung.add if sent and sent.killed else ask.hung.discard)(stage)
            blamed = len(sent.ids) == 1 and ask.lost[stage] == 2
        assert self.pipeline.worker_lost(self.now, *worker) is blamed

    def worker_left(self, pick: int) -> None:
        """It goes, and no request is to blame."""
        worker = self._gone(pick)
        if worker is None:
            return
        self._lose_ahead(worker)
        sent = self._forget(worker)
        for id in sent.items if sent else ():
            left = self.by_id[id].left
            left[worker[0]] = left.get(worker[0], 0) + 1
        self.pipeline.worker_left(self.now, *worker)

    def drain(self, pick: int) -> None:
        """A worker is to go once it has finished what it has."""
        staying = sorted(self.ready - self.leaving)
        if staying:
            worker = staying[pick % len(staying)]
            self.leaving.add(worker)
            self.pipeline.drain(*worker)

    def hold(self, pick: int) -> None:
        """The first stage is to start nothing for now, or to go on."""
        self.held = bool(pick % 2)
        self.pipeline.hold(self.held)

    @property
    def _is_held(self) -> bool:
        return self.held and not self.closed and len(self.stages) > 1

    def _lose_ahead(self, worker: tuple[int, int]) -> None:
        """It has not looked at its next batches."""
        for batch in self.ahead.pop(worker, ()):
            self.happened.add("lay ahead when its worker was lost")
            for request in batch.requests:
                left = self.by_id[request.id].left
                left[worker[0]] = left.get(worker[0], 0) + 1

    def _gone(self, pick: int) -> tuple[int, int] | None:
        there = sorted(self.ready)
        if not there:
            return None
        worker = there[pick % len(there)]
        self.ready.remove(worker)
        self.leaving.discard(worker)
        return worker

    def reply(self, pick: int, busy_s: float, fail: Collection[int]) -> None:
        """A worker answers all that it owes."""
        if self.sent:
            worker = sorted(self.sent)[pick % len(self.sent)]
            self._reply(worker, list(self.sent[worker].items), busy_s, fail)

    def reply_oddly(
        self, pick: int, busy_s: float, fail: Collection[int], order: Sequence[int], foreign: Sequence[int], n: int
    ) -> None:
        """In any order, in part, and with answers that nobody had asked this worker for."""
        if self.sent:
            worker = sorted(self.sent)[pick % len(self.sent)]
            owed = list(self.sent[worker].items)
            ids = [*owed, *foreign, *owed[:1]]
            ids = [ids[i] for i in order if i < len(ids)]
            self._reply(worker, ids[:n], busy_s, fail)

    def _reply(self, worker: tuple[int, int], ids: list[int], busy_s: float, fail: Collection[int]) -> None:
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
        self.pipeline.completed(self.now, Reply(*worker, sent.id, ids, results, errors or None, busy_s))
        if items != sent.items:
            sent.heard = self.now
        sent.items = items
        if not items:
            self._forget(worker)
            self.finished.setdefault(worker[0], []).append((sent.batch.size, self.now - sent.batch.started))
            lying = self.ahead.get(worker)
            if lying:
                following = lying.pop(0)
                if not lying:
                    del self.ahead[worker]
                assert following.started == self.now
                self._takes_up(worker, following)

    def _forget(self, worker: tuple[int, int]) -> Sent | None:
        sent = self.sent.pop(worker, None)
        if sent is not None:
            self.past.append((*worker, sent.id, sent.ids))
        return sent

    def stray_reply(self, pick: int, worker: int) -> None:
        """One that has come before, or comes from somebody else: it is dropped, and that is all."""
        if not self.past:
            return
        stage, _, batch_id, ids = self.past[pick % len(self.past)]
        sender = worker % self.specs[stage].workers
        before = self._fingerprint(), self.stages[stage].stray_replies
        self.pipeline.completed(self.now, Reply(stage, sender, batch_id, ids, ["stolen"] * len(ids)))

        assert self._fingerprint() == before[0]
        assert self.stages[stage].stray_replies == before[1] + len(ids)

    def call_started(self, pick: int) -> None:
        if self.sent:
            worker = sorted(self.sent)[pick % len(self.sent)]
            sent = self.sent[worker]
            sent.call_started = self.now  # of no use to one that is being killed
            self.pipeline.call_started(self.now, *worker, sent.id)

    def spare(self, pick: int) -> None:
        """A worker that seemed to hang does not."""
        if self.sent:
            worker = sorted(self.sent)[pick % len(self.sent)]
            self.sent[worker].call_started = self.now
            self.sent[worker].killed = False
            self.stages[worker[0]].spare(self.now, worker[1])

    def ran_out(self, pick: int, positions: Collection[int]) -> None:
        """A call for some of a batch has run out of memory; smaller batches are made from now on."""
        whole = [worker for worker, sent in sorted(self.sent.items()) if len(sent.items) == len(sent.ids)]
        if whole:
            stage, worker = whole[pick % len(whole)]
            sent = self.sent[stage, worker]
            call = sorted({position % len(sent.ids) for position in positions})
            self.stages[stage].ran_out_of_memory(worker, sent.id, [call], [call[:1]])
            tried = sum([request.size for i, request in enumerate(sent.batch.requests) if i in call])
            assert self.stages[stage].safe_size.limit < tried or tried == 1 or self.specs[stage].sized

    # -- the end

    def close(self) -> None:
        self.closed = True
        self.pipeline.close(Unavailable("closed"))

    def abort(self) -> None:
        self.closed = True
        for ask in self.asks:
            if ask.inside:
                ask.gone_at = self.now
        self.pipeline.abort(self.now, Unavailable("aborted"))

        assert not [ask for ask in self.asks if ask.inside]

    # -- mistakes

    def mistake(self, pick: int) -> None:
        """What a driver must not do raises, and nothing has happened."""
        before = self._fingerprint()
        known = [ask.request for ask in self.asks if ask.request.id]
        if known:
            with pytest.raises(ValueError, match="was submitted before"):
                self.pipeline.flow.submit(self.now, [Request("new", inf), known[pick % len(known)]])
        if self.ready:
            worker = sorted(self.ready)[pick % len(self.ready)]
            with pytest.raises(ValueError, match="is ready already"):
                self.pipeline.worker_ready(*worker)
        if self.sent:
            worker = sorted(self.sent)[pick % len(self.sent)]
            ids = self.sent[worker].batch.ids
            with pytest.raises(ValueError, match="results for"):
                self.pipeline.completed(
                    self.now, Reply(*worker, self.sent[worker].id, ids, ["stolen"] * (len(ids) + 1))
                )
        assert self._fingerprint() == before

    def _fingerprint(self) -> tuple[object, ...]:
        states = [state_of(stage)[:-1] for stage in self.stages]  # without the count of stray replies
        pipeline = self.pipeline
        told = [(ask.told, ask.request.state) for ask in self.asks]
        counts = (
            pipeline.flow.admitted,
            pipeline.flow.refused,
            pipeline.flow.answered,
            pipeline.flow.cancelled,
            pipeline.waiting,
        )
        return states, told, counts

    # -- time

    def poll(self) -> None:
        todo = self.pipeline.poll(self.now)
        for batch in todo.run:
            self._dispatched(batch)
        for worker in todo.kill:
            sent = self.sent[worker]
            assert self._given_up_at(worker[0], sent) <= self.now or self._far_too_slow(worker[0], sent)
            assert not sent.killed
            sent.killed = True
        for worker in todo.drained:
            assert worker not in self.sent
            self.leaving.remove(worker)
            self.ready.remove(worker)
            self.happened.add("drained")
        for request in todo.answer:
            request.tell()
            self._answered(request)
        self.wake_at = todo.wake_at
        self.check_after_poll()

    def _given_up_at(self, stage: int, sent: Sent) -> float:
        """When a call is over its limit, or over all patience since nobody waits for it."""
        spec = self.specs[stage]
        if spec.max_batch_time_s < inf:
            return sent.call_started + spec.max_batch_time_s
        owed = [self.by_id[id] for id in sent.items]
        if any(ask.inside for ask in owed):
            return inf
        gone_at = max([min(ask.gone_at, ask.deadline) for ask in owed])
        return max(gone_at, sent.heard, sent.call_started) + spec.patience_s

    def _far_too_slow(self, stage: int, sent: Sent) -> bool:
        """Whether a call without a limit has taken ten times as long as it should, by what is known."""
        known, ran_s = self.finished.get(stage, []), self.now - sent.call_started
        if self.specs[stage].max_batch_time_s < inf or len(known) < 8:
            return False
        size, took_s = known[-1]
        return ran_s >= max(self.specs[stage].patience_s, 10 * took_s, 10 * took_s / size * sent.batch.size)

    def wait(self, seconds: float) -> None:
        """As a driver waits: it looks when it was told to, and not before."""
        until = self.now + seconds
        self.poll()
        while self.wake_at <= until:
            self.now = self.wake_at
            self.poll()
        self.now = until

    def jump(self, seconds: float) -> None:
        """The driver is held up, and looks too late."""
        self.now += seconds

    def _dispatched(self, batch: Batch) -> None:
        worker, stage = (batch.place, batch.stage)[::-1], batch.stage
        limit = self.stages[stage].lobby.policy.limit
        assert worker in self.ready
        assert worker not in self.leaving
        assert not (self._is_held and not stage)
        assert len(self.ahead.get(worker, ())) < ahead.MOST
        assert batch.ahead is (worker in self.sent)
        assert not batch.ahead or (self.specs[stage].ahead and self.specs[stage].idempotent)
        assert not batch.ahead or not self.sent[worker].killed
        assert len(batch) == 1 or 1 < sum(request.size for request in batch.requests) <= limit
        assert len({self._origin(request) for request in batch.requests}) == 1
        for request in batch.requests:
            ask = self.by_id[request.id]
            assert ask.request is request
            assert not ask.cancelled
            assert request.deadline > self.now
            assert request.item == (ask.number, *range(stage))
            ask.tries[stage] = ask.tries.get(stage, 0) + 1
            lost, left = ask.lost.get(stage, 0), ask.left.get(stage, 0)
            assert ask.tries[stage] == 1 + lost + left
            assert lost <= self.specs[stage].idempotent
            assert not lost or len(batch) == 1  # it is under suspicion
        if batch.ahead:
            assert not any(isinstance(request.lane.key, Suspect) for request in batch.requests)
            lying = self.ahead.setdefault(worker, [])
            lying.append(batch)
            self.happened.add("went ahead" if len(lying) == 1 else "went ahead behind another")
        else:
            self._takes_up(worker, batch)

    def _takes_up(self, worker: tuple[int, int], batch: Batch) -> None:
        items = {request.id: request.item for request in batch.requests}
        self.sent[worker] = Sent(batch, batch.id, list(batch.ids), items, self.now, self.now)  # type: ignore[arg-type]

    @staticmethod
    def _origin(request: Request) -> tuple[object, int]:
        """What requests of one batch have in common."""
        _, key, bucket, _ = request.lane
        return (key.former_key if isinstance(key, Suspect) else key), bucket

    def _answered(self, request: Request) -> None:
        """The answer is its own, and what it says is true."""
        ask = next(ask for ask in self.asks if ask.request is request)
        assert ask.told == 1
        assert not ask.cancelled
        error = request.error
        stage = max(0, _at(request))
        if error is None:
            assert request.result == (ask.number, *range(len(self.stages)))
        elif isinstance(error, DeadlineExceeded) and "two workers" in str(error):
            assert ask.lost[stage] == 2
            assert stage in ask.hung
        elif isinstance(error, DeadlineExceeded):
            assert request.deadline <= self.now
            self._note_if_ahead(request, "expired")
        elif isinstance(error, ModelError) and error.code == "request_crashed_worker":
            assert ask.lost[stage] == 2
            assert stage not in ask.hung
        elif isinstance(error, ModelError):
            assert error in ask.errors
            assert str(error) == f"of {ask.number}"
        elif isinstance(error, Overloaded):
            by_policy = self.specs[stage].policy in DROPPING
            is_unserved = error.reason == "slo" and self._is_unserved(stage)
            assert not request.patient or (error.reason in LATE and by_policy) or is_unserved
        elif isinstance(error, InvalidRequest):
            assert ask.spec.nbytes > self.specs[0].max_bytes
        else:
            assert isinstance(error, Unavailable)
            assert self.closed or error.code == "worker_lost"
            if error.code == "worker_lost":
                assert ask.lost[stage] == 1
                assert not self.specs[stage].idempotent

    # -- what must hold

    def check_always(self) -> None:
        """The counts add up, each request is where it should be and nowhere else, and no queue is over its bounds."""
        pipeline = self.pipeline
        waiting: list[list[Request]] = [[] for _ in range(len(self.stages) + 1)]  # the last for those at the door
        running: list[set[int]] = [set() for _ in self.stages]
        n_queued = n_running = n_cancelled = n_admitted = 0
        for ask in self.asks:
            request = ask.request
            state = request.state
            assert state != NEW
            assert ask.told + ask.cancelled <= 1
            if request.id:
                n_admitted += 1
                n_cancelled += ask.cancelled
            if state == QUEUED:
                n_queued += 1
                waiting[_at(request)].append(request)
            elif state == RUNNING:
                n_running += 1
                running[_at(request)].add(request.id)

        assert pipeline.flow.admitted == n_admitted == pipeline.flow.answered + n_cancelled + n_queued + n_running
        assert pipeline.flow.cancelled == n_cancelled
        assert pipeline.waiting == n_queued
        assert pipeline.unanswered == n_queued + n_running
        _check_queue(pipeline.flow.door, waiting[-1])

        owed: list[list[int]] = [[] for _ in self.stages]
        flights: list[dict[int, int]] = [{} for _ in self.stages]
        for (index, worker), sent in self.sent.items():
            owed[index] += sent.items
            flights[index][worker] = sent.id
        for (index, _), lying in self.ahead.items():
            owed[index] += [id for batch in lying for id in batch.ids]
        for index, stage in enumerate(self.stages):
            _check_queue(stage.queue, waiting[index])
            assert {worker: batch.id for worker, batch in stage.in_flight.items()} == flights[index]
            assert {(index, worker): lying for worker, lying in stage.ahead.items()} == {
                worker: lying for worker, lying in self.ahead.items() if worker[0] == index
            }
            assert stage.running == len(owed[index])
            assert running[index] <= set(owed[index])
            unused = [worker for worker in self.ready - self.leaving if worker not in self.sent]
            assert stage.idle == sum(1 for at, _ in unused if at == index)
            new = [r for r in waiting[index] if self.by_id[r.id].tries.get(index, 0) == 0]
            assert len(new) <= stage.queue.max_size
            if index == 0:
                assert sum([r.nbytes for r in new]) <= stage.queue.max_bytes

    def check_after_poll(self) -> None:
        """Whoever has to be told has been told, whatever can go has gone, and nobody will be forgotten."""
        assert self.leaving <= self.sent.keys()
        needed = []
        for ask in self.asks:
            assert ask.told == (ask.request.state == DONE and not ask.cancelled)
            if ask.inside:
                needed.append(ask.request.deadline)
                if ask.request.state == QUEUED and self._is_unserved(max(0, _at(ask.request))):
                    needed.append(ask.request.due)  # late for its SLO it would be refused
        for (index, _), sent in self.sent.items():
            if not sent.killed:
                needed.append(self._given_up_at(index, sent))
        for index, stage in enumerate(self.stages):
            queue = stage.queue
            if not stage.idle or not len(queue) or (self._is_held and not index):
                continue
            room, roomiest = self._room_after(index)
            most = min(stage.lobby.policy.limit, stage.safe_size.limit) if queue.size == queue.count else inf
            if room < (1 if queue.next_is_suspect else min(len(queue), most, roomiest)):
                assert stage.running or len(self.stages[index + 1].queue)  # so that there will be room
                continue
            assert not queue.next_is_suspect
            assert self.specs[index].policy in HOLDING_BACK
            assert not self._is_last_call(index)
            assert stage.lobby.wake_at is not None
            needed.append(stage.lobby.wake_at)
            if self.specs[index].policy.startswith("static"):
                assert queue.size < stage.lobby.policy.limit
                needed.append(queue.oldest_arrival + self.specs[index].delay_s)
        assert min(needed, default=inf) > self.now
        assert self.now < self.wake_at <= min(needed, default=inf)
        for request in self.pipeline.flow.door.peek(1):
            assert not self.stages[0].queue.has_room(request.nbytes)

    def _is_unserved(self, stage: int) -> bool:
        """Whether a stage, or one behind it, has no worker, in a service with an SLO."""
        if self.slo_s is None:
            return False
        served = {at for at, _ in self.ready}
        return any(index not in served for index in range(stage, len(self.stages)))

    def _is_last_call(self, index: int) -> bool:
        """Whether nobody can join a stage's queue any more: nothing is held back there."""
        return self.closed and not any(
            ask.inside and _at(ask.request) < index
            for ask in self.asks
            if index or _at(ask.request) != -1  # for whom there is no room in the first queue
        )

    def _room_after(self, index: int) -> tuple[float, float]:
        """What the next stage can take now, and what it could take if it were empty."""
        if index == len(self.stages) - 1:
            return inf, inf
        queue = self.stages[index + 1].queue
        room = queue.max_size - len(queue) if queue.nbytes < queue.max_bytes else 0
        return room - self.stages[index].running, queue.max_size

    def settle(self) -> None:
        """With workers that work, everybody is answered, in a bounded number of steps."""
        self.hold(0)
        self.poll()
        for _ in range(20 + 20 * len(self.asks)):
            for worker in set(self.workers) - self.ready:
                self.ready.add(worker)
                self.pipeline.worker_ready(*worker)
            for worker in sorted(self.sent):
                self._reply(worker, list(self.sent[worker].items), 2**-14, ())
            self.poll()
            if not self.pipeline.unanswered and not self.sent:
                break
            if not self.sent and self.ready == set(self.workers):  # one that was drained just now comes back first
                self.now = self.wake_at
                self.poll()
        self.check_always()
        for ask in self.asks:
            assert not ask.inside
            assert ask.told + ask.cancelled == 1
        assert not self.sent
        for queue in (self.pipeline.flow.door, *[stage.queue for stage in self.stages]):
            assert queue.lanes <= 1  # those of quarantined and other requests are forgotten


def _weigh(request: Request, result: object) -> None:
    """Give a request a size by what the stage before has made of it."""
    request.size = 1 + len(str(result)) % 3


def _check_queue(queue: Queue, waiting: list[Request]) -> None:
    """It holds exactly these, and has counted them right."""
    assert sorted(map(id, queue)) == sorted(map(id, waiting))
    assert queue.count == len(waiting)
    assert queue.nbytes == sum([request.nbytes for request in waiting])
    assert queue.size == sum([request.size for request in waiting])


def _at(request: Request) -> int:
    """The position of the stage at which a request is; -1 at the door."""
    node = request.node
    return node.crew.lobby.stage if isinstance(node, Node) else -1
