"""Is every stream equal to itself alone, with joins, leaves, pauses and killed workers?

A small Llama of Hugging Face that has learned the bytes of our docs (2 layers of 128, trained when
this begins), in a worker process. Each item is asked alone first, and then all
of them are asked in a crowd: clients come at random, some leave, some want no parts for a while,
and the worker is killed now and then, so that streams go on by `resume`. Each token that a client
of the crowd gets is compared with the one that it got alone. In float64 and float32 all streams
must be equal; in bfloat16 95 % of them, as sums are rounded in another order in a batch, which may
decide between two tokens that are almost equally likely.

The exit code is 1 if more streams differ.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

import carpool
from bench import ROOT
from bench.tools import options
from bench.tools.comparison import Comparison, compare, one_table, say
from bench.tools.figures import Facts
from bench.tools.process_tree import every_process
from carpool.engine.request import Request
from carpool.engine.wire.payload import load

CROWD, LEAVE, PAUSE = 24, 0.15, 0.2
DTYPES = {"float64": 1.0, "float32": 1.0, "bfloat16": 0.95}
"""The share of streams that must be equal, by type."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one type of numbers showed.

    Attributes:
        dtype: The type.
        streams: How many were compared.
        equal: How many of them were equal.
        left: How many were left before their end; the tokens until then are compared.
        pauses: How often a stream paused.
        kills: How often a worker was killed.
        resumed: How often a stream went on elsewhere.
        tokens: How many tokens were compared.
    """

    dtype: str
    streams: int
    equal: int
    left: int
    pauses: int
    kills: int
    resumed: int
    tokens: int


class Caller:
    """A caller that keeps tokens, and leaves or pauses after so many of them.

    Args:
        driver: Of the service.
        leaves_after: After how many tokens it goes; never if that is more than there are.
        pauses_after: After how many it wants none for a while.
    """

    def __init__(self, driver: Any, leaves_after: int, pauses_after: int) -> None:
        self.driver = driver
        self.leaves_after, self.pauses_after = leaves_after, pauses_after
        self.tokens: list[int] = []
        self.has_paused = False
        self.done = driver.loop.create_future()

    def take_part(self, request: Request, part: object) -> None:
        self.tokens.append(load(part))  # type: ignore[arg-type]
        if len(self.tokens) == self.leaves_after:
            self.driver.loop.call_soon(self.driver.cancel, request)
            self.done.set_result(None)
        elif len(self.tokens) == self.pauses_after:
            self.has_paused = True
            self.driver.pause(request, True)
            self.driver.loop.call_later(0.2, self.driver.pause, request, False)

    def answered(self, request: Request) -> None:
        if not self.done.done():
            self.done.set_result(request.error)


async def ask(s: Any, item: dict[str, Any], leaves_after: int = -1, pauses_after: int = -1) -> Caller:
    """Ask for one stream, and return what its caller has got."""
    caller = Caller(s.running_driver, leaves_after, pauses_after)
    request = s.new_stream(item, None, 0)
    request.caller = caller
    s.running_driver.submit(request)
    if (error := await caller.done) is not None:
        raise error
    return caller


async def kill_now_and_then(s: Any, mean_s: float, dice: random.Random) -> int:
    """Kill the worker again and again once it has streams, until cancelled; return how often."""
    killed = 0
    with suppress(asyncio.CancelledError):
        while True:
            while not can_be_killed(s):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(mean_s * dice.uniform(0.7, 1.3))
            if not can_be_killed(s):
                continue
            for process in every_process().values():
                if process.parent == os.getpid() and is_worker(process.pid):
                    os.kill(process.pid, signal.SIGKILL)
                    killed += 1
    return killed


def can_be_killed(s: Any) -> bool:
    """Report whether the worker steps streams, none of which is on probation: that one would be
    blamed for its death.
    """
    stepper = s.running_driver.core.crews[-1]
    return any(running.active > 1 and running.suspect is None for running in stepper.sets.values())


def is_worker(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"carpool.engine.worker.main" in file.read()
    return False


def items_of(text: bytes, n: int, dice: random.Random) -> list[dict[str, Any]]:
    """Pieces of a text, and how many tokens are wanted of each."""
    items = []
    for _ in range(n):
        at = dice.randrange(len(text) - 24)
        ids = list(text[at : at + dice.randint(4, 24)])
        items.append({"ids": ids, "n": min(160, 1 + int(dice.expovariate(1 / 32)))})
    return items


async def measure(dtype: str, trained: Path, text: bytes, streams: int, kill_every_s: float) -> Row:
    """Ask each item alone and then in a crowd, and compare."""
    from bench.steps.llama_model import ROWS, Steps

    dice = random.Random(1)
    items = items_of(text, streams, dice)
    stage = carpool.Stage(Steps, max_batch_size=ROWS, kwargs={"dtype": dtype, "trained": str(trained)})
    async with carpool.Service(stage, timeout_s=300).run_async() as s:
        alone = [(await ask(s, item)).tokens for item in items]
        say(f"  {dtype}: {streams} streams alone")
        free = asyncio.Semaphore(CROWD)

        async def in_crowd(item: dict[str, Any]) -> Caller:
            n = item["n"]
            leaves_after = dice.randint(1, n) if dice.random() < LEAVE and n > 1 else -1
            pauses_after = dice.randint(1, n) if dice.random() < PAUSE else -1
            async with free:
                return await ask(s, item, leaves_after, pauses_after)

        killing = asyncio.ensure_future(kill_now_and_then(s, kill_every_s, dice))
        crowd = await asyncio.gather(*map(in_crowd, items))
        killing.cancel()
        kills = await killing
        resumed = s.stats().streams.resumed
    for item, caller in zip(items, crowd, strict=True):
        wanted = caller.leaves_after if caller.leaves_after > 0 else item["n"]
        assert len(caller.tokens) >= wanted, f"{len(caller.tokens)} tokens instead of {wanted}"
    equal = sum(caller.tokens == tokens[: len(caller.tokens)] for caller, tokens in zip(crowd, alone, strict=True))
    left = sum(caller.leaves_after > 0 for caller in crowd)
    pauses = sum(caller.has_paused for caller in crowd)
    return Row(dtype, streams, equal, left, pauses, kills, resumed, sum(len(caller.tokens) for caller in crowd))


HEADER = ("type", "streams", "equal", "should be", "left", "pauses", "kills", "resumed", "tokens compared")


def cells(row: Row) -> list[str]:
    counts = (row.left, row.pauses, row.kills, row.resumed, row.tokens)
    share = f"{row.equal / row.streams:.1%}"
    return [row.dtype, str(row.streams), share, f"{DTYPES[row.dtype]:.0%}", *(f"{count:,}" for count in counts)]


def entry(row: Row) -> Facts:
    return asdict(row)


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    options.add_names(parser, "--types", DTYPES, "types of numbers")
    parser.add_argument("--streams", type=int, default=100, help="of each type; default: %(default)s")
    parser.add_argument("--kill-every", type=float, default=1.0, help="mean seconds; default: %(default)s")
    options.add_measuring(parser, rounds=1, seconds=0)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    from bench.steps.llama_model import train  # needs transformers

    text = b"\n".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    text = bytes(byte for byte in text if byte < 128)
    with tempfile.TemporaryDirectory(prefix="carpool-equality-") as folder:
        trained = Path(folder) / "llama.pt"

        def measured(dtype: str) -> list[Row]:
            return [uvloop.run(measure(dtype, trained, text, given.streams, given.kill_every))]

        train(text, trained)
        found: Comparison[Row] = compare(given.types, measured, {}, given.seconds)
    status = found.report(given, "streams in a crowd beside themselves alone", one_table(HEADER, cells), entry)
    differs = any(row.equal < DTYPES[row.dtype] * row.streams for row in found.rows)
    return status or int(differs)


if __name__ == "__main__":
    sys.exit(main())
