"""Specs in words: what they give, and what is said to a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import pytest

from carpool.simulate import specs
from carpool.simulate.arrivals import MMPP, Closed, Flash, Poisson, arrivals_of
from carpool.simulate.costs import Affine, Drifting, Knee, Noisy, Tile, cost_of
from carpool.simulate.policies import policy_of


@pytest.mark.parametrize(
    ("text", "seconds"), [("8ms", 0.008), ("0.25ms", 0.00025), ("2s", 2.0), ("300us", 0.0003), ("1m", 60.0), ("0", 0.0)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    """A duration has a unit, except for zero."""
    assert specs.duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["8", "ms", "eight ms", "8 hours", ""])
def test_what_is_no_duration(text: str) -> None:
    """A number without a unit could mean anything, and is refused as a duration."""
    with pytest.raises(ValueError, match="write a number and its unit"):
        specs.duration(text)


def test_every_spec_has_its_object() -> None:
    """Every spec has its object, by names, a first value without a name, several values, and
    percentages.
    """
    assert arrivals_of("poisson:rate=800") == arrivals_of("poisson:800") == [Poisson(rate=800)]
    assert arrivals_of("poisson:rho=70%") == [Poisson(rho=0.7)]
    assert arrivals_of("mmpp:rates=200/2000,mean_dwell=1s/500ms") == [MMPP((200, 2000), (1.0, 0.5))]
    assert arrivals_of("flash:rate=100,peak_rate=1000,between=0.2/0.3") == [Flash(100, 1000, (0.2, 0.3))]
    assert cost_of("affine:a=8ms,b=0.25ms") == Affine(0.008, 0.00025)
    assert cost_of("tile:a=3ms,step=4ms,width=16") == Tile(0.003, 0.004, 16)
    assert cost_of("knee:a=8ms,b=0.25ms,knee=32,extra=0.9ms") == Knee(0.008, 0.00025, 32, 0.0009)


def test_the_type_of_a_value_tells_think_from_think_s() -> None:
    """`think=2ms` is how long to think and `think=fixed` of what kind: the type of the value tells."""
    assert arrivals_of("closed:clients=4,think=2ms,backoff=50ms") == [Closed(4, 0.002, "uniform", 0.05)]
    assert arrivals_of("closed:clients=4,think=exponential") == [Closed(4, think="exponential")]
    assert arrivals_of("closed:think=fixed,think_s=1s") == [Closed(think_s=1.0, think="fixed")]


Points = tuple[float, ...]  # a name that has "int" in it


class Curve:
    """A kind whose parameters have types of every form, by names that say nothing."""

    def __init__(
        self,
        points: Points | None = None,
        sprint: float = 1.0,
        counts: Sequence[int] = (),
        strength: Optional[int] = None,  # noqa: UP045 (the older form must be understood, too)
        tint: str = "",
        f: Callable[[int], float] | None = None,
    ) -> None:
        self.given = (points, sprint, counts, strength, tint, f)


def test_the_type_decides_how_a_value_is_read() -> None:
    """A value is read by what the parameter's type is, not by how its annotation is spelt."""
    text = "curve:points=1/2,sprint=2,counts=3/4,strength=5,tint=6/7"
    given = specs.build(text, {"curve": Curve}, "curve", "curve").given

    assert given == ((1.0, 2.0), 2.0, (3, 4), 5, "6/7", None)
    assert [type(value) for value in (*given[0], given[1], *given[2], given[3])] == [float] * 3 + [int] * 3


def test_what_cannot_be_written_cannot_be_set() -> None:
    """A parameter of another type, such as a function, is none of a spec's."""
    told = "there is no parameter 'f'; it takes points, sprint, counts, strength, tint; for example"
    with pytest.raises(ValueError, match=told):
        specs.build("curve:f=3", {"curve": Curve}, "curve", "curve")


def test_specs_can_be_joined() -> None:
    """A plus in front of a known kind starts the next spec, and any other belongs to a value."""
    assert arrivals_of("closed:clients=16 + poisson:rho=0.3") == [Closed(16), Poisson(rho=0.3)]
    assert arrivals_of("poisson:rate=1e+3") == [Poisson(rate=1000)]
    noisy = cost_of("affine:a=8ms,b=0.25ms+noisy:sigma=0.25,stall_share=1%,stall_factor=5+drifting:factors=1/1.8")
    assert noisy == Drifting(Noisy(Affine(0.008, 0.00025), 0.25, 0.01, 5), (1, 1.8))


