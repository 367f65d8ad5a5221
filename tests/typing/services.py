"""What type checkers must take without a word: models, stages and services as users write them, in strict modes too."""

from collections.abc import Awaitable
from typing import Annotated, Any, assert_type

import msgspec
import numpy as np
from numpy.typing import NDArray

import carpool
from carpool.batch_function.tasks import AsyncBatch
from carpool.batch_function.threads import ThreadBatch
from carpool.types import AsyncParts, Entry, ServiceSnapshot, StageSnapshot, StreamSnapshot, ThreadParts

Image = Annotated[list[float], msgspec.Meta(min_length=64)]


class One(carpool.Model):
    def predict(self, text: str) -> int:
        return len(text)


class Many(carpool.Model):
    examples = ([0.0] * 64,)

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def setup(self) -> None:
        self.weights = np.ones(64)

    def predict(self, images: list[Image]) -> list[float]:
        return [self.factor * sum(image) for image in images]


class Hooked(carpool.Model):
    accepts = ("text/csv",)
    produces = ("text/csv", "application/xml")

    def decode(self, requests: list[carpool.HTTPRequest]) -> list[bytes]:
        return [request.body for request in requests]

    def preprocess(self, body: bytes) -> float:
        return float(body)

    def predict(self, numbers: list[float]) -> list[float]:
        return numbers

    def postprocess(self, number: float, sent: float) -> dict[str, float]:
        return {"answer": number + sent}

    def encode(self, answers: list[dict[str, float]], content_type: str) -> list[bytes]:
        return [content_type.encode() for _ in answers]

    def teardown(self) -> None:
        pass


class Later(carpool.Model):
    async def setup(self) -> None:
        self.open = True

    async def predict(self, keys: list[str]) -> list[int | Exception]:
        return [len(key) if key else KeyError(key) for key in keys]

    async def teardown(self) -> None:
        self.open = False


class LaterHooked(Later):
    def preprocess(self, key: bytes) -> str:
        return key.decode()


class Rows(carpool.Model):
    def predict(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return rows


class Bare:
    """No subclass of `Model`."""

    def predict(self, texts: list[str]) -> tuple[int, ...]:
        return tuple(map(len, texts))


carpool.Stage(One)
carpool.Stage(Many, max_batch_size=64, workers=2, kwargs={"factor": 3.0}, policy="static", run_in="thread")
carpool.Stage(Many, policy=carpool.Static(max_queue_delay_s=0.1))
carpool.Stage(Later, run_in="loop")
service = carpool.Service(
    carpool.Stage(Hooked, max_batch_size=8),
    One,
    overload="latency",
    routes={"/a": None, "/b": len, "/c": lambda body: [body]},
)

assert_type(carpool.batch(max_batch_size=64)(Many), ThreadBatch[list[float], float])
assert_type(carpool.batch(max_batch_size=64)(Many(3.0)), ThreadBatch[list[float], float])
assert_type(carpool.batch(Bare), ThreadBatch[str, int])
assert_type(carpool.batch(Bare)("a"), int)
assert_type(carpool.batch(Bare).submit("a"), carpool.Ticket[int])
assert_type(carpool.batch(Later), AsyncBatch[str, int | Exception])
assert_type(carpool.batch(timeout_s=1.0)(Later()), AsyncBatch[str, int | Exception])
assert_type(carpool.batch(Rows)(np.ones(3)), Any)
assert_type(carpool.batch(Hooked), ThreadBatch[Any, Any])
assert_type(carpool.batch(max_batch_size=8)(Hooked()), ThreadBatch[Any, Any])
assert_type(carpool.batch(max_batch_size=8)(LaterHooked), AsyncBatch[Any, Any])


@carpool.batch(max_batch_size=8)
def rows_of(texts: list[str]) -> NDArray[np.float64]:
    """An array's rows are the results, of no type that its hint says."""
    return np.ones(len(texts))


assert_type(rows_of("a"), Any)


async def call() -> None:
    async with service.run_async() as s:
        await s.predict(b"1.0")
        assert_type(s, carpool.AsyncHandle)
        number: float = await s.predict(b"1.0")  # what a service answers is `Any`: say what it is
        print(number)


def in_threads() -> int:
    with service.run() as s:
        assert_type(s, carpool.Handle)
        answer: int = s.predict(b"1.0")
        return answer


waited: Awaitable[None] = call()


class Placed(carpool.Model):
    def setup(self) -> None:
        self.device = f"cuda:{assert_type(carpool.worker_index(), int)}"

    def predict(self, text: str) -> str:
        return self.device + text


carpool.Stage(Placed, workers=2, env={"A": "1"})
carpool.Stage(Placed, env=[{"A": "1"}, {}])
carpool.Stage(Placed, workers=4, devices=2)
carpool.Stage(Placed, devices=["cuda:0", 1, "GPU-8932f937"])
carpool.Stage(Placed, devices=[["cuda:0", "cuda:1"], [2, 3]])


def shown(stats: ServiceSnapshot) -> str:
    streams: StreamSnapshot | None = stats.streams
    stage: StageSnapshot = stats.stages[0]
    return f"{stage.name}: {0 if streams is None else streams.parts}"


def words_of(s: carpool.Handle) -> list[str]:
    parts: ThreadParts[str] = s.predict_stream("hello")
    with parts as words:
        found = list(words)
    assert_type(found, list[str])
    entries: list[Entry] = s.story()
    return [*found, shown(s.stats()), *[entry.event for entry in entries]]


async def first_word_of(s: carpool.AsyncHandle) -> str:
    parts: AsyncParts[str] = s.predict_stream("hello")
    async with parts as words:
        async for word in words:
            assert_type(word, str)
            return word
    return ""
