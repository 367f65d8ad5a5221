"""Checks of settings, in one voice: each says which setting is wrong, what it was, and what would do."""

from __future__ import annotations

import copy

from carpool.policy import BY_NAME, Greedy, Policy


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


def check_policy(policy: Policy | str | None) -> None:
    """A policy or the name of one. Raises ValueError or TypeError."""
    if isinstance(policy, str) and policy not in BY_NAME:
        known = ", ".join(sorted(BY_NAME))
        raise ValueError(f"there is no policy {policy!r}; choose one of {known}, or give a Policy object")
    if policy is not None and not isinstance(policy, str | Policy):
        raise TypeError(f"policy must be a name or a Policy object, not {policy!r}")


def policy_for(policy: Policy | str | None, max_batch_size: int, max_queue_delay_s: float | None) -> Policy:
    """A policy of its own for one queue, within the given limits; Greedy if none is asked for."""
    if policy is None:
        policy = Greedy()
    policy = BY_NAME[policy]() if isinstance(policy, str) else copy.deepcopy(policy)
    if policy.max_batch_size is None or policy.max_batch_size > max_batch_size:
        policy.max_batch_size = max_batch_size
    if policy.max_queue_delay_s is None:
        policy.max_queue_delay_s = max_queue_delay_s
    return policy
