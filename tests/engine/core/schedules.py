"""Random worlds, and random schedules of everything that can happen in them (`worlds.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

from carpool.engine.request import DEFAULT_LANE, Lane
from tests.engine.core.worlds import POLICIES, AskSpec, StageSpec, World
from tests.support.shapes import Made, a_shape

STEPS = 24


def play(seed: int) -> World:
    """One schedule, to its end. Raises with the seed and the story if a rule is broken."""
    kinds = [a_line, a_graph, a_crowded_line, a_graph, steps_alone, a_tight_graph, a_lending_line]
    return throw(Random(seed), kinds[seed % len(kinds)], f"play it again with CARPOOL_CHAOS_SEED={seed}; ")


def throw(random: Random, kind: Callable[[Random], World], how: str = "") -> World:
    """Make a world and let it happen."""
    world = kind(random)
    story: list[str] = []
    try:
        for step in range(STEPS):
            happens, arguments = something(random, world, step, kind)
            story.append(f"{world.now:g} {happens.__name__}{arguments}")
            happens(*arguments)
            world.check_always()
            if random.random() < 0.5:
                story.append(f"{world.now:g} poll")
                world.poll()
        story.append(f"{world.now:g} settle")
        world.settle(Random(0))
    except Exception as error:
        happened = "\n".join([*map(str, world.specs), f"{world.shapes} slo_s={world.slo_s}", *story])
        raise AssertionError(f"{how}it broke at the end of this:\n{happened}") from error
    return world


# -- worlds


def a_stage(random: Random, **settings: Any) -> StageSpec:
    """Any stage that answers in batches."""
    spec = StageSpec(
        policy=random.choice(list(POLICIES)),
        limit=random.randint(1, 5),
        delay_s=random.randint(0, 6),
        max_size=or_endless(random, 1, 6),
        max_bytes=or_endless(random, 4, 12),
        max_batch_time_s=or_endless(random, 2, 9),
        patience_s=or_endless(random, 1, 6),
        idempotent=random.random() < 0.75,
        workers=random.randint(1, 3),
        sized=random.random() < 0.3,
        ahead=random.random() < 0.6,
        made=Made(random.choice([0, 0, 10, 20])),
    )
    return replace(spec, **settings)


def steps(random: Random, **settings: Any) -> StageSpec:
    """Any stage that answers in parts."""
    spec = StageSpec(
        policy="adversary",
        limit=random.randint(1, 4),
        units=or_endless(random, 2, 6),
        max_size=or_endless(random, 2, 8),
        max_batch_time_s=or_endless(random, 4, 12),
        patience_s=or_endless(random, 2, 8),
        silence_s=or_endless(random, 3, 12),
        max_stream_s=or_endless(random, 4, 20),
        idempotent=random.random() < 0.75,
        resumable=random.random() < 0.5,
        workers=random.randint(1, 3),
        made=Made(random.choice([0, 0, 10]), in_parts=True),
        seed=random.randrange(1000),
    )
    return replace(spec, **settings)


def _begun(random: Random, world: World) -> World:
    for pick in range(random.randint(0, len(world.workers))):
        world.worker_ready(pick)
    return world


def a_line(random: Random) -> World:
    """One to three stages in a row, the last of which may answer in parts."""
    stages = [a_stage(random) for _ in range(random.choice([1, 1, 2, 3]))]
    if len(stages) > 1 and random.random() < 0.2:
        stages[-1] = steps(random)
    slo_s = random.choice([None, None, 2.0, 8.0])
    return _begun(random, World(stages, [list(range(len(stages)))], random.random() < 0.1, slo_s))


def a_crowded_line(random: Random) -> World:
    """So much waits, and all of it alike, that batches go ahead of time."""
    stages = [
        StageSpec(
            policy=random.choice(["greedy", "static", "one by one", "adaptive"]),
            limit=random.randint(1, 3),
            max_size=or_endless(random, 4, 9),
            max_batch_time_s=or_endless(random, 4, 9),
            patience_s=or_endless(random, 1, 6),
            workers=random.randint(1, 2),
            ahead=True,
        )
        for _ in range(random.choice([1, 1, 2]))
    ]
    world = World(stages, [list(range(len(stages)))], random.random() < 0.1, random.choice([None, None, 64.0]))
    for _ in world.workers:
        world.worker_ready(0)
    world.submit([a_plain_ask(random, world) for _ in range(16)])
    return world


def a_lending_line(random: Random) -> World:
    """One stage with so little to do that its workers are lent."""
    spec = StageSpec(
        policy=random.choice(["greedy", "greedy", "one by one", "adaptive"]),
        limit=random.randint(1, 3),
        max_batch_time_s=or_endless(random, 4, 9),
        patience_s=or_endless(random, 1, 6),
        idempotent=random.random() < 0.75,
        workers=random.randint(1, 2),
        ahead=random.random() < 0.5,
        made=Made(random.choice([0, 0, 35])),
    )
    world = World([spec], [[0]], slo_s=random.choice([None, 2.0, 8.0]))
    for n in 8 * [*range(1, spec.limit + 1)]:  # before it has learned enough, a policy may let no lone request go
        world.crews[0].trained(world.now, n, n, n * 2**-10)
    for _ in world.workers:
        world.worker_ready(0)
    return world


def steps_alone(random: Random) -> World:
    """One stage that answers in parts."""
    world = World([steps(random)], [[0]], random.random() < 0.5, random.choice([None, 2.0, 9.0]))
    return _begun(random, world)


def a_graph(random: Random) -> World:
    """One or two services, nested three deep, with any of one to six stages anywhere."""
    stages = [
        a_stage(
            random,
            policy=random.choice(["greedy", "greedy", *POLICIES]),
            max_size=random.choice([inf, inf, *map(float, range(1, 6))]),
            max_bytes=random.choice([inf, inf, 3, 6, 12]),
            made=Made(random.choice([0, 0, 5, 20]), random.choice([0, 0, 5])),
        )
        for _ in range(random.randint(1, 5))
    ]
    if random.random() < 0.4:
        stages.append(steps(random))
    return _begun(random, _over(random, stages, random.randint(1, 2), random.choice([None, None, 6.0, 20.0])))


def a_tight_graph(random: Random) -> World:
    """Queues of one or two places, all workers there and greedy: if anything stood still, it would for ever."""
    stages = [
        StageSpec(limit=random.randint(1, 3), max_size=float(random.randint(1, 2)), workers=random.randint(1, 2))
        for _ in range(random.randint(1, 4))
    ]
    world = _over(random, stages, random.randint(1, 3), None, most=12)
    for _ in world.workers:
        world.worker_ready(0)
    world.submit([AskSpec(flow) for flow in range(len(world.flows)) for _ in range(random.randint(1, 12))])
    return world


def _over(random: Random, stages: Sequence[StageSpec], n: int, slo_s: float | None, most: int = 9) -> World:
    """Services over stages."""
    shapes = [a_shape(random, [stage.made for stage in stages], most) for _ in range(n)]
    return World(stages, shapes, random.random() < 0.1, slo_s)


def a_plain_ask(random: Random, world: World) -> AskSpec:
    return AskSpec(
        flow=random.randrange(3),
        timeout=or_endless(random, 1, 12) * random.choice([1, 2**-7]),  # some calls, or some dozen of them
        patient=random.random() < 0.8,
        cancelled=random.random() < 0.05,
    )


def an_ask(random: Random, world: World) -> AskSpec:
    plain = random.random() < 0.5
    flow = random.randrange(3)
    last = world.shapes[flow % len(world.shapes)][-1]
    reads_parts = isinstance(last, int) and world.made[last].in_parts and random.random() < 0.7
    return AskSpec(
        flow=flow,
        timeout=or_endless(random, 0, 12),
        nbytes=random.randint(0, 6) if not world.made[-1].in_parts else 0,
        lane=DEFAULT_LANE
        if plain
        else Lane(random.choice([-1, 0, 1]), random.choice([None, "key"]), random.choice([0, 0, 1])),
        patient=random.random() < 0.5,
        cancelled=random.random() < 0.05,
        size=1 if plain else random.choice([1, 1, 2, 3, 7]),
        bulk=random.random() < 0.1,
        reads_parts=reads_parts,
        has_stream=random.random() < 0.2,
        own_timeout=random.random() < 0.5,
    )


def or_endless(random: Random, least: int, most: int) -> float:
    return inf if random.random() < 0.5 else float(random.randint(least, most))


# -- what happens


def something(
    random: Random, world: World, step: int, kind_of_world: Callable[[Random], World]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The next thing to happen, and how."""
    crowded = kind_of_world is a_crowded_line
    new = a_plain_ask if crowded else an_ask
    pick = random.randrange(10_000)
    busy_s = random.choice([2**-14, 2**-20, 1.0])
    often = {**OFTEN, **OFTEN_OF_STEPS} if any(made.in_parts for made in world.made) else OFTEN
    if crowded:
        often = {**often, "cancel": 6}
    if world.lends:
        often = {**often, **(OFTEN_WHERE_LITTLE_IS_TO_DO if kind_of_world is a_lending_line else OFTEN_OF_LENDING)}
    kind = random.choices(list(often), list(often.values()))[0]
    if kind == "submit":
        n = random.choice([1, 1, 2, 5, 9]) if len(world.asks) < 30 else 1
        return world.submit, ([new(random, world) for _ in range(n)], n > 1 and random.random() < 0.2)
    if kind == "reply":
        return world.reply, (pick, busy_s)
    if kind == "reply_oddly":
        foreign = [random.randrange(60) for _ in range(random.randrange(3))]
        return world.reply_oddly, (pick, busy_s, random.sample(range(6), 6), foreign, random.randint(1, 6))
    if kind == "stray_reply":
        return world.stray_reply, (pick, random.randrange(3))
    if kind in ("wait", "jump"):
        return getattr(world, kind), (random.choice([2**-10, 2**-9, 2**-8, 1] if crowded else [0.125, 1, 3, 8, 64]),)
    if kind == "lend":
        return world.lend, ()
    if kind == "lone":
        if any(world.lent.values()):
            return (world.lone_done, (busy_s,)) if pick % 4 else (world.take_back, ())
        return world.lone_call, (or_endless(random, 1, 12),)
    if kind == "ran_out":
        return world.ran_out, (pick, random.sample(range(6), random.randint(1, 5)))
    if kind == "boundary":
        return world.boundary, (pick, random, random.choice([1000, 1000, 1]), random.choice([0] * 7 + [1, 2]))
    if kind == "go_on":
        return world.go_on, (random,)
    if kind in ("pause", "worker_lost"):
        return getattr(world, kind), (pick, random.random() < 0.5)
    if kind == "end":
        if step < STEPS // 2:
            return world.worker_ready, (pick,)
        return (world.close if pick % 4 else world.abort), ()
    return getattr(world, kind), (pick,)


OFTEN: dict[str, float] = {
    "submit": 7,
    "reply": 6,
    "reply_oddly": 3,
    "stray_reply": 1,
    "cancel": 2,
    "worker_ready": 4,
    "worker_lost": 4,
    "worker_left": 1,
    "call_started": 1,
    "mistake": 0.3,
    "wait": 3,
    "jump": 1,
    "end": 0.4,
    "restart_hang_timer": 0.3,
    "ran_out": 0.4,
    "drain": 0.6,
    "hold": 0.3,
}
OFTEN_OF_STEPS: dict[str, float] = {
    "worker_lost": 2,
    "pause": 2,
    "boundary": 8,
    "deliver": 8,
    "go_on": 4,
    "misreport": 0.5,
}
OFTEN_OF_LENDING: dict[str, float] = {"lend": 3, "lone": 3}
OFTEN_WHERE_LITTLE_IS_TO_DO: dict[str, float] = {
    "submit": 2,
    "reply_oddly": 1,
    "cancel": 1,
    "worker_lost": 2,
    "ran_out": 0,
    "drain": 1.5,
    "hold": 0,
    "lend": 8,
    "lone": 8,
}
