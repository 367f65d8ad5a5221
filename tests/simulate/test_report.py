"""The figures, computed by hand for runs of a few requests. One batch takes 4 s, the SLO is 6 s, arrivals last 10 s."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from carpool.simulate import Report, mean_of, run
from carpool.simulate.report import json_text


def few(**settings: Any) -> Report:
    """Four requests at 0, 1, 2, 3 s; greedy in batches of up to two."""
    given: dict[str, Any] = {"arrivals": [0.0, 1.0, 2.0, 3.0], "cost": lambda n: 4.0, "max_batch_size": 2}
    return run("greedy", **{**given, "slo_s": 6.0, "duration_s": 10.0, **settings})


def test_late_answers() -> None:
    """Batches [0], [1 2], [3] end at 4, 8, 12, so latencies are 4, 7, 6, 9; an answer at exactly 6
    s is in time, as two are.
    """
    report = few()

    assert (report.requests, report.served, report.dropped, report.unfinished, report.late) == (4, 4, 0, 0, 2)
    assert (report.throughput, report.goodput, report.attainment) == (0.4, 0.2, 0.5)
    assert (report.mean_s, report.p50_s, report.p99_s) == (6.5, 6.0, 9.0)
    assert report.penalised_mean_s == (4 + 12 + 6 + 12) / 4
    assert report.starvation == 9 / 6
    assert (report.batches, report.mean_batch_size, report.batch_sizes) == (3, 4 / 3, {1: 2, 2: 1})
    assert report.utilisation == 1.0  # of the 10 s; the last 2 s of the third batch are after them
    assert (report.wake_ups, report.fairness) == (0, None)
    assert (report.class_attainment, report.class_ratio) == ({6.0: 0.5}, 1.0)
    assert (report.late_share, report.drop_share) == (0.5, 0.0)


def test_what_comes_while_a_run_settles_is_left_out() -> None:
    """Requests that arrive before the run has settled are served and do not count, and rates are
    those of the time after it.
    """
    report = few(settle_s=2.0)

    assert (report.requests, report.served, report.late) == (2, 2, 1)
    assert (report.throughput, report.goodput, report.mean_s) == (2 / 8, 1 / 8, 7.5)
    assert report.utilisation == 1.0
    with pytest.raises(ValueError, match="settle_s must be less than the 10 s"):
        few(settle_s=10.0)


def test_dropped_requests_cost_two_slos() -> None:
    """A queue of one refuses the third and the fourth request, which cost two SLOs each; latencies
    are 4 and 7.
    """
    report = few(max_queue_size=1)

    assert (report.served, report.dropped, report.drop_share) == (2, 2, 0.5)
    assert (report.goodput, report.attainment) == (0.1, 0.25)
    assert (report.mean_s, report.p50_s, report.p99_s) == (5.5, 4.0, 7.0)
    assert report.penalised_mean_s == (4 + 12 + 12 + 12) / 4
    assert report.utilisation == 0.8


def test_unfinished_requests_are_censored() -> None:
    """A run ends two SLOs after the arrivals, at 3 + 4, and requests unfinished then count with
    what they have waited: one is at work since 0, the other waits since 1.
    """
    report = few(arrivals=[0.0, 1.0], cost=lambda n: 15.0, slo_s=2.0, duration_s=3.0)

    assert (report.served, report.unfinished) == (0, 2)
    assert (report.throughput, report.goodput) == (0, 0)
    assert (report.mean_s, report.penalised_mean_s) == (6.5, 6.5)
    assert report.utilisation == 1.0


def test_penalties_are_at_least_two_slos() -> None:
    """An unfinished request costs at least two SLOs, even if it has not waited so long, and more if
    it has.
    """
    report = few(arrivals=[0.0, 2.0], cost=lambda n: 15.0, slo_s=2.5, duration_s=2.5)  # up to 7.5

    assert report.mean_s == (7.5 + 5.5) / 2
    assert report.penalised_mean_s == (7.5 + 5.5) / 2
    assert few(arrivals=[0.0], cost=lambda n: 7.0).penalised_mean_s == 12


def test_without_an_slo_all_that_is_served_is_good() -> None:
    """Without an SLO all that is served is good: the run goes on for as long again, and what is
    dropped counts as having waited to the end, for 20 s.
    """
    report = few(slo_s=None, max_queue_size=1)

    assert (report.goodput, report.throughput) == (0.2, 0.2)
    assert (report.attainment, report.late) == (0.5, 0)
    assert report.penalised_mean_s == (4 + 7 + 18 + 17) / 4
    assert few(slo_s=None, duration_s=3.5).unfinished == 3  # up to 7.0 only the first batch has ended


def test_classes_of_requests() -> None:
    """Each request has one of the given SLOs with equal chance; here only the long one can be kept."""
    report = few(arrivals="poisson:rate=1", cost=lambda n: 4.0, max_batch_size=64, slo_s=[2.0, 50.0], duration_s=400)

    assert report.class_attainment == {2.0: 0.0, 50.0: 1.0}
    assert report.class_ratio == 0.0
    assert report.attainment == pytest.approx(0.5, abs=0.1)


def test_a_run_without_requests() -> None:
    """A run without requests has those figures that there are."""
    report = few(arrivals=[])

    assert (report.requests, report.goodput, report.attainment, report.utilisation) == (0, 0, 1.0, 0.0)
    assert math.isnan(report.mean_s)
    assert json.loads(report.to_json())["mean_s"] is None


def test_fairness_is_that_of_jain() -> None:
    """Fairness is Jain's: it is 1/2 for two clients of whom the second is never in time, since the
    greedy worker serves the first one alone.
    """
    report = run(
        "greedy",
        "closed:clients=2,think=100s,think=fixed",
        lambda n: 1.0,
        slo_s=1.5,
        max_batch_size=1,
        duration_s=10,
    )

    assert report.requests == 2
    assert report.fairness == 0.5


def test_means_over_seeds() -> None:
    """Over several seeds every figure is the mean, batches are put together, and a figure that one
    run lacks is the others' mean.
    """
    mean = mean_of([few(), few(max_queue_size=1, seed=1), few(arrivals=[], seed=2)])

    assert mean.seeds == (0, 1, 2)
    assert mean.requests == 8 / 3
    assert mean.mean_s == 6.0
    assert mean.batch_sizes == {1: 4, 2: 1}
    assert mean.class_attainment == {6.0: 0.375}
    assert mean.stage_utilisation == (pytest.approx(0.6),)
    assert mean.fairness is None


def test_a_report_as_json() -> None:
    """A report as JSON has all its figures under their names."""
    content = json.loads(few().to_json())

    assert content["goodput"] == 0.2
    assert content["batch_sizes"] == {"1": 2, "2": 1}
    assert content["policy"] == "greedy"
    assert content["late_share"] == 0.5


def test_json_has_no_figure_that_json_cannot_express() -> None:
    """NaN and infinities are null wherever figures are printed as JSON."""
    assert (
        json_text({"load": math.inf, "of": [math.nan, (1.5, -math.inf)]}) == '{"load": null, "of": [null, [1.5, null]]}'
    )
