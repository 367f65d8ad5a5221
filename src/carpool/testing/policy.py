"""Check that a policy keeps the contract of `policy/base.py`, on random schedules in virtual time.

Arrivals, sizes, SLOs, priorities, cancellations and lost workers are random, and so are the times
of batches, from which nothing can be learned. A schedule follows from its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Decision, Policy, QueueView, View, adapted
from carpool.engine.request import DONE, Lane, Request
from carpool.errors import Overloaded
from carpool.service.checks import warn_if_former

MakePolicy = Callable[[int, float | None], Policy]
"""Makes a policy from a `max_batch_size` and a `max_queue_delay_s`; a policy class can do so."""

_MOST_QUESTIONS = 20_000  # in one schedule; more of them mean that a policy always asks to be asked again
_SECONDS = (0.0, 0.0005, 0.001, 0.003, 0.01, 0.04, 0.2)
_BUDGETS = (0.001, 0.02, 0.06, 0.5, 5.0, inf)
_FACTORS = (0.0, 0.5, 1.0, 1.0, 1.0, 3.0, 100.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of one request, whose caller leaves after `cancelled_after_s`.

    Attributes:
        after_s: How long after the one before it.
        timeout_s: How long the caller waits.
        worker_dies: Whether a worker that is busy at this moment dies.
    """

    after_s: float
    slo_s: float = inf
    timeout_s: float = inf
    size: int = 1
    priority: int = 0
    key: str | None = None
    cancelled_after_s: float | None = None
    worker_dies: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """A stage, and its events.

    A batch of n takes `(fixed_s + item_s * n)` seconds times one of the factors, which take turns.
    """

    arrivals: Sequence[Arrival]
    limit: int = 4
    workers: int = 1
    max_queue_delay_s: float | None = None
    fixed_s: float = 0.001
    item_s: float = 0.001
    factors: Sequence[float] = (1.0,)


class PolicyError(AssertionError):
    """A policy has broken the contract; the text says how, and with which seed."""


def check_policy(make: MakePolicy, *, schedules: int = 200, seed: int = 0) -> None:
    """Check a policy on random schedules.

    Whatever happens, each decision must

    * be the same if the policy is asked twice, and leave the queue alone;
    * take no more than what waits and what a batch may hold, and nothing without a free worker;
    * drop only requests that are in the queue;
    * name a reason if it takes requests;
    * say when to ask again if it holds requests back.

    In the end every request must have been served or refused. Requests that come one at a time and
    have a lot of time must all be served.

    Args:
        make: Makes a new policy.
        schedules: How many schedules to try.
        seed: The seed of the first schedule; the others have the following numbers.

    Raises:
        PolicyError: The policy breaks the contract. The text names the seed; with this seed,
            `schedules=1` repeats the failure.
    """
    for number in range(seed, seed + schedules):
        dice = random.Random(number)
        try:
            requests = play(make, random_schedule(dice)).requests
            _require(all(request.state == DONE for request in requests), "a request is never answered")
            _check_light_load(make, dice)
        except PolicyError as error:
            raise PolicyError(f"{error} (seed {number})") from None


@dataclass(frozen=True, slots=True)
class Played:
    driver: VirtualDriver
    policy: Policy
    requests: list[Request]


def play(make: MakePolicy, schedule: Schedule) -> Played:
    """Run one schedule to its end, and examine every decision; raises PolicyError."""
    made = make(schedule.limit, schedule.max_queue_delay_s)
    warn_if_former(made)
    policy = _examine(adapted(made))
    core = Core([Batcher("stage", policy, Queue(), runs_ahead=True)])
    batches = count()

    def cost(n: int) -> float:
        factor = schedule.factors[next(batches) % len(schedule.factors)]
        return (schedule.fixed_s + schedule.item_s * n) * factor

    driver = VirtualDriver(core, [cost], [schedule.workers])
    requests = []
    now = 0.0
    for i, arrival in enumerate(schedule.arrivals):
        now += arrival.after_s
        requests.append(_arrive(driver, now, i, arrival))
    driver.run()
    _require(not core.waiting and not core.crews[0].in_flight, "requests are left over")
    return Played(driver, policy, requests)


