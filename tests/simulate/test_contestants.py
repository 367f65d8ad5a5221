"""The rules of other systems in the simulator: what each of them does, in a few requests, and what holds for all."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from carpool.engine.policy import BY_NAME
from carpool.simulate import Report, compare, run
from carpool.simulate.contestants import CONTESTANTS
from carpool.simulate.contestants.batch import SelfTuned
from carpool.simulate.contestants.clockwork import Clockwork
from carpool.simulate.contestants.ray import Ray
from carpool.simulate.contestants.symphony import Symphony
from carpool.simulate.contestants.triton import Triton
from carpool.simulate.contestants.tuned import GRID, Tuned
from carpool.simulate.contestants.window import Window
from carpool.simulate.policies import SIMULATED
from carpool.testing import check_policy
from carpool.testing.policy import MakePolicy
from tests.effort import share


def line(n: float) -> float:
    return 0.008 + 0.001 * n


MADE: list[MakePolicy] = [
    Window,
    Ray,
    Triton,
    functools.partial(Triton, preferred_batch_sizes=(2, 3)),
    functools.partial(Symphony, cost_s=line),
    functools.partial(Symphony, cost_s=line, learns=True),
    functools.partial(Clockwork, cost_s=line),
    functools.partial(SelfTuned, cost_s=line, slo_s=0.06),
    lambda limit, delay_s: Tuned(limit, 0.5, 0.25, cost_s=line, slo_s=0.06),
]


@pytest.mark.parametrize("make", MADE)
def test_whatever_happens(make: MakePolicy) -> None:
    """A contestant keeps the contract of every policy, also where workers die, callers leave, and
    requests have sizes, priorities and keys.
    """
    check_policy(make, schedules=share(200))


def test_names_are_those_of_no_policy_of_a_service() -> None:
    """A contestant's name means nothing else, and a service can choose none of them."""
    assert set(CONTESTANTS) == {"window", "ray", "triton", "symphony", "clockwork", "batch", "tuned"}
    assert not set(CONTESTANTS) & set(BY_NAME)


def test_an_unknown_name_is_answered_with_all_names() -> None:
    """The error for a name that means nothing lists the policies of services and the contestants."""
    with pytest.raises(ValueError, match="there is no policy 'mosec'; choose one of") as caught:
        run("mosec", duration_s=1)

    assert all(name in str(caught.value) for name in SIMULATED)


@pytest.mark.parametrize("policy", CONTESTANTS)
@pytest.mark.parametrize(
    "settings",
    [
        {"arrivals": "poisson:rho=1.3", "workers": 2},
        {"arrivals": "closed:clients=90+gamma:rho=0.2,cv=3", "slo_s": None},
        {"arrivals": "poisson:rho=0.7", "cost": ["affine:a=8ms,b=0.25ms", "affine:a=4ms,b=0.5ms"]},
        {"arrivals": "poisson:rho=0.5", "keys": 3, "workers": "1-3"},
        {"arrivals": "poisson:rho=0.5", "lengths": "lognormal", "cost": "padded:a=2ms,b=20us", "max_padded_size": 400},
        {"arrivals": "poisson:rho=0.5", "weights": "pareto", "weights_known": True},
    ],
    ids=lambda settings: " ".join(name for name in settings if name != "arrivals"),
)
def test_nobody_is_lost(policy: str, settings: dict[str, Any]) -> None:
    """With any contestant each request is served, dropped or unfinished, in every kind of run."""
    report = run(policy, **{"duration_s": 0.2, **settings})

    assert report.requests == report.served + report.dropped + report.unfinished
    assert report.served > 0
    assert max(report.batch_sizes) <= 64


def few(policy: str, arrivals: list[float], **settings: Any) -> Report:
    """A few requests; a batch of n takes 4 + n seconds."""
    given: dict[str, Any] = {"cost": lambda n: 4.0 + n, "slo_s": None, "max_batch_size": 4, "duration_s": 32.0}
    return run(policy, arrivals, **{**given, **settings})


def test_a_window_opens_when_a_worker_takes_the_first_request() -> None:
    """The first one waits from 0 to 2 and runs until 8. The second, which came at 1, shares its
    batch. The third, which came at 3, is taken at 8 and held until 10, though it has waited for
    longer than the delay by then.
    """
    report = few("window:2s", [0.0, 1.0, 3.0])

    assert report.batch_sizes == {1: 1, 2: 1}
    assert report.mean_s == ((8 - 0) + (8 - 1) + (10 + 5 - 3)) / 3


def test_a_window_closes_when_the_batch_is_full() -> None:
    """Nothing is held back once a batch is full."""
    assert few("window:9s", [0.0, 1.0, 2.0, 3.0]).mean_s == (11 + 10 + 9 + 8) / 4


def test_a_sealed_batch_grows_no_more() -> None:
    """Ray's replica seals a batch every 2 s while it computes, from 2 to 7, and so has to run four
    batches where one would have been enough for the last three.
    """
    report = few("ray:2s", [0.0, 2.5, 5.0, 7.5])

    assert report.batch_sizes == {1: 4}
    assert few("window:2s", [0.0, 2.5, 5.0, 7.5]).batch_sizes == {1: 1, 3: 1}
    assert report.mean_s == (7 + 9.5 + 12 + 14.5) / 4


