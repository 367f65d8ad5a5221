"""The bench of the policies: its data, what it remembers, and what its tables count."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest

from bench.policies import ablation, neighbours, scaling, scenarios, sets
from bench.policies import runs as policy_runs
from bench.policies.coordinator import HEADER, Seen, cells, fitted, simulated
from bench.policies.coordinator import Case as RealCase
from bench.policies.runs import Case, Row, Runs
from bench.policies.tables import (
    Means,
    ahead_table,
    best_of,
    figures_table,
    hindsight_table,
    summary_table,
    workload_table,
)
from bench.policies.workloads import GROUPS, Workload, load
from bench.tools.docs import DOCS, END, marker, page_of, write
from carpool.engine.policy import Adaptive, clients, cost
from carpool.simulate import Affine, Coordinator, Noisy, Report, run
from carpool.simulate.contestants import CONTESTANTS

SETTINGS = {"cost": "affine:a=8ms,b=0.25ms", "max_batch_size": 8, "arrivals": "poisson:rho=0.5", "slo_s": 0.06}


def means(goodput: float, mean_s: float = 0.01) -> Means:
    return Means(goodput=goodput, mean_s=mean_s, p99_s=2 * mean_s, penalised_mean_s=mean_s)


def test_there_are_119_workloads_and_each_can_be_run() -> None:
    """All 119 workloads of all groups have names of their own, and each goes through the simulator
    for a moment.
    """
    workloads = load()

    assert len({workload.name for workload in workloads}) == 119
    assert {workload.group for workload in workloads} == set(GROUPS)
    for workload in workloads:
        assert run("greedy", **{**workload.settings, "duration_s": 0.05}).duration_s == 0.05


def test_the_other_sets_can_be_run() -> None:
    """A dozen workloads have a busy coordinator, others are those in which rivals were ahead or batches go
    ahead; all have names of their own, and go through the simulator for a moment.
    """
    found = sets.named("usual,busy,rivals,ahead,near:abc*10,random:abc*5")

    assert {name: len(workloads) for name, workloads in found.items()} == {
        "usual": 119,
        "busy": 12,
        "rivals": 10,
        "ahead": 80,
        "near:abc*10": 10,
        "random:abc*5": 5,
    }
    for name, workloads in found.items():
        for workload in workloads[:: 8 if name == "ahead" else 1] if name != "usual" else ():
            is_busy = "coordinator" in workload.settings
            report = run("greedy", **{**workload.settings, "duration_s": 0.002 if is_busy else 0.05})
            assert (report.coordinator_utilisation is not None) == is_busy
    assert sets.named("near:abc*10") == {"near:abc*10": found["near:abc*10"]}
    assert sets.named("near:abd*10")["near:abd*10"][0].settings != found["near:abc*10"][0].settings
    assert {workload.name.split()[1] for workload in found["near:abc*10"]} == set(neighbours.KINDS)
    assert list(sets.named("usual,busy", "trivial N1$")) == ["busy"]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("busier", "there is no set busier; choose from usual"),
        ("near:x*y", "no set"),
        ("near", "no set"),
        ("busy,near:a*5,near:a*9", "two workloads have the name N overload a/0"),
    ],
)
def test_sets_that_there_are_not(names: str, told: str) -> None:
    """A set that there is not is refused with those that there are, and so are workloads of one name."""
    with pytest.raises(ArgumentTypeError, match=told):
        sets.named(names)


def test_scenarios_follow_from_their_seed_alone() -> None:
    """The same text draws the same scenarios and another one others; all of them can be run and
    have requests to serve.
    """
    drawn = scenarios.draw(30, "abc")

    assert scenarios.draw(30, "abc") == drawn
    assert scenarios.draw(30, "abd") != drawn
    assert {workload.settings["arrivals"].partition(":")[0] for workload in drawn} == {
        "poisson",
        "mmpp",
        "flash",
        "closed",
        "bursts",
    }
    for workload in drawn:
        short = {**workload.settings, "duration_s": workload.settings["duration_s"] / 50}
        assert run("greedy", **short).requests > 0


@pytest.mark.slow
def test_a_run_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with the same seed and sources is made once, also across programs and after a line that
    was cut off. Sources that change while we run are not what is in memory, so nothing may be
    remembered by them.
    """
    made: list[int] = []
    simulate = policy_runs.simulate
    monkeypatch.setattr(policy_runs, "simulate", lambda case: made.append(case.seed) or simulate(case))
    path = tmp_path / "runs.jsonl"
    settings = {**SETTINGS, "duration_s": 0.5}
    first = Runs(path, 1).rows([Case("greedy", settings, 0), Case("greedy", settings, 1)], "")
    path.write_text(path.read_text() + '{"key": "cut o')

    again = Runs(path, 1).rows([Case("greedy", settings, seed) for seed in (1, 2, 0)], "")

    assert made == [0, 1, 2]
    assert [again[2], again[0]] == first
    monkeypatch.setattr(policy_runs, "_fingerprint", lambda module: "changed")
    with pytest.raises(SystemExit, match="sources have changed"):
        Runs(path, 1).rows([Case("greedy", settings, 3)], "")
    monkeypatch.setattr(policy_runs, "sources", lambda module: "changed")
    Runs(path, 1).rows([Case("greedy", settings, 0)], "")
    assert made == [0, 1, 2, 0]


