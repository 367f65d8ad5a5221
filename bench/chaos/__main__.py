"""The chaos soak: does every request get its own answer while workers are killed under load?

A real server, real clients in processes of their own, and a nemesis that kills, stops and poisons
workers and behaves badly as a client. Afterwards the journals of both sides are compared, and the
exit code is 1 if anything was lost, crossed, duplicated, late, run again for no reason or leaked.
docs/testing.md says how to read the table.

    python -m bench.chaos --minutes 10 --seed 1 --docs      as make chaos MINUTES=10 SEED=1 DOCS=1
    python -m bench.chaos --target mosec                    (python -m bench peers.install mosec)
    make chaos TARGET=ray                                   on a Ray cluster of three nodes; as root
    python -m bench.chaos --minutes 1 --keep journals       to look at the journals afterwards
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.chaos import report
from bench.chaos.soak import Progress as Clients
from bench.chaos.soak import soak
from bench.chaos.targets import target
from bench.tools import options
from bench.tools.process_tree import adopt_orphans, end_on_sigterm
from bench.tools.server import NotServing

_SAY_EVERY_S = 15


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--target", default="carpool", help="carpool, ray, mosec or litserve; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=2.0, help="under faults; default: %(default)s")
    parser.add_argument("--seed", type=int, help="of clients and nemesis; default: a new one, which is printed")
    parser.add_argument("--docs", action="store_true", help="write the figures into docs/testing.md")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where to keep journals and log")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**31)
    try:
        server = target(given.target)
    except LookupError as error:
        parser.error(str(error))
    end_on_sigterm()
    adopt_orphans()
    print(f"chaos soak of {server.name} {server.version}: {given.minutes:g} minutes, seed {seed}", flush=True)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="carpool-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _bar(given.minutes * 60) as show:
            outcome = soak(server, given.minutes * 60, seed, folder, show)
        row = report.row_of(server, seed, outcome)
        print(report.text(row, outcome))
        if failures := row.failures():
            print(f"FAILED, seed {seed}: {'; '.join(failures)}")
        else:
            print(f"passed, seed {seed}")
        if given.docs:
            report.write_docs(row)
        return 1 if failures else 0
    except NotServing as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _bar(seconds: float) -> Iterator[Callable[[float, Clients, int], None]]:
    """A progress bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True)
    columns = BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=seconds)
        said = 0.0

        def show(gone: float, clients: Clients, faults: int) -> None:
            nonlocal said
            text = f"{clients.asked:,} requests, {clients.bad:,} not good, {faults} faults"
            progress.update(task, completed=gone, description=text)
            if not console.is_terminal and gone - said >= _SAY_EVERY_S:
                said = gone
                print(f"{gone:.0f} of {seconds:.0f} s: {text}", flush=True)

        yield show


if __name__ == "__main__":
    sys.exit(main())
