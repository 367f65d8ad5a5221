"""Functions of several arguments: callers bring them by position or name, the function gets a list for each."""

from __future__ import annotations

import asyncio
import functools
import inspect
import warnings
from typing import Any

import pytest

import carpool

Seen = list[tuple[list[int], list[str]]]


def make(kind: str, seen: Seen, **settings: Any) -> Any:
    """A function of two arguments, for threads or for tasks."""
    if kind == "tasks":

        @carpool.batch(**settings)
        async def later(xs: list[int], names: list[str]) -> list[str]:
            seen.append((xs, names))
            return [name * x for x, name in zip(xs, names, strict=True)]

        return later

    @carpool.batch(run_in="thread" if kind == "in_thread" else None, **settings)
    def repeat(xs: list[int], names: list[str]) -> list[str]:
        seen.append((xs, names))
        return [name * x for x, name in zip(xs, names, strict=True)]

    return repeat


def run(call: Any) -> Any:
    """The result of a call, which may be to be awaited."""

    async def main() -> Any:
        return await call

    return asyncio.run(main()) if inspect.isawaitable(call) else call


KINDS = ["threads", "tasks", "in_thread"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_function_gets_a_list_for_each_argument(kind: str) -> None:
    """By position or by name, one call or many."""
    seen: Seen = []
    f = make(kind, seen)
    assert run(f(2, "a")) == "aa"
    assert run(f(3, names="b")) == "bbb"
    assert run(f(names="c", xs=1, priority=1)) == "c"
    assert run(f.many([(1, "d"), (2, "e")])) == ["d", "ee"]
    assert seen == [([2], ["a"]), ([3], ["b"]), ([1], ["c"]), ([1, 2], ["d", "e"])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1,), {}, "missing a required argument: 'names'"),
        ((1, "a", 2), {}, "too many positional arguments"),
        ((1, "a"), {"other": 1}, "got an unexpected keyword argument 'other'"),
        ((1, "a"), {"xs": 1}, "multiple values for argument 'xs'"),
    ],
)
def test_wrong_arguments_fail_in_their_caller(kind: str, args: Any, kwargs: Any, text: str) -> None:
    """It is a TypeError that names the function, and nothing is run."""
    seen: Seen = []
    f = make(kind, seen)
    with pytest.raises(TypeError, match=rf"(later|repeat)\(\) {text}"):
        run(f(*args, **kwargs))
    assert seen == []


def test_tickets_and_sizes_take_all_arguments() -> None:
    """`submit` is called like the function, and `size` as well."""
    sizes: list[tuple[int, str]] = []

    def size(x: int, name: str) -> int:
        sizes.append((x, name))
        return x

    seen: Seen = []
    f = make("threads", seen, size=size, max_batch_size=4)
    tickets = [f.submit(2, names="a"), f.submit(2, "b"), f.submit(3, "c")]
    assert [ticket.result() for ticket in tickets] == ["aa", "bb", "ccc"]
    assert [xs for xs, _ in seen] == [[2, 2], [3]]
    assert sizes == [(2, "a"), (2, "b"), (3, "c")]


def test_defaults_and_keyword_only_parameters() -> None:
    """What a call leaves out is the default, for it alone; a keyword-only parameter gets its list by name."""
    seen: list[Any] = []

    @carpool.batch
    def f(xs: list[int], ys: list[int], scale: Any = 10, *, key: Any = None) -> list[int]:
        seen.append((scale, key))
        return [(x + y) * k for x, y, k in zip(xs, ys, scale, strict=True)]

    tickets = [f.submit(1, 2), f.submit(1, 2, 3, key="k")]
    assert [ticket.result() for ticket in tickets] == [30, 9]
    assert seen == [([10, 3], [None, "k"])]


class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @carpool.batch
    def plus(self, xs: list[int], ys: list[int]) -> list[int]:
        return [self.factor * (x + y) for x, y in zip(xs, ys, strict=True)]

    @carpool.batch
    async def plus_later(self, xs: list[int], ys: list[int]) -> list[int]:
        return [self.factor * (x + y) for x, y in zip(xs, ys, strict=True)]


def test_methods_take_several_arguments_too() -> None:
    """Each instance has batches of its own."""
    scaled = Scaled(2)
    assert (scaled.plus(1, ys=2), Scaled(3).plus(1, 2)) == (6, 9)
    assert run(scaled.plus_later(1, ys=2)) == 6


def test_only_the_guilty_call_fails() -> None:
    """A batch that raises is run again in parts, call by call."""

    @carpool.batch
    def divide(xs: list[float], ys: list[float]) -> list[float]:
        return [x / y for x, y in zip(xs, ys, strict=True)]

    tickets = [divide.submit(1.0, y) for y in (1.0, 0.0, 2.0)]
    assert (tickets[0].result(), tickets[2].result()) == (1.0, 0.5)
    with pytest.raises(ZeroDivisionError):
        tickets[1].result()


def test_callers_see_the_parameters_of_one_call() -> None:
    """`inspect.signature` and `help` tell names, types of items and defaults."""

    @carpool.batch
    def f(xs: list[int], ys: list[str], *, scale: int = 1) -> list[float]:
        return [1.0 for _ in xs]

    assert str(inspect.signature(f)) == "(xs: 'int', ys: 'str', *, scale=1) -> 'float'".replace("'", "")


def test_a_function_with_one_parameter_to_fill_takes_one_item() -> None:
    """Further parameters with defaults, or filled by a partial, are the function's own affair."""

    def scaled(factor: int, xs: list[int], plus: int = 1) -> list[int]:
        return [factor * x + plus for x in xs]

    assert carpool.batch(functools.partial(scaled, 2))(3) == 7


def test_what_cannot_be_told_apart_is_refused() -> None:
    """Starred parameters have no name to be told by, and the settings of a call are not the function's."""

    def starred(xs: list[int], ys: list[int], *more: Any) -> list[int]:
        return xs

    def ours(xs: list[int], priority: list[int]) -> list[int]:
        return xs

    with pytest.raises(TypeError, match=r"starred takes .* name each parameter"):
        carpool.batch(starred)
    with pytest.raises(TypeError, match=r"ours has a parameter 'priority'.* another name"):
        carpool.batch(ours)


def test_the_warning_on_a_loop_names_the_callers_line() -> None:
    """As for functions of one argument."""
    f = make("threads", [])

    async def main() -> Any:
        return f(1, "a")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(main())
    assert [warning.filename for warning in caught] == [__file__]
