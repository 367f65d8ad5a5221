"""Check that an item gets the same answer in company as alone.

A model may mix up what shares a call without any error, such as by an attention mask that is
missing, or results in another order. No single request shows it. So each item is run alone here,
and then in random batches with the others. All of it follows from a seed.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import random
import reprlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from carpool.engine.call.invoke import Invoker, is_async
from carpool.engine.call.results import Failed, Trouble, run_now
from carpool.engine.call.retry import Retrier
from carpool.engine.foreign import named_text_of
from carpool.engine.turns import Done, To
from carpool.model import Model, traits_of

_LEAST_BATCH: Final = 8
_MOST_NAMED: Final = 8  # items of a company that a failure names
_TOLERANCE: Final = 1e-4
_TOLERANCES: Final = {"float16": 1e-2, "bfloat16": 5e-2}
"""Of the largest number of an answer; computing in another order makes a hundredth of that."""
_NOTHING: Final = 1e-6
"""The allowed difference of two numbers, however small they are."""


class BatchesError(AssertionError):
    """A model gives an item another answer in company than alone; the text says which."""


def check_batches(
    model: Any,
    items: Sequence[Any],
    *,
    seed: int = 0,
    rounds: int = 50,
    max_batch_size: int | None = None,
    equal: Callable[[Any, Any], bool] | None = None,
) -> None:
    """Check that a model gives each item the same answer in company as alone.

    Each item is run alone first, and then in batches of random others, in random order; it may also
    meet itself. `preprocess` and `postprocess` run as in a service.

    Args:
        model: The class of a batched model, a `functools.partial` of it, or a function without
            arguments that makes one; or a model that is set up; or a function that takes a list.
        items: Items as callers bring them. Different lengths find most; a few items are enough.
        seed: All that happens follows from it.
        rounds: How many batches to run.
        max_batch_size: How many items share a batch, at most; None for all items, and at least 8.
        equal: Whether two answers are the same, the first of them in company. By default numbers
            may differ by 0.0001 of the largest one of the same list or array (0.01 in float16, 0.05
            in bfloat16) and by a millionth, all else must be equal.

    Raises:
        BatchesError: An item got something else in company, or fails alone. The text names the
            item, the company and the seed.
        TypeError: This is no batched model, or one that answers in parts (see `check_steps`).
        ValueError: There is no item, or a number is out of range.
    """
    if not items:
        raise ValueError("check_batches needs at least one item")
    most = max(_LEAST_BATCH, len(items)) if max_batch_size is None else max_batch_size
    if most < 2 or rounds < 1:
        raise ValueError(f"max_batch_size must be at least 2 and rounds at least 1, not {most} and {rounds}")
    made = _made(model)
    check = _Check(made, made is not model, items, random.Random(seed), most, equal or _are_equal)
    try:
        if check.is_async:
            with ThreadPoolExecutor(1) as thread:  # the caller's thread may have a loop already
                thread.submit(asyncio.run, check.run(rounds)).result()
        else:
            run_now(check.run(rounds))
    except BatchesError as error:
        raise BatchesError(f"{error} (seed {seed})") from error.__cause__


def _made(model: Any) -> Any:
    inner = model
    while isinstance(inner, functools.partial):
        inner = inner.func
    if isinstance(inner, type):
        return model()
    if callable(model) and not isinstance(model, Model) and not _takes_something(model):
        return model()
    return model


def _takes_something(function: Callable[..., Any]) -> bool:
    try:
        return bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # it has no answer
        return True


class _Check:
    def __init__(
        self,
        model: Any,
        is_ours: bool,
        items: Sequence[Any],
        dice: random.Random,
        most: int,
        equal: Callable[[Any, Any], bool],
    ) -> None:
        is_function = callable(model) and not isinstance(model, Model)
        kind = model if is_function else type(model)
        traits = traits_of(kind, True)
        if traits.in_parts:
            raise TypeError(f"{traits.name} answers in parts: check_steps is for models of steps")
        self.is_async = is_async(kind)
        retrier = Retrier(
            isolate_errors=False, retry_on_oom=False, fatal_errors=(KeyboardInterrupt,), may_wait=self.is_async
        )
        self._invoker = Invoker(model, {}, traits, retrier, batched=True)
        self._is_ours = is_ours
        self._items = items
        self._dice = dice
        self._most = most
        self._equal = equal
        self._alone: list[Any] = []

    async def run(self, rounds: int) -> None:
        if self._is_ours:
            await self._invoker.set_up()
        try:
            for at in range(len(self._items)):
                self._alone.append(await self._run_alone(at))
            for batch in self._batches(rounds):
                await self._check(batch)
        finally:
            if self._is_ours:
                await self._invoker.tear_down()

    def _batches(self, rounds: int) -> list[list[int]]:
        """Return which items share each batch, by position: all of them take turns, beside any."""
        turns: list[int] = []
        batches = []
        for _ in range(rounds):
            turns = turns or self._dice.sample(range(len(self._items)), len(self._items))
            others = self._dice.choices(range(len(self._items)), k=self._dice.randint(1, self._most - 1))
            batch = [turns.pop(), *others]
            self._dice.shuffle(batch)
            batches.append(batch)
        return batches

    async def _run(self, batch: Sequence[int]) -> list[Any]:
        trouble: list[Trouble] = []
        results = await self._invoker.run([_copied(self._items[at]) for at in batch], trouble)
        return [_copied(result) for result in results]

    async def _run_alone(self, at: int) -> Any:
        (answer,) = await self._run([at])
        if type(answer) is Failed:
            beside, _ = await self._run([at, at])
            more = "" if type(beside) is Failed else f"; beside itself it gets {_shown(beside)}"
            raise BatchesError(
                f"{self._name(at)} fails alone with {named_text_of(answer.error)}{more}"
            ) from answer.error
        return answer

    async def _check(self, batch: list[int]) -> None:
        answers = await self._run(batch)
        for place, answer in enumerate(answers):
            if not self._is_same(answer, batch[place]):
                raise await self._error(batch, place, answer)

    def _is_same(self, answer: Any, at: int) -> bool:
        alone = self._alone[at]
        if type(answer) is To and type(alone) is To:
            return answer.branch == alone.branch and bool(self._equal(answer.item, alone.item))
        if type(answer) is Done and type(alone) is Done:
            return bool(self._equal(answer.answer, alone.answer))
        return type(answer) is not Failed and self._equal(answer, alone)

    async def _error(self, batch: list[int], place: int, answer: Any) -> BatchesError:
        """Return the fault of an answer, with as small a company as shows it."""
        at = batch[place]
        again = await self._run_alone(at)
        if not self._is_same(again, at):
            return BatchesError(
                f"{self._name(at)} gets {_shown(again)} alone where it got {_shown(self._alone[at])} before: its answer"
                " depends on chance or on earlier calls (dropout of a model that is still in training mode, a generator"
                " that the item does not seed), or `equal` has to say when two answers are the same"
            )
        company = batch[:place] + batch[place + 1 :]
        for other in dict.fromkeys(company):
            pair = [at, other] if other in batch[place + 1 :] else [other, at]
            found = (await self._run(pair))[pair.index(at)]
            if not self._is_same(found, at):
                company, answer = [other], found
                break
        named = [self._name(other) for other in company[:_MOST_NAMED]]
        more = f" and {len(company) - len(named)} others" if len(company) > len(named) else ""
        text = f"{self._name(at)} {_got(answer)} beside {', '.join(named)}{more}; alone it gets"
        error = BatchesError(f"{text} {_shown(self._alone[at])}")
        error.__cause__ = answer.error if type(answer) is Failed else None
        return error

    def _name(self, at: int) -> str:
        return f"item {at} ({_shown(self._items[at])})"


def _got(answer: Any) -> str:
    return f"fails with {named_text_of(answer.error)}" if type(answer) is Failed else f"gets {_shown(answer)}"


def _shown(value: Any) -> str:
    return " ".join(reprlib.repr(value).split())


def _copied(value: Any) -> Any:
    """Return a value that later calls do not change, if it can be copied."""
    if type(value) is Failed:
        return value
    try:
        return copy.deepcopy(value.detach() if hasattr(value, "detach") else value)
    except Exception:  # of a class of the user's, or a library's
        return value


# -- comparing


def _are_equal(one: Any, other: Any) -> bool:
    if _is_array(one) and _is_array(other):
        return _are_equal_arrays(one, other)
    if type(one) is not type(other):
        return False
    if _is_number(one):
        return _are_near([one], [other])
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_are_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return False
        if all(map(_is_number, one)) and all(map(_is_number, other)):
            return _are_near(one, other)
        return all(map(_are_equal, one, other))
    fields = _fields_of(one)
    if fields is not None:
        return _are_equal(fields, _fields_of(other))
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def _is_array(value: Any) -> bool:
    return hasattr(value, "tolist") and hasattr(value, "dtype") and hasattr(value, "shape")


def _is_number(value: Any) -> bool:
    if _is_array(value):  # a scalar of numpy
        return not value.shape and "float" in str(value.dtype)
    return isinstance(value, float)


def _fields_of(value: Any) -> dict[str, Any] | None:
    names = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    names = names or getattr(type(value), "model_fields", None)
    return None if names is None else {name: getattr(value, name) for name in names}


def _are_equal_arrays(one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
        return False
    dtype = str(one.dtype).rpartition(".")[2]  # torch.float32
    if "float" not in dtype:
        same = one == other
        return bool(same.all()) if hasattr(same, "all") else bool(same)
    flat = [each.reshape(-1).tolist() for each in (one, other)]
    return _are_near(flat[0], flat[1], _TOLERANCES.get(dtype, _TOLERANCE))


def _are_near(one: Sequence[float], other: Sequence[float], tolerance: float = _TOLERANCE) -> bool:
    """Report whether lists of numbers are the same, but for rounding; NaN is like NaN."""
    one, other = [float(each) for each in one], [float(each) for each in other]
    largest = max((abs(each) for each in other if math.isfinite(each)), default=0.0)
    most = tolerance * largest + _NOTHING
    return all(a == b or abs(a - b) <= most or (a != a and b != b) for a, b in zip(one, other, strict=True))
