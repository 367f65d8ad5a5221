"""Greedy: whatever is queued, as soon as a worker is free."""

from __future__ import annotations

import pytest

from carpool.engine.policy import Decision, Greedy
from carpool.engine.policy.base import NOTHING
from tests.support.view import view_of, waiting


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, Decision(take=1, reason="free")),
        (3, Decision(take=3, reason="free")),
        (4, Decision(take=4, reason="full")),
        (9, Decision(take=4, reason="full")),
    ],
)
def test_all_that_waits_goes_up_to_the_limit(n: int, expected: Decision) -> None:
    """`Greedy` sends all that waits up to the limit, a lone request as well."""
    assert Greedy(4).decide(view_of(0, waiting(*[0.0] * n), free=1, busy=5)) == expected


def test_without_a_free_worker_or_work_there_is_nothing_to_do() -> None:
    """Without a free worker or waiting requests nothing is sent: batches grow while all workers are
    busy.
    """
    assert Greedy(4).decide(view_of(0, waiting(*[0.0] * 9), free=0, busy=1)) is NOTHING
    assert Greedy(4).decide(view_of(0, waiting(), free=1, busy=0)) is NOTHING


def test_it_never_holds_back() -> None:
    """`max_queue_delay_s` changes nothing for `Greedy`, which never holds back."""
    assert Greedy(4, max_queue_delay_s=10).decide(view_of(0, waiting(0), free=1, busy=0)).take == 1
