"""A coordinator whose own work takes time: the loop of a real service, in virtual time.

It is one server that works in turns. A turn takes what has come by then, in order: requests, and
workers' replies. At its end the core is polled, batches are written, then answers. It is polled
at once, too, after a reply that finds a full batch waiting, or no request. All of this takes time,
and whatever comes meanwhile waits for the next turn. A worker begins with a batch that lies ahead
by itself, at its own time; the reply is seen when the coordinator comes to it.

Without it a batch of one costs the coordinator nothing, and small batches look better than they
are. How its work was measured, and the simulation compared with a real service, is in
`bench/policies/coordinator.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import exp, inf
from random import Random
from typing import Any

from carpool.engine.core.batch import Batch, Reply
from carpool.engine.drive.virtual import TICK_S, VirtualDriver
from carpool.engine.policy import Decision, View
from carpool.engine.request import Request
from carpool.simulate import specs

EXAMPLE = "12us,63us"
# Of the work for a request: to read and enter it, its part of a batch and of a reply, and to write
# its answer.
_READ, _ITEM, _ANSWER = 0.5, 0.05, 0.45
# Of the work for a batch: a turn besides what is done in it, a decision, to write the batch, to
# read its reply, and to learn from it.
_TURN, _DECIDE, _WRITE, _REPLY, _LEARN = 0.1, 0.1, 0.4, 0.34, 0.06


@dataclass(frozen=True)
class Coordinator:
    """The time of the coordinator's work, and the events on the way to workers.

    The defaults are those of a service of a trivial model on the machine of `docs/benchmarks.md`.

    Args:
        request_s: Seconds of work for each request.
        batch_s: Seconds of work for each batch besides, if it has a turn and a decision to itself.
        way_s: The median seconds from a batch that is written to a worker that begins with it, and
            the same back.
        sigma: The standard deviation of the logarithm of that way.
        stall_share: The share of ways that stall.
        stall_s: The mean seconds of a stall, which are distributed exponentially.
        client_s: The seconds that the one process of all clients of closed loops takes to send a
            request. Its requests leave one after the other.
        slice_s: The seconds of work without a rest after which the coordinator loses its core to
            another program; infinity for a core of its own.
        pause_s: The mean seconds for which it then does nothing, distributed exponentially.

    Raises:
        ValueError: An argument makes no sense.
    """

    request_s: float = 12e-6
    batch_s: float = 63e-6
    way_s: float = 28e-6
    sigma: float = 0.35
    stall_share: float = 0.0005
    stall_s: float = 1.5e-3
    client_s: float = 8e-6
    slice_s: float = inf
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise ValueError(f"coordinator: {field.name} must be 0 or more, not {value!r}")
        if self.stall_share > 1:
            raise ValueError(f"coordinator: stall_share must be at most 1, not {self.stall_share!r}")
        if not self.slice_s:
            raise ValueError("coordinator: slice_s must be above 0")

    @property
    def times_longer(self) -> float:
        """How many times as long its work takes while it has no rest, as it loses its core."""
        return 1.0 + self.pause_s / self.slice_s

    def draw_way_s(self, dice: Random) -> float:
        """Draw the seconds of one way to a worker, or back."""
        way_s = self.way_s * exp(dice.gauss(0.0, self.sigma)) if self.sigma else self.way_s
        return way_s + _drawn(dice, self.stall_s) if dice.random() < self.stall_share else way_s


def coordinator_of(coordinator: Coordinator | str | None) -> Coordinator | None:
    """Return a coordinator, from itself or from a spec such as `12us,63us,way=1ms`; None for none.

    Raises:
        ValueError: The spec is wrong; the text says what to change.
        TypeError: It is none of these.
    """
    if coordinator is None or isinstance(coordinator, Coordinator):
        return coordinator
    if not isinstance(coordinator, str):
        raise TypeError(f"coordinator must be a Coordinator or a spec such as {EXAMPLE!r}, not {coordinator!r}")
    names = ("request", "batch")
    entries = [entry.strip() for entry in coordinator.split(",")]
    named = [entry if "=" in entry or i > 1 else f"{names[i]}={entry}" for i, entry in enumerate(entries)]
    kinds: dict[str, Callable[..., Coordinator]] = {"coordinator": Coordinator}
    try:
        return specs.build(f"coordinator:{','.join(named)}", kinds, "coordinator", EXAMPLE)
    except ValueError as error:
        reason = str(error).partition("': ")[2]
        raise ValueError(f"coordinator {coordinator!r}: {reason.removeprefix('coordinator: ')}") from None


def _drawn(dice: Random, mean_s: float) -> float:
    return dice.expovariate(1.0 / mean_s) if mean_s else 0.0


class BusyDriver(VirtualDriver):
    """As `VirtualDriver`, with a coordinator whose work takes time, and no stage of steps.

    A request is due by when the coordinator has read it, as in a service, which cannot see when a
    client has sent it.

    Args:
        coordinator: The time of its work.
        dice: The source of everything random.
        between: The times from which on and until which its work counts for `busy_s`.
        hop_s: The seconds that a batch spends on a network besides, on its way there and back.
        hop_item_s: Those of each unit of its size, likewise.

    Attributes:
        busy_s: The seconds for which the coordinator was busy, or off its core, in the time that
            counts.
    """

    def __init__(
        self,
        *args: Any,
        coordinator: Coordinator,
        dice: Random,
        between: tuple[float, float],
        hop_s: float = 0.0,
        hop_item_s: float = 0.0,
        **kwargs: Any,
    ) -> None:
        self.busy_s = 0.0
        self._coordinator = coordinator
        self._dice = dice
        self._between = between
        self._inbox: list[tuple[float, Request] | tuple[Batch, float]] = []
        self._time = 0.0  # of the coordinator, which is ahead of the clock during a turn
        self._client_free_at = 0.0
        self._worker_free_at: dict[tuple[int, int], float] = {}
        self._slice_s = coordinator.slice_s
        self._decisions = 0
        super().__init__(*args, hop_s=hop_s, hop_item_s=hop_item_s, **kwargs)
        self._wake_at = inf  # nothing has come yet
        longer = coordinator.times_longer
        self.core.note_work(longer * coordinator.request_s, longer * coordinator.batch_s)
        for crew in self.core.crews:
            policy: Any = crew.lobby.policy
            policy.decide = self._counted(policy.decide)

    # -- the world outside, at its own time

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Have an event happen at `when`; the coordinator sees its traces in a socket."""
        self._at(when, event)

    def enter(self, request: Request) -> None:
        """Have a client of a closed loop send a request as soon as their process comes to it."""
        sent = self.clock.now
        self._client_free_at = max(sent, self._client_free_at) + self._coordinator.client_s
        self._at(self._client_free_at, partial(self._put, (sent, request)))

    def _draw(self, until: float) -> None:
        while self._next is not None and self._next_at <= until:
            self._put((self._next_at, self._next))
            self._next_at, self._next = next(self._feed, (inf, None))

    def _put(self, what: tuple[float, Request] | tuple[Batch, float]) -> None:
        """Have something lie in a socket until the coordinator comes to it."""
        self._inbox.append(what)
        self._notice()

    def _notice(self) -> None:
        """Have a turn begin when the one that is under way has ended."""
        self._has_news = True
        self._wake_at = min(self._wake_at, max(self.clock.now, self._time))

    def _make_ready(self, stage: int, place: int) -> None:
        self._worker_free_at.pop((stage, place), None)
        super()._make_ready(stage, place)
        self._notice()

    def _complete(self, batch: Batch, busy_s: float) -> None:
        """Have a worker's reply come, unless the worker was lost."""
        lying = self._ahead.get((batch.stage, batch.place), [])
        if batch in lying:
            lying.remove(batch)
            self._put((batch, busy_s))

    # -- a turn of the coordinator

    def _poll(self, now: float) -> None:
        """Work through the events that have come; the clock stands still meanwhile."""
        if now < self._time:
            self._wake_at = self._time
            return
        coordinator = self._coordinator
        self._slice_s = min(coordinator.slice_s, self._slice_s + now - self._time)  # who rests is given time
        self._time = now
        self._work(_TURN * coordinator.batch_s)
        inbox, self._inbox = self._inbox, []
        for first, second in inbox:
            if isinstance(first, Batch):
                self._heard(first, second)  # type: ignore[arg-type]
            else:
                self._read(first, second)  # type: ignore[arg-type]
        self.wake_ups += not self._has_news
        self._has_news = False
        self._ask()
        begin, end = self._between
        self.busy_s += max(0.0, min(self._time, end) - max(now, begin))

    def _work(self, seconds: float) -> None:
        self._time += seconds
        self._slice_s -= seconds
        if self._slice_s <= 0.0:
            self._time += _drawn(self._dice, self._coordinator.pause_s)
            self._slice_s = self._coordinator.slice_s

    def _read(self, sent: float, request: Request) -> None:
        """Read a request, which is due as much later as it was read later than sent."""
        self._work(_READ * self._coordinator.request_s)
        request.due += self._time - sent
        self._arrivals.append(request)

    def _heard(self, batch: Batch, busy_s: float) -> None:
        """Take a reply, and poll as `Driver.completed` does."""
        coordinator, core = self._coordinator, self.core
        results: Sequence[Any] = [request.item for request in batch.requests]
        self._work((_REPLY + _LEARN) * coordinator.batch_s + 0.5 * _ITEM * coordinator.request_s * batch.n)
        reply = Reply(batch.stage, batch.place, batch.id, batch.ids, results, None, busy_s, turns=self._turns(batch))
        self.completed(batch, busy_s)
        core.completed(self._time, reply)
        crew = core.crews[batch.stage]
        if crew.queue.size >= crew.lobby.batch_limit or not (self._arrivals or core.waiting):
            self._ask()

    def _ask(self) -> None:
        """Poll the core, write its batches, then its answers."""
        coordinator, core = self._coordinator, self.core
        if self._arrivals:
            core.flow.submit(self._time, self._arrivals)
            self._arrivals.clear()
        asked = self._decisions
        todo = core.poll(self._time)
        self._work((self._decisions - asked) * _DECIDE * coordinator.batch_s)
        for batch in todo.run:
            self._work(_WRITE * coordinator.batch_s + 0.5 * _ITEM * coordinator.request_s * batch.n)
            self._write(batch)
        for stage, place in todo.kill:
            self.lose(stage, place)
        for stage, place in todo.drained:
            self.drained(stage, place)
        for request in todo.answer:
            self._work(_ANSWER * coordinator.request_s)
            self._at(self._time, partial(self._answer, request))
        self._wake_at = todo.wake_at if todo.wake_at > self._time else self._time + TICK_S

    def _write(self, batch: Batch) -> None:
        """Have a batch go to its worker, which does one after the other."""
        at = (batch.stage, batch.place)
        network_s = 0.5 * (self._hop_s + self._hop_item_s * batch.size)
        there_s, back_s = (self._coordinator.draw_way_s(self._dice) + network_s for _ in range(2))
        start = max(self._time + there_s, self._worker_free_at.get(at, 0.0))
        busy_s = self._cost(batch, start)
        self._worker_free_at[at] = start + busy_s
        self._ahead.setdefault(at, []).append(batch)
        self._watcher.started(start, batch, busy_s)
        self._at(start + busy_s + back_s, partial(self._complete, batch, busy_s))

    def _answer(self, request: Request) -> None:
        self._watcher.answered(self.clock.now, [request])
        if request.caller is not None:
            request.caller.answered(request)

    def _counted(self, decide: Callable[[View], Decision]) -> Callable[[View], Decision]:
        def counted(view: View) -> Decision:
            self._decisions += view.free > 0 or view.free_in_s is not None
            return decide(view)

        return counted
