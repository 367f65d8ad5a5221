"""Who works in a stage: the states of its workers, when a lost one is replaced, when to give up.

States: starting (spawned) -> loading (`setup` runs) -> warming (examples run) -> ready -> draining / hung -> dead.
Liveness counts only after ready; a busy worker is judged by the batcher's hang limit, not here. One that hangs is lost
at once, but its place is free only when its process is gone: until then it may hold the memory its successor needs.

Replacement: at once after the first death, then after 0.5, 1, 2 ... 30 s with jitter, reset by one finished batch.
`MOST_DEATHS` deaths in a row with no batch finished by any worker of the stage between them: the stage has failed.
Workers that ran side by side and die together (somebody has killed them all, memory ran out) count as one death: what
counts is how often replacing them was in vain. No more than so many workers of a service load at a time (`Starts`).
The rule is that of an Erlang supervisor: restart a bounded number of times, then escalate.

Deaths that were one request's fault are taken back (`forgive`), and so are those of workers that were given up since
nobody waited for their calls, which may just be slow. But after `MOST_FORGIVEN` such requests in a row, with
no batch finished between them, it may as well be the model that dies with every request: restarts slow down all the
same, and a stage that has never yet shown that it works, by a batch or a warm-up, has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

MOST_DEATHS = 5
MOST_FORGIVEN = 5
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
NO_ROOM_DELAY_S = 2.0


class PlaceState(StrEnum):
    """What a worker is doing; the values are metric labels."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    HUNG = "hung"
    DEAD = "dead"


_NEXT: dict[PlaceState, frozenset[PlaceState]] = {
    PlaceState.STARTING: frozenset({PlaceState.LOADING, PlaceState.DRAINING, PlaceState.DEAD}),
    PlaceState.LOADING: frozenset({PlaceState.WARMING, PlaceState.READY, PlaceState.DRAINING, PlaceState.DEAD}),
    PlaceState.WARMING: frozenset({PlaceState.READY, PlaceState.DRAINING, PlaceState.DEAD}),
    PlaceState.READY: frozenset({PlaceState.DRAINING, PlaceState.DEAD}),
    PlaceState.DRAINING: frozenset({PlaceState.DEAD}),
    PlaceState.HUNG: frozenset({PlaceState.DEAD}),
    PlaceState.DEAD: frozenset({PlaceState.STARTING}),
}
_ON_THEIR_WAY = frozenset({PlaceState.STARTING, PlaceState.LOADING, PlaceState.WARMING})


@dataclass(slots=True)
class Place:
    """One worker's place in the stage; the process in it changes, the place keeps its number and its cores."""

    state: PlaceState = PlaceState.DEAD
    start_at: float = 0.0  # when a dead worker is to be replaced
    order: int = 0  # the present one's among all that the stage has started
    starts: int = 0


