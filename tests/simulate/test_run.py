"""Runs: they agree with theory, are the same by seed, lose nobody, and do what each setting says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import carpool
from carpool.engine.policy import Greedy, Policy, Static
from carpool.simulate import Affine, Closed, Noisy, Pareto, Poisson, Report, Trace, run
from carpool.simulate.arrivals import arrivals_of
from carpool.simulate.servers import Servers
from carpool.simulate.traffic import Traffic
from tests.effort import examples, slow_where


@slow_where(lambda rho: rho == 0.8)
@pytest.mark.parametrize("rho", [0.6, 0.8])
def test_greedy_on_poisson_has_the_latency_of_theory(rho: float) -> None:
    """On Poisson arrivals `Greedy` has the latency of theory, for affine cost and large batches
    (Inoue 2021): W = 3/2 · a/(1-λb) + b/2 · (2+λb)/(1-λ²b²).
    """
    a, b, limit = 0.008, 0.00025, 1024
    rate = rho * limit / (a + b * limit)
    report = run("greedy", Poisson(rate=rate), Affine(a, b), slo_s=None, max_batch_size=limit, duration_s=20)

    x = rate * b
    assert report.mean_s == pytest.approx(1.5 * a / (1 - x) + b / 2 * (2 + x) / (1 - x * x), rel=0.03)
    assert report.mean_batch_size == pytest.approx(rate * a / (1 - x), rel=0.03)


@slow_where(lambda rho: rho == 0.7)
@pytest.mark.parametrize("rho", [0.3, 0.7])
def test_single_items_are_an_m_d_1_queue(rho: float) -> None:
    """With single items the mean latency is that of Pollaczek and Khinchine, W = D + ρD / 2(1-ρ),
    and the worker is busy for the share ρ.
    """
    report = run("greedy", Poisson(rho=rho), "affine:a=5ms,b=0s", slo_s=None, max_batch_size=1, duration_s=300)

    assert report.mean_s == pytest.approx(0.005 * (1 + rho / (2 * (1 - rho))), rel=0.03)
    assert report.utilisation == pytest.approx(rho, rel=0.02)
    assert report.load == pytest.approx(rho)


def test_clients_of_a_closed_loop_split_into_two_groups() -> None:
    """With `Greedy` clients of a closed loop split into two groups, one of which runs while the
    other thinks: N / 2(a + bN/2) per second, for short think times.
    """
    report = run("greedy", Closed(16, 0.001), "affine:a=8ms,b=0.25ms", duration_s=10)

    assert report.throughput == pytest.approx(16 / (2 * (0.008 + 0.00025 * 8)), rel=0.01)
    assert report.load is None
    assert report.fairness is not None and report.fairness > 0.999


@slow_where(lambda workers: workers == 4)
@pytest.mark.parametrize(("workers", "clients"), [(2, 16), (4, 64)])
def test_clients_of_a_closed_loop_are_shared_by_all_workers(workers: int, clients: int) -> None:
    """With several workers clients that come back together are as many groups: N / (w + a + bN/m) per second."""
    report = run("adaptive", Closed(clients, 0.0003), "affine:a=8ms,b=0.25ms", workers=workers, duration_s=10)

    assert report.throughput > 0.95 * clients / (0.00045 + 0.008 + 0.00025 * clients / workers)


def test_the_same_seed_gives_the_same_run() -> None:
    """The same seed gives the same run, noise, weights and all, and another one gives another."""
    workload: dict[str, Any] = {
        "arrivals": "closed:clients=8+bursts:rho=0.4",
        "cost": Noisy(Affine(0.008, 0.00025), 0.25, 0.01, 5),
        "slo_s": (0.03, 0.12),
        "weights": Pareto(),
        "duration_s": 2,
    }

    assert run("greedy", seed=5, **workload).to_dict() == run("greedy", seed=5, **workload).to_dict()
    assert run("greedy", seed=5, **workload).to_dict() != run("greedy", seed=6, **workload).to_dict()


class Seen(Greedy):
    """A policy that notes what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[float, float, int]] = []

    def arrived(self, now: float, requests: Any) -> None:
        self.requests += [(now, request.due, request.size) for request in requests]


class SeenSlowly(Seen):
    """A policy that notes what arrives and takes single items."""

    @property
    def limit(self) -> int:
        return 1


def test_all_policies_see_the_same_requests() -> None:
    """Times, SLOs and weights of requests do not depend on what a policy does with them, not even
    where cost is a matter of chance.
    """
    seen: list[Seen] = []

    def made(kind: type[Seen]) -> Any:
        def make() -> Policy:
            seen.append(kind())
            return seen[-1]

        return make

    for kind in (Seen, SeenSlowly):
        run(
            made(kind),
            "mmpp:rho=0.2/0.8,mean_dwell=100ms/50ms",
            "affine:a=8ms,b=0.25ms+noisy:sigma=0.3",
            slo_s=[1.0, 2.0],
            weights="pareto",
            weights_known=True,
            duration_s=1,
        )

    assert seen[0].requests == seen[1].requests
    assert len(seen[0].requests) > 100
    assert len({size for _, _, size in seen[0].requests}) > 1


