"""For all tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.effort import WHOLE, is_slow

# A run that a shell has started in the background ignores SIGINT, and so would every server that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Whoever leaves out the slow tests tries an eighth of the examples, too; whoever asks for them gets all.

    No example has a deadline: how long one takes is a question of the machine.
    """
    settings.register_profile("quick", max_examples=WHOLE // 8, deadline=None)
    settings.register_profile("thorough", max_examples=WHOLE, deadline=None)
    settings.load_profile("quick" if "not slow" in config.getoption("markexpr") else "thorough")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The collector leaves alone what importing the tests has made.

    It is more than a million objects that live as long as the run. Each look at all of them takes most of a second,
    and tests whose subject is what is collected look often.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Cases that `slow_where` names are slow."""
    marks = list(item.iter_markers("slow_where"))
    if marks and isinstance(item, pytest.Function) and any(is_slow(mark, item.callspec.params) for mark in marks):
        item.add_marker(pytest.mark.slow)
