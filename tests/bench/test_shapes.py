"""The bench of composition by length: its workloads, the rules of others, and the oracle."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.shapes import oracle
from bench.shapes.__main__ import run_all
from bench.shapes.oracle import Item, least_loss
from bench.shapes.rules import PLAIN, PLAIN_BACK, RULES, Infinity, PlainOrder, PlainOrderBack, in_kind, names_of
from bench.shapes.tables import case_table, kind_table, ratios
from bench.shapes.workloads import KINDS, Kind, Workload, case, draw, load
from carpool.simulate import run
from carpool.simulate.costs import cost_of


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace with a few lengths."""
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens\n" + "".join(f"{i},{length}\n" for i, length in enumerate([5, 50, 500])))
    return path


@pytest.mark.parametrize(("kind", "count"), [("closed", 35), ("open", 40), ("slo", 60)])
def test_the_workloads_of_the_report(kind: Kind, count: int, trace: Path) -> None:
    """There are 35 closed loops, 40 open ones and 60 with an SLO, each with a name of its own."""
    workloads = load(kind, trace)

    assert len({w.name for w in workloads}) == len(workloads) == count
    assert all((w.settings["slo_s"] is not None) == (kind == "slo") for w in workloads)
    assert len(load(kind, None)) == count * 4 // 5  # without the trace


def test_random_workloads_are_those_of_their_text() -> None:
    """The same text draws the same workloads, all kinds among them, and another one draws others."""
    drawn = draw(3, "a")

    assert draw(3, "a") == drawn != draw(3, "b")
    assert {w.kind for w in drawn} <= set(KINDS)


def few(policy: PlainOrder | Infinity, slo_s: float | None = None) -> list[tuple[float, int]]:
    """Five requests at once, with lengths 9, 1, 8, 2, 3, served in batches of two: the latencies of
    the lengths up to 1, 2, 4, 8 and 16.
    """
    lengths = oracle.InOrder([9, 1, 8, 2, 3])
    given = {"cost": "padded:a=1s,b=1s", "max_batch_size": 2, "duration_s": 100, "lengths": lengths}
    report = run(policy, arrivals=[0.0] * 5, slo_s=slo_s, **given)
    return [(report.attainment, 0)] if slo_s else [(s, n) for n, s in report.length_p99_s.items()]


def test_plain_order_is_first_come_first_served() -> None:
    """Plain order takes batches from the head, whatever their lengths are."""
    assert few(PlainOrder(cost_of("padded:a=1s,b=1s"), 2)) == [(19, 1), (36, 2), (40, 4), (36, 8), (19, 16)]


def test_plain_order_refuses_a_head_that_would_be_late() -> None:
    """Plain order refuses the first in line while its batch would be late, and then goes on."""
    assert few(PlainOrder(cost_of("padded:a=1s,b=1s"), 2), slo_s=18) == [(0.4, 0)]


@pytest.mark.parametrize(("rule", "size"), [(PlainOrder, 2.0), (PlainOrderBack, 4.0)])
def test_clients_may_be_back_before_the_next_batch(rule: type[PlainOrder], size: float) -> None:
    """Four clients that ask again at once make two groups, or one if the next batch waits for them."""
    clients = "closed:clients=4,think=0s,think=fixed"
    given = {"cost": "padded:a=1s,b=1s", "max_batch_size": 4, "duration_s": 400, "lengths": "fixed:input=1"}
    report = run(rule(cost_of("padded:a=1s,b=1s"), 4), arrivals=clients, slo_s=None, **given)
    assert report.mean_batch_size == pytest.approx(size, abs=0.1)
    assert in_kind("open", [PLAIN, PLAIN_BACK]) == [PLAIN]


def test_the_case_without_noise_has_a_line_for_each_rule() -> None:
    """The case is a closed loop of 64 clients; its table has the figures themselves."""
    whole = case()
    short = Workload(whole.name, whole.kind, {**whole.settings, "duration_s": 0.5, "settle_s": 0.1})
    with ThreadPoolExecutor(1) as pool:
        lines = case_table(run_all(pool, [short], [PLAIN], 1), short, [PLAIN]).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("| plain order |")
    assert "noisy" not in whole.settings["cost"]


def test_infinity_sorts_its_head_and_runs_all_of_it() -> None:
    """Infinity's rule runs what it has sorted in batches of its size, shortest first."""
    assert few(Infinity(cost_of("padded:a=1s,b=1s"), 2, 2)) == [(5, 1), (5, 2), (22, 4), (22, 8), (32, 16)]


def test_the_least_loss_by_hand() -> None:
    """The oracle serves the short one first if that pays, waits for one that comes soon if that
    pays, and with an SLO gives up as few as it must.
    """
    cost = cost_of("padded:a=1s,b=1s")

    assert least_loss([Item(0, 1), Item(0, 9)], cost, float("inf")) == 2 + 12
    assert least_loss([Item(0, 1), Item(0, 1)], cost, float("inf")) == 3 + 3
    assert least_loss([Item(0, 9), Item(0.1, 1)], cost, float("inf")) == pytest.approx(2 + 12.1)
    assert least_loss([Item(0, 1), Item(0, 9)], cost, 12.0) == 0
    assert least_loss([Item(0, 5), Item(0, 9)], cost, 10.0) == 1


def test_rules_are_named_by_how_they_begin() -> None:
    """What is no name of a rule stands for every rule that begins so."""
    assert names_of("plain;Infinity;carpool") == [PLAIN, PLAIN_BACK, "Infinity, 8", "Infinity, 32", "carpool"]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_have_a_line_for_each_rule(kind: Kind) -> None:
    """Every rule serves every kind of workload, and its table sets it beside plain order."""
    (workload, *_) = load(kind, None, "cv1 padded")
    short = Workload(workload.name, kind, {**workload.settings, "duration_s": 0.3, "settle_s": 0.1})
    with ThreadPoolExecutor(1) as pool:
        results = run_all(pool, [short], list(RULES), 1)
    text = kind_table(kind, results, [short], list(RULES), PLAIN)

    assert len(text.splitlines()) == 2 + len(RULES) - 1
    assert ratios(results, [short], PLAIN, PLAIN, "throughput").mean == 1.0
