"""Arrival processes: their rates and shapes, the replay of traces, the same again by seed."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from carpool.simulate.arrivals import MMPP, Bursts, Closed, Flash, Gamma, Open, Poisson, Scene, Sine, Trace, arrivals_of

SCENE = Scene(duration_s=200.0, capacity=100.0)
OPEN: list[Open] = [
    Poisson(rate=50),
    Poisson(rho=0.5),
    Gamma(rate=50, cv=2),
    Gamma(rho=0.5, cv=0.5),
    MMPP(rates=(20, 120), mean_dwell_s=(1.0, 0.5)),
    MMPP(rho=(0.1, 0.5, 1.0), mean_dwell_s=(0.5, 0.5, 0.5)),
    Sine(rate=50, swing=40),
    Sine(rho=0.5, swing=0.8, period_s=10),
    Flash(rate=20, peak_rate=200),
    Flash(rho=0.2, peak_rho=2.0, between=(0.1, 0.2)),
    Bursts(rate=50, mean_burst=8),
    Bursts(rho=0.5, mean_burst=1),
]


def times(process: Open, seed: int = 0, scene: Scene = SCENE) -> list[float]:
    return list(process.times(Random(seed), scene))


@pytest.mark.parametrize("process", OPEN, ids=str)
def test_times_are_in_order_and_as_many_as_the_rate_says(process: Open) -> None:
    """Arrivals are in order and within the run, and over four seeds they are near the mean number
    that the process itself tells.
    """
    found = [times(process, seed) for seed in range(4)]

    for run in found:
        assert run == sorted(run)
        assert run[0] >= 0 and run[-1] < SCENE.duration_s
    assert sum(map(len, found)) == pytest.approx(4 * SCENE.duration_s * process.mean_rate(SCENE), rel=0.06)


@pytest.mark.parametrize("process", OPEN, ids=str)
def test_a_seed_gives_the_same_times_again(process: Open) -> None:
    """The same seed gives the same times, and another one gives others."""
    assert times(process, 1) == times(process, 1) != times(process, 2)


@pytest.mark.parametrize("process", OPEN, ids=str)
def test_scaling_scales_the_mean_rate(process: Open) -> None:
    """Scaling arrivals multiplies their mean rate, whether rates are absolute or shares."""
    assert process.scaled(1.5).mean_rate(SCENE) == pytest.approx(1.5 * process.mean_rate(SCENE))


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gaps_vary_as_asked(cv: float) -> None:
    """The gaps of a gamma process have the coefficient of variation that was asked for."""
    found = times(Gamma(rate=100, cv=cv))
    gaps = [b - a for a, b in itertools.pairwise(found)]

    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_bursts_come_at_one_instant() -> None:
    """The requests of a burst come at one instant; sizes are geometric with mean m, so that a share
    of 1/m is alone.
    """
    sizes = [len(list(group)) for _, group in itertools.groupby(times(Bursts(rate=200, mean_burst=4)))]

    assert fmean(sizes) == pytest.approx(4, rel=0.05)
    assert sizes.count(1) / len(sizes) == pytest.approx(1 / 4, rel=0.1)


def test_a_flash_crowd_is_where_it_is_said_to_be() -> None:
    """Within a flash crowd the rate is ten times as high, and outside of it the plain one."""
    found = times(Flash(rate=20, peak_rate=200, between=(0.4, 0.5)))
    inside = sum(80 <= t < 100 for t in found)

    assert inside / 20 == pytest.approx(200, rel=0.1)
    assert (len(found) - inside) / 180 == pytest.approx(20, rel=0.1)


def test_a_sine_is_never_below_nothing() -> None:
    """The trough of a sine is cut off at a rate of 0: here half of each period is empty, and the
    mean is what is left.
    """
    found = times(Sine(rate=0, swing=100, period_s=20))

    assert all(math.sin(2 * math.pi * t / 20) > 0 for t in found)
    assert len(found) / 200 == pytest.approx(100 / math.pi, rel=0.06)


def test_the_states_of_an_mmpp_can_be_told_apart() -> None:
    """A state of an MMPP with rate 0 leaves gaps as long as it lasts."""
    found = times(MMPP(rates=(100, 0), mean_dwell_s=(1.0, 1.0)))
    long = [b - a for a, b in itertools.pairwise(found) if b - a > 0.1]

    assert fmean(long) == pytest.approx(1.1, rel=0.25)  # what is left of an exponential beyond 0.1, and 0.1


@pytest.mark.parametrize(("think", "least", "most"), [("uniform", 1.0, 3.0), ("exponential", 0, 99), ("fixed", 2, 2)])
def test_think_times(think: str, least: float, most: float) -> None:
    """Think times of every kind have the mean 2, and stay within their bounds."""
    loop = Closed(1, 2.0, think)
    dice = Random(0)
    found = [loop.pause_s(dice, 2.0) for _ in range(4000)]

    assert fmean(found) == pytest.approx(2.0, rel=0.05)
    assert least <= min(found) and max(found) <= most


def test_given_times_serve_several_runs() -> None:
    """Arrival times that are given serve several runs, also those of a generator without an end, of
    which no more is drawn than a run needs.
    """
    (process,) = arrivals_of(i / 10 for i in itertools.count())
    assert isinstance(process, Open)

    assert times(process, scene=Scene(0.35, 1)) == times(process, scene=Scene(0.35, 1)) == [0, 0.1, 0.2, 0.3]
    assert process.mean_rate(Scene(1.0, 1)) == 10


def test_given_times_must_rise() -> None:
    """Arrival times that are given must rise, else the clock would go back."""
    (process,) = arrivals_of([0.0, 2.0, 1.0])
    assert isinstance(process, Open)

    with pytest.raises(ValueError, match=r"must rise from 0 on: 1\.0 comes after 2\.0"):
        times(process)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Four requests within three seconds, not in order, with two sizes."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "id,TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "1,2023-11-16 18:17:03.9799600,100,10\n"
        "2,2023-11-16 18:17:04.4799600,200,20\n"
        "4,2023-11-16 18:17:06.9799600,400,40\n"
        "3,2023-11-16 18:17:05.9799600,300,30\n"
    )
    return str(path)


def test_a_trace_begins_at_once_and_is_put_in_order(trace: str) -> None:
    """A trace is put in order with its weights and begins at once, and seven digits after the
    second are read.
    """
    process = Trace(trace, column="TIMESTAMP", size="ContextTokens+GeneratedTokens")

    assert times(process) == pytest.approx([0.0, 0.5, 2.0, 3.0], abs=2e-6)
    assert process.weights() == [110, 220, 330, 440]
    assert Trace(trace, column="TIMESTAMP").weights() is None


def test_a_trace_can_be_sped_up(trace: str) -> None:
    """A trace can be sped up by a factor or to a share of capacity, and its weights can be scaled
    to a mean.
    """
    assert times(Trace(trace, "TIMESTAMP", speed=2.0)) == pytest.approx([0.0, 0.25, 1.0, 1.5], abs=2e-6)
    assert Trace(trace, "TIMESTAMP", rho=0.7).mean_rate(Scene(60.0, 100.0)) == pytest.approx(70.0)
    assert Trace(trace, "TIMESTAMP", "ContextTokens", mean_size=1.0).weights() == [0.4, 0.8, 1.2, 1.6]


def test_times_of_a_trace_may_be_seconds(tmp_path: Path) -> None:
    """A trace of seconds has them in its first column, if none is named."""
    path = tmp_path / "seconds.csv"
    path.write_text("t,n\n10.5,1\n12.0,2\n")

    assert times(Trace(str(path))) == [0.0, 1.5]


def test_a_trace_in_a_spec(trace: str) -> None:
    """In a spec of a trace its columns are joined by a plus."""
    (process,) = arrivals_of(f"trace:{trace},column=TIMESTAMP,size=ContextTokens+GeneratedTokens,speed=3")

    assert process == Trace(trace, "TIMESTAMP", "ContextTokens+GeneratedTokens", speed=3)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"column": "when"}, "has no column 'when'; it has id, TIMESTAMP"),
        ({"column": "TIMESTAMP", "size": "bytes"}, "has no column 'bytes'"),
        ({"column": "TIMESTAMP", "speed": 0}, "speed and rho must be positive"),
    ],
)
def test_a_wrong_trace_is_refused(trace: str, settings: dict[str, object], told: str) -> None:
    """A trace without the column that is asked for is refused, with those that it has."""
    with pytest.raises(ValueError, match=told):
        Trace(trace, **settings)  # type: ignore[arg-type]


def test_bad_content_of_a_trace(tmp_path: Path) -> None:
    """A trace without requests, or with times that are none, is refused."""
    empty, odd = tmp_path / "empty.csv", tmp_path / "odd.csv"
    empty.write_text("t\n")
    odd.write_text("t\nyesterday\n")

    with pytest.raises(ValueError, match="has no requests"):
        Trace(str(empty))
    with pytest.raises(ValueError, match="'yesterday' in the trace is not a time"):
        Trace(str(odd))
