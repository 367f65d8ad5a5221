"""One call of the user's model on values: hooks per item, `predict` for one or many; an item's fault stays its own.

    preprocess -> predict -> postprocess

Every step works on the items that are still sound; an item that fails turns into `Failed` and the rest go on. What
happens when a batch call fails is in `call/retry.py`.

All of it is written as coroutines so that the user's code may be `def` or `async def`. Where nothing is async, nothing
ever waits, and `parts.run_now` runs them through without an event loop.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from carpool import faults
from carpool.call.retry import Failed, Retrier, Trouble, run_now
from carpool.model import AnyModel, Model, Traits
from carpool.rows import Rows, by_kind, stacking


class Invoker:
    """A model, ready to be called with values.

    Args:
        model: what the user gave; an instance stays as it is.
        kwargs: for its constructor, or for each call of a function.
        traits: what `traits_of` read off it.
        caller: makes batch calls, and knows what to do when they fail.
        batched: whether `predict` takes a list.
        calling: told before each call of `predict`, but for the first of a batch; None if nobody is.
        allowed_batch_sizes: numbers of items that `predict` is called with, rising; smaller batches are padded. None
            for any number.
        in_predict: called as each call of `predict` begins, as part of it.
    """

    def __init__(
        self,
        model: AnyModel | Model,
        kwargs: Mapping[str, Any],
        traits: Traits,
        caller: Retrier,
        *,
        batched: bool,
        calling: Callable[[], None] | None = None,
        allowed_batch_sizes: Sequence[int] | None = None,
        in_predict: Callable[[], None] | None = None,
    ) -> None:
        self.traits = traits
        self._batched = batched
        self.caller = caller
        self._calling = calling
        self._sizes = allowed_batch_sizes
        self._calls = 0
        if callable(model) and not isinstance(model, type | Model):
            self.instance: Any = None
            self._predict: Callable[[Any], Any] = functools.partial(model, **kwargs) if kwargs else model
        else:
            self.instance = model(**kwargs) if isinstance(model, type) else model
            self._predict = self.instance.predict
        self._predict = faults.before(in_predict, self._predict)
        self._preprocess = getattr(self.instance, "preprocess", None)
        self._postprocess = getattr(self.instance, "postprocess", None)
        hooks = self._preprocess is not None or self._postprocess is not None or traits.takes_array
        self._is_plain = batched and not hooks and calling is None and allowed_batch_sizes is None

    async def set_up(self) -> None:
        """The model's `setup`. Raises what it raises."""
        await self._hook("setup")

    async def tear_down(self) -> None:
        """The model's `teardown`. Raises what it raises."""
        await self._hook("teardown")

    async def run(
        self, values: list[Any], trouble: list[Trouble], *, all_intact: bool = False, until: float = inf
    ) -> list[Any]:
        """The hooks and `predict` over items. As many results, in their order.

        Args:
            values: the items; some may be `Failed` already.
            trouble: what there is to tell besides is appended here.
            all_intact: whether it is known that none of them is.
            until: when nobody waits for any of them any more.
        """
        self._calls = 0
        if self._preprocess is not None:
            values = await self._each(self._preprocess, values, trouble)
            all_intact = False
        if self._batched:
            results = await self._batch(values, trouble, all_intact, until)
        else:
            results = await self._each(self._counted(self._predict), values, trouble)
        results = _with_errors(results)
        if self._postprocess is None:
            return results
        postprocess: Callable[..., Any] = self._postprocess
        if not self.traits.postprocess_takes_x:
            return await self._each(postprocess, results, trouble)
        pairs = [y if type(y) is Failed else (y, x) for y, x in zip(results, values, strict=True)]
        return await self._each(lambda pair: postprocess(*pair), pairs, trouble)

    def run_now(self, values: list[Any], trouble: list[Trouble]) -> list[Any]:
        """What `run` does for items that are all sound, where nothing waits; quicker where there are no hooks."""
        if not self._is_plain:
            return run_now(self.run(values, trouble, all_intact=True))
        return _with_errors(self.caller.call_now(self._predict, values, trouble))

    async def together(
        self,
        function: Callable[[list[Any]], Any],
        values: list[Any],
        trouble: list[Trouble],
        places: Sequence[int],
        until: float,
    ) -> list[Any]:
        """`function` over all values at once; see `retry.Retrier.call`."""
        if not values:
            return []
        return await self.caller.call(self._counted(function), values, trouble, places=places, until=until)

    # -- inside

    async def _hook(self, name: str) -> None:
        hook = getattr(self.instance, name, None)
        if hook is not None:
            done = hook()
            if hasattr(done, "__await__"):
                await self.caller.outcome_of(done)

    async def _batch(self, values: list[Any], trouble: list[Trouble], all_intact: bool, until: float) -> list[Any]:
        predict, sizes = self._counted(self._predict), self._sizes
        if self.traits.takes_array:
            return await self._batch_of_arrays(predict, values, trouble, until)
        if all_intact or Failed not in set(map(type, values)):
            return await self.caller.call(predict, values, trouble, sizes=sizes, until=until)
        places = [i for i, value in enumerate(values) if type(value) is not Failed]
        if not places:
            return values
        left = [values[i] for i in places]
        answers = iter(await self.caller.call(predict, left, trouble, sizes=sizes, places=places, until=until))
        return [v if type(v) is Failed else next(answers) for v in values]

    async def _batch_of_arrays(
        self, predict: Callable[[Any], Any], values: list[Any], trouble: list[Trouble], until: float
    ) -> list[Any]:
        """One array for `predict`, or one of each kind that the items are of."""
        if type(values) is Rows:
            function = stacking(predict, values)
            return await self.caller.call(function, values, trouble, sizes=self._sizes, until=until)
        results = values[:]
        sound = [i for i, value in enumerate(values) if type(value) is not Failed]
        for kind in by_kind([values[i] for i in sound]):
            places = [sound[i] for i in kind]
            items = [values[i] for i in places]
            function = stacking(predict, items)
            answers = await self.caller.call(function, items, trouble, sizes=self._sizes, places=places, until=until)
            for place, answer in zip(places, answers, strict=True):
                results[place] = answer
        return results

    async def _each(self, step: Callable[[Any], Any], values: list[Any], trouble: list[Trouble]) -> list[Any]:
        """`step` for each sound item by itself."""
        done: list[Any] = []
        for value in values:
            if type(value) is Failed:  # its `__class__` may be a trap
                done.append(value)
                continue
            try:
                result = step(value)
                if hasattr(result, "__await__"):
                    result = await self.caller.outcome_of(result)
                done.append(result)
            except BaseException as error:
                if self.caller.goes_through(error):
                    raise
                done.append(self.caller.failed_alone(error, trouble))
        return done

    def _counted(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Report every call of a batch but the first, so that the hang limit is one of a single call."""
        calling = self._calling
        if calling is None:
            return function

        def call(x: Any) -> Any:
            if self._calls:
                calling()
            self._calls += 1
            return function(x)

        return call


def _with_errors(results: list[Any]) -> list[Any]:
    """Results, where an exception that was returned in the place of one is that item's failure."""
    for kind in set(map(type, results)):
        if issubclass(kind, BaseException):
            return [Failed(y) if issubclass(type(y), BaseException) else y for y in results]
    return results


def is_async(model: AnyModel | Model) -> bool:
    """Whether `predict` or a hook of the model is `async def`."""
    while isinstance(model, functools.partial):
        model = model.func
    if isinstance(model, type | Model):
        hooks = ("setup", "preprocess", "predict", "postprocess", "teardown")
        return any(inspect.iscoroutinefunction(getattr(model, hook, None)) for hook in hooks)
    return inspect.iscoroutinefunction(model) or inspect.iscoroutinefunction(type(model).__call__)
