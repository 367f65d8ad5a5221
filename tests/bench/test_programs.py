"""`python -m bench`: the list of programs is complete, and what is named is run."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import PYTHONPATH, ROOT
from bench.__main__ import ALL, NAMES, divided, main, wrong
from bench.programs import PROGRAMS, STARTED_BY_OTHERS, listing

BENCH = ROOT / "bench"


def runnable() -> set[str]:
    """All modules of the benchmarks that can be run, by their names below `bench`."""
    found = set()
    for path in BENCH.rglob("*.py"):
        name = ".".join(path.relative_to(BENCH).with_suffix("").parts).removesuffix("__main__").rstrip(".")
        if name and '\nif __name__ == "__main__":' in path.read_text():
            found.add(name)
    return found


def bench(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python -m bench` with these words."""
    return subprocess.run(
        [sys.executable, "-m", "bench", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
    )


def test_every_program_that_can_be_run_is_listed() -> None:
    """Either for people, or as a part that another program starts; and nothing else is listed."""
    assert set(NAMES) | set(STARTED_BY_OTHERS) == runnable()
    assert not set(NAMES) & set(STARTED_BY_OTHERS)
    assert set(STARTED_BY_OTHERS.values()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_listed_program_exists(name: str) -> None:
    """As a module, or as a folder with a chief program."""
    spec = importlib.util.find_spec(f"bench.{name}")
    assert spec is not None
    if spec.submodule_search_locations is not None:
        assert importlib.util.find_spec(f"bench.{name}.__main__")


def test_the_readme_has_the_table() -> None:
    """As `--markdown` prints it; without, each program has a line with what it measures."""
    table = bench("--markdown").stdout.strip()
    assert table == listing(markdown=True)
    assert table in (BENCH / "README.md").read_text()
    printed = bench().stdout
    for program in PROGRAMS:
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{program.name} ")]
        assert program.measures in line
        assert program.minutes is None or f" {program.minutes:g} " in line


def test_help_shows_every_way_to_start_a_program() -> None:
    """With the table, so that nothing else must be read."""
    told = bench("--help").stdout
    assert "python -m bench NAME [ARGUMENT ...]" in told
    assert listing() in told


def test_what_follows_a_name_goes_to_the_program() -> None:
    """Its `--help` is its docstring, and says how it is started by itself."""
    done = bench("alone.simulator_speed", "--help")

    assert done.returncode == 0, done.stderr
    assert "usage: python -m bench.alone.simulator_speed" in done.stdout
    assert "How many requests per second the simulator serves" in done.stdout


def test_several_programs_run_one_after_the_other() -> None:
    """A word that is not a name is the first argument; several programs take none."""
    assert divided(["documents", "1", "--rows", "net"]) == (["documents"], ["1", "--rows", "net"])
    assert divided(["chaos", "policies"]) == (["chaos", "policies"], [])
    assert wrong(["chaos", "policies"], []) == wrong(["all"], []) == wrong(["documents"], ["1"]) == ""


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["http"], "did you mean peers.http?"),
        (["policies.overheat"], "did you mean policies.overhead?"),
        (["nothing"], "There is no program 'nothing'."),
        (["chaos", "policies", "--quick"], "go to one program"),
        (["chaos", "policies", "tables"], "There is no program 'tables'."),
        (["all", "chaos"], "`all` stands alone"),
    ],
)
def test_what_cannot_be_run_is_told(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what to do instead, and before anything is run."""
    assert main(words) == 2
    assert complaint in capsys.readouterr().err


def test_all_are_those_that_need_no_arguments() -> None:
    """And that install and write nothing, and need neither Ray nor a trace nor a revision."""
    tools = {"site", "tools.entries", "tools.lowest", "tools.pythons", "tools.small_wheel"}
    others = {
        "cluster",
        "gpu",
        "pairs",
        "peers.install",
        "picture",
        "picture.terminal",
        "policies.same_decisions",
        "policies.trace",
        "reality.open_loop",
    }
    assert set(NAMES) - set(ALL) == others | tools


def test_a_failure_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """It is told at the end, and the exit status is the highest."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CARPOOL_BENCH_ENVS", os.devnull)

    assert main(["peers.process", "peers.inprocess"]) == 2

    told = capfd.readouterr()
    assert "== peers.process" in told.out
    assert "== peers.inprocess" in told.out
    assert "mpservice is not installed: run python -m bench.peers.install mpservice" in told.err
    assert "run python -m bench.peers.install batched async_batcher ray" in told.err
    assert "failed or not run: peers.process, peers.inprocess" in told.err


def test_sigterm_ends_the_program_as_well() -> None:
    """And none of those that are named after it begins."""
    names = ["alone.simulator_speed", "policies.overhead"]
    command = [sys.executable, "-m", "bench", *names]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        assert process.stdout.readline() == "== alone.simulator_speed\n"
        (child,) = eventually(lambda: children(process.pid))
        process.terminate()
        told, _ = process.communicate(timeout=60)

    assert process.returncode not in (0, -signal.SIGTERM)
    assert "policies.overhead" not in told
    assert not Path(f"/proc/{child}").exists()


def children(pid: int) -> list[str]:
    """The processes that a process has started."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def eventually(look: Callable[[], list[str]]) -> list[str]:
    """What is seen as soon as there is something to see."""
    end = time.monotonic() + 30
    while not (seen := look()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return seen
