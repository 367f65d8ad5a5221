"""`carpool profile`: measures what the batches of a service cost."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from carpool.cli import profiling
from carpool.cli.sources import FAILED, fail, find_service
from carpool.engine.observe import log
from carpool.errors import CarpoolError
from carpool.service.service import Service
from carpool.simulate.costs import StageCosts, costs_as_json, write_costs

_COLUMNS = (TextColumn("measuring stage {task.description}"), BarColumn(), MofNCompleteColumn())


def profile(
    target: str,
    /,
    *,
    out: Path | None = None,
    runs: int = 9,
    threads: int = 1,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Measure what batches of each size cost, for `carpool plan` and `carpool simulate`.

    Each stage of the service runs alone, in one worker, with the examples of its model or with what
    the stage before makes of them. A batch of each size is run a few times once it is warm.

    Example: carpool profile program:service --out costs.json

    Parameters
    ----------
    target:
        The service, as module:attribute.
    out:
        The file to write, which `carpool plan --cost` and `carpool simulate --cost` read.
    runs:
        How many batches of each size are timed; the median counts.
    threads:
        How many threads BLAS and OpenMP have in the worker. One is what each worker has where there
        are as many workers as cores. OMP_NUM_THREADS, exported or in `env=` of the stage, counts
        more.
    as_json:
        Print JSON instead of the table.
    """
    log.set_up("text", logging.WARNING)
    service = find_service(target)
    if runs < 1 or threads < 1:
        fail("--runs and --threads must be at least 1")
    if out is not None and not out.absolute().parent.is_dir():
        fail(f"{out}: there is no folder {out.parent}")
    try:
        found = _measured(service, runs, threads)
        if out is not None:
            write_costs(out, service.name, found, is_line=service.is_line)
    except (ValueError, OSError) as error:
        fail(str(error))
    except CarpoolError as error:
        fail(str(error), FAILED)
    if as_json:
        print(costs_as_json(service.name, found, is_line=service.is_line).decode())
        return
    _print(found)
    if out is not None:
        what = "plan" if service.is_line else f"simulate --service {target}"
        print(f"carpool {what} --cost {out} --arrivals poisson:rate=800 --slo 60ms")


def _measured(service: Service, runs: int, threads: int) -> list[StageCosts]:
    """Measure the service, with a progress bar if stderr is a terminal."""
    console = Console(stderr=True)
    with Progress(*_COLUMNS, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(service.stages[0].name)
        return asyncio.run(
            profiling.profile(
                service,
                runs=runs,
                threads=threads,
                progress=lambda stage, done, of: bar.update(task, description=stage, completed=done, total=of),
            )
        )


def _print(found: list[StageCosts]) -> None:
    """Print a table of the costs."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "batch", "ms", "ms each", "items/s"):
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    for costs in found:
        for size, seconds in costs.seconds.items():
            times = [f"{seconds * 1000:.3g}", f"{seconds * 1000 / size:.3g}", f"{size / seconds:,.0f}"]
            table.add_row(costs.stage, str(size), *times)
    Console(highlight=False).print(table)