def test_policy_objects_are_templates() -> None:
    """A run leaves policy objects as they were, and takes functions and classes that make them."""
    policy = Static(max_queue_delay_s=0.01)
    reports = [run(given, duration_s=2) for given in (policy, policy, lambda: Static(64, 0.01), "static:10ms")]

    assert len({report.mean_s for report in reports}) == 1
    assert policy.max_batch_size is None
    assert reports[0].policy == "static"
    assert run(Greedy, duration_s=1).mean_s == run("greedy", duration_s=1).mean_s


POLICIES = st.sampled_from(["greedy", "static:5ms", "static:5ms,max_queued_batches=1", "aimd", "cork", "deadline"])
ARRIVALS = st.sampled_from(
    ["poisson:rho=0.4", "poisson:rho=1.6", "bursts:rho=0.9", "closed:clients=5", "closed:clients=90+gamma:rho=0.2,cv=3"]
)
COSTS = st.sampled_from(["affine:a=8ms,b=0.25ms", "tile:a=1ms,step=3ms,width=8+noisy:sigma=0.4", "sqrt:c=5ms"])


@given(
    POLICIES,
    ARRIVALS,
    COSTS,
    st.sampled_from([None, 0.02, (0.03, 0.3)]),
    st.integers(1, 3),
    st.sampled_from([1, 7, 64]),
    st.booleans(),
    st.integers(0, 9),
)
@examples(60, derandomize=True)
def test_nobody_is_lost(
    policy: str, arrivals: str, cost: str, slo_s: Any, workers: int, limit: int, heavy: bool, seed: int
) -> None:
    """Whatever the policy, every arrival is served, dropped or unfinished, and batches and figures
    keep their bounds.
    """
    report = run(
        policy,
        arrivals,
        cost,
        slo_s,
        limit,
        workers,
        duration_s=0.4,
        seed=seed,
        weights=Pareto() if heavy else None,
        max_queue_size=40,
    )

    assert report.requests == report.served + report.dropped + report.unfinished
    assert report.served <= sum(n * count for n, count in report.batch_sizes.items()) <= report.requests
    assert max(report.batch_sizes) <= limit
    assert 0 <= report.goodput <= report.throughput
    assert report.late == pytest.approx((report.throughput - report.goodput) * report.duration_s)
    assert 0 <= report.attainment <= 1 and 0 <= report.utilisation <= 1
    assert report.p50_s <= report.p99_s


def lone(**settings: Any) -> Report:
    """One request at 1 s; a batch takes 4 s."""
    given: dict[str, Any] = {"policy": "greedy", "arrivals": [1.0], "cost": lambda n: 4.0, "duration_s": 8}
    return run(**{**given, "slo_s": None, **settings})


def test_the_hop_delays_answers_but_keeps_nobody_busy() -> None:
    """The hop delays answers, and is no part of the worker's busy time."""
    report = lone(hop_s=0.5)

    assert (report.mean_s, report.utilisation) == (4.5, 0.5)


def test_the_way_of_large_items_grows_with_their_batch_and_is_half_gone_ahead() -> None:
    """A batch of two is on its way for twice as long. One that goes ahead has its way back alone."""
    assert lone(hop_s=0.5, hop_item_s=0.25).mean_s == 4.75
    assert lone(arrivals=[1.0, 1.0], hop_item_s=0.25).mean_s == 4.5
    # the third goes ahead, once it is known what a batch takes: they are done at 5.25, 9.5 and 13.625
    ahead = lone(arrivals=[1.0, 1.5, 6.0], hop_item_s=0.25, max_batch_size=1, runs_ahead=True)
    assert ahead.mean_s == (4.25 + 8.0 + 7.625) / 3


def test_workers_of_clients_in_a_closed_loop_are_hardly_idle() -> None:
    """Where 160 clients have a worker with batches of up to 100, 60 wait while it is busy. They go
    ahead where a batch costs little besides its items, so that the worker does not wait for them.
    """
    given: dict[str, Any] = {"arrivals": "closed:clients=160,think=0s", "cost": "affine:a=0.1ms,b=0.02ms"}
    given |= {"max_batch_size": 100, "hop_s": 1e-3, "slo_s": None, "duration_s": 2}
    without, ahead = (run("adaptive", runs_ahead=each, **given) for each in (False, True))

    assert without.utilisation < 0.7
    assert ahead.utilisation > 0.9
    assert ahead.throughput > 1.3 * without.throughput
    assert ahead.p50_s < without.p50_s


def test_a_turn_gathers_what_comes_in_it() -> None:
    """The second request shares the first one's batch, from 1.5 to 5.5; answers, and the third
    one's batch, go out at 6. When that is answered nobody waits, so the turn is cut short.
    """
    report = lone(arrivals=[1.0, 1.25, 1.75], turn_s=0.5, duration_s=16)

    assert report.batch_sizes == {1: 1, 2: 1}
    assert report.mean_s == (5.0 + 4.75 + 8.25) / 3


