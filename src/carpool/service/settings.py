"""Checks of settings, in one voice: each says which setting is wrong, what it was, and what would do."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from numbers import Real
from typing import Any

from carpool.policy import BY_NAME, Adaptive, Policy, Static

LARGEST_PRIORITY = 100
"""Priorities are whole numbers from minus this to this."""


def at_least(name: str, value: Any, least: int) -> int:
    """A whole number that must not be smaller, of Python's or numpy's making. Raises ValueError."""
    whole = _whole(value)
    if whole is None or whole < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return whole


def seconds(name: str, value: Any) -> float:
    """A duration that must be positive; infinity means no limit. Raises ValueError."""
    number = _number(value)
    if number is None or not number > 0:
        raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")
    return number


def positive(name: str, value: Any) -> float | None:
    """Like `seconds`, where it is given at all."""
    if value is None or (type(value) is float and value > 0):  # the quick way, for calls with time-outs of their own
        return value
    return seconds(name, value)


def finite(name: str, value: Any) -> float | None:
    """A positive duration, where it is given at all, that infinity cannot stand for. Raises ValueError."""
    number = positive(name, value)
    if number == inf:
        raise ValueError(f"{name} must be a finite number of seconds, not {value!r}; leave it out for none")
    return number


def not_negative(name: str, value: Any) -> float:
    """A duration that may be 0. Raises ValueError."""
    number = _number(value)
    if number is None or not number >= 0:
        raise ValueError(f"{name} must be 0 or more seconds, not {value!r}")
    return number


def delay(name: str, value: Any) -> float | None:
    """A duration that may be 0 but not infinite, where it is given at all. Raises ValueError."""
    if value is None:
        return None
    number = _number(value)
    if number is None or not 0 <= number < inf:
        raise ValueError(f"{name} must be 0 or more seconds, and finite, not {value!r}")
    return number


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that merely counts as one of them. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def text(name: str, value: Any) -> str | None:
    """A name, where one is given. Raises TypeError or ValueError."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, not {value!r}")
    if not value:
        raise ValueError(f"{name} must not be empty: leave it out for the default")
    return value


def function(name: str, value: Any, of_what: str) -> None:
    """Something that can be called. Raises TypeError."""
    if not callable(value):
        raise TypeError(f"{name} must be a function of {of_what}, not {value!r}")


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A mapping whose keys are text, as a dict of its own. Raises TypeError."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping such as {{'key': value}}, not {value!r}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} must have text for its keys, not {key!r}")
    return dict(value)


def environment(value: Any) -> dict[str, str]:
    """`env=` of a stage: names and values as the operating system takes them. Raises TypeError or ValueError."""
    env = mapping("env", value)
    for key, content in env.items():
        if not isinstance(content, str):
            raise TypeError(f"env[{key!r}] must be text, not {content!r}: write {str(content)!r}")
        if not key or "=" in key or "\0" in key + content:
            raise ValueError(
                f"env[{key!r}] cannot be an environment variable: a name has no '=', and no part a zero byte"
            )
    return env


def check_priority(priority: Any) -> int:
    """A request's priority. Raises ValueError."""
    if type(priority) is int and -LARGEST_PRIORITY <= priority <= LARGEST_PRIORITY:  # the quick way
        return priority
    whole = _whole(priority)
    if whole is None or abs(whole) > LARGEST_PRIORITY:
        raise ValueError(
            f"priority must be a whole number from -{LARGEST_PRIORITY} to {LARGEST_PRIORITY}, not {priority!r}"
        )
    return whole


def check_policy(policy: Policy | str | None) -> None:
    """A policy or the name of one. Raises ValueError or TypeError."""
    if isinstance(policy, str) and policy not in BY_NAME:
        known = ", ".join(sorted(BY_NAME))
        raise ValueError(f"there is no policy {policy!r}; choose one of {known}, or give a Policy object")
    if policy is not None and not isinstance(policy, str | Policy):
        raise TypeError(f"policy must be a name or a Policy object, not {policy!r}")
    if isinstance(policy, Policy):
        if not hasattr(policy, "slo_s"):
            raise TypeError(f"{type(policy).__name__}.__init__ must call super().__init__()")
        if policy.max_batch_size is not None:
            at_least("max_batch_size of the policy", policy.max_batch_size, 1)
        delay("max_queue_delay_s of the policy", policy.max_queue_delay_s)
        finite("slo_s of the policy", policy.slo_s)


def held_s(policy: Policy) -> float:
    """How long a lone request that comes right after a batch is certain to be held back to fill the next one."""
    if type(policy).decide is not Static.decide or policy.limit <= 1:
        return 0.0
    return policy.max_queue_delay_s or 0.0


def check_held(held_s: float, timeout_s: float) -> None:
    """Whether a lone request that is held so long, in all stages together, can still be answered. Raises ValueError."""
    if held_s >= timeout_s:
        raise ValueError(
            f"max_queue_delay_s ({held_s:g} s in all) must be shorter than timeout_s ({timeout_s:g} s): the static"
            " policy holds a lone request back for all of it, so that it would expire beside an idle worker"
        )


def check_overload(overload: str) -> None:
    """What a service looks after while it cannot serve all. Raises ValueError."""
    if overload not in ("goodput", "latency"):
        raise ValueError(
            f'overload must be "goodput" (as many answers in time as possible) or "latency", not {overload!r}'
        )


def check_sizes(allowed_batch_sizes: Iterable[Any], max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes that a model is called with. Raises ValueError or TypeError."""
    if isinstance(allowed_batch_sizes, str) or not isinstance(allowed_batch_sizes, Iterable):
        raise TypeError(
            f"allowed_batch_sizes must be a list of numbers, such as [1, 2, 4], not {allowed_batch_sizes!r}"
        )
    sizes = [at_least("each of allowed_batch_sizes", size, 1) for size in allowed_batch_sizes]
    if not sizes or sizes != sorted(set(sizes)):
        raise ValueError(f"allowed_batch_sizes must rise from one to the next, such as [1, 2, 4], not {sizes!r}")
    if sizes[-1] != max_batch_size:
        raise ValueError(f"the last of allowed_batch_sizes ({sizes[-1]}) must be max_batch_size ({max_batch_size})")
    return tuple(sizes)


def check_room(max_batch_size: int, max_queue_size: int) -> None:
    """Whether as many items can wait as a batch may hold. Raises ValueError."""
    if max_queue_size < max_batch_size:
        raise ValueError(
            f"max_queue_size ({max_queue_size}) is smaller than max_batch_size ({max_batch_size}):"
            " no full batch could ever form"
        )


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
    own = policy.max_batch_size
    policy.max_batch_size = max_batch_size if own is None else min(operator.index(own), max_batch_size)
    if policy.max_queue_delay_s is None:
        policy.max_queue_delay_s = max_queue_delay_s
    if policy.allowed_batch_sizes is None:
        policy.allowed_batch_sizes = allowed_batch_sizes
    policy.overload = overload
    if policy.slo_s is None:
        policy.slo_s = slo_s
    return policy


def _whole(value: Any) -> int | None:
    """A whole number as an int; None if it is something else, a truth value say."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except Exception:
        return None


def _number(value: Any) -> float | None:
    """A real number as a float, of Python's or numpy's making; None if it is something else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except Exception:  # a whole number beyond all floats
        return None
