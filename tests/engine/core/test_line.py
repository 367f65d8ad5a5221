"""Callers who lead themselves: every order in which up to four threads can take their steps, explored to the end.

The threads are actors here. Between two steps of one, any other may take its own; a sleeper moves only when it is woken
or its time has come. All states that can be reached are visited once. A state in which nobody can move although
somebody is not served is a deadlock; a run that ends otherwise must have served each caller with its own answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest

from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.line import ANSWERED, SLEEP, Line, LoneCall
from carpool.engine.core.queue import Queue
from carpool.engine.policy import Greedy, Policy, Static
from carpool.engine.request import Request
from carpool.errors import DeadlineExceeded, Unavailable
from tests.effort import slow_where
from tests.engine.core.explore import explore


@dataclass(eq=False)
class Thread:
    """A caller's thread as its next step: join, step, asleep, lead, run, alone, gone."""

    name: str
    request: Request
    waits: bool = True  # False for a ticket that nobody waits for
    closes: bool = False  # True for one who closes the line, and waits for its end
    at: str = "join"
    requests: list[Request] = field(default_factory=list)
    pending: int = 1
    woken: bool = False
    until: float = inf
    slot: int = -1
    batch: Batch | None = None
    lone: LoneCall | None = None
    interrupted: bool = False
    deadline: float = inf

    def __post_init__(self) -> None:
        self.requests = [] if self.closes else [self.request]
        self.request.caller = self  # type: ignore[assignment]
        self.request.patient = True

    @property
    def sleepers(self) -> list[Any]:
        return [self] if self.at == "asleep" and not self.woken else []

    def answered(self, request: Request) -> None:
        assert request is self.request
        self.pending -= 1
        assert self.pending == 0


