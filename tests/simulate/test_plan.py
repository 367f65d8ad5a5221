"""`carpool plan`: how many workers a load needs, and the files of costs that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carpool.simulate.command import Options, simulate
from carpool.simulate.costs import StageCosts, given_costs, read_costs, write_costs
from carpool.simulate.plan import best, plan, staffings, workers_of

COST = "table:1=12ms,4=20ms,16=50ms,64=160ms"
FAST: dict[str, Any] = {"duration": "3s", "seeds": 1, "jobs": 1}


def test_other_stages_get_what_they_need_beside_the_slowest() -> None:
    """The number of workers is that of the slowest stage; a stage that is faster gets fewer."""
    slow, fast = "affine:a=10ms,b=10ms", "affine:a=1ms,b=1ms"
    assert workers_of([slow, fast], [1, 1], 5) == (5, 1)
    assert workers_of([slow, fast], [1, 1], 11) == (11, 2)
    assert workers_of([slow], [8], 3) == (3,)


def test_numbers_are_tried_until_one_more_than_enough() -> None:
    """Without numbers to try, the first is the least that can serve the load, and the last one is
    one beyond the first that is enough.
    """
    settings: dict[str, Any] = {"slo_s": 0.06, "duration_s": 3.0, "seeds": 1}
    found = list(staffings([COST], "poisson:rate=800", [[64]], None, 0.99, **settings))
    assert [choice.workers for choice in found] == [(1 + n,) for n in range(1, len(found) + 1)]
    assert [choice.report.attainment >= 0.99 for choice in found] == [False] * (len(found) - 2) + [True, True]
    assert best(found, 0.99) is found[-2]
    assert best(found, 1.1) is None


def test_the_table_says_how_many_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a row for each choice, marks the one to take, and says it in a sentence."""
    with pytest.raises(SystemExit) as ended:
        plan(cost=[COST], workers="3,4", max_batch_size="8,64", goal="99.9%", **FAST)
    told = capsys.readouterr().out
    assert ended.value.code == 0
    rows = [line.split()[:2] for line in told.splitlines() if "%" in line and "are enough" not in line]
    assert rows == [["3", "8"], ["4", "8"], ["3", "64"], ["4", "64"]]
    assert told.count("enough") == 2
    assert "4 workers are enough: " in told


def test_too_few_workers_are_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Where none is enough the exit status is 1, for scripts, and JSON has no best choice."""
    with pytest.raises(SystemExit) as ended:
        plan(cost=[COST], workers="1", **FAST)
    assert ended.value.code == 1
    assert "None of these answers 99% of the requests within 60ms" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        plan(cost=[COST], workers="1-2", as_json=True, **FAST)
    told = json.loads(capsys.readouterr().out)
    assert (ended.value.code, told["best"], [each["workers"] for each in told["choices"]]) == (1, None, [[1], [2]])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": "3-x"}, "--workers must be numbers such as 3,4,5 or 1-8, not '3-x'"),
        ({"max_batch_size": "0"}, "--max-batch-size must be numbers"),
        ({"goal": "3"}, "--goal must be a share such as 99%, not '3'"),
        ({"cost": ["nowhere.json"]}, "nowhere.json cannot be read as a file of costs, which carpool profile writes"),
        ({"cost": ["a.json", "b.json"]}, "--cost a.json has the costs of all stages"),
        ({"arrivals": "often"}, "often"),
        ({"slo": "soon"}, "soon"),
    ],
)
def test_mistakes_are_one_line(options: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake ends the command with status 2 and one line that says what to write."""
    with pytest.raises(SystemExit) as ended:
        plan(**{**FAST, **options})
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.err.startswith("carpool: ") and text in told.err and told.err.count("\n") == 1


def test_a_file_of_costs_is_read_as_it_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`simulate` and `plan` take costs and batch limits of all stages from one file."""
    stages = [StageCosts("decode", 1, {1: 0.001}), StageCosts("Model", 8, {1: 0.002, 8: 0.009})]
    path = tmp_path / "costs.json"
    write_costs(path, "chain", stages)
    assert read_costs(path) == stages
    specs = ["table:1=1000us", "table:1=2000us,8=9000us"]
    assert given_costs([str(path)], "x") == (specs, [1, 8])
    assert given_costs(["a", "b"], "x") == (["a", "b"], None) and given_costs(None, "x") == (["x"], None)
    simulate(options=Options(policy="greedy", cost=[str(path)], as_json=True, **FAST))
    assert json.loads(capsys.readouterr().out)["max_batch_size"] == [1, 8]
    path.write_text('{"service": "x", "stages": []}')
    with pytest.raises(ValueError, match="has no costs: make it with carpool profile"):
        read_costs(path)
