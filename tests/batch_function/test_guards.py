"""What user code raises in a batched function: every caller is answered, and the next call is served."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import gc
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest

import carpool
from carpool.engine.drive.threads import leading, sleeping
from tests.support.loops import on_a_loop

PATIENCE_S = 30.0


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Uncopyable(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit("no copy")


class Aside(StopIteration):
    pass


BROKEN_OFF = (carpool.ModelError, "the batch was broken off")
THE_END = (RuntimeError, "raised")
KINDS: list[tuple[type[BaseException], type[BaseException], str]] = [
    (LookupError, LookupError, ""),
    (StopIteration, *THE_END),
    (Aside, *THE_END),
    (StopAsyncIteration, *THE_END),
    (GeneratorExit, *BROKEN_OFF),
    (asyncio.CancelledError, *BROKEN_OFF),
    (KeyboardInterrupt, KeyboardInterrupt, ""),
    (SystemExit, SystemExit, ""),
    (MemoryError, MemoryError, ""),
    (RecursionError, RecursionError, ""),
    (Unreadable, Unreadable, ""),
    (Uncopyable, Uncopyable, ""),
]
IDS = [kind.__name__ for kind, _, _ in KINDS]


class Raises(carpool.Model):
    """Raises for the item "bad", at one of its places."""

    def __init__(self, kind: type[BaseException], place: str) -> None:
        self.kind, self.place = kind, place

    def _at(self, place: str, x: Any) -> Any:
        if place == self.place and x == "bad":
            raise self.kind
        return x

    def preprocess(self, x: Any) -> Any:
        return self._at("preprocess", x)

    def predict(self, xs: list[Any]) -> list[Any]:
        for x in xs:
            self._at("predict", x)
        return [self.kind() if self.place == "result" and x == "bad" else x for x in xs]

    def postprocess(self, y: Any) -> Any:
        return self._at("postprocess", y)


class AsyncRaises(Raises):
    async def predict(self, xs: list[Any]) -> list[Any]:  # type: ignore[override]
        await asyncio.sleep(0)
        return Raises.predict(self, xs)


ALONE = ("preprocess", "result", "postprocess")
BATCH_ENDS = (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)


def told(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        return error


def check(told: Any, kind: type[BaseException], text: str) -> None:
    assert type(told) is kind
    if text:
        assert text in str(told)


@pytest.mark.parametrize(("kind", "heard", "text"), KINDS, ids=IDS)
@pytest.mark.parametrize("place", [*ALONE, "predict"])
def test_threads_are_all_answered(place: str, kind: type[BaseException], heard: type[BaseException], text: str) -> None:
    """In threads, an exception of a hook reaches the guilty caller and one of the function all of
    its batch; then the line goes on.
    """
    f: Any = carpool.batch(max_batch_size=4, isolate_errors=False)(Raises(kind, place))
    tickets = [f.submit(x) for x in (1, "bad", 2)]
    with ThreadPoolExecutor(3) as pool:
        good, bad, other = [pool.submit(told, ticket.result).result(PATIENCE_S) for ticket in tickets]

    check(bad, heard, text)
    if (place in ALONE and kind is not KeyboardInterrupt) or kind is MemoryError:
        assert (good, other) == (1, 2)
    elif kind is not KeyboardInterrupt:  # which interrupts who leads, and the others are run again
        check(good, heard, text)
        check(other, heard, text)
    assert f(3) == 3


@pytest.mark.parametrize(("kind", "heard", "text"), KINDS, ids=IDS)
@pytest.mark.parametrize("place", [*ALONE, "predict"])
def test_tasks_are_all_answered(place: str, kind: type[BaseException], heard: type[BaseException], text: str) -> None:
    """In tasks, an exception of a hook reaches the guilty caller and one of the function all of its
    batch; then the line goes on (D5).
    """
    loop = asyncio.new_event_loop()
    f: Any = carpool.batch(max_batch_size=4, timeout_s=PATIENCE_S, isolate_errors=False)(AsyncRaises(kind, place))

    async def call(x: Any) -> Any:
        try:
            return await f(x)
        except BaseException as error:  # it would end the loop
            return error

    async def main() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*[call(x) for x in (1, "bad", 2)]), PATIENCE_S)

    good, bad, other = loop.run_until_complete(main())
    check(bad, heard, text)
    if place == "result" or kind is MemoryError or (place in ALONE and kind not in BATCH_ENDS):
        assert (good, other) == (1, 2)
    else:
        check(good, heard, text)
        check(other, heard, text)
        assert len({id(error) for error in (good, bad, other)}) == (1 if kind is Uncopyable else 3)
    assert loop.run_until_complete(call(3)) == 3
    loop.run_until_complete(f.close())
    loop.close()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_not_lost_with_its_callers(kind: type[BaseException]) -> None:
    """An exception that ends the program is raised into the loop if all callers of its batch have
    left.
    """
    go = asyncio.Event()

    @carpool.batch
    async def f(xs: list[int]) -> list[int]:
        await go.wait()
        raise kind

    async def main() -> None:
        call = asyncio.ensure_future(f(1))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.sleep(0.01)
        go.set()
        await asyncio.sleep(PATIENCE_S)

    loop = asyncio.new_event_loop()
    with pytest.raises(kind):
        loop.run_until_complete(main())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@on_a_loop
async def test_a_task_factory_that_raises_or_takes_no_context() -> None:
    """If the loop's task factory raises the callers hear of it; one that takes no context is no
    hindrance.
    """

    @carpool.batch(timeout_s=PATIENCE_S)
    async def f(xs: list[int]) -> list[int]:
        return xs

    def old_style(loop: asyncio.AbstractEventLoop, coro: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=loop)

    def raises(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Task[Any]:
        raise LookupError("no tasks")

    loop = asyncio.get_running_loop()
    loop.set_task_factory(old_style)  # type: ignore[arg-type]
    assert await f(1) == 1
    loop.set_task_factory(raises)
    with pytest.raises(LookupError, match="no tasks"):
        await f(1)
    loop.set_task_factory(None)
    assert await f(2) == 2


class BadLock:
    """A lock that raises at one of its places, while `bad`."""

    def __init__(self, place: str) -> None:
        self.place, self.bad, self.lock = place, True, threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.bad and self.place == "acquire":
            raise LookupError("acquire")
        return self.lock.acquire(blocking, timeout)

    def release(self) -> None:
        self.lock.release()
        if self.bad and self.place == "release":
            raise LookupError("release")


@pytest.mark.parametrize("place", ["acquire", "release"])
def test_an_execution_lock_that_raises(place: str) -> None:
    """If an execution lock raises, each caller is answered: one that led hears of the lock, and
    what has been run is not run again.
    """
    lock = BadLock(place)
    runs: list[int] = []

    @carpool.batch(execution_lock=lock)
    def f(xs: list[int]) -> list[int]:
        runs.extend(xs)
        return xs

    tickets = [f.submit(x) for x in range(3)]
    answers = [told(ticket.result) for ticket in tickets]
    errors = [type(answer) for answer in answers].count(LookupError)

    assert errors == (3 if place == "acquire" else 1)
    assert runs == ([] if place == "acquire" else [0, 1, 2])
    lock.bad = False
    assert f(7) == 7


@pytest.mark.parametrize(("kind", "heard", "text"), KINDS, ids=IDS)
def test_a_size_that_raises(kind: type[BaseException], heard: type[BaseException], text: str) -> None:
    """What `size` raises reaches the caller of that item before it joins the line."""

    def size(x: Any) -> int:
        if x == "bad":
            raise kind
        return 1

    f = carpool.batch(size=size)(lambda xs: xs)
    ticket = f.submit(1)
    error = told(lambda: f("bad"))

    assert type(error) in (kind, heard)
    assert not isinstance(error, StopIteration)
    assert ticket.result() == 1


# one that arrives in the callback of a weak reference, say the one of a `WeakSet`, is printed by the interpreter
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_leaders_that_are_killed_from_outside() -> None:
    """Exceptions that other threads throw into leaders, at whatever point, end these callers;
    everybody else is served, and nobody has another's answer.
    """

    @carpool.batch(max_batch_size=8)
    def double(xs: list[int]) -> list[int]:
        time.sleep(0.0005)
        return [2 * x for x in xs]

    class Killed(Exception):
        pass

    wrong: list[Any] = []
    over = threading.Event()

    def caller(first: int) -> None:
        x = first
        while not over.is_set():
            try:
                x += 1
                if double(x) != 2 * x:
                    wrong.append(x)
            except (Killed, carpool.Unavailable):
                continue

    threads = [threading.Thread(target=caller, args=(n * 10**6,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 1.5
    n = 0
    while time.monotonic() < deadline:
        victim = threads[n % len(threads)].ident
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(victim or 0), ctypes.py_object(Killed))
        n += 1
        time.sleep(0.002)
    over.set()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    with suppress(carpool.Unavailable):  # the last ones may have hit a decision, and then the line fails for a while
        assert double(1) == 2


# -- contexts


def test_a_batch_of_threads_runs_in_no_callers_context() -> None:
    """The function does not see the context of any caller, and what it sets there is seen by none."""
    user: ContextVar[str] = ContextVar("user", default="nobody")

    @carpool.batch
    def who(xs: list[int]) -> list[str]:
        found = user.get()
        user.set("function")
        return [found for _ in xs]

    user.set("ann")
    assert [who(1), who(2)] == ["nobody", "nobody"]
    assert user.get() == "ann"


# -- functions that wait for each other


@pytest.mark.fault("F82")
@on_a_loop
async def test_tasks_that_come_back_through_another_function() -> None:
    """If f awaits g, which awaits f, that is an error at once, for callers of `many` too; each of
    the two alone is fine (D33).
    """

    @carpool.batch
    async def f(xs: list[int]) -> list[int]:
        return [await g(x) for x in xs]

    @carpool.batch
    async def g(xs: list[int]) -> list[int]:
        return [x if x < 5 else (await f.many([x]))[0] for x in xs]

    assert await f(1) == 1
    with pytest.raises(RuntimeError, match="f was called from inside itself"):
        await asyncio.wait_for(f(7), PATIENCE_S)
    assert await g(2) == 2


@pytest.mark.fault("F82")
def test_threads_that_come_back_through_another_function() -> None:
    """If f waits for g, whose leader is another thread that waits for f, one of the two is told of
    the circle.
    """
    entered, go = threading.Event(), threading.Event()

    @carpool.batch(max_batch_size=1)
    def f(xs: list[int]) -> list[int]:
        if xs == [1]:
            entered.set()
            go.wait(PATIENCE_S)
        return [g(x) for x in xs]

    @carpool.batch(max_batch_size=1)
    def g(xs: list[int]) -> list[int]:
        if xs == [2]:
            go.set()
            time.sleep(0.1)  # f's leader is asleep in this line
            return [f(3)]
        return xs

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(told, lambda: f(1))
        assert entered.wait(PATIENCE_S)
        two = pool.submit(told, lambda: g(2))
        errors = [type(call.result(PATIENCE_S)) for call in (one, two)]

    assert RuntimeError in errors
    assert f(5) == 5
    assert sleeping == leading == {}


def test_a_leader_may_wait_for_a_function_that_another_runs() -> None:
    """A leader may wait for a function that another thread leads: without a circle, that one comes
    to its end.
    """
    entered, go = threading.Event(), threading.Event()

    @carpool.batch(max_batch_size=1)
    def slow(xs: list[int]) -> list[int]:
        entered.set()
        go.wait(PATIENCE_S)
        return xs

    f = carpool.batch(max_batch_size=1)(lambda xs: [slow(x) for x in xs])
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(slow, 0)
        assert entered.wait(PATIENCE_S)
        others = [pool.submit(f, x) for x in (1, 2)]
        time.sleep(0.05)
        go.set()
        assert [call.result(PATIENCE_S) for call in (first, *others)] == [0, 1, 2]


# -- interruptions in one's own thread


def test_a_call_from_a_signal_handler_inside_the_line_is_an_error() -> None:
    """A signal handler's call that comes while its own thread holds the line's lock would wait for
    that, and is an error; the interrupted call goes on (D40).
    """
    errors: list[Any] = []

    @carpool.batch
    def f(xs: list[int]) -> list[int]:
        return xs

    def handler(*_: Any) -> None:
        errors.extend([told(lambda: f(2)), told(ticket.cancel)])

    ticket = f.submit(0)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with f._driver._lock:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert [type(error) for error in errors] == [RuntimeError, RuntimeError]
    assert "signal handler or a __del__" in str(errors[0])
    assert f(1) == 1
    assert ticket.result() == 0


def test_a_call_from_a_signal_handler_between_two_steps_of_a_leader_is_an_error() -> None:
    """A signal handler's call that comes while its own thread has claimed the only slot would wait
    for that, and is an error; the interrupted call goes on (D40).
    """
    errors: list[Any] = []

    @carpool.batch(timeout_s=2.0)
    def f(xs: list[int]) -> list[int]:
        return xs

    def handler(*_: Any) -> None:
        errors.extend([told(lambda: f(2)), told(lambda: f.many([3, 4]))])

    driver = f._driver
    run_batch = driver._run_batch

    def interrupted(*args: Any) -> None:  # with a slot, but not yet inside the function
        signal.raise_signal(signal.SIGUSR1)
        run_batch(*args)

    before = signal.signal(signal.SIGUSR1, handler)
    driver._run_batch = interrupted
    try:
        assert f(1) == 1
    finally:
        driver._run_batch = run_batch
        signal.signal(signal.SIGUSR1, before)

    assert [type(error) for error in errors] == [RuntimeError, RuntimeError]
    assert "signal handler or a __del__" in str(errors[0])
    assert f.many([5, 6]) == [5, 6]


# -- loops in threads


def test_loops_in_many_threads_open_and_drop_lines_at_once() -> None:
    """While one thread looks for lines of loops that are gone, others may add theirs (D17)."""

    @carpool.batch
    async def f(xs: list[int]) -> list[int]:
        return xs

    class Slow(asyncio.SelectorEventLoop):
        def is_closed(self) -> bool:
            time.sleep(0.0001)  # another thread's turn
            return super().is_closed()

    def run(n: int) -> list[int]:
        answers = []
        for x in range(10):
            with asyncio.Runner(loop_factory=Slow) as runner:
                answers.append(runner.run(f(n + x)))
        return answers

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(0, 80, 10))) == [list(range(n, n + 10)) for n in range(0, 80, 10)]


# -- copies


@carpool.batch
def module_level(xs: list[int]) -> list[int]:
    return [x + 1 for x in xs]


@carpool.batch
async def module_level_async(xs: list[int]) -> list[int]:
    return [x + 1 for x in xs]


renamed = carpool.batch(abs)  # type: ignore[type-var]


class Holder:
    def __init__(self, n: int) -> None:
        self.n = n
        self.function = module_level
        self.bound = self.add
        self.bound_async = self.add_async

    @carpool.batch
    def add(self, xs: list[int]) -> list[int]:
        return [x + self.n for x in xs]

    @carpool.batch
    async def add_async(self, xs: list[int]) -> list[int]:
        return [x + self.n for x in xs]


@pytest.fixture(params=["pickle", "deepcopy"])
def twin(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    ways: dict[str, Callable[[Any], Any]] = {
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "deepcopy": copy.deepcopy,
    }
    yield ways[request.param]
    gc.collect()


def test_functions_are_copied_by_name(twin: Callable[[Any], Any]) -> None:
    """A batched function is pickled and copied by its name, as functions are: what comes out is the
    same object (D39).
    """
    for function in (module_level, module_level_async, Holder.add):
        assert twin(function) is function
        assert copy.copy(function) is function


def test_objects_that_hold_batched_functions(twin: Callable[[Any], Any]) -> None:
    """When an object is copied, its batched methods belong to the copy (D39)."""
    one = Holder(1)
    two = twin(one)
    two.n = 10

    assert two.function is module_level
    assert (one.bound(1), two.bound(1), copy.copy(two.bound)(2)) == (2, 11, 12)
    assert asyncio.run(two.bound_async(1)) == 11


def test_what_has_no_name_is_not_pickled() -> None:
    """A batched function that has no name to be found by is not pickled, and the text says what to
    do; a copy is the function itself all the same.
    """
    local = carpool.batch(lambda xs: xs)

    with pytest.raises(TypeError, match=r"no name in tests.batch_function.test_guards leads to it"):
        pickle.dumps(local)
    assert copy.deepcopy([local])[0] is local
    nameless = type("Nameless", (), {"m": None})()
    method = local.__get__(nameless)
    with pytest.raises(TypeError, match="it is not the attribute"):
        pickle.dumps(method)
