"""Some hundred steps of random programs in each run of the tests; `make test-all` and `make fuzz` take more."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.effort import share
from tests.fuzz import draw, program
from tests.fuzz.hunt import hunt
from tests.fuzz.program import Actor, Batch, Item, Leave, Predict, Program, Service, Stage, Stream, listing
from tests.fuzz.shrink import shrink

_STEPS = share(2000)
_MINUTES = float(os.environ.get("FUZZ_MINUTES", "3"))


def _told(tally: object) -> str:
    return "\n\n".join(map(str, tally.found.values()))  # type: ignore[attr-defined]


def test_every_call_of_random_programs_returns_with_its_own_answer_or_a_documented_error() -> None:
    """In two thousand steps of random programs, in a quick run a quarter of them and always the
    same, every call returns its own answer or a documented error.
    """
    tally = hunt(steps=_STEPS, seed=1, shrink_s=20)
    assert not tally.found, _told(tally)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_the_same_for_minutes() -> None:
    """New random programs run for FUZZ_MINUTES=3 on two processes without a finding; the seed is
    printed with what was found.
    """
    seed = int.from_bytes(os.urandom(4), "big")
    tally = hunt(steps=10**9, seed=seed, jobs=2, seconds=60 * _MINUTES)
    assert not tally.found, f"seed {seed}\n{_told(tally)}"


def test_a_seed_and_a_number_are_a_program() -> None:
    """The same seed and number draw the same program, and what it prints is that program."""
    for number in range(200):
        drawn = draw.program(5, number)
        assert drawn == draw.program(5, number)
        assert eval(repr(drawn), dict(vars(program))) == drawn
    assert len({repr(draw.program(5, number)) for number in range(200)}) == 200


def test_a_listing_runs() -> None:
    """The listing that is printed with a finding is a Python file that runs."""
    compile(listing(draw.program(5, 7)), "listing", "exec")


def test_what_fails_is_made_as_small_as_it_can_be() -> None:
    """A program that fails is made smaller until nothing can go: actors, steps, items, stages and
    settings.
    """
    guilty = Item("raise", "Mute")
    big = Program(
        Service((Stage(policy="static"), Stage(run_in="loop", workers=3)), way="run_async", slo_s=1.0),
        (
            Actor((Predict(), Predict(timeout_s=1.0))),
            Actor((Predict(), Leave(Stream((Item(), Item("slow"), guilty), source="slow"), 0.1), Predict())),
        ),
    )
    small = shrink(big, lambda made: guilty in made.items, tries=1)
    assert small == Program(Service((Stage(),), way="run_async"), (Actor((Stream((guilty,)),)),)) or small == replace(
        small, subject=Service((Stage(run_in="loop"),), way="run_async")
    )
    batch = shrink(Program(Batch(tasks=True, loops=3), big.actors), lambda made: bool(made.items), tries=1)
    assert batch == Program(Batch(tasks=True), (Actor((Predict(),)),))
