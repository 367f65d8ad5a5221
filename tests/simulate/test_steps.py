"""`carpool simulate --steps`: the figures of runs whose outcome is known, specs, and the command."""

from __future__ import annotations

import json
import subprocess
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from carpool.engine.policy import GreedySteps
from carpool.simulate import StepCost, run_steps
from carpool.simulate.features import lengths_of
from carpool.simulate.steps import step_cost_of
from tests.effort import share
from tests.support.prepared import carpool_command

EQUAL = {"arrivals": [0.0, 0.5], "cost": StepCost(0.0, 0.1, 1.0, 0.0), "lengths": "fixed:input=2,output=4"}
"""Two requests; starting one takes 0.2 s, a step 1 s."""


def test_the_figures_of_a_run_that_can_be_counted() -> None:
    """The second request joins after the first one's first step, and its start delays the first one's second part."""
    report = run_steps("greedy", **EQUAL, slo_s=2.0, part_slo_s=1.1, duration_s=10.0)

    # parts of the first come at 1.2, 2.4, 3.4, 4.4; of the second at 2.4, 3.4, 4.4, 5.4
    assert report.requests == 2 and report.good == 1.0
    assert report.smooth == 0.5  # the first one's second part came 1.2 s after its first
    assert report.gap_p99_s == pytest.approx(1.2)
    assert report.first_p50_s == pytest.approx(1.9)
    assert report.parts_per_s == pytest.approx(8 / 5.4)
    assert report.rows == pytest.approx(8 / 5)


def test_whoever_is_late_is_refused_and_not_good() -> None:
    """The time to the first part counts, and a request that cannot make it is not started."""
    report = run_steps("static", **EQUAL, slo_s=1.5, part_slo_s=1.1, duration_s=10.0)

    assert (report.good, report.refused) == (0.5, 0.5)


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    """With noise, stalls and learned costs, too."""
    settings: dict[str, Any] = {
        "arrivals": "poisson:rate=20",
        "cost": "steps:a=5ms,b=0.1ms,c=18ms,d=0.15ms,sigma=0.3,stall_share=0.01,stall=1s",
        "lengths": "exponential:output=20",
        "duration_s": 3.0,
        "learned": True,
    }
    first, second = run_steps("paced", **settings, seed=1), run_steps("paced", **settings, seed=1)
    assert first == second != run_steps("paced", **settings, seed=2)


def test_paced_is_smooth_where_greedy_is_not() -> None:
    """30 equal steps at overload: nearly all that paced lets in are served at the pace, of greedy's hardly any."""
    settings: dict[str, Any] = {
        "arrivals": "poisson:rate=1",
        "cost": "steps:a=10ms,b=0s,c=20ms,d=30ms",
        "lengths": "fixed:input=1,output=30",
        "slo_s": 5 / 6,
        "part_slo_s": 0.1437,
        "rows": 16,
        "duration_s": float(share(400)),
    }
    paced, greedy = run_steps("paced", **settings), run_steps(GreedySteps, **settings)
    assert paced.good > 1.5 * greedy.good
    assert paced.smooth > 1.5 * greedy.smooth


def test_lengths_of_a_trace(tmp_path: Path) -> None:
    """Any lines of the file, or all of them in order."""
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,1\n1,20,2\n2,30,3\n")

    in_order = lengths_of(f"trace:{path},in_order=yes").draw(Random(1))
    assert list(islice(in_order, 4)) == [(10, 1), (20, 2), (30, 3), (10, 1)]
    drawn = list(islice(lengths_of(f"trace:{path}").draw(Random(1)), 30))
    assert set(drawn) == {(10, 1), (20, 2), (30, 3)} and drawn[:3] != [(10, 1), (20, 2), (30, 3)]


@pytest.mark.parametrize("spec", ["lognormal", "exponential", "fixed"])
def test_lengths_are_whole_and_positive(spec: str) -> None:
    """Whatever the distribution."""
    for units, parts in islice(lengths_of(spec).draw(Random(1)), 200):
        assert type(units) is int and type(parts) is int and units >= 1 and parts >= 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: step_cost_of("affine:a=8ms,b=1ms"), "there is no cost of steps 'affine'; choose one of steps"),
        (lambda: step_cost_of("steps:a=1ms,b=1ms,c=0s,d=0s"), "a step must take some time"),
        (lambda: lengths_of("fixed:output=0"), "output must be positive"),
        (lambda: lengths_of("trace:nowhere.csv"), "cannot read the trace"),
        (lambda: run_steps(arrivals="closed:4"), "needs one open process"),
        (lambda: run_steps("adaptive"), "no policy of steps"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, text: str) -> None:
    """With what to change."""
    with pytest.raises(ValueError, match=text):
        make()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command."""
    return carpool_command("simulate", "--steps", "--duration", "5s", "--seeds", "1", "--jobs", "1", *words, timeout=60)


def test_the_command_prints_a_table_or_json() -> None:
    """One row for each policy, with the figures of docs/steps-policy.md."""
    done = command("--lengths", "exponential:output=10", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert [report["policy"] for report in content["reports"]] == ["paced", "greedy", "static"]
    assert content["cost"].startswith("steps:") and content["reports"][0]["good"] > 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--plot", "x.png"), "--steps does not go with --plot"),
        pytest.param(("--policy", "cork"), "no policy of steps 'cork'; choose from paced, gr", marks=pytest.mark.slow),
        pytest.param(("--cost", "affine:a=1ms,b=1ms"), "no cost of steps 'affine'", marks=pytest.mark.slow),
        pytest.param(("--arrivals", "closed:16"), "needs one open process", marks=pytest.mark.slow),
    ],
)
def test_the_command_says_what_does_not_go(words: tuple[str, ...], text: str) -> None:
    """In one line, with exit status 2."""
    done = command(*words)
    assert done.returncode == 2 and text in done.stderr and done.stderr.count("\n") == 1


def test_two_workers_have_a_set_each() -> None:
    """Together they serve what one cannot."""
    settings: dict[str, Any] = {
        "arrivals": "poisson:rate=60",
        "cost": "steps:a=1ms,b=0s,c=10ms,d=1ms",
        "lengths": "fixed:output=20",
        "slo_s": 0.2,
        "part_slo_s": 0.03,
        "rows": 16,
        "duration_s": 5.0,
    }
    one, two = run_steps("paced", **settings), run_steps("paced", **settings, workers=2)
    assert two.good > 1.3 * one.good and two.refused < 0.1 < one.refused
