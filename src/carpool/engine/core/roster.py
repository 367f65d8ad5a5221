"""The workers of a stage: their states, when a lost or worn one is replaced, and when to give up.

States: starting (spawned) -> loading (`setup` runs) -> warming (examples run) -> ready -> dead, or
ready -> hung -> dead, or ready -> draining -> dead where it is to go. Liveness counts only after
ready; a busy worker is judged by the batcher's hang limit, not here. One that hangs is lost at
once, but its place is free only when its process is gone: until then it may hold the memory that
its successor needs.

Replacement: at once after the first death, then after 0.5, 1, 2 ... 30 s with jitter, reset by one
finished batch. After `MOST_DEATHS` deaths in a row, with no batch finished by any worker of the
stage between them, the stage has failed. Workers that ran side by side and die together (a signal
has killed them all, memory ran out) count as one death: what counts is how often replacing them was
in vain. The rule is that of an Erlang supervisor: restart a bounded number of times, then escalate.

Deaths that were one request's fault are taken back (`forgive`), and so are those of workers that
were given up since no caller waited for their calls, which may just be slow. But after
`MOST_FORGIVEN` such requests in a row, with no batch finished between them, it may as well be the
model that dies with every request: restarts slow down all the same, and a stage that has never yet
shown that it works, by a batch or a warm-up, has failed.

Places come and go while the service runs (`add`, `leave`, `remove`). A newcomer is a worker in a
place that is not established yet: whoever has added the place decides what becomes of it, so its
death is no death of the stage, and it is not started again. Guests are workers that come by
themselves (`admit`). Their places go with them, and their deaths are for those who started them to
judge.

`Recycling` replaces a worker by a fresh one although nothing is wrong with it, for models that leak
memory, or get slower with time. One worker of a stage is replaced at a time, since its successor
needs memory while it is still there. If a successor cannot load, the old worker stays, and it is
tried again later. So it is where the successor itself holds too much memory once it has loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

MOST_DEATHS = 5
MOST_FORGIVEN = 5
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
NO_ROOM_DELAY_S = 2.0


class PlaceState(StrEnum):
    """The states of a place and its worker; the values are metric labels."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    HUNG = "hung"
    DEAD = "dead"


_NEXT: dict[PlaceState, frozenset[PlaceState]] = {
    PlaceState.STARTING: frozenset({PlaceState.LOADING, PlaceState.DEAD}),
    PlaceState.LOADING: frozenset({PlaceState.WARMING, PlaceState.READY, PlaceState.DEAD}),
    PlaceState.WARMING: frozenset({PlaceState.READY, PlaceState.DEAD}),
    PlaceState.READY: frozenset({PlaceState.DEAD}),
    PlaceState.DRAINING: frozenset({PlaceState.DEAD}),
    PlaceState.HUNG: frozenset({PlaceState.DEAD}),
    PlaceState.DEAD: frozenset({PlaceState.STARTING}),
}
_ON_THEIR_WAY = frozenset({PlaceState.STARTING, PlaceState.LOADING, PlaceState.WARMING})


@dataclass(slots=True)
class PlaceRecord:
    """One worker's place in the stage. The worker in it changes where one has died; the place keeps
    its cores.

    Attributes:
        index: The worker's number for the user, from 0. It decides on cores, devices and
            environment. A successor takes over the number.
        start_at: When a dead worker is to be replaced.
        is_leaving: Whether its worker is to go, without a successor in this place.
        was_ready: Whether a worker in this place has ever been ready.
        is_retried: Whether the place was taken over from one whose worker was ready: until it has
            one itself, it is tried again and again, which is no fault of the stage.
    """

    index: int
    state: PlaceState = PlaceState.DEAD
    start_at: float = 0.0
    order: int = 0
    starts: int = 0
    is_new: bool = False
    is_leaving: bool = False
    was_ready: bool = False
    is_retried: bool = False
    is_guest: bool = False

    @property
    def is_serving(self) -> bool:
        return self.state in (PlaceState.READY, PlaceState.DRAINING)


