"""Keys: requests with different ones never share a batch, and workers change keys as seldom as is fair."""

from __future__ import annotations

import gc
import random
import sys
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.batch import Batch, Reply
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.lane_order import key_of as lane_key
from carpool.engine.core.levels import BY_KEY, BY_LENGTH
from carpool.engine.core.places import KeyedWorkers
from carpool.engine.core.queue import Queue
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import AIMD, Adaptive, Cork, Decision, Greedy, Policy, Static, View, new_policy
from carpool.engine.request import Lane, Request
from carpool.errors import Unavailable
from tests.effort import examples, share


def key_of(batch: Batch) -> Any:
    """The only key of a batch, for suspects the one that they had before."""
    (key,) = {lane_key(request.lane) for request in batch.requests}
    return key


def driven(
    policy: Policy, *, workers: int = 1, most: float = inf, switch_s: float = 0.0, by_length: bool = False
) -> VirtualDriver:
    """A stage with keys in virtual time, where a worker pays for serving another key than before."""
    last: dict[int, Any] = {}

    def cost(batch: Batch, now: float) -> float:
        key = key_of(batch)
        is_switch, last[batch.place] = last.get(batch.place) != key, key
        return 4e-3 + 2e-4 * len(batch) + switch_s * is_switch

    queue = Queue(levels=BY_LENGTH if by_length else BY_KEY)
    batcher = Batcher("stage", new_policy(policy, 8), queue, keyed=KeyedWorkers(most))
    return VirtualDriver(Core([batcher]), cost, workers=[workers])


POLICIES = [Adaptive(), Greedy(), Static(8, 0.002)]


@given(
    st.lists(st.tuples(st.floats(0.0, 0.004), st.integers(0, 4), st.integers(1, 60)), min_size=1, max_size=120),
    st.integers(1, 3),
    st.sampled_from([1, 2, inf]),
    st.sampled_from(POLICIES),
    st.booleans(),
)
@examples(120, derandomize=True)
def test_keys_never_share_a_batch(
    arrivals: list[tuple[float, int, int]], workers: int, most: float, policy: Policy, by_length: bool
) -> None:
    """A batch has one key, no key runs on more workers than it may, and every request is answered,
    whatever the policy.
    """
    driver = driven(policy, workers=workers, most=most, by_length=by_length)
    batcher = driver.core.crews[0]
    at = 0.0
    for gap, key, length in arrivals:
        at += gap
        driver.arrive(at, "x", length=length, lane=Lane(0, key, 0))
        driver.at(at, lambda: check_held(batcher, most))
    driver.run()
    assert len(driver.answers) == len(arrivals)
    assert all(request.error is None for request in driver.answers)
    for batch in driver.batches:
        key_of(batch)


@given(
    st.lists(st.tuples(st.floats(0.0, 0.002), st.integers(0, 3), st.integers(1, 12)), min_size=30, max_size=120),
    st.integers(1, 3),
    st.sampled_from([1, 2, inf]),
    st.sampled_from(POLICIES),
    st.sampled_from([4, 8]),
)
@examples(120, derandomize=True)
def test_batches_of_one_key_hold_no_more_than_fits(
    arrivals: list[tuple[float, int, int]], workers: int, most: float, policy: Policy, fits: int
) -> None:
    """Where items have keys and sizes, the sizes of a batch sum up to no more than the policy's limit, nor to more
    than fits into memory, unless it is one request; and every request is answered.
    """
    driver = driven(policy, workers=workers, most=most)
    if fits < 8:
        driver.core.crews[0].safe_size.ran_out(fits + 1, fits)
    at = 0.0
    for gap, key, size in arrivals:
        at += gap
        driver.arrive(at, "x", size=size if fits == 8 else min(size, fits), lane=Lane(0, key, 0))
    driver.run()
    assert len(driver.answers) == len(arrivals)
    assert all(request.error is None for request in driver.answers)
    for batch in driver.batches:
        assert batch.size <= fits or batch.n == 1


