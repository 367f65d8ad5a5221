"""Waiting for clients that come back: learned from when they do, and worth it by the formula or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from carpool.engine.policy.clients import Arrivals, Gather
from carpool.engine.policy.cost import CostModel
from carpool.simulate import Affine, Cost, run
from tests.engine.policy.learned import FIXED, TILES, learned

Delays = Callable[[], Sequence[float]]
"""When the clients of one batch come back, in seconds after its end."""


def tell(gather: Gather, now: float, n: int, waiting: int, unit: float, model: CostModel) -> None:
    """A batch is done, and there is time to learn."""
    gather.learn(now, n + waiting, 1, unit, model, model.limit)
    gather.completed(now, n)


class Rounds:
    """Batches that follow each other without a pause, whose clients come back."""

    def __init__(self, cost: Cost = FIXED) -> None:
        self.cost = cost
        self.arrivals = Arrivals()
        self.gather = Gather(self.arrivals)
        self.windows: list[float] = []
        self._model = learned(cost)
        self.now = 0.0

    def play(self, n: int, waiting: int, delays: Delays, batches: int = 200) -> Gather:
        """So many batches of `n`, with `waiting` others in the queue at the end of each."""
        for _ in range(batches):
            self.now += self.cost(n)
            tell(self.gather, self.now, n, waiting, 1.0, self._model)
            self.windows.append(self.gather.window_s)
            for delay in sorted(delays()):
                self.arrivals.add(self.now + delay, 1)
        return self.gather


def uniform(n: int, low: float, high: float) -> Delays:
    """So many clients, each time at random between the two."""
    dice = Random(0)
    return lambda: [dice.uniform(low, high) for _ in range(n)]


def memoryless(n: int, mean: float) -> Delays:
    """So many clients that think for an exponential time."""
    dice = Random(0)
    return lambda: [dice.expovariate(1 / mean) for _ in range(n)]


def test_clients_in_a_closed_loop_are_waited_for() -> None:
    """Clients in a closed loop come in two groups that alternate; by the third batch the policy
    waits until the last of one group is back, and little longer.
    """
    rounds = Rounds()
    gather = rounds.play(8, 8, uniform(8, 0.0005, 0.0015))

    assert 0.0014 < gather.window_s < 0.0026
    assert gather.until == rounds.now + gather.window_s
    assert all(window > 0 for window in rounds.windows[3:])


def test_clients_that_were_gathered_are_waited_for_again() -> None:
    """Once the clients are in one group the policy goes on waiting for them, with the same window."""
    assert 0.0014 < Rounds().play(16, 0, uniform(16, 0.0005, 0.0015)).window_s < 0.0026


def test_the_clients_that_are_missing_are_counted() -> None:
    """Clients count as missing if they have just been served and are not back; others that come do
    not make the number negative.
    """
    rounds = Rounds()
    gather = rounds.play(8, 8, list)
    assert (gather.served, gather.expected) == (8, 8)

    rounds.arrivals.add(rounds.now, 3)
    assert gather.expected == 5
    rounds.arrivals.add(rounds.now, 9)
    assert gather.expected == 0


def test_who_comes_back_too_late_is_not_waited_for() -> None:
    """Clients that come back later than is worth it are not waited for: a wait of w and one batch
    of 16 must take less than two batches of 8, so w < a = 8 ms.
    """
    assert Rounds().play(8, 8, lambda: [0.009] * 8).window_s == 0
    assert Rounds().play(8, 8, lambda: [0.0035] * 8).window_s > 0.0035


@pytest.mark.parametrize(("first", "second_s", "window_s"), [(4, 0.003, 0.003), (6, 0.003, 0.003), (6, 0.0039, 0.001)])
def test_two_moments(first: int, second_s: float, window_s: float) -> None:
    """When some of eight clients come back after 1 ms and the others later, waiting for six makes
    batches of 16 / (2 - 6/8) = 12.8 in 1 + 11.2 ms, and waiting for all makes 16 in 12 ms and the
    wait: that is worth it up to 3.25 ms.
    """
    gather = Rounds().play(8, 8, lambda: [0.001] * first + [second_s] * (8 - first))

    assert window_s <= gather.window_s * (1 + 1e-9) < 1.4 * window_s


@pytest.mark.parametrize(("think_s", "waits"), [(0.002, True), (0.006, False)])
def test_memoryless_clients_are_waited_for_if_they_think_for_less_than_half_the_set_up(
    think_s: float, waits: bool
) -> None:
    """Clients whose thinking time has no memory are waited for if it is less than half the set-up:
    the best window of (2 - G(w))·(a + w) is 0 from z = a/2 on.
    """
    rounds = Rounds()
    rounds.play(8, 8, memoryless(8, think_s), batches=300)

    assert sum(window > 0 for window in rounds.windows) / 300 == pytest.approx(float(waits), abs=0.05)


def test_where_items_cost_more_than_batches_nobody_is_waited_for() -> None:
    """Where two batches of half the size take as long as one, nobody is waited for: there is
    nothing to gain.
    """
    assert Rounds(Affine(0.0005, 0.002)).play(8, 8, lambda: [0.001] * 8).window_s == 0


def test_on_tiles_what_counts_is_what_one_batch_saves() -> None:
    """On tiles the wait is worth what one batch saves: 24 and 24 take 11 ms each and 48 take 15, so
    that up to 7 ms are worth waiting; with 32 and 32 it is only 3 ms.
    """
    assert Rounds(TILES).play(24, 24, lambda: [0.003] * 24).window_s > 0.003
    assert Rounds(TILES).play(24, 24, lambda: [0.0075] * 24).window_s == 0
    assert Rounds(TILES).play(32, 32, lambda: [0.001] * 32).window_s > 0.001
    assert Rounds(TILES).play(32, 32, lambda: [0.0035] * 32).window_s == 0


def test_at_the_limit_there_is_nothing_to_wait_for() -> None:
    """Nobody is waited for where batches are full already."""
    assert Rounds().play(64, 64, uniform(64, 0.0005, 0.0015)).window_s == 0


def test_clients_that_have_gone_are_soon_forgotten() -> None:
    """Clients that begin to come back at any time are soon not waited for any more."""
    rounds = Rounds()
    assert rounds.play(8, 8, uniform(8, 0.0005, 0.0015)).window_s > 0
    assert rounds.play(8, 8, uniform(8, 0.0, 0.01), batches=60).window_s == 0


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_poisson_arrivals_are_never_waited_for(load: float, seed: int) -> None:
    """Clients of a Poisson process come no sooner after a batch than at other times, and are never
    waited for.
    """
    dice, model = Random(seed), learned(FIXED)
    arrivals = Arrivals()
    gather = Gather(arrivals)
    now, rate, queued, windows = 0.0, load * 64 / FIXED(64), 0, []
    coming = dice.expovariate(rate)
    for _ in range(1000):
        now = now if queued else coming
        for end in (now, now + FIXED(min(64, queued or 1))):
            while coming <= end:
                arrivals.add(coming, 1)
                queued += 1
                coming += dice.expovariate(rate)
        n = min(64, queued)
        now = end
        queued -= n
        tell(gather, now, n, queued, 1.0, model)
        windows.append(gather.window_s)

    assert sum(window > 0 for window in windows) < 10


def test_sizes_count() -> None:
    """Batches are counted by size: eight requests of size 4 are batches of 32 units, which 64 can
    hold twice and 32 cannot.
    """

    def window_s(limit: int) -> float:
        arrivals = Arrivals()
        gather, model, now = Gather(arrivals), learned(FIXED, limit), 0.0
        for _ in range(50):
            now += FIXED(32)
            tell(gather, now, 8, 8, 4.0, model)
            arrivals.add(now + 0.001, 8)
        return gather.window_s

    assert window_s(64) >= 0.001
    assert window_s(32) == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_clients_are_waited_for_where_batches_vary(seed: int) -> None:
    """Noise slows small batches and large ones alike, so it is no reason to wait less."""
    report, others = (
        run(
            policy,
            "closed:clients=37,think=1.767ms,think=exponential,backoff=12.71ms",
            cost="affine:a=10.14ms,b=0.1606ms+noisy:sigma=0.295",
            max_batch_size=16,
            workers=2,
            slo_s=0.065,
            duration_s=4.8,
            seed=seed,
        )
        for policy in ("adaptive", "symphony")
    )
    assert report.goodput > 0.92 * others.goodput
