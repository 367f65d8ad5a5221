"""One call of the user's model on values: hooks per item, `predict` for one or many; an item's fault stays its own.

    preprocess -> predict -> postprocess

Every step works on the items that are still sound; an item that fails turns into `Failed` and the rest go on. A batch
call that raises is split in halves and run again, breadth first, so that only the guilty items fail.

All of it is written as coroutines so that the user's code may be `def` or `async def`. Where nothing is async, nothing
ever waits, and `run_now` runs them through without an event loop.
"""

from __future__ import annotations

import functools
import inspect
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from carpool import faults
from carpool.errors import ModelError
from carpool.model import AnyModel, Model, Traits

T = TypeVar("T")

_ALL_BAD = 4  # so many parts of one level fail, and none succeeds: the batch is bad, not an item


class Failed:
    """Takes the place of an item's value once it has failed.

    Attributes:
        error: why.
    """

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Invoker:
    """A model, ready to be called with values.

    Args:
        model: what the user gave; an instance stays as it is.
        kwargs: for its constructor, or for each call of a function.
        traits: what `traits_of` read off it.
        batched: whether `predict` takes a list.
        isolate_errors: whether a batch that raises is split to find the guilty items.
        through: exceptions that end the whole call instead of failing an item.
        calling: told before each call of `predict`, but for the first of a batch.
        allowed_batch_sizes: numbers of items that `predict` is called with, rising; smaller batches are padded. None
            for any number.
        in_predict: called as each call of `predict` begins, as part of it.
    """

    def __init__(
        self,
        model: AnyModel | Model,
        kwargs: Mapping[str, Any],
        traits: Traits,
        *,
        batched: bool,
        isolate_errors: bool,
        through: tuple[type[BaseException], ...] = (GeneratorExit,),
        calling: Callable[[], None] = lambda: None,
        allowed_batch_sizes: Sequence[int] | None = None,
        in_predict: Callable[[], None] | None = None,
    ) -> None:
        self.traits = traits
        self._batched = batched
        self._isolate = isolate_errors
        self._through = through
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

    async def set_up(self) -> None:
        """The model's `setup`. Raises what it raises."""
        await self._hook("setup")

    async def tear_down(self) -> None:
        """The model's `teardown`. Raises what it raises."""
        await self._hook("teardown")

    async def run(self, values: list[Any]) -> list[Any]:
        """The hooks and `predict` over items; some may be `Failed` already. As many results, in their order."""
        self._calls = 0
        if self._preprocess is not None:
            values = await self._each(self._preprocess, values)
        if self._batched:
            results = await self._batch(values)
        else:
            results = await self._each(self._counted(self._predict), values)
        if any(issubclass(kind, BaseException) for kind in set(map(type, results))):
            # an item's own error, returned in its place
            results = [Failed(y) if isinstance(y, BaseException) else y for y in results]
        if self._postprocess is None:
            return results
        postprocess: Callable[..., Any] = self._postprocess
        if not self.traits.postprocess_takes_x:
            return await self._each(postprocess, results)
        pairs = [y if isinstance(y, Failed) else (y, x) for y, x in zip(results, values, strict=True)]
        return await self._each(lambda pair: postprocess(*pair), pairs)

    async def together(
        self, function: Callable[[list[Any]], Any], items: list[Any], sizes: Sequence[int] | None = None
    ) -> list[Any]:
        """`function` over all items at once; if it raises, over smaller and smaller parts.

        With `sizes`, each part is padded up to the next of them with its last item, and the surplus results dropped.

        Breadth first: of n items with one bad one this takes 1 + 2·log2(n) calls. Once a level of four parts or more
        fails as a whole, no part is to blame and all of them get their error.
        """
        function = self._counted(function)
        results: list[Any] = [None] * len(items)
        parts = [(0, len(items))]
        while parts:
            failed: list[tuple[int, int, BaseException]] = []
            for begin, end in parts:
                part = items[begin:end]
                if sizes is not None:
                    part += part[-1:] * (padded(len(part), sizes) - len(part))
                try:
                    returned = function(part)
                    if hasattr(returned, "__await__"):
                        returned = await returned
                    results[begin:end] = as_results(returned, len(part))[: end - begin]
                except self._through:
                    raise
                except BaseException as error:
                    failed.append((begin, end, error))
            hopeless = not self._isolate or (len(failed) == len(parts) >= _ALL_BAD)
            parts = []
            for begin, end, why in failed:
                if hopeless or end - begin == 1 or getattr(why, "code", "") == "bad_result":
                    results[begin:end] = [Failed(why)] * (end - begin)
                else:
                    middle = (begin + end) // 2
                    parts += [(begin, middle), (middle, end)]
        return results

    # -- inside

    async def _hook(self, name: str) -> None:
        hook = getattr(self.instance, name, None)
        if hook is not None:
            done = hook()
            if hasattr(done, "__await__"):
                await done

    async def _batch(self, values: list[Any]) -> list[Any]:
        if Failed not in set(map(type, values)):
            return await self.together(self._predict, values, self._sizes)
        sound = [value for value in values if not isinstance(value, Failed)]
        answers = iter(await self.together(self._predict, sound, self._sizes) if sound else ())
        return [v if isinstance(v, Failed) else next(answers) for v in values]

    async def _each(self, step: Callable[[Any], Any], values: list[Any]) -> list[Any]:
        """`step` for each sound item by itself."""
        done: list[Any] = []
        for value in values:
            if value.__class__ is Failed:
                done.append(value)
                continue
            try:
                result = step(value)
                if hasattr(result, "__await__"):
                    result = await result
                done.append(result)
            except self._through:
                raise
            except BaseException as error:
                done.append(Failed(error))
        return done

    def _counted(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Report every call of a batch but the first, so that the hang limit is one of a single call."""

        def call(x: Any) -> Any:
            if self._calls:
                self._calling()
            self._calls += 1
            return function(x)

        return call


def padded(n: int, sizes: Sequence[int]) -> int:
    """The least of the allowed sizes that holds `n` items; `n` itself beyond the largest."""
    i = bisect_left(sizes, n)
    return sizes[i] if i < len(sizes) else n


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """What `coroutine` returns, without an event loop.

    Raises:
        TypeError: it waits for something; only user code that is really asynchronous does.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    coroutine.close()
    raise TypeError('the model waits for something: async models run with run_in="loop" or under @carpool.batch')


def is_async(model: AnyModel | Model) -> bool:
    """Whether `predict` or a hook of the model is `async def`."""
    while isinstance(model, functools.partial):
        model = model.func
    if isinstance(model, type | Model):
        hooks = ("setup", "preprocess", "predict", "postprocess", "teardown")
        return any(inspect.iscoroutinefunction(getattr(model, hook, None)) for hook in hooks)
    return inspect.iscoroutinefunction(model) or inspect.iscoroutinefunction(type(model).__call__)


def as_results(returned: Any, n: int) -> list[Any]:
    """What a batch call returned, as a list of `n` results.

    Raises:
        ModelError: it is no sequence, or one of another length.
    """
    if isinstance(returned, list):
        results: list[Any] = returned
    elif hasattr(returned, "unbind") and hasattr(returned, "detach"):  # a torch tensor
        tensor = returned.detach().cpu()
        # a row of its own memory each: pickling a view would take the whole batch along
        results = tensor.tolist() if tensor.ndim == 1 else [row.clone() for row in tensor]
    elif hasattr(returned, "tolist") and hasattr(returned, "ndim"):  # a numpy array
        results = returned.tolist() if returned.ndim <= 1 else list(returned)
    elif isinstance(returned, Sequence) and not isinstance(returned, str | bytes | bytearray):
        results = list(returned)
    else:
        kind = returned.__class__.__name__
        text = f"a batch of {n} needs a sequence of {n} results, but the model returned {kind}"
        raise ModelError(text, code="bad_result")
    if not isinstance(results, list) or len(results) != n:
        got = len(results) if isinstance(results, list) else "a single value"
        text = f"a batch of {n} needs {n} results, but the model returned {got}"
        raise ModelError(text, code="bad_result")
    return results
