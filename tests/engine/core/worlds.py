"""The core and all who have to do with it: services over stages in any graph, callers that come, read slowly and go,
workers that answer in any way, step or die, and time.

Each method of `World` is one thing that can happen; whoever calls them chooses which and when, by numbers of which
there are always enough. Stub workers compute on what they were *sent*, and what a request may come to is known without
the core (`shapes.py`), so an answer that is given to the wrong caller shows, and so does an item that was run where it
does not belong. Orders and reports of steps travel: a worker reads its orders when it comes to them, and a report may
lie about before it is delivered. A service that is a line of one stage of batches lends a worker, whose lone calls the
core learns of when they are done, or when the worker is taken back. The rules that must hold are in `check_always` and
`check_after_poll`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Any

import pytest

from carpool.engine.core import ahead
from carpool.engine.core.batch import DONE_EARLY, Batch, Reply
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.content import Plain
from carpool.engine.core.core import Core
from carpool.engine.core.graph import Door, Each, Node, Switch, needs_of
from carpool.engine.core.journal import Journal
from carpool.engine.core.lane_order import Suspect
from carpool.engine.core.lobby import MOST_LOSSES
from carpool.engine.core.queue import Queue
from carpool.engine.core.running_set import SetReport, stream_of
from carpool.engine.core.stepper import Crew, Stepper
from carpool.engine.core.transit import Siblings
from carpool.engine.policy import AIMD, Adaptive, Cork, Deadline, Greedy, OneByOne, Policy, Static
from carpool.engine.policy.steps import SetView, StepPolicy
from carpool.engine.request import DEFAULT_LANE, DONE, NEW, QUEUED, RUNNING, Lane, Request, Stream
from carpool.errors import DeadlineExceeded, InvalidRequest, ModelError, Overloaded, Unavailable
from tests.support.pipelines import Listed, state_of
from tests.support.shapes import Early, Fate, Made, Shape, choose, compute, declared, dice, failed
from tests.support.steps import Said, State, StubWorker, columns, end_of, part_of

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
DROPPING = {"aimd", "cork", "deadline", "adaptive", "adversary"}
"""Policies that refuse even who is patient."""

MADE = Made()
"""What a stage makes that makes no errors."""

HOLDING_BACK = {"static", "static from idle", "cork", "adaptive"}
"""Policies that let requests wait beside an idle worker."""

LATE = ("slo", "deadline")

LONE = 2**62
"""Ids from here on are those of lone calls."""


class Adversary(StepPolicy):
    """Lets in any number at any time, and finds any request late, as its dice fall."""

    def __init__(self, rows: int, random: Random) -> None:
        super().__init__(rows)
        self.random = random
        self.is_kind = False

    @property
    def pace_s(self) -> float:
        return self.random.choice([0.0, 1.0, inf])

    def join(self, now: float, heads: Sequence[Request], running: SetView) -> int:
        assert heads
        return len(heads) if self.is_kind else self.random.randint(0, len(heads))

    def is_late(self, now: float, request: Request) -> bool:
        return not self.is_kind and self.random.random() < 0.2

    def first_part_s(self, length: int) -> float:
        return 3.0


@dataclass(frozen=True)
class StageSpec:
    """A stage to be made. One that makes parts has the policy "adversary", and `limit` rows."""

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
    made: Made = MADE
    units: float = inf  # of a running set
    resumable: bool = False
    silence_s: float = inf
    max_stream_s: float = inf
    seed: int = 0

    def make(self) -> Crew:
        queue = Queue(self.max_size, self.max_bytes)
        if self.made.in_parts:
            return Stepper(
                "steps",
                Adversary(self.limit, Random(self.seed)),
                queue,
                rows=self.limit,
                limit=self.units,
                resumable=self.resumable,
                silence_s=self.silence_s,
                max_stream_s=self.max_stream_s,
                max_batch_time_s=self.max_batch_time_s,
                patience_s=self.patience_s,
                idempotent=self.idempotent,
                measure=lambda part: 1,
            )
        kind = POLICIES[self.policy]
        policy = OneByOne() if kind is OneByOne else kind(self.limit, float(self.delay_s))
        return Batcher(
            "stage",
            policy,
            queue,
            max_batch_time_s=self.max_batch_time_s,
            patience_s=self.patience_s,
            idempotent=self.idempotent,
            runs_ahead=self.ahead,
            weigh=_weigh if self.sized else None,
        )


@dataclass(frozen=True)
class AskSpec:
    """A request to be made."""

    flow: int = 0
    timeout: float = inf
    nbytes: int = 0
    lane: Lane = DEFAULT_LANE
    patient: bool = True
    cancelled: bool = False
    size: int = 1
    bulk: bool = False
    reads_parts: bool = False
    has_stream: bool = False  # although it does not read the parts
    own_timeout: bool = False


class Ask:
    """One caller, and what it has heard."""

    def __init__(self, number: int, now: float, spec: AskSpec, fate: Fate) -> None:
        self.number = number
        self.spec = spec
        self.came = now
        self.fate = fate
        self.ran: Counter[tuple[int, str]] = Counter()
        self.request = request = Listed((number,), now + spec.timeout, caller=self, nbytes=spec.nbytes)
        request.lane, request.patient, request.size, request.bulk = spec.lane, spec.patient, spec.size, spec.bulk
        self.own_until = inf
        if spec.reads_parts or spec.has_stream:
            self.own_until = now + spec.timeout if spec.own_timeout else inf
            request.stream = Stream(is_collected=not spec.reads_parts, until=self.own_until)
        request.lot = ()
        self.lot: Sequence[Ask] = (self,)
        self.heard: list[object] = []
        self.told = 0
        self.cancelled = False
        self.gone_at = inf  # when it was cancelled, or failed with all others
        self.is_guilty = False  # two workers were lost with one of its requests,
        self.has_hung = False  # the second of which had been given up
        self.was_lost = False

    def take_part(self, request: Request, part: object) -> None:
        assert request is self.request
        assert not self.told and not self.cancelled and self.spec.reads_parts
        self.heard.append(part)

    def answered(self, request: Request) -> None:
        assert request is self.request
        self.told += 1

    @property
    def inside(self) -> bool:
        return self.request.state in (QUEUED, RUNNING)


@dataclass
class Tale:
    """What has become of one request in one stage."""

    tries: int = 0  # how many workers were given it,
    lost: int = 0  # how many of them died with it,
    left: int = 0  # and how many left it without being lost
    has_hung: bool = False


@dataclass
class Sent:
    """What a stub worker was given and has not answered."""

    batch: Batch
    id: int
    ids: list[int]
    items: dict[int, Any]
    turns: dict[int, int]  # how many ways each result has that names its own
    call_started: float
    heard: float
    killed: bool = False


Place = tuple[int, int]
"""The position of a stage, and of one of its workers."""


@dataclass
class World:
    """The core and all around it."""

    specs: Sequence[StageSpec]
    shapes: Sequence[Shape]
    journal: bool = False
    slo_s: float | None = None
    now: float = 0.0
    asks: list[Ask] = field(default_factory=list)
    ready: set[Place] = field(default_factory=set)
    sent: dict[Place, Sent] = field(default_factory=dict)
    ahead: dict[Place, list[Batch]] = field(default_factory=dict)
    steppers: dict[Place, StubWorker] = field(default_factory=dict)
    post: list[tuple[StubWorker, SetReport]] = field(default_factory=list)
    past: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    finished: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # size and seconds of batches, per stage
    tales: dict[tuple[int, Node], Tale] = field(default_factory=dict)
    known: dict[int, Request] = field(default_factory=dict)  # those that were given to workers, by id
    happened: set[str] = field(default_factory=set)  # that is rare
    leaving: set[Place] = field(default_factory=set)
    lent: dict[Place, Ask | None] = field(default_factory=dict)  # with the lone call under way, if one is
    lone: int = 0  # how many lone calls have begun
    has_lost: bool = False
    held: bool = False
    closed: bool = False
    wake_at: float = inf

    def __post_init__(self) -> None:
        self.made = [spec.made for spec in self.specs]
        self.crews: list[Any] = [spec.make() for spec in self.specs]
        settings: dict[str, Any] = {"slo_s": self.slo_s, "content": WorldContent(self)}
        first, *others = [declared(shape, self.crews) for shape in self.shapes]
        self.core = Core(self.crews, first, journal=Journal() if self.journal else None, **settings)
        self.flows = [self.core.flow, *[self.core.serve(other, **settings) for other in others]]
        self.workers = [(stage, place) for stage, spec in enumerate(self.specs) for place in range(spec.workers)]
        bodies = [block.body for flow in self.flows for block in flow.graph.blocks if isinstance(block, Each)]
        starts = [*bodies, *[flow.graph.start for flow in self.flows]]
        self.begun_lists = {each for start in starts for each in needs_of(start)[1]}  # which a poll may begin
        self.is_line = len(self.shapes) == 1 and self.shapes[0] == list(range(len(self.specs)))
        self.lends = self.is_line and len(self.crews) == 1 and not self.made[0].in_parts and not self.journal
        self.nodes = [node for flow in self.flows for node in flow.graph.nodes]
        if any(isinstance(after, int) for shape in self.shapes for after in [shape]):
            raise TypeError("a graph is a list")

    # -- callers

    def submit(self, specs: Sequence[AskSpec], is_lot: bool = False) -> None:
        """Callers come; or one that waits for all of these as a whole, which have one deadline."""
        if is_lot:
            first = specs[0]
            specs = [replace(x, flow=first.flow, timeout=first.timeout, patient=first.patient) for x in specs]
        new: dict[int, list[Ask]] = {}
        for spec in specs:
            number, at = len(self.asks), spec.flow % len(self.flows)
            ask = Ask(number, self.now, spec, Fate(self.made, self.shapes[at], (number,)))
            self.asks.append(ask)
            new.setdefault(at, []).append(ask)
            if spec.cancelled:
                self.core.cancel(self.now, ask.request)
                ask.cancelled = True
        for at, of_flow in new.items():
            if is_lot:
                for ask in of_flow:
                    ask.lot = of_flow
                    ask.request.lot = [each.request for each in of_flow]
            self.flows[at].submit(self.now, [ask.request for ask in of_flow])
            for ask in of_flow:
                assert not (ask.request.id and ask.cancelled)

    def cancel(self, pick: int) -> None:
        if self.asks:
            ask = self.asks[pick % len(self.asks)]
            if ask.inside:
                ask.cancelled = True
                ask.gone_at = self.now
                self._note_if_ahead(ask, "was cancelled")
            self.core.cancel(self.now, ask.request)
            assert ask.request.state == DONE

    def pause(self, pick: int, is_paused: bool) -> None:
        """A caller wants no more parts for now, or wants them again."""
        if self.asks:
            self.core.pause(self.now, self.asks[pick % len(self.asks)].request, is_paused)

    def _note_if_ahead(self, ask: Ask, what: str) -> None:
        lying = [request for batches in self.ahead.values() for batch in batches for request in batch.requests]
        if any(self._ask_of(request) is ask for request in lying):
            self.happened.add(f"lay ahead when it {what}")

    def _ask_of(self, request: Request) -> Ask | None:
        """The caller for whom a request is; None if that has gone."""
        while isinstance(request.caller, Siblings):
            request = request.caller.parent
        return next((ask for ask in self.asks if ask.request is request), None)

    # -- workers

    def worker_ready(self, pick: int) -> None:
        absent = [worker for worker in self.workers if worker not in self.ready]
        if absent:
            self._start(absent[pick % len(absent)])

    def _start(self, worker: Place) -> None:
        self.ready.add(worker)
        stage, place = worker
        self.core.worker_ready(stage, place)
        if self.made[stage].in_parts:
            self.steppers[worker] = StubWorker(place, self.specs[stage].limit, self.specs[stage].units, stage)

    def worker_lost(self, pick: int, is_unsent: bool = False) -> None:
        """It dies; a request that it alone had, and that was with one that died before, is to blame."""
        worker = self._gone(pick)
        if worker is not None:
            self._lose(worker, is_unsent)

    def _lose(self, worker: Place, is_unsent: bool) -> None:
        stage = worker[0]
        self.has_lost = True
        if worker in self.steppers:
            self._lose_stepper(worker, is_unsent)
            return
        self._lose_ahead(worker)
        sent, blamed = self._forget(worker), False
        unsent = [id for id in (sent.items if sent else ()) if is_unsent and id % 2]
        for id in sent.items if sent else ():
            tale = self._tale(self.known[id], stage)
            if id in unsent:
                tale.left += 1
                continue
            tale.lost += 1
            tale.has_hung = sent is not None and sent.killed
            self._blame(self.known[id], tale.lost, tale.has_hung)
            blamed = sent is not None and len(sent.items) == 1 and tale.lost == MOST_LOSSES
        assert self.core.worker_lost(self.now, *worker, unsent) is blamed

    def _blame(self, request: Request, lost: int, has_hung: bool) -> None:
        ask = self._ask_of(request)
        if ask is not None:
            ask.was_lost = True
            if lost == MOST_LOSSES:
                ask.is_guilty = True
                ask.has_hung = ask.has_hung or has_hung

    def _lose_stepper(self, worker: Place, is_unsent: bool) -> None:
        stub = self.steppers.pop(worker)
        self.post = [(sender, report) for sender, report in self.post if sender is not stub]
        untold = [request for order in stub.inbox for request in order.join] if is_unsent else []
        before = {id: request.losses for id, request in self.known.items()}
        hung = bool(self.crews[worker[0]].sets[worker[1]].given_up)
        inside = [ask for ask in self.asks if ask.inside]
        self.core.worker_lost(self.now, *worker, [request.id for request in untold])
        for id, request in self.known.items():
            if request.losses > before[id]:
                assert request not in untold
                if request.losses >= MOST_LOSSES:
                    assert request.state == DONE
        for ask in inside:
            if not ask.inside and ask.request.error is not None:
                ask.was_lost = True
                ask.is_guilty, ask.has_hung = True, ask.has_hung or hung
        for request in untold:
            self._tale(request, worker[0]).left += 1

    def worker_left(self, pick: int) -> None:
        """It goes, and no request is to blame."""
        worker = self._gone(pick)
        if worker is None:
            return
        self.has_lost = True
        stub = self.steppers.pop(worker, None)
        if stub is not None:
            self.post = [(sender, report) for sender, report in self.post if sender is not stub]
            for ask in self.asks:
                ask.was_lost = ask.was_lost or ask.inside
        self._lose_ahead(worker)
        sent = self._forget(worker)
        for id in sent.items if sent else ():
            self._tale(self.known[id], worker[0]).left += 1
        self.core.worker_left(self.now, *worker)

    def drain(self, pick: int) -> None:
        """A worker is to go once it has finished what it has."""
        staying = sorted(self.ready - self.leaving)
        if staying:
            worker = staying[pick % len(staying)]
            self.leaving.add(worker)
            self.core.drain(*worker)
            self.happened |= {"to go while it was lent"} if worker in self.lent else set()

    def hold(self, pick: int) -> None:
        """The stages at which requests begin are to start nothing for now, or to go on."""
        self.held = bool(pick % 2)
        self.core.hold(self.held)

    def _lose_ahead(self, worker: Place) -> None:
        """It has not looked at its next batches."""
        for batch in self.ahead.pop(worker, ()):
            self.happened.add("lay ahead when its worker was lost")
            for request in batch.requests:
                self._tale(request, worker[0]).left += 1

    def _gone(self, pick: int) -> Place | None:
        """The worker that goes; if it is lent, a call under way is taken back before, else it may go without."""
        there = sorted(self.ready)
        if not there:
            return None
        worker = there[pick % len(there)]
        if worker in self.lent:
            self.happened.add("gone while it was lent")
            if self.lent[worker] is not None or pick % 3:
                self._take_back(worker)
            else:
                del self.lent[worker]
        self.ready.remove(worker)
        self.leaving.discard(worker)
        return worker

    def _tale(self, request: Request, stage: int) -> Tale:
        assert request.node.crew is self.crews[stage]
        return self.tales[request.id, request.node]

    # -- workers that answer batches

    def reply(self, pick: int, busy_s: float, fail: Collection[int] = ()) -> None:
        """A worker answers all that it owes."""
        if self.sent:
            worker = sorted(self.sent)[pick % len(self.sent)]
            self._reply(worker, list(self.sent[worker].items), busy_s)

    def reply_oddly(self, pick: int, busy_s: float, order: Sequence[int], foreign: Sequence[int], n: int) -> None:
        """In any order, in part, and with answers that nobody had asked this worker for."""
        if self.sent:
            worker = sorted(self.sent)[pick % len(self.sent)]
            owed = list(self.sent[worker].items)
            ids = [*owed, *foreign, *owed[:1]]
            ids = [ids[i] for i in order if i < len(ids)]
            self._reply(worker, ids[:n], busy_s)

    def _reply(self, worker: Place, ids: list[int], busy_s: float) -> None:
        stage, sent = worker[0], self.sent[worker]
        items = dict(sent.items)
        results: list[object] = []
        errors: dict[int, Exception] = {}
        turns: dict[int, object] = {}
        for i, id in enumerate(ids):
            result: Any = "stolen"
            if id in items:
                result = compute(self.made[stage], stage, items.pop(id))
                if isinstance(result, ModelError):
                    errors[i] = result
                elif isinstance(result, Early):
                    result, turns[i] = result.value, DONE_EARLY
                elif id in sent.turns:
                    turns[i] = choose(sent.turns[id])(result)
            else:
                errors[i] = ModelError("stolen")
            results.append(result)
        self.core.completed(self.now, Reply(*worker, sent.id, ids, results, errors or None, busy_s, 0.0, turns or None))
        if items != sent.items:
            sent.heard = self.now
        sent.items = items
        if not items:
            self._forget(worker)
            self.finished.setdefault(stage, []).append((sent.batch.size, self.now - sent.batch.started))
            lying = self.ahead.get(worker)
            if lying:
                following = lying.pop(0)
                if not lying:
                    del self.ahead[worker]
                assert following.started == self.now
                self._takes_up(worker, following, self.now)

    def _forget(self, worker: Place) -> Sent | None:
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
        before = self._fingerprint(), self.crews[stage].stray_replies
        self.core.completed(self.now, Reply(stage, sender, batch_id, ids, ["stolen"] * len(ids)))

        assert self._fingerprint() == before[0]
        assert self.crews[stage].stray_replies == before[1] + len(ids)

    def call_started(self, pick: int) -> None:
        if self.sent:
            worker = sorted(self.sent)[pick % len(self.sent)]
            sent = self.sent[worker]
            sent.call_started = self.now  # of no use to one that is being killed
            self.core.restart_hang_timer(self.now, *worker, sent.id)

    def restart_hang_timer(self, pick: int) -> None:
        """A worker that seemed to hang does not."""
        if self.sent:
            worker = sorted(self.sent)[pick % len(self.sent)]
            self.sent[worker].call_started = self.now
            self.sent[worker].killed = False
            self.crews[worker[0]].restart_hang_timer(self.now, worker[1])

    def ran_out(self, pick: int, positions: Collection[int]) -> None:
        """A call for some of a batch has run out of memory; smaller batches are made from now on."""
        whole = [worker for worker, sent in sorted(self.sent.items()) if len(sent.items) == len(sent.ids)]
        if whole:
            stage, worker = whole[pick % len(whole)]
            sent = self.sent[stage, worker]
            call = sorted({position % len(sent.ids) for position in positions})
            self.crews[stage].ran_out_of_memory(worker, sent.id, [call], [call[:1]])
            tried = sum([request.size for i, request in enumerate(sent.batch.requests) if i in call])
            assert self.crews[stage].safe_size.limit < tried or tried == 1 or self._is_weighted(stage)

    def _is_weighted(self, stage: int) -> bool:
        return self.specs[stage].sized or any(ask.spec.size > 1 for ask in self.asks)

    # -- workers that are lent

    def lend(self) -> None:
        """The only stage lends a worker, if a lone request would go at once."""
        if self.lends and not self.closed:
            place = self.crews[0].lend(self.now, inf, self.core.flow.slo_s)
            if place is not None:
                assert not self.sent and not self.lent and not self.core.waiting
                assert (0, place) in self.ready - self.leaving
                self.lent[0, place] = None
                self.happened.add("lent")

    def lone_call(self, timeout: float) -> None:
        """A caller begins a call with the worker that is lent, of which the core does not learn yet."""
        for worker, under_way in self.lent.items():
            if under_way is None:
                self.lone += 1
                fate = Fate(self.made, self.shapes[0], (-self.lone,))
                self.lent[worker] = Ask(-self.lone, self.now, AskSpec(timeout=timeout), fate)

    def lone_done(self, busy_s: float) -> None:
        """It has its answer, and the core learns of it now."""
        for worker, ask in self.lent.items():
            if ask is None:
                continue
            made = compute(self.made[0], 0, ask.request.item)
            is_error = isinstance(made, ModelError)
            ask.request.id, ask.request.state, ask.told = LONE - ask.number, DONE, 1
            ask.request.error = made if is_error else None
            self.asks.append(ask)
            self.lent[worker] = None
            self.finished.setdefault(0, []).append((1, self.now - ask.came))
            before = self._accounts()
            self.core.lone_done(self.crews[0], worker[1], ask.came, self.now, busy_s, not is_error)
            assert [new - old for old, new in zip(before, self._accounts(), strict=True)] == [1, 1, 1, 1, is_error]
            self.happened.add("answered alone")

    def take_back(self) -> None:
        """The worker that is lent is taken back, whatever it has."""
        for worker in list(self.lent):
            self._take_back(worker)

    def _take_back(self, worker: Place) -> None:
        """The call under way, if one is, becomes a batch that the worker has had since the call began."""
        ask = self.lent.pop(worker)
        if ask is None:
            assert self.core.take_back(self.crews[0], worker[1]) is None
            return
        self.asks.append(ask)
        id, before = LONE - ask.number, self._accounts()
        batch = self.core.take_back(self.crews[0], worker[1], ask.request, ask.came, id)
        assert batch is not None
        assert (batch.id, batch.ids, batch.requests, batch.place) == (id, [id], [ask.request], worker[1])
        assert (ask.request.id, batch.started) == (id, ask.came)
        assert [new - old for old, new in zip(before, self._accounts(), strict=True)] == [1, 1, 0, 0, 0]
        self._given(0, ask.request, ask.came)
        self._takes_up(worker, batch, ask.came)
        self.happened.add("taken back amid a call")

    def _accounts(self) -> list[int]:
        """How many requests have come, were admitted, were answered, went alone, and failed alone or not."""
        flow = self.core.flow
        return [self.core.offered(0), flow.admitted, flow.answered, flow.alone, flow.failed]

    # -- workers that step

    def boundary(self, pick: int, random: Random, most: int, returned: int) -> None:
        """A worker comes to a boundary: it reads orders, steps, and posts its report."""
        if not self.steppers:
            return
        worker = self.steppers[sorted(self.steppers)[pick % len(self.steppers)]]
        has_news = worker.follow(most)
        if worker.stopped and not has_news:
            return
        if worker.active:
            self.happened |= {"ran out"} if returned else set()
            report = worker.step(lambda state: self._outcome(worker.stage, state, random), returned)
        else:
            worker.stopped = True
            report = SetReport(worker.stage, worker.place, worker.seen, True)
        self.post.append((worker, report))

    def _outcome(self, stage: int, state: State, random: Random) -> Said | None:
        """What a step makes of a stream: mostly its next part, now and then none, and in the end its end."""
        made = compute(self.made[stage], stage, state.request.item)
        if isinstance(made, ModelError):
            return Said(state.request.id, error=made)
        if state.made >= made:
            return end_of(state)
        if random.random() < 0.2:
            return None
        return part_of(state, last=state.made + 1 == made and random.random() < 0.7)

    def deliver(self, pick: int) -> None:
        """The oldest report of a worker arrives."""
        if self.post:
            sender = self.post[pick % len(self.post)][0]
            at = next(i for i, (worker, _) in enumerate(self.post) if worker is sender)
            _, report = self.post.pop(at)
            self.core.reported(self.now, report)

    def go_on(self, random: Random) -> None:
        """All workers step once, with reports and orders as quick as they can be."""
        self.poll()
        for pick in range(len(self.steppers)):
            self.boundary(pick, random, 1000, 0)
        while self.post:
            self.deliver(0)
        self.poll()

    def misreport(self, pick: int) -> None:
        """A worker names a stream that it never had, or an order that was not sent: nothing is done."""
        self.poll()
        if not self.steppers:
            return
        worker = self.steppers[sorted(self.steppers)[pick % len(self.steppers)]]
        crew = self.crews[worker.stage]
        known = crew.sets[worker.place]
        before = (known.seen, dict(known.members), crew.stray_parts)
        twice = columns([Said(id, 1) for id in [*known.members][:1] * 2])
        wrong = [
            SetReport(worker.stage, worker.place, known.number + 1, False),
            SetReport(worker.stage, worker.place, known.seen, False, columns([Said(10_000_000, 1)])),
            SetReport(worker.stage, worker.place, known.seen, False, twice),
            SetReport(worker.stage, 99, 0, False),
        ]
        for report in wrong:
            if len(report.parts.ids) == 0 and report.seen == known.seen and report.place == worker.place:
                continue
            with pytest.raises(ValueError, match="worker"):
                self.core.reported(self.now, report)
        assert before == (known.seen, dict(known.members), crew.stray_parts)

    # -- the end

    def close(self) -> None:
        self.closed = True
        self.core.close(Unavailable("closed"))

    def abort(self) -> None:
        self.take_back()  # a call under way is one of those inside
        self.closed = True
        for ask in self.asks:
            if ask.inside:
                ask.gone_at = self.now
        self.core.abort(self.now, Unavailable("aborted"))

        assert not [ask for ask in self.asks if ask.inside]

    # -- mistakes

    def mistake(self, pick: int) -> None:
        """What a driver must not do raises, and nothing has happened."""
        before = self._fingerprint()
        known = [ask.request for ask in self.asks if ask.request.id]
        if known:
            with pytest.raises(ValueError, match="was submitted before"):
                self.core.flow.submit(self.now, [Request("new", inf), known[pick % len(known)]])
        if self.ready:
            worker = sorted(self.ready)[pick % len(self.ready)]
            with pytest.raises(ValueError, match="ready already"):
                self.core.worker_ready(*worker)
        if self.sent:
            worker = sorted(self.sent)[pick % len(self.sent)]
            ids = self.sent[worker].batch.ids
            with pytest.raises(ValueError, match="results for"):
                self.core.completed(self.now, Reply(*worker, self.sent[worker].id, ids, ["stolen"] * (len(ids) + 1)))
        assert self._fingerprint() == before

    def _fingerprint(self) -> tuple[object, ...]:
        states = [state_of(crew)[:-1] for crew in self.crews if isinstance(crew, Batcher)]  # no count of stray replies
        told = [(ask.told, ask.request.state) for ask in self.asks]
        counts = [(flow.admitted, flow.refused, flow.answered, flow.cancelled) for flow in self.flows]
        return states, told, counts, self.core.waiting

    # -- time

    def poll(self) -> None:
        todo = self.core.poll(self.now)
        for batch in todo.run:
            self._dispatched(batch)
        for request, part in todo.parts:  # some may be of streams that join another worker in this very poll
            request.tell_part(part)
        for order in todo.orders:
            self.steppers[order.stage, order.place].inbox.append(order)
            assert not (order.join and (order.stage, order.place) in self.leaving)
            for request in order.join:
                self._joins(order.stage, request)
        for worker in todo.kill:
            self._killed(worker)
        for worker in todo.drained:
            self._drained(worker)
        for request in todo.answer:
            request.tell()
            self._answered(request)
        self.wake_at = todo.wake_at
        if todo.recall:
            self._recalled(todo.recall)
            self.poll()
            return
        self.check_after_poll()
        for worker in todo.kill:
            if worker in self.steppers:
                self.ready.remove(worker)
                self.leaving.discard(worker)
                self._lose(worker, is_unsent=False)
                self.wake_at = self.now

    def _recalled(self, workers: Sequence[Place]) -> None:
        """Workers that are lent should come back: there is a reason, and they do."""
        for stage, place in workers:
            crew = self.crews[stage]
            assert self.closed or (stage, place) in self.leaving or (crew.queue.count and not crew.idle)
        for worker in workers:
            self._take_back(worker)
        self.happened.add("recalled")

    def _killed(self, worker: Place) -> None:
        if worker in self.steppers:
            return
        sent = self.sent[worker]
        assert self._given_up_at(worker[0], sent) <= self.now or self._far_too_slow(worker[0], sent)
        assert not sent.killed
        sent.killed = True

    def _drained(self, worker: Place) -> None:
        """A worker that was to go has nothing left: it has followed all orders, and nothing of it is on its way."""
        assert worker not in self.sent and worker not in self.lent
        self.leaving.remove(worker)
        self.ready.remove(worker)
        self.happened.add("drained")
        stub = self.steppers.pop(worker, None)
        if stub is not None:
            assert not stub.states and not stub.inbox
            assert not [sender for sender, _ in self.post if sender is stub]

    def _given_up_at(self, stage: int, sent: Sent) -> float:
        """When a call is over its limit, or over all patience since nobody waits for it."""
        spec = self.specs[stage]
        if spec.max_batch_time_s < inf:
            return sent.call_started + spec.max_batch_time_s
        owed = [self.known[id] for id in sent.items]
        if any(request.state == RUNNING for request in owed):
            return inf
        asked = {ask.request: ask for ask in self.asks}  # of children nobody knows but the core when they went
        gone_at = max([min(r.deadline, asked[r].gone_at if r in asked else inf) for r in owed])
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
            self.now = max(self.wake_at, self.now + 2**-20 * (self.wake_at <= self.now))
            self.poll()
        self.now = max(self.now, until)

    def jump(self, seconds: float) -> None:
        """The driver is held up, and looks too late."""
        self.now += seconds

    def _dispatched(self, batch: Batch) -> None:
        worker, stage = (batch.stage, batch.place), batch.stage
        limit = self.crews[stage].lobby.policy.limit
        assert worker in self.ready
        assert worker not in self.leaving and worker not in self.lent
        assert len(self.ahead.get(worker, ())) < ahead.MOST
        assert batch.ahead is (worker in self.sent)
        assert not batch.ahead or (self.specs[stage].ahead and self.specs[stage].idempotent)
        assert not batch.ahead or not self.sent[worker].killed
        assert len(batch) == 1 or 1 < sum(request.size for request in batch.requests) <= limit
        assert len({_origin(request) for request in batch.requests}) == 1
        for request in batch.requests:
            assert not request.node.is_held
            assert not any(each.door.queue.count for each in request.node.doors if each not in self.begun_lists)
            self._given(stage, request, self.now)
            tale = self.tales[request.id, request.node]
            assert tale.tries == 1 + tale.lost + tale.left
            assert tale.lost <= self.specs[stage].idempotent
            assert not tale.lost or len(batch) == 1  # it is under suspicion
        if batch.ahead:
            assert not any(isinstance(request.lane.key, Suspect) for request in batch.requests)
            lying = self.ahead.setdefault(worker, [])
            lying.append(batch)
            self.happened.add("went ahead" if len(lying) == 1 else "went ahead behind another")
        else:
            self._takes_up(worker, batch, self.now)

    def _given(self, stage: int, request: Request, at: float) -> None:
        """A worker is given a request, or was `at` a time: its caller waits for it, and its item belongs there."""
        ask = self._ask_of(request)
        assert ask is not None
        assert not ask.cancelled and request.node.crew is self.crews[stage]
        if request.state == RUNNING:
            assert ask.inside and request.deadline > at
        else:  # what a sibling has come to in this very poll has ended both
            assert isinstance(request.caller, Siblings) and not ask.inside
            self.happened.add("left between the decision and the worker")
        self.known[request.id] = request
        tale = self.tales.setdefault((request.id, request.node), Tale())
        if not tale.tries:
            ask.ran[stage, repr(request.item)] += 1
            runs = ask.fate.runs[stage, repr(request.item)]
            assert ask.ran[stage, repr(request.item)] <= runs or "a loss is a value" in self.happened
        tale.tries += 1

    def _joins(self, stage: int, request: Request) -> None:
        spec, stream = self.specs[stage], stream_of(request)
        self._given(stage, request, self.now)
        tale = self.tales[request.id, request.node]
        assert spec.idempotent or tale.tries - tale.left == 1
        assert spec.resumable or not stream.parts
        ask = self._ask_of(request)
        assert ask is not None
        assert stream.kept == (ask.heard if ask.request is request else [])

    def _takes_up(self, worker: Place, batch: Batch, at: float) -> None:
        items, turns = {}, {}
        for request in batch.requests:
            items[request.id] = request.item
            after = request.node.after
            if isinstance(after, Switch) and after.choose is None:
                turns[request.id] = len(after.ways)
        self.sent[worker] = Sent(batch, batch.id, list(batch.ids), items, turns, at, at)

    def _answered(self, request: Request) -> None:
        """The answer is its own, and what it says is true."""
        ask = next(ask for ask in self.asks if ask.request is request)
        assert ask.told == 1
        assert not ask.cancelled
        error, outcomes = request.error, ask.fate.outcomes
        if error is None:
            if ask.spec.reads_parts and isinstance(getattr(request.node, "crew", None), Stepper):
                assert request.result is None
                assert ("ok", repr(len(ask.heard))) in outcomes or "a loss is a value" in self.happened
            else:
                assert ("ok", repr(request.result)) in outcomes or "a loss is a value" in self.happened
        elif isinstance(error, DeadlineExceeded) and "two workers" in str(error):
            assert ask.is_guilty
            assert ask.has_hung
        elif isinstance(error, DeadlineExceeded):
            assert request.deadline <= self.now or not self.is_line or request.stream is not None
            self._note_if_ahead(ask, "expired")
        elif isinstance(error, ModelError) and error.code == "request_crashed_worker":
            assert ask.is_guilty
        elif isinstance(error, ModelError):
            text = str(error)
            if text.startswith("MemoryError"):
                assert "ran out" in self.happened
                return
            text = "nowhere" if "there is no branch" in text else "list" if "takes a list" in text else text
            known = any(("error", text) in each.fate.outcomes for each in ask.lot)
            assert known or "a loss is a value" in self.happened, (text, outcomes)
        elif isinstance(error, Overloaded):
            by_policy = any(spec.policy in DROPPING for spec in self.specs)
            is_unserved = error.reason == "slo" and self.slo_s is not None
            is_refused = error.reason == "queue_full" and "refuse" in str(self.shapes)
            assert is_refused or not request.patient or (error.reason in LATE and (by_policy or is_unserved))
        elif isinstance(error, InvalidRequest):
            assert sum(each.spec.nbytes for each in ask.lot) > min(
                [node.crew.queue.max_bytes for node in self.nodes if node.is_first]
            )
        else:
            assert isinstance(error, Unavailable)
            assert self.closed or (error.code == "worker_lost" and ask.was_lost)

    # -- what must hold

    def everywhere(self) -> Iterator[tuple[Request, object]]:
        """Each request that is inside, with where it is: a door, a crew's queue, a crew's workers, or its children."""
        for door in self.core.doors:
            for request in door.queue:
                assert request.state == QUEUED
                yield request, door
        for crew in self.crews:
            for request in crew.queue:
                assert request.state == QUEUED and request.node.crew is crew
                yield request, crew.queue
            for request in crew.owed:
                assert request.state == RUNNING and request.node.crew is crew
                yield request, crew
        for parent, siblings in self.core._transit.families.items():
            assert parent.state == RUNNING
            assert len(siblings.results) < len(siblings.children)
            yield parent, siblings

    def check_always(self) -> None:
        """The counts add up, each request is in one place, no queue is over its bounds, and no child outlives its
        parent.
        """
        core, families = self.core, self.core._transit.families
        inside: dict[Request, object] = {}
        for request, place in self.everywhere():
            assert request not in inside
            inside[request] = place
            if isinstance(request.caller, Siblings):
                assert families.get(request.caller.parent) is request.caller
        for flow, shape in zip(self.flows, range(len(self.shapes)), strict=True):
            asks = [ask for ask in self.asks if ask.spec.flow % len(self.flows) == shape]
            admitted = [ask for ask in asks if ask.request.id]
            n_inside, n_cancelled = sum(ask.inside for ask in admitted), sum(ask.cancelled for ask in admitted)
            assert flow.admitted == len(admitted) == flow.answered + n_cancelled + n_inside
            assert (flow.cancelled, flow.unanswered) == (n_cancelled, n_inside)
            for block in flow.graph.blocks:
                assert block.running == sum(siblings.block is block for siblings in families.values())
        for ask in self.asks:
            assert ask.request.state != NEW
            assert ask.told + ask.cancelled <= 1
            assert (ask.request in inside) == ask.inside
            assert ask.heard == list(range(len(ask.heard)))
        assert core.waiting == sum(request.state == QUEUED for request in inside)
        for stage, crew in enumerate(self.crews):
            self._check_queue(crew, [request for request, place in inside.items() if place is crew.queue])
            if isinstance(crew, Stepper):
                self._check_sets(self.specs[stage], crew)
            else:
                self._check_batches(stage, crew, {request for request, place in inside.items() if place is crew})

    def _check_queue(self, crew: Crew, waiting: list[Request]) -> None:
        """Its counts are right, and it holds no more than it may, but for what has come back from lost workers."""
        queue = crew.queue
        assert queue.count == len(waiting)
        kept = sum(request.stream.kept_bytes for request in self._streams_of(crew) if request.state == RUNNING)
        assert queue.nbytes == sum([request.nbytes for request in waiting]) + kept
        assert queue.size == sum([request.size for request in waiting])
        for node in crew.lobby.nodes:
            mine = [request for request in waiting if request.node is node]
            nbytes = sum([request.nbytes for request in mine]) + (0 if node.is_shared else kept)
            assert (node.queued, node.nbytes) == (len(mine), nbytes)
            new = [request for request in mine if not self.tales.get((request.id, node))]
            assert len(new) <= queue.max_size
            if node.begins:
                assert sum([request.nbytes for request in new]) <= queue.max_bytes
            if not self.has_lost and "ran out" not in self.happened:
                assert node.places() >= 0

    def _streams_of(self, crew: Crew) -> list[Any]:
        if not isinstance(crew, Stepper):
            return []
        known = self.known.values()
        return [request for request in known if request.stream is not None and request.node in crew.lobby.nodes]

    def _check_batches(self, stage: int, crew: Batcher, running: set[Request]) -> None:
        mine = {place: sent for (at, place), sent in self.sent.items() if at == stage}
        lying = {place: batches for (at, place), batches in self.ahead.items() if at == stage}
        owed = [id for sent in mine.values() for id in sent.items]
        owed += [id for batches in lying.values() for batch in batches for id in batch.ids]
        assert {place: batch.id for place, batch in crew.in_flight.items()} == {
            at: sent.id for at, sent in mine.items()
        }
        assert crew.ahead == lying
        assert crew.running == len(owed)
        assert {request.id for request in running} <= set(owed)
        assert crew.places.lent == {place for at, place in self.lent if at == stage}
        unused = [worker for worker in self.ready - self.leaving - self.lent.keys() if worker not in self.sent]
        assert crew.idle == sum(at == stage for at, _ in unused)
        assert crew.has_worker is bool(crew.idle or mine or crew.places.lent)

    def _check_sets(self, spec: StageSpec, crew: Stepper) -> None:
        for running in crew.sets.values():
            assert len(running) <= spec.limit
            assert len(running) <= 1 or running.size <= spec.units
            assert running.size == sum(request.size for request in running)
            assert running.resting == sum(stream_of(request).is_resting for request in running)
            for request in running:
                assert request.state == RUNNING and stream_of(request).place == running.place
        assert crew.running == sum(map(len, crew.sets.values()))

    def check_after_poll(self) -> None:
        """Whoever has to be told has been told, whatever can go has gone, and nobody will be forgotten."""
        assert self.leaving <= self.sent.keys() | self.steppers.keys()
        assert not self.lent.keys() & (self.sent.keys() | self.leaving) and not (self.lent and self.closed)
        for stage, _ in self.lent:
            assert self.crews[stage].idle or not self.crews[stage].queue.count
        needed, late = [], False
        for ask in self.asks:
            assert ask.told == (ask.request.state == DONE and not ask.cancelled)
        for request, place in self.everywhere():
            if isinstance(request.node, Node) and isinstance(request.node.crew, Stepper):
                if request.deadline <= self.now:  # it was let in too late
                    assert self.wake_at <= self.now
                    late = True
                else:
                    needed.append(request.deadline)
            elif not isinstance(place, Siblings):
                needed.append(request.deadline)
                if self.is_line and request.state == QUEUED and self._is_unserved(request):
                    needed.append(request.due)  # late for its SLO it would be refused
            elif request.stream is None:
                assert self.now < request.deadline
        for (index, _), sent in self.sent.items():
            if not sent.killed:
                needed.append(self._given_up_at(index, sent))
        for stage, crew in enumerate(self.crews):
            if isinstance(crew, Stepper):
                self._check_orders(stage, crew)
            elif crew.idle and crew.queue.count:
                needed += self._why_idle(stage, crew)
        assert min(needed, default=inf) > self.now
        assert (self.now < self.wake_at or late) and self.wake_at <= min(needed, default=inf)
        for door in self.core.doors:
            for request in door.queue.peek(1):
                assert not door.has_room(request.nbytes if door.begins else 0)

    def _why_idle(self, stage: int, crew: Batcher) -> list[float]:
        """When a worker that is idle beside a queue will be given something, at the latest."""
        queue, lobby, policy = crew.queue, crew.lobby, self.specs[stage].policy
        limit = min(lobby.policy.limit, crew.safe_size.limit)
        most = limit if queue.size == queue.count else inf
        is_open = False
        could_go = [each.lane for each in queue.order if each.live and (each.lane.source or lobby.nodes[0]).room() >= 1]
        suspects = [lane for lane in could_go[:1] if isinstance(lane.key, Suspect)]
        for node in lobby.nodes:
            if node.queued and not node.is_held:
                goes_alone = any(lane.source in (node, None) for lane in suspects)
                least = 1 if goes_alone else min(node.queued, most, node.most_room)
                if node.room() < least:
                    self.happened.add("held back for room")
                    assert self._is_taken(node)  # so that there will be room
                else:
                    is_open = True
        if not is_open:
            return []
        assert not suspects
        assert policy in HOLDING_BACK
        assert not self._is_last_call(crew)
        assert lobby.wake_at is not None
        if not policy.startswith("static") or node.is_shared:
            return [lobby.wake_at]
        assert queue.size < lobby.policy.limit
        return [lobby.wake_at, queue.oldest_arrival + self.specs[stage].delay_s]

    @staticmethod
    def _is_taken(node: Node) -> bool:
        """Whether something is under way whose end will make room behind a node."""
        for other in node.needs:
            if other.queued or any(source.running for source in other.sources):
                return True
        return any(each.door.queue.count for each in node.doors)

    def _check_orders(self, stage: int, crew: Stepper) -> None:
        """Every order that was due is out: a worker which follows all of its orders steps whom it should."""
        for place, running in crew.sets.items():
            worker = self.steppers[stage, place]
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
        for ask in self.asks:
            if ask.inside and ask.request.stream is not None and not ask.request.stream.is_paused:
                assert ask.request.deadline <= ask.own_until

    def _is_unserved(self, request: Request) -> bool:
        """Whether a stage of a line, or one behind it, has no worker, in a service with an SLO."""
        if self.slo_s is None:
            return False
        first = 0 if isinstance(request.node, Door) else request.node.crew.lobby.stage
        if request.stream is not None and request.stream.parts:
            return False
        served = {at for at, _ in self.ready}
        return any(index not in served for index in range(first, len(self.crews)))

    def _is_last_call(self, crew: Crew) -> bool:
        """Whether nobody can join a stage's queue any more: nothing is held back there."""
        if not self.closed:
            return False
        for request, place in self.everywhere():
            if place is crew.queue or isinstance(place, Siblings):
                continue
            if isinstance(place, Door) and place.begins and not place.has_room(request.nbytes):
                continue
            if not self.is_line or (place is not crew and place_of(request) < crew.lobby.stage):
                return False
        return True

    def settle(self, random: Random) -> None:
        """With workers that work, everybody is answered, in a bounded number of steps."""
        self.hold(0)
        self.take_back()
        for crew in self.crews:
            if isinstance(crew.lobby.policy, Adversary):
                crew.lobby.policy.is_kind = True
        for ask in self.asks:
            self.core.pause(self.now, ask.request, False)
        self.poll()
        for _ in range(200 + 40 * sum(ask.fate.runs.total() for ask in self.asks if ask.inside)):
            for worker in set(self.workers) - self.ready:
                self._start(worker)
            for worker in sorted(self.sent):
                self._reply(worker, list(self.sent[worker].items), 2**-14)
            self.go_on(random)
            if not self.core.unanswered and not self.sent:
                break
            if any(stub.active or stub.inbox for stub in self.steppers.values()):
                self.now += 2**-10
            elif not self.sent and self.ready == set(self.workers):  # one that was drained just now comes back first
                self.now = max(self.now, self.wake_at)
        self.go_on(random)
        self.check_always()
        assert not self.sent and not list(self.everywhere())
        for ask in self.asks:
            assert not ask.inside
            assert ask.told + ask.cancelled == 1
        for crew in self.crews:
            assert crew.queue.lanes <= 1  # those of quarantined and other requests are forgotten
            assert not crew.running and not crew.queue.nbytes
        for door in self.core.doors:
            assert door.queue.lanes <= 1
        for stub in self.steppers.values():
            stub.follow()
            assert not stub.states


class WorldContent(Plain):
    """Plain objects of a few bytes; an error that is a value has been foreseen, unless a worker was lost."""

    def __init__(self, world: World) -> None:
        self.world = world

    def measure(self, result: Any) -> int:
        return dice("bytes", result) % 3

    def as_value(self, error: Exception, accept: int) -> Any:
        if not str(error).startswith("of "):
            self.world.happened.add("a loss is a value")
        return failed(str(error))


def place_of(request: Request) -> float:
    """The position of the stage at which a request of a line is; below all others at the door."""
    node = request.node
    return node.crew.lobby.stage if isinstance(node, Node) else -1


def _weigh(request: Request, result: object, format: int = 0) -> None:
    """Give a request a size by what the stage before has made of it."""
    request.size = 1 + len(str(result)) % 3


def _origin(request: Request) -> tuple[object, int]:
    """What requests of one batch have in common."""
    _, key, bucket, _ = request.lane
    return (key.former_key if isinstance(key, Suspect) else key), bucket
