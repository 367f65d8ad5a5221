"""Graphs in simulations: how often requests come where, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carpool import ForEach, Parallel, Route, Service, Stage
from carpool.simulate import run
from carpool.simulate.command import Options, simulate
from carpool.simulate.costs import StageCosts, costs_by_stage, given_costs, write_costs
from carpool.simulate.graphs import graph_of
from carpool.simulate.report import Report
from carpool.simulate.servers import Servers

PER_ITEM = "affine:a=0s,b=1ms"
DURATION_S = 10.0


def as_it_is(x: Any) -> Any:
    return x


def a_stage(name: str, limit: int = 16, **settings: Any) -> Stage:
    return Stage(as_it_is, name=name, max_batch_size=limit, run_in="thread", **settings)


def a_service() -> Service:
    shared = a_stage("shared")
    return Service(
        a_stage("small"),
        Parallel(shared, [a_stage("branch"), shared]),
        Route({"en": a_stage("english"), "de": [], "fr": a_stage("french")}, choose=as_it_is),
        ForEach(a_stage("each"), a_stage("deep")),
        name="graph",
    )


SETTINGS: dict[str, Any] = {"ways": {"en": 0.6, "de": 0.4}, "early": {"small": 0.25}, "items": [2, 4]}
VISITS = {"small": 1, "shared": 1.5, "branch": 0.75, "english": 0.45, "french": 0, "each": 2.25, "deep": 2.25}


def items_of(report: Report) -> dict[str, float]:
    """How many items each stage had a second, where each costs 1 ms."""
    names = graph_of(a_service()).stages
    return {name: 1000 * share for name, share in zip(names, report.stage_utilisation, strict=True)}


def simulated(policy: str, **settings: Any) -> Report:
    every = {"graph": a_service(), "duration_s": DURATION_S, "slo_s": 1.0, **SETTINGS}
    return run(policy, "poisson:rate=100", PER_ITEM, **{**every, **settings})


def test_each_stage_gets_what_the_shares_say() -> None:
    """A branch, a stage after early answers and the items of lists have as many visits as is said."""
    report = simulated("greedy")
    assert report.served == report.requests
    rate = report.requests / DURATION_S
    found = {name: items / rate for name, items in items_of(report).items()}
    assert {name: pytest.approx(n, rel=0.1, abs=0.001) for name, n in VISITS.items()} == found
    assert dict(zip(graph_of(a_service()).stages, graph_of(a_service(), **SETTINGS).visits, strict=True)) == (
        pytest.approx(VISITS)
    )


def test_an_early_answer_in_a_list_ends_its_request() -> None:
    """One item of a list that is answered early takes the others with it, wherever they wait."""
    report = simulated("greedy", early={"each": 0.5}, items=8)
    found = items_of(report)
    assert found["deep"] < 0.3 * found["each"]
    assert report.served == report.requests


def test_all_policies_meet_the_same() -> None:
    """What branches and lists do to a request does not depend on the policy."""
    first, second = [items_of(simulated(policy)) for policy in ("greedy", "static:3ms")]
    assert first == pytest.approx(second, abs=2.0)  # some are still inside when the time is over


def test_a_load_is_a_share_of_what_the_busiest_stage_can_do() -> None:
    """Of a graph, rho=0.5 makes the stage that limits it busy for half of the time."""
    report = run("greedy", "poisson:rho=0.5", PER_ITEM, graph=a_service(), duration_s=4.0, slo_s=1.0, **SETTINGS)
    assert report.load == pytest.approx(0.5)
    assert max(report.stage_utilisation) == pytest.approx(0.5, rel=0.1)


def test_workers_and_limits_are_those_of_the_stages() -> None:
    """Stages have the workers and batch limits that they are declared with; costs go by their names."""
    service = Service(a_stage("a", 8, workers=3), Route({"x": a_stage("b", 2, workers=(1, 4))}, choose=as_it_is))
    servers = Servers.of({"a": "affine:a=1ms,b=0s", "b": PER_ITEM}, 64, 1, graph_of(service))
    assert (servers.limits, servers.workers) == ((8, 2), (3, 4))
    assert [cost(2) for cost in servers.costs] == [0.001, 0.002]
    assert servers.capacity() == pytest.approx(4000)


@pytest.mark.parametrize(
    "first", [Parallel(a_stage("a"), [a_stage("b"), []]), Route({"a": a_stage("a")}, choose=str), ForEach(a_stage("a"))]
)
def test_a_graph_may_begin_with_branches(first: Any) -> None:
    """What a service begins with may be a graph, and all of its requests are served."""
    report = run("greedy", "poisson:rho=0.5", PER_ITEM, graph=Service(first, name="begins"), duration_s=1.0, slo_s=1.0)
    assert report.served == report.requests > 0


def test_a_full_branch_refuses_its_own() -> None:
    """Behind a route that refuses, a slow branch loses its own requests, and the other none."""
    branches = {"fast": a_stage("fast"), "slow": a_stage("slow", 1, max_queue_size=1)}
    service = Service(a_stage("first"), Route(branches, choose=as_it_is, when_full="refuse"))
    costs = {"first": "affine:a=0s,b=0.1ms", "fast": PER_ITEM, "slow": "affine:a=100ms,b=0s"}
    report = run("greedy", "poisson:rate=100", costs, graph=service, ways={"fast": 0.5}, duration_s=DURATION_S)
    fast = 1000 * report.stage_utilisation[1] * DURATION_S
    assert fast == pytest.approx(report.requests / 2, rel=0.15)
    assert report.dropped == pytest.approx(report.requests - fast - DURATION_S / 0.1, rel=0.15)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ways": {"it": 0.5}}, "ways names a branch 'it'; there are en, de, fr"),
        ({"early": {"large": 0.5}}, "early names a stage 'large'; there are small, "),
        ({"early": {"small": 1.5}}, "early must be shares from 0 to 1, and has 1.5 for 'small'"),
        ({"ways": {"en": 0.7, "de": 0.6}}, "ways of en, de, fr add up to 1.3, and must add up to 1"),
        ({"ways": {"en": 0.1, "de": 0.1, "fr": 0.1}}, "add up to 0.3, and must"),
        ({"items": 0}, "items must be a whole number of at least 1"),
        ({"items": []}, "items must be a number or several"),
        ({"max_batch_size": 8}, "max_batch_size and workers are those of the graph's stages"),
        ({"max_queue_size": 8}, "max_queue_size is that of the graph's stages"),
        ({"graph": None}, "ways, early and items say what happens in a graph: give graph=, too"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], text: str) -> None:
    """Names that there are not, shares that do not fit, and what the stages say themselves."""
    with pytest.raises(ValueError, match=text):
        simulated("greedy", **settings)


def test_costs_go_by_names() -> None:
    """A cost for a stage that there is not, and a stage without a cost, are refused by name."""
    for cost, text in (({"huge": PER_ITEM}, "has no stage 'huge'"), ({"small": PER_ITEM}, "'shared' without a cost")):
        with pytest.raises(ValueError, match=text):
            run("greedy", "poisson:rate=10", cost, graph=a_service())
    stages = ("a", "b")
    assert costs_by_stage(None, "sqrt:c=5ms", stages) == dict.fromkeys(stages, "sqrt:c=5ms")
    assert costs_by_stage(["a=sqrt:c=1ms", "b=sqrt:c=2ms"], "", stages) == {"a": "sqrt:c=1ms", "b": "sqrt:c=2ms"}
    assert costs_by_stage(["affine:a=1ms,b=1ms"], "", stages) == dict.fromkeys(stages, "affine:a=1ms,b=1ms")
    with pytest.raises(ValueError, match="there is no stage 'c'"):
        costs_by_stage(["a=sqrt:c=1ms", "c=sqrt:c=2ms"], "", stages)


def test_costs_of_a_graph_are_for_graphs(tmp_path: Path) -> None:
    """Commands for stages in a row refuse a file of a graph's costs, and say which command takes it."""
    file = tmp_path / "costs.json"
    write_costs(file, "graph", [StageCosts("a", 4, {1: 0.001})], is_line=False)
    with pytest.raises(ValueError, match="has the costs of a graph, service graph: use carpool simulate --service"):
        given_costs([str(file)], "")
    assert costs_by_stage([str(file)], "", ("a",)) == {"a": "table:1=1000us"}


