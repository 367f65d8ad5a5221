"""A busy coordinator in the simulator: what its work adds to latencies, and what small batches cost it."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from carpool.cli import add_simulator, cli
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.policy import Greedy
from carpool.simulate import Coordinator, Report, compare, run
from carpool.simulate.coordinator import BusyDriver, coordinator_of

add_simulator()

FREE = Coordinator(0.0, 0.0, way_s=0.0, sigma=0.0, stall_share=0.0, client_s=0.0)
SLOW = Coordinator(1.0, 2.0, way_s=0.5, sigma=0.0, stall_share=0.0, client_s=0.0)
"""A coordinator that works 1 s for a request and 2 s for a batch, half a second away from its workers."""

TRIVIAL: dict[str, Any] = {
    "cost": "affine:a=10us,b=0.25us+noisy:sigma=0.2",
    "slo_s": None,
    "duration_s": 0.2,
    "settle_s": 0.05,
    "runs_ahead": True,
}


@pytest.mark.parametrize("policy", ["adaptive", "greedy", "static:5ms", "cork", "window"])
@pytest.mark.parametrize(
    "settings",
    [
        {"arrivals": "poisson:rho=0.9"},
        {"arrivals": "closed:clients=16,think=1ms", "runs_ahead": True},
        {"arrivals": "bursts:rho=0.8", "workers": 2, "cost": ["affine:a=8ms,b=0.25ms", "affine:a=3ms,b=0.25ms"]},
        {"arrivals": "sine:rho=0.8", "workers": "1-4", "max_queue_size": 40},
    ],
    ids=lambda settings: settings["arrivals"].partition(":")[0],
)
def test_work_that_takes_no_time_changes_nothing(policy: str, settings: dict[str, Any]) -> None:
    """With a coordinator whose work takes no time all figures are, to the last digit, those without one."""
    without = run(policy, duration_s=0.8, **settings).to_dict()
    free = run(policy, duration_s=0.8, **settings, coordinator=FREE).to_dict()

    assert without.pop("coordinator_utilisation") is None
    assert free.pop("coordinator_utilisation") == 0.0
    assert free == without


@pytest.mark.parametrize(
    ("policy", "settings", "figures"),
    [
        (
            "greedy",
            {"arrivals": "bursts:rho=0.9", "workers": 2, "slo_s": 0.03},
            (3355.0, 0.025119816565599945, 0.04053543493916878, 0.030543236660623238, 0.9877831116523023, 0.0),
        ),
        (
            "static:5ms",
            {
                "arrivals": "closed:clients=20,think=2ms",
                "runs_ahead": True,
                "hop_s": 0.0004,
                "hop_item_s": 0.00001,
                "turn_s": 0.0002,
            },
            (896.0, 0.02031107934260073, 0.021380784108729678, 0.020311079342600735, 0.933, 0.0011160714285714285),
        ),
        (
            "greedy",
            {
                "arrivals": "poisson:rho=0.7",
                "cost": ["affine:a=8ms,b=0.25ms+noisy:sigma=0.3", "sqrt:c=3ms"],
                "max_queue_size": 30,
            },
            (1629.0, 0.04310852103478394, 0.05796411905270704, 0.05293286260274478, 0.9996407256625522, 0.0),
        ),
    ],
)
def test_without_a_coordinator_all_is_as_before(
    policy: str, settings: dict[str, Any], figures: tuple[float, ...]
) -> None:
    """Without a coordinator the figures are those of the simulator before it had one."""
    report = run(policy, duration_s=1, seed=3, **settings)

    found = (report.goodput, report.mean_s, report.p99_s, report.penalised_mean_s, report.utilisation, report.wake_ups)
    assert found == pytest.approx(figures, rel=1e-13)


def lone(**settings: Any) -> Report:
    """One request at 1 s; a batch takes 4 s."""
    given: dict[str, Any] = {"policy": "greedy", "arrivals": [1.0], "cost": lambda n: 4.0, "duration_s": 16}
    return run(**{**given, "slo_s": None, "coordinator": SLOW, **settings})


def test_what_a_lone_request_waits_for() -> None:
    """A lone request waits for a turn, to be read, for a decision and for its batch to be written;
    for the way, its batch and the way back; and for a turn, for the reply and for its answer.
    """
    report = lone()

    before = 0.2 + 0.5 + 0.2 + (0.8 + 0.025)
    after = 0.2 + (0.68 + 0.12 + 0.025) + 0.45
    assert report.mean_s == pytest.approx(before + 0.5 + 4.0 + 0.5 + after)
    assert report.coordinator_utilisation == pytest.approx((before + after) / 16)
    assert before + after == pytest.approx(SLOW.request_s + SLOW.batch_s + 0.2)
    assert report.utilisation == pytest.approx(4.0 / 16)


def test_a_network_is_besides() -> None:
    """The way through a network adds to that from process to process, and to no one's work."""
    far = lone(hop_s=1.0, hop_item_s=0.5)

    assert far.mean_s == pytest.approx(lone().mean_s + 1.5)
    assert far.coordinator_utilisation == pytest.approx(lone().coordinator_utilisation)


