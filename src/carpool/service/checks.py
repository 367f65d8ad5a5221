"""Settings of a declaration, and checks of settings.

Each error says which setting is wrong, what it was, and what would be right. Functions named for a
value (`seconds`, `flag`, ...) return it in the form that carpool keeps; those named `check_...`
return nothing.

Name, type, default and check of a setting stand on one line of its class:

    max_rows: int | None = setting(None, optional_count)
    cpus: Setting[Sequence[int] | None, tuple[int, ...] | None] = setting(None, as_cores)
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from math import inf
from numbers import Real
from typing import Any, Generic, TypeVar

from carpool.engine.call.retry import names_of
from carpool.engine.forms import Form
from carpool.engine.policy import BY_NAME, STEPS_BY_NAME, Policy, Static, StaticSteps, StepPolicy
from carpool.engine.policy.adapted import is_former
from carpool.engine.worker.place import COUNT_VARIABLE, INDEX_VARIABLE, Cores, parse_cores
from carpool.model import Traits

MOST_WORKERS = 10_000
"""How many workers a stage may have; more are a slip, and would be started one by one for ever."""

LARGEST_PRIORITY = 100
"""Priorities are whole numbers from -LARGEST_PRIORITY to LARGEST_PRIORITY."""


def at_least(name: str, value: Any, least: int) -> int:
    """Return a whole number from `least` on, Python's or numpy's, as an int. Raises ValueError."""
    whole = _whole(value)
    if whole is None or whole < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return whole


def positive_count(name: str, value: Any) -> int:
    return at_least(name, value, 1)


def optional_count(name: str, value: Any) -> int | None:
    return None if value is None else at_least(name, value, 1)


def numbers_of_workers(value: Any, least: int = 1) -> int | tuple[int, int]:
    """Return a number of workers, or the fewest and the most of them. Raises ValueError."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return _at_most_workers(at_least("workers", value, least))
    if len(value) != 2:
        raise ValueError(f"workers must be a number, or a pair of the fewest and the most, not {value!r}")
    fewest, most = at_least("the fewest workers", value[0], least), at_least("the most workers", value[1], 1)
    _at_most_workers(most)
    if fewest > most:
        raise ValueError(f"workers={value!r} has more workers at least than at most: write ({most}, {fewest})")
    return (fewest, most)


def _at_most_workers(workers: int) -> int:
    if workers > MOST_WORKERS:
        raise ValueError(f"workers={workers} is more than the {MOST_WORKERS:,} that a stage may have")
    return workers


def check_range(workers: int | tuple[int, int], traits: Traits) -> None:
    if isinstance(workers, tuple) and traits.in_parts:
        raise ValueError(
            f"workers={workers!r} has the number of workers follow the load by what batches cost, and {traits.name}"
            " answers in parts: give one number, and change it with handle.scale or carpool scale"
        )


def optional_mib(name: str, value: Any) -> float | None:
    return None if value is None else _amount(name, value, "a positive number of MiB", lambda n: 0 < n < inf)


def positive(name: str, value: Any) -> float:
    return _amount(name, value, "a positive number", lambda n: 0 < n < inf)


def seconds(name: str, value: Any) -> float:
    """Return a positive duration; infinity means no limit. Raises ValueError."""
    return _amount(name, value, "a positive number of seconds", lambda n: n > 0)


def when_full_waits(value: Any) -> bool:
    """Report whether requests wait while the queue is full, of a `when_full`. Raises ValueError."""
    if value not in ("refuse", "wait"):
        raise ValueError(f'when_full must be "refuse" or "wait", not {value!r}')
    return bool(value == "wait")


def seconds_or_endless(name: str, value: Any) -> float:
    """Return a positive duration, or infinity if none is given. Raises ValueError."""
    return inf if value is None else seconds(name, value)


def optional_seconds(name: str, value: Any) -> float | None:
    """Return a positive duration, or None if none is given. Raises ValueError."""
    if value is None or (type(value) is float and value > 0):  # fast, for calls that bring a time-out
        return value
    return seconds(name, value)


