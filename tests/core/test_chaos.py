"""Virtual chaos: the core under many random schedules of everything that can happen, all invariants after each step.

`CARPOOL_CHAOS_SCHEDULES` says how many (10,000 if not set, some hundred of them in a quick run), `CARPOOL_CHAOS_SEED`
which one alone: a failure prints the seed that plays it again, and what had happened. What can happen, and what must
hold, is in `world.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Any

import pytest

from carpool.request import DEFAULT_LANE, Lane
from tests.core.world import POLICIES, AskSpec, StageSpec, World
from tests.effort import share

SCHEDULES = int(os.environ.get("CARPOOL_CHAOS_SCHEDULES", share(10_000)))
SEED = os.environ.get("CARPOOL_CHAOS_SEED")
STEPS = 24
REACHING = 1500
"""So many of the first schedules are played by the test that also looks at what they reach, and need not be twice; a
quick run plays a quarter of them, and the others only while something has not been reached."""


@pytest.mark.timeout(300 + SCHEDULES / 20)  # 2 ms each on a machine that has nothing else to do
def test_the_core_under_random_schedules_of_everything() -> None:
    """In random schedules of everything that can happen no invariant is ever broken, and in the end
    each request has been answered once.
    """
    for seed in range(REACHING, SCHEDULES) if SEED is None else [int(SEED)]:
        play(seed)


def play(seed: int) -> World:
    """One schedule, to its end. Raises with the seed and the story if a rule is broken."""
    dice = Random(seed)
    crowded, lending = seed % 3 == 0, seed % 3 == 1 and seed % 2 == 1
    world = a_crowded_world(dice) if crowded else a_lending_world(dice) if lending else a_world(dice)
    often = OFTEN_WHERE_LENT if lending else OFTEN
    story: list[str] = []
    try:
        for step in range(STEPS):
            happens, arguments = something(dice, world, step, crowded, often)
            story.append(f"{world.now:g} {happens.__name__}{arguments}")
            happens(*arguments)
            world.check_always()
            if dice.random() < 0.5:
                story.append(f"{world.now:g} poll")
                world.poll()
        story.append(f"{world.now:g} settle")
        world.settle()
    except Exception as error:
        happened = "\n".join([*map(str, world.specs), f"slo_s={world.slo_s}", *story])
        text = f"play it again with CARPOOL_CHAOS_SEED={seed}; it broke at the end of this:\n{happened}"
        raise AssertionError(text) from error
    return world


def a_world(dice: Random) -> World:
    stages = [
        StageSpec(
            policy=dice.choice(list(POLICIES)),
            limit=dice.randint(1, 5),
            delay_s=dice.randint(0, 6),
            max_size=or_endless(dice, 1, 6),
            max_bytes=or_endless(dice, 4, 12),
            max_batch_time_s=or_endless(dice, 2, 9),
            patience_s=or_endless(dice, 1, 6),
            idempotent=dice.random() < 0.75,
            workers=dice.randint(1, 3),
            sized=dice.random() < 0.3,
            ahead=dice.random() < 0.6,
        )
        for _ in range(dice.choice([1, 1, 2, 3]))
    ]
    world = World(stages, dice.random() < 0.1, dice.choice([None, None, 2.0, 8.0]))
    for pick in range(dice.randint(0, len(world.workers))):
        world.worker_ready(pick)
    return world


def a_crowded_world(dice: Random) -> World:
    """So much waits, and all of it alike, that batches go ahead of time."""
    stages = [
        StageSpec(
            policy=dice.choice(["greedy", "static", "one by one", "adaptive"]),
            limit=dice.randint(1, 3),
            max_size=or_endless(dice, 4, 9),
            max_batch_time_s=or_endless(dice, 4, 9),
            patience_s=or_endless(dice, 1, 6),
            workers=dice.randint(1, 2),
            ahead=True,
        )
        for _ in range(dice.choice([1, 1, 2]))
    ]
    world = World(stages, dice.random() < 0.1, dice.choice([None, None, 64.0]))
    for _ in world.workers:
        world.worker_ready(0)
    world.submit([a_plain_ask(dice) for _ in range(16)])
    return world


def a_lending_world(dice: Random) -> World:
    """One stage, in which there is so little to do that its workers are lent."""
    spec = StageSpec(
        policy=dice.choice(["greedy", "greedy", "one by one", "adaptive"]),
        limit=dice.randint(1, 3),
        max_batch_time_s=or_endless(dice, 4, 9),
        patience_s=or_endless(dice, 1, 6),
        idempotent=dice.random() < 0.75,
        workers=dice.randint(1, 2),
        ahead=dice.random() < 0.5,
    )
    world = World([spec], False, dice.choice([None, 2.0, 8.0]))
    for _ in world.workers:
        world.worker_ready(0)
    return world


def a_plain_ask(dice: Random) -> AskSpec:
    return AskSpec(timeout=or_endless(dice, 1, 12), patient=dice.random() < 0.8, cancelled=dice.random() < 0.05)


def an_ask(dice: Random) -> AskSpec:
    plain = dice.random() < 0.5
    return AskSpec(
        timeout=or_endless(dice, 0, 12),
        nbytes=dice.randint(0, 6),
        lane=DEFAULT_LANE
        if plain
        else Lane(dice.choice([-1, 0, 1]), dice.choice([None, "key"]), dice.choice([0, 0, 1])),
        patient=dice.random() < 0.5,
        cancelled=dice.random() < 0.05,
        size=1 if plain else dice.randint(1, 3),
        bulk=dice.random() < 0.1,
    )


def or_endless(dice: Random, least: int, most: int) -> float:
    return inf if dice.random() < 0.5 else float(dice.randint(least, most))


def something(
    dice: Random, world: World, step: int, crowded: bool, often: Sequence[float]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The next thing to happen, and how."""
    new = a_plain_ask if crowded else an_ask
    pick = dice.randrange(10_000)
    busy_s = dice.choice([2**-14, 2**-20, 1.0])
    fail = () if dice.random() < 0.8 else (dice.randrange(4),)
    kind = dice.choices(WHAT, often)[0]
    if kind == "submit":
        return world.submit, ([new(dice) for _ in range(dice.choice([1, 1, 2, 5, 9]) if len(world.asks) < 30 else 1)],)
    if kind == "reply":
        return world.reply, (pick, busy_s, fail)
    if kind == "reply_oddly":
        foreign = [dice.randrange(60) for _ in range(dice.randrange(3))]
        return world.reply_oddly, (pick, busy_s, fail, dice.sample(range(6), 6), foreign, dice.randint(1, 6))
    if kind == "stray_reply":
        return world.stray_reply, (pick, dice.randrange(3))
    if kind in ("wait", "jump"):
        return getattr(world, kind), (dice.choice([2**-10, 2**-9, 2**-8, 1] if crowded else [0.125, 1, 3, 8, 64]),)
    if kind == "lend":
        return world.lend, ()
    if kind == "lone":
        if any(world.lent.values()):
            return (world.lone_done, (busy_s, not fail)) if pick % 4 else (world.take_back, ())
        return world.lone_call, (or_endless(dice, 1, 12),)
    if kind == "ran_out":
        return world.ran_out, (pick, dice.sample(range(6), dice.randint(1, 5)))
    if kind == "end":
        if step < STEPS // 2:
            return world.worker_ready, (pick,)
        return (world.close if pick % 4 else world.abort), ()
    return getattr(world, kind), (pick,)