class Roster:
    """The workers of one stage, with so many places at first; `random` returns uniform numbers in
    [0, 1), for the jitter.

    Attributes:
        places: All places, each by its number; a number is used once.
        stopping: Whether the service ends, so that no worker is started and deaths do not count.
        is_renewed: Whether all workers are being replaced, so that only newcomers are started.
    """

    def __init__(self, workers: int, random: Callable[[], float]) -> None:
        self.places = {place: PlaceRecord(place) for place in range(workers)}
        self.failed = self.stopping = self.is_renewed = False
        self._next_place = workers
        self._past_restarts = 0  # in places that have been removed
        self._random = random
        self._deaths_in_a_row = 0
        self._forgiven_in_a_row = 0  # requests whose deaths were taken back
        self._works = False  # whether a batch or a warm-up has ever been finished
        self._starts = 0
        self._starts_before_death = 0  # before the last death that counted

    @property
    def loading(self) -> int:
        """How many workers have been started and are not ready yet; guests load elsewhere."""
        return sum(record.state in _ON_THEIR_WAY and not record.is_guest for record in self.places.values())

    @property
    def ready(self) -> int:
        return sum(record.state == PlaceState.READY for record in self.places.values())

    @property
    def is_served(self) -> bool:
        """Whether a worker has requests, or may have them; a newcomer may not."""
        return any(record.is_serving and not record.is_new for record in self.places.values())

    @property
    def has_nobody(self) -> bool:
        return not any(record.is_serving or record.state in _ON_THEIR_WAY for record in self.places.values())

    @property
    def restarts(self) -> int:
        """How many workers have been started again after a death."""
        return self._past_restarts + sum(max(0, record.starts - 1) for record in self.places.values())

    @property
    def established(self) -> list[int]:
        """The places that are to have a worker: neither new, nor to be left, nor a guest's."""
        return [
            place
            for place, record in self.places.items()
            if not (record.is_new or record.is_leaving or record.is_guest)
        ]

    @property
    def guests(self) -> int:
        return sum(record.is_guest and not record.is_leaving for record in self.places.values())

    def add(self, index: int | None = None, *, is_new: bool = True) -> int:
        """Add a place, the worker of which is to be started now, and return its number.

        Args:
            index: Which worker it is for the user; None for the least that no other has.
            is_new: Whether it is a newcomer, which `establish` makes one like the others. If not,
                its worker is started until one is ready.
        """
        index = self._free_index() if index is None else index
        return self._add(PlaceRecord(index, is_new=is_new, is_retried=not is_new))

    def admit(self) -> int:
        """Return the place of a guest that has come; it counts as starting from here on."""
        self._starts += 1
        return self._add(
            PlaceRecord(self._free_index(), PlaceState.STARTING, order=self._starts, starts=1, is_guest=True)
        )

    def _add(self, record: PlaceRecord) -> int:
        place = self._next_place
        self._next_place += 1
        self.places[place] = record
        return place

    def _free_index(self) -> int:
        taken = {record.index for record in self.places.values() if not record.is_leaving}
        return min(set(range(len(taken) + 1)) - taken)

    def least_useful(self, n: int) -> list[int]:
        """Return the places of the `n` workers to go first: those not ready, then the last ones."""
        ready = PlaceState.READY
        by_use = sorted(self.established, key=lambda at: (self.places[at].state != ready, self.places[at].index))
        return by_use[::-1][:n]

    def establish(self, place: int) -> None:
        self.places[place].is_new = False

    def leave(self, place: int) -> None:
        """Note that the worker of a place is to go: it is not replaced there.

        One that is ready and established drains from now on.
        """
        record = self.places[place]
        record.is_leaving = True
        if record.state == PlaceState.READY and not record.is_new:
            record.state = PlaceState.DRAINING

    def remove(self, place: int) -> None:
        self._past_restarts += max(0, self.places.pop(place).starts - 1)

    def due(self, now: float, room: float = inf) -> list[int]:
        """Return the places whose worker is to be started now, at most `room`.

        They count as starting from here on.
        """
        due = self.waiting(now)
        if len(due) > room:
            due = due[: int(room)]
        for i in due:
            record = self.places[i]
            self._starts += 1
            record.state = PlaceState.STARTING
            record.order = self._starts
            record.starts += 1
        return due

    def waiting(self, now: float) -> list[int]:
        """Return the places whose worker could be started now, if there is room."""
        if self.failed or self.stopping:
            return []
        return [place for place, record in self._startable if record.start_at <= now]

    def next_start(self) -> float:
        if self.failed or self.stopping:
            return inf
        return min((record.start_at for _, record in self._startable), default=inf)

    @property
    def _startable(self) -> list[tuple[int, PlaceRecord]]:
        return [
            (place, record)
            for place, record in self.places.items()
            if record.state == PlaceState.DEAD
            and not (record.is_leaving or record.is_guest)
            and (record.is_new or not self.is_renewed)
        ]

    def moved(self, place: int, state: PlaceState) -> None:
        """Note that a worker has reached `state`; a dead one is reported to `lost`.

        Raises:
            ValueError: That state cannot follow the present one.
        """
        record = self.places[place]
        if state not in _NEXT[record.state] or state in (PlaceState.DEAD, PlaceState.STARTING):
            raise ValueError(f"worker {place} cannot become {state} while {record.state}")
        if state == PlaceState.READY and record.state == PlaceState.WARMING:
            self._works = True
        record.was_ready = record.was_ready or state == PlaceState.READY
        record.state = state

    def finished_batch(self) -> None:
        self._deaths_in_a_row = self._forgiven_in_a_row = 0
        self._works = True

    def lost(self, now: float, place: int, *, gone: bool = True) -> None:
        """Note that a worker is dead: it is to be replaced later, or the stage has failed. Neither
        is the case for a newcomer and for one that was to go. One that hangs and still has to be
        killed is not `gone`, and is replaced after `is_gone`.

        Raises:
            ValueError: It was dead or given up already.
        """
        record = self.places[place]
        if record.state in (PlaceState.DEAD, PlaceState.HUNG):
            raise ValueError(f"worker {place} is {record.state} already")
        record.state = PlaceState.DEAD if gone else PlaceState.HUNG
        if self.stopping or record.is_new or record.is_leaving or record.is_guest:
            return
        if record.is_retried and not record.was_ready:
            record.start_at = now + _pause_s(record.starts) * (0.5 + 0.5 * self._random())
            return
        if record.order > self._starts_before_death:  # else it ran beside one whose death was counted
            self._deaths_in_a_row += 1
            self._starts_before_death = self._starts
        self._judge()
        record.start_at = now + self._delay()

    def forgive(self, now: float, deaths: int = 2) -> None:
        """Take back deaths that a request or an unwanted call caused, and start anew sooner."""
        self._deaths_in_a_row = max(0, self._deaths_in_a_row - deaths)
        self._forgiven_in_a_row += 1
        self._judge()
        latest = now + self._delay()
        for record in self.places.values():
            if record.state in (PlaceState.DEAD, PlaceState.HUNG):
                record.start_at = min(record.start_at, latest)

    def is_gone(self, place: int) -> None:
        """Note that the process of a worker that hung has ended.

        Raises:
            ValueError: It did not hang.
        """
        record = self.places[place]
        if record.state != PlaceState.HUNG:
            raise ValueError(f"worker {place} is {record.state}: it did not hang")
        record.state = PlaceState.DEAD

    def not_started(self, now: float, place: int) -> None:
        """Try a start again later for which the system had no process, memory or file descriptor.

        That is not a death.
        """
        record = self.places[place]
        record.state = PlaceState.DEAD
        record.starts -= 1
        record.start_at = now + NO_ROOM_DELAY_S * (0.5 + 0.5 * self._random())

    def _judge(self) -> None:
        is_broken = not self._works and self._forgiven_in_a_row >= MOST_FORGIVEN
        self.failed = is_broken or self._deaths_in_a_row >= MOST_DEATHS

    def _delay(self) -> float:
        deaths = self._deaths_in_a_row + max(0, self._forgiven_in_a_row - MOST_FORGIVEN)
        if deaths <= 1:
            return 0.0
        return _pause_s(deaths - 1) * (0.5 + 0.5 * self._random())


