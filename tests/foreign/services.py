"""What is asked of services, at each place where they call code that is not ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import carpool
from tests.foreign import models
from tests.foreign.models import Spiny, Thing, bad, good
from tests.foreign.table import (
    BATCHES,
    HANDLES,
    INSIDE,
    PROCESSES,
    SERVICES,
    WEB,
    Way,
    left_out,
    place,
)
from tests.foreign.ways import (
    START_LIMIT_S,
    AsyncHandleDoor,
    HandleDoor,
    LoopThread,
    Refused,
    Told,
    all_at_once,
    closing,
    logged,
    raised_by,
)
from tests.support.kinds import KINDS, fail, is_of
from tests.support.waiting import wait_until

NO_WORKER = "there is no worker: functions and models are called by the callers themselves"
NO_BYTES = "items and results are the callers' own objects, never bytes"
NO_FORMATS = "Python callers' items are pickled; only HTTP has formats"
NO_STREAM = "there are no streams"

# where one more case of a place need not go through every door
BY_TASKS = [name for name in SERVICES if name.endswith("AsyncHandle")]
BY_HTTP = [name for name in SERVICES if name.endswith("HTTP")]


def names(kind: str) -> set[str]:
    """How a kind may be called; Python makes RuntimeErrors of some that leave a coroutine."""
    name = KINDS[kind].__name__
    return {name, "RuntimeError"} if kind.startswith("Stop") else {name}


def failed_by_model(told: Told, kind: str) -> None:
    """One of our errors, which names what was raised."""
    assert told.code == "model_error", told
    if isinstance(told.error, carpool.ModelError):
        assert told.error.type_name in names(kind), told.error.type_name
    assert str(told.error)


def failed_alone(told: Told, kind: str) -> None:
    """One of our errors that speaks of this item."""
    assert told.code in ("model_error", "bad_result", "invalid_item", "invalid_request"), told
    assert str(told.error)


def one_of_three(
    way: Way,
    item: Any,
    expected: Callable[[Told, str], None],
    kind: str,
    other: Callable[[int], Any] = good,
    **asked: Any,
) -> None:
    """The guilty one hears of it, its mates are answered, so is who comes next, and no worker was lost for it."""
    door = way.shared
    pids = door.pids
    first, guilty, third = door.ask(other(1), item, other(3), **asked)
    assert (first.value, third.value) == (10, 30), (first, third)
    expected(guilty, kind)
    assert [told.value for told in door.ask(other(4), other(5), other(6), **asked)] == [40, 50, 60]
    assert door.pids == pids


# -- a worker's life


class _Starts:
    """Services in processes that fail as they start, all at the same time: starts take a while."""

    @functools.cached_property
    def ended(self) -> dict[tuple[str, str], Told]:
        cases = [("setup", kind) for kind in KINDS] + [("constructor", "SystemExit")]
        loop = LoopThread()
        try:
            told = loop.ask([lambda case=case: self._start(*case) for case in cases], START_LIMIT_S)  # type: ignore[misc]
        finally:
            loop.close()
        return dict(zip(cases, told, strict=True))

    async def _start(self, at: str, kind: str) -> None:
        stage = carpool.Stage(models.Life, kwargs={"at": at, "kind": kind}, max_batch_size=3)
        async with carpool.Service(stage).run_async():
            pass


STARTS = _Starts()


def refused_to_start(error: BaseException | None, kind: str) -> None:
    """The start fails, and its error names what was raised."""
    assert isinstance(error, carpool.StartupError), error
    assert KINDS[kind].__name__ in str(error)


@place("`__init__` and `setup`", ["process by AsyncHandle"], "__init__", ["SystemExit"])
def constructor_in_processes(way: Way, kind: str) -> None:
    refused_to_start(STARTS.ended["constructor", kind].error, kind)


@place("`__init__` and `setup`", ["process by AsyncHandle"], "setup")
def setup_in_processes(way: Way, kind: str) -> None:
    refused_to_start(STARTS.ended["setup", kind].error, kind)


left_out(
    "`__init__` and `setup`",
    [name for name in PROCESSES if name != "process by AsyncHandle"],
    "it is the worker that fails; the door makes no difference, and a start takes a while",
)


def _does_not_start(way: Way, kind: str, at: str) -> None:
    model = models.AsyncLife if way.run_in == "loop" else models.Life
    refused_to_start(raised_by(lambda: way.open(way.service(model, kwargs={"at": at, "kind": kind})).close()), kind)


@place("`__init__` and `setup`", INSIDE, "__init__")
def constructor(way: Way, kind: str) -> None:
    _does_not_start(way, kind, "constructor")


@place("`__init__` and `setup`", INSIDE, "setup")
def setup(way: Way, kind: str) -> None:
    _does_not_start(way, kind, "setup")


@place("`teardown`", INSIDE)
def teardown(way: Way, kind: str) -> None:
    model = models.AsyncLife if way.run_in == "loop" else models.Life
    with logged() as log:
        with closing(way.open(way.service(model, kwargs={"at": "teardown", "kind": kind}))) as door:
            assert door.ask(good(1))[0].value == 10
        assert any(KINDS[kind].__name__ in text for text in log.texts()), log.texts()


class _Ends:
    """Services in processes that raise as they end: ten stages in one service."""

    @functools.cached_property
    def lines(self) -> list[str]:
        lines: list[str] = []
        stages = [
            carpool.Stage(models.PassOn, name=f"{i}", kwargs={"at": "teardown", "kind": kind}, max_batch_size=3)
            for i, kind in enumerate(KINDS)
        ]
        with logged() as log:
            with closing(
                AsyncHandleDoor(carpool.Service(*stages), output=lambda worker, is_error, line: lines.append(line))
            ) as door:
                assert door.ask(good(1))[0].value == good(1)
            return lines + log.texts()


ENDS = _Ends()


@place("`teardown`", ["process by AsyncHandle"])
def teardown_in_processes(way: Way, kind: str) -> None:
    assert any(KINDS[kind].__name__ in line for line in ENDS.lines), ENDS.lines


left_out(
    "`teardown`",
    [name for name in PROCESSES if name != "process by AsyncHandle"],
    "it is the worker that fails; the door makes no difference, and a start takes a while",
)

# -- the model, per item and per batch

for at in ("preprocess", "predict", "postprocess"):

    @place(f"`{at}`", SERVICES)
    def hook(way: Way, kind: str, at: str = at) -> None:
        one_of_three(way, bad(at, kind), failed_by_model, kind)


@place("`predict`", SERVICES, "of a later stage")
def later_predict(way: Way, kind: str) -> None:
    one_of_three(way, bad("predict of a later stage", kind), failed_by_model, kind)


for at in ("decode", "encode"):

    @place(f"`{at}`", WEB)
    def own_format(way: Way, kind: str, at: str = at) -> None:
        def expected(told: Told, kind: str) -> None:
            if at == "decode" and kind == "Exception":
                assert told.code == "invalid_request", told  # a ValueError is a parser's complaint
            else:
                failed_by_model(told, kind)

        one_of_three(way, bad(at, kind), expected, kind, name="custom", content_type="text/lines")

    left_out(f"`{at}`", HANDLES, NO_FORMATS)
    left_out(f"`{at}`", BATCHES, NO_BYTES)

for at in models.RESULTS:

    @place("`__len__`, `__iter__` and `tolist` of what `predict` returns", SERVICES if "len" in at else BY_TASKS, at)
    def results(way: Way, kind: str, at: str = at) -> None:
        one_of_three(way, bad(at, kind), failed_by_model, kind)


# -- size=

for stage in ("first", "later"):

    @place("`size=`", SERVICES, f"of the {stage} stage")
    def size(way: Way, kind: str, stage: str = stage) -> None:
        one_of_three(way, bad(f"size= of the {stage} stage", kind), failed_by_model, kind)

    for method in ("__index__", "__repr__"):

        @place(
            "`__index__` and `__repr__` of what `size=` returns",
            SERVICES if (stage, method) == ("first", "__index__") else BY_TASKS,
            f"{method}, {stage} stage",
        )
        def odd_size(way: Way, kind: str, stage: str = stage, method: str = method) -> None:
            one_of_three(way, bad(f"{method} at the {stage} stage", kind), failed_alone, kind)


# -- pickling

for method in ("__reduce__", "__setstate__"):
    how = {"__reduce__": "written", "__setstate__": "read"}[method]

    @place(f"`{method}` of an item", HANDLES)
    def item(way: Way, kind: str, method: str = method) -> None:
        def expected(told: Told, kind: str) -> None:
            if method == "__reduce__" and issubclass(KINDS[kind], Exception):
                assert is_of(told.error, kind), told  # in the caller's own hands
            else:
                failed_alone(told, kind)

        one_of_three(way, Thing(method, kind), expected, kind)

    @place(f"`{method}` of a result", SERVICES)
    def result(way: Way, kind: str, how: str = how) -> None:
        if how == "read" and not way.door.endswith("Handle"):
            return  # it is written as JSON
        one_of_three(way, bad(f"a result, {how}", kind), failed_alone, kind)

    @place(f"`{method}` of a result", BY_TASKS, "between stages")
    def result_between(way: Way, kind: str, how: str = how) -> None:
        one_of_three(way, bad(f"a result between stages, {how}", kind), failed_alone, kind)

    @place(f"`{method}` of an exception that fails an item", SERVICES)
    def exception(way: Way, kind: str, method: str = method) -> None:
        def expected(told: Told, kind: str) -> None:
            assert told.code == "model_error", told
            if way.door.endswith("Handle"):
                cause = None if told.error is None else told.error.__cause__
                assert (type(cause) is models.Prickly) == (way.run_in != "process"), cause

        one_of_three(way, bad(f"{method} of an exception", kind), expected, kind)

    left_out(f"`{method}` of an exception that fails an item", BATCHES, NO_BYTES)
    left_out(f"`{method}` of an item", WEB, "a body is no pickle")
    left_out(f"`{method}` of an item", BATCHES, NO_BYTES)
    left_out(f"`{method}` of a result", BATCHES, NO_BYTES)

# -- types

OTHERS = "`__eq__`, `__hash__`, `__bool__`, `__len__`, `__iter__`, `__str__`, `__repr__` and attributes of an item"


@place(OTHERS, HANDLES)
def spiny(way: Way, kind: str) -> None:
    def expected(told: Told, kind: str) -> None:
        assert told.value == "unharmed", told

    one_of_three(way, Spiny(kind), expected, kind)


left_out(OTHERS, WEB, "items are made of JSON and msgpack")

TYPES = "types' own readers and writers: `__post_init__`, pydantic's validators, `model_dump`, `tolist`"

for at in ("__post_init__", "a validator", "model_dump", "tolist"):

    @place(TYPES, WEB if at in ("a validator", "model_dump") else BY_HTTP, at)
    def types(way: Way, kind: str, at: str = at) -> None:
        item = {"n": 1, "checked": {"kind": kind}} if at == "a validator" else {"n": 1, "at": at, "kind": kind}
        one_of_three(way, item, failed_alone, kind, name="typed")


ROUTES = "`routes=`"


@place(ROUTES, WEB)
def routes(way: Way, kind: str) -> None:
    one_of_three(way, {"n": 1, "at": "order_of", "kind": kind}, failed_by_model, kind, path="/adapted")


left_out(ROUTES, HANDLES, "Python callers bring the items themselves")
left_out(ROUTES, BATCHES, "batch functions have no addresses")

left_out(TYPES, HANDLES, "Python callers' items are taken as they are")
left_out(TYPES, BATCHES, NO_BYTES)

# -- streams


class Input:
    """The input of a stream, which raises after two items, or at once."""

    def __init__(self, at: str, kind: str) -> None:
        self.at, self.kind, self.n = at, kind, 0

    def _next(self) -> Any:
        self.n += 1
        if self.n > 2:
            fail(self.kind)
        return good(self.n)

    def __iter__(self) -> Any:
        if self.at == "__iter__":
            fail(self.kind)
        return self

    def __next__(self) -> Any:
        return self._next()


class AsyncInput(Input):
    """The same input for `async for`."""

    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> Any:
        if self.at == "__aiter__":
            fail(self.kind)
        return self

    async def __anext__(self) -> Any:
        if self.n >= 2 and self.kind == "StopIteration":
            raise RuntimeError from StopIteration()  # what Python makes of it
        return self._next()


def streamed(way: Way, xs: Any, **options: Any) -> tuple[list[Any], Told]:
    """What came out of a stream, and how it ended."""
    door, answers = way.shared, []
    if isinstance(door, HandleDoor):

        def read() -> None:
            for answer in door.handle.stream(xs, **options):
                answers.append(answer)

        return answers, all_at_once([read])[0]

    async def read_async() -> None:
        async for answer in door.handle.stream(xs, **options):
            answers.append(answer)

    return answers, door.loop.ask([read_async])[0]


def _serves(way: Way) -> None:
    assert [told.value for told in way.shared.ask(good(4), good(5), good(6))] == [40, 50, 60]


for at in ("__iter__", "__next__"):

    @place("`__iter__` and `__next__` of a stream's input", HANDLES, at)
    def sync_input(way: Way, kind: str, at: str = at) -> None:
        answers, told = streamed(way, Input(at, kind))
        assert answers == ([] if at == "__iter__" else [10, 20])
        if (at, kind) == ("__next__", "StopIteration"):
            assert told.error is None, told  # that is how an input ends
        else:
            assert is_of(told.error, kind), told
        _serves(way)


for at in ("__aiter__", "__anext__"):

    @place("`__aiter__` and `__anext__` of a stream's input", [name for name in HANDLES if "Async" in name], at)
    def async_input(way: Way, kind: str, at: str = at) -> None:
        answers, told = streamed(way, AsyncInput(at, kind))
        assert answers == ([] if at == "__aiter__" else [10, 20])
        if (at, kind) == ("__anext__", "StopAsyncIteration"):
            assert told.error is None, told
        else:
            assert is_of(told.error, kind), told
        _serves(way)


left_out("`__iter__` and `__next__` of a stream's input", WEB, NO_STREAM)
left_out("`__aiter__` and `__anext__` of a stream's input", WEB, NO_STREAM)
left_out(
    "`__aiter__` and `__anext__` of a stream's input",
    [name for name in HANDLES if "Async" not in name],
    "a thread's stream takes no `async for`",
)
left_out("`__aiter__` and `__anext__` of a stream's input", BATCHES, "`many` takes no `async for`")


@place("`__reduce__` of an item", HANDLES, "in a stream")
def item_in_a_stream(way: Way, kind: str) -> None:
    """The item fails alone, in its place in the stream."""
    answers, told = streamed(way, [good(1), Thing("__reduce__", kind), good(3)], return_exceptions=True)
    assert told.error is None, told
    assert answers[::2] == [10, 30]
    assert is_of(answers[1], kind) or isinstance(answers[1], carpool.ModelError), answers
    _serves(way)


for at, method in (("a result, read", "__setstate__"), ("a result, written", "__reduce__")):

    @place(f"`{method}` of a result", HANDLES, "in a stream")
    def result_in_a_stream(way: Way, kind: str, at: str = at) -> None:
        answers, told = streamed(way, [good(1), bad(at, kind), good(3)], return_exceptions=True)
        assert told.error is None, told
        assert answers[::2] == [10, 30]
        assert isinstance(answers[1], carpool.ModelError), answers
        _serves(way)


@place("`size=`", HANDLES, "in a stream")
def size_in_a_stream(way: Way, kind: str) -> None:
    answers, told = streamed(way, [good(1), bad("size= of the first stage", kind), good(3)], return_exceptions=True)
    assert told.error is None, told
    assert answers[::2] == [10, 30]
    assert isinstance(answers[1], carpool.ModelError), answers
    _serves(way)


@place(OTHERS, HANDLES, "in a stream")
def spiny_in_a_stream(way: Way, kind: str) -> None:
    answers, told = streamed(way, [good(1), Spiny(kind), good(3)])
    assert told.error is None, told
    assert answers == [10, "unharmed", 30]
    _serves(way)


# -- sinks

SINK = "sinks: `output=`"


@place(SINK, PROCESSES)
def sink(way: Way, kind: str) -> None:
    """The line is dropped, the log tells, and the next line comes through."""
    with logged() as log:
        one_of_three(way, bad("print", kind) | {"line": f"raise {kind}"}, lambda told, kind: _is(told, 0), kind)
        way.lines.clear()
        way.shared.ask(bad("print", kind) | {"line": f"after {kind}"})
        wait_until(lambda: f"after {kind}" in way.lines)
        assert any(KINDS[kind].__name__ in text for text in log.texts()), log.texts()


def _is(told: Told, value: Any) -> None:
    assert told.value == value, told


@place(SINK, ["thread by Handle", "loop by AsyncHandle"])
def sink_inside(way: Way, kind: str) -> None:
    """Where a worker that hangs stands is the only thing that it is told there."""

    def raises(worker: str, is_error: bool, line: str) -> None:
        fail(kind)

    model = models.hangs_async if way.run_in == "loop" else models.hangs
    with (
        logged() as log,
        closing(way.open(way.service(model, max_batch_time_s=0.1, idempotent=False), output=raises)) as door,
    ):
        (told,) = door.ask(good(0))
        assert told.code == "worker_lost", told
        assert door.ask(good(1))[0].value == 10
        assert any(KINDS[kind].__name__ in text for text in log.texts()), log.texts()


left_out(
    SINK,
    [name for name in INSIDE if name not in ("thread by Handle", "loop by AsyncHandle")],
    "threads and tasks print by themselves; only one that hangs is told there, whatever the door",
)
left_out(SINK, BATCHES, NO_WORKER)

# -- examples

EXAMPLES = "`examples`"


@place(EXAMPLES, INSIDE, "in the warm-up")
def warm_up(way: Way, kind: str) -> None:
    model = (models.ASYNC_EXAMPLES if way.run_in == "loop" else models.EXAMPLES)[kind]
    refused_to_start(raised_by(lambda: way.open(way.service(model)).close()), kind)


@place(EXAMPLES, INSIDE, "weighed by size=")
def weighed(way: Way, kind: str) -> None:
    model = type("Weighed", (models.AsyncHooks if way.run_in == "loop" else models.Hooks,), {})
    model.examples = (bad("size= of the first stage", kind),)  # type: ignore[attr-defined]
    refused_to_start(raised_by(lambda: way.open(way.service(model, size=models.weigh)).close()), kind)


@place(EXAMPLES, INSIDE, "when they are read")
def read(way: Way, kind: str) -> None:
    """Refused where the stage is declared."""
    model = type("Unread", (models.AsyncHooks if way.run_in == "loop" else models.Hooks,), {})
    model.examples = Input("__iter__", kind)  # type: ignore[attr-defined]
    error = raised_by(lambda: way.service(model))
    assert is_of(error, kind) or isinstance(error, TypeError), error


@place(EXAMPLES, [name for name in INSIDE if name in WEB], "shown and tried over HTTP")
def shown(way: Way, kind: str) -> None:
    """`/openapi.json` comes without it, `/readyz` says that it does not run, and all else goes on."""
    model = type("Shown", (models.AsyncAnything if way.run_in == "loop" else models.Anything,), {})
    model.examples = (models.Unshowable(kind),)  # type: ignore[attr-defined]
    with closing(way.open(way.service(model), idle_check_s=1e-9)) as door:
        for _ in range(2):  # the second time its head is known
            assert "examples" not in str(door.get("/openapi.json").value)
            assert _status(door.get("/readyz")) == 503
        assert door.get("/livez").value == "ok\n"
        assert door.ask(good(1))[0].value == 1


def _status(told: Told) -> int:
    assert isinstance(told.error, Refused), told
    return told.error.status


left_out(
    EXAMPLES, PROCESSES, "they are run by the same worker as in threads and tasks, and read and shown by the parent"
)
left_out(EXAMPLES, BATCHES, "batch functions run no examples")