def test_the_sources_of_a_policy_are_its_own_and_the_simulators() -> None:
    """A change of one policy does not make the runs of another again, and one of the core makes all
    of them.
    """
    source = {
        name: policy_runs._source(name) for name in ("carpool.engine.policy.greedy", "carpool.engine.policy.cork")
    }

    assert source["carpool.engine.policy.greedy"] != source["carpool.engine.policy.cork"] != ""
    reached = set(policy_runs._imports("carpool.simulate.engine"))
    assert "carpool.engine.core.core" in reached
    assert not any(
        name.startswith("carpool.engine.policy.") and name != "carpool.engine.policy.base" for name in reached
    )
    assert policy_runs.sources("carpool.engine.policy.greedy") != policy_runs.sources("carpool.engine.policy.cork")
    assert Case("ray", {}, 0).key != Case("window", {}, 0).key
    assert "carpool.simulate.contestants" in policy_runs.SKIP
    assert not any(name.startswith("carpool.simulate.contestants.") for name in reached)


def test_words_about_the_code_change_no_figure() -> None:
    """Comments, docstrings and line breaks may change without making runs again; a number may not."""
    code = 'def f(x):\n    """Halve."""\n    return x / 2\n'
    reworded = 'def f(x):\n    """One half\n\n    of it."""\n    return (\n        x / 2  # why\n    )\n'

    assert policy_runs._code(code) == policy_runs._code(reworded)
    assert policy_runs._code(code) != policy_runs._code(code.replace("2", "3"))


@pytest.mark.parametrize("training", ["warm", "known"])
def test_a_trained_policy_knows_the_cost(training: str) -> None:
    """A policy that is trained knows the cost at least of the smallest and of the largest batch
    before its first request.
    """
    policy = policy_runs.trained("adaptive", training, SETTINGS)

    assert isinstance(policy, Adaptive)
    assert [policy.cost.seconds(n) for n in (1, 8)] == pytest.approx([0.00825, 0.010], rel=0.02)


def test_ours_is_set_beside_the_best_of_the_rivals() -> None:
    """Ours is set beside the rival with the best goodput; latency is compared only with those whose
    goodput is as good, and only if ours is too.
    """
    results = {
        ("w", "adaptive"): means(99.5, 0.02),
        ("w", "greedy"): means(100.0, 0.025),
        ("w", "cork"): means(50.0, 0.001),
        ("v", "adaptive"): means(80.0),
        ("v", "greedy"): means(100.0),
        ("v", "cork"): means(0.0),
    }

    level, worse = best_of("w", ["greedy", "cork"], results), best_of("v", ["greedy", "cork"], results)

    assert (level.goodput, level.latency) == (pytest.approx(0.995), pytest.approx(0.8))
    assert (worse.goodput, worse.latency) == (pytest.approx(0.8), None)


