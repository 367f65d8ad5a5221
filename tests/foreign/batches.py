"""What is asked of `@carpool.batch`, over functions and methods, in threads and in tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import carpool
from carpool.engine.policy import Static
from tests.foreign import models
from tests.foreign.models import Results, Spiny, bad, good, trip
from tests.foreign.services import OTHERS, Input
from tests.foreign.table import (
    BATCHES,
    SERVICES,
    Way,
    left_out,
    place,
)
from tests.foreign.ways import TIMEOUT_S, LoopThread, Told, all_at_once, closing, raised_by, within
from tests.support.kinds import KINDS, fail, is_of

FUNCTIONS = [name for name in BATCHES if "method" not in name]
METHODS = [name for name in BATCHES if "method" in name]
NO_BATCH = "it is a setting of `@carpool.batch`"


class Batched:
    """A function, a method or a model under `@carpool.batch`, as its callers see it."""

    def __init__(self, way: Way, function: Any, **settings: Any) -> None:
        self.tasks = "tasks" in way.name
        self.loop = LoopThread() if self.tasks else None
        options: dict[str, Any] = {"max_batch_size": 3, "timeout_s": TIMEOUT_S, **settings}
        if "policy" not in options:
            options["policy"] = Static(max_queue_delay_s=0.003)
        try:
            decorate: Any = carpool.batch(**options)
            if isinstance(function, type):
                self.call = decorate(function)
            else:
                self.call = (
                    self._method(decorate, function) if "method" in way.name else self._function(decorate, function)
                )
        except BaseException:
            if self.loop is not None:
                self.loop.close()
            raise

    def _function(self, decorate: Any, function: Any) -> Any:
        async def call_async(xs: list[Any]) -> Any:
            return function(xs)

        def call(xs: list[Any]) -> Any:
            return function(xs)

        return decorate(call_async if self.tasks else call)

    def _method(self, decorate: Any, function: Any) -> Any:
        if self.tasks:

            class Holder:
                @decorate  # type: ignore[untyped-decorator]
                async def call(self, xs: list[Any]) -> Any:
                    return function(xs)

        else:

            class Holder:  # type: ignore[no-redef]
                @decorate  # type: ignore[untyped-decorator]
                def call(self, xs: list[Any]) -> Any:
                    return function(xs)

        self._holder = Holder()  # its calls share a line for as long as it lives
        return self._holder.call

    def ask(self, *items: Any) -> list[Told]:
        """How calls for these items ended, which were made at the same time."""
        if self.loop is not None:
            return self.loop.ask([lambda x=x: self.call(x) for x in items])  # type: ignore[misc]
        return all_at_once([lambda x=x: self.call(x) for x in items])  # type: ignore[misc]

    def many(self, xs: Any) -> Told:
        """How a call of `many` ended."""
        if self.loop is not None:
            return self.loop.ask([lambda: self.call.many(xs)])[0]
        return all_at_once([lambda: self.call.many(xs)])[0]

    def close(self) -> None:
        """The function takes no more calls."""
        if self.loop is None:
            within(self.call.close)
        else:
            try:
                self.loop.wait(self.call.close)
            finally:
                self.loop.close()


def as_raised(way: Way, told: Told, kind: str) -> None:
    """What callers hear of what the function has raised."""
    if kind.startswith("Stop"):
        assert isinstance(told.error, RuntimeError), told
        assert any(isinstance(cause, KINDS[kind]) for cause in causes(told.error)), told
    elif kind in ("GeneratorExit", "CancelledError") and isinstance(told.error, carpool.ModelError):
        assert told.error.type_name == KINDS[kind].__name__, told
    else:
        assert isinstance(told.error, KINDS[kind]), told


def causes(error: BaseException) -> list[BaseException]:
    """The exceptions that led to an exception."""
    found = []
    while (cause := error.__cause__) is not None:
        found.append(cause)
        error = cause
    return found


def one_of_three(way: Way, batched: Batched, item: Any, expected: Callable[[Way, Told, str], None], kind: str) -> None:
    """The guilty one hears of it, its mates too or they are answered, and who comes next is served."""
    for _ in range(2):  # the slot of the first one is free again
        first, guilty, third = batched.ask(good(1), item, good(3))
        expected(way, guilty, kind)
        for told, value in ((first, 10), (third, 30)):
            if told.error is None:
                assert told.value == value
            else:
                expected(way, told, kind)
        assert [told.value for told in batched.ask(good(4), good(5), good(6))] == [40, 50, 60]


def ten_times(xs: list[Any]) -> Any:
    """The function that is batched."""
    for x in xs:
        trip(x, "predict")
        if type(x) is dict and x.get("at") in models.RESULTS:
            return models.RESULTS[x["at"]](x["kind"], len(xs))
    return ["unharmed" if type(x) is Spiny else 10 * x["n"] for x in xs]


@place("`predict`", BATCHES)
def function(way: Way, kind: str) -> None:
    with closing(Batched(way, ten_times)) as batched:
        one_of_three(way, batched, bad("predict", kind), as_raised, kind)


@place("`predict`", BATCHES, "its errors isolated")
def isolated(way: Way, kind: str) -> None:
    with closing(Batched(way, ten_times, isolate_errors=True)) as batched:
        one_of_three(way, batched, bad("predict", kind), as_raised, kind)


@place("`predict`", BATCHES, "in `many`")
def function_of_many(way: Way, kind: str) -> None:
    with closing(Batched(way, ten_times)) as batched:
        as_raised(way, batched.many([good(1), bad("predict", kind), good(3)]), kind)
        assert batched.many([good(4), good(5), good(6), good(7)]).value == [40, 50, 60, 70]


class _Hooked(carpool.Model):
    def preprocess(self, x: Any) -> Any:
        trip(x, "preprocess")
        return x

    def postprocess(self, y: Any, x: Any) -> Any:
        trip(x, "postprocess")
        return y


class Hooked(_Hooked):
    """A model with hooks."""

    def predict(self, xs: list[Any]) -> Any:
        return ten_times(xs)


class AsyncHooked(_Hooked):
    """The same model for tasks."""

    async def predict(self, xs: list[Any]) -> Any:
        return ten_times(xs)


for at in ("preprocess", "postprocess"):

    @place(f"`{at}`", FUNCTIONS)
    def hook(way: Way, kind: str, at: str = at) -> None:
        with closing(Batched(way, AsyncHooked if "tasks" in way.name else Hooked)) as batched:
            one_of_three(way, batched, bad(at, kind), as_raised, kind)

    left_out(f"`{at}`", METHODS, "only models have hooks")


def _life(way: Way, at: str, kind: str) -> Any:
    """A model that fails as it begins or ends."""

    class Life(models.AsyncLife if "tasks" in way.name else models.Life):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(at, kind)

    return Life


@place("`__init__` and `setup`", FUNCTIONS, "__init__")
def constructor(way: Way, kind: str) -> None:
    """Raised where the model is declared."""
    error = raised_by(lambda: Batched(way, _life(way, "constructor", kind)).close())
    assert is_of(error, kind), error


@place("`__init__` and `setup`", ["batch in threads"], "setup")
def setup(way: Way, kind: str) -> None:
    """Raised where the model is declared."""
    error = raised_by(lambda: Batched(way, _life(way, "setup", kind)).close())
    assert is_of(error, kind), error


@place("`__init__` and `setup`", ["batch in tasks"], "setup")
def async_setup(way: Way, kind: str) -> None:
    """It is awaited before the first batch, which fails; the next one tries again."""
    model = _life(way, "setup", kind)
    made: list[Any] = []
    begin = model.__init__

    def remember(self: Any) -> None:
        begin(self)
        made.append(self)

    model.__init__ = remember
    with closing(Batched(way, model)) as batched:
        for told in batched.ask(good(1), good(2), good(3)):
            as_raised(way, told, kind)
        made[0].at = ""
        assert [told.value for told in batched.ask(good(4), good(5), good(6))] == [40, 50, 60]


@place("`teardown`", FUNCTIONS)
def teardown(way: Way, kind: str) -> None:
    """`close` raises it once all else is done, and not again."""
    batched = Batched(way, _life(way, "teardown", kind))
    assert batched.ask(good(1))[0].value == 10
    error = raised_by(batched.close)
    assert is_of(error, kind) or is_of(error.__cause__, kind), error


for name in ("`__init__` and `setup`", "`teardown`"):
    left_out(name, METHODS, "an instance is its user's to make and to end")

for at in models.RESULTS:

    @place("`__len__`, `__iter__` and `tolist` of what `predict` returns", BATCHES, at)
    def results(way: Way, kind: str, at: str = at) -> None:
        with closing(Batched(way, ten_times)) as batched:
            one_of_three(way, batched, bad(at, kind), as_raised, kind)


@place(OTHERS, BATCHES)
def spiny(way: Way, kind: str) -> None:
    def expected(way: Way, told: Told, kind: str) -> None:
        assert told.value == "unharmed", told

    with closing(Batched(way, ten_times)) as batched:
        one_of_three(way, batched, Spiny(kind), expected, kind)


# -- size=, merge=, split=


def itself(way: Way, told: Told, kind: str) -> None:
    """In the caller's own hands, as it was raised."""
    assert is_of(told.error, kind), told