WHAT = [
    *("submit", "reply", "reply_oddly", "stray_reply", "cancel", "worker_ready", "worker_lost", "worker_left"),
    *("call_started", "mistake", "wait", "jump", "end", "spare", "ran_out", "drain", "hold", "lend", "lone"),
]
OFTEN = [7, 6, 3, 1, 2, 4, 4, 1, 1, 0.3, 3, 1, 0.4, 0.3, 0.4, 0.6, 0.3, 1, 1]
OFTEN_WHERE_LENT = [2, 6, 1, 1, 1, 4, 2, 1, 1, 0.3, 3, 1, 0.4, 0.3, 0, 1.5, 0, 8, 8]


@pytest.mark.timeout(300 + REACHING / 20)
def test_chaos_reaches_what_it_is_meant_to_reach() -> None:
    """The random schedules reach all outcomes and all policies, the rare ones too."""
    seen: set[str] = set()
    expected = {"ok", "cancelled", "deadline_exceeded", "overloaded", "model_error", "worker_lost", "unavailable"}
    expected |= {"too_large", "request_crashed_worker", "survived a crash"}
    expected |= {"went ahead", "lay ahead when its worker was lost", "lay ahead when it was cancelled"}
    expected |= {"lay ahead when it expired", "went ahead behind another", "drained"}
    expected |= {"lent", "answered alone", "taken back amid a call"}
    for seed in range(REACHING):
        if seed >= share(2 * REACHING) and seen >= expected:
            break
        world = play(seed)
        for ask in world.asks:
            error = ask.request.error
            seen.add("cancelled" if ask.cancelled else "ok" if error is None else getattr(error, "code", "?"))
            if ask.request.error is None and any(ask.lost.values()):
                seen.add("survived a crash")
        seen |= world.happened
    assert seen >= expected


def test_a_failing_schedule_tells_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that fails says its seed and what had happened until then."""
    monkeypatch.setattr(World, "settle", lambda world: 1 / 0)

    with pytest.raises(AssertionError, match=r"CARPOOL_CHAOS_SEED=7;(.|\n)*StageSpec(.|\n)*settle"):
        play(7)
