"""Callers that leave at random moments, in virtual time: no request is forgotten, and nobody else notices.

    python -m tests.engine.core.cancel_storm --cancels 1000000 --seed 1

Requests come in bursts, for two stages whose workers die now and then. Each caller leaves some random time after it has
come: before its request is seen, at the door, in either queue, in a worker, between the stages, or after its answer,
when that means nothing. The ledger holds who waits for an answer and must be empty in the end.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Adaptive, Greedy
from carpool.engine.request import DONE, NEW, QUEUED, RUNNING, Lane, Request
from carpool.errors import CarpoolError

_STATES = {NEW: "before it was seen", QUEUED: "in a queue", RUNNING: "in a worker", DONE: "after its answer"}


class Storm:
    """One storm, until so many have left before they had an answer.

    Attributes:
        ledger: Who waits for an answer.
        left: How many left where.
        served, failed: how many had an answer, and how many an error.
    """

    def __init__(self, cancels: int, seed: int) -> None:
        self.cancels = cancels
        self.ledger: dict[int, Request] = {}
        self.left: Counter[str] = Counter()
        self.served = self.failed = 0
        self._dice = Random(seed)
        stages = [
            Batcher("first", Greedy(16), Queue(max_size=100)),
            Batcher("second", Adaptive(32), Queue(max_size=64)),
        ]
        self.core = Core(stages)
        self.run = VirtualDriver(
            self.core,
            self._cost,
            [2, 2],
            computes=[lambda xs: [2 * x for x in xs], lambda xs: [x + 1 for x in xs]],
            turn_s=0.0005,
            watcher=self,
        )

    def rage(self) -> None:
        """From the first arrival to the last answer; raises AssertionError if anything is left, lost or doubled."""
        self.run.feed(self._requests())
        self.run.run()
        core = self.core
        assert not self.ledger, f"{len(self.ledger)} wait for ever"
        assert core.unanswered == core.waiting == 0
        assert (
            core.flow.cancelled == self.left["at the door"] + self.left[_STATES[QUEUED]] + self.left[_STATES[RUNNING]]
        )
        assert (
            core.flow.answered + core.flow.refused
            == self.served + self.failed + self.left["with its answer on the way"]
        )
        for queue in (core.flow.door, *[stage.queue for stage in core.crews]):
            assert (queue.count, queue.nbytes, queue.size) == (0, 0, 0)
        for stage in core.crews:
            assert (stage.running, stage.in_flight, stage.idle) == (0, {}, 2)

    @property
    def gone(self) -> int:
        """How many left before they had an answer."""
        return self.left.total() - self.left[_STATES[DONE]]

    def heard(self, number: int, request: Request) -> None:
        """Note that a caller has its answer."""
        assert self.ledger.pop(number) is request, "an answer that nobody waits for"
        if request.error is None:
            assert request.result == 2 * number + 1, "somebody else's answer"
            self.served += 1
        else:
            assert isinstance(request.error, CarpoolError), request.error
            self.failed += 1

    # -- the driver's watcher

    def started(self, now: float, batch: Batch, busy_s: float) -> None:
        assert all(request.caller is not None for request in batch.requests), "a request is run whose caller has gone"
        if self._dice.random() < 0.002:
            self.run.at(now + busy_s / 2, lambda: self.run.lose(batch.stage, batch.place, back_after_s=0.05))

    def answered(self, now: float, requests: Sequence[Request]) -> None: ...

    # -- inside

    def _cost(self, batch: Batch, now: float) -> float:
        return 0.002 + 0.0001 * len(batch)

    def _requests(self) -> Iterator[tuple[float, Request]]:
        dice, number, now = self._dice, 0, 0.0
        while self.gone < self.cancels:
            now += dice.expovariate(2_000)
            for _ in range(dice.choice((1, 1, 2, 8, 40))):
                number += 1
                request = Request(number, now + dice.choice((0.02, 1.0, 30.0)), _Caller(self, number))
                request.patient = dice.random() < 0.5
                request.lane = Lane(dice.choice((0, 0, 0, 1)), None, 0)
                self.ledger[number] = request
                self.run.at(now + dice.expovariate(100), _Leaving(self, request, number))
                if dice.random() < 0.02:
                    _Leaving(self, request, number)()
                yield now, request


class _Caller:
    """A caller that waits for one answer."""

    __slots__ = ("_number", "_storm")

    def __init__(self, storm: Storm, number: int) -> None:
        self._storm, self._number = storm, number

    def answered(self, request: Request) -> None:
        self._storm.heard(self._number, request)


class _Leaving:
    """The event that one caller leaves."""

    __slots__ = ("_number", "_request", "_storm")

    def __init__(self, storm: Storm, request: Request, number: int) -> None:
        self._storm, self._request, self._number = storm, request, number

    def __call__(self) -> None:
        storm, request = self._storm, self._request
        if self._number in storm.ledger:
            del storm.ledger[self._number]
            if request.state == DONE:  # decided, and told at the end of this turn
                request.caller = None
                storm.left["with its answer on the way"] += 1
            else:
                at_the_door = request.state == QUEUED and request.node is storm.core.flow.doors[0]
                storm.left["at the door" if at_the_door else _STATES[request.state]] += 1
        elif request.state == DONE:
            storm.left[_STATES[DONE]] += 1
        storm.core.cancel(storm.run.clock.now, request)


def storm(cancels: int, seed: int) -> Storm:
    """Play one storm to its end."""
    made = Storm(cancels, seed)
    made.rage()
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: raises if a rule was broken."""
    parser = argparse.ArgumentParser(description="Callers that leave at random moments, in virtual time.")
    parser.add_argument("--cancels", type=int, default=1_000_000, help="how many leave before they have an answer")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    over = storm(options.cancels, options.seed)
    where = ", ".join(f"{n} {state}" for state, n in sorted(over.left.items()))
    took_s = time.perf_counter() - began
    print(f"seed {options.seed}: {over.gone} callers left before they had an answer ({where})")
    print(f"{over.served} were served, {over.failed} heard of an error; nobody waits, nothing runs. {took_s:.0f} s")


if __name__ == "__main__":
    main()
