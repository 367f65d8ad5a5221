"""The policies that take part in a run, given by name, as objects or as functions.

Names are those of a service's policies and of the contestants.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from carpool.engine.policy import BY_NAME, Policy, adapted, limit
from carpool.engine.policy.base import name_of
from carpool.service.checks import warn_if_former
from carpool.simulate import specs
from carpool.simulate.contestants import CONTESTANTS

EXAMPLE = "static:10ms"

SIMULATED: dict[str, Callable[..., Policy]] = {**BY_NAME, **CONTESTANTS}
"""All policies that a spec can name."""

TUNED = "tuned"
"""The spec of a search: `run` makes a run for each point of the grid."""

PolicyLike = str | Policy | Callable[[], Policy]
"""A spec (`adaptive`, `static:10ms`), a policy (a template) or a function that makes one."""


def policy_of(
    policy: PolicyLike, *, max_batch_size: int, slo_s: float | None, cost_s: Callable[[float], float]
) -> Policy:
    """Make the policy of one stage.

    Args:
        max_batch_size: The most that a batch may hold, whatever the policy says.
        slo_s: The (longest) SLO in seconds, for a policy given by name that takes it.
        cost_s: The true cost of a batch in seconds, for a policy given by name that takes it.

    Raises:
        ValueError: There is no such policy or parameter.
        TypeError: `policy` is none of these, or the function returns something else, or its class
            mixes the present interface with the former one.
    """
    if isinstance(policy, str):
        given = {"max_batch_size": max_batch_size, "cost_s": cost_s}
        if slo_s is not None:
            given["slo_s"] = slo_s
        policy = specs.build(policy, SIMULATED, "policy", EXAMPLE, **given)
    elif isinstance(policy, Policy):
        policy = copy.deepcopy(policy)
    elif callable(policy):
        policy = policy()
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a spec such as {EXAMPLE!r}, a Policy or a function that makes one: {policy!r}")
    limit(policy, max_batch_size)
    warn_if_former(policy)
    return adapted(policy)


def label_of(policy: PolicyLike) -> str:
    if isinstance(policy, str):
        return policy
    if isinstance(policy, Policy):
        return name_of(policy)
    return getattr(policy, "__name__", type(policy).__name__).lower()