class Seen(Greedy):
    """A policy that notes when requests come, and how long they have then."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[float, float]] = []

    def arrived(self, now: float, requests: Any) -> None:
        self.requests += [(now, request.due - now) for request in requests]


def test_latencies_count_from_when_a_client_sent() -> None:
    """A request whose client sent it at 1 s, and whose answer came 8.2 s later, is late with an SLO of
    8 s, although it was due by then 8 s after it was read.
    """
    seen = Seen()
    report = lone(policy=lambda: seen, slo_s=8.0)

    assert seen.requests == [(pytest.approx(1.7), pytest.approx(8.0))]
    assert (report.served, report.late) == (1, 1)
    assert report.mean_s == pytest.approx(8.2)


def test_clients_of_closed_loops_share_a_process() -> None:
    """The requests of clients leave one after the other, each after the time that it takes to send one."""
    seen = Seen()
    slow_clients = Coordinator(0.0, 0.0, way_s=0.0, sigma=0.0, stall_share=0.0, client_s=1.0)
    run(lambda: seen, "closed:clients=3,think=9s", lambda n: 0.1, slo_s=None, duration_s=4, coordinator=slow_clients)

    first, *others = [when for when, _ in seen.requests[:3]]
    assert first == pytest.approx(1.01, abs=0.011)
    assert others == [pytest.approx(first + 1.0), pytest.approx(first + 2.0)]


def test_what_comes_during_a_turn_waits_for_the_next_one() -> None:
    """Two requests that come while the first one is read and sent out share a batch."""
    assert lone(arrivals=[1.0, 1.25, 1.5], workers=2).batch_sizes == {1: 1, 2: 1}
    assert lone(arrivals=[1.0, 1.25, 1.5], workers=3, coordinator=FREE).batch_sizes == {1: 3}


def test_small_batches_cost_the_coordinator_more() -> None:
    """A coordinator that is busy all the time serves less than a quarter with batches of one of what it
    serves with batches of 64, as each batch is as much work as five requests.
    """
    single, full = (run("greedy", "closed:clients=128,think=15us", max_batch_size=n, coordinator="12us,63us", **TRIVIAL)
                    for n in (1, 64))  # fmt: skip

    assert single.coordinator_utilisation is not None and full.coordinator_utilisation is not None
    assert single.coordinator_utilisation > 0.95 and full.coordinator_utilisation > 0.95
    assert 1 / (12e-6 + 73e-6) < single.throughput < 1 / (12e-6 + 57e-6)
    assert single.throughput < 0.25 * full.throughput


def test_noise_stalls_and_pauses() -> None:
    """Ways to workers vary and stall, by the seed of the run, and a coordinator that shares its core
    serves less.
    """
    clients: dict[str, Any] = {"arrivals": "closed:clients=1,think=15us", **TRIVIAL}
    steady = Coordinator(sigma=0.0, stall_share=0.0)
    stalling = Coordinator(sigma=0.0, stall_share=0.5, stall_s=5e-3)
    shared = Coordinator(sigma=0.0, stall_share=0.0, slice_s=1e-3, pause_s=2e-3)
    plain, stalled = (run("greedy", **clients, coordinator=each) for each in (steady, stalling))
    crowd: dict[str, Any] = {**clients, "arrivals": "closed:clients=64,think=15us"}
    alone, paused = (run("greedy", **crowd, coordinator=each) for each in (steady, shared))

    assert stalled.mean_s > plain.mean_s + 4e-3
    assert paused.throughput < 0.5 * alone.throughput
    assert run("greedy", **clients, coordinator=Coordinator()) == run("greedy", **clients, coordinator="12us,63us")
    assert run("greedy", **clients, coordinator=Coordinator(), seed=1).mean_s != pytest.approx(plain.mean_s, rel=1e-6)


def test_nobody_is_lost_where_workers_come_and_go() -> None:
    """Stages in a row, workers that come and go and a full queue go with a busy coordinator."""
    given: dict[str, Any] = {"cost": ["affine:a=1ms,b=1ms", "affine:a=2ms,b=0.1ms"], "workers": ["1-3", 1]}
    report = run("adaptive", "poisson:rho=0.9", **given, duration_s=3, max_queue_size=40, coordinator="300us,1ms")

    assert report.requests == report.served + report.dropped + report.unfinished
    assert report.served > 0.5 * report.requests
    assert report.unfinished == 0


def test_a_worker_that_dies_loses_no_request() -> None:
    """What a worker had when it died is run once more, and the reply that it would have sent never comes."""
    core = Core([Batcher("stage", Greedy(4), Queue())])
    driver = BusyDriver(core, [lambda n: 1.0], [1], coordinator=FREE, dice=Random(0), between=(0.0, 9.0))
    request = driver.arrive(0.0, "a")
    driver.at(0.5, lambda: driver.lose(0, 0, 0.25))
    driver.run()

    assert driver.answers == [request]
    assert (request.error, request.losses, driver.clock.now) == (None, 1, 1.75)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("12", "coordinator '12': '12' is not a duration"),
        ("12us,63us,5us", "coordinator '12us,63us,5us': only the first value can go without a name"),
        ("12us,63us,hop=5us", "there is no parameter 'hop'; it takes request, batch, way, sigma"),
        ("12us,63us,stall_share=2", "stall_share must be at most 1, not 2"),
        ("12us,63us,way=-1us", "way_s must be 0 or more"),
        ("12us,63us,slice=0s", "slice_s must be above 0"),
    ],
)
def test_wrong_coordinators(wrong: str, told: str) -> None:
    """A wrong coordinator is refused with what is wrong, and with one that is right."""
    with pytest.raises(ValueError, match=told):
        run("greedy", duration_s=1, coordinator=wrong)
    with pytest.raises(ValueError, match="coordinator"):
        coordinator_of(wrong)


def test_what_does_not_go_with_a_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    """Turns of a given length make no sense with it, nor do simulations of steps; anything else is no coordinator."""
    with pytest.raises(ValueError, match="turn_s does not go with coordinator"):
        run("greedy", duration_s=1, coordinator="12us,63us", turn_s=0.001)
    with pytest.raises(TypeError, match="coordinator must be a Coordinator or a spec such as '12us,63us'"):
        run("greedy", duration_s=1, coordinator=3)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        cli(["simulate", "--steps", "--coordinator", "12us,63us"])
    assert "--steps does not go with --coordinator" in capsys.readouterr().err


def test_specs_of_coordinators() -> None:
    """The first two values are the work for a request and for a batch; all others have names."""
    assert coordinator_of("12us,63us") == Coordinator()
    assert coordinator_of("1us, batch=2us, stall_share=1%, stall=3ms") == Coordinator(
        1e-6, 2e-6, stall_share=0.01, stall_s=3e-3
    )
    assert coordinator_of(None) is None
    assert coordinator_of(SLOW) is SLOW


def test_the_command_shows_how_busy_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has the coordinator's busy share where there is one, and JSON has it with the other figures."""
    fast = ["simulate", "--policy", "greedy,static:1ms", "--duration", "300ms", "--seeds", "1", "--jobs", "1"]
    with pytest.raises(SystemExit):
        cli([*fast, "--coordinator", "12us,63us"])
    with_one = capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli(fast)
    without = capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli([*fast, "--coordinator", "12us,63us", "--json"])
    found = json.loads(capsys.readouterr().out)

    assert "coord." in with_one and "coord." not in without
    assert found["coordinator"] == "12us,63us"
    assert 0 < found["reports"][0]["coordinator_utilisation"] < 1


def test_several_processes_take_a_coordinator() -> None:
    """Runs in other processes have the same coordinator as in this one."""
    given: dict[str, Any] = {"seeds": 2, "duration_s": 0.2, "coordinator": Coordinator()}

    assert compare(["greedy"], jobs=2, **given) == compare(["greedy"], **given)
