"""What type checkers must see: a batch function of lists is a function of items. Checked by `test_typing.py`."""

import threading
from typing import Any, assert_type

import numpy as np

import carpool


@carpool.batch
def length(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@carpool.batch(max_batch_size=32, timeout_s=1.0)
def halve(numbers: list[int]) -> tuple[float, ...]:
    return tuple(number / 2 for number in numbers)


@carpool.batch(max_batch_size=None, execution_lock=threading.Semaphore())
def unlimited(texts: list[bytes]) -> list[int]:
    return [len(text) for text in texts]


@carpool.batch
async def fetch(keys: list[bytes]) -> list[str]:
    return [key.decode() for key in keys]


@carpool.batch(max_in_flight_batches=4)
async def fetch_more(keys: list[bytes]) -> list[str]:
    return [key.decode() for key in keys]


@carpool.batch(merge=True)
def normalise(rows: np.ndarray) -> np.ndarray:
    return rows.copy()


@carpool.batch(merge=True)
async def normalise_soon(rows: list[float]) -> list[float]:
    return [row / max(rows) for row in rows]


@carpool.batch(merge=carpool.pad(value=-1, side="left"))
def padded(rows: np.ndarray) -> list[float]:
    return [float(row.sum()) for row in rows]


Lengths = np.ndarray[tuple[int], np.dtype[np.int64]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]


@carpool.batch(merge=carpool.pad())
async def padded_soon(rows: Matrix, lengths: Lengths) -> list[float]:
    return [float(row[:n].sum()) for row, n in zip(rows, lengths, strict=True)]


class Translator:
    @carpool.batch(merge=carpool.pad())
    def total(self, rows: np.ndarray, lengths: np.ndarray) -> list[int]:
        return [int(n) for n in lengths]

    @carpool.batch
    def translate(self, texts: list[str]) -> list[bytes]:
        return [text.encode() for text in texts]

    @carpool.batch(max_batch_size=8)
    async def look_up(self, words: list[str]) -> list[int]:
        return [len(word) for word in words]


assert_type(length("a"), int)
assert_type(length.many(["a"]), list[int])
assert_type(length.submit("a"), carpool.Ticket[int])
assert_type(length.submit("a").result(), int)
assert_type(length.submit("a", lead=True), carpool.Ticket[int])
assert_type(unlimited(b"a"), int)
assert_type(halve(1), float)
assert_type(normalise(np.ones(3)), np.ndarray)
assert_type(padded(np.ones((1, 2))), list[float])
assert_type(padded.submit(np.ones((1, 2))), carpool.Ticket[list[float]])
assert_type(Translator().total(np.ones((1, 2))), list[int])
assert_type(Translator().translate("a"), bytes)


async def main() -> None:
    assert_type(await fetch(b"a"), str)
    assert_type(await fetch.many([b"a"]), list[str])
    assert_type(await fetch_more(b"a"), str)
    assert_type(await normalise_soon([1.0]), list[float])
    assert_type(await Translator().look_up("a"), int)
    assert_type(await padded_soon(np.ones((1, 2))), list[float])


assert_type(length.stats().mean_latency_s, float)
assert_type(fetch.stats().batch_sizes, dict[int, int])
assert_type(fetch.explain(), dict[str, Any])
assert_type(length("a", priority=1), int)
assert_type(length.many(["a"], priority=1), list[int])


@carpool.batch(run_in="thread", max_batch_size=8)
def in_thread(xs: list[int]) -> list[str]:
    return [str(x) for x in xs]


class InThread:
    @carpool.batch(run_in="thread")
    def method(self, xs: list[int]) -> list[str]:
        return [str(x) for x in xs]


class Counted(carpool.Model):
    def predict(self, xs: list[str]) -> list[int]:
        return [len(x) for x in xs]


async def threaded() -> None:
    assert_type(await length.submit("a"), int)
    assert_type(await in_thread(1), str)
    assert_type(await in_thread.many([1]), list[str])
    assert_type(await InThread().method(1), str)
    assert_type(await carpool.batch(run_in="thread")(Counted)("a"), int)
    assert_type(await carpool.batch(run_in="thread")(Counted())("a"), int)
    assert_type(await carpool.batch(run_in="thread", merge=True)(normalise_rows)(np.ones(2)), np.ndarray)


def normalise_rows(rows: np.ndarray) -> np.ndarray:
    return rows


@carpool.batch
def joined(xs: list[int], names: list[str]) -> list[bytes]:
    return [name.encode() * x for x, name in zip(xs, names, strict=True)]


@carpool.batch(max_batch_size=8)
async def joined_later(xs: list[int], names: list[str], flags: list[bool]) -> list[bytes]:
    return [name.encode() * x for x, name in zip(xs, names, strict=True)]


@carpool.batch(run_in="thread")
def joined_in_thread(xs: list[int], names: list[str], *, flags: list[bool]) -> list[bytes]:
    return [name.encode() * x for x, name in zip(xs, names, strict=True)]


class Joined:
    @carpool.batch
    def method(self, xs: list[int], names: list[str]) -> list[bytes]:
        return [name.encode() * x for x, name in zip(xs, names, strict=True)]

    @carpool.batch(max_batch_size=4)
    async def later(self, xs: list[int], names: list[str]) -> list[bytes]:
        return [name.encode() * x for x, name in zip(xs, names, strict=True)]


async def several() -> None:
    assert_type(joined(1, names="a"), bytes)
    assert_type(joined.many([(1, "a")]), list[bytes])
    assert_type(joined.submit(1, "a"), carpool.Ticket[bytes])
    assert_type(await joined_later(1, "a", flags=True), bytes)
    assert_type(Joined().method(1, "a", priority=1), bytes)
    assert_type(await Joined().later(1, names="a"), bytes)
    assert_type(await joined_in_thread(1, "a", flags=True), bytes)