def test_a_model_that_answers_in_parts_is_refused() -> None:
    """A graph with such a stage cannot be simulated yet, and the error names the stage."""

    def words(text: str) -> Any:
        yield from text.split()

    with pytest.raises(ValueError, match="stage words answers in parts"):
        run(graph=Service(Route({"x": Stage(words, run_in="thread")}, choose=as_it_is)))


def test_the_command_simulates_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--service` takes the graph of a program, `--cost` a file by the names of its stages."""
    program = f"from {__name__} import a_service\nservice = a_service()\n"
    (tmp_path / "graph_program.py").write_text(program)
    stages = [StageCosts(name, 16, {1: 0.001, 16: 0.016}) for name in VISITS]
    write_costs(tmp_path / "costs.json", "graph", stages, is_line=False)
    monkeypatch.chdir(tmp_path)
    given = Options(
        service="graph_program:service",
        cost=["costs.json"],
        ways="en=60%,de=0.4",
        early="small=0.25",
        items="2/4",
        arrivals="poisson:rate=100",
        duration="2s",
        policy="greedy",
        seeds=1,
        jobs=1,
        as_json=True,
    )
    simulate(options=given)
    shown = json.loads(capsys.readouterr().out)
    assert shown["graph"] == [*VISITS]
    (report,) = shown["reports"]
    assert report["served"] > 100
    assert dict(zip(VISITS, report["stage_utilisation"], strict=True))["french"] == 0
