"""Batches that a contestant has put together before a worker is free, so that they grow no more."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.engine.policy.base import Policy
from carpool.engine.request import Request


def in_state(requests: Sequence[Request], state: int, node: object) -> list[Request]:
    """Return those of the requests that are in a state, at a node of the graph."""
    return [request for request in requests if request.state == state and request.node is node]


def together(requests: Sequence[Request], policy: Policy) -> list[Request]:
    """Return as many of the requests, from the first on, as one call may serve.

    They have the key of the first one, and fit into the policy's limits; the first one always does.
    """
    first, allowed = requests[0].lane, policy.allowed_lengths
    size = longest = 0
    chosen: list[Request] = []
    for request in requests:
        if (request.lane.key, request.lane.bucket) != (first.key, first.bucket):
            continue
        size += request.size
        length = next((each for each in allowed or () if each >= request.length), request.length)
        longest = max(longest, length)
        if chosen and (size > policy.limit or (len(chosen) + 1) * longest > policy.max_padded_size):
            break
        chosen.append(request)
    return chosen


def size_of(requests: Sequence[Request], limit: int) -> int:
    """Return the size of a batch of the requests, which is the limit if one is larger by itself."""
    return min(limit, sum([request.size for request in requests]))