def test_a_list_of_policies_keeps_their_parameters() -> None:
    """In a list of policies a comma before `name=` does not start another policy."""
    found = specs.listed("adaptive, static:10ms,max_queued_batches=10,cork")

    assert found == ["adaptive", "static:10ms,max_queued_batches=10", "cork"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("poison", "there is no arrival process 'poison'; choose one of bursts, closed, flash"),
        ("poisson:rat=3", "there is no parameter 'rat'; it takes rate, rho; for example poisson:rate=800"),
        ("poisson", "needs either rate"),
        ("poisson:rate=3,rho=0.5", "needs either rate"),
        ("poisson:rate=many", "'many' is not a number"),
        ("poisson:rate=-1", "at least 0"),
        ("poisson:rate=1/2", "rate takes one value, not '1/2'"),
        ("poisson:rho=0.5,3", "only the first value can go without a name"),
        ("closed:clients=2.5", "whole number"),
        ("closed:think=long", "uniform, exponential, fixed"),
        ("mmpp:rates=1/2", "as many positive dwell times"),
        ("flash:rate=1,peak_rate=2,between=0.5", "two parts of the run"),
        ("gamma:rate=1,cv=0", "cv must be positive"),
        ("bursts:rate=1,mean_burst=0", "mean_burst must be at least 1"),
        ("trace:nowhere.csv", "cannot read the trace nowhere.csv"),
    ],
)
def test_wrong_arrivals_say_what_is_right(text: str, told: str) -> None:
    """Wrong arrivals are refused with the kinds that are known, or with what the value should be."""
    with pytest.raises(ValueError, match=told):
        arrivals_of(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("linear:a=3ms", "there is no cost 'linear'; choose one of affine, knee, padded, sqrt, table, tile"),
        ("affine:a=8ms", "it needs b too; for example affine:a=8ms,b=0.25ms"),
        ("affine:a=8,b=1ms", "'8' is not a duration"),
        ("table:1=8", "'8' is not a duration"),
        ("table:nowhere.csv", "cannot read the cost table nowhere.csv"),
    ],
)
def test_wrong_costs_say_what_is_right(text: str, told: str) -> None:
    """Wrong costs are refused with the kinds that are known, or with what the value should be."""
    with pytest.raises(ValueError, match=told):
        cost_of(text)


def test_what_is_nothing_of_the_kind() -> None:
    """A value of a type that cannot be meant as a spec is refused."""
    with pytest.raises(TypeError, match="arrivals must be"):
        arrivals_of(3)
    with pytest.raises(TypeError, match="cost must be"):
        cost_of(3)
    with pytest.raises(TypeError, match="policy must be"):
        policy_of(3, max_batch_size=1, slo_s=None, cost_s=lambda n: n)  # type: ignore[arg-type]


def test_policies_get_what_they_take() -> None:
    """Limits, the SLO and the true cost are given to policies that have such a parameter."""

    def curve(n: float) -> float:
        return 0.001 * n

    static = policy_of("static:10ms,allowed_batch_sizes=4/16", max_batch_size=16, slo_s=0.1, cost_s=curve)
    cork = policy_of("cork", max_batch_size=16, slo_s=0.1, cost_s=curve)

    assert (static.max_batch_size, static.max_queue_delay_s) == (16, 0.01)
    assert vars(static)["allowed_batch_sizes"] == (4, 16)
    assert vars(cork)["slo_s"] == 0.1
    for answer, from_idle in {"yes": True, "no": False}.items():
        idle = policy_of(f"static:10ms,from_idle={answer}", max_batch_size=16, slo_s=None, cost_s=curve)
        assert vars(idle)["from_idle"] is from_idle
    with pytest.raises(ValueError, match="'1' is neither yes nor no; for example static:10ms"):
        policy_of("static:10ms,from_idle=1", max_batch_size=16, slo_s=None, cost_s=curve)
    with pytest.raises(ValueError, match="there is no policy 'gredy'; choose one of adaptive"):
        policy_of("gredy", max_batch_size=1, slo_s=None, cost_s=curve)