@dataclass
class World:
    """A line and its callers at one moment."""

    line: Line
    threads: list[Thread]
    slots: int
    now: float = 0.0
    interrupts: int = 0  # how many may still happen
    looks_away: int = 0  # likewise: threads that wait no longer, and never come back
    alone: bool = False  # whether who comes runs its request alone if it may
    runs: dict[str, int] = field(default_factory=dict)

    def moves(self) -> list[tuple[str, int]]:
        """All that can happen next."""
        found: list[tuple[str, int]] = []
        for i, thread in enumerate(self.threads):
            if thread.at == "gone" or (thread.at == "join" and i and self.threads[i - 1].at == "join"):
                continue  # callers are alike: who joins first is called a
            if thread.at != "asleep" or thread.woken or thread.until <= self.now:
                found.append(("go", i))
            if self.interrupts and thread.at in ("asleep", "run", "alone"):
                found.append(("interrupt", i))
            if self.looks_away and thread.at == "asleep":
                found.append(("look away", i))
        times = [t.until for t in self.threads if t.at == "asleep" and self.now < t.until < inf]
        if times:
            found.append(("time", int(min(times))))
        return found

    def move(self, what: str, which: int) -> None:
        if what == "time":
            self.now = float(which)
        elif what == "interrupt":
            self.interrupts -= 1
            self._interrupt(self.threads[which])
        elif what == "look away":
            self.looks_away -= 1
            thread = self.threads[which]
            thread.at, thread.woken, thread.waits = "gone", False, False
            self.line.stop_waiting(thread)
        else:
            self._go(self.threads[which])
        looking = 0
        for waiter in self.line.wake:
            if waiter.sleepers:
                assert isinstance(waiter, Thread)
                waiter.woken = True
                looking += bool(waiter.pending)
        assert looking <= 1  # of those who are not served, all but one sleep on
        self.line.wake.clear()
        running = [t for t in self.threads if t.at in ("lead", "run", "alone")]
        assert len(running) <= self.slots

    def _go(self, thread: Thread) -> None:
        if thread.at == "join" and thread.closes:
            self.line.close(Unavailable("closed"))
            self.line.wait_for_end(thread)
            thread.at = "step"
        elif thread.at == "join" and self.alone and thread.waits and self._goes_alone(thread):
            thread.at = "alone"
            self.runs[thread.name] = self.runs.get(thread.name, 0) + 1
        elif thread.at == "join":
            self.line.join(self.now, [thread.request])
            thread.at = "step" if thread.waits else "gone"
        elif thread.at in ("step", "asleep"):
            thread.woken = False
            step = self.line.step(self.now, thread, thread.name)
            if step == ANSWERED:
                thread.at = "gone"
                if thread.closes:  # nobody is inside
                    assert not self.line.core.waiting
                    assert not self.line._leaders
            elif step == SLEEP:
                thread.until = self.line.asleep_until(thread)
                thread.at = "asleep"
            else:
                thread.slot, thread.at = step, "lead"
        elif thread.at == "lead":
            thread.batch = self.line.take_batch(self.now, thread.slot)
            thread.at = "run"
            if thread.batch is None:
                thread.until = self.line.asleep_until(thread)
                thread.at = "asleep"
            for request in thread.batch.requests if thread.batch else ():
                name = str(request.item)
                self.runs[name] = self.runs.get(name, 0) + 1
        elif thread.at == "run":
            assert thread.batch is not None
            answers = [f"for {request.item}" for request in thread.batch.requests]
            self.line.finished(self.now, thread.batch, answers, None, 0.001)
            thread.batch, thread.at = None, "step"
        elif thread.at == "alone":
            self._done_alone(thread)

    def _goes_alone(self, thread: Thread) -> bool:
        thread.lone = LoneCall(thread.name, thread.deadline, thread.name, self.now)
        return self.line.start_alone(thread.lone)

    def _done_alone(self, thread: Thread) -> None:
        lone, thread.at = thread.lone, "gone"
        assert lone is not None
        if self.line.lone is lone:
            self.line.finish_alone(self.now, 0.001, True)
            thread.request.result = f"for {thread.name}"
        else:
            assert lone.batch is not None
            self.line.finished(self.now, lone.batch, [f"for {thread.name}"], None, 0.001)
            (thread.request,) = lone.requests

    def _interrupt(self, thread: Thread) -> None:
        thread.interrupted = True
        self.line.leave(self.now, thread.lone if thread.at == "alone" and thread.lone else thread, thread.name)
        thread.at, thread.woken, thread.batch = "gone", False, None

    def state(self) -> str:
        """All that decides what can still happen."""
        batcher = self.line.core.crews[0]
        threads = [(t.at, t.woken, t.until, t.waits, t.pending, t.slot, t.interrupted) for t in self.threads]
        queue = [r.item for r in batcher.queue]
        door = [r.item for r in self.line.core.flow.door]
        flight = [(w, [r.item for r in b.requests]) for w, b in sorted(batcher.in_flight.items())]
        following, leaders = getattr(self.line.next_leader, "name", None), sorted(self.line._leaders)
        lone = self.line.lone and self.line.lone.thread
        return repr(
            (threads, queue, door, flight, following, leaders, lone, self.now, self.interrupts, self.looks_away)
        )


def world(
    n: int,
    policy: Policy,
    *,
    slots: int = 1,
    interrupts: int = 0,
    looks_away: int = 0,
    deadlines: tuple[float, ...] = (),
    tickets: int = 0,
    room: float = inf,
    closers: tuple[int, ...] = (),
    alone: bool = False,
) -> World:
    line = Line(Batcher("f", policy, Queue(room)), slots)
    threads = []
    for i in range(n):
        deadline = deadlines[i] if i < len(deadlines) else inf
        name = "abcd"[i]
        threads.append(
            Thread(name, Request(name, deadline), waits=i >= tickets, closes=i in closers, deadline=deadline)
        )
    return World(line, threads, slots, interrupts=interrupts, looks_away=looks_away, alone=alone)


def check(end: World) -> None:
    """Everybody who stayed has its own answer, was run once, and nothing is left over."""
    for thread in end.threads:
        assert thread.at == "gone", end.state()
        if thread.interrupted or not thread.waits or thread.closes:
            continue
        error = thread.request.error
        if error is None:
            assert thread.request.result == f"for {thread.name}"
        elif isinstance(error, Unavailable):
            assert any(other.closes for other in end.threads)
        else:
            assert isinstance(error, DeadlineExceeded)
            assert thread.deadline <= end.now
        assert end.runs.get(thread.name, 0) <= 1 + sum(t.interrupted for t in end.threads)
    assert len(end.line._leaders) == 0


