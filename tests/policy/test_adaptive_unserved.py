"""Adaptive gives up what is late while no worker is there."""

from __future__ import annotations

import pytest

from carpool.core.queue import Queue
from carpool.policy import Adaptive
from carpool.request import Request
from tests.policy.view import view_of


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_late_is_given_up_though_no_worker_is_there(n: int) -> None:
    """While no worker is there, requests are refused once they are late for their SLO, and not
    kept until one has come.
    """
    policy, queue = Adaptive(), Queue()
    requests = [Request(i, 10.0, None, 1) for i in range(n)]
    for request in requests:
        request.due = 0.1
    queue.push(requests)
    early = policy.decide(view_of(0.05, queue, 0, 0))
    assert (early.take, list(early.drop), early.wake_at) == (0, [], 0.1)
    assert list(policy.decide(view_of(0.11, queue, 0, 0)).drop) == requests
    last = Request(n, 10.0, None, 1)
    last.due = 0.2
    queue.push([last])
    late = policy.decide(view_of(0.11, queue, 0, 0))
    assert (list(late.drop), late.wake_at) == (requests, 0.2)
    assert not policy.decide(view_of(0.11, queue, 0, 1)).drop
