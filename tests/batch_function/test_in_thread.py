"""`run_in="thread"`: a model or `def` that tasks await, and that a thread runs batch by batch."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import carpool
from tests.support.waiting import PATIENCE_S


class Hooked(carpool.Model):
    """Notes in which thread each of its hooks ran."""

    def __init__(self) -> None:
        self.threads: dict[str, int] = {}

    def setup(self) -> None:
        self.threads["setup"] = threading.get_ident()

    def teardown(self) -> None:
        self.threads["teardown"] = threading.get_ident()

    def preprocess(self, x: str) -> int:
        self.threads["preprocess"] = threading.get_ident()
        return int(x)

    def predict(self, xs: list[int]) -> list[tuple[int, int]]:
        self.threads["predict"] = threading.get_ident()
        return [(x, len(xs)) for x in xs]

    def postprocess(self, y: tuple[int, int], x: int) -> str:
        self.threads["postprocess"] = threading.get_ident()
        return f"{y[0]} of {y[1]}"


class Gate:
    """A function that waits in its thread until it may go on."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, xs: list[int]) -> list[int]:
        assert self.may_go.wait(PATIENCE_S)
        self.batches.append(xs)
        return xs


in_thread = carpool.batch(run_in="thread")


def test_a_model_is_awaited_with_all_its_hooks() -> None:
    """Hooks and `predict` run in one thread, which is not the loop's; `close` tears the model down."""
    seen: dict[str, int] = {}

    class Model(Hooked):
        def __init__(self) -> None:
            self.threads = seen

    f = carpool.batch(max_batch_size=8, run_in="thread")(Model)

    async def main() -> None:
        assert await asyncio.gather(*[f(str(i)) for i in range(3)]) == ["0 of 3", "1 of 3", "2 of 3"]
        assert await f.many(["7"]) == ["7 of 1"]
        await f.close()
        with pytest.raises(carpool.Unavailable):
            await f("1")

    asyncio.run(main())
    here = threading.get_ident()
    assert seen["setup"] == here  # where it was declared
    assert here not in [seen[name] for name in ("preprocess", "predict", "postprocess", "teardown")]


def test_the_loop_is_free_and_callers_share_the_next_batch() -> None:
    """While the function runs the loop goes on, and what comes meanwhile goes together; who has gone is left out."""
    gate = Gate()
    f = in_thread(gate)

    async def main() -> None:
        first = asyncio.ensure_future(f(0))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(f(x)) for x in (1, 2, 3)]
        await asyncio.sleep(0.01)
        assert f.stats().running == 1
        others[1].cancel()
        await asyncio.sleep(0)
        gate.may_go.set()
        assert await first == 0
        done = await asyncio.gather(*others, return_exceptions=True)
        assert (done[0], done[2]) == (1, 3)
        assert isinstance(done[1], asyncio.CancelledError)
        await f.close()

    asyncio.run(main())
    assert gate.batches == [[0], [1, 3]]


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (ValueError, ValueError),
        (StopIteration, RuntimeError),
        (StopAsyncIteration, RuntimeError),
        (GeneratorExit, carpool.ModelError),
        (asyncio.CancelledError, carpool.ModelError),
        (KeyboardInterrupt, KeyboardInterrupt),
        (SystemExit, SystemExit),
        (RecursionError, RecursionError),
    ],
)
def test_whatever_the_function_raises_reaches_the_caller_of_the_bad_item(
    kind: type[BaseException], seen: type[BaseException]
) -> None:
    """Of a batch only the guilty item fails, and the next call is served."""

    @carpool.batch(run_in="thread")
    def picky(xs: list[int]) -> list[int]:
        if 0 in xs:
            raise kind
        return xs

    caught: list[type[BaseException]] = []

    async def call(x: int) -> int | None:
        try:
            return await picky(x)
        except BaseException as error:
            caught.append(type(error))
            return None

    async def main() -> list[int | None]:
        results = await asyncio.gather(call(1), call(0), call(2))
        return [*results, await picky(3)]

    assert asyncio.run(main()) == [1, None, 2, 3]
    assert caught == [seen]


@pytest.mark.parametrize("kind", ["carpool", "threading", "asyncio"])
def test_the_execution_lock_may_be_a_threads_or_a_tasks(kind: str) -> None:
    """The function runs while the lock is held, whichever of the two it is."""
    locks: dict[str, Any] = {"carpool": carpool.Lock(), "threading": threading.Lock(), "asyncio": asyncio.Lock()}
    lock = locks[kind]

    @carpool.batch(run_in="thread", execution_lock=lock)
    def held(xs: list[int]) -> list[bool]:
        return [lock.locked() for _ in xs]

    async def main() -> bool:
        return await held(1)

    assert asyncio.run(main())
    assert not lock.locked()


class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @carpool.batch(run_in="thread")
    def times(self, xs: list[int]) -> list[int]:
        return [self.factor * x for x in xs]


def test_a_method_has_a_line_for_each_instance() -> None:
    """Instances do not share batches, and each computes with what is its own."""
    two, three = Scaled(2), Scaled(3)

    async def main() -> list[int]:
        return await asyncio.gather(two.times(1), three.times(1), two.times(2))

    assert asyncio.run(main()) == [2, 3, 4]
    assert (two.times.stats().calls, three.times.stats().calls) == (2, 1)


async def later(xs: list[int]) -> list[int]:
    return xs


@pytest.mark.parametrize(
    ("run_in", "text"),
    [
        ("process", r"carpool\.Service\(carpool\.Stage"),
        ("loop", "leave run_in out"),
        ("threads", "must be \"thread\" or left out, not 'threads'"),
        (True, 'must be "thread" or left out, not True'),
    ],
)
def test_what_makes_no_sense_is_refused(run_in: Any, text: str) -> None:
    """The error names the value and the next step."""
    with pytest.raises(ValueError, match=text):
        carpool.batch(run_in=run_in)
    with pytest.raises(TypeError, match=r"later is async .*leave out run_in"):
        carpool.batch(run_in="thread")(later)  # type: ignore[call-overload]
