"""Benchmarks of carpool. Without a NAME: a table of all programs, with their minutes.

    python -m bench                           the table; --markdown: as bench/README.md has it
    python -m bench NAME [ARGUMENT ...]       run one program, with arguments of its own
    python -m bench NAME --help               what it measures, how, and which arguments it takes
    python -m bench NAME NAME ...             run several, one after the other, with their defaults
    python -m bench all                       run every program that needs no arguments

NAME is as in the table: `python -m bench peers.http` is `python -m bench.peers.http`. Ctrl-C ends
everything that was started, and prints what has been measured by then.
"""

from __future__ import annotations

import difflib
import signal
import subprocess
import sys
from collections.abc import Sequence

from bench.programs import PROGRAMS, listing, total_minutes

NAMES = [program.name for program in PROGRAMS]
ALL = [program.name for program in PROGRAMS if program.in_all]


def main(words: Sequence[str]) -> int:
    """Do what the command line says; returns the exit status."""
    if not words or list(words) == ["--markdown"]:
        print(listing(markdown=bool(words)))
        if not words:
            print(f"\npython -m bench NAME runs one; all of them take {total_minutes():.0f} minutes. More: --help")
        return 0
    if words[0] in ("-h", "--help"):
        print(f"{__doc__}\n{listing()}")
        return 0
    names, arguments = divided(words)
    if problem := wrong(names, arguments):
        print(f"{problem}\n`python -m bench` lists all programs.", file=sys.stderr)
        return 2
    return run_all(ALL if names == ["all"] else names, arguments)


def divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names at the beginning, and the arguments behind them."""
    known = (*NAMES, "all")
    count = next((place for place, word in enumerate(words) if word not in known), len(words))
    return list(words[:count]), list(words[count:])


def wrong(names: Sequence[str], arguments: Sequence[str]) -> str:
    """What cannot be run about this; empty if it can."""
    if not names:
        return no_program(arguments[0])
    if len(names) > 1 and "all" in names:
        return "`all` stands alone: it runs the others as well."
    if len(names) > 1 or names == ["all"]:
        if arguments and not arguments[0].startswith("-"):
            return no_program(arguments[0])
        if arguments:
            return f"Arguments ({' '.join(arguments)}) go to one program: name only that one."
    return ""


def no_program(word: str) -> str:
    """That there is none of this name, and which one may have been meant."""
    ends = [name for name in NAMES if name.rpartition(".")[2] == word]
    near = ends or difflib.get_close_matches(word, NAMES, n=1)
    return f"There is no program {word!r}{f'; did you mean {near[0]}?' if near else '.'}"


def run_all(names: Sequence[str], arguments: Sequence[str]) -> int:
    """Run programs one after the other, also if one fails; the highest of their exit statuses."""
    statuses: dict[str, int] = {}
    for name in names:
        if len(names) > 1:
            print(f"\n== {name}\n", flush=True)
        statuses[name], told_to_end = run(name, arguments)
        if told_to_end:
            break
    if len(names) > 1 and (failed := [name for name in names if statuses.get(name, 1)]):
        print(f"\nfailed or not run: {', '.join(failed)}", file=sys.stderr)
    return max(statuses.values())


def run(name: str, arguments: Sequence[str]) -> tuple[int, bool]:
    """Run one program in a process of its own: its exit status, and whether it was told to end."""
    process: subprocess.Popen[bytes] | None = None
    told = False

    def end(number: int, frame: object) -> None:
        """Pass SIGTERM on; a terminal gives Ctrl-C to both. The program then prints what it has."""
        nonlocal told
        told = True
        if number == signal.SIGTERM and process is not None:
            process.terminate()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen([sys.executable, "-m", f"bench.{name}", *arguments])
        if told:
            process.terminate()
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return (status if status >= 0 else 128 - status), told


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