def optional_finite_seconds(name: str, value: Any) -> float | None:
    """Return a positive duration below infinity, or None if none is given. Raises ValueError."""
    number = optional_seconds(name, value)
    if number == inf:
        raise ValueError(f"{name} must be a finite number of seconds, not {value!r}; leave it out for none")
    return number


def nonnegative_seconds(name: str, value: Any) -> float:
    return _amount(name, value, "0 or more seconds", lambda n: n >= 0)


def optional_delay(name: str, value: Any) -> float | None:
    return None if value is None else _amount(name, value, "0 or more seconds, and finite", lambda n: 0 <= n < inf)


def flag(name: str, value: Any) -> bool:
    """Return True or False. Raises TypeError for values that are merely truthy or falsy."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def optional_flag(name: str, value: Any) -> bool | None:
    return None if value is None else flag(name, value)


def optional_text(name: str, value: Any) -> str | None:
    """Return a text that is not empty, or None if none is given. Raises TypeError or ValueError."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, not {value!r}")
    if not value:
        raise ValueError(f"{name} must not be empty: leave it out for the default")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Return a mapping with text as its keys as a new dict, empty for None. Raises TypeError."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping such as {{'key': value}}, not {value!r}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} must have text as its keys, not {key!r}")
    return dict(value)


_NEEDS = (
    "num_cpus",
    "num_gpus",
    "memory",
    "accelerator_type",
    "resources",
    "label_selector",
    "scheduling_strategy",
)


def cluster_needs(name: str, value: Any) -> dict[str, Any]:
    """Return the needs of a worker on a Ray cluster, in Ray's words, which Ray itself checks.

    Raises:
        TypeError: It is no mapping with text as its keys.
        ValueError: A key is none of those that `needs` may have.
    """
    needs = mapping(name, value)
    for key in needs:
        if key not in _NEEDS:
            raise ValueError(f"{name} has no {key!r}: choose from {', '.join(_NEEDS)}, which mean what they do in Ray")
    return needs


def environments(value: Any, workers: int) -> tuple[Mapping[str, str], ...]:
    """Return the variables of each worker of a stage, from its `env=`: one mapping for all of them,
    or a list with one for each. Raises TypeError or ValueError.
    """
    n = count_environments(value)
    if n is None:
        return (_environment("env", value),) * workers
    if n != workers:
        raise ValueError(
            f"env has {n} {'entry' if n == 1 else 'entries'} for {workers} {'worker' if workers == 1 else 'workers'}:"
            " give one mapping for each worker, or a single one for all of them"
        )
    return tuple(_environment(f"env[{place}]", each) for place, each in enumerate(value))


