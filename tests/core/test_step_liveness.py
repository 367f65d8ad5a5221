"""Every stream ends, once no more workers are lost: walks at random through all that can happen to a stage of steps.

`test_step_machine.py` looks for what must never be, in any order of events. Here events come about as often as in a
service whose workers are killed, so that whoever is forgotten in between is found: a stream that pauses or rests and
is never told to go on.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

from carpool.request import QUEUED, RUNNING, Lane
from tests.core.step_world import Listener, StepSpec, StepWorld, StreamSpec
from tests.effort import share

_ENDS_AFTER = 400
"""Steps in which all that a walk leaves behind has ended, if nobody is forgotten: a stream ends in one of five."""


class Walk:
    """One walk: a stage, workers and callers who live by their dice, and then the time in which all must end."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = Random(seed)
        self.places = dice.randint(1, 3)
        self.world = StepWorld(
            StepSpec(
                rows=dice.randint(2, 4),
                limit=inf,
                resumable=dice.random() < 0.8,
                idempotent=True,
                silence_s=inf,
                max_stream_s=inf,
                max_batch_time_s=dice.choice([inf, inf, 4.0]),
                patience_s=inf,
                max_size=inf,
                slo_s=None,
                journal=False,
                seed=seed,
            )
        )
        self.world.policy.is_kind = dice.random() < 0.5
        self.start_workers()

    def run(self) -> None:
        """Let things happen."""
        rules: list[tuple[float, Callable[[], None]]] = [
            (2, self.submit),
            (1, self.cancel),
            (1, self.pause),
            (1, self.lose_worker),
            (0.1, lambda: self.world.worker_left(self.pick())),
            (1, lambda: self.world.worker_ready(self.dice.randrange(self.places))),
            (4, self.poll),
            (3, self.step),
            (4, lambda: self.world.boundary(self.pick(), self.dice, 1000, 0)),
            (4, lambda: self.world.deliver(self.pick())),
            (0.2, lambda: self.world.wait(1)),
        ]
        for _ in range(self.dice.randint(5, 40)):
            (happens,) = self.dice.choices([rule for _, rule in rules], [weight for weight, _ in rules])
            happens()
            self.world.check_always()

    def end(self) -> list[Listener]:
        """Let nobody come, no worker be lost and all callers read on; return those whose streams do not end."""
        self.world.policy.is_kind = True
        for listener in self.world.listeners:
            self.world.pipeline.pause(self.world.now, listener.request, False)
        if not self.world.workers or self.dice.random() < 0.5:
            self.start_workers()
        for _ in range(_ENDS_AFTER):
            if not self.waiting:
                break
            self.step()
        return self.waiting

    # -- what can happen

    def start_workers(self) -> None:
        for place in range(self.places):
            if place not in self.world.workers:
                self.world.worker_ready(place)

    def submit(self) -> None:
        specs = [StreamSpec(inf, False, 1, self.dice.random() < 0.2, Lane(0, None, 0), True)]
        self.world.submit(specs * self.dice.randint(1, 3))

    def cancel(self) -> None:
        """A caller leaves, more often than not one who waits for a worker."""
        queued = [listener for listener in self.waiting if listener.request.state == QUEUED]
        if some := self.dice.choice([queued, self.waiting]):
            self.world.cancel(self.world.listeners.index(self.dice.choice(some)))

    def pause(self) -> None:
        if self.world.listeners:
            self.world.pause(self.pick(), self.dice.random() < 0.5)

    def lose_worker(self) -> None:
        self.world.worker_lost(self.pick(), self.dice.random() < 0.5)

    def step(self) -> None:
        """All workers step once, with reports and orders as quick as they can be."""
        self.poll()
        for pick in range(len(self.world.workers)):
            self.world.boundary(pick, self.dice, 1000, 0)
        while self.world.post:
            self.world.deliver(0)
        self.world.now += 2**-10

    def poll(self) -> None:
        self.world.poll()

    def pick(self) -> int:
        return self.dice.randrange(10_000)

    @property
    def waiting(self) -> list[Listener]:
        """The callers whose streams have not ended."""
        return [each for each in self.world.listeners if each.request.state in (QUEUED, RUNNING)]


def test_every_stream_ends_once_no_more_workers_are_lost() -> None:
    """However workers were lost, callers left and readers paused before, and though no other request ever comes."""
    for seed in range(share(1600)):
        walk = Walk(seed)
        walk.run()
        assert not walk.end(), f"walk {seed} leaves streams that are never stepped"
