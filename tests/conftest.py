"""For all tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, find, settings, strategies

from tests.effort import WHOLE, is_slow

# A run that a shell has started in the background ignores SIGINT, and so would every server that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Whoever leaves out the slow tests tries a twelfth of the examples, too; whoever asks for them gets all.

    No example has a deadline, nor has what draws it: how long that takes is a question of the machine.
    """
    of_all: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("quick", max_examples=WHOLE // 12, **of_all)
    settings.register_profile("thorough", max_examples=WHOLE, **of_all)
    settings.load_profile("quick" if "not slow" in config.getoption("markexpr") else "thorough")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The collector leaves alone what importing the tests has made.

    It is more than a million objects that live as long as the run. Each look at all of them takes most of a second,
    and tests whose subject is what is collected look often. Before, hypothesis tries something: it makes the random
    numbers of all properties then, and takes them for lost if nobody but what is frozen refers to them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        find(strategies.none(), lambda _: True, settings=settings(max_examples=1, database=None))
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Cases that `slow_where` names are slow."""
    marks = list(item.iter_markers("slow_where"))
    if marks and isinstance(item, pytest.Function) and any(is_slow(mark, item.callspec.params) for mark in marks):
        item.add_marker(pytest.mark.slow)