def test_the_summary_counts_what_is_better_level_and_worse() -> None:
    """The summary counts what is better, level and worse by 1 %, names the worst, and has geometric
    means; without an SLO there is no penalised mean.
    """
    workloads = [Workload(name, {"slo_s": slo_s}) for name, slo_s in (("a", 1.0), ("b", 1.0), ("c", None))]
    results = {
        ("a", "adaptive"): means(200.0, 0.01),
        ("a", "cork"): means(100.0, 0.02),
        ("b", "adaptive"): means(98.0, 0.02),
        ("b", "cork"): means(100.0, 0.02),
        ("c", "adaptive"): means(100.5, 0.01),
        ("c", "cork"): means(100.0, 0.09),
    }

    line = summary_table(workloads, ["adaptive", "cork"], results).splitlines()[-1]

    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["cork", "1", "1", "1", "-2.0 %", "b", "1.254", "1", "1", "0", "0.707"]


def test_contestants_are_set_beside_ours_in_all_figures() -> None:
    """Each other policy has geometric means of its figures over ours, and where it is best; what has
    no good answer has no worker-seconds for one.
    """
    workloads = [Workload(name, {"slo_s": 1.0}) for name in ("a", "b")]
    results = {
        ("a", "adaptive"): Means(100.0, 0.01, 0.02, 0.01, 0.001),
        ("a", "ray"): Means(110.0, 0.01, 0.08, 0.04, 0.002),
        ("b", "adaptive"): Means(100.0, 0.01, 0.02, 0.01, 0.001),
        ("b", "ray"): Means(0.0, 0.01, 0.02, 0.01),
    }

    line = figures_table(workloads, ["adaptive", "ray"], results).splitlines()[-1]

    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["ray", "0.010", "1", "1", "-100.0 %", "+10.0 %", "a", "2.000", "2.000", "2.000"]


def test_where_another_policy_is_ahead() -> None:
    """Where others answer over 2 % more in time, they are listed, the one that is furthest ahead first, with
    what that took; nobody has `tuned`.
    """
    workloads = [Workload(name, {"slo_s": 1.0}) for name in ("a", "b", "c")]
    ours = Means(100.0, 0.01, 0.02, 0.01, 0.002)
    results = {(name, "adaptive"): ours for name in "abc"}
    results |= {(name, "tuned"): Means(200.0, 0.01, 0.02, 0.01, 0.001) for name in "abc"}
    results |= {("a", "ray"): Means(102.5, 0.01, 0.01, 0.02, 0.001), ("b", "ray"): Means(104, 0.01, 0.02, 0.01, 0.001)}
    results["c", "ray"] = Means(101.9, 0.01, 0.02, 0.01, 0.001)

    lines = ahead_table(workloads, ["adaptive", "ray", "tuned"], results).splitlines()

    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:4]] == [
        ["b", "ray", "1.040", "1.000", "1.000", "0.500"],
        ["a", "ray", "1.025", "2.000", "0.500", "0.500"],
    ]
    assert lines[-1] == "2 of 3 workloads: another policy is ahead by more than 2 %."
    assert ahead_table(workloads, ["adaptive", "tuned"], results).startswith("0 of 3")


def test_a_cell_has_the_busy_share_of_the_coordinator() -> None:
    """The figures of a workload with a busy coordinator end with its busy share, the mean over the seeds."""
    (busy,) = load("trivial N1$", "busy")
    short = {**busy.settings, "duration_s": 0.05}
    rows = [Row.of("greedy", policy_runs.simulate(Case("greedy", short, seed))) for seed in (0, 1)]
    found = Means.of(rows)
    table = workload_table([busy], ["greedy"], {(busy.name, "greedy"): found})

    assert found.coordinator == pytest.approx(sum(row.coordinator_utilisation or 0.0 for row in rows) / 2)
    assert 0.2 < found.coordinator < 0.8
    assert table.splitlines()[-1].endswith(f" / {found.coordinator:.2f} |")
    assert policy_runs.chosen("greedy,contestants") == ["greedy", *CONTESTANTS]


def test_each_mechanism_that_is_switched_off_is_there() -> None:
    """The ablation replaces rules by their names, each of which the policy has."""
    for off in ablation.PARTS.values():
        policy = Adaptive(8)
        off(policy)
        lengths = ablation._by_length(policy)
        parts = (policy, policy.arrivals, policy.gather, policy.inside, policy.cost, policy.cost.way, policy._sizes)
        for part in (*parts, lengths, lengths.cost, lengths._composer):
            replaced = [name for name, value in vars(part).items() if callable(value)]
            assert all(hasattr(type(part), name) for name in replaced), replaced