def check_held(batcher: Batcher, most: float) -> None:
    """No key runs on more workers than it may, and no suspect in company."""
    keys = [key_of(batch) for batch in batcher.in_flight.values()]
    for batch in batcher.in_flight.values():
        assert batch.n == 1 or not any(request.losses for request in batch.requests)
    assert all(keys.count(key) <= most for key in keys)


class DropsTheFirst(Policy):
    """Drops who waits first wherever more than one does, and takes as many as fit of the others."""

    def decide(self, view: View) -> Decision:
        queue, free = view.queue, view.free
        drop = queue.peek(1) if len(queue) > 1 else []
        take = min(queue.size - sum([request.size for request in drop]), self.limit) if free else 0
        return Decision(drop=drop, take=take, reason="free" if take else "")


class DropsAll(Policy):
    """Drops all that waits beside a busy worker, and takes all else."""

    def decide(self, view: View) -> Decision:
        queue = view.queue
        if view.busy:
            return Decision(drop=list(queue))
        return Decision(take=min(queue.size, self.limit), reason="free")


DROPPING = [Adaptive(), AIMD(), Cork(), DropsTheFirst(), DropsAll()]


@pytest.mark.parametrize("policy", DROPPING, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("most", [1, 2])
def test_a_policy_drops_and_takes_while_keys_are_held(policy: Policy, most: int) -> None:
    """Whatever a policy drops in a decision that takes, the batch is made of what is left and of a key that may have
    one more worker; a suspect is alone and waits for a worker of its key, and nothing is left over.
    """
    for seed in range(share(20)):
        dice = random.Random(seed)
        by_length = dice.random() < 0.5
        driver = driven(policy, workers=dice.randint(most, 3), most=most, by_length=by_length)
        batcher, at = driver.core.crews[0], 0.0
        for _ in range(120):
            at += dice.choice([0.0, dice.uniform(0.0, 0.003)])
            sized = {"length" if by_length else "size": dice.choice([1, 1, dice.randint(1, 12)])}
            due = at + dice.choice([0.003, 0.01, 0.03, inf])
            driver.arrive(at, "x", lane=Lane(0, dice.choice("aaabc"), 0), due=due, **sized)
            driver.at(at, lambda batcher=batcher: check_held(batcher, most))  # type: ignore[misc]
        for _ in range(dice.randint(0, 4)):
            driver.at(dice.uniform(0.0, at), lambda driver=driver: lose_one(driver))  # type: ignore[misc]
        closed_at = dice.uniform(0.5, 2.0) * at
        driver.at(closed_at, lambda driver=driver: driver.core.close(Unavailable("closed")))  # type: ignore[misc]
        driver.run()
        assert len(driver.answers) == 120
        assert not batcher.queue.count
        for batch in driver.batches:
            key_of(batch)


def lose_one(driver: VirtualDriver) -> None:
    """Have a worker die that runs a batch, if one does."""
    place = next(iter(driver.core.crews[0].in_flight), None)
    if place is not None:
        driver.lose(0, place)


def test_what_waits_behind_a_dropped_request_goes_while_another_key_is_held() -> None:
    """Of a decision that refuses the first request of a key and takes one, the second one goes, although a key that
    came before it is held.
    """
    core = Core([Batcher("s", Adaptive(4), Queue(levels=BY_KEY), keyed=KeyedWorkers(1))])
    for place in (0, 1):
        core.worker_ready(0, place)

    def ask(key: str, now: float, due: float) -> Request:
        request = Request(key, now + 100.0)
        request.lane, request.due, request.patient = Lane(0, key, 0), due, True
        return request

    now = 0.0
    for _ in range(12):  # it is learned that a batch takes a second
        core.flow.submit(now, [ask("b", now, now + 50.0)])
        (batch,) = core.poll(now).run
        now += 1.0
        core.completed(now, Reply(0, batch.place, batch.id, batch.ids, ["x"], None, 1.0))
        core.poll(now)
    core.flow.submit(now, [ask("a", now, now + 50.0)])
    assert [each.requests[0].item for each in core.poll(now).run] == ["a"]
    late, last = ask("b", now, now + 0.5), ask("b", now, now + 50.0)
    core.flow.submit(now, [ask("a", now, now + 50.0), late, last])
    todo = core.poll(now)
    assert [batch.requests for batch in todo.run] == [[last]]
    assert todo.answer == [late]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_busy_key_leaves_workers_for_the_others(policy: Policy) -> None:
    """With `max_workers_per_key` a crowd of one key does not make others wait for its batches."""
    driver = driven(policy, workers=3, most=2)
    for _ in range(100):
        driver.submit("x", lane=Lane(0, "busy", 0))
    driver.run(0.001)
    rare = driver.submit("x", lane=Lane(0, "rare", 0))
    driver.run(0.012)
    assert rare in driver.answers
    driver.run()
    assert len(driver.answers) == 101


def test_the_worker_that_served_a_key_last_serves_it_again() -> None:
    """Of several idle workers the one that has served a key last gets its next batch."""
    driver = driven(Greedy(), workers=3)
    for at in range(12):
        for key in ("a", "b", "c") if at % 2 else ("c", "a", "b"):
            driver.arrive(float(at), "x", lane=Lane(0, key, 0))
    driver.run()
    places: dict[Any, set[int]] = {}
    for batch in driver.batches:
        places.setdefault(key_of(batch), set()).add(batch.place)
    assert sorted(places.values()) == [{0}, {1}, {2}] or all(len(each) == 1 for each in places.values())


def test_a_worker_that_comes_back_has_served_no_key() -> None:
    """A worker's successor is not taken to have loaded what its predecessor had."""
    keyed = KeyedWorkers()
    assert keyed.started(0, "a")
    keyed.ended(0)
    assert not keyed.started(0, "a")
    keyed.lost(0)
    assert not keyed.warm([0])
    assert keyed.started(0, "a")


def switches(policy: Policy, switch_s: float) -> tuple[int, float]:
    """How often workers changed keys in a closed loop of three keys, and the longest wait."""
    driver = driven(policy, workers=1, switch_s=switch_s)
    dice, left, longest = random.Random(2), 3000, 0.0

    class Client:
        def answered(self, request: Request) -> None:
            nonlocal left, longest
            longest = max(longest, driver.clock.now - request.admitted)
            if left:
                left -= 1
                driver.submit("x", lane=Lane(0, dice.randrange(3), 0), caller=Client())

    for _ in range(30):
        driver.submit("x", lane=Lane(0, dice.randrange(3), 0), caller=Client())
    driver.run()
    keys = [key_of(batch) for batch in driver.batches]
    return sum(a != b for a, b in pairwise(keys)), longest


def test_a_switch_that_costs_is_made_less_often() -> None:
    """Where the first batch of another key takes far longer, a worker stays with its key for
    longer, but no request waits for ever.
    """
    dear, longest = switches(Adaptive(), 0.1)
    cheap, _ = switches(Adaptive(), 0.0)
    assert dear < cheap
    assert longest < 1.5


@pytest.mark.parametrize("policy", [Adaptive(), Greedy()], ids=lambda policy: type(policy).__name__)
def test_keys_that_come_and_go_leave_nothing_behind(policy: Policy) -> None:
    """Keys in turn, ten thousand in a thorough run, leave no lane, no level and no worker's memory behind."""
    driver = driven(policy, workers=2, by_length=True)
    batcher = driver.core.crews[0]

    def held() -> int:
        gc.collect()
        keyed = batcher.keyed
        assert keyed is not None
        return len(batcher.queue._lanes) + len(batcher.queue.order) + len(keyed._last) + len(keyed._runs)

    n = share(10_000)
    for key in range(n):
        driver.arrive(key * 3e-3, key, length=1 + key % 50, lane=Lane(0, f"key {key}", 0))
    driver.run()
    assert [request.result for request in driver.answers] == [request.item for request in driver.answers]
    assert len(driver.answers) == n
    assert held() <= 6
    assert sys.getsizeof(batcher.queue._lanes) < 2000
