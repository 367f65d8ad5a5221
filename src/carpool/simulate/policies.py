"""The policies that take part: by name with parameters, as objects, or made by a function."""

from __future__ import annotations

import copy
from collections.abc import Callable

from carpool.policy import BY_NAME, Policy, limit
from carpool.simulate import specs

EXAMPLE = "static:10ms"

PolicyLike = str | Policy | Callable[[], Policy]
"""A spec (`adaptive`, `static:10ms`), a policy, which serves as a template, or a function that makes one."""


def policy_of(
    policy: PolicyLike, *, max_batch_size: int, slo_s: float | None, cost_s: Callable[[float], float]
) -> Policy:
    """A fresh policy for one stage.

    A policy that is named gets what it takes of `slo_s`, the (longest) SLO, and of `cost_s`, the true cost of a batch.

    Raises:
        ValueError: there is no such policy or parameter.
        TypeError: it is none.
    """
    if isinstance(policy, str):
        given = {"max_batch_size": max_batch_size, "cost_s": cost_s}
        if slo_s is not None:
            given["slo_s"] = slo_s
        policy = specs.build(policy, BY_NAME, "policy", EXAMPLE, **given)
    elif isinstance(policy, Policy):
        policy = copy.deepcopy(policy)
    elif callable(policy):
        policy = policy()
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a spec such as {EXAMPLE!r}, a Policy or a function that makes one: {policy!r}")
    limit(policy, max_batch_size)
    return policy


def label_of(policy: PolicyLike) -> str:
    """What a policy is called in tables."""
    if isinstance(policy, str):
        return policy
    if isinstance(policy, Policy):
        return type(policy).__name__.lower()
    return getattr(policy, "__name__", type(policy).__name__).lower()
