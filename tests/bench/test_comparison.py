"""How the benchmarks set sides beside each other: turns, failures, Ctrl-C, and what is reported."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.tools import comparison
from bench.tools.comparison import Comparison, compare, one_table, take_turns
from bench.tools.options import some_of
from bench.tools.side import SideFailed, figures_of


@pytest.fixture(autouse=True)
def _no_change_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs take signals and orphans for themselves; the test run must not."""
    monkeypatch.setattr(comparison, "end_on_sigterm", lambda: None)
    monkeypatch.setattr(comparison, "adopt_orphans", lambda: None)


def turns(order: list[str], **options: Any) -> dict[str, list[int]]:
    """Three rounds of two sides, which write down when they have their turn."""

    def side(name: str) -> int:
        order.append(name)
        return len(order)

    return take_turns("case", 3, {"a": lambda: side("a"), "b": lambda: side("b")}, str, **options)


def test_sides_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """A B A B, so that neighbours see the same machine; each round is told of."""
    order: list[str] = []

    assert turns(order) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert order == list("ababab")
    assert capsys.readouterr().err.splitlines()[-1] == "  case, round 3 of 3: 5 / 6"


def test_sides_take_turns_in_beginning() -> None:
    """Where that is asked for; the turns of a round have the same index all the same."""
    order: list[str] = []

    assert turns(order, other_first=True) == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert order == list("abbaab")


def measure(case: str) -> Iterator[str]:
    if case == "interrupted":
        raise KeyboardInterrupt
    yield f"{case} 1"
    if case == "fails":
        raise SideFailed("fails: no server")
    yield f"{case} 2"


def test_a_case_that_fails_keeps_its_rows_and_does_not_stop_the_others() -> None:
    """Why it failed is told at the end."""
    found = compare(["fails", "works"], measure, {"peer": "1.0"}, 2.0)

    assert found.rows == ["fails 1", "works 1", "works 2"]
    assert found.failures == ["fails: no server"]
    assert found.machine["peer"] == "1.0"


def test_what_was_measured_before_an_interrupt_is_kept() -> None:
    """And it is said that there was one."""
    found = compare(["works", "interrupted", "never"], measure, {}, 2.0)

    assert found.rows == ["works 1", "works 2"]
    assert found.failures == ["interrupted: not everything was measured"]


@pytest.mark.parametrize(("failures", "status"), [([], 0), (["fails: no server"], 1)])
def test_a_report_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failures: list[str], status: int
) -> None:
    """With the machine, all rows and all failures; the exit status says whether there were any."""
    file = tmp_path / "figures.json"
    found = Comparison({"cores": 2}, ["works"], failures)
    given = argparse.Namespace(json=file, markdown=True)
    tables = one_table(("row", "length"), lambda row: (row, str(len(row))))

    assert found.report(given, "The title", tables, lambda row: {"row": row}) == status
    printed = capsys.readouterr().out
    assert printed.startswith("The title\ncores 2\n\n| row   | length |\n")
    assert "| works |      5 |" in printed
    assert ("FAILED fails: no server" in printed) == bool(failures)
    assert json.loads(file.read_text()) == {"machine": {"cores": 2}, "rows": [{"row": "works"}], "failures": failures}


def test_names_must_be_known() -> None:
    """The complaint says which there are."""
    read = some_of(["tasks", "threads"])

    assert read("threads,tasks") == ["threads", "tasks"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown: fibres; choose from tasks, threads"):
        read("tasks,fibres")


def test_a_side_runs_in_the_environment_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unset is not in it, and what is set comes on top."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    program = "import json, os; print('noise'); print(json.dumps({k: v for k, v in os.environ.items() if 'NUM' in k}))"
    figures = figures_of(
        "a side",
        [sys.executable, "-c", program],
        ours=True,
        seconds=1,
        env={"OMP_NUM_THREADS": "1"},
        unset=("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    )

    assert figures == {"OMP_NUM_THREADS": "1"}


def test_a_side_that_ends_with_an_error_has_failed() -> None:
    """With its title, its status and the end of what it said."""
    with pytest.raises(SideFailed, match=r"a side: status 3\n(?s:.*)no model"):
        figures_of(
            "a side",
            [sys.executable, "-c", "import sys; print('no model', file=sys.stderr); exit(3)"],
            ours=False,
            seconds=1,
        )
