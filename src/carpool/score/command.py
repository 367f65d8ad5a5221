"""The command `carpool score`: reads its arguments, shows how far it is, and sums up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from carpool.clock import monotonic
from carpool.score.inputs import Input, format_of
from carpool.score.outputs import NOTHING, Done, Errors, LinesFile, Output, ParquetFile, SheetFile, done_in

if TYPE_CHECKING:
    from carpool.score.run import Scorer

_OK, _SOME_FAILED = 0, 1


class Job(NamedTuple):
    """What is to be scored.

    Attributes:
        source: The file of rows; "-" for the standard input.
        out: The file of answers; "-" for the standard output.
        errors: The file of errors; None for none.
        in_format: Of the rows; None for what the name of the file says.
        out_format: Of the answers; None for what the name of the file says.
        resume: Whether an earlier run is gone on with.
    """

    source: str
    out: str
    errors: str | None
    in_format: str | None
    out_format: str | None
    resume: bool


def score(job: Job, scorer: Scorer) -> int:
    """Run a job and return the exit status: 1 if any row has failed.

    Raises:
        ValueError: The job cannot be run; the text says what to change.
        OSError: A file cannot be read or written.
    """
    out_format = job.out_format or format_of(job.out)
    done = _done(job, out_format)
    source = Input(job.source, job.in_format or format_of(job.source))
    errors = None if job.errors is None else Errors(job.errors, done.rows)
    output = _output(job.out, out_format, done)
    console = Console(stderr=True, highlight=False)
    if done.rows:
        console.print(f"{done.rows:,} rows were answered before")
    rows, n_failed, began = done.rows, done.failed, monotonic()
    try:
        with _shown(console) as progress:
            task = progress.add_task("rows", total=source.size, rate="")
            for answers in scorer.answers(source.rows(done.rows)):
                if errors is not None:
                    errors.write(rows + 1, answers)
                output.write(answers)
                rows += len(answers)
                n_failed += sum(answer.is_error for answer in answers)
                rate = (rows - done.rows) / max(monotonic() - began, 1e-9)
                progress.update(task, completed=source.read_bytes, rate=f"{rows:,} rows, {rate:,.0f}/s")
    finally:
        output.close()
        if errors is not None:
            errors.close()
    _sum_up(console, scorer, rows - done.rows, n_failed, monotonic() - began)
    return _SOME_FAILED if n_failed else _OK


def _done(job: Job, out_format: str) -> Done:
    """Return how far an earlier run came. Raises ValueError if it cannot be gone on with."""
    if not job.resume:
        if job.out != "-" and Path(job.out).exists() and Path(job.out).stat().st_size:
            raise ValueError(f"{job.out} is there already: go on with --resume, or choose another --out")
        return NOTHING
    if job.out == "-" or out_format == "parquet":
        raise ValueError("--resume needs an --out that is a file of NDJSON or CSV")
    if job.source == "-":
        raise ValueError("--resume needs an --in that is a file, since it reads it from the beginning")
    return done_in(job.out, out_format)


def _output(path: str, format: str, done: Done) -> Output:
    if format == "csv":
        return SheetFile(path, done.nbytes, done.header)
    return ParquetFile(path) if format == "parquet" else LinesFile(path, done.nbytes)


def _shown(console: Console) -> Progress:
    """Return the bar that shows how far it is; there is none where no person looks."""
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.fields[rate]}"))
    return Progress(
        *columns, TimeRemainingColumn(compact=True), console=console, transient=True, disable=not sys.stderr.isatty()
    )


def _sum_up(console: Console, scorer: Scorer, rows: int, n_failed: int, seconds: float) -> None:
    rate = rows / seconds if seconds else 0.0
    console.print(f"{rows:,} rows in {seconds:.1f} s, {rate:,.0f} rows/s, {n_failed:,} failed")
    for line in scorer.summary(seconds):
        console.print(line)
