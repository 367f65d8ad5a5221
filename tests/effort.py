"""How much a run of the tests tries: everything (`make test-all`), or what is done in a few minutes (`make test`).

Three things make up the difference. Tests that are marked `slow` are left out of the quick run, so are the cases that
`slow_where` names, and of examples, schedules and the like a quick run tries a `share`. `tests/conftest.py` decides
which run it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import pytest
from hypothesis import settings

WHOLE = 100
"""`max_examples` of a thorough run's profile; that of a quick one is smaller, and so is the share of all else."""


def share(of: int) -> int:
    """So many in a thorough run; in a quick one the same part of them as of hypothesis's examples, but at least 16."""
    return max(min(of, 16), of * settings.default.max_examples // WHOLE)


def examples(of: int, **more: Any) -> settings:
    """Decorates a property, of which so many examples are tried in a thorough run, and a `share` in a quick one."""
    return settings(max_examples=share(of), deadline=None, **more)


def slow_where(condition: Callable[..., bool]) -> pytest.MarkDecorator:
    """Marks those cases of a test as slow for which the condition is true; it names the parameters that it looks at.

    Each promise must keep a case that is not.
    """
    return pytest.mark.slow_where.with_args(condition)


def is_slow(mark: pytest.Mark, params: Mapping[str, Any]) -> bool:
    """Whether a `slow_where` is true for a case."""
    (condition,) = mark.args
    return bool(condition(*[params[name] for name in signature(condition).parameters]))