GREEDY = Greedy(4)
POLICIES = [Greedy(1), Greedy(2), GREEDY, Static(2, 5.0), Static(4, 5.0), Static(2, 5.0, from_idle=True)]


def named(value: Any) -> str:
    """The same in each process that collects the tests, which the address of a policy is not."""
    if not isinstance(value, Policy):
        return str(value)
    return f"{type(value).__name__}-{value.max_batch_size}" + "-idle" * getattr(value, "from_idle", False)


@slow_where(lambda n, slots, policy: n + slots > 3 and (n == 4 or policy is not GREEDY))
@pytest.mark.parametrize("policy", POLICIES, ids=named)
@pytest.mark.parametrize(("n", "slots"), [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 2)])
def test_every_order_ends_with_everybody_served(n: int, slots: int, policy: Policy) -> None:
    """In every order of steps nobody sleeps for ever, nobody gets another's answer, and nothing is
    run twice.
    """
    ends = 0
    for end in explore(world(n, policy, slots=slots)):
        check(end)
        assert end.runs == {thread.name: 1 for thread in end.threads}
        ends += 1
    assert ends


@slow_where(lambda policy, slots: slots == 2 or policy is not GREEDY)
@pytest.mark.parametrize(
    ("policy", "slots"), [*[(policy, 1) for policy in POLICIES], (Greedy(1), 2), (Greedy(2), 2)], ids=named
)
def test_an_interrupted_caller_leaves_the_others_unharmed(policy: Policy, slots: int) -> None:
    """If a caller is interrupted, asleep or in the middle of the function, the others are run, by
    another leader if need be.
    """
    interrupted = 0
    for end in explore(world(3, policy, slots=slots, interrupts=1)):
        check(end)
        interrupted += any(thread.interrupted for thread in end.threads)
    assert interrupted


@slow_where(lambda policy: policy not in (GREEDY, POLICIES[-1]))
@pytest.mark.parametrize("policy", POLICIES, ids=named)
def test_a_caller_whose_time_is_up_leaves_the_others_unharmed(policy: Policy) -> None:
    """If a caller's deadline passes at any moment, also while it is the one that has to look, the
    others are served.
    """
    late = 0
    for end in explore(world(3, policy, deadlines=(3.0, inf, 4.0))):
        check(end)
        late += any(thread.request.error is not None for thread in end.threads)
    if isinstance(policy, Static):
        assert late


@slow_where(lambda policy, slots: slots == 2 or policy is not GREEDY)
@pytest.mark.parametrize(("policy", "slots"), [*[(policy, 1) for policy in POLICIES], (Greedy(1), 2)], ids=named)
def test_a_caller_who_looks_away_leaves_the_others_unharmed(policy: Policy, slots: int) -> None:
    """If a ticket's wait times out, also while its thread is the one that has to look, the ticket
    keeps its place and the line goes on.
    """
    away = 0
    for end in explore(world(3, policy, slots=slots, looks_away=1)):
        check(end)
        away += not end.looks_away
    assert away


@pytest.mark.parametrize("policy", POLICIES, ids=named)
def test_tickets_are_run_by_whoever_leads(policy: Policy) -> None:
    """Tickets that nobody waits for are run by a leader from behind them, or stay if nobody came
    after them.
    """
    for end in explore(world(4, policy, tickets=2)):
        check(end)


@slow_where(
    lambda n, slots, tickets, interrupts, policy: (
        n + interrupts > 4 or (n + slots + tickets + interrupts > 3 and policy is not GREEDY)
    )
)
@pytest.mark.parametrize("policy", POLICIES, ids=named)
@pytest.mark.parametrize(("n", "closers"), [(3, (1,)), (3, (2,)), (4, (1, 3)), (3, (1, 2))])
@pytest.mark.parametrize(("slots", "tickets", "interrupts"), [(1, 0, 0), (1, 1, 0), (1, 0, 1), (2, 1, 0)])
def test_those_who_close_go_when_nobody_is_inside(
    n: int, closers: tuple[int, ...], slots: int, tickets: int, interrupts: int, policy: Policy
) -> None:
    """Closing serves callers that came before it, tickets included, and refuses later ones; then
    all who close are let go.
    """
    for end in explore(world(n, policy, slots=slots, tickets=tickets, interrupts=interrupts, closers=closers)):
        check(end)
        closed = any(thread.closes and not thread.interrupted for thread in end.threads)
        assert not (closed and end.line.core.waiting)
        assert end.line._closers == []


