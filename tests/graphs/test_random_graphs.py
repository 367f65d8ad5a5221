"""Random graphs under faults, in threads, tasks and processes: every caller gets exactly one answer, its own, and
nothing is left behind. In virtual time the worlds of `tests/engine/core` do the same, with more kinds of faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import carpool
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError, Overloaded, Unavailable
from carpool.service.graph import Element
from tests.engine.core.shapes import Fate, Made, Shape, a_shape
from tests.graphs.models import element_of, plain, stages_for

EXAMPLES = {"thread": 12, "loop": 12, "process": 5}
CALLERS = 40


@pytest.mark.parametrize("run_in", ["thread", "loop", "process"])
def test_every_caller_gets_its_own_answer(run_in: str) -> None:
    @settings(max_examples=EXAMPLES[run_in], deadline=None)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(_check(Random(seed), run_in, folder if run_in == "process" and seed % 2 else ""))

    check()


async def _check(random: Random, run_in: str, folder: str) -> None:
    made, stages = stages_for(random, random.randint(1, 3), run_in, folder)
    shape: Shape = [each for each in a_shape(random, made, most=6) if not _names_turns(each)] or [0]
    used = element_of(shape, stages)
    service = _service(used)
    if service is None:
        return
    async with service.run_async(when_full=random.choice(["wait", "refuse"])) as s:
        core = s.running_driver.core
        calls = [_call(s, random, made, shape, number, bool(folder)) for number in range(CALLERS)]
        await asyncio.gather(*calls)
        await s.running_driver.until(lambda: not any(batcher.running for batcher in core.batchers))
        assert not core.unanswered and not core.waiting and not core._transit.families
        for batcher in core.batchers:
            assert not batcher.queue.nbytes
        assert all(not block.running for block in core.flow.graph.blocks)


def _service(used: Element) -> carpool.Service | None:
    """The service; None if the shape has no stage, or a queue is too small for the batches before it."""
    try:
        return carpool.Service(used, timeout_s=20.0)
    except ValueError:
        return None


def _names_turns(shape: Shape) -> bool:
    """Whether the ways of a route are named by the stage before, which is the same for all of its places."""
    return "turn" in str(shape)


async def _call(s: Any, random: Random, made: list[Made], shape: Shape, number: int, kills: bool) -> None:
    fate = Fate(made, shape, (number,))
    dice = random.random()
    await asyncio.sleep(random.random() * 0.05)
    task = asyncio.ensure_future(s.predict((number,), timeout_s=0.02 if dice < 0.1 else None))
    if dice > 0.9:
        await asyncio.sleep(random.random() * 0.02)
        if task.cancel():
            with contextlib.suppress(asyncio.CancelledError, CarpoolError):
                await task
            return
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    may_be_odd = kills and "keep" in str(shape)  # a lost worker is a value, and what follows is not foreseen
    if not isinstance(outcome, BaseException):
        assert ("ok", repr(plain(outcome))) in fate.outcomes or may_be_odd
    elif isinstance(outcome, DeadlineExceeded):
        assert dice < 0.1
    elif isinstance(outcome, Overloaded):
        assert outcome.reason == "queue_full" or dice < 0.1, (outcome, shape)  # else it would have been late
    elif isinstance(outcome, Unavailable):
        assert kills and outcome.code == "worker_lost"
    else:
        assert isinstance(outcome, ModelError), outcome
        text = str(outcome).removeprefix("ModelError: ")
        text = "nowhere" if "there is no branch" in text else "list" if "must return a list" in text else text
        is_guilty = kills and outcome.code == "request_crashed_worker"
        assert ("error", text) in fate.outcomes or is_guilty or may_be_odd, (text, fate.outcomes)
