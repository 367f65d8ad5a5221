"""Random graphs that are asked many things at once, some of which are left, late, or lose their worker.

python -m tests.graphs.asking MINUTES

runs graphs in processes, threads and tasks, one after the other, and kills their workers from outside: a soak.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from random import Random, SystemRandom
from typing import Any

import carpool
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError, Overloaded, Unavailable
from carpool.service.graph import Element
from tests.graphs.models import element_of, plain, stages_for
from tests.support.shapes import Fate, Made, Shape, a_shape

CALLERS = 40
_MOST_KILLS = 4


async def ask_a_graph(random: Random, run_in: str, folder: str, kill_every_s: float = 0.0, calls: int = CALLERS) -> int:
    """Ask a random graph, and return how many calls were made.

    Args:
        random: What is drawn from.
        run_in: Where its stages run.
        folder: Where models note that they have killed their processes; empty if none does.
        kill_every_s: How often a worker is killed from outside, on average; 0 for never.
        calls: How many are made.

    Raises:
        AssertionError: A caller has an answer that is not its own, or something is left behind.
    """
    made, stages = stages_for(random, random.randint(1, 3), run_in, folder)
    shape: Shape = [each for each in a_shape(random, made, most=6) if not _names_turns(each)] or [0]
    used = element_of(shape, stages)
    service = _service(used)
    if service is None:
        return 0
    async with service.run_async(when_full=random.choice(["wait", "refuse"])) as s:
        core = s.running_driver.core
        kills = bool(folder) or kill_every_s > 0
        killer = asyncio.ensure_future(_kill(s, random, kill_every_s))
        try:
            for first in range(0, calls, CALLERS):
                asked = range(first, min(first + CALLERS, calls))
                await asyncio.gather(*[_call(s, random, made, shape, number, kills) for number in asked])
        finally:
            killer.cancel()
        await s.running_driver.until(lambda: not any(batcher.running for batcher in core.crews))
        assert not core.unanswered and not core.waiting and not core._transit.families
        for batcher in core.crews:
            assert not batcher.queue.nbytes
        assert all(not block.running for block in core.flow.graph.blocks)
    return calls


async def _kill(s: Any, random: Random, every_s: float) -> None:
    """Kill a worker now and then; not so often that a stage fails for good."""
    for _ in range(_MOST_KILLS if every_s else 0):
        await asyncio.sleep(random.expovariate(1 / every_s))
        if s.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(s.pids), signal.SIGKILL)


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
        text = "nowhere" if "there is no branch" in text else "list" if "takes a list" in text else text
        is_guilty = kills and outcome.code == "request_crashed_worker"
        assert ("error", text) in fate.outcomes or is_guilty or may_be_odd, (text, fate.outcomes)


def soak(minutes: float, seed: int) -> None:
    """Ask random graphs for so long, and print how many calls were made."""
    until, asked, graphs = time.monotonic() + 60 * minutes, 0, 0
    print(f"seed {seed}", flush=True)
    while time.monotonic() < until:
        random = Random(f"{seed}/{graphs}")
        run_in = random.choice(["process", "process", "thread", "loop"])
        is_process = run_in == "process"
        with tempfile.TemporaryDirectory() as folder:
            poison = folder if is_process and random.random() < 0.3 else ""
            every_s = random.choice([0.0, 0.1, 0.5]) if is_process and not poison else 0.0
            try:
                asked += asyncio.run(ask_a_graph(random, run_in, poison, every_s, calls=10 * CALLERS))
            except BaseException:
                print(f"graph {graphs} of seed {seed}, run_in={run_in}, poison={bool(poison)}, kills each {every_s} s")
                raise
        graphs += 1
        if graphs % 20 == 0:
            print(f"{graphs} graphs, {asked} calls", flush=True)
    print(f"{graphs} graphs, {asked} calls: each answer was its caller's own", flush=True)


if __name__ == "__main__":
    soak(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else SystemRandom().randrange(10**6))
