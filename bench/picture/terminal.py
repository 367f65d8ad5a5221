"""Draws the terminal of `carpool demo` and `carpool top` as SVG: docs/demo.svg and docs/top.svg.

    python -m bench.picture.terminal

The figures in them are those of the moment, so run it on a machine that does nothing else.
"""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

import carpool
from bench import ROOT
from carpool.cli import demo_command, top_command
from carpool.testing import served

DOCS: Final = ROOT / "docs"
_WIDTH: Final = 110


class Double(carpool.Model):
    """Doubles numbers, and takes a while for it."""

    def predict(self, numbers: list[float]) -> list[float]:
        time.sleep(2e-3 + 2e-5 * len(numbers))
        return [2 * n for n in numbers]


def console() -> Console:
    """Return a terminal that remembers what it shows, without the steps of a bar of progress."""
    return Console(record=True, width=_WIDTH, force_terminal=False, color_system="truecolor", file=io.StringIO())


def save(shown: Console, command: str, path: Path) -> None:
    """Write what a terminal has shown, below the command that was typed."""
    picture = shown.export_svg(title=f"$ {command}", clear=True)
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # they would come from another site
    path.write_text(picture.replace("Fira Code, monospace", "Fira Code, ui-monospace, monospace"))


def demo() -> Console:
    """Return the terminal after `carpool demo`. Raises SystemExit if an answer was wrong."""
    shown = console()
    if status := demo_command.run(shown):
        raise SystemExit(status)
    return shown


def top(seconds: float = 4.0) -> Console:
    """Return the terminal of `carpool top` beside a service that is asked by 32 clients."""
    service = carpool.Service(carpool.Stage(Double, max_batch_size=64, run_in="thread"), name="double", slo_s=0.1)
    shown, is_over = console(), threading.Event()

    def ask(client: Any) -> None:
        while not is_over.is_set():
            client.predict(21.0)

    with served(service) as client:
        askers = [threading.Thread(target=ask, args=(client,)) for _ in range(32)]
        for each in askers:
            each.start()
        before = top_command.fetched(str(client.url), "")
        time.sleep(seconds)
        shown.print(top_command.shown(top_command.fetched(str(client.url), ""), before))
        is_over.set()
        for each in askers:
            each.join()
    return shown


def main() -> int:
    """Run the command; returns the exit status."""
    save(top(), "carpool top", DOCS / "top.svg")
    save(demo(), "carpool demo", DOCS / "demo.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