def answered(told: Told, value: Any) -> None:
    """Check that a mate got its answer."""
    assert told.value == value, told


@place("`size=`", BATCHES)
def size(way: Way, kind: str) -> None:
    with closing(Batched(way, ten_times, size=models.weigh)) as batched:
        first, guilty, third = batched.ask(good(1), bad("size= of the first stage", kind), good(3))
        itself(way, guilty, kind)
        answered(first, 10)
        answered(third, 30)
        assert [told.value for told in batched.ask(good(4), good(5), good(6))] == [40, 50, 60]


for method in ("__index__", "__repr__"):

    @place("`__index__` and `__repr__` of what `size=` returns", BATCHES, method)
    def odd_size(way: Way, kind: str, method: str = method) -> None:
        with closing(Batched(way, ten_times, size=models.weigh)) as batched:
            first, guilty, third = batched.ask(good(1), bad(f"{method} at the first stage", kind), good(3))
            assert isinstance(guilty.error, carpool.ModelError) or is_of(guilty.error, kind), guilty
            answered(first, 10)
            answered(third, 30)
            assert [told.value for told in batched.ask(good(4), good(5), good(6))] == [40, 50, 60]


MERGE = "`merge=` and `split=`, and `__len__` and `__iter__` of chunks"


def merge(chunks: list[Any]) -> list[Any]:
    """Merges by putting the chunks into a list."""
    for chunk in chunks:
        trip(chunk, "merge")
    return chunks


