"""One call of the user's model on values: hooks for each item, `predict` for one or many.

    preprocess -> predict -> postprocess

An item that fails turns into `Failed`, and the others go on. `call/retry.py` has failures of batch
calls.

All of it is coroutines, as the user's code may be `async def`. Where nothing is, nothing is ever
suspended, and `results.run_now` needs no event loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from carpool.engine import faults
from carpool.engine.call.results import UNCHANGING, Again, Failed, Trouble, none_failed, run_now
from carpool.engine.call.retry import Pad, Retrier, padding_to
from carpool.engine.fast_paths import fast_path
from carpool.engine.forms import STEPS_HOOKS, Form
from carpool.engine.rows import ArrayRows, by_kind, stacking
from carpool.engine.turns import TURNS, Done, To
from carpool.model import AnyModel, Model, Traits, is_model_object


class Invoker:
    """A model, ready to be called with values.

    Args:
        model: What the user gave; an instance stays as it is.
        kwargs: For its constructor, or for each call of a function.
        batched: Whether `predict` takes a list.
        before_next_call: Called before each call of a batch but the first.
        allowed_batch_sizes: Numbers of items that `predict` is called with, rising; smaller batches
            are padded. None for any number.
        in_predict: Called as each call of `predict` begins, as part of it.

    Attributes:
        instance: The model; None for a function.
        new_generator: Makes a generator of an item, or of a batch, where `predict` yields.
        runs_arrays: Whether `run_array` may be called.
    """

    new_generator: Callable[[Any], Any]

    def __init__(
        self,
        model: AnyModel | Model,
        kwargs: Mapping[str, Any],
        traits: Traits,
        retrier: Retrier,
        *,
        batched: bool,
        before_next_call: Callable[[], None] | None = None,
        allowed_batch_sizes: Sequence[int] | None = None,
        in_predict: Callable[[], None] | None = None,
    ) -> None:
        self.traits = traits
        self.retrier = retrier
        self._batched = batched
        self._before_next_call = before_next_call
        self._calls = 0  # of the present batch
        if callable(model) and not isinstance(model, type | Model):
            self.instance: Any = None
            self._predict: Callable[[Any], Any] = partial(model, **kwargs) if kwargs else model
        else:
            self.instance = model(**kwargs) if isinstance(model, type) else model
            self._predict = self.instance.start if traits.form is Form.STEPS else self.instance.predict
        if traits.in_parts:
            self.new_generator = self._predict
        self._predict = faults.before(in_predict, self._predict)
        self._preprocess = getattr(self.instance, "preprocess", None)
        self._postprocess = getattr(self.instance, "postprocess", None)
        self._pad: Pad | None = None
        if allowed_batch_sizes is not None:
            own_item = partial(retrier.own, handed_on=self._preprocess is not None)
            self._pad = padding_to(allowed_batch_sizes, own_item)
        has_hooks = self._preprocess is not None or self._postprocess is not None
        is_plain_call = batched and not has_hooks and allowed_batch_sizes is None
        self._only_predicts = _may_call_now(is_plain_call, traits)
        self.runs_arrays = is_plain_call and traits.takes_array and not retrier.may_wait

    async def set_up(self) -> None:
        await self._call_hook("setup")

    async def tear_down(self) -> None:
        await self._call_hook("teardown")

    async def preprocess(self, values: list[Any], trouble: list[Trouble]) -> list[Any]:
        """Return the values as `preprocess` leaves them, with `Failed` for each that fails. None of
        them changes when it is called for others.
        """
        if self._preprocess is None:
            return values
        return await self._for_each(self._preprocess, values, trouble, handed_on=True, waits=True)

    def may_call_again(self, n: int) -> bool:
        """Report whether some of `n` items may be given to user code once more, after a call that
        may have changed them.
        """
        return n > 1 and self._batched and (self.retrier.isolate_errors or self.retrier.retry_on_oom)

    async def run(
        self,
        values: list[Any],
        trouble: list[Trouble],
        *,
        all_ok: bool = False,
        until: float = inf,
        again: Again | None = None,
    ) -> list[Any]:
        """Run the hooks and `predict` over items. Return as many results, in the same order.

        Args:
            trouble: Whatever happens besides is appended to this.
            until: The time from which nobody waits for the results.
            again: Returns items as they came, for calls after the first; None to give the same
                objects.
        """
        self._calls = 0
        if self._preprocess is not None:
            waits = not self._batched and len(values) > 1
            values = await self._for_each(self._preprocess, values, trouble, handed_on=True, waits=waits)
            all_ok = False
        if self._batched:
            renew = None if again is None else self._renewing(values, again)
            results = await self._predict_batch(values, trouble, all_ok, until, renew)
        else:
            handed_on, waits = self._postprocess is not None, len(values) > 1
            predict = self._counted(self._predict)
            results = await self._for_each(predict, values, trouble, handed_on=handed_on, waits=handed_on and waits)
        results = _fail_returned_errors(results)
        if self._postprocess is None:
            return results
        turned = {i: y for i, y in enumerate(results) if type(y) in TURNS}
        if turned:
            return await self._postprocess_turned(values, results, trouble, turned)
        return await self._postprocess_all(self._postprocess, values, results, trouble)

    async def _postprocess_turned(
        self, values: list[Any], results: list[Any], trouble: list[Trouble], turned: Mapping[int, Any]
    ) -> list[Any]:
        """Call `postprocess` where some results say where they go: an early answer is as it is."""
        done = {i for i, y in turned.items() if type(y) is Done}
        places = [i for i in range(len(results)) if i not in done]
        inner = [turned[i].item if i in turned else results[i] for i in places]
        inner = await self._postprocess_all(self._postprocess, [values[i] for i in places], inner, trouble)  # type: ignore[arg-type]
        results = list(results)
        for i, y in zip(places, inner, strict=True):
            results[i] = To(turned[i].branch, y) if i in turned and type(y) is not Failed else y
        return results

    async def _postprocess_all(
        self, postprocess: Callable[..., Any], values: list[Any], results: list[Any], trouble: list[Trouble]
    ) -> list[Any]:
        if self._batched and len(results) > 1:  # they wait while it is called for one after the other
            results = [y if type(y) is Failed else self.retrier.own(y, handed_on=True) for y in results]
        if not self.traits.postprocess_takes_x:
            return await self._for_each(postprocess, results, trouble)
        pairs = [y if type(y) is Failed else (y, x) for y, x in zip(results, values, strict=True)]
        return await self._for_each(lambda pair: postprocess(*pair), pairs, trouble)

    def run_now(
        self, values: list[Any], trouble: list[Trouble], until: float = inf, again: Again | None = None
    ) -> list[Any]:
        """Run items of which none has failed, where nothing waits."""
        if not self._only_predicts:
            return run_now(self.run(values, trouble, all_ok=True, until=until, again=again))
        self._calls = 1
        results = self.retrier.call_now(
            self._predict, values, trouble, announced=self._counted, until=until, again=again
        )
        return _fail_returned_errors(results)

    def run_array(self, whole: Any, trouble: list[Trouble], until: float, again: Again | None) -> Any:
        """Run items that are the rows of one array, where nothing waits; `predict` may change it.

        A part of the fast path `whole_arrays`: the same outcome as that of `run` with `ArrayRows`,
        see tests/engine/worker/test_fast_paths.py. No row is looked at by itself, so the result may
        be the array that `predict` returned.
        """
        self._calls = 1
        returned: Any
        try:
            returned = self._predict(whole)
            is_like = type(returned) is type(whole) and returned.ndim > 1 and len(returned) == len(whole)
            if is_like and self.retrier.odd_count is None:
                return returned
            if hasattr(returned, "__await__"):
                returned = run_now(returned)
            return _fail_returned_errors(self.retrier.results_of(returned, len(whole)))
        except BaseException as error:
            if self.retrier.is_fatal(error):
                raise
            why = error
        returned = None
        items = ArrayRows(whole)
        try:
            function = stacking(self._counted(self._predict), items)
            results = self.retrier.retry_now(function, items, trouble, why, until, again)
        finally:
            del why  # it holds this frame
        return _fail_returned_errors(results)

    async def call_together(
        self,
        function: Callable[[list[Any]], Any],
        values: list[Any],
        trouble: list[Trouble],
        positions: Sequence[int],
        until: float,
        again: Again | None = None,
    ) -> list[Any]:
        if not values:
            return []
        call = self.retrier.call
        return await call(self._counted(function), values, trouble, positions=positions, until=until, again=again)

    async def for_each(self, step: Callable[[Any], Any], values: list[Any], trouble: list[Trouble]) -> list[Any]:
        """Call `step`, user code, for each value that has not failed, by itself, with results for
        the model's hooks.
        """
        return await self._for_each(self._counted(step), values, trouble, handed_on=True, waits=True)

    # -- inside

    async def _call_hook(self, name: str) -> None:
        hook = getattr(self.instance, name, None)
        if hook is not None:
            returned = hook()
            if hasattr(returned, "__await__"):
                await self.retrier.resolve(returned)

    def _renewing(self, values: list[Any], again: Again) -> Again:
        """Return what prepares items once more, by their positions, and puts them among the values,
        since `postprocess` gets what the last call was given.
        """

        async def renew(positions: Sequence[int]) -> list[Any]:
            fresh = await self.preprocess(await again(positions), [])
            for position, value in zip(positions, fresh, strict=True):
                values[position] = value
            return fresh

        return renew

    async def _predict_batch(
        self, values: list[Any], trouble: list[Trouble], all_ok: bool, until: float, again: Again | None
    ) -> list[Any]:
        predict, pad = self._counted(self._predict), self._pad
        if self.traits.takes_array:
            return await self._predict_arrays(predict, values, trouble, until, again)
        call = self.retrier.call
        if all_ok or none_failed(values):
            return await call(predict, values, trouble, pad=pad, until=until, again=again)
        positions = [i for i, value in enumerate(values) if type(value) is not Failed]
        if not positions:
            return values
        items = [values[i] for i in positions]
        results = iter(await call(predict, items, trouble, pad=pad, positions=positions, until=until, again=again))
        return [v if type(v) is Failed else next(results) for v in values]

    async def _predict_arrays(
        self,
        predict: Callable[[Any], Any],
        values: list[Any],
        trouble: list[Trouble],
        until: float,
        again: Again | None,
    ) -> list[Any]:
        call, pad = self.retrier.call, self._pad
        if type(values) is ArrayRows:
            return await call(stacking(predict, values), values, trouble, pad=pad, until=until, again=again)
        results = values[:]
        left = [i for i, value in enumerate(values) if type(value) is not Failed]
        kinds = by_kind([values[i] for i in left])
        for kind in kinds:
            positions = [left[i] for i in kind]
            items = [values[i] for i in positions]
            function = stacking(predict, items)
            of_kind = await call(function, items, trouble, pad=pad, positions=positions, until=until, again=again)
            for position, result in zip(positions, of_kind, strict=True):
                # the call for the next kind may fill the same memory again
                results[position] = result if len(kinds) == 1 or type(result) is Failed else self.retrier.own(result)
        return results

    async def _for_each(
        self,
        step: Callable[[Any], Any],
        values: list[Any],
        trouble: list[Trouble],
        *,
        handed_on: bool = False,
        waits: bool = False,
    ) -> list[Any]:
        """Call `step`, user code, for each item that has not failed, by itself.

        What a call has returned is copied before the next one, which may fill the same memory.
        `handed_on` says that it only goes to the next hook, and `waits` that user code is called
        before all of it is read, so that the last result is copied, too.
        """
        done: list[Any] = []
        made = -1  # the position of the last result that may change
        for value in values:
            if type(value) is Failed:  # its `__class__` may be a trap
                done.append(value)
                continue
            if made >= 0:
                done[made] = self.retrier.own(done[made], handed_on)
                made = -1
            try:
                result = step(value)
                if hasattr(result, "__await__"):
                    result = await self.retrier.resolve(result)
                if type(result) not in UNCHANGING:
                    made = len(done)
                done.append(result)
            except BaseException as error:
                if self.retrier.is_fatal(error):
                    raise
                done.append(self.retrier.failed_alone(error, trouble))
        if made >= 0 and waits:
            done[made] = self.retrier.own(done[made], handed_on)
        return done

    def _counted(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `function`, with every call of a batch but the first announced: the hang limit is
        for one call.
        """
        before_next_call = self._before_next_call
        if before_next_call is None:
            return function

        def call(x: Any) -> Any:
            if self._calls:
                before_next_call()
            self._calls += 1
            return function(x)

        return call


def _fail_returned_errors(results: list[Any]) -> list[Any]:
    for kind in set(map(type, results)):
        if issubclass(kind, BaseException):
            return [Failed(y) if issubclass(type(y), BaseException) else y for y in results]
    return results


def is_async(model: AnyModel | Model) -> bool:
    while isinstance(model, partial):
        model = model.func
    if isinstance(model, type) or is_model_object(model):
        hooks = ("setup", "preprocess", "predict", "postprocess", "teardown", *STEPS_HOOKS)
        return any(_is_async(getattr(model, hook, None)) for hook in hooks)
    return _is_async(model) or _is_async(type(model).__call__)


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


@fast_path("calls_now", declined=False)
def _may_call_now(is_plain_call: bool, traits: Traits) -> bool:
    """Report whether a batch is one call of `predict`, for which no coroutine is needed.

    Fast path of `Invoker.run`: the same outcome, see tests/engine/call/test_fast_paths.py.
    """
    return is_plain_call and not traits.takes_array