@pytest.mark.slow
def test_each_mechanism_can_be_switched_off() -> None:
    """The ablation can run workloads without each of the mechanisms, which are all as before afterwards."""
    plain, keys = [each.shortened(0.02) for each in ablation.own("cv1 padded N16")]
    before = ablation.simulate((plain, "", 0))

    for part in [*ablation.PARTS, *ablation.FUNCTIONS]:
        ablation.simulate((keys, part, 0))
    assert ablation.simulate((plain, "lengths", 0)).goodput < 0.9 * before.goodput
    assert ablation.simulate((plain, "", 0)) == before


def test_each_constant_can_be_changed() -> None:
    """Each constant of the policy is halved and doubled wherever it is used, and is as before afterwards."""
    names = ablation.constants()

    assert {"cost.KEEP half", "clients._GRID twice", "adaptive._PATIENCE half"} <= set(names)
    assert ablation.scaled({"a": (8.0, 0.25)}, 0.5) == {"a": (4.0, 0.125)}
    assert ablation.scaled(0.95, 2.0) == pytest.approx(0.975)
    for name in names:
        with ablation.changed(name):
            assert ablation.constants() == names
    with ablation.changed("cost.KEEP half"):
        assert cost.KEEP == clients.KEEP == pytest.approx(0.9)
    assert cost.KEEP == clients.KEEP == 0.95


def test_ours_is_set_beside_the_best_settings_in_hindsight() -> None:
    """Each set of workloads and all of them have a line, and those where tuned is furthest ahead come below."""
    workloads = [Workload(name, {}) for name in "abcd"]
    ours = [100.0, 103.0, 97.0, 90.0]
    results = {(w.name, "adaptive"): means(goodput) for w, goodput in zip(workloads, ours, strict=True)}
    results |= {(w.name, "tuned"): means(100, 0.02) for w in workloads}
    lines = hindsight_table({"x": workloads[:2], "y": workloads[2:]}, results, shown=2).splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    assert found[2] == ["x", "2", "1.015", "0", "0", "1", "0", "0.500"]
    assert found[4] == ["all", "4", "0.974", "1", "2", "1", "0", "0.500"]
    assert found[-2:] == [["d", "0.900", "0.500"], ["c", "0.970", "0.500"]]


def in_time(attainment: float, worker_s: float) -> Report:
    """What came of some rule of scaling."""
    report = run("greedy", duration_s=0.05)
    return replace(report, attainment=attainment, worker_s=worker_s)


def test_rules_of_scaling_are_compared_at_equal_goodput() -> None:
    """Of each family of rules the one is shown that takes the fewest worker-seconds and answers as many in
    time, or the one that answers most if none does.
    """
    rules = [rule for grid in [scaling.RULES.values(), *scaling.GRIDS.values()] for rule in grid]
    reports = {("day", rule): in_time(0.5, 50) for rule in rules}
    reports["day", scaling.OURS] = in_time(0.99, 100)
    reports["day", ("ongoing:32", scaling.RANGE)] = in_time(0.995, 140)
    reports["day", ("ongoing:64", scaling.RANGE)] = in_time(0.9895, 120)
    reports["day", ("symphony:1.8", scaling.RANGE)] = in_time(0.98, 70)
    lines = scaling.traffic_table(["day"], reports).splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]

    assert [row[:2] for row in found[2:4]] == [
        ["day: best: requests inside / 64", "98.95%"],
        ["day: best: Symphony's target sizes × …, none as good", "98.00%"],
    ]
    assert [row[4] for row in found] == ["1.00", "0.50", "1.20", "0.70", "0.50"]


def test_symphony_plans_with_batches_in_turn() -> None:
    """Its number of workers is the least of which batches in turn carry the rate, each within the SLO."""
    rule = scaling.by_symphony(2.0, 0.301, "affine:a=80ms,b=2.5ms")

    # of one worker batches of 28 in 150 ms, of two of 48 in 200 ms, of three of 58 in 225 ms, of more 64 in 240 ms
    assert [rule(rate) for rate in (0, 93, 94, 239, 241, 500)] == [1, 1, 2, 2, 3, 4]


