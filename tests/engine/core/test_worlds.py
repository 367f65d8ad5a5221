"""The core under many random schedules of everything that can happen, in random graphs; all invariants after each step.

`CARPOOL_CHAOS_SCHEDULES` says how many (3,000 if not set, a sixth of them in a quick run), `CARPOOL_CHAOS_SEED`
which one alone: a failure prints the seed that plays it again, and what had happened. Hypothesis throws the same dice,
and looks for a short story. What can happen, and what must hold, is in `worlds.py`.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples, share
from tests.engine.core.schedules import (
    a_crowded_line,
    a_graph,
    a_lending_line,
    a_line,
    a_tight_graph,
    play,
    steps_alone,
    throw,
)
from tests.engine.core.worlds import World

SCHEDULES = int(os.environ.get("CARPOOL_CHAOS_SCHEDULES", share(3_000)))
SEED = os.environ.get("CARPOOL_CHAOS_SEED")
REACHING = 700
"""So many of the first schedules are played by the test that also looks at what they reach, and need not be twice."""
REACHED = frozenset(
    [
        *("ok", "cancelled", "deadline_exceeded", "overloaded", "model_error", "worker_lost", "unavailable"),
        *("too_large", "request_crashed_worker", "survived a crash", "bad_result", "read parts"),
        *("went ahead", "lay ahead when its worker was lost", "lay ahead when it was cancelled"),
        *("lay ahead when it expired", "went ahead behind another", "drained", "held back for room"),
        *("lent", "answered alone", "taken back amid a call", "recalled"),
        *("gone while it was lent", "to go while it was lent"),
        *("a stage shared by several nodes", "parallel", "route", "turn", "each"),
    ]
)


@pytest.mark.parametrize("seed", [9115, 28557, 40423])
def test_what_random_schedules_have_found_is_mended(seed: int) -> None:
    """9115: a lot that comes in by several doors of a route, which lead to one stage, fits into its queue.

    28557: as soon as the last worker of a stage was let go, what waits for it and is late is refused.

    40423: what waits for the room of requests that expire while they run goes at once.
    """
    play(seed)


@pytest.mark.timeout(300 + SCHEDULES / 10)  # some ms each on a machine that has nothing else to do
def test_the_core_under_random_schedules_of_everything() -> None:
    """In random schedules of everything that can happen no invariant is ever broken, and in the end
    each request has been answered once.
    """
    for seed in range(REACHING, SCHEDULES) if SEED is None else [int(SEED)]:
        play(seed)


@examples(150)
@given(st.randoms(use_true_random=False))
def test_the_core_under_dice_that_can_be_made_smaller(random: Random) -> None:
    """The same, where whatever breaks an invariant is told as the shortest story that does."""
    kinds = [a_line, a_crowded_line, a_graph, steps_alone, a_tight_graph, a_lending_line]
    throw(random, kinds[random.randrange(len(kinds))])


@pytest.mark.timeout(300 + REACHING / 10)
def test_chaos_reaches_what_it_is_meant_to_reach() -> None:
    """The random schedules reach all outcomes, all policies and all that graphs can do, the rare ones too.

    The quick run ends where they have.
    """
    seen: set[str] = set()
    for seed in range(REACHING):
        world = play(seed)
        for ask in world.asks:
            error = ask.request.error
            seen.add("cancelled" if ask.cancelled else "ok" if error is None else getattr(error, "code", "?"))
            if ask.request.error is None and ask.was_lost:
                seen.add("survived a crash")
            if error is None and ask.heard:
                seen.add("read parts")
        seen |= world.happened
        if any(crew.lobby.is_shared for crew in world.crews):
            seen.add("a stage shared by several nodes")
        seen |= {kind for kind in ("parallel", "route", "turn", "each") if kind in repr(world.shapes)}
        if seed >= SCHEDULES and seen >= REACHED:
            break
    assert seen >= REACHED, REACHED - seen


def test_a_failing_schedule_tells_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that fails says its seed and what had happened until then."""
    monkeypatch.setattr(World, "settle", lambda world, random: 1 / 0)

    with pytest.raises(AssertionError, match=r"CARPOOL_CHAOS_SEED=7;(.|\n)*StageSpec(.|\n)*settle"):
        play(7)
