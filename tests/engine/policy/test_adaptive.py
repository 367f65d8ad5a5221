"""Adaptive: each of its rules by example, what it promises whatever waits, and its large effects in short runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from math import ceil, inf
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.engine.core.queue import Queue
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Adaptive, Decision
from carpool.engine.policy.base import NOTHING
from carpool.engine.request import DEFAULT_LANE, Request
from carpool.simulate import Affine, Closed, Cost, Knee, Report, run
from carpool.simulate.costs import BatchShape
from tests.effort import examples
from tests.engine.policy.learned import FIXED, KNEE, TILES
from tests.support.pipelines import pipeline_of, stage
from tests.support.view import ahead_of, done, view_of, warm_up

BALANCED = Affine(0.002, 0.001)
NOW = 100.0


def taught(cost: Cost = FIXED, limit: int = 64, rate: float = 0.0, policy: Adaptive | None = None) -> Adaptive:
    """A policy whose warm-up has run every size, and after which so many requests a second have arrived up to NOW."""
    policy = policy or Adaptive(limit)
    for n in Random(0).sample(range(1, limit + 1), limit) * 5:
        policy.learn(0.0, warm_up(n, n, cost(n)))
    if rate:
        for i in range(300):
            policy.arrived(NOW - (299 - i) / rate, [request(NOW, inf)])
    return policy


def request(arrived: float, due: float, size: int = 1, priority: int = 0) -> Request:
    """One that is due some time before it expires."""
    made = Request("x", inf)
    made.arrived, made.due, made.size = arrived, due, size
    made.lane = DEFAULT_LANE._replace(priority=priority)
    return made


def queued(*requests: Request) -> Queue:
    """A queue in which these requests wait."""
    queue = Queue()
    for one in requests:
        queue.push([one])
    return queue


def alike(n: int, slo_s: float = inf, arrived: float = NOW) -> Queue:
    """So many requests that have come together."""
    return queued(*[request(arrived, arrived + slo_s) for _ in range(n)])


def decide(policy: Adaptive, queue: Queue, now: float = NOW, free: int = 1, busy: int = 0, **shown: float) -> Decision:
    """Ask a policy twice; it must say the same."""
    first = policy.decide(view_of(now, queue, free, busy, **shown))
    assert policy.decide(view_of(now, queue, free, busy, **shown)) == first
    return first


# -- cold


def test_cold_all_go_at_first() -> None:
    """As long as nothing is known of costs, as many requests go at once as may."""
    assert decide(Adaptive(64), alike(100)) == Decision([], 64, "cold")
    assert decide(Adaptive(64), alike(3)) == Decision([], 3, "cold")


def test_six_batches_are_cold() -> None:
    """The first six batches are cold, and those among them are full if enough waits; then the rules
    apply.
    """
    policy, sizes = Adaptive(64), []
    for _ in range(6):
        decision = decide(policy, alike(1000))
        assert decision.reason == "cold"
        sizes.append(decision.take)
        policy.learn(NOW, done(decision.take, decision.take, FIXED(decision.take), True))

    assert max(sizes) == 64
    assert decide(policy, alike(1000)) == Decision([], 64, "full")


def test_cold_nothing_is_dropped_on_a_guess() -> None:
    """While cold, no request is refused because few batches say that it takes too long; only one
    that is too late already is.
    """
    policy = Adaptive(64)
    for _ in range(3):
        policy.learn(NOW, done(1, 1, 50.0, True))
    late, early = request(NOW - 2, NOW - 1), request(NOW, NOW + 0.001)

    assert decide(policy, queued(late, early)) == Decision([late], 1, "cold")
    assert decide(policy, queued(late)) == Decision([late])


def test_without_a_worker_or_a_queue_there_is_nothing_to_do() -> None:
    """Without a free worker or without waiting requests nothing is sent, cold or warm."""
    for policy in (Adaptive(64), taught()):
        assert decide(policy, alike(3), free=0, busy=1) is NOTHING
        assert decide(policy, queued()) is NOTHING


def test_a_warm_up_is_enough_to_know() -> None:
    """Six timings of a warm-up end the cold start; batches that failed teach nothing."""
    policy = Adaptive(64)
    for n in (1, 64) * 3:
        policy.learn(NOW, done(n, n, 1.0, False))
    assert decide(policy, alike(3)).reason == "cold"
    for n in (1, 64) * 3:
        policy.learn(0.0, warm_up(n, n, FIXED(n)))

    assert decide(policy, alike(3)) == Decision([], 3, "free")
    assert policy.cost.seconds(32) == pytest.approx(FIXED(32), rel=0.05)


def test_the_limit_may_come_later() -> None:
    """A policy that was made without a limit takes that of its stage, which comes later."""
    policy = Adaptive()
    policy.max_batch_size = 64
    for n in (1, 64) * 3:
        policy.learn(0.0, warm_up(n, n, FIXED(n)))

    assert decide(policy, alike(100)).take == 64
    assert policy.cost.seconds(64) == pytest.approx(FIXED(64), rel=0.01)


# -- free and full


def test_all_go_as_soon_as_a_worker_is_free() -> None:
    """As soon as a worker is free all requests go, up to the limit; without an SLO nobody is
    refused, however many wait.
    """
    policy = taught(rate=10_000)

    assert decide(policy, alike(5)) == Decision([], 5, "free")
    assert decide(policy, alike(64)) == Decision([], 64, "full")
    assert decide(policy, alike(5000)) == Decision([], 64, "full")


# -- hopeless


def test_the_hopeless_are_refused() -> None:
    """A request that is due before a batch of one would be done, in 8.25 ms here, is refused, and
    the others go.
    """
    hopeless, tight = request(NOW - 0.05, NOW + 0.0082), request(NOW - 0.05, NOW + 0.0083)

    assert decide(taught(), queued(hopeless, tight)) == Decision([hopeless], 1, "free")


def test_the_way_to_the_worker_is_part_of_the_cost() -> None:
    """The cost of a batch is the time until the next one can go, so it includes the way to the
    worker.
    """
    policy = Adaptive(64)
    for n in (1, 8, 64) * 20:
        policy.learn(NOW, done(n, n, 0.01, True, hop_s=0.002))

    assert policy.cost_s(8) == pytest.approx(0.012, rel=0.02)


def test_the_stages_behind_count() -> None:
    """The time of the stages behind is added to that of the batch when it is judged who can be in
    time.
    """
    policy = taught()
    hopeless, tight = request(NOW - 0.05, NOW + 0.0132), request(NOW - 0.05, NOW + 0.0133)

    assert decide(policy, queued(hopeless, tight), onward_s=0.005) == Decision([hopeless], 1, "free")


def test_if_all_are_hopeless_all_are_refused() -> None:
    """If no request can be in time all are refused, and the worker stays free for those who come."""
    queue = alike(5, 0.06, arrived=NOW - 0.055)

    assert decide(taught(), queue) == Decision(queue.peek(5))


# -- overload


def crowd(n: int, slo_s: float, rate: float, priority: int = 0) -> list[Request]:
    """So many who have come at this rate up to NOW."""
    times = [NOW - (n - 1 - i) / rate for i in range(n)]
    return [request(when, when + slo_s, priority=priority) for when in times]


def test_in_overload_what_can_never_be_served_is_refused() -> None:
    """When twice the capacity arrives and much waits, requests beyond what can be served within the
    SLO are refused, the oldest first.
    """
    policy = taught(rate=2 * 2667)
    waiting = crowd(1500, 0.3, 2 * 2667)
    decision = decide(policy, queued(*waiting))
    kept = len(waiting) - len(decision.drop)
    assert (decision.take, decision.reason) == (64, "full")
    assert decision.drop == waiting[: len(decision.drop)]
    assert kept == pytest.approx(2667 * (0.3 - FIXED(64)), rel=0.02)
    assert policy.explain(NOW)["overloaded"]


def test_without_overload_a_long_queue_is_kept() -> None:
    """The same long queue is kept whole when less arrives than can be served."""
    policy = taught(rate=0.9 * 2667)
    waiting = crowd(700, 0.3, 10_000)

    assert decide(policy, queued(*waiting)) == Decision([], 64, "full")
    assert not policy.explain(NOW)["overloaded"]


def test_an_overload_that_has_just_begun_is_borne() -> None:
    """Nothing is refused when an overload begins and less waits than can be served in time."""
    policy = taught(rate=2 * 2667)

    assert decide(policy, queued(*crowd(350, 0.3, 2 * 2667))) == Decision([], 64, "full")


def test_overload_may_be_met_for_latency() -> None:
    """If asked to favour latency, the policy keeps less of an overload's queue the longer that
    lasts.
    """
    kept = {}
    for overload in ("goodput", "latency"):
        policy = taught(rate=2 * 2667)
        policy.overload = overload
        decide(policy, queued(*crowd(1500, 0.3, 2 * 2667)))
        later = [request(r.arrived + 0.5, r.due + 0.5) for r in crowd(1500, 0.3, 2 * 2667)]
        policy.arrived(NOW + 0.5, later)
        kept[overload] = 1500 - len(decide(policy, queued(*later), now=NOW + 0.5).drop)

    assert 64 <= kept["latency"] < 0.5 * kept["goodput"]


def noisy(sigma: float) -> Adaptive:
    """Taught, with batches that scatter so much."""
    policy, dice = taught(), Random(1)
    for _ in range(300):
        policy.cost.add(64, FIXED(64) * dice.lognormvariate(0, sigma))
    return policy


def edge(now: float, at_the_edge: int = 100) -> list[Request]:
    """So many that a full batch would answer in time if it took no longer than usual, and three hundred others."""
    return [request(now - 0.27, now + 0.03) for _ in range(at_the_edge)] + crowd(300, 0.3, 2667)


def test_who_is_at_the_edge_of_a_backlog_is_refused() -> None:
    """Of a backlog, requests that could only just be in time are refused, but only amid
    noise, and only if others would fill the next batch.
    """
    policy = noisy(0.2)
    waiting = edge(NOW)

    assert decide(policy, queued(*waiting)).drop == waiting[:100]
    kept = 150 - len(decide(policy, queued(*waiting[:150])).drop)
    assert 64 <= kept < 64 + 64
    assert not decide(noisy(0.0), queued(*waiting)).drop


def test_nobody_is_refused_for_those_who_have_time() -> None:
    """Requests that are due much later do not make a backlog for which others would be refused."""
    policy = noisy(0.2)
    hurried = [request(NOW - 0.27, NOW + 0.03) for _ in range(30)]
    waiting = hurried + [request(NOW, inf) for _ in range(500)]

    assert not decide(policy, queued(*waiting)).drop


def test_of_a_backlog_the_lowest_priority_at_the_edge_goes_first() -> None:
    """Of a backlog, requests of the lowest priority that could only just be in time are
    refused first, and no others.
    """
    policy = noisy(0.2)
    high = [request(NOW - 0.27, NOW + 0.03, priority=1) for _ in range(80)]
    low = [request(NOW - 0.27, NOW + 0.03) for _ in range(20)]
    waiting = [*high, *low, *crowd(200, 0.3, 2667)]

    refused = decide(policy, queued(*waiting)).drop
    assert list(refused) == waiting[80:100] + waiting[:80]


def test_what_no_refusal_would_help_is_borne() -> None:
    """With an SLO so short that every request could only just be in time, nobody is refused for it,
    since that would not help.
    """
    policy = noisy(0.2)
    waiting = [request(NOW, NOW + 0.035) for _ in range(200)]

    assert not decide(policy, queued(*waiting)).drop


# -- several workers


NEWCOMER = Affine(0.010, 0.0025)


@pytest.mark.parametrize(("free", "busy"), [(2, 2), (1, 3), (4, 0)])
def test_what_waits_is_shared_with_workers_that_are_or_will_soon_be_free(free: int, busy: int) -> None:
    """Of 20, one of four workers takes 7; alone it would take all of them."""
    policy = taught(NEWCOMER, rate=800)

    assert decide(policy, alike(20), free=free, busy=busy) == Decision([], 7, "size")
    assert decide(policy, alike(20)) == Decision([], 20, "free")


def test_few_go_together() -> None:
    """Up to what each worker finds in an even rotation, and a little more, nothing is left for the others."""
    policy = taught(NEWCOMER, rate=800)

    for n in range(1, 6):
        assert decide(policy, alike(n), free=1, busy=3) == Decision([], n, "free")


def test_a_share_has_time_where_all_at_once_would_be_late() -> None:
    """With 35 ms left, 20 requests would take 60 ms and a share of them takes 28: so nobody is in a hurry."""
    policy = taught(NEWCOMER, rate=800)

    assert decide(policy, alike(20, 0.035), free=1, busy=3) == Decision([], 7, "size")


def test_a_backlog_for_all_workers_is_taken_in_full_batches() -> None:
    """What would fill a batch of each worker needs no sharing, and neither does what is more than can be served."""
    assert decide(taught(NEWCOMER, rate=800), alike(4 * 64), free=1, busy=3) == Decision([], 64, "full")
    assert decide(taught(NEWCOMER, rate=1700), alike(64), free=1, busy=3) == Decision([], 64, "full")


@pytest.mark.parametrize(("clients", "taken"), [(80, 20), (60, 15), (45, 12), (4 * 62, 62), (300, 64)])
def test_clients_that_come_back_together_are_as_many_groups_as_workers(clients: int, taken: int) -> None:
    """While a wait for clients is known to pay, a worker takes its part of them, and no less."""
    policy = taught(rate=800)
    policy.gather.window_s = 0.001
    policy.gather.clients = clients

    assert decide(policy, alike(clients), free=1, busy=3).take == taken


def test_a_crowd_is_not_cut_into_groups_of_the_few_clients_before_it() -> None:
    """What waits beyond the clients that are known has come from others, and is shared as if nobody was waited for:
    in groups of those clients it would take many small batches, and be late.
    """
    policy, same = taught(rate=800), taught(rate=800)
    policy.gather.clients = 8
    policy.gather.window_s = 0.001

    assert decide(policy, alike(8), free=1, busy=3).take == 2
    taken = decide(policy, alike(60), free=1, busy=3).take
    assert taken == decide(same, alike(60), free=1, busy=3).take
    assert taken >= 15


def test_what_only_large_batches_cost_is_found_out_by_sharing() -> None:
    """As long as all batches were of one size, nobody knows what smaller ones cost, so that two idle workers would
    never share what comes at once. So one that is smaller goes, and shows it.
    """
    policy = Adaptive(64)
    for _ in range(20):
        policy.learn(0.0, warm_up(64, 64, FIXED(64)))

    assert decide(policy, alike(64), free=2).take <= 32
    for n in (1, 8, 16, 32, 48) * 4:
        policy.learn(0.0, warm_up(n, n, FIXED(64)))  # they take as long
    assert decide(policy, alike(64), free=2).take == 64


def test_a_busy_worker_is_not_handed_what_others_could_share() -> None:
    """A full batch goes ahead to one worker alone; with several, only if each of them could have one."""
    policy = taught(rate=0.5 * 4 * 2667)

    assert policy.decide(ahead_of(NOW, alike(100), 0.01))[1:3] == (64, "full")
    decide(policy, alike(1), free=1, busy=3)
    assert policy.decide(ahead_of(NOW, alike(100), 0.01)) is NOTHING
    assert policy.decide(ahead_of(NOW, alike(4 * 64), 0.01))[1:3] == (64, "full")


@given(
    rate=st.sampled_from([0.0, 100.0, 800.0, 5000.0]),
    waiting=st.integers(1, 200),
    free=st.integers(1, 8),
    busy=st.integers(0, 8),
    cost=st.sampled_from([FIXED, BALANCED, NEWCOMER, KNEE, TILES]),
)
@example(rate=0.0, waiting=66, free=1, busy=3, cost=BALANCED)  # alone it takes 16 of them, here 17
@examples(100)
def test_one_of_several_never_takes_more_than_one_alone(
    rate: float, waiting: int, free: int, busy: int, cost: Cost
) -> None:
    """It takes as much or less, or an even share of what waits where one alone would cut that up; where nobody is in
    a hurry, it always takes something.
    """
    policy = taught(cost, rate=rate)

    most = max(decide(policy, alike(waiting)).take, ceil(waiting / (free + busy)))
    assert 1 <= decide(policy, alike(waiting), free=free, busy=busy).take <= most


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "p99_s"), [(2, 0.0525), (4, 0.0465), (8, 0.041)])
def test_a_high_limit_costs_no_latency_with_several_workers(workers: int, p99_s: float) -> None:
    """200 requests a second for each worker: all are in time, within 3 % of the p99 of the best limit (8)."""
    cost = "table:1=12ms,4=20ms,16=50ms,64=160ms"
    arrivals = f"poisson:rate={200 * workers}"
    high, best = (run("adaptive", arrivals, cost, 0.06, limit, workers, duration_s=20, seed=0) for limit in (64, 8))

    assert high.attainment >= best.attainment - 0.003
    assert high.p99_s <= 1.03 * best.p99_s
    assert high.p99_s <= p99_s


# -- tight and shed


def hurried(head_slo_s: float, others: int, others_slo_s: float = 0.2) -> Queue:
    """One request in a hurry, and others that are not."""
    return queued(request(NOW, NOW + head_slo_s), *[request(NOW, NOW + others_slo_s) for _ in range(others)])


def test_a_head_in_a_hurry_goes_in_a_smaller_batch() -> None:
    """When little is to do, a request in a hurry goes with as many as fit into its 12.1 ms."""
    assert decide(taught(), hurried(0.0121, 39)) == Decision([], 16, "tight")
    assert decide(taught(), hurried(0.0121, 15)) == Decision([], 16, "free")


def test_at_full_load_a_head_in_a_hurry_is_given_up() -> None:
    """At full load a request in a hurry is given up: a batch of one would cost 8 ms, in which
    twenty others are served.
    """
    queue = hurried(0.0083, 50, 0.03)
    head = queue.peek(1)

    assert decide(taught(rate=2667), queue) == Decision(head, 50, "shed")
    assert decide(taught(rate=0.5 * 2667), queue) == Decision([], 1, "tight")


def test_nobody_else_is_given_up_with_the_head() -> None:
    """When the first request is given up no others are, not even those of a lower priority whose
    due times are mixed with the others'.
    """
    early = [request(NOW, NOW + 0.03) for _ in range(30)]
    head = request(NOW, NOW + 0.0083, priority=1)
    mates = [request(NOW, NOW + 0.2, priority=1) for _ in range(20)]
    decision = decide(taught(rate=2667), queued(*early, head, *mates))

    assert decision == Decision([head], 50, "shed")


# -- gather


class Clients:
    """A closed loop around one worker with a cost of FIXED: each comes back at random within 0.5 to 1.5 ms."""

    def __init__(self, clients: int, policy: Adaptive, timeout_s: float = inf) -> None:
        self._dice = Random(0)
        self._timeout_s = timeout_s
        self.driver = VirtualDriver(pipeline_of(stage(policy=policy), workers=0), [FIXED], [1])
        for i in range(clients):
            self.driver.at(0.001 * i, self._ask)

    def _ask(self) -> None:
        self.driver.submit("x", self._timeout_s, caller=self)

    def answered(self, request: Request) -> None:
        self.driver.at(self.driver.clock.now + self._dice.uniform(0.0005, 0.0015), self._ask)

    def sizes(self, duration_s: float = 1.0) -> list[int]:
        """Of the batches of so many seconds."""
        self.driver.run(until=duration_s)
        return [batch.n for batch in self.driver.batches]


def test_clients_in_a_closed_loop_are_gathered() -> None:
    """Clients that ask again as soon as they are answered are all gathered in each batch, where
    `Greedy` would have two groups take turns.
    """
    sizes = Clients(16, taught()).sizes()

    assert sum(sizes[10:]) / len(sizes[10:]) > 15.5


def held_s(delay_s: float | None) -> float:
    """How long requests were held back at most while the worker was idle, by a policy with this bound."""
    policy = taught()
    policy.max_queue_delay_s = delay_s
    clients = Clients(16, policy)
    clients.sizes()
    longest, free_at = 0.0, 0.0
    for batch in clients.driver.batches:
        longest = max(longest, batch.started - max(free_at, min(request.arrived for request in batch.requests)))
        free_at = batch.started + FIXED(batch.n)
    return longest


def test_nobody_is_held_back_longer_than_the_bound() -> None:
    """`max_queue_delay_s` bounds how long requests are held for company; without it, they are held
    for about a millisecond here.
    """
    assert held_s(None) > 0.0008
    for bound in (0.0, 0.0003, 0.0005):
        assert held_s(bound) <= bound + 1e-9


def gathering() -> tuple[Adaptive, float]:
    """A policy whose worker has just become free, and which has a window; and the time."""
    policy, now = taught(), NOW
    for _ in range(50):
        now += FIXED(8)
        policy.learn(now, done(8, 8, FIXED(8), True))
        for _ in range(8):
            policy.arrived(now + 0.001, [request(now + 0.001, inf)])
        policy.decide(view_of(now + 0.001, alike(8), 1, 0))
    now += FIXED(8)
    policy.learn(now, done(8, 8, FIXED(8), True))
    return policy, now


def test_the_wait_ends_with_the_window() -> None:
    """Waiting for company ends a millisecond or little more after the last batch, and the policy
    asks to be woken then.
    """
    policy, now = gathering()
    window_s = policy.explain(now)["gather_s"]
    held = decide(policy, alike(8, arrived=now), now=now)

    assert 0.001 <= window_s < 0.0015
    assert held == Decision([], wake_at=now + window_s)
    assert decide(policy, alike(8, arrived=now), now=now + window_s).take == 8


def test_the_wait_ends_with_the_bound() -> None:
    """Waiting for company ends when the oldest request has waited for `max_queue_delay_s`."""
    policy, now = gathering()
    policy.max_queue_delay_s = 0.0004

    assert decide(policy, alike(8, arrived=now - 0.0001), now=now) == Decision([], wake_at=now + 0.0003)
    assert decide(policy, alike(8, arrived=now - 0.0004), now=now).take == 8


def test_the_wait_ends_when_all_are_back() -> None:
    """Waiting for company ends when all clients are back, and not before."""
    policy, now = gathering()
    for _ in range(7):
        policy.arrived(now + 0.0005, [request(now, inf)])
    assert decide(policy, alike(15, arrived=now), now=now + 0.0005).take == 0

    policy.arrived(now + 0.0005, [request(now, inf)])
    assert decide(policy, alike(16, arrived=now), now=now + 0.0005) == Decision([], 16, "free")


def test_who_is_in_a_hurry_does_not_wait_for_others() -> None:
    """Requests are held for company only if the wait of 1 ms and the larger batch of sixteen, with
    12 ms, leave all of them in time.
    """
    policy, now = gathering()

    assert decide(policy, alike(8, 0.0125, arrived=now), now=now) == Decision([], 8, "free")
    assert decide(policy, alike(8, 0.0145, arrived=now), now=now).take == 0


def test_a_full_batch_does_not_wait() -> None:
    """A full batch goes at once: there is no room for those who would come back."""
    policy, now = gathering()

    assert decide(policy, alike(64, arrived=now), now=now).take == 64


# -- size and probe


def test_some_are_left_for_later() -> None:
    """Of twelve requests at 2 + n ms seven go first, as the closed form says, because the sum of
    the delays is smaller.
    """
    assert decide(taught(BALANCED), alike(12)) == Decision([], 7, "size")
    assert decide(taught(TILES), alike(20)) == Decision([], 16, "size")


def test_a_batch_ends_at_the_knee() -> None:
    """However many wait, a batch ends at the knee of the cost curve."""
    assert decide(taught(KNEE), alike(200)) == Decision([], 32, "full")


def test_a_size_that_nobody_knows_is_tried() -> None:
    """An unknown size is tried where it may be better, and only with requests that have
    the time.
    """
    policy = Adaptive(64)
    for n in range(1, 39):
        policy.learn(0.0, warm_up(n, n, KNEE(n)))
    policy.learn(NOW, done(38, 38, KNEE(38), True))
    probe = decide(policy, alike(200))

    assert probe.reason == "probe"
    assert probe.take > 38
    assert decide(policy, alike(32)).take == 32
    assert decide(policy, alike(200, 0.018)).take < 38


# -- what it says


def test_it_explains_itself() -> None:
    """`explain` tells what has been learned, under the names that all policies use and under its
    own.
    """
    policy = taught(KNEE, rate=500)
    decide(policy, alike(200))
    said = policy.explain(NOW)

    assert (said["policy"], said["rule"]) == ("adaptive", "full")
    assert said["cost_s"] == pytest.approx({1: KNEE(1), 32: KNEE(32), 64: KNEE(64)})
    assert said["arrival_rate"] == pytest.approx(500)
    assert said["expected_batch_size"] == 32
    assert said["capacity_per_worker"] == pytest.approx(2000, rel=0.001)
    assert (said["samples"], said["gather_s"], said["overloaded"]) == (320, 0, False)


def test_it_explains_that_it_knows_nothing() -> None:
    """`explain` has the same keys when nothing has been learned yet."""
    said = Adaptive(64).explain(NOW)

    assert said.keys() == taught().explain(NOW).keys()
    assert (said["rule"], said["cost_s"], said["samples"]) == ("cold", {}, 0)


# -- whatever waits

waiting = st.lists(
    st.builds(
        request,
        st.floats(NOW - 0.2, NOW),
        st.one_of(st.floats(NOW - 0.01, NOW + 0.1), st.just(inf)),
        st.sampled_from([1, 1, 1, 2, 5]),
        st.sampled_from([0, 0, 1]),
    ),
    min_size=1,
    max_size=150,
)


@examples(100, derandomize=True)
@given(waiting, st.sampled_from([0.0, 1000.0, 2500.0]), st.integers(1, 3), st.integers(0, 2))
def test_nobody_is_refused_who_could_go_now(requests: list[Request], rate: float, free: int, busy: int) -> None:
    """Below capacity, a request of whatever lane is refused only if it could not be answered in
    time in a batch of all.
    """
    policy = taught(rate=rate)
    queue = queued(*requests)
    decision = decide(policy, queue, free=free, busy=busy)
    everybody = min(sum(one.size for one in requests), 64)

    assert set(decision.drop) <= set(requests)
    assert all(one.due - NOW < policy.cost.seconds(everybody) * policy.cost.margin for one in decision.drop)
    assert decision.take <= min(64, queue.size - sum(one.size for one in decision.drop))
    assert decision.take or decision.wake_at is not None or len(decision.drop) == len(requests)


def test_its_memory_is_bounded() -> None:
    """Of a hundred thousand arrivals without a completion less than a byte each is kept."""
    policy, sizes = taught(), []
    for part in range(10):
        for i in range(10_000):
            policy.arrived(NOW + part + i / 10_000, [request(NOW, inf)])
        sizes.append(len(pickle.dumps(policy)))

    assert max(sizes) < 100_000


# -- in short runs


def both(other: str, arrivals: object, cost: Cost, slo_s: float, duration_s: float) -> tuple[Report, Report]:
    """Adaptive, from a cold start, beside another policy."""
    reports = [
        run(policy, arrivals=arrivals, cost=cost, slo_s=slo_s, duration_s=duration_s) for policy in ("adaptive", other)
    ]
    return reports[0], reports[1]


@pytest.mark.parametrize("clients", [4, 16, 32])
def test_a_closed_loop_is_served_much_faster_than_greedily(clients: int) -> None:
    """In a closed loop the goodput is at least 1.3 times that of `Greedy`, with which two groups of
    clients take turns.
    """
    adaptive, greedy = both("greedy", Closed(clients), FIXED, 0.06, 3)

    assert adaptive.goodput > 1.3 * greedy.goodput


def test_tiles_are_filled() -> None:
    """On a cost curve of tiles a fifth of the mean latency is saved by not running tiles that are
    nearly empty.
    """
    adaptive, greedy = both("greedy", "poisson:rho=0.6", TILES, 0.05, 6)

    assert adaptive.goodput >= 0.99 * greedy.goodput
    assert adaptive.mean_s < 0.8 * greedy.mean_s


def test_a_knee_is_not_overrun() -> None:
    """Batches end at the knee of the curve under a load with which full batches could not keep up."""
    adaptive, greedy = both("greedy", "poisson:rho=0.9", Knee(0.008, 0.00025, 32, 0.0009), 0.06, 6)

    assert adaptive.goodput > 1.3 * greedy.goodput


def test_a_closed_loop_that_asks_for_too_much_is_answered_in_time() -> None:
    """In a closed loop that asks for more than can be served, nearly all answers are in time, amid
    noise.
    """
    cost = "affine:a=8ms,b=0.25ms+noisy:sigma=0.3"
    loop = "closed:clients=240,think=0.1ms,think=exponential,backoff=24ms"
    report = run("adaptive", loop, cost, slo_s=0.11, max_batch_size=64, duration_s=8, seed=1)

    assert report.goodput > 0.98 * report.throughput
    assert report.mean_batch_size > 60


def test_groups_that_take_turns_find_the_end_of_a_tile() -> None:
    """When sixteen clients come in groups of nine and seven, the policy finds that batches of eight
    take no longer than those of seven, which nobody has tried.
    """
    cost, loop = "tile:a=29ms,step=7ms,width=4", "closed:clients=16,think=27ms,think=uniform"
    report = run("adaptive", loop, cost, slo_s=1.0, max_batch_size=32, duration_s=30, seed=3)

    assert report.goodput > 0.98 * 8 / 0.043


class Compiled(Cost):
    """The first batch of each size takes eight times as long."""

    def __call__(self, n: float, longest: float = 1.0) -> float:
        return FIXED(n)

    def over(self, duration_s: float) -> Callable[[BatchShape, float, Random], float]:
        seen: set[float] = set()

        def seconds(work: BatchShape, now: float, dice: Random) -> float:
            first = work.n not in seen
            seen.add(work.n)
            return FIXED(work.n) * (8 if first else 1)

        return seconds


@pytest.mark.parametrize(("load", "share"), [(0.15, 0.8), (0.9, 0.5)])
def test_sizes_that_are_slow_the_first_time_are_tried_again(load: float, share: float) -> None:
    """A size that took longer than the SLO only the first time is tried again, or nobody would ever
    find out that it is fast.
    """
    report = run("adaptive", f"poisson:rho={load}", Compiled(), 0.06, 64, duration_s=15, seed=1)

    assert report.attainment > share


def test_overload_costs_little() -> None:
    """In overload nearly as many requests are served in time as by a planner that knows the true
    cost of every batch.
    """
    adaptive, deadline = both("deadline", "poisson:rho=1.2", FIXED, 0.06, 6)

    assert adaptive.goodput >= 0.97 * deadline.goodput
    assert adaptive.mean_s < deadline.mean_s


def test_poisson_arrivals_are_served_as_greedily() -> None:
    """Below capacity, on a straight cost line and with Poisson arrivals, requests are served as
    fast as by `Greedy`.
    """
    adaptive, greedy = both("greedy", "poisson:rho=0.6", FIXED, 0.06, 4)

    assert adaptive.goodput == pytest.approx(greedy.goodput, rel=0.003)
    assert adaptive.mean_s == pytest.approx(greedy.mean_s, rel=0.01)


# -- from which batches it learns


def batch(policy: Adaptive, now: float, n: int, busy_s: float) -> float:
    """So many come together, go and are answered; returns when."""
    queue = alike(n, arrived=now)
    policy.arrived(now, list(queue))
    taken = queue.take(policy.decide(view_of(now, queue, 1, 0)).take)
    policy.learn(now + busy_s, done(len(taken), len(taken), busy_s, True))
    return now + busy_s


@pytest.mark.parametrize("busy_s", [1.6e-3, 150e-6])
def test_of_short_batches_some_are_learned_from(busy_s: float) -> None:
    """Of short batches one each twenty milliseconds is learned from, and of the first ones all."""
    policy = Adaptive(64)
    now = NOW
    for _ in range(66):
        now = batch(policy, now, 8, busy_s)
    assert policy.cost.samples >= 65
    before, begin = policy.cost.samples, now

    while now < begin + 2.0:
        now = batch(policy, now, 8, busy_s)

    assert 70 < policy.cost.samples - before <= 101


def test_a_model_that_becomes_slow_is_no_trifle_any_more() -> None:
    """When the batches of a quick model become slow, all of them are learned from at once, and soon
    it is known how slow they are.
    """
    policy = Adaptive(64)
    now = NOW
    for _ in range(200):
        now = batch(policy, now, 8, 100e-6)
    for _ in range(100):
        now = batch(policy, now, 8, 0.02)

    assert policy.cost.seconds(8) == pytest.approx(0.02, rel=0.1)


def test_of_batches_that_are_not_short_all_are_learned_from() -> None:
    """Batches that are not short are all learned from, also those of several workers that end at
    nearly the same time.
    """
    policy = taught()
    before, now = policy.cost.samples, NOW
    for _ in range(50):
        now += FIXED(8)
        for end in (now, now + 1e-5):
            policy.learn(end, done(8, 8, FIXED(8), True))

    assert policy.cost.samples >= before + 99


def test_stalls_count_for_what_they_are() -> None:
    """When one batch in a hundred takes fifty times as long, the capacity is taken to be a third
    less, and no smaller.
    """
    policy, dice, now = Adaptive(64), Random(1), NOW
    biases = []
    for i in range(20_000):
        now = batch(policy, now, 8, 0.0008 * (50 if dice.random() < 0.01 else 1))
        if i > 2000:
            biases.append(policy.cost.bias)

    assert 0.55 < sum(biases) / len(biases) < 0.9


@pytest.mark.parametrize("size", [150, 40])
def test_weighty_requests_in_overload_are_answered_or_refused(size: int) -> None:
    """In an overload of large requests, with less to be kept than one of them, requests are still
    answered or refused.
    """
    policy, now = Adaptive(64), 0.0
    policy.overload = "latency"
    queue, waiting, gone = Queue(), 0, 0
    for _ in range(400):
        for i in range(4):
            waiting += 1
            one = request(now + i * 1e-4, now + i * 1e-4 + 0.2, size)
            queue.push([one])
            policy.arrived(one.arrived, [one])
        now += 0.001
        decision = policy.decide(view_of(now, queue, 1, 0))
        for one in decision.drop:
            queue.remove(one)
            policy.left(now, one)
        gone += len(decision.drop)
        if decision.take and len(queue):
            taken = queue.take(max(1, decision.take // size))
            gone += len(taken)
            busy_s = 0.002 + 0.0002 * size * len(taken)
            now += busy_s
            policy.learn(now, done(len(taken), size * len(taken), busy_s, True))

    assert gone == waiting - len(queue)
    assert gone > 1000


@pytest.mark.slow
def test_several_workers_with_short_batches_find_a_knee() -> None:
    """With several workers and short batches, a probe that went to one of them is learned from,
    whatever the others do meanwhile, so that the knee is found.
    """
    report = run(
        "adaptive", "poisson:rate=80000", Knee(0.0008, 0.00001, 24, 0.0003), 0.05, 64, workers=4, duration_s=4, seed=1
    )

    assert report.attainment > 0.97


# -- efficiency


def efficient(cost: Cost = FIXED) -> Adaptive:
    """A policy that prefers efficiency and knows what batches cost."""
    return taught(cost, policy=Adaptive(64, prefer="efficiency"))


def test_what_has_time_waits_until_one_more_would_be_late() -> None:
    """With an SLO of 60 ms ten requests are held until eleven would be late; then the ten go."""
    policy, queue = efficient(), alike(10, slo_s=0.06)
    held = decide(policy, queue)
    assert held.take == 0
    assert held.wake_at == pytest.approx(NOW + 0.06 - FIXED(11), abs=1e-4)
    assert decide(policy, queue, now=held.wake_at or inf) == Decision([], 10, "free")


def test_a_batch_that_cannot_grow_does_not_wait() -> None:
    """A full batch goes at once, and so does one behind which others could not be in time."""
    assert decide(efficient(), alike(64, slo_s=0.06)).take == 64
    assert decide(efficient(BALANCED), alike(30, slo_s=0.06)).take == 30


def test_who_waits_for_more_leaves_a_tile_that_is_not_full_for_later() -> None:
    """Once it goes, the batch is the size that takes the fewest seconds an item: 16 of 17."""
    policy, queue = efficient(TILES), alike(17, slo_s=0.06)
    held = decide(policy, queue)
    assert held.wake_at is not None
    assert decide(policy, queue, now=held.wake_at).take == 16


def test_nobody_is_held_back_for_efficiency_longer_than_the_bound() -> None:
    """`max_queue_delay_s` bounds this wait, too."""
    policy = taught(policy=Adaptive(64, 0.003, prefer="efficiency"))
    assert decide(policy, alike(10, slo_s=0.06)).wake_at == pytest.approx(NOW + 0.003)


def test_without_an_slo_efficiency_changes_nothing() -> None:
    """Neither a request without a due time waits, nor one that is due by its deadline alone."""
    expiring = Request("x", NOW + 30.0)
    expiring.arrived = NOW
    for queue in (alike(10), queued(expiring)):
        assert decide(efficient(), queue).take == decide(taught(), queue).take == len(queue)
    loop = {"arrivals": "closed:clients=24,think=2ms", "duration_s": 2, "slo_s": None}
    usual, other = (run(Adaptive(64, prefer=prefer), cost=FIXED, **loop) for prefer in ("latency", "efficiency"))  # type: ignore[arg-type]
    assert usual.batch_sizes == other.batch_sizes


@pytest.mark.parametrize(("arrivals", "share"), [("poisson:rho=0.1", 0.4), ("poisson:rho=0.5", 0.6)])
@pytest.mark.parametrize("workers", [1, 3])
def test_efficiency_takes_fewer_worker_seconds_and_keeps_the_slo(arrivals: str, share: float, workers: int) -> None:
    """Below the capacity all are answered in time, for a part of the worker-seconds."""
    settings = {"arrivals": arrivals, "cost": FIXED, "workers": workers, "slo_s": 0.06, "duration_s": 2}
    usual, ours = (run(policy, max_batch_size=64, **settings) for policy in ("adaptive", "efficient"))
    assert ours.attainment > 0.995
    assert ours.worker_s_per_good < share * usual.worker_s_per_good


def test_a_closed_loop_does_not_wait_for_nobody() -> None:
    """Where all clients are inside, no other request can come, and nothing is held back."""
    settings = {"arrivals": "closed:clients=8,think=2ms", "cost": FIXED, "slo_s": 0.06, "duration_s": 5}
    ours, symphony = (run(policy, max_batch_size=64, **settings) for policy in ("efficient", "symphony"))
    assert ours.goodput > 2.0 * symphony.goodput


def test_who_prefers_efficiency_tries_sizes_too() -> None:
    """A knee is found, and batches end there, although those beyond it would be in time."""
    ours = run(Adaptive(64, prefer="efficiency"), arrivals="poisson:rho=0.9", cost=KNEE, slo_s=0.06, duration_s=5)
    assert ours.attainment > 0.98
    assert 28 < ours.mean_batch_size < 34


def test_efficiency_composes_by_length_as_late_as_it_may() -> None:
    """Batches of like lengths wait for more, too."""
    settings = {
        "arrivals": "poisson:rho=0.3",
        "cost": "padded:a=8ms,b=20us",
        "lengths": "lognormal:input=14,input_sigma=0.8",
        "max_batch_size": 32,
        "slo_s": 0.15,
        "duration_s": 2,
    }
    usual, ours = run("adaptive", **settings), run("efficient", **settings)
    assert ours.attainment > 0.99
    assert ours.worker_s_per_good < 0.8 * usual.worker_s_per_good


def test_what_is_preferred_is_one_of_two() -> None:
    """Any other preference is an error."""
    with pytest.raises(ValueError, match="prefer must be"):
        Adaptive(prefer="power")  # type: ignore[arg-type]