@slow_where(lambda n, limit, more: (limit != 2 and (n == 4 or bool(more))) or "room" in more)
@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.parametrize(
    ("n", "more"),
    [
        (2, {}),
        (4, {}),
        (3, {"slots": 2}),
        (3, {"interrupts": 1}),
        (3, {"interrupts": 2, "slots": 2}),
        (3, {"deadlines": (3.0, inf, 4.0)}),
        (3, {"looks_away": 1}),
        (4, {"tickets": 1}),
        (4, {"room": 1}),
        (3, {"closers": (1,)}),
        (3, {"closers": (2,), "interrupts": 1}),
        (4, {"closers": (1, 3), "slots": 2}),
    ],
    ids=str,
)
def test_who_runs_alone_leaves_the_others_unharmed(n: int, more: dict[str, Any], limit: int) -> None:
    """A caller that finds nobody runs its request alone, while others come, go, close and are
    interrupted unharmed.
    """
    ways = set()
    for end in explore(world(n, Greedy(limit), alone=True, **more)):
        check(end)
        assert end.line.lone is None
        core = end.line.core
        assert core.flow.admitted == core.flow.answered + core.flow.cancelled + core.crews[0].queue.count
        ways |= {"caught up" if thread.lone.requests else "alone" for thread in end.threads if thread.lone}
    assert ways == {"alone", "caught up"}


@slow_where(lambda n: n == 4)
@pytest.mark.parametrize(("n", "slots"), [(4, 1), (3, 2)])
def test_callers_at_the_door_come_in(n: int, slots: int) -> None:
    """Callers for whom the line has no room wait in front of it and are served all the same."""
    for end in explore(world(n, Greedy(2), slots=slots, room=2)):
        check(end)
        assert end.runs == {thread.name: 1 for thread in end.threads}


def test_exactly_one_sleeper_is_woken_to_look() -> None:
    """When a leader is done, exactly one sleeper is woken to look, the first one; the others sleep
    on.
    """
    here = world(4, Greedy(1))
    a, b, c, d = range(4)
    for _ in range(3):
        here.move("go", a)  # joins, claims the slot, runs
    for i in (b, c, d):
        here.move("go", i)
        here.move("go", i)
    assert [thread.at for thread in here.threads] == ["run", "asleep", "asleep", "asleep"]
    here.move("go", a)

    assert [thread.woken for thread in here.threads] == [False, True, False, False]


def test_a_leader_is_not_late_for_its_own_batch() -> None:
    """A leader's time-out ends when its function starts; a follower's does not."""
    here = world(2, Greedy(2), deadlines=(3.0, 3.0))
    for i in (0, 1):
        here.move("go", i)
    here.move("go", 0)
    here.move("go", 0)
    here.move("go", 1)
    here.now = 3.0
    here.move("go", 1)
    here.move("go", 0)
    here.move("go", 0)

    leader, follower = here.threads
    assert leader.request.result == "for a"
    assert isinstance(follower.request.error, DeadlineExceeded)


def test_a_ticket_whose_time_is_up_is_done_when_the_batch_ends() -> None:
    """A ticket that expires while its batch runs, and for which nobody waits or looks, is done when
    that batch ends.
    """
    line = Line(Batcher("f", Greedy(max_batch_size=1), Queue()), 1)
    leader = Thread("leader", Request("x", inf))
    ticket = Thread("ticket", Request("y", 10), waits=False, deadline=10)
    line.join(0, [leader.request])
    batch = line.take_batch(0, line.step(0, leader, leader))
    line.join(1, [ticket.request])
    assert batch is not None
    line.finished(11, batch, ["x!"], None, 11)

    assert (leader.pending, ticket.pending) == (0, 0)
    assert isinstance(ticket.request.error, DeadlineExceeded)


def test_a_closed_line_refuses() -> None:
    """A closed line refuses callers at once with the error that it was closed with."""
    here = world(1, Greedy(1))
    here.line.close(Unavailable("closed"))
    here.move("go", 0)
    here.move("go", 0)

    assert here.threads[0].at == "gone"
    assert isinstance(here.threads[0].request.error, Unavailable)
