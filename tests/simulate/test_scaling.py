"""Workers that come and go in the simulator: what they cost, what they are worth, and by which rule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from carpool.simulate import Report, run
from carpool.simulate.command import Options, simulate
from carpool.simulate.servers import Busy, Load, Ongoing, Servers, WorkerRange, rule_of

DAY = "sine:rate=4800,swing=4500,phase=0.75+flash:rate=0,peak_rate=3000,between=0.625/0.6875"
"""300 requests a second at night, 9,300 at noon, and a burst of 3,000 more."""


def day(scaling: str, duration_s: float = 240, workers: str = "1-8") -> Report:
    return run("adaptive", DAY, workers=workers, start_s=10, scaling=scaling, duration_s=duration_s, slo_s=0.06, seed=1)


def test_a_function_can_be_the_rule() -> None:
    """A function gets the rate of the last seconds, and returns how many workers there should be."""
    rates: list[float] = []

    def rule(rate: float) -> float:
        rates.append(rate)
        return rate / 160

    report = run("adaptive", "poisson:rate=300", workers="1-4", scaling=rule, duration_s=10, seed=1, **SLOW)

    assert rates[-1] == pytest.approx(300, rel=0.1)
    assert set(report.workers_over_time.values()) == {1, 2}


@pytest.mark.slow
def test_a_day_with_half_the_workers_of_ray_serves_rule() -> None:
    """By what the load needs, 99.5 % of a day's requests are in time with at most 0.55 of the worker-seconds
    that the rule of Ray Serve takes.
    """
    ours, theirs = day("load"), day("ongoing:2")

    assert ours.attainment >= 0.995
    assert ours.worker_s <= 0.55 * theirs.worker_s


SLOW: dict[str, Any] = {"cost": "affine:a=40ms,b=5ms", "slo_s": 0.4}
"""A model that is so slow that a day has few requests: 160 a second within the SLO, for each worker."""


def test_a_short_day() -> None:
    """On a day of two minutes the rule of services keeps the SLO with far fewer worker-seconds, too."""
    day = "sine:rate=200,swing=180,phase=0.75"
    ours, theirs = (
        run("adaptive", day, workers="1-6", scaling=rule, duration_s=120, seed=1, **SLOW)
        for rule in ("load", "ongoing:2")
    )

    assert ours.attainment >= 0.99
    assert ours.worker_s < 0.6 * theirs.worker_s


def test_fixed_workers_are_counted_for_all_of_the_run() -> None:
    """Without a range the worker-seconds are workers times seconds, and there is no curve."""
    report = run("greedy", workers=3, duration_s=2)

    assert report.worker_s == 6
    assert report.workers_over_time == {}


def test_workers_count_from_when_they_are_asked_for() -> None:
    """A worker that starts for longer than the run still counts, and serves nothing."""
    late = run("greedy", "poisson:rate=400", workers="1-4", start_s=60, duration_s=10, seed=1, **SLOW)
    soon = run("greedy", "poisson:rate=400", workers="1-4", start_s=0, duration_s=10, seed=1, **SLOW)

    assert 20 < late.worker_s <= 40
    assert soon.attainment > 0.8 > late.attainment


def test_no_request_is_lost_when_workers_go() -> None:
    """Where workers go under load, every request is answered all the same."""
    crowd = "flash:rate=20,peak_rate=500,between=0.1/0.2"
    report = run("greedy", crowd, SLOW["cost"], workers="1-6", duration_s=60, slo_s=None)

    assert (report.dropped, report.unfinished) == (0, 0)
    assert report.workers_over_time[59] < max(report.workers_over_time.values())


def test_several_stages_scale_by_themselves() -> None:
    """Each stage has a range of its own; the capacity is that of the most workers."""
    cost = ["affine:a=40ms,b=5ms", "affine:a=1ms,b=0.1ms"]
    report = run("greedy", "poisson:rate=300", cost, slo_s=0.4, workers=["1-4", 1], duration_s=20, seed=1)

    assert report.worker_s > 50
    assert Servers.of(cost, 64, ["1-4", 1]).workers == (4, 1)


@pytest.mark.parametrize(
    ("text", "range_"), [("3", (3, 3)), ("1-8", (1, 8)), (2, (2, 2)), (" 1 - 2 ", (1, 2))], ids=str
)
def test_ranges_are_read(text: object, range_: tuple[int, int]) -> None:
    """A number of workers is itself at least and at most; a text may name both."""
    assert WorkerRange.of(text) == WorkerRange(*range_)


@pytest.mark.parametrize("text", ["", "1-", "-3", "8-1", "0-2", "many", "1-2-3", 0])
def test_wrong_ranges(text: object) -> None:
    """Anything else is an error that says what there should be."""
    with pytest.raises(ValueError, match="workers"):
        WorkerRange.of(text)


def test_rules_are_read() -> None:
    """A rule is given by its name, with a number of its own."""
    assert [rule_of(text) for text in ("load", "ongoing:3", "busy:0.5")] == [Load(), Ongoing(3), Busy(0.5)]
    with pytest.raises(ValueError, match="rule of scaling"):
        rule_of("hope")


def test_the_day_begins_where_it_is_told_to() -> None:
    """`phase` moves the beginning of a sine: at 0.75 it begins with the fewest requests."""
    night, noon = (
        run("greedy", f"sine:rate=500,swing=500,period=100s,phase={phase}", duration_s=10, seed=1)
        for phase in (0.75, 0.25)
    )

    assert noon.requests > 5 * night.requests
    assert not math.isnan(night.mean_s)


def test_the_command_shows_worker_seconds_and_draws_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`carpool simulate --workers 1-4` has a column of worker-seconds, and `--plot` draws them over time."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "workers.svg"
    simulate(
        options=Options(policy="greedy", workers=["1-4"], start_s=1.0, duration="2s", seeds=1, jobs=1, plot=picture)
    )

    assert "worker s" in capsys.readouterr().out
    assert "worker-seconds" in picture.read_text()


def test_a_simulation_of_steps_has_no_range(capsys: pytest.CaptureFixture[str]) -> None:
    """With --steps a range is refused, in one line."""
    with pytest.raises(SystemExit):
        simulate(options=Options(steps=True, workers=["1-4"]))
    assert "a fixed number of workers" in capsys.readouterr().err
