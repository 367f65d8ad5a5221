"""Batches composed by length: which go together, which goes first, and for how long others wait."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.journal import Journal
from carpool.engine.core.levels import BY_LENGTH
from carpool.engine.core.queue import Queue
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Adaptive, Decision, Policy, QueueView, View, new_policy
from carpool.engine.policy.compose import Composer
from carpool.engine.policy.length_cost import LengthCost
from carpool.engine.request import Request
from carpool.errors import Overloaded
from carpool.simulate import mean_of, run
from tests.effort import examples, slow_where


def padded_cost(batch: Batch, now: float) -> float:
    """A model that pads to the longest: 2 ms and 20 µs for each position."""
    return 2e-3 + 20e-6 * len(batch) * max(request.length for request in batch.requests)


def learned() -> LengthCost:
    """That cost, learned without noise."""
    cost = LengthCost()
    for n in (1, 4, 16, 32):
        for length in (5, 20, 100, 400):
            cost.add(n, length, 2e-3 + 20e-6 * n * length)
    return cost


def waiting(*requests: tuple[int, float], due: float = inf) -> Queue:
    """A queue of requests, each with its length and when it came; all are due `due` seconds later."""
    queue = Queue(levels=BY_LENGTH)
    for length, arrived in requests:
        request = Request(length, arrived + due)
        request.length = length
        request.arrived = request.admitted = arrived
        queue.push([request])
    return queue


def chosen(queue: Queue, now: float, limit: int = 32, composer: Composer | None = None, **settings: Any) -> list[int]:
    """The lengths of the batch that goes."""
    composer = composer or Composer(learned())
    choice = composer.choose(now, queue.levels, limit, inf, **settings)
    return sorted(request.length for request in choice.requests)


def test_long_ones_do_not_go_with_short_ones() -> None:
    """A long text does not pad a crowd of short ones: they are batches of their own."""
    queue = waiting(*[(10, 0.0)] * 20, (400, 0.0))
    assert chosen(queue, 1.0) == [10] * 20


def test_nearly_equal_lengths_go_together() -> None:
    """Where a call of its own costs more than the padding, lengths share a batch."""
    assert chosen(waiting((10, 0.0), (12, 0.0), (14, 0.0)), 1.0) == [10, 12, 14]


def test_the_oldest_gets_its_turn() -> None:
    """A long text that has waited much longer than the short ones goes before them."""
    queue = waiting(*[(10, 9.0)] * 20, (400, 0.0))
    assert chosen(queue, 10.0) == [400]


@pytest.mark.parametrize("apart", [0.0, 1e-4])
def test_a_long_one_goes_while_it_is_in_time(apart: float) -> None:
    """A long text that would be late a moment later goes before short ones which have waited nearly
    as long, but may wait longer since they take less time; be all due equally soon or not.
    """
    for came, now, expected in ((0.0, 0.012, [10] * 6), (0.003, 0.019, [400])):
        queue = Queue(levels=BY_LENGTH)
        for i, (length, arrived) in enumerate([(400, 0.0), *[(10, came)] * 6]):
            request = Request(length, arrived + 0.03 + apart * i)
            request.length = length
            request.arrived = request.admitted = arrived
            queue.push([request])
        assert chosen(queue, now) == expected


def test_who_would_be_late_anyway_does_not_count() -> None:
    """A batch in which all would be late does not go before one that is in time."""
    queue = waiting((400, 0.0), (10, 0.004), due=0.0105)
    assert chosen(queue, 0.009) == [10]


def test_lengths_that_are_mostly_late_get_a_larger_say() -> None:
    """Of two batches that are alike but for the lengths, the one whose lengths were seldom answered
    in time goes first.
    """
    composer = Composer(learned())
    late = Request("late", 1.0)
    late.length = 100
    queue = waiting(*[(10, 0.0)] * 4, (100, 0.0), due=5.0)
    assert chosen(queue, 1.0, composer=composer) == [10] * 4
    for _ in range(400):
        composer.answered(late, False)
    assert chosen(queue, 1.0, composer=composer) == [100]


def test_what_is_as_good_as_gone_is_left_out() -> None:
    """Requests that are being refused are in no batch."""
    queue = waiting((10, 0.0), (11, 0.0), (400, 0.0))
    gone = [request for request in queue if request.length == 11]
    assert chosen(queue, 1.0, without=gone) == [10]


def test_what_waits_is_cut_anew_when_the_cost_has_changed() -> None:
    """The same requests are cut in another way once calls have turned out to cost next to nothing,
    and again where a batch may hold fewer.
    """
    cost = LengthCost()
    queue = waiting((10, 0.0), (10, 0.0), (40, 0.0))
    composer = Composer(cost)
    for calls_s, times, limit, expected in ((5e-3, 1, 32, [10, 10, 40]), (0.0, 50, 32, [10, 10]), (0.0, 0, 1, [10])):
        for n in (1, 4, 16, 32) * times:
            for length in (10, 40, 160):
                cost.add(n, length, calls_s + 20e-6 * n * length)
        for _ in range(2):
            assert chosen(queue, 1.0, limit, composer) == expected


def test_a_batch_is_cut_where_padding_its_count_would_cost_more() -> None:
    """With sizes that batches are padded to, a few that would make the next one necessary wait."""
    cost = LengthCost([1, 4, 16])
    for n in (1, 4, 16):
        for length in (10, 100):
            cost.add(n, length, 1e-4 + 1e-4 * n * length)
    composer = Composer(cost)
    queue = waiting(*[(10, float(i)) for i in range(5)])
    choice = composer.choose(10.0, queue.levels, 16, inf)
    cut = composer.without_padding(choice, [1, 4, 16])
    assert [request.arrived for request in cut.requests] == [0.0, 1.0, 2.0, 3.0]


# -- all of it, in virtual time


class Watched(Adaptive):
    """Adaptive, with a look at each decision."""

    def look(self, now: float, queue: QueueView, decision: Decision) -> None:
        """Look at a decision; a test puts its own function here."""

    def decide(self, view: View) -> Decision:
        decision = super().decide(view)
        if view.free_in_s is None:
            self.look(view.now, view.queue, decision)
        return decision


def driven(
    policy: Policy,
    *,
    slo_s: float | None = None,
    journal: Journal | None = None,
    by_length: bool = True,
    limit: int = 16,
    **settings: Any,
) -> VirtualDriver:
    """A stage of this policy in virtual time, with the padded cost."""
    queue = Queue(levels=BY_LENGTH if by_length else None)
    core = Core([Batcher("stage", new_policy(policy, limit), queue)], slo_s=slo_s, journal=journal)
    return VirtualDriver(core, settings.pop("cost", padded_cost), **settings)


ARRIVALS = st.lists(
    st.tuples(st.floats(0.0, 0.01), st.integers(1, 3), st.sampled_from([3, 8, 15, 16, 40, 100, 300])),
    min_size=40,
    max_size=150,
)


@given(ARRIVALS, st.integers(1, 2), st.floats(0.0, 0.5))
@examples(60, derandomize=True)
def test_nobody_is_passed_over_for_newcomers(
    arrivals: list[tuple[float, int, int]], workers: int, noise: float
) -> None:
    """Whoever has waited x is passed over only for a batch with somebody in it who has waited x / R,
    R = (B · t(B, its length) / t(1, shortest))^(1/8), whatever comes, in overload too.
    """
    dice = random.Random(len(arrivals))
    seen = 0

    def look(now: float, queue: QueueView, decision: Decision) -> None:
        nonlocal seen
        by_length = policy_of(driver)._by_length
        if not decision.take or by_length is None:
            return
        cost = by_length.cost
        going = decision.chosen or queue.peek(decision.take)
        oldest_going = max(now - request.admitted for request in going)
        seen += 1
        for request in queue:
            longest = cost.seconds(16, 1.1 * request.length)
            r = (16 * longest / cost.seconds(1, 1)) ** (1 / 8)
            assert now - request.admitted <= r * (oldest_going + 1e-4) + 1e-9

    driver = driven(
        Watched(16),
        workers=[workers],
        cost=lambda batch, now: padded_cost(batch, now) * dice.lognormvariate(0, noise),
    )
    policy_of(driver).look = look
    at = 0.0
    for gap, n, length in arrivals:
        at += gap
        for _ in range(n):
            driver.arrive(at, "x", length=length)
    driver.run()
    assert len(driver.answers) == sum(n for _, n, _ in arrivals)
    assert seen


def policy_of(driver: VirtualDriver) -> Any:
    """The policy that decides."""
    return driver.core.crews[0].lobby.policy


@slow_where(lambda slo_s, length: (slo_s is None) is (length == 1))
@pytest.mark.parametrize("slo_s", [None, 0.15])
@pytest.mark.parametrize("length", [1, 37])
def test_equal_lengths_are_decided_as_if_there_were_none(slo_s: float | None, length: int) -> None:
    """Where all are of one length every decision is that without `length=`: the journals are the
    same, word for word.
    """
    stories = []
    for by_length in (False, True):
        dice, journal = random.Random(5), Journal(100_000)
        driver = driven(
            Adaptive(),
            slo_s=slo_s,
            journal=journal,
            by_length=by_length,
            workers=[2],
            cost=lambda batch, now, dice=dice: (4e-3 + 3e-4 * len(batch)) * dice.lognormvariate(0, 0.2),
        )
        arrivals, at = random.Random(6), 0.0
        for i in range(1500):
            at += arrivals.expovariate(3500.0 if 400 < i < 900 else 1500.0)
            driver.arrive(at, i, 10.0, length=length)
        driver.run()
        stories.append([[str(entry) for entry in journal.story(i)] for i in range(1, 1501)])
    assert stories[0] == stories[1]


def lengths(dice: random.Random) -> int:
    """Log-normal lengths about 14."""
    return max(1, min(512, int(dice.lognormvariate(2.64, 0.83))))


def closed_loop(driver: VirtualDriver, clients: int, n: int) -> float:
    """Have clients ask again as soon as they are answered; return requests per second."""
    dice = random.Random(3)
    left = n

    class Client:
        def answered(self, request: Request) -> None:
            nonlocal left
            if left:
                left -= 1
                driver.submit("x", length=lengths(dice), caller=Client())

    for _ in range(clients):
        driver.submit("x", length=lengths(dice), caller=Client())
    driver.run()
    return len(driver.answers) / driver.clock.now


def test_a_closed_loop_gains() -> None:
    """Sixty-four clients with texts of mixed length are served at least 2.5 times as fast as in
    plain order, learning included.
    """
    composed = closed_loop(driven(Adaptive(), limit=32), 64, 2500)
    plain = closed_loop(driven(Adaptive(), limit=32, by_length=False), 64, 2500)
    assert composed > 2.5 * plain


def test_clients_that_come_back_at_once_are_composed_with() -> None:
    """Where clients ask again as soon as they have their answers, the next batch waits the moment
    for them: of sixty-four all are there to be composed, and at least 2 % more are served than
    without the wait.
    """
    waits = driven(Adaptive(), limit=32)
    goes_on = driven(Adaptive(), limit=32)
    gather = policy_of(goes_on).gather
    gather.best_until = lambda now, saved_s: None
    assert closed_loop(waits, 64, 2500) > 1.02 * closed_loop(goes_on, 64, 2500)


def test_nothing_waits_for_clients_that_do_not_come_back() -> None:
    """With arrivals that follow nothing, a worker is idle for less than 0.5 % of the time while
    requests wait to be composed.
    """
    free, idle_s = [0.0], [0.0]

    def cost(batch: Batch, now: float) -> float:
        idle_s[0] += now - max(free[0], min(request.arrived for request in batch.requests))
        free[0] = now + padded_cost(batch, now)
        return padded_cost(batch, now)

    driver = driven(Adaptive(), limit=8, cost=cost)
    dice, at = random.Random(9), 0.0
    for i in range(600):
        at += dice.expovariate(400.0)
        driver.arrive(at, i, length=lengths(dice))
    driver.run()
    assert idle_s[0] < 0.005 * driver.clock.now
    assert any(batch.reason == "length" for batch in driver.batches)


def test_workers_share_what_is_composed() -> None:
    """Eight requests that come at once to two idle workers go to both, not to one alone."""
    driver = driven(Adaptive(), workers=[2])
    for n in (1, 4, 16):
        for length in (10, 14, 40):
            driver.core.crews[0].trained(0, n, n, 1e-4 + 1e-3 * n, length)
            driver.core.crews[0].trained(0, n, n, 1e-4 + 1e-3 * n)
    for length in [10, 14] * 4:
        driver.submit("x", length=length)
    driver.run()
    assert driver.batches[0].n == 4
    assert {batch.place for batch in driver.batches[:2]} == {0, 1}


def test_an_slo_is_met_more_often() -> None:
    """In an overload of mixed lengths at least twice as many are answered in time, and of the
    longest tenth not fewer.
    """
    in_time, of_long = [], []
    for by_length in (False, True):
        driver = driven(Adaptive(), slo_s=0.2, by_length=by_length)
        dice, at = random.Random(4), 0.0
        for _ in range(4000):
            at += dice.expovariate(3000.0)
            driver.arrive(at, "x", 5.0, length=lengths(dice))
        driver.run()
        good = [r for r in driver.answers if r.error is None]
        in_time.append(len(good))
        of_long.append(sum(r.length >= 36 for r in good))
        assert all(isinstance(r.error, Overloaded) for r in driver.answers if r.error is not None)
    assert in_time[1] > 2 * in_time[0]
    assert of_long[1] >= of_long[0]


@pytest.mark.slow
def test_long_ones_do_not_pay_for_an_overload() -> None:
    """In bursts of twice what can be served, with an SLO of two batches, as many of the longest tenth
    are in time as without composing, less 3 points, and more of all. That is so of eight runs
    together, as one says little: the difference scatters by 2 points.
    """
    composed, plain = [
        mean_of(
            [
                run(
                    "adaptive",
                    "bursts:rate=7280,mean_burst=12",
                    "padded:a=19.74ms,b=13.3us",
                    0.066,
                    32,
                    4,
                    2.0,
                    lengths="lognormal:input=14,input_sigma=0.4154,most_input=722",
                    lengths_known=known,
                    seed=seed,
                )
                for seed in range(1, 9)
            ]
        )
        for known in (True, False)
    ]
    assert composed.goodput > 1.1 * plain.goodput
    assert composed.long_attainment is not None and plain.long_attainment is not None
    assert composed.long_attainment > plain.long_attainment - 0.03


def test_little_to_save_keeps_plain_order() -> None:
    """Where lengths hardly matter for the cost, requests go in the order of their arrival."""
    driver = driven(Adaptive(), cost=lambda batch, now: 4e-3 + 1e-3 * len(batch) + 1e-7 * batch.longest)
    dice = random.Random(8)
    for i in range(800):
        driver.arrive(i * 2e-4, i, length=lengths(dice))
    driver.run()
    late: Sequence[Batch] = driver.batches[len(driver.batches) // 2 :]
    assert [batch.reason for batch in late].count("length") == 0


def test_a_warm_up_with_lengths_is_enough_to_begin_with() -> None:
    """After a warm-up with examples of several lengths the first batch is composed already."""
    driver = driven(Adaptive())
    for n in (1, 4, 16):
        for length in (5, 400):
            driver.core.crews[0].trained(0, n, n, 2e-3 + 20e-6 * n * length, length)
    for length in [5, 400] * 12:
        driver.submit("x", length=length)
    driver.run()
    assert {r.length for r in driver.batches[0].requests} in ({5}, {400})
