"""What carpool does on a card; on a CPU a smoke test of the same code.

    python -m bench gpu PART [PART ...] [--json FILE]

    floor    what a batch of images costs on its way, step by step, without a model
    resnet   ResNet-50, images of 224 as bytes
    mlp      a small MLP: kernels of some 50 µs
    encoder  MiniLM's and BERT-base's size, texts of mixed length
    decoder  some 110 million weights in steps, 32 and 128 rows
    front    HTTP with a trivial model on the CPU, beside mosec

Each row is one side with the same inputs: the bare loop with its best batch, carpool in a program,
carpool over HTTP, LitServe and mosec. `share` is that of the bare loop's items/s; `busy` is the
part of the time in which the device copied or computed, by its own events; the columns behind it
are milliseconds of a batch; `rest` is what else a call took, `gap` the time between two calls:
writing, the way, reading, and idleness. `front` and `worker` are processor µs for each item.

`--json FILE` adds the run to those that the file has; without a PART the table of FILE is printed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.gpu import beside, front
from bench.gpu.tasks import SMALL
from bench.tools import options
from bench.tools.comparison import say
from bench.tools.figures import Facts, machine, table
from bench.tools.process_tree import adopt_orphans, end_on_sigterm
from bench.tools.side import SideFailed, figures_of

Row = dict[str, Any]


Part = Callable[[float, Sequence[str]], Iterator[Row]]
"""Yields the rows, given the seconds of a load and the sides that are asked for."""


def floor(seconds: float, sides: Sequence[str]) -> Iterator[Row]:
    yield from _printed("floor", str(seconds / 8))


def decoder(seconds: float, sides: Sequence[str]) -> Iterator[Row]:
    for rows in (4,) if os.environ.get(SMALL) else (32, 128):
        with beside.scratch():
            yield from _printed("decoder", str(2 * seconds), str(rows))


def _printed(program: str, *words: str) -> Sequence[Row]:
    """The rows that another process prints."""
    command = [sys.executable, "-m", f"bench.gpu.{program}", *words]
    found: Any = figures_of(program, command, ours=True, seconds=12)
    return list(found)


def encoder(seconds: float, sides: Sequence[str]) -> Iterator[Row]:
    for name in ("minilm", "base"):
        for row in beside.rows(name, seconds, sides):
            yield {**row, "side": f"{name}: {row['side']}"}


PARTS: dict[str, Part] = {
    "floor": floor,
    "resnet": partial(beside.rows, "resnet"),
    "mlp": partial(beside.rows, "mlp"),
    "encoder": encoder,
    "decoder": decoder,
    "front": front.rows,
}


def facts() -> Facts:
    """The machine with its card, and what took part."""
    found = machine()
    for package in ("torch", "numpy", "uvloop", "mosec", "litserve"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if "torch" in found:
        import torch

        if torch.cuda.is_available():
            found["card"] = torch.cuda.get_device_name()
            found["cuda"] = torch.version.cuda
            driver = Path("/proc/driver/nvidia/version")
            found["driver"] = driver.read_text().split("\n")[0] if driver.exists() else "?"
    return found


HEADER = (
    "side", "items/s", "share", "p50 ms", "p99 ms", "batch", "busy",
    "stack", "in", "compute", "out", "rest", "gap", "front µs", "worker µs",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """One line of the table."""
    if "problem" in row:
        return [row["side"], "failed", *[""] * (len(HEADER) - 2)]
    if "batch_s" in row:  # of the floor
        return [row["side"], *[""] * 8, f"{row['batch_s'] * 1e3:.3f}", *[""] * 5]

    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e3:.2f}"

    first = [row["side"], f"{row['items_per_s']:,.0f}", f"{row['share']:.2f}" if "share" in row else ""]
    waits = [ms(row.get("p50_s")), ms(row.get("p99_s"))]
    items = row["items_per_s"] * row["seconds"] or float("nan")
    cpu = f"{row['front_cpu_s'] / items * 1e6:.0f}" if "front_cpu_s" in row else ""
    counts = row.get("counts")
    if not counts or not counts["calls"]:
        worker = f"{row['worker_cpu_s'] / items * 1e6:.0f}" if "worker_cpu_s" in row else ""
        return [*first, *waits, *[""] * 8, cpu, worker]
    calls = counts["calls"]
    parts = [counts[name] for name in ("stack_s", "in_s", "compute_s", "out_s")]
    device = sum(parts[1:])
    times = [*parts, counts["call_s"] - sum(parts), counts["gap_s"]]
    return [
        *first,
        *waits,
        f"{counts['items'] / calls:.1f}",
        f"{device / row['seconds']:.2f}",
        *(ms(seconds / calls) for seconds in times),
        cpu,
        f"{counts['cpu_s'] / counts['items'] * 1e6:.0f}",
    ]


def show(runs: Sequence[Facts], markdown: bool) -> None:
    """Print a table for each run."""
    for run in runs:
        print(f"\n{run['part']}: " + ", ".join(f"{name} {value}" for name, value in run["machine"].items()))
        print(table(HEADER, [cells(row) for row in run["rows"]], markdown=markdown))
        for row in run["rows"]:
            if "problem" in row:
                print(f"FAILED {row['side']}: {row['problem']}")


def join(file: Path | None, before: Sequence[Facts], runs: Sequence[Facts]) -> None:
    """Write all runs, those of former times first. After each row: a run may be cut off."""
    if file:
        file.write_text(json.dumps([*before, *runs], indent=1))


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=3, help="that each load takes; default: %(default)s")
    options.add_names(
        parser, "--sides", beside.SIDES, "of the parts that run a network: who runs besides the bare loop"
    )
    parser.add_argument("--small", action="store_true", help="a smoke test: small networks, one second at the most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the runs are joined")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if not given.parts and not given.json:
        parser.error("name a part to run it, or a --json FILE to see what it has")
    end_on_sigterm()
    adopt_orphans()
    if given.small:
        os.environ[SMALL] = "1"
        given.seconds = min(1.0, given.seconds)
    before = json.loads(given.json.read_text()) if given.json and given.json.exists() else []
    runs: list[Facts] = []
    for part in given.parts:
        say(part)
        runs.append({"part": part, "machine": facts(), "rows": []})
        try:
            for row in PARTS[part](given.seconds, given.sides):
                runs[-1]["rows"].append(row)
                join(given.json, before, runs)
        except SideFailed as problem:
            runs[-1]["rows"].append({"side": part, "problem": str(problem)})
            join(given.json, before, runs)
    show(runs or before, given.markdown)
    return int(any("problem" in row for run in runs for row in run["rows"]))


if __name__ == "__main__":
    sys.exit(main())
