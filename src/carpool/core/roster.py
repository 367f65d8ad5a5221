"""Who works in a stage: the states of its workers, when a lost one is replaced, when to give up.

States: starting (process spawned) -> loading (`setup` runs) -> warming (examples run) -> ready -> draining / dead.
Liveness counts only after ready; a busy worker is judged by the batcher's hang limit, not here.

Replacement: at once after the first death, then after 0.5, 1, 2 ... 30 s with jitter, reset by one finished batch.
`MOST_DEATHS` deaths in a row with no batch finished by any worker of the stage between them: the stage has failed.
The rule is that of an Erlang supervisor: restart a bounded number of times, then escalate.

Deaths that were one request's fault are taken back (`forgive`). But after `MOST_FORGIVEN` such requests in a row, with
no batch finished between them, it may as well be the model that dies with every request: restarts slow down all the
same, and a stage that has never yet shown that it works, by a batch or a warm-up, has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

MOST_DEATHS = 5
MOST_FORGIVEN = 5
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0


class State(StrEnum):
    """What a worker is doing; the values are metric labels."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


_NEXT: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.LOADING, State.DRAINING, State.DEAD}),
    State.LOADING: frozenset({State.WARMING, State.READY, State.DRAINING, State.DEAD}),
    State.WARMING: frozenset({State.READY, State.DRAINING, State.DEAD}),
    State.READY: frozenset({State.DRAINING, State.DEAD}),
    State.DRAINING: frozenset({State.DEAD}),
    State.DEAD: frozenset({State.STARTING}),
}


@dataclass(slots=True)
class Place:
    """One worker's place in the stage; the process in it changes, the place keeps its number and its cores."""

    state: State = State.DEAD
    start_at: float = 0.0  # when a dead worker is to be replaced
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

    @property
    def ready(self) -> int:
        """How many workers are ready."""
        return sum(place.state == State.READY for place in self.places)

    @property
    def restarts(self) -> int:
        """How many workers have been started again after a death."""
        return sum(max(0, place.starts - 1) for place in self.places)

    def due(self, now: float) -> list[int]:
        """The places whose worker is to be started now; they count as starting from here on."""
        if self.failed or self.stopping:
            return []
        due = [i for i, p in enumerate(self.places) if p.state == State.DEAD and p.start_at <= now]
        for i in due:
            self.places[i].state = State.STARTING
            self.places[i].starts += 1
        return due

    def next_start(self) -> float:
        """When the next start is due; infinity if none is."""
        if self.failed or self.stopping:
            return float("inf")
        return min((p.start_at for p in self.places if p.state == State.DEAD), default=float("inf"))

    def moved(self, worker: int, state: State) -> None:
        """A worker has reached `state` (not dead: that is `lost`).

        Raises:
            ValueError: that state cannot follow the present one.
        """
        place = self.places[worker]
        if state not in _NEXT[place.state] or state in (State.DEAD, State.STARTING):
            raise ValueError(f"worker {worker} cannot become {state} while {place.state}")
        if state == State.READY and place.state == State.WARMING:
            self._works = True
        place.state = state

    def finished_batch(self) -> None:
        """Some worker of the stage has finished a batch: it can work, so deaths start counting anew."""
        self._deaths_in_a_row = self._forgiven_in_a_row = 0
        self._works = True

    def lost(self, now: float, worker: int) -> None:
        """A worker is dead; sets when it is replaced, or that the stage has failed.

        Raises:
            ValueError: it was dead already.
        """
        place = self.places[worker]
        if place.state == State.DEAD:
            raise ValueError(f"worker {worker} is dead already")
        expected = place.state == State.DRAINING or self.stopping
        place.state = State.DEAD
        if expected:
            return
        self._deaths_in_a_row += 1
        self._judge()
        place.start_at = now + self._delay()

    def forgive(self, now: float) -> None:
        """The last death, and the one before it, were the fault of one request; those who are dead start sooner."""
        self._deaths_in_a_row = max(0, self._deaths_in_a_row - 2)
        self._forgiven_in_a_row += 1
        self._judge()
        latest = now + self._delay()
        for place in self.places:
            if place.state == State.DEAD:
                place.start_at = min(place.start_at, latest)

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