def test_stages_follow_each_other() -> None:
    """Latency is the sum over all stages, and the figures of batches are those of the busiest one."""
    report = lone(cost=[lambda n: 2.0, lambda n: 3.0], workers=[1, 2], policy=["greedy", "static"])

    assert report.mean_s == 5.0
    assert report.policy == "greedy -> static"
    assert report.stage_utilisation == (0.25, 3 / 16)
    assert report.utilisation == 0.25


def test_weights_that_the_policy_does_not_know() -> None:
    """If the policy does not know weights, cost is taken at their sum, and the batch limit counts
    requests.
    """
    report = run("greedy", [0.0] * 4, lambda w: w, None, 4, duration_s=64, weights=[2.5])

    assert (report.batch_sizes, report.mean_s) == ({4: 1}, 10.0)


def test_weights_that_the_policy_knows() -> None:
    """If the policy knows weights they are rounded up to sizes, which limit and cost count, in a
    later stage too.
    """
    known: dict[str, Any] = {"weights": [1.5], "weights_known": True, "duration_s": 64}
    report = run("greedy", [0.0] * 4, lambda w: w, None, 4, **known)
    staged = run("greedy", [0.0] * 4, [lambda w: 1.0, lambda w: w], None, [8, 4], **known)

    assert (report.batch_sizes, report.mean_s) == ({2: 2}, 6.0)
    assert (staged.batch_sizes, staged.mean_s) == ({2: 2}, 7.0)


def test_allowed_batch_sizes_cost_what_is_padded() -> None:
    """A batch of three requests that is padded to eight costs what eight do."""
    assert run("static:0s,allowed_batch_sizes=2/8", [0.0] * 3, lambda n: n, None, 8, duration_s=9).mean_s == 8.0


def test_clients_that_are_refused_back_off() -> None:
    """Clients that are refused come again after a pause: two are served in turn, and the third
    finds a full queue every 0.1 s until it is lucky.
    """
    loop = Closed(3, think_s=0.0, think="fixed", backoff_s=0.125)
    report = run("greedy", loop, lambda n: 1.0, None, 1, duration_s=10, max_queue_size=1)

    assert 60 < report.dropped < 90
    assert report.served == 10 + 1  # the last two are served after the arrivals' end, the others within


def test_a_trace_may_set_the_length_of_the_run(tmp_path: Any) -> None:
    """A run may be as long as its trace, until the last request."""
    path = tmp_path / "trace.csv"
    path.write_text("t\n5\n6\n9\n")
    report = run("greedy", Trace(str(path)), "affine:a=1ms,b=0s", duration_s=None)

    assert (report.requests, report.duration_s) == (3, pytest.approx(4.0))
    with pytest.raises(ValueError, match="duration_s can only be left out for a trace"):
        run("greedy", duration_s=None)


def test_rho_is_a_share_of_what_can_be_served(tmp_path: Any) -> None:
    """`rho` is a share of what can be served, with workers, stages and weights, those of a trace
    too, taken into account.
    """
    path = tmp_path / "trace.csv"
    path.write_text("t,w\n" + "".join(f"{t},{3 + t % 3}\n" for t in range(100)))

    def load(spec: str, workers: int, **settings: Any) -> float | None:
        servers = Servers.of(["affine:a=0s,b=1ms", "affine:a=0s,b=2ms"], 8, workers)
        return Traffic(arrivals_of(spec), servers, duration_s=10, **settings).load

    assert load("poisson:rate=500", 2) == 0.5
    assert load("poisson:rho=0.3+gamma:rho=0.2", 4) == 0.5
    assert load(f"trace:{path},size=w,rho=0.7", 1) == pytest.approx(0.7)
    assert load(f"trace:{path},size=w", 1) == pytest.approx(100 / 99 / (500 / 3.99))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"max_batch_size": 0}, "max_batch_size must be"),
        ({"duration_s": 0}, "duration_s must be a positive number"),
        ({"slo_s": 0}, "slo_s must be a positive number"),
        ({"slo_s": []}, "not an empty list"),
        ({"hop_s": -1}, "hop_s must be 0 or more"),
        ({"hop_item_s": -1}, "hop_item_s must be 0 or more"),
        ({"workers": [1, 2]}, "workers has 2 entries for 1 stages"),
        ({"weights": "heavy"}, "there is no distribution of weights 'heavy'"),
        ({"policy": "fifo"}, "there is no policy 'fifo'"),
    ],
)
def test_wrong_settings(wrong: dict[str, Any], told: str) -> None:
    """A wrong setting of a simulation is named."""
    with pytest.raises(ValueError, match=told):
        run(**{"policy": "greedy", "duration_s": 1, **wrong})


def test_the_simulator_comes_with_the_package() -> None:
    """`carpool.simulate` can be used after `import carpool`, without an import of its own."""
    assert carpool.simulate.run is run
