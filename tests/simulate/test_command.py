"""`carpool simulate`: help that teaches, a table, JSON, one line for each mistake."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from carpool.cli import add_simulator, cli
from carpool.simulate import Report, run
from carpool.simulate.command import Options, simulate
from carpool.simulate.table import table_of
from tests.effort import slow_where
from tests.support.prepared import carpool_command

add_simulator()

FAST = ("--duration", "1s", "--seeds", "1", "--jobs", "1", "--policy")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return carpool_command("simulate", *arguments, timeout=60)


def test_help_teaches() -> None:
    """`carpool simulate --help` has examples, and every kind of arrivals and costs."""
    text = " ".join(command("--help").stdout.replace("│", " ").split())  # wherever its lines break

    for word in (
        "carpool simulate --arrivals poisson:rate=800 --cost",
        "adaptive, greedy, static:10ms",
        "window:10ms",
        "ray:10ms",
        "triton:10ms",
        "symphony, clockwork, batch",
        "tuned",
        "gamma:",
        "mmpp:",
        "sine:",
        "flash:",
        "bursts:",
        "closed:",
        "tile:",
        "knee:",
        "sqrt:",
        "table:",
        "padded:",
        "sorted:",
        "bimodal:",
        "file:",
        "zipf:",
        "noisy:",
        "drifting:",
        "pareto:",
        "--trace",
        "--plot",
        "--json",
        "--hop",
        "--coordinator",
        "--jobs",
        "--seeds",
    ):
        assert word in text


def test_requests_with_lengths_have_columns_of_their_own() -> None:
    """With lengths the table has the share of padding and the latency of the longest tenth, and says
    what these are.
    """
    given = ("--lengths", "bimodal:short=4,long=100", "--allowed-lengths", "8,128", "--cost", "padded:a=2ms,b=20us")
    printed = command(*given, *FAST, "greedy").stdout

    assert all(
        word in printed for word in ("padding", "long p99", "long in time", "the share of what workers computed")
    )


def test_a_table_on_stdout_and_nothing_else() -> None:
    """On stdout is a table with one row per policy, and what was simulated above it; the progress
    bar is for terminals.
    """
    done = command(*FAST, "greedy,static:10ms,max_queued_batches=10,cork", "--arrivals", "poisson:rho=0.3")

    assert done.returncode == 0
    assert done.stderr == ""
    assert "poisson:rho=0.3 on affine:a=8ms,b=0.25ms, SLO 60ms" in done.stdout
    assert "capacity 2667/s, load 0.30" in done.stdout
    for policy in ("greedy", "static:10ms,max_queued_batches=10", "cork"):
        assert f" {policy} " in done.stdout


def test_tuned_settings_are_below_the_table() -> None:
    """What was found to be best is printed below the table, for each report that has it."""
    short = ("--duration", "200ms", "--seeds", "1", "--jobs", "1")
    done = command(*short, "--policy", "window:2ms,tuned", "--arrivals", "poisson:rho=0.2")

    assert done.stderr == ""
    assert "\ntuned: max_batch_size=" in done.stdout
    assert "max_queue_delay_s=" in done.stdout
    assert " work " in done.stdout
    assert "work: the ms that they worked for each request in time" in done.stdout.replace("\n", " ")


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` has every figure of `run`, and the settings."""
    simulate(
        options=Options(policy="greedy,cork", duration="1s", seeds=1, jobs=1, as_json=True, slo="30ms/120ms", hop="1ms")
    )

    found = json.loads(capsys.readouterr().out)
    expected = run("greedy", duration_s=1, slo_s=(0.03, 0.12), hop_s=0.001).to_dict()
    assert {**found["reports"][0], "seeds": [0]} == expected
    assert [report["policy"] for report in found["reports"]] == ["greedy", "cork"]
    assert (found["slo_s"], found["hop_s"], found["max_queue_size"], found["sweep"]) == ([0.03, 0.12], 0.001, None, [])