def split(merged: list[Any], counts: list[int]) -> list[Any]:
    """Take the parts out of a merged output again."""
    for chunk in merged:
        trip(chunk, "split")
    return [10 * chunk["n"] for chunk in merged]


for at in ("merge", "split"):

    @place(MERGE, BATCHES, at)
    def merging(way: Way, kind: str, at: str = at) -> None:
        with closing(Batched(way, lambda merged: merged, merge=merge, split=split, size=lambda chunk: 1)) as batched:
            one_of_three(way, batched, bad(at, kind), as_raised, kind)


class Chunk(Results):
    """A chunk that raises as it is counted or read."""

    def __getitem__(self, i: Any) -> Any:
        fail(self.kind)


for at in ("__len__", "__iter__"):

    @place(MERGE, BATCHES, at)
    def chunks(way: Way, kind: str, at: str = at) -> None:
        """A chunk of one's own kind may be refused as well."""
        with closing(Batched(way, lambda xs: xs, merge=True)) as batched:
            first, guilty, third = batched.ask([1], Chunk(at, kind, 1), [3])
            assert guilty.error is not None
            for told, value in ((first, [1]), (third, [3])):
                assert told.error is not None or told.value == value, told
            assert [told.value for told in batched.ask([4], [5], [6])] == [[4], [5], [6]]


left_out(MERGE, SERVICES, NO_BATCH)

# -- the rest

for at in ("__iter__", "__next__"):

    @place("`__iter__` and `__next__` of a stream's input", BATCHES, f"{at}, in `many`")
    def input_of_many(way: Way, kind: str, at: str = at) -> None:
        """All of it is read by the caller itself."""
        with closing(Batched(way, ten_times)) as batched:
            told = batched.many(Input(at, kind))
            if (at, kind) == ("__next__", "StopIteration"):
                assert told.value == [10, 20], told
            else:
                itself(way, told, kind)
            assert batched.many([good(4), good(5)]).value == [40, 50]


LOCK = "execution locks"


class BadLock:
    """Raises as it is taken, or after it was given back."""

    def __init__(self) -> None:
        self.at = self.kind = ""
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._trip("taken")
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()
        self._trip("given back")

    def _trip(self, at: str) -> None:
        if self.at == at:
            fail(self.kind)


class BadAsyncLock(BadLock):
    """The same lock for tasks."""

    def __init__(self) -> None:
        super().__init__()
        self._async_lock = asyncio.Lock()

    async def __aenter__(self) -> None:
        self._trip("taken")
        await self._async_lock.acquire()

    async def __aexit__(self, *exc: object) -> None:
        self._async_lock.release()
        self._trip("given back")


for at in ("taken", "given back"):

    @place(LOCK, BATCHES, at)
    def lock(way: Way, kind: str, at: str = at) -> None:
        """Who holds it or waits for it hears of that; once it works, the next is served."""
        lock = BadAsyncLock() if "tasks" in way.name else BadLock()
        with closing(Batched(way, ten_times, execution_lock=lock)) as batched:
            for _ in range(2):
                lock.at, lock.kind = at, kind
                for told in batched.ask(good(1), good(2), good(3)):
                    if told.error is not None:
                        if "tasks" in way.name:
                            as_raised(way, told, kind)
                        else:
                            itself(way, told, kind)
                lock.at = ""
                assert [told.value for told in batched.ask(good(4), good(5), good(6))] == [40, 50, 60]


left_out(LOCK, SERVICES, NO_BATCH)

COPY = "`__copy__` of an exception that several callers get"


class Uncopied(Exception):
    """An exception that raises when it is copied."""

    kind = ""

    def __copy__(self) -> Any:
        fail(self.kind)


@place(COPY, BATCHES)
def copied(way: Way, kind: str) -> None:
    """All callers get the same exception, since it cannot be copied."""

    def raises(xs: list[Any]) -> Any:
        if any("at" in x for x in xs):
            error = Uncopied("planned")
            error.kind = kind
            raise error
        return ten_times(xs)

    def expected(way: Way, told: Told, kind: str) -> None:
        assert isinstance(told.error, Uncopied), told

    with closing(Batched(way, raises)) as batched:
        one_of_three(way, batched, bad("", kind), expected, kind)


left_out(COPY, SERVICES, "errors leave a worker as text")