class Roster:
    """The workers of one stage.

    Args:
        workers: how many places there are.
        random: uniform numbers in [0, 1), for the jitter.
    """

    def __init__(self, workers: int, random: Callable[[], float]) -> None:
        self.places = [Place() for _ in range(workers)]
        self.failed = False
        self.stopping = False
        self._random = random
        self._deaths_in_a_row = 0
        self._forgiven_in_a_row = 0  # requests whose deaths were taken back
        self._works = False  # a batch or a warm-up has been finished
        self._starts = 0
        self._starts_before_death = 0  # before the last one that counted

    @property
    def loading(self) -> int:
        """How many workers have been started and are not ready yet."""
        return sum(place.state in _ON_THEIR_WAY for place in self.places)

    @property
    def ready(self) -> int:
        """How many workers are ready."""
        return sum(place.state == PlaceState.READY for place in self.places)

    @property
    def restarts(self) -> int:
        """How many workers have been started again after a death."""
        return sum(max(0, place.starts - 1) for place in self.places)

    def due(self, now: float, room: float = inf) -> list[int]:
        """The places whose worker is to be started now, at most `room`; they count as starting from here on."""
        if self.failed or self.stopping:
            return []
        due = [i for i, p in enumerate(self.places) if p.state == PlaceState.DEAD and p.start_at <= now]
        if len(due) > room:
            due = due[: int(room)]
        for i in due:
            place = self.places[i]
            self._starts += 1
            place.state = PlaceState.STARTING
            place.order = self._starts
            place.starts += 1
        return due

    def next_start(self) -> float:
        """When the next start is due; infinity if none is."""
        if self.failed or self.stopping:
            return inf
        return min((p.start_at for p in self.places if p.state == PlaceState.DEAD), default=inf)

    def moved(self, worker: int, state: PlaceState) -> None:
        """A worker has reached `state` (not dead: that is `lost`).

        Raises:
            ValueError: that state cannot follow the present one.
        """
        place = self.places[worker]
        if state not in _NEXT[place.state] or state in (PlaceState.DEAD, PlaceState.STARTING, PlaceState.HUNG):
            raise ValueError(f"worker {worker} cannot become {state} while {place.state}")
        if state == PlaceState.READY and place.state == PlaceState.WARMING:
            self._works = True
        place.state = state

    def finished_batch(self) -> None:
        """Some worker of the stage has finished a batch: it can work, so deaths start counting anew."""
        self._deaths_in_a_row = self._forgiven_in_a_row = 0
        self._works = True

    def lost(self, now: float, worker: int, *, gone: bool = True) -> None:
        """A worker is dead; sets when it is replaced, or that the stage has failed.

        Args:
            now: the time.
            worker: its place.
            gone: False for one that hangs and still has to be killed: it is replaced once `is_gone` has said so.

        Raises:
            ValueError: it was dead or given up already.
        """
        place = self.places[worker]
        if place.state in (PlaceState.DEAD, PlaceState.HUNG):
            raise ValueError(f"worker {worker} is {place.state} already")
        expected = place.state == PlaceState.DRAINING or self.stopping
        place.state = PlaceState.DEAD if gone else PlaceState.HUNG
        if expected:
            return
        if place.order > self._starts_before_death:  # else it was there when another died, which has been counted
            self._deaths_in_a_row += 1
            self._starts_before_death = self._starts
        self._judge()
        place.start_at = now + self._delay()

    def forgive(self, now: float, deaths: int = 2) -> None:
        """The last deaths were the fault of one request, or of a call that nobody waits for; the dead start sooner."""
        self._deaths_in_a_row = max(0, self._deaths_in_a_row - deaths)
        self._forgiven_in_a_row += 1
        self._judge()
        latest = now + self._delay()
        for place in self.places:
            if place.state in (PlaceState.DEAD, PlaceState.HUNG):
                place.start_at = min(place.start_at, latest)

    def is_gone(self, worker: int) -> None:
        """The process of a worker that hung has ended.

        Raises:
            ValueError: it did not hang.
        """
        place = self.places[worker]
        if place.state != PlaceState.HUNG:
            raise ValueError(f"worker {worker} is {place.state}: it did not hang")
        place.state = PlaceState.DEAD

    def not_started(self, now: float, worker: int) -> None:
        """The system had no process, memory or file descriptor for it: that is no death, and is tried again."""
        place = self.places[worker]
        place.state = PlaceState.DEAD
        place.starts -= 1
        place.start_at = now + NO_ROOM_DELAY_S * (0.5 + 0.5 * self._random())

    def _judge(self) -> None:
        """Whether the stage has failed."""
        broken = not self._works and self._forgiven_in_a_row >= MOST_FORGIVEN
        self.failed = broken or self._deaths_in_a_row >= MOST_DEATHS

    def _delay(self) -> float:
        deaths = self._deaths_in_a_row + max(0, self._forgiven_in_a_row - MOST_FORGIVEN)
        if deaths <= 1:
            return 0.0
        delay: float = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (deaths - 2))
        return delay * (0.5 + 0.5 * self._random())


class Starts:
    """How many workers of a service may load at a time, whatever their stage.

    Args:
        rosters: of all its stages.
        most: `max_parallel_starts`.
    """

    def __init__(self, rosters: Sequence[Roster], most: int) -> None:
        self._rosters = tuple(rosters)
        self._most = most

    @property
    def room(self) -> int:
        """How many more may be started now."""
        return max(0, self._most - sum(roster.loading for roster in self._rosters))