def test_several_numbers_in_one_are_told_how_stages_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers with commas are refused with what to write for stages, and for a comparison."""
    for option in ("workers", "max_batch_size"):
        given: dict[str, Any] = {option: ["3,4,5"]}
        with pytest.raises(SystemExit):
            simulate(options=Options(**given))
        flag = "--" + option.replace("_", "-")
        told = capsys.readouterr().err
        assert f"for stages in a row write {flag} 3 4 5, one for each" in told
        assert f"carpool plan {flag} 3,4,5" in told


def test_one_option_takes_a_number_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """`--workers 1 4` is the same as `--workers 1 --workers 4`."""
    _, bound, _ = cli.parse_args(["simulate", "--workers", "1", "4", "--max-batch-size", "8", "16", "--seeds", "1"])
    options = bound.arguments["options"]
    assert (options.workers, options.max_batch_size) == (["1", "4"], ["8", "16"])


def test_stages_workers_and_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is given once more is for the next stage."""
    simulate(
        options=Options(
            policy="greedy",
            cost=["affine:a=1ms,b=0s", "sqrt:c=4ms"],
            workers=["1", "4"],
            max_batch_size=["8", "16"],
            duration="1s",
            slo="none",
            seeds=1,
            jobs=1,
            weights="pareto",
            weights_known=True,
            as_json=True,
        )
    )

    found = json.loads(capsys.readouterr().out)
    assert found["capacity"] == pytest.approx(4000)
    assert len(found["reports"][0]["stage_utilisation"]) == 2


def test_a_trace_is_replayed_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace is replayed to its end, given by its file's name alone or by a spec; with arrivals it
    is joined to them.
    """
    path = tmp_path / "trace.csv"
    path.write_text("t\n" + "".join(f"{t / 10}\n" for t in range(31)))
    requests = []
    for trace, arrivals in ((str(path), None), (f"{path},speed=2", None), (str(path), "poisson:rate=100")):
        simulate(options=Options(policy="greedy", trace=trace, arrivals=arrivals, seeds=1, jobs=1, as_json=True))
        report = json.loads(capsys.readouterr().out)["reports"][0]
        requests.append((report["requests"], round(report["duration_s"], 6)))

    assert requests[:2] == [(31, 3.0), (31, 1.5)]
    assert requests[2][0] > 2000 and requests[2][1] == 30


@slow_where(lambda ending: ending == ".html")
@pytest.mark.parametrize("ending", [".png", ".html"])
def test_a_picture(tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture is drawn of fifteen loads, and the table is printed too."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture{ending}"
    simulate(options=Options(policy="greedy", duration="100ms", seeds=1, jobs=1, plot=path))

    assert path.stat().st_size > 10_000
    assert f"drawn: {path}" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--policy", "gredy"], "there is no policy 'gredy'; choose one of adaptive, aimd"),
        (["--arrivals", "poison"], "there is no arrival process 'poison'"),
        (["--cost", "affine:a=8"], "'8' is not a duration"),
        (["--slo", "60"], "'60' is not a duration: write a number and its unit, such as 8ms"),
        (["--trace", "nowhere.csv"], "cannot read the trace nowhere.csv"),
        (["--plot", "picture.gif"], "picture.gif: the picture's file must end in .png"),
        (["--plot", "nowhere/picture.png"], "there is no folder nowhere"),
        (["--seeds", "0"], "seeds must be at least 1"),
        (["--workers", "1", "--workers", "2"], "workers has 2 entries for 1 stages"),
        (["--weights", "heavy"], "there is no distribution of weights 'heavy'"),
    ],
)
def test_a_mistake_is_one_line(options: Sequence[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake is reported in one line before anything is simulated, with what would be right."""
    with pytest.raises(SystemExit) as left:
        cli(["simulate", "--jobs", "1", *options])
    said = capsys.readouterr().err

    assert left.value.code == 2
    assert said.startswith("carpool: ")
    assert told in said
    assert said.count("\n") == 1


def marked(*reports: Report) -> list[str]:
    """The rows of the table, without what is not marked."""
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(table_of(reports))
    return [" ".join(cell for cell in line.split() if cell.endswith("*")) for line in capture.get().splitlines()[3:-1]]


def test_the_best_of_each_column_is_marked() -> None:
    """The best of each column is marked, latencies only among policies with about the best goodput:
    whoever drops half of the requests is fast.
    """
    report = run("greedy", duration_s=1)
    slow = replace(report, goodput=100.0, mean_s=0.020, p50_s=0.019, p99_s=0.030, penalised_mean_s=0.020)
    fair = replace(slow, goodput=99.5, mean_s=0.018)
    lossy = replace(slow, goodput=50.0, mean_s=0.001, p50_s=0.001, p99_s=0.001, penalised_mean_s=0.060)

    assert marked(slow, fair, lossy) == ["100.0* 19.0* 30.0* 20.0*", "18.0* 19.0* 30.0* 20.0*", ""]
    assert marked(slow, slow) == ["", ""]
    assert marked(slow) == [""]
