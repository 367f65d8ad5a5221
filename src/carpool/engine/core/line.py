"""Decide which of the callers' threads runs the next batch of a batch function. Sans-IO.

No thread belongs to the line. A caller's thread that is awake and finds work and a free slot
*leads*: it takes a batch from the queue and runs it for every request in it. The other threads
sleep. Three rules keep the line moving:

* A thread that comes, or has just been served, looks for work before it does anything else, so a
  lone caller never waits.
* When a slot becomes free while requests wait, exactly one sleeper is woken to look, the *next
  leader*, not all of them.
* While the policy holds a batch back, the next leader sleeps only until the policy wants to be
  asked again.

A next leader that goes away, for whatever reason, passes the duty on. So as long as requests wait
and a slot is free, some thread is awake or will wake up in time.

A slot stands for a worker: in the core, the worker at the slot's place exists only while a thread
leads with it.

Mostly a caller finds nobody else. Then it runs its one request *alone*: no request, batch or slot
is made for it, and afterwards the accounts are what they would have been. Should another caller
come meanwhile, all of that is made up for first, as of the time at which it would have been done
(`_catch_up`), and the lone caller leads like any other. For a lone request the policy states its
slack (`lone_slack_s`) and learns of the call once (`learn`). A policy that changes the rule and
states no slack has an infinite one (`Policy.__init_subclass__`): it is asked step by step.

A line is open until it is closed; then it is drained: no request comes in, and the threads that
close it lead like any other, since tickets may have no thread that waits for them. The end has come
once no request waits and no thread leads.

Source: the combining idea is that of flat combining (Hendler et al., 2010) and of leader/followers
(Schmidt, 2000).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import Any, ClassVar, Final, Protocol

from carpool.engine.core.batch import Batch, Reply, Todo
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.request import DONE, Request
from carpool.errors import CarpoolError

# What `Line.step` returns in the place of a slot; no slot is below 0.
ANSWERED: Final = -1  # the answers are there
SLEEP: Final = -2  # the thread is to sleep
LEADS: Final = -3  # the thread leads already: it was interrupted while it did


class Waiter(Protocol):
    """A waiter for the answers of one or several requests, of which `pending` have none yet,
    until the latest of their deadlines, as their `caller`.
    """

    requests: Sequence[Request]
    pending: int
    deadline: float

    @property
    def sleepers(self) -> list[Any]:
        """What wakes the threads that sleep for it, if some do and no wake-up is under way."""

    def answered(self, request: Request) -> None:
        """Take note that one of its requests has its answer."""


class LoneCall:
    """The call of a thread that found the line empty and runs its one item itself.

    It never sleeps, since its thread is inside the function.

    Attributes:
        requests: Its request, once one had to be made since another caller came; empty until then.
        pending: 1 until that request has its answer.
        batch: What it runs, once it leads like any other; None until then.
    """

    __slots__ = ("batch", "began", "deadline", "error", "item", "pending", "requests", "result", "thread")

    sleepers: ClassVar[list[Any]] = []
    result: object
    error: Exception | None

    def __init__(self, item: object, deadline: float, thread: object, began: float) -> None:
        self.item = item
        self.deadline = deadline
        self.thread = thread
        self.began = began
        self.requests: Sequence[Request] = ()
        self.pending = 1
        self.batch: Batch | None = None

    def answered(self, request: Request) -> None:
        self.pending = 0


class Line:
    """The line in front of one batch function, of which `slots` batches may run at a time.

    Attributes:
        core: The only stage's core, which keeps the accounts.
        wake: Waiters whose threads are to look now; the driver takes them out and wakes those that
            sleep.
        next_leader: The waiter whose thread is to look next, if there is one; a batch that another
            thread runs may have answered it meanwhile.
        lone: The caller that runs its request alone, if one does.
    """

    def __init__(self, batcher: Batcher, slots: int, slo_s: float | None = None) -> None:
        self.core = Core([batcher], slo_s=slo_s)
        self.wake: list[Waiter] = []
        self._batcher = batcher
        batcher.places.are_slots = True
        self._slots = slots
        # by slot: for which waiter it was claimed, and by which thread; tuples, since each batch
        # makes one
        self._leaders: dict[int, tuple[Waiter, object]] = {}
        self._closers: list[Waiter] = []  # wait for the end of the closed line
        self.lone: LoneCall | None = None
        self.next_leader: Waiter | None = None
        self._next_leader_until = inf  # when the policy wants to be asked again

    def __repr__(self) -> str:
        return f"<Line {self._batcher!r} free={self._slots - len(self._leaders)}>"

    # -- callers

    def join(self, now: float, requests: Sequence[Request]) -> None:
        if self.lone is not None:
            self._catch_up()
        self.core.flow.submit(now, requests)
        for request in requests:  # without a generator, whose making takes longer than most calls' loops
            if request.state == DONE:
                self._poll(now)
                break

    def step(self, now: float, waiter: Waiter, thread: object) -> int:
        """Decide what a waiter's thread, which is awake, does next.

        Returns:
            `ANSWERED` if the answers are there, `SLEEP`, or the slot for which the thread is to
            `take_batch`. `LEADS` if the thread leads already, as it was interrupted between two
            steps; it must not sleep then, since others wait for its batch.
        """
        if waiter.pending and now >= waiter.deadline:
            self._poll(now)
        if self.next_leader is waiter:
            self.next_leader = None
            if not waiter.pending:
                self._choose_next_leader()
        if not waiter.pending:
            return ANSWERED
        if self.lone is not None:
            self._catch_up()
        leaders = self._leaders
        if len(leaders) == self._slots:
            for _, leader in leaders.values():
                if leader == thread:
                    return LEADS
            return SLEEP
        if not self.core.waiting:
            return SLEEP
        slot = 0
        while slot in leaders:
            slot += 1
        leaders[slot] = waiter, thread  # one step: a thread that is interrupted has claimed it, or has not
        return slot

    def asleep_until(self, waiter: Waiter) -> float:
        """Return until when a waiter's thread may sleep; the past if its answers are there."""
        if not waiter.pending:
            return -inf
        return min(waiter.deadline, self._next_leader_until) if self.next_leader is waiter else waiter.deadline

    def stop_waiting(self, waiter: Waiter) -> None:
        if self.next_leader is waiter:
            self.next_leader = None
            self._choose_next_leader()

    def leave(self, now: float, waiter: Waiter, thread: object = None) -> None:
        """Let a waiter go without its answers; those of its requests that still wait are not run.
        If it goes because its `thread` was interrupted, the next leader runs the batch that it was
        leading.
        """
        if self.lone is not None:
            self._catch_up()
        for request in waiter.requests:
            self.core.cancel(now, request)
        for slot in self._slots_of(thread, waiter):
            self._release(now, slot)
        if waiter in self._closers:
            self._closers.remove(waiter)
        if self.next_leader is waiter:
            self.next_leader = None
        self._choose_next_leader()
        self._release_closers()

    # -- leaders

    def take_batch(self, now: float, slot: int) -> Batch | None:
        """Return the batch to run with a slot that was claimed; None if the policy holds it back.

        In that case the slot is free again, and the thread is to sleep (`asleep_until`). A leader
        has no deadline from here on: it waits for what it runs itself.
        """
        leader, _ = self._leaders[slot]
        self.core.worker_ready(0, slot)
        todo = self._poll(now)
        if todo.run:
            (batch,) = todo.run
            for request in batch.requests:
                if request.caller is leader:
                    request.deadline = inf
            self._choose_next_leader()
            return batch
        self._release(now, slot)
        if not leader.pending:
            self._choose_next_leader()
        elif self.next_leader is None and self._batcher.lobby.wake_at is not None:
            self.next_leader, self._next_leader_until = leader, self._batcher.lobby.wake_at
        return None

    def give_up(self, slot: int) -> None:
        del self._leaders[slot]
        self._choose_next_leader()
        self._release_closers()

    def finished(
        self, now: float, batch: Batch, results: Sequence[object], errors: dict[int, Exception] | None, busy_s: float
    ) -> None:
        self.core.completed(now, Reply(0, batch.place, batch.id, batch.ids, results, errors, busy_s))
        self._release(now, batch.place)
        if self.next_leader is not None:
            self.wake.append(self.next_leader)  # the policy may decide otherwise now that the slot is free
        self._choose_next_leader()  # the next leader is woken first, before the threads that only return their results
        if now >= self._batcher.lobby.attention_at or self.core.flow.door.count:
            self._poll(now)
        else:  # no batch can start before somebody claims the slot
            self._deliver(self.core.collect_answers())

    # -- callers that find nobody else

    def start_alone(self, lone: LoneCall) -> bool:
        """Let a caller run its one request alone if that may be, and report whether it may.

        A part of the fast path `lone_call`, as of `join`, `step` and `take_batch`.
        """
        core, batcher = self.core, self._batcher
        if (
            self.lone is not None
            or self._leaders
            or batcher.queue.count
            or core.flow.door.count
            or core.flow.closed_because is not None
            or not batcher.lets_go(lone.began, lone.deadline, core.flow.slo_s)
        ):
            return False
        self.lone = lone
        return True

    def finish_alone(self, now: float, busy_s: float, ok: bool) -> None:
        """Take note that the lone caller is done and that no other has come meanwhile.

        A part of the fast path `lone_call`, as of `finished`.
        """
        lone, self.lone = self.lone, None
        assert lone is not None
        self.core.lone_done(self._batcher, 0, lone.began, now, busy_s, ok)

    # -- the end

    def close(self, error: CarpoolError) -> None:
        if self.lone is not None:
            self._catch_up()
        self.core.close(error)

    def fail(self, now: float, error: CarpoolError, thread: object) -> None:
        if self.lone is not None:
            self._catch_up()
        self.core.abort(now, error)
        for slot in self._slots_of(thread):
            self._release(now, slot)
        self.next_leader = None
        self._deliver(self.core.collect_answers())
        self._release_closers()

    def wait_for_end(self, waiter: Waiter) -> None:
        """Have a waiter without requests, which is pending, wait for the line's end."""
        self._closers.append(waiter)
        self._release_closers()

    @property
    def leading_threads(self) -> list[object] | None:
        """The threads that lead; None if one more could. It may be read without a lock."""
        leaders, lone = list(self._leaders.values()), self.lone
        if len(leaders) == self._slots:
            return [thread for _, thread in leaders]
        return [lone.thread] if lone is not None and self._slots == 1 else None

    # -- inside

    def _catch_up(self) -> None:
        """Make a leader of the lone caller: do what was left out, as of the time when it began.

        It is called as soon as another caller comes, before anything else happens in the line.
        """
        lone, self.lone = self.lone, None
        assert lone is not None
        request = Request(lone.item, lone.deadline, lone)
        request.patient = True
        lone.requests = (request,)
        self.core.flow.submit(lone.began, lone.requests)
        self._leaders[0] = lone, lone.thread
        lone.batch = self.take_batch(lone.began, 0)
        if lone.batch is None:
            policy = self._batcher.lobby.policy
            kind = type(getattr(policy, "former", policy)).__name__
            raise RuntimeError(f"policy {kind} let a lone request go and then held it back")

    def _slots_of(self, thread: object, waiter: Waiter | None = None) -> list[int]:
        return [
            slot
            for slot, (claimed_for, leader) in self._leaders.items()
            if leader == thread and (waiter is None or claimed_for is waiter)
        ]

    def _release_closers(self) -> None:
        if self._closers and not self._leaders and not self.core.waiting:
            for waiter in self._closers:
                waiter.pending = 0
            self.wake += self._closers
            self._closers.clear()

    def _poll(self, now: float) -> Todo:
        todo = self.core.poll(now)
        self._deliver(todo.answer)
        if self._closers:
            self._release_closers()
        return todo

    def _deliver(self, answered: Sequence[Request]) -> None:
        for request in answered:
            waiter: Waiter | None = request.caller  # type: ignore[assignment]
            if waiter is None:
                continue
            waiter.answered(request)
            if not waiter.pending:
                self.wake.append(waiter)

    def _choose_next_leader(self) -> None:
        """Choose a next leader among the sleepers, those ahead in the queue first.

        It is needed only where requests wait, a slot is free and no other thread is going to look.
        """
        if self.next_leader is not None or len(self._leaders) == self._slots or not self.core.waiting:
            return
        for request in chain(self._batcher.queue, self.core.flow.door):
            waiter: Waiter | None = request.caller  # type: ignore[assignment]
            if waiter is not None and waiter.sleepers:
                self._make_next_leader(waiter)
                return
        for closer in self._closers:
            if closer.sleepers:
                self._make_next_leader(closer)
                return

    def _make_next_leader(self, waiter: Waiter) -> None:
        self.next_leader, self._next_leader_until = waiter, inf
        self.wake.append(waiter)

    def _release(self, now: float, slot: int) -> None:
        self.core.worker_left(now, 0, slot)
        del self._leaders[slot]
        if self._closers:
            self._release_closers()