def random_schedule(dice: random.Random) -> Schedule:
    """Draw a schedule: crowds and gaps, generous and hopeless deadlines, cheap and dear batches."""
    return Schedule(
        arrivals=[_random_arrival(dice) for _ in range(dice.randint(0, 50))],
        limit=dice.randint(1, 9),
        workers=dice.randint(1, 3),
        max_queue_delay_s=dice.choice([None, dice.choice(_SECONDS)]),
        fixed_s=dice.choice(_SECONDS),
        item_s=dice.choice(_SECONDS),
        factors=[dice.choice(_FACTORS) for _ in range(dice.randint(1, 5))],
    )


# -- inside


def _random_arrival(dice: random.Random) -> Arrival:
    return Arrival(
        after_s=dice.choice([0.0, dice.choice(_SECONDS), dice.uniform(0, 0.01), 20.0]),
        slo_s=dice.choice(_BUDGETS),
        timeout_s=dice.choice(_BUDGETS),
        size=dice.choice([1, 1, 1, 2, 5]),
        priority=dice.choice([0, 0, 0, 1]),
        key=dice.choice([None, None, None, "a", "b"]),
        cancelled_after_s=dice.choice([None, None, dice.choice(_SECONDS)]),
        worker_dies=dice.random() < 0.1,
    )


def _arrive(driver: VirtualDriver, now: float, item: int, arrival: Arrival) -> Request:
    core = driver.core
    due = now + min(arrival.slo_s, arrival.timeout_s)
    lane = Lane(arrival.priority, arrival.key, 0)
    request = driver.arrive(now, item, arrival.timeout_s, size=arrival.size, lane=lane, due=due)
    if arrival.cancelled_after_s is not None:
        driver.at(now + arrival.cancelled_after_s, lambda: core.cancel(driver.clock.now, request))
    if arrival.worker_dies:
        driver.at(now, lambda: driver.lose(0, 0) if 0 in core.crews[0].in_flight else None)
    return request


def _check_light_load(make: MakePolicy, dice: random.Random) -> None:
    quiet = [Arrival(0.5, slo_s=0.4, timeout_s=0.45)] * 30
    fixed_s, item_s = dice.uniform(0.0001, 0.01), dice.uniform(0, 0.002)
    schedule = Schedule(quiet, dice.randint(1, 9), dice.randint(1, 3), None, fixed_s, item_s)
    for request in play(make, schedule).requests:
        refused = isinstance(request.error, Overloaded)
        _require(not refused, "a lone request with a lot of time is refused")
        _require(request.error is None, "a lone request with a lot of time expires")


def _examine(policy: Policy) -> Policy:
    decide = policy.decide
    asked = count(1)

    def examined(view: View) -> Decision:
        queue = view.queue
        before = list(queue)
        decision = decide(view)
        if view.free_in_s is not None:
            most = min(queue.size, policy.limit)
            _require(0 <= decision.take <= most, f"the policy takes {decision.take} ahead, of at most {most}")
        else:
            _require(next(asked) < _MOST_QUESTIONS, "the policy asks to be asked again and again")
            again = decide(view)
            _require(again == decision, f"asked twice, the policy decides {decision} and {again}")
            _check(decision, view.now, queue, view.free, policy.limit)
        _require(list(queue) == before, "the policy changes the queue")
        return decision

    policy.decide = examined  # type: ignore[method-assign]
    return policy


def _check(decision: Decision, now: float, queue: QueueView, free: int, limit: int) -> None:
    _require(len(set(decision.drop)) == len(decision.drop), "one request is dropped twice")
    _require(set(decision.drop) <= set(queue), "a request is dropped that is not in the queue")
    left = queue.size - sum(request.size for request in decision.drop)
    _require(
        0 <= decision.take <= min(left, limit), f"the policy takes {decision.take} of {left}, with a limit of {limit}"
    )
    _require(bool(free) or not decision.take, "the policy takes a batch while no worker is free")
    _require(
        (decision.reason != "") == (decision.take > 0),
        "the policy must name a reason if it takes requests, and only then",
    )
    if free and left and not decision.take and not decision.drop:
        _require(decision.wake_at is not None, "the policy holds requests back and does not say when to ask again")
    if decision.wake_at is not None and not decision.take:
        _require(decision.wake_at > now, "the policy asks to be asked again at once")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise PolicyError(text)
