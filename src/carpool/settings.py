"""Checks of settings, in one voice: each says which setting is wrong, what it was, and what would do."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from carpool.policy import BY_NAME, Adaptive, Policy

LARGEST_PRIORITY = 100
"""Priorities are whole numbers from minus this to this."""


def at_least(name: str, value: int, least: int) -> None:
    """A whole number that must not be smaller. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def positive(name: str, value: float | None) -> None:
    """A duration that must be positive, where it is given at all. Raises ValueError."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")


def not_negative(name: str, value: float | None) -> None:
    """A duration that may be 0, where it is given at all. Raises ValueError."""
    if value is not None and not value >= 0:
        raise ValueError(f"{name} must be 0 or more seconds, not {value!r}")


def check_priority(priority: int) -> None:
    """A request's priority. Raises ValueError."""
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > LARGEST_PRIORITY:
        raise ValueError(
            f"priority must be a whole number from -{LARGEST_PRIORITY} to {LARGEST_PRIORITY}, not {priority!r}"
        )


def check_policy(policy: Policy | str | None) -> None:
    """A policy or the name of one. Raises ValueError or TypeError."""
    if isinstance(policy, str) and policy not in BY_NAME:
        known = ", ".join(sorted(BY_NAME))
        raise ValueError(f"there is no policy {policy!r}; choose one of {known}, or give a Policy object")
    if policy is not None and not isinstance(policy, str | Policy):
        raise TypeError(f"policy must be a name or a Policy object, not {policy!r}")


def check_overload(overload: str) -> None:
    """What a service looks after while it cannot serve all. Raises ValueError."""
    if overload not in ("goodput", "latency"):
        raise ValueError(
            f'overload must be "goodput" (as many answers in time as possible) or "latency", not {overload!r}'
        )


def check_sizes(allowed_batch_sizes: Sequence[int], max_batch_size: int) -> None:
    """Batch sizes that a model is called with. Raises ValueError."""
    sizes = list(allowed_batch_sizes)
    for size in sizes:
        at_least("each of allowed_batch_sizes", size, 1)
    if not sizes or sizes != sorted(set(sizes)):
        raise ValueError(f"allowed_batch_sizes must rise from one to the next, such as [1, 2, 4], not {sizes!r}")
    if sizes[-1] != max_batch_size:
        raise ValueError(f"the last of allowed_batch_sizes ({sizes[-1]}) must be max_batch_size ({max_batch_size})")


def policy_for(
    policy: Policy | str | None,
    max_batch_size: int,
    max_queue_delay_s: float | None,
    *,
    allowed_batch_sizes: Sequence[int] | None = None,
    overload: str = "goodput",
    slo_s: float | None = None,
) -> Policy:
    """A policy of its own for one queue, within the given limits; Adaptive if none is asked for.

    What the policy object says itself counts; `overload` is the service's and is always filled in.
    `slo_s` is for policies that need to know it beforehand; all others see it in the requests' due times.
    """
    if policy is None:
        policy = Adaptive()
    policy = BY_NAME[policy]() if isinstance(policy, str) else copy.deepcopy(policy)
    if policy.max_batch_size is None or policy.max_batch_size > max_batch_size:
        policy.max_batch_size = max_batch_size
    if policy.max_queue_delay_s is None:
        policy.max_queue_delay_s = max_queue_delay_s
    if policy.allowed_batch_sizes is None:
        policy.allowed_batch_sizes = allowed_batch_sizes
    policy.overload = overload
    if policy.slo_s is None:
        policy.slo_s = slo_s
    return policy
