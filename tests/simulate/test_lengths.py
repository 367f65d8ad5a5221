"""Requests with lengths: where these come from, what padding costs, and what reports say of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from carpool.simulate import Report, run
from carpool.simulate.features import lengths_of


def inputs(spec: str, n: int) -> list[int]:
    """The inputs of the first requests of a source."""
    return [length.input for length in islice(lengths_of(spec).draw(Random(1)), n)]


def plain(lengths: str, cost: Any, **settings: Any) -> Report:
    """Four requests at once, in batches of two in order of arrival."""
    given: dict[str, Any] = {"arrivals": [0.0] * 4, "slo_s": None, "max_batch_size": 2, "duration_s": 64}
    return run("greedy", cost=cost, lengths=lengths, lengths_known=False, **{**given, **settings})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Lengths in a file with a header line."""
    path = tmp_path / "requests.csv"
    path.write_text("t,tokens\n0,1\n0,5\n0,2\n0,6\n")
    return path


def test_two_kinds_of_requests() -> None:
    """Of bimodal lengths the given share is long, and each kind has its mean."""
    found = inputs("bimodal:short=10,long=200,long_share=0.25", 20_000)
    long = [length for length in found if length > 100]

    assert len(long) / len(found) == pytest.approx(0.25, rel=0.05)
    assert fmean(long) == pytest.approx(200, rel=0.02)
    assert fmean(length for length in found if length <= 100) == pytest.approx(9.5, rel=0.02)  # the part is cut off


def test_lengths_from_a_file(tmp_path: Path, file: Path) -> None:
    """A file of lengths may be bare numbers or have a column of them, in order if that is wanted."""
    bare = tmp_path / "bare.txt"
    bare.write_text("1\n5\n2\n6\n")

    assert inputs(f"file:{bare},in_order=yes", 6) == [1, 5, 2, 6, 1, 5]
    assert inputs(f"file:{file},column=tokens,in_order=yes", 4) == [1, 5, 2, 6]
    assert set(inputs(f"file:{file},column=tokens", 100)) == {1, 5, 2, 6}


@pytest.mark.parametrize(
    ("content", "column", "told"),
    [
        ("tokens\n", "", "has no lengths"),
        ("tokens\nfew\n", "", "should have a number in each line"),
        ("tokens\n1\n", ",column=length", "no column 'length'"),
        (None, "", "cannot read"),
    ],
)
def test_bad_files_of_lengths(tmp_path: Path, content: str | None, column: str, told: str) -> None:
    """What is wrong with a file of lengths is said."""
    if content is not None:
        (tmp_path / "odd.csv").write_text(content)

    with pytest.raises(ValueError, match=told):
        lengths_of(f"file:{tmp_path / 'odd.csv'}{column}")


def test_a_batch_costs_its_longest(file: Path) -> None:
    """A batch is padded to its longest request, and reports say how much of the work that was."""
    report = plain(f"file:{file},column=tokens,in_order=yes", lambda n, longest: n * longest)

    assert report.mean_s == (10 + 10 + 22 + 22) / 4
    assert report.padding_share == pytest.approx(1 - 14 / 22)
    assert (report.long_p99_s, report.long_attainment) == (22, 1.0)
    assert report.length_p99_s == {1: 10, 2: 22, 8: 22}


def test_the_longest_tenth_is_told_apart() -> None:
    """The figures of the longest tenth are those of the longest requests only."""
    settings = {"arrivals": [0.0] * 20, "max_batch_size": 1, "slo_s": 20.5, "duration_s": 64}
    report = plain("fixed:1", lambda n: 1.0, **settings)

    assert (report.long_attainment, report.long_p99_s) == (1.0, 20)  # all are as long as the longest tenth
    assert report.padding_share == 0


def test_a_trace_brings_its_own_lengths(file: Path) -> None:
    """A trace may have a column of lengths, which its requests keep whatever the policy does."""
    report = plain("fixed:100", lambda n, longest: n * longest, arrivals=f"trace:{file},length=tokens")

    assert report.mean_s == (10 + 10 + 22 + 22) / 4