def test_traffics_of_scaling_can_be_run() -> None:
    """Each traffic goes through the simulator, and ten times as fast with ten times the requests."""
    for name in scaling.TRAFFIC:
        task = scaling.Task("greedy", name, scaling.OURS, 1, False)
        plain, fast = (scaling.run(replace(task, is_fast=is_fast), 0.5) for is_fast in (False, True))
        assert 6 * plain.requests < fast.requests < 16 * plain.requests
    assert scaling.tenfold("mmpp:rates=1.5/20,mean_dwell=3s/6s+flash:rate=0,peak_rate=30,between=0.1/0.2") == (
        "mmpp:rates=15/200,mean_dwell=3s/6s+flash:rate=0,peak_rate=300,between=0.1/0.2"
    )


@pytest.mark.parametrize("policy", ["window", "symphony", "tuned"])
def test_contestants_take_part_if_they_are_named(policy: str) -> None:
    """A contestant is no policy of the default table, and is run where it is named."""
    row = Row.of(policy, policy_runs.simulate(Case(policy, {**SETTINGS, "duration_s": 0.1}, 0)))

    assert policy not in policy_runs.SPECS
    assert policy_runs.chosen(f"{policy},nobody") == [policy]
    assert row.goodput > 0
    assert row.worker_s_per_good > 0


def test_the_work_of_a_coordinator_is_found_again() -> None:
    """Work for requests and batches follows from runs with batches of several sizes, and is never
    negative; where all batches have one size, it all counts as work for requests.
    """
    runs = [(64e3, 1e3), (16e3, 1e3), (3e3, 3e3), (8e3, 2e3)]

    assert fitted([(n, b, 12e-6 * n + 63e-6 * b) for n, b in runs]) == pytest.approx((12e-6, 63e-6))
    assert fitted([(n, b, 63e-6 * b) for n, b in runs]) == pytest.approx((0.0, 63e-6), abs=1e-12)
    assert fitted([(n, b, 12e-6 * n - 5e-6 * b) for n, b in runs])[1] == 0.0
    assert fitted([(4.0 * b, b, 8.0 * b) for b in (1e3, 2e3)]) == (2.0, 0.0)


def test_real_runs_are_set_beside_simulated_ones() -> None:
    """A line of the table has rates, rates a core of the service, and mean batches, real and simulated."""
    case = RealCase("greedy", 4, 16, [Seen(4000, 1000, 2000.0, 0.5, 0.1, 2.0)])
    reports = simulated(case, Coordinator(), Noisy(Affine(10e-6, 0.25e-6), 0.2), 0.05)
    line = cells(case, reports)

    assert len(line) == len(HEADER)
    assert line[:2] == ["batches of 4, 16", "2000"]
    assert (line[3], line[6]) == ("8000", "4.0")
    assert 1.0 <= float(line[4]) / float(line[2]) < 1.1
    assert 3.0 < float(line[7]) <= 4.0


def test_sections_are_written_between_their_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sections are written between their markers and nowhere else, and a section without a place is
    reported.
    """
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- bench: table -->\nold\n<!-- end -->\nb\n<!-- bench: other -->\nkept\n<!-- end -->\n")

    write({"table": r"| \1 |", "nowhere": "x"}, tmp_path)

    assert page.read_text() == (
        "a\n<!-- bench: table -->\n| \\1 |\n<!-- end -->\nb\n<!-- bench: other -->\nkept\n<!-- end -->\n"
    )
    assert "has a place for nowhere" in capsys.readouterr().err


def test_the_docs_have_a_place_for_every_section() -> None:
    """The docs have a place for every section, so that no figure of a long run is lost."""
    text = "".join(page.read_text() for page in DOCS.glob("*.md"))

    sections = ("summary", "best", "latency", "clairvoyant", "random", "trace", "ablation", "limits")
    sections += ("calibration", "overload", "busy", "busy-figures", "rivals-figures", "ahead-figures", "tuned")
    for name in (*sections, "scaling", "scaling-traffic"):
        assert text.count(f"{marker(name)}\n") == 1
        page = page_of(name)
        assert page is not None
        assert END in page.read_text().partition(marker(name))[2]
