"""Callers who run their batches themselves: who leads, who sleeps, and that somebody always looks. Sans-IO.

There is no worker. A caller who is awake and finds work and a free slot *leads*: it takes a batch off the line and
runs it for all who are in it. The others sleep. Three rules keep the line moving:

* whoever comes looks first, so a lone caller never waits, and a caller who has just been served may lead again;
* when a slot becomes free while others wait, exactly one sleeper is chosen to look (the *elect*), not all of them;
* while the policy holds a batch back, the elect sleeps only until the policy wants to be asked again.

An elect who leaves, in whatever way, hands the duty on. So as long as work waits and a slot is free, somebody is awake
or will be in time.

Mostly nobody is there. Then who comes runs its one request *alone*: no request, batch or slot is made for it, and when
it is done the accounts are what they would be otherwise. Should somebody else come meanwhile, all of that is made up
for first, at the time at which it would have been done (`_catch_up`), and the lone caller is a leader like any other.

A line is open until it is closed; then it is drained: nobody comes in, and those who close it lead like any other,
since tickets may have nobody else. It has come to its end once nobody waits and nobody leads; then they may go.

Source: the combining idea is that of flat combining (Hendler et al., 2010) and of leader/followers (Schmidt, 2000).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import Final, Protocol

from carpool.core.batch import Batch
from carpool.core.batcher import Batcher
from carpool.core.pipeline import Pipeline, Todo
from carpool.core.reply import Reply
from carpool.errors import CarpoolError
from carpool.request import DONE as REQUEST_DONE
from carpool.request import Request

DONE: Final = -1
SLEEP: Final = -2
LEADS: Final = -3


class Waiter(Protocol):
    """Who waits for one or several requests; their `caller`.

    Attributes:
        requests: what it waits for; pending: how many of them have no answer yet.
        deadline: the latest of theirs.
    """

    requests: Sequence[Request]
    pending: int
    deadline: float

    @property
    def asleep(self) -> bool:
        """Whether a thread sleeps for it that nobody is about to wake."""

    def answered(self, request: Request) -> None:
        """One of its requests has its answer."""


class Lone:
    """Who runs its one request alone: a waiter that never sleeps, since its thread is inside the function.

    Attributes:
        item, deadline: of its request.
        thread, began: whose it is, and since when.
        batch: if it has come to be a leader like any other, what it runs.
    """

    __slots__ = ("batch", "began", "deadline", "item", "pending", "requests", "thread")

    def __init__(self, item: object, deadline: float, thread: object, began: float) -> None:
        self.item = item
        self.deadline = deadline
        self.thread = thread
        self.began = began
        self.requests: Sequence[Request] = ()
        self.pending = 1
        self.batch: Batch | None = None

    @property
    def asleep(self) -> bool:
        """Never."""
        return False

    def answered(self, request: Request) -> None:
        """Its request has its answer."""
        self.pending = 0


class Line:
    """The line in front of one function.

    Args:
        batcher: its queue and its policy.
        slots: how many batches may run at a time.
        slo_s: how soon after they join requests are due, if there is a goal.

    Attributes:
        wake: waiters who are to look now; whoever drives the line takes them out, and wakes those who are asleep.
        elect: who is to look next, if anybody is; another's batch may have answered it meanwhile.
        lone: who runs its request alone, if anybody does.
    """

    def __init__(self, batcher: Batcher, slots: int, slo_s: float | None = None) -> None:
        self.pipeline = Pipeline([batcher], slo_s=slo_s)
        self.wake: list[Waiter] = []
        self._batcher = batcher
        self._slots = slots
        self._leaders: dict[int, tuple[Waiter, object]] = {}  # by slot: for whom it was claimed, and by which thread
        self._closers: list[Waiter] = []
        self.lone: Lone | None = None
        self.elect: Waiter | None = None
        self._elect_until = inf

    def __repr__(self) -> str:
        return f"<Line {self._batcher!r} free={self._slots - len(self._leaders)}>"

    # -- who finds nobody there

    def alone(self, lone: Lone) -> bool:
        """Whether somebody who comes now is to run its request by itself at once. If not, nothing has been done."""
        pipeline, batcher = self.pipeline, self._batcher
        if (
            self.lone is not None
            or self._leaders
            or batcher.queue.count
            or pipeline.door.count
            or pipeline.closed is not None
            or not batcher.lets_go(lone.began, lone.deadline, pipeline.slo_s)
        ):
            return False
        self.lone = lone
        return True

    def went_alone(self, now: float, busy_s: float, ok: bool) -> None:
        """Who ran its request alone is done, and nobody has come meanwhile."""
        lone, self.lone = self.lone, None
        assert lone is not None
        self.pipeline.went_alone(lone.began, now, busy_s, ok)

    # -- callers

    def join(self, now: float, requests: Sequence[Request]) -> None:
        """New requests. One that is refused has its answer at once."""
        if self.lone is not None:
            self._catch_up()
        self.pipeline.submit(now, requests)
        if any(request.state == REQUEST_DONE for request in requests):
            self._look(now)

    def step(self, now: float, waiter: Waiter, thread: object) -> int:
        """What a waiter's thread, awake, should do: `SLEEP`, go because it is `DONE`, or `lead` with this slot.

        It must not sleep where it `LEADS` already, interrupted between two steps, since others wait for it.
        """
        if waiter.pending and now >= waiter.deadline:
            self._look(now)
        if self.elect is waiter:
            self.elect = None
            if not waiter.pending:
                self._hand_on()
        if not waiter.pending:
            return DONE
        if self.lone is not None:
            self._catch_up()
        leaders = self._leaders
        if len(leaders) == self._slots:
            for _, leader in leaders.values():
                if leader == thread:
                    return LEADS
            return SLEEP
        if not self.pipeline.waiting:
            return SLEEP
        slot = 0
        while slot in leaders:
            slot += 1
        leaders[slot] = waiter, thread  # one step: a thread that is interrupted has claimed it, or has not
        return slot

    def sleep(self, waiter: Waiter) -> float:
        """The waiter goes to sleep; returns until when, which is at once if its answers came meanwhile."""
        if not waiter.pending:
            return -inf
        return min(waiter.deadline, self._elect_until) if self.elect is waiter else waiter.deadline

    def look_away(self, waiter: Waiter) -> None:
        """The waiter's thread does something else now; the place in the line is kept."""
        if self.elect is waiter:
            self.elect = None
            self._hand_on()

    def leave(self, now: float, waiter: Waiter, thread: object = None) -> None:
        """The waiter goes without its answers; its requests that still wait are not run.

        If its thread is given, that has been interrupted: what it was leading is run by the next leader.
        """
        if self.lone is not None:
            self._catch_up()
        for request in waiter.requests:
            self.pipeline.cancel(now, request)
        for slot in self._slots_of(thread, waiter):
            self._release(now, slot)
        if waiter in self._closers:
            self._closers.remove(waiter)
        if self.elect is waiter:
            self.elect = None
        self._hand_on()
        self._see_off()

    # -- leaders

    def lead(self, now: float, slot: int) -> Batch | None:
        """The batch to run with a slot that was claimed. None if the policy holds back: the slot is free again, and the
        caller is to `sleep`, not to `step` at once.

        The leader's own time-out ends here: what it runs itself it also waits for.
        """
        leader, _ = self._leaders[slot]
        self.pipeline.worker_ready(0, slot)
        todo = self._look(now)
        if todo.run:
            (batch,) = todo.run
            for request in batch.requests:
                if request.caller is leader:
                    request.deadline = inf
            self._hand_on()
            return batch
        self._release(now, slot)
        if not leader.pending:
            self._hand_on()
        elif self.elect is None and self._batcher.wake_at is not None:
            self.elect, self._elect_until = leader, self._batcher.wake_at
        return None

    def give_up(self, slot: int) -> None:
        """A slot that was claimed is not used."""
        del self._leaders[slot]
        self._hand_on()
        self._see_off()

    def finished(
        self, now: float, batch: Batch, results: Sequence[object], errors: dict[int, Exception] | None, busy_s: float
    ) -> None:
        """A batch has run to its end."""
        self.pipeline.completed(now, Reply(0, batch.place, batch.id, batch.ids, results, errors, busy_s))
        self._release(now, batch.place)
        if self.elect is not None:
            self.wake.append(self.elect)  # what the policy said while the slot was taken may be different now
        self._hand_on()  # the next leader is woken first, before those who only go home
        if now >= self._batcher.attention_at or self.pipeline.door.count:
            self._look(now)
        else:  # no batch can start before somebody claims the slot
            self._tell(self.pipeline.collect_answers())

    # -- the end

    def close(self, error: CarpoolError) -> None:
        """Refuse new requests from now on; those inside are run."""
        if self.lone is not None:
            self._catch_up()
        self.pipeline.close(error)

    def fail(self, now: float, error: CarpoolError, thread: object) -> None:
        """The policy has raised in this thread: all who are inside, and whoever comes, hear so."""
        if self.lone is not None:
            self._catch_up()
        self.pipeline.abort(now, error)
        for slot in self._slots_of(thread):
            self._release(now, slot)
        self.elect = None
        self._tell(self.pipeline.collect_answers())
        self._see_off()

    def drain(self, waiter: Waiter) -> None:
        """A waiter without requests, but pending, comes to wait for the end of a closed line."""
        self._closers.append(waiter)
        self._see_off()

    @property
    def leaders(self) -> list[object] | None:
        """The threads that lead; None if one more could. May be asked without the line's lock."""
        leaders, lone = list(self._leaders.values()), self.lone
        if len(leaders) == self._slots:
            return [thread for _, thread in leaders]
        return [lone.thread] if lone is not None and self._slots == 1 else None

    # -- inside

    def _catch_up(self) -> None:
        """Somebody else has come: what was left out for the one who runs its request alone is done now."""
        lone, self.lone = self.lone, None
        assert lone is not None
        request = Request(lone.item, lone.deadline, lone)
        request.patient = True
        lone.requests = (request,)
        self.pipeline.submit(lone.began, lone.requests)
        self._leaders[0] = lone, lone.thread
        lone.batch = self.lead(lone.began, 0)
        if lone.batch is None:
            kind = type(self._batcher.policy).__name__
            raise RuntimeError(f"policy {kind} let a lone request go and then held it back")

    def _slots_of(self, thread: object, waiter: Waiter | None = None) -> list[int]:
        """What a thread has claimed, for this waiter or for any."""
        return [
            slot
            for slot, (claimed_for, leader) in self._leaders.items()
            if leader == thread and (waiter is None or claimed_for is waiter)
        ]

    def _see_off(self) -> None:
        """Those who wait for the end may go when it has come."""
        if self._closers and not self._leaders and not self.pipeline.waiting:
            for waiter in self._closers:
                waiter.pending = 0
            self.wake += self._closers
            self._closers.clear()

    def _look(self, now: float) -> Todo:
        todo = self.pipeline.poll(now)
        self._tell(todo.answer)
        if self._closers:
            self._see_off()
        return todo

    def _tell(self, answered: Sequence[Request]) -> None:
        for request in answered:
            waiter: Waiter | None = request.caller  # type: ignore[assignment]
            if waiter is None:
                continue
            waiter.answered(request)
            if not waiter.pending:
                self.wake.append(waiter)

    def _hand_on(self) -> None:
        """If work waits, a slot is free and nobody is going to look: choose a sleeper, those ahead first."""
        if self.elect is not None or len(self._leaders) == self._slots or not self.pipeline.waiting:
            return
        for request in chain(self._batcher.queue, self.pipeline.door):
            waiter: Waiter | None = request.caller  # type: ignore[assignment]
            if waiter is not None and waiter.asleep:
                self._choose(waiter)
                return
        for closer in self._closers:
            if closer.asleep:
                self._choose(closer)
                return

    def _choose(self, waiter: Waiter) -> None:
        self.elect, self._elect_until = waiter, inf
        self.wake.append(waiter)

    def _release(self, now: float, slot: int) -> None:
        """A slot is free: its worker in the pipeline is there only while somebody leads."""
        self.pipeline.worker_left(now, 0, slot)
        del self._leaders[slot]
        if self._closers:
            self._see_off()
