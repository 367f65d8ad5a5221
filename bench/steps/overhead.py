"""What carpool costs a step of a model in a worker process, beside a loop that only steps.

The steps take 2 ms, busy or sleeping, or no time. All rows stream all the time, nobody joins or
leaves. The bare loop runs in the same worker process, in turn with the streams.

* `µs a step` is the median distance of two steps less that of the bare loop: what other work on the
  machine takes away in single steps is not in it. Without model time it is the mean, since steps
  are then not all alike.
* `CPU` is the mean processor time of the worker for a step less that of the bare loop, and so
  depends little on other work.
* `coordinator` is the processor time of the process that gives orders and takes parts, per part,
  with callers that only count; `tasks` is the same with callers that read `predict_stream`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import uvloop

import carpool
from bench.steps.clockwork import STEP_S, Busy, Clockwork, Sleeping
from bench.tools import options
from bench.tools.comparison import Comparison, compare, one_table, say
from bench.tools.figures import Facts, Spread
from carpool.engine.request import Request

MODELS: dict[str, tuple[type[Clockwork], Callable[[list[float]], float]]] = {
    "busy": (Busy, median),
    "sleeping": (Sleeping, median),
    "nothing": (Clockwork, fmean),
}
MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn showed, in seconds.

    Attributes:
        bare_s: Distance of two steps of the bare loop; step_s: of the streams.
        part_s: Processor time of the coordinator, per part; task_s: with tasks that read.
        cpu_s: Processor time of the worker, per step, less that of the bare loop.
        parts_per_s: Of all rows together.
    """

    bare_s: float
    step_s: float
    part_s: float
    task_s: float
    cpu_s: float
    parts_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """All turns with one model and one number of rows."""

    model: str
    rows: int
    turns: list[Turn]

    def spread(self, figure: Callable[[Turn], float]) -> Spread:
        """One figure over all turns, in microseconds."""
        return Spread.of([figure(turn) * 1e6 for turn in self.turns])


class Counting:
    """A caller that only counts."""

    __slots__ = ("done", "n")

    def __init__(self) -> None:
        self.n = 0
        self.done = asyncio.get_running_loop().create_future()

    def take_part(self, request: Request, part: object) -> None:
        self.n += 1

    def answered(self, request: Request) -> None:
        self.done.set_result(request.error)


async def count(s: Any, steps: int) -> int:
    """Have a stream counted without reading it."""
    caller = Counting()
    request = s.new_stream({"steps": steps}, None, 0)
    request.caller = caller
    s.running_driver.submit(request)
    if (error := await caller.done) is not None:
        raise error
    return caller.n


async def read(s: Any, steps: int) -> int:
    """Read a stream, and check every part."""
    n = 0
    async with s.predict_stream({"steps": steps}) as parts:
        async for part in parts:
            n += 1
            assert part == n
    return n


async def streamed(s: Any, rows: int, steps: int, one: Callable[[Any, int], Any]) -> tuple[float, float]:
    """Return the coordinator's processor time per part, and the parts per second."""
    cpu, began = time.process_time(), time.perf_counter()
    counts = await asyncio.gather(*[one(s, steps) for _ in range(rows)])
    taken, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert counts == [steps] * rows, counts
    return cpu / sum(counts), sum(counts) / taken


async def alone(s: Any, item: dict[str, Any]) -> tuple[list[float], float]:
    """The distances of steps, and the mean processor time of one."""
    async with s.predict_stream(item) as parts:
        periods = await anext(parts)
    return [wall for wall, _ in periods], fmean(cpu for _, cpu in periods)


async def turns(name: str, rows: int, rounds: int, seconds: float) -> AsyncIterator[Turn]:
    """Let the bare loop and the streams take turns."""
    model, middle = MODELS[name]
    service = carpool.Service(carpool.Stage(model, max_batch_size=rows), timeout_s=600)
    async with service.run_async() as s:
        for _ in range(rounds):
            distances, bare_cpu_s = await alone(s, {"bare": rows, "seconds": seconds / 2})
            bare = middle(distances)
            rough_s = bare + (STEP_S / 20 if model is not Clockwork else 1e-5 + 1e-6 * rows)
            steps = min(MOST_STEPS, max(20, round(seconds / rough_s)))
            part_s, rate = await streamed(s, rows, steps, count)
            distances, cpu_s = await alone(s, {"periods": rows})
            step_s = middle(distances)
            task_s, _ = await streamed(s, rows, max(20, steps // 2), read)
            await alone(s, {"periods": rows})
            yield Turn(bare, step_s, part_s, task_s, cpu_s - bare_cpu_s, rate)


async def measure(name: str, rows: int, rounds: int, seconds: float) -> Row:
    found = []
    async for turn in turns(name, rows, rounds, seconds):
        found.append(turn)
        say(f"  {name}, {rows} rows: {(turn.step_s - turn.bare_s) * 1e6:.1f} µs a step")
    return Row(name, rows, found)


HEADER = (
    "step", "rows", "bare loop, µs", "more, µs a step", "CPU, µs a step", "parts/s",
    "coordinator, µs a part", "tasks, µs a part",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    def figure(of: Callable[[Turn], float]) -> str:
        return row.spread(of).text(lambda us: f"{us:,.1f}")

    return [
        row.model,
        str(row.rows),
        f"{row.spread(lambda turn: turn.bare_s).median:,.1f}",
        figure(lambda turn: turn.step_s - turn.bare_s),
        figure(lambda turn: turn.cpu_s),
        f"{median(turn.parts_per_s for turn in row.turns):,.0f}",
        figure(lambda turn: turn.part_s),
        figure(lambda turn: turn.task_s),
    ]


def entry(row: Row) -> Facts:
    return asdict(row)


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    options.add_names(parser, "--models", MODELS, "what a step is")
    parser.add_argument("--rows", default="1,8,32", help="separated by commas; default: %(default)s")
    options.add_measuring(parser, rounds=5, seconds=1)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    cases = [(name, int(rows)) for name in given.models for rows in given.rows.split(",")]
    found: Comparison[Row] = compare(
        cases, lambda case: [uvloop.run(measure(*case, given.rounds, given.seconds))], {}, given.seconds
    )
    return found.report(given, "a step of a model in a worker process", one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
