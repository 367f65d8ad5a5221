"""A batch function over a `def` that is called on a running event loop says once that this batches nothing."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import carpool

CALLS: list[Callable[[Any], Any]] = [
    lambda f: f(1),
    lambda f: f.many([1, 2]),
]


def on_a_loop(call: Callable[[], Any]) -> Any:
    """What a call comes to on a thread whose event loop runs."""

    async def main() -> Any:
        return call()

    return asyncio.run(main())


def heard(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("settings", [{}, {"size": lambda x: x}], ids=["quick", "long"])
def test_a_call_on_a_running_loop_is_warned_of_once(call: Callable[[Any], Any], settings: Any) -> None:
    """The one warning names the function, its caller's line and both right ways."""
    f: Any = carpool.batch(**settings)(doubled)
    caught = heard(lambda: [on_a_loop(lambda: call(f)) for _ in range(3)])
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert warning.filename == __file__
    for part in ("doubled was called", 'run_in="thread"', "asyncio.to_thread(doubled, x)"):
        assert part in str(warning.message)


def doubled(xs: list[int]) -> list[int]:
    return [2 * x for x in xs]


def test_calls_before_the_loop_runs_do_not_hide_it() -> None:
    """A program that tries its function first and then serves from a loop is told, too, a little later."""
    f = carpool.batch(doubled)
    assert f(1) == 2
    f._loop_check.due -= 1.0  # a second later
    assert len(heard(lambda: on_a_loop(lambda: f(1)))) == 1


def test_no_other_thread_is_warned() -> None:
    """A thread without a loop is where such a function belongs, also beside a loop that runs."""
    f = carpool.batch(doubled)

    async def main() -> list[int]:
        return [await asyncio.to_thread(f, 1), await asyncio.to_thread(lambda: f.many([2])[0])]

    assert asyncio.run(main()) == [2, 4]


def test_the_top_of_a_notebook_cell_is_not_warned() -> None:
    """A cell of a notebook runs on the notebook's loop, and has no other calls to share with."""
    f = carpool.batch(doubled)
    cell = compile("y = f(3)", "<cell>", "exec")
    names: dict[str, Any] = {"f": f}
    on_a_loop(lambda: exec(cell, names))
    assert names["y"] == 6


def test_a_method_warns_once_for_all_instances() -> None:
    """It is the class that is to be written otherwise, not each of its instances."""

    class Scale:
        @carpool.batch
        def times(self, xs: list[int]) -> list[int]:
            return [2 * x for x in xs]

    caught = heard(lambda: [on_a_loop(lambda: Scale().times(1)) for _ in range(3)])
    assert len(caught) == 1


def test_a_warning_that_is_raised_leaves_the_function_as_it_was() -> None:
    """Where warnings are errors the first such caller gets it; the line is empty again."""
    f = carpool.batch(doubled)
    with pytest.raises(RuntimeWarning, match="loop stands still"):
        on_a_loop(lambda: f(1))
    assert on_a_loop(lambda: f(1)) == 2
    others = [threading.Thread(target=f, args=(1,)) for _ in range(3)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
