"""The fast paths of calls have the same outcome as the slow paths beside which they stand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.call.invoke import Invoker
from carpool.engine.call.results import Failed, Trouble, run_now
from carpool.engine.call.retry import Retrier
from carpool.engine.clock import VirtualClock
from carpool.model import traits_of
from tests.support.properties import PROPERTY


class Ends(BaseException):
    """An exception that ends the whole call."""


class Drawn:
    """A batch function that does what was drawn; keeps the parts it was called with.

    Args:
        raises: What a call with an item raises, by item.
        most: With more items a call runs out of memory.
        shape: What a call returns.
        is_async: Whether it returns an awaitable.
    """

    def __init__(self, raises: dict[int, type[BaseException]], most: int, shape: str, is_async: bool) -> None:
        self.raises = raises
        self.most = most
        self.shape = shape
        self.is_async = is_async
        self.parts: list[list[int]] = []

    def __call__(self, xs: list[int]) -> Any:
        self.parts.append(list(xs))
        return self._later(xs) if self.is_async else self._now(xs)

    async def _later(self, xs: list[int]) -> Any:
        return self._now(xs)

    def _now(self, xs: list[int]) -> Any:
        if len(xs) > self.most:
            raise MemoryError
        for x in xs:
            if x in self.raises:
                raise self.raises[x](x)
        return RETURNS[self.shape](xs)


RETURNS: dict[str, Callable[[list[int]], Any]] = {
    "list": lambda xs: [10 * x for x in xs],
    "itself": lambda xs: xs,
    "tuple": lambda xs: tuple(10 * x for x in xs),
    "vector": lambda xs: np.array(xs),
    "rows": lambda xs: np.array([[x, x] for x in xs]),
    "one too few": lambda xs: xs[1:],
    "text": lambda xs: "x" * len(xs),
    "number": lambda xs: 7,
    "errors": lambda xs: [KeyError(x) if x % 3 == 0 else x for x in xs],
}

drawn = st.builds(
    lambda *args: lambda: Drawn(*args),
    st.dictionaries(st.integers(0, 12), st.sampled_from([ValueError, MemoryError, StopIteration, Ends]), max_size=3),
    st.sampled_from([1, 3, 100]),
    st.sampled_from(sorted(RETURNS)),
    st.booleans(),
)


def retrier(isolate_errors: bool) -> Retrier:
    return Retrier(isolate_errors=isolate_errors, fatal_errors=(Ends,), clock=VirtualClock())


def seen(call: Callable[[list[Trouble]], list[Any]]) -> tuple[Any, ...]:
    """All that a caller can tell of a call: results, their types and failures, and troubles; or
    what it raised.
    """
    trouble: list[Trouble] = []
    try:
        results = call(trouble)
    except Ends as error:
        return "ends", error.args, trouble
    return type(results), [_seen_result(y) for y in results], trouble


def _seen_result(y: Any) -> Any:
    if type(y) is Failed:
        return "failed", type(y.error), str(y.error)
    return type(y), repr(y)


@PROPERTY
@given(drawn, st.integers(1, 13), st.booleans())
def test_call_now_has_the_outcome_of_call(make: Callable[[], Drawn], n: int, isolate_errors: bool) -> None:
    """A call without a coroutine calls the function with the same parts and has the same results,
    failures and troubles as one with a coroutine.
    """
    quick, slow = make(), make()
    items = list(range(n))

    now = seen(lambda trouble: retrier(isolate_errors).call_now(quick, items, trouble))
    assert now == seen(lambda trouble: run_now(retrier(isolate_errors).call(slow, items, trouble)))
    assert quick.parts == slow.parts
    assert items == list(range(n))


@PROPERTY
@given(drawn, st.integers(1, 13), st.booleans(), st.sampled_from([-1.0, inf]))
def test_run_now_has_the_outcome_of_run(make: Callable[[], Drawn], n: int, isolate_errors: bool, until: float) -> None:
    """A model without hooks that is called directly has the same results, failures and troubles as
    one that is run step by step, and the same of its calls are announced.
    """
    quick, slow = make(), make()
    items = list(range(n))
    announced: dict[Drawn, list[int]] = {quick: [], slow: []}

    def announce(function: Drawn) -> None:
        announced[function].append(len(function.parts))

    invokers = [
        Invoker(
            *(function, {}, traits_of(function, True), retrier(isolate_errors)),
            batched=True,
            before_next_call=partial(announce, function),
        )
        for function in (quick, slow)
    ]

    now = seen(lambda trouble: invokers[0].run_now(items, trouble, until))
    assert now == seen(lambda trouble: run_now(invokers[1].run(items, trouble, until=until)))
    assert quick.parts == slow.parts
    assert announced[quick] == announced[slow] == list(range(1, len(quick.parts)))
