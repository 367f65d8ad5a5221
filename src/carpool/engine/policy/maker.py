"""Makes the policy of one queue from the name or the object that a user gives."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from math import inf
from typing import Literal

from carpool.engine.policy.adapted import adapted
from carpool.engine.policy.adaptive import Adaptive
from carpool.engine.policy.aimd import AIMD
from carpool.engine.policy.base import Policy
from carpool.engine.policy.cork import Cork
from carpool.engine.policy.deadline import Deadline
from carpool.engine.policy.greedy import Greedy
from carpool.engine.policy.paced import Paced
from carpool.engine.policy.static import Static
from carpool.engine.policy.steps import GreedySteps, StaticSteps, StepPolicy


def efficient(max_batch_size: int | None = None, max_queue_delay_s: float | None = None) -> Adaptive:
    """Make an `Adaptive` that prefers efficiency, with arguments as there."""
    return Adaptive(max_batch_size, max_queue_delay_s, prefer="efficiency")


BY_NAME: dict[str, Callable[..., Policy]] = {
    "adaptive": Adaptive,
    "efficient": efficient,
    "greedy": Greedy,
    "static": Static,
    "aimd": AIMD,
    "cork": Cork,
    "deadline": Deadline,
}
"""The policies that a stage may name. `OneByOne` follows from a stage of single items instead."""

STEPS_BY_NAME: dict[str, type[StepPolicy]] = {"paced": Paced, "greedy": GreedySteps, "static": StaticSteps}
"""The policies that a stage of steps may name."""

PolicyName = Literal["adaptive", "efficient", "greedy", "static", "aimd", "cork", "deadline", "paced"]
"""The names of policies, those of steps included, for type checkers."""


def new_policy(
    policy: Policy | str | None,
    max_batch_size: int,
    *,
    max_queue_delay_s: float | None = None,
    allowed_batch_sizes: Sequence[int] | None = None,
    max_padded_size: int | None = None,
    allowed_lengths: Sequence[int] | None = None,
    overload: str = "goodput",
    slo_s: float | None = None,
) -> Policy:
    """Make a policy for one queue.

    The settings of a policy object count more than those given here, within the limits of the
    queue.

    Args:
        policy: A template, which is copied, or a name of `BY_NAME`; None for Adaptive.
        max_batch_size: The most that a batch may hold, even if the policy's own limit is higher.
        max_queue_delay_s: How long a request may be held back, unless the policy has a delay.
        allowed_batch_sizes: The sizes that batches are padded to, unless the policy has some.
        max_padded_size: The most that a batch's count times its longest length may be.
        allowed_lengths: The lengths that items are padded to.
        overload: The service's setting, which always counts.
        slo_s: The service's SLO, for policies that must know it beforehand and have none; all
            others see it in the dues of the requests.

    Raises:
        TypeError: Its class mixes the present interface with the former one; see `adapted`.
    """
    made = BY_NAME[policy or "adaptive"]() if policy is None or isinstance(policy, str) else copy.deepcopy(policy)
    limit(made, max_batch_size)
    if made.max_queue_delay_s is None:
        made.max_queue_delay_s = max_queue_delay_s
    if made.allowed_batch_sizes is None:
        made.allowed_batch_sizes = allowed_batch_sizes
    made.max_padded_size = inf if max_padded_size is None else max_padded_size
    made.allowed_lengths = allowed_lengths
    made.overload = overload
    if made.slo_s is None:
        made.slo_s = slo_s
    return adapted(made)


def limit(policy: Policy, max_batch_size: int) -> None:
    """Limit the batches of a policy to `max_batch_size`, unless its own limit is smaller."""
    own = policy.max_batch_size
    policy.max_batch_size = max_batch_size if own is None else min(operator.index(own), max_batch_size)


def new_step_policy(
    policy: Policy | str | None,
    rows: int,
    *,
    part_slo_s: float | None = None,
    slo_s: float | None = None,
    overload: str = "goodput",
) -> StepPolicy:
    """Make a policy for one stage of steps.

    The settings of a policy object count more than those given here, within the limits of the
    stage.

    Args:
        policy: A template, which is copied, or a name of `STEPS_BY_NAME`; None for Paced.
        rows: The most streams in a running set, even if the policy's own limit is higher.
        part_slo_s: How far apart parts should be, unless the policy knows better.
        slo_s: The service's SLO, likewise.
        overload: The service's setting, which always counts.

    Raises:
        ValueError: There is no policy of steps of this name.
        TypeError: The template is a policy of batches.
    """
    if policy is None or isinstance(policy, str):
        name = policy or "paced"
        if name not in STEPS_BY_NAME:
            known = ", ".join(map(repr, STEPS_BY_NAME))
            raise ValueError(f"there is no policy of steps {name!r}; choose one of {known}")
        made = STEPS_BY_NAME[name]()
    elif isinstance(policy, StepPolicy):
        made = copy.deepcopy(policy)
    else:
        kind = type(policy).__name__
        raise TypeError(f"{kind} decides on batches, and this stage works step by step; give a StepPolicy")
    limit(made, rows)
    if made.part_slo_s is None:
        made.part_slo_s = part_slo_s
    if made.slo_s is None:
        made.slo_s = slo_s
    made.overload = overload
    return made
