"""The command line: `carpool serve` and its companions, `simulate` and `demo`.

Every error that a user can make is reported in one line, with what to do about it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

try:
    from cyclopts import App as Cli
    from cyclopts import CycloptsError
    from rich.console import Console
except ImportError:
    raise SystemExit("carpool: the command line needs its extra packages: pip install 'carpool[serve]'") from None

import carpool
from carpool.cli.graph_command import graph
from carpool.cli.operate_commands import health, reload, scale, services
from carpool.cli.score_command import score
from carpool.cli.serve_command import serve, show_config
from carpool.cli.sources import add_current_folder, fail, in_words, server_key, server_url, sources
from carpool.cli.worker_command import worker
from carpool.engine.observe import log


def _demo_can_run() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("sklearn", "httptools"))


_HELP = "Dynamic batching for Python models: many callers, one vectorised call, each caller its own answer."

cli = Cli(
    name="carpool",
    # not as an epilogue, which the help of each command would end with as well
    help=f"{_HELP}\n\nStart with: carpool demo" if _demo_can_run() else _HELP,
    version=carpool.__version__,
)

cli.config = (sources,)
cli.command(serve)
cli.command(show_config, name="config")
cli.command(worker)
cli.command(score)
cli.command(health)
cli.command(graph)
cli.command(reload)
cli.command(scale)
cli.command(services)


@cli.command
def key(name: str, /, *, expires: str = "") -> None:
    """Make an API key for somebody.

    The key is for them, and is not shown again. The line is for the file of --api-keys, and has
    only its SHA-256.

    Parameters
    ----------
    name:
        Who gets it: the name is in logs and metrics.
    expires:
        The day, or the moment, from which it is no longer good, such as 2027-01-31.
    """
    from carpool.http.access import new_key

    try:
        made, line = new_key(name, expires)
    except ValueError as error:
        fail(str(error))
    print(f"key:  {made}", file=sys.stderr)
    print(line)


@cli.command
def top(url: str | None = None, *, key_file: Path | None = None) -> None:
    """Show the figures of a server in the terminal: the dashboard's, each second.

    Parameters
    ----------
    url:
        Where the server is, or its admin address, which may be unix:PATH. By default it is where
        carpool serve would listen here, see carpool config.
    key_file:
        A file with an API key, if the server needs one; CARPOOL_KEY may have it instead.
    """
    from carpool.cli import top_command as terminal

    try:
        terminal.run(server_url(url), server_key(key_file), Console())
    except (terminal.NoFigures, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        pass


@cli.command
def demo() -> None:
    """Serve handwritten digits over HTTP to 64 clients and check every answer.

    It needs scikit-learn: pip install 'carpool[serve,examples]'
    """
    add_current_folder()
    try:
        from carpool.cli import demo_command as demonstration

        status = demonstration.run(Console())
    except ModuleNotFoundError as error:
        fail(f"the demo needs {error.name}: pip install 'carpool[serve,examples]'")
    raise SystemExit(status)


@cache
def add_simulator() -> None:
    """Add the commands that import the simulator, which takes about as long as all the others.

    They are not named as texts, by which cyclopts would import them: it would list them without
    their descriptions.
    """
    from carpool.cli.profile_command import profile
    from carpool.simulate.command import simulate
    from carpool.simulate.plan import plan

    for command in (profile, plan, simulate):
        cli.command(command)


def main() -> None:
    """Run the command that `sys.argv` names, without the simulator unless it needs that."""
    try:
        os.getcwd()
    except FileNotFoundError:
        fail("the current folder has been deleted: change to one that exists")
    arguments = sys.argv[1:]
    named = arguments[0] if arguments else ""
    if named.startswith("-") or named not in cli:
        add_simulator()
    if wants_json(arguments, os.environ):
        log.set_up("json")  # the log is JSON from the beginning, also where a setting makes no sense
    try:
        cli(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        fail(in_words(error))


def wants_json(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Report whether a command is asked to write its log as JSON, before its settings are read."""
    if not arguments or arguments[0] not in ("serve", "worker"):
        return False
    given = [b for a, b in pairwise([*arguments, ""]) if a == "--log"]
    given += [each.removeprefix("--log=") for each in arguments if each.startswith("--log=")]
    return (given or [environ.get("CARPOOL_LOG", "")])[-1] == "json"