def _pause_s(tries: int) -> float:
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (tries - 1))


class Starts:
    """Limits how many workers of a service load at the same time, whatever their stage
    (`max_parallel_starts`).

    A stage without any worker has the first claim, since a service answers nothing until each of
    its stages has one.
    """

    def __init__(self, rosters: Sequence[Roster], most: int) -> None:
        self._rosters = tuple(rosters)
        self.most = most

    @property
    def room(self) -> int:
        return max(0, self.most - sum(roster.loading for roster in self._rosters))

    def room_for(self, now: float, roster: Roster) -> int:
        """Return how many workers of a stage may be started now.

        Room is kept for one worker of each other stage that has none and could start one.
        """
        others = sum(other.has_nobody and bool(other.waiting(now)) for other in self._rosters if other is not roster)
        return min(self.room, max(self.room - others, 1 if roster.has_nobody else 0))


_FIRST_PAUSE_S = 5.0  # after a successor that could not load; twice that after each further one
_LONGEST_PAUSE_S = 300.0


class Worn(NamedTuple):
    """A worker that is to be replaced.

    Attributes:
        place: The position of the worker.
        why: For the log.
    """

    place: int
    why: str


class Recycling:
    """Which worker of a stage is to be replaced: one that has made too many calls, whose process
    holds too many MiB, or that has been ready for too long; infinity for no such limit.
    """

    def __init__(self, max_calls: float = inf, max_memory_mb: float = inf, max_age_s: float = inf) -> None:
        self._max_calls = max_calls
        self._max_memory_mb = max_memory_mb
        self._max_age_s = max_age_s
        self._since: dict[int, float] = {}  # when a worker was first seen to be ready, by place
        self._starts: dict[int, int] = {}  # which worker of its place that was
        self._calls: dict[int, int] = {}
        self._memory_mb: dict[int, float] = {}
        self._resume_at = -inf
        self._pause_s = _FIRST_PAUSE_S

    @property
    def measures_memory(self) -> bool:
        return self._max_memory_mb < inf

    def are_there(self, now: float, orders: dict[int, int]) -> None:
        """Note which workers are ready: by place, the number of each among all workers."""
        for place in [place for place in self._since if orders.get(place) != self._starts[place]]:
            for by_place in (self._since, self._starts, self._calls, self._memory_mb):
                by_place.pop(place, None)
        for place, order in orders.items():
            if place not in self._since:
                self._since[place], self._starts[place] = now, order

    def called(self, place: int, calls: int) -> None:
        self._calls[place] = self._calls.get(place, 0) + calls

    def measured(self, place: int, memory_mb: float) -> None:
        self._memory_mb[place] = memory_mb

    def due(self, now: float) -> Worn | None:
        if now < self._resume_at:
            return None
        for place in sorted(self._since, key=self._since.__getitem__):
            why = self._why(now, place)
            if why:
                return Worn(place, why)
        return None

    def succeeded(self, now: float, memory_mb: float = 0.0) -> float:
        """Note that a worker was replaced by one that holds so many MiB before it has done
        anything; return after how many seconds another may be.
        """
        if memory_mb > self._max_memory_mb:
            return self.failed(now)
        self._pause_s = _FIRST_PAUSE_S
        return 0.0

    def failed(self, now: float) -> float:
        """Note that a successor is no better; return after how many seconds another is tried."""
        pause_s = self._pause_s
        self._resume_at = now + pause_s
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        return pause_s

    def _why(self, now: float, place: int) -> str:
        calls, memory_mb = self._calls.get(place, 0), self._memory_mb.get(place, 0.0)
        if calls >= self._max_calls:
            return f"it has made {calls} calls (max_calls={self._max_calls:g})"
        if memory_mb > self._max_memory_mb:
            return f"it holds {memory_mb:.0f} MiB (max_memory_mb={self._max_memory_mb:g})"
        age_s = now - self._since[place]
        return f"it is {age_s:.0f} s old (max_age_s={self._max_age_s:g})" if age_s >= self._max_age_s else ""
