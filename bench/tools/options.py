"""What the command lines of the programs have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose `--help` shows a docstring as it is written, and how to start the program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return argparse.ArgumentParser(
        prog=f"python -m {spec.name.removesuffix('.__main__')}" if spec else None,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_measuring(parser: argparse.ArgumentParser, *, rounds: int, seconds: float) -> None:
    """The options of every program that sets sides beside each other in rounds."""
    parser.add_argument("--rounds", type=int, default=rounds, help="of turns of all sides; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=seconds, help="that each turn takes; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every turn and every figure")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")


def add_names(parser: argparse.ArgumentParser, option: str, known: Iterable[str], what: str, default: str = "") -> None:
    """An option that takes some of the known names, separated by commas; by default all of them."""
    known = tuple(known)
    default = default or ",".join(known)
    text = f"{what}, separated by commas; default: {default}"
    parser.add_argument(option, type=some_of(known), default=default, metavar="NAMES", help=text)


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """What reads a list of names that must be known."""
    known = tuple(known)

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
        return names

    return read