def test_a_replica_serves_its_own_requests_only() -> None:
    """With two of Ray's replicas each has a queue, and a request that waits for one of them does
    not go to the other one when that is idle first.
    """
    both = few("ray:0s", [0.0, 0.0, 0.0], max_batch_size=1, workers=2)
    shared = few("greedy", [0.0, 0.0, 0.0], max_batch_size=1, workers=2)

    assert both.mean_s == shared.mean_s == (5 + 5 + 10) / 3
    crowd = [0.01 * i for i in range(60)]
    assert few("ray:0s", crowd, workers=3, duration_s=300.0).mean_s > 1.1 * few("greedy", crowd, workers=3).mean_s


def test_triton_waits_for_a_preferred_size_and_no_longer() -> None:
    """Two preferred requests go at once, and a lone one goes when its delay is over."""
    preferred = "triton:3s,preferred_batch_sizes=2"

    assert few(preferred, [0.0, 1.0]).mean_s == (7 + 6) / 2
    assert few(preferred, [0.0]).mean_s == 3 + 5


def test_a_payload_of_triton_grows_until_it_is_taken() -> None:
    """While the worker is busy with the first request, the second one becomes ready after its delay,
    and the third one joins it.
    """
    assert few("triton:1s", [0.0, 2.0, 4.0]).batch_sizes == {1: 1, 2: 1}


def test_symphony_defers_a_batch_until_it_cannot_grow() -> None:
    """With an SLO of 10 s a request that came at 0 could still share a batch of two that starts at
    4, and goes then. With no SLO nothing is deferred.
    """
    assert few("symphony", [0.0], slo_s=10.0).mean_s == 4 + 5
    assert few("symphony", [0.0, 3.0], slo_s=10.0).batch_sizes == {2: 1}
    assert few("symphony", [0.0]).mean_s == 5


def test_clockwork_takes_what_the_first_request_has_time_for_and_refuses_the_hopeless() -> None:
    """Four wait at 5, when the first is done. The one that came at 1 has 7 s left, which is
    enough for a batch of two, in which the next one goes; the two others could be done at 16
    at the earliest and were due before that.
    """
    report = few("clockwork", [0.0, 1.0, 1.25, 1.5, 1.75], slo_s=11.0)

    assert report.batch_sizes == {1: 1, 2: 1}
    assert (report.served, report.dropped, report.late) == (3, 2, 0)


def test_batch_tunes_itself() -> None:
    """After its first tuning BATCH holds back nothing at a low load, where it has held requests back
    for 10 ms before.
    """
    settings: dict[str, Any] = {"arrivals": "poisson:rate=20", "duration_s": 20}
    before, after = run("batch:60s", **settings), run("batch:1s", settings["arrivals"], duration_s=20, settle_s=1.5)

    assert before.p50_s == pytest.approx(0.010 + 0.00825)
    assert after.p50_s == pytest.approx(0.00825)


def test_tuned_is_the_best_of_its_grid() -> None:
    """The best point of the grid is reported with its settings, with which a static policy does the
    same.
    """
    workload: dict[str, Any] = {"arrivals": "bursts:rho=0.9", "duration_s": 0.5, "max_batch_size": 16, "slo_s": 0.05}
    best = run("tuned", **workload)
    points = [run(spec, **workload) for spec in GRID]

    assert len(points) == 16  # docs/policies.md says so
    assert best.goodput >= 0.995 * max(point.goodput for point in points)
    assert best.policy == "tuned"
    ((limit, delay_s, queued),) = [tuple(settings.values()) for settings in best.settings]
    spec = f"static:{delay_s * 1e3:g}ms,max_queued_batches={queued:g}"
    again = run(spec, **{**workload, "max_batch_size": int(limit)})
    assert (again.goodput, again.penalised_mean_s) == (best.goodput, best.penalised_mean_s)
    assert again.settings == ()


def test_tuned_stages_are_tuned_together() -> None:
    """In a pipeline each stage whose policy is tuned has settings, and the others keep their policies."""
    costs = ["affine:a=1ms,b=1ms", "affine:a=4ms,b=0.25ms"]
    report = run(["greedy", "tuned"], "poisson:rho=0.5", costs, duration_s=0.2, max_batch_size=8)

    assert report.policy == "greedy -> tuned"
    assert [set(each) for each in report.settings] == [{"max_batch_size", "max_queue_delay_s", "max_queued_batches"}]


def test_settings_of_several_runs_are_those_that_were_best_most_often() -> None:
    """The mean over several seeds keeps settings that one of its runs had."""
    (mean,) = compare(["tuned"], "poisson:rho=0.3", duration_s=0.2, seeds=2, max_batch_size=4)
    single = [run("tuned", "poisson:rho=0.3", duration_s=0.2, seed=seed, max_batch_size=4) for seed in (0, 1)]

    assert mean.settings in [report.settings for report in single]


def test_worker_seconds_are_counted_for_each_good_answer() -> None:
    """Two batches of one take 5 s each; one of the two answers is in time."""
    report = few("greedy", [0.0, 1.0], max_batch_size=1, slo_s=8.0)

    assert report.goodput * report.duration_s == 1
    assert report.worker_s_per_good == 10.0