def test_policies_that_are_told_lengths_pad_less() -> None:
    """A policy that is told the lengths pads less and serves more than the same one that is not, and
    pads to the allowed lengths if there are any.
    """
    given: dict[str, Any] = {
        "lengths": "bimodal:short=4,long=100",
        "slo_s": None,
        "max_batch_size": 32,
        "duration_s": 2,
    }
    load, cost = "closed:clients=64,think=0s", "padded:a=2ms,b=20us"
    told = run("adaptive", load, cost, **given)
    untold = run("adaptive", load, cost, lengths_known=False, **given)
    allowed = run("adaptive", load, cost, allowed_lengths=[8, 128], **given)

    assert told.padding_share is not None and untold.padding_share is not None and allowed.padding_share is not None
    assert told.padding_share < 0.7 * untold.padding_share
    assert told.throughput > 1.5 * untold.throughput
    assert told.padding_share < allowed.padding_share < untold.padding_share


def test_padded_batches_are_limited(tmp_path: Path) -> None:
    """No batch is larger than `max_padded_size`, its count times its longest length."""
    path = tmp_path / "lengths.txt"
    path.write_text("4\n4\n4\n3\n")
    given: dict[str, Any] = {"lengths": f"file:{path},in_order=yes", "max_padded_size": 12, "duration_s": 99}
    report = run("greedy", [0.0] * 8, lambda n, longest: n * longest, None, 8, **given)

    assert sum(n * count for n, count in report.batch_sizes.items()) == 8
    assert max(report.batch_sizes) <= 4


@pytest.mark.parametrize("policy", ["greedy", "adaptive", "static"])
def test_padded_batches_are_limited_where_all_are_of_one_length(policy: str) -> None:
    """`max_padded_size` holds where no two lengths differ: three requests of length 4 make 12."""
    given: dict[str, Any] = {"lengths": "fixed:4", "max_padded_size": 12, "duration_s": 999}
    report = run(policy, [0.0] * 8, lambda n, longest: n * longest, None, 8, **given)

    assert report.batch_sizes == {3: 2, 2: 1}


def test_requests_without_lengths_have_no_figures_of_them() -> None:
    """Without lengths no report speaks of padding, of long requests or of keys."""
    report = run("greedy", [0.0] * 4, lambda n: n, None, 4, duration_s=9)

    assert (report.padding_share, report.long_p99_s, report.long_attainment, report.switch_share) == (None,) * 4
    assert report.length_p99_s == {}


def test_weights_and_lengths_together_are_refused() -> None:
    """Requests have weights or lengths, but not both."""
    with pytest.raises(ValueError, match="weights or lengths, but not both"):
        run("greedy", weights=[2.0], lengths="fixed:3", duration_s=1)


def test_deadline_is_told_the_cost_of_plain_order(file: Path) -> None:
    """The policy that is told the true cost is told the mean one of batches in order of arrival, so
    that it answers padded batches in time.
    """
    lengths, cost = f"file:{file},column=tokens", "padded:a=1ms,b=1ms"
    settings: dict[str, Any] = {"slo_s": 0.2, "max_batch_size": 8, "duration_s": 20, "lengths_known": False}

    assert run("deadline", "poisson:rate=100", cost, lengths=lengths, **settings).attainment > 0.99


def test_keys_do_not_mix() -> None:
    """Requests with different keys share no batch, and a batch with another key than the one before
    on its worker takes longer.
    """
    report = run("greedy", [0.0] * 4, lambda n: n, None, 4, duration_s=64, keys="turn:2", switch_s=10.0)

    assert (report.batch_sizes, report.mean_s, report.switch_share) == ({2: 2}, 18.0, 1.0)


def test_a_worker_that_keeps_its_key_does_not_switch() -> None:
    """Only changes of key count as such, and the first batch of a worker."""
    report = run("greedy", [0.0, 5.0, 10.0, 15.0], lambda n: 1.0, None, 1, duration_s=64, keys=1, switch_s=2.0)

    assert (report.switch_share, report.mean_s) == (0.25, 1.5)


@pytest.mark.parametrize("keys", [0, "zipf:count=0", "zipf:count=3,power=-1", "hash:3"])
def test_bad_keys(keys: object) -> None:
    """Keys that cannot be are refused, and what would do is said."""
    with pytest.raises(ValueError, match=r"at least 1 key|power must be|there is no source of keys"):
        run("greedy", keys=keys, duration_s=1)