def count_environments(value: Any) -> int | None:
    """Return the number of entries in an `env=` that is a list; None if it is for all workers."""
    return len(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else None


def _environment(name: str, value: Any) -> dict[str, str]:
    env = mapping(name, value)
    for key, content in env.items():
        if not isinstance(content, str):
            raise TypeError(f"{name}[{key!r}] must be text, not {content!r}: write {str(content)!r}")
        if not key or "=" in key or "\0" in key + content:
            raise ValueError(
                f"{name}[{key!r}] cannot be an environment variable: a name is not empty and has no '=', and neither a"
                " name nor a value has a zero byte"
            )
        if key in (INDEX_VARIABLE, COUNT_VARIABLE):
            raise ValueError(f"{name}[{key!r}] cannot be chosen: carpool tells each worker its own")
    return env


def valid_priority(priority: Any) -> int:
    """Return a request's priority as an int. Raises ValueError."""
    if type(priority) is int and -LARGEST_PRIORITY <= priority <= LARGEST_PRIORITY:  # fast, for every call
        return priority
    whole = _whole(priority)
    if whole is None or abs(whole) > LARGEST_PRIORITY:
        raise ValueError(
            f"priority must be a whole number from -{LARGEST_PRIORITY} to {LARGEST_PRIORITY}, not {priority!r}"
        )
    return whole


def optional_cores(name: str, value: Any) -> Cores | None:
    return None if value is None else parse_cores(value)


def rising(example: str) -> Callable[[str, Any], tuple[int, ...] | None]:
    """Return a check for whole numbers that rise from one to the next; None if none are given.

    It raises ValueError where there are none, they do not rise, or one is not a whole number from 1
    on, and TypeError where they are not a list.
    """

    def check(name: str, values: Any) -> tuple[int, ...] | None:
        if values is None:
            return None
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(f"{name} must be a list of numbers, such as {example}, not {values!r}")
        numbers = [at_least(f"each of {name}", value, 1) for value in values]
        if not numbers or numbers != sorted(set(numbers)):
            raise ValueError(f"{name} must rise from one to the next, such as {example}, not {numbers!r}")
        return tuple(numbers)

    return check


def exceptions(name: str, value: Any) -> tuple[str, ...] | None:
    """Return the full names of exception classes, or None if None is given. Raises TypeError."""
    return None if value is None else names_of(value)


def check_length(length: Any, max_padded_size: Any, allowed_lengths: Any, *, has_size: bool) -> None:
    """Check the settings about the lengths of items against each other.

    Raises:
        ValueError: One of them needs another one, or excludes it.
        TypeError: `length` cannot be called.
    """
    if length is None:
        for name, value in (("max_padded_size", max_padded_size), ("allowed_lengths", allowed_lengths)):
            if value is not None:
                raise ValueError(f"{name} is for items that have lengths: give length=, too")
        return
    check_callable("length", length, "an item")
    if has_size:
        raise ValueError(
            "length and size both say what an item costs: with length= a batch costs as its count times its longest,"
            " with size= as the sum of its sizes; leave out one of them"
        )


def check_callable(name: str, value: Any, arguments: str) -> None:
    """Check that a setting can be called.

    Args:
        arguments: Its arguments in each call, for the error text.

    Raises:
        TypeError: It cannot be called, or what it returns has to be awaited.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function of {arguments}, not {value!r}")
    if any(map(inspect.iscoroutinefunction, (value, type(value).__call__))):
        raise TypeError(f"{name} must be a plain function of {arguments}, not one with async def: {value!r}")


def check_policy(policy: Policy | str | None, *, in_parts: bool = False) -> None:
    """Check a policy or the name of one.

    Raises:
        ValueError: There is no such policy, or it is for the other kind of answers.
        TypeError: It is none.
    """
    names = STEPS_BY_NAME if in_parts else BY_NAME
    if isinstance(policy, str) and policy not in names:
        known = ", ".join(sorted(names))
        name, has_settings, _ = policy.partition(":")
        if has_settings and name in BY_NAME:
            raise ValueError(
                f"policy {policy!r} is how carpool simulate has it: here write policy={name!r} with max_queue_delay_s="
                f" of its own, or carpool.{type(BY_NAME[name]()).__name__}(...) for its other settings"
            )
        raise ValueError(f"there is no policy {policy!r}; choose one of {known}, or give a Policy object")
    if isinstance(policy, StepPolicy) and not in_parts:
        raise ValueError(f"{type(policy).__name__} is a policy for models that answer in parts")
    if policy is not None and not isinstance(policy, str | Policy):
        raise TypeError(f"policy must be a name or a Policy object, not {policy!r}")
    if isinstance(policy, Policy):
        if not hasattr(policy, "slo_s"):
            raise TypeError(f"{type(policy).__name__}.__init__ must call super().__init__()")
        warn_if_former(policy)
        if policy.max_batch_size is not None:
            at_least("max_batch_size of the policy", policy.max_batch_size, 1)
        optional_delay("max_queue_delay_s of the policy", policy.max_queue_delay_s)
        optional_finite_seconds("slo_s of the policy", policy.slo_s)


def warn_if_former(policy: object) -> None:
    """Warn, at the line of its `decide`, of a policy of the former interface."""
    if not isinstance(policy, Policy) or not is_former(type(policy)):
        return
    kind: Any = type(policy)
    code = getattr(kind.decide, "__code__", warn_if_former.__code__)
    text = (
        f"{kind.__name__}.decide takes (now, queue, free, busy), which will not work in the next version: a policy has"
        " decide(view) now, and learn(now, done), see carpool.Policy"
    )
    registry = vars(sys.modules[kind.__module__]).setdefault("__warningregistry__", {})  # so that it is warned of once
    warnings.warn_explicit(text, DeprecationWarning, code.co_filename, code.co_firstlineno, kind.__module__, registry)


def check_parts(
    traits: Traits, max_batch_size: int | None, max_rows: int | None, allowed_batch_sizes: Any, policy: Any
) -> None:
    name = traits.name
    if not traits.in_parts:
        if policy == "paced" or isinstance(policy, StepPolicy):
            raise ValueError(f"{policy!r} is for models that answer in parts, and {name} returns whole answers")
        if max_rows is not None:
            raise ValueError(
                f"max_rows is for models that answer in parts, and {name} returns whole answers: leave it out"
            )
        return
    if traits.form is Form.STEPS and max_batch_size is None and max_rows is None:
        raise ValueError(
            f"{name} is a model of steps: give the stage a max_batch_size, which is how many streams a worker runs at"
            " a time"
        )
    if traits.form is Form.BATCH_GENERATOR and max_rows is not None:
        raise ValueError(
            f"max_rows is for steps, and {name} yields for a whole batch: leave it out, max_batch_size is enough"
        )
    if policy is not None and not isinstance(policy, StepPolicy) and policy not in STEPS_BY_NAME:
        raise ValueError(
            f"{name} answers in parts, so its policy must be one of {', '.join(sorted(STEPS_BY_NAME))}, or a StepPolicy"
            f" object, not {policy!r}"
        )
    if traits.form is Form.BATCH_GENERATOR and policy not in (None, "static") and type(policy) is not StaticSteps:
        raise ValueError(f"no stream can join a batch of {name}, which yields for all of it: leave out policy")
    if allowed_batch_sizes is not None:
        raise ValueError(f"allowed_batch_sizes is for whole batches, and {name} answers in parts: leave it out")


def check_is_for_batches(setting: str, max_batch_size: int | None, traits: Traits) -> None:
    """Check that a setting which looks at items, and says which share a batch, can be used.

    Raises:
        ValueError: The stage has no whole batches, or its items cannot be looked at.
    """
    if max_batch_size is None:
        raise ValueError(f"{setting} is for stages that take batches: give max_batch_size, too")
    if traits.in_parts:
        raise ValueError(f"{setting} is for whole batches, and {traits.name} answers in parts: leave it out")
    if traits.accepts:
        raise ValueError(
            f"{setting} cannot look at bodies that only {traits.name}.decode can read: leave out {setting}= or accepts"
        )


def lone_wait_s(policy: Policy) -> float:
    """Return for how many seconds a policy is certain to hold back a lone request after a batch.

    Only the static policy does that; all others let a lone request go if nothing else comes.
    """
    if type(policy).decide is not Static.decide or policy.limit <= 1:
        return 0.0
    return policy.max_queue_delay_s or 0.0


def why_never_held_back(policy: Policy) -> str | None:
    """Return a line for the log if a policy that is there to hold requests back has no delay.

    A delay of 0 that was given is meant.
    """
    if type(policy) is not Static or policy.max_queue_delay_s is not None:
        return None
    return "policy static holds nothing back without max_queue_delay_s, like greedy: give it, or 0 if that is meant"


def check_lone_wait(wait_s: float, timeout_s: float) -> None:
    """Check that a lone request which is held back can still be answered.

    Args:
        wait_s: For how many seconds it is held back, in all stages together.
        timeout_s: After how many seconds it expires.
    """
    if wait_s >= timeout_s:
        raise ValueError(
            f"max_queue_delay_s ({wait_s:g} s in all) must be shorter than timeout_s ({timeout_s:g} s): the static"
            " policy holds a lone request back for all of it, so that it would expire beside an idle worker"
        )


def overload_goal(name: str, value: Any) -> str:
    if value not in ("goodput", "latency"):
        raise ValueError(f'{name} must be "goodput" (as many answers in time as possible) or "latency", not {value!r}')
    return str(value)


def check_room(max_batch_size: int, max_queue_size: int) -> None:
    if max_queue_size < max_batch_size:
        raise ValueError(
            f"max_queue_size ({max_queue_size}) is smaller than max_batch_size ({max_batch_size}):"
            " no full batch could ever form"
        )


def _whole(value: Any) -> int | None:
    """Return a whole number as an int, or None for anything else, True and False included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except Exception:
        return None


def _amount(name: str, value: Any, wanted: str, holds: Callable[[float], bool]) -> float:
    number = _number(value)
    if number is None or not holds(number):
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
    return number


def _number(value: Any) -> float | None:
    """Return a real number, Python's or numpy's, as a float, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except Exception:  # a whole number beyond the largest float
        return None


Key = Callable[[Any], Any] | str
"""The trait that requests must have in common to share a batch: a function of an item, the name of
a field of it, or `header:` and the name of an HTTP header."""

_HEADER = "header:"


def header_of(key: Any) -> bytes | None:
    """Return the name, in lower case, of the header that a `key=` reads; None if it reads none."""
    if not isinstance(key, str) or not key.startswith(_HEADER):
        return None
    return key.removeprefix(_HEADER).strip().lower().encode("latin-1")


def check_key(key: Any, max_batch_size: int | None, traits: Traits) -> None:
    if not isinstance(key, str):
        check_callable("key", key, "an item")
    elif not key.removeprefix(_HEADER):
        raise ValueError(f'key must name a field of the items, or a header as in "header:X-Adapter", not {key!r}')
    elif header_of(key) is not None:
        if max_batch_size is None or traits.in_parts:
            raise ValueError("key is for stages that take whole batches: give max_batch_size, or leave it out")
        return
    check_is_for_batches("key", max_batch_size, traits)


Given = TypeVar("Given", contravariant=True)
Kept = TypeVar("Kept", covariant=True)
Declared = TypeVar("Declared")

_CHECK = "check"
_FROM_OUTSIDE = "from_outside"
_NEVER_MADE = "only the types of a Setting are read"


class Setting(Generic[Given, Kept]):
    """The types of a setting that is kept in another form than it is given in.

    Type checkers read it as a descriptor: `__set__` has the type of the argument, and `__get__`
    that of the attribute. No object of it is ever made.
    """

    def __get__(self, declaration: object, kind: type) -> Kept:
        raise TypeError(_NEVER_MADE)

    def __set__(self, declaration: object, value: Given) -> None:
        raise TypeError(_NEVER_MADE)


def setting(
    default: Any = MISSING, check: Callable[[str, Any], Any] | None = None, *, from_outside: bool = False
) -> Any:
    """Return a field with a default and a check.

    Args:
        check: Takes the name and the value, and returns the value that is kept or raises ValueError
            or TypeError. None where the class checks it together with other settings.
        from_outside: Whether a file, the environment or a flag may change it.
    """
    return field(default=default, metadata={_CHECK: check, _FROM_OUTSIDE: from_outside})


def from_outside(kind: Any) -> tuple[str, ...]:
    """Return the names of the settings of a class that can be changed without its code."""
    return tuple(each.name for each in fields(kind) if each.metadata.get(_FROM_OUTSIDE))


def keep(declaration: object, name: str, value: object) -> None:
    """Set an attribute of a frozen declaration that is being made."""
    object.__setattr__(declaration, name, value)


def keep_checked(declaration: Any) -> None:
    """Check the settings of a declaration in their order. Raises ValueError or TypeError."""
    for each in fields(declaration):
        if check := each.metadata.get(_CHECK):
            keep(declaration, each.name, check(each.name, getattr(declaration, each.name)))


def shown_as_given(kind: type[Declared]) -> type[Declared]:
    """Have the signature of a class show the types in which its settings are given."""
    hints = kind.__init__.__annotations__
    for name, hint in hints.items():
        match ast.parse(str(hint), mode="eval").body:
            case ast.Subscript(value=ast.Name("Setting"), slice=ast.Tuple([given, _])):
                hints[name] = ast.unparse(given)
    return kind
