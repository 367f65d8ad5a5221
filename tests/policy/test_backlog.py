"""How much backlog is kept: all, what is servable, and less as an overload lasts."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from hypothesis import given
from hypothesis import strategies as st

from carpool.policy.backlog import Backlog, Pace
from tests.support.properties import PROPERTY

CAPACITY, SLO_S, AHEAD_S = 1000.0, 1.0, 0.0499  # 900 can be served in time, as batches vary
BATCH, BATCH_S = 50, 0.05


def kept(
    backlog: Backlog, now: float, waiting: int, overload: str = "goodput", arriving: float = 2000.0, noise: float = 0.1
) -> int:
    """How much, at a capacity of 1000 a second, an SLO of a second and batches of 50 in 50 ms."""
    return backlog.keep(now, waiting, Pace(arriving, CAPACITY, 1, BATCH, BATCH_S, noise), SLO_S, AHEAD_S, overload)


def test_without_overload_all_is_kept() -> None:
    """Without overload a backlog is kept whole, up to half of what can be served in time."""
    backlog = Backlog()

    assert kept(backlog, 5, 450) == 450
    assert backlog.overloaded_since is None


def test_at_first_all_that_can_be_served_is_kept() -> None:
    """When an overload begins all that can be served in time is kept: what is beyond would be too
    late anyhow.
    """
    backlog = Backlog()

    assert kept(backlog, 5, 5000) == 900
    assert backlog.overloaded_since == 5


def test_full_batches_that_end_in_time_are_kept() -> None:
    """As long as there is no noise full batches are kept up to the last one that ends in time:
    there is room for 19 requests.
    """
    assert kept(Backlog(), 5, 5000, noise=0.0) == 950
    assert kept(Backlog(), 5, 5000, noise=0.004) == 950
    assert kept(Backlog(), 5, 5000, noise=0.06) == 900


def test_the_longer_it_lasts_the_less_is_kept() -> None:
    """Most of the backlog is kept for an SLO's time, less than half after thirty, and never less
    than a share.
    """
    backlog = Backlog()
    keeps = [kept(backlog, 5 + seconds, 5000) for seconds in (0, 1, 2, 4, 8, 30, 1000, 10_000)]

    assert all(a >= b for a, b in pairwise(keeps))
    assert keeps[1] > 0.75 * 900
    assert keeps[5] < 0.5 * 900
    assert 2 * BATCH < keeps[-1] == keeps[-2] < 0.3 * 900


def test_for_latency_less_is_kept() -> None:
    """In favour of latency as much is kept at first, less than half after an SLO's time, and in the
    end only what a full batch and chance need.
    """
    backlog, other = Backlog(), Backlog()

    assert kept(backlog, 5, 5000, "latency") == kept(other, 5, 5000, "goodput") == 900
    assert kept(backlog, 6, 5000, "latency") < 0.5 * kept(other, 6, 5000, "goodput")
    assert BATCH < kept(backlog, 1005, 5000, "latency") < 2 * BATCH


def test_a_full_batch_can_always_follow() -> None:
    """What is kept behind one batch, with what comes while that runs, fills the next one, even if
    by chance that is two sigma less.
    """
    backlog = Backlog()
    kept(backlog, 5, 5000)
    for arriving in (500, 1000, 1100, 2000, 10_000):
        meanwhile = arriving * BATCH_S

        assert kept(backlog, 1e9, 5000, "latency", arriving) - BATCH + meanwhile - 2 * meanwhile**0.5 >= BATCH


def look(backlog: Backlog, now: float, waiting: int, workers: int = 1) -> int:
    """How much need not be kept, at full load."""
    return backlog.look(now, waiting, Pace(CAPACITY, CAPACITY, workers, BATCH, BATCH_S, 0.1), SLO_S)


def test_a_backlog_stands_after_two_slos() -> None:
    """A backlog stands when for two SLOs no look has found that one batch could take all of it;
    then a batch and what chance may take away are kept.
    """
    backlog = Backlog()
    spare = 500 - (50 + int(2 * sqrt(50)) + 1)

    assert [look(backlog, now, 500) for now in (5, 6, 7, 7.1, 8)] == [0, 0, 0, spare, spare]
    assert [look(backlog, now, n) for now, n in ((8.1, 60), (8.2, 50), (9, 500), (10, 500), (11, 500))] == [0] * 5
    assert look(backlog, 11.1, 500) == spare
    backlog.drained()
    assert [look(backlog, now, 500) for now in (11.2, 12)] == [0, 0]


def test_after_a_silence_nobody_knows_whether_it_stands() -> None:
    """After a silence a backlog does not count as standing, since it may have left meanwhile."""
    backlog = Backlog()

    assert [look(backlog, now, 500) for now in (5, 6, 100, 101, 102)] == [0] * 5
    assert look(backlog, 102.1, 500) > 0


def test_workers_in_step_need_a_batch_each() -> None:
    """Even when the least is kept, a worker that becomes free just after the others finds a batch,
    too.
    """
    for workers, in_step, least in ((1, True, 1), (2, False, 1), (2, True, 2), (4, False, 2), (4, True, 4)):
        backlog, pace = Backlog(), Pace(2 * CAPACITY, CAPACITY, workers, BATCH, BATCH_S * workers, 0.0)
        for turn in range(800):
            for worker in range(workers):
                now = 5 + pace.batch_s * turn + BATCH_S * worker * (0.01 if in_step else 1)
                keeps = backlog.keep(now, 5000, pace, 0.3, 0.0, "latency")
                backlog.look(now, 5000, pace, 0.3)
        assert round(keeps / BATCH) == least


def test_several_workers_take_several_batches() -> None:
    """With several workers a backlog that they could take at once does not stand."""
    backlog = Backlog()

    assert [look(backlog, now, 200, workers=4) for now in (5, 6, 7, 8)] == [0] * 4
    assert [look(backlog, now, 400, workers=4) > 0 for now in (9, 10, 11, 11.1)] == [False, False, False, True]


def test_calm_ends_it() -> None:
    """When an overload has ended, the time of the next one counts from its own beginning."""
    backlog = Backlog()
    kept(backlog, 5, 5000)
    assert kept(backlog, 505, 5000) < 300
    backlog.calm()
    assert backlog.overloaded_since is None
    assert kept(backlog, 506, 5000) == 900


@PROPERTY
@given(
    st.integers(1, 10_000),
    st.floats(0, 100),
    st.sampled_from(["goodput", "latency"]),
    st.floats(1, 1e5),
    st.integers(1, 8),
    st.floats(0.01, 2),
)
def test_never_less_than_a_batch(
    waiting: int, lasts_s: float, overload: str, arriving: float, workers: int, slo_s: float
) -> None:
    """At least a batch is kept, and asked twice at one moment the answer is the same."""
    backlog = Backlog()
    pace = Pace(arriving, workers * CAPACITY, workers, BATCH, BATCH_S, 0.1)
    for now in (5.0, 5.0 + lasts_s):
        keeps = [backlog.keep(now, waiting, pace, slo_s, 0.0, overload) for _ in range(2)]

        assert keeps[0] == keeps[1]
        assert keeps[0] >= min(waiting, BATCH)
