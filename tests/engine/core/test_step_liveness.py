"""Every stream ends, once no more workers are lost: walks at random through all that can happen to a stage of steps.

`test_worlds.py` looks for what must never be, in any order of events. Here events come about as often as in a
service whose workers are killed, so that whoever is forgotten in between is found: a stream that pauses or rests and
is never told to go on.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

from carpool.engine.request import QUEUED
from tests.effort import share
from tests.engine.core.worlds import Adversary, Ask, AskSpec, StageSpec, World
from tests.support.shapes import Made

_ENDS_AFTER = 400
"""Steps in which all that a walk leaves behind has ended, if nobody is forgotten: a stream ends in one of five."""


class Walk:
    """One walk: a stage, workers and callers who live by their dice, and then the time in which all must end."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = Random(seed)
        self.places = dice.randint(1, 3)
        spec = StageSpec(
            policy="adversary",
            limit=dice.randint(2, 4),
            resumable=dice.random() < 0.8,
            max_batch_time_s=dice.choice([inf, inf, 4.0]),
            workers=self.places,
            made=Made(in_parts=True),
            seed=seed,
        )
        self.world = World([spec], [[0]])
        self.policy = self.world.crews[0].lobby.policy
        assert isinstance(self.policy, Adversary)
        self.policy.is_kind = dice.random() < 0.5
        self.start_workers()

    def run(self) -> None:
        """Let things happen."""
        rules: list[tuple[float, Callable[[], None]]] = [
            (2, self.submit),
            (1, self.cancel),
            (1, self.pause),
            (1, self.lose_worker),
            (0.1, lambda: self.world.worker_left(self.pick())),
            (1, lambda: self.world.worker_ready(self.pick())),
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

    def end(self) -> list[Ask]:
        """Let nobody come, no worker be lost and all callers read on; return those whose streams do not end."""
        self.policy.is_kind = True
        for i in range(len(self.world.asks)):
            self.world.pause(i, False)
        if not self.world.ready or self.dice.random() < 0.5:
            self.start_workers()
        for _ in range(_ENDS_AFTER):
            if not self.waiting:
                break
            self.step()
        return self.waiting

    # -- what can happen

    def start_workers(self) -> None:
        for _ in range(self.places):
            self.world.worker_ready(0)

    def submit(self) -> None:
        specs = [AskSpec(reads_parts=self.dice.random() < 0.8)]
        self.world.submit(specs * self.dice.randint(1, 3))

    def cancel(self) -> None:
        """A caller leaves, more often than not one who waits for a worker."""
        queued = [ask for ask in self.waiting if ask.request.state == QUEUED]
        if some := self.dice.choice([queued, self.waiting]):
            self.world.cancel(self.world.asks.index(self.dice.choice(some)))

    def pause(self) -> None:
        if self.world.asks:
            self.world.pause(self.pick(), self.dice.random() < 0.5)

    def lose_worker(self) -> None:
        self.world.worker_lost(self.pick(), self.dice.random() < 0.5)

    def step(self) -> None:
        """All workers step once, with reports and orders as quick as they can be."""
        self.world.go_on(self.dice)
        self.world.now += 2**-10

    def poll(self) -> None:
        self.world.poll()

    def pick(self) -> int:
        return self.dice.randrange(10_000)

    @property
    def waiting(self) -> list[Ask]:
        """The callers whose streams have not ended."""
        return [ask for ask in self.world.asks if ask.inside]


def test_every_stream_ends_once_no_more_workers_are_lost() -> None:
    """However workers were lost, callers left and readers paused before, and though no other request ever comes."""
    for seed in range(share(1600)):
        walk = Walk(seed)
        walk.run()
        assert not walk.end(), f"walk {seed} leaves streams that are never stepped"
