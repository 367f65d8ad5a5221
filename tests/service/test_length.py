"""`length=` from end to end: batches of like lengths, whichever way they are run."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import carpool
from carpool import Service, Stage

LONG = "wait" * 10
"""While this text is computed, many others come."""


def seconds(items: Any) -> float:
    """What a batch of texts, or of lists of characters, takes."""
    if "".join(items[0]) == LONG:
        return 0.5
    return 0.004 + 5e-5 * len(items) * max(map(len, items))


class Padded:
    """Tells of each text how many shared its call and how long the longest was, and takes its time
    for each position.
    """

    def predict(self, texts: list[str]) -> list[tuple[int, int]]:
        time.sleep(seconds(texts))
        return [(len(texts), max(map(len, texts)))] * len(texts)


class Cut:
    """A first stage that knows how long a text is: it cuts it into characters."""

    def predict(self, texts: list[str]) -> list[list[str]]:
        return [list(text) for text in texts]


class Count:
    """A second stage that tells how many share its call and how long the longest was."""

    def predict(self, tokens: list[list[str]]) -> list[tuple[int, int]]:
        time.sleep(seconds(tokens))
        return [(len(tokens), max(map(len, tokens)))] * len(tokens)


class AsyncPadded:
    """The same as `Padded`, on the loop."""

    async def predict(self, texts: list[str]) -> list[tuple[int, int]]:
        await asyncio.sleep(seconds(texts))
        return [(len(texts), max(map(len, texts)))] * len(texts)


TEXTS = ["a" * (3 if i % 2 else 90) for i in range(32)]


def outcomes(s: Any) -> list[Any]:
    """What each of the texts gets; they come while another one is computed."""
    found: list[Any] = [None] * len(TEXTS)
    now = threading.Event()

    def ask(i: int) -> None:
        now.wait(20)
        found[i] = s.predict(TEXTS[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(TEXTS))]
    for thread in threads:  # first of all, since that alone can take a busy machine longer than the long text
        thread.start()
    first = threading.Thread(target=s.predict, args=(LONG,))
    first.start()
    time.sleep(0.05)
    now.set()
    for thread in threads:
        thread.join(20)
    first.join(20)
    return found


def check_alike(found: list[Any], others: int = 2) -> None:
    """Most short texts were not padded to the long ones, and batches were of several."""
    short = [outcome for text, outcome in zip(TEXTS, found, strict=True) if len(text) == 3]
    assert sum(longest == 3 for _, longest in short) >= len(short) - others
    assert max(n for n, _ in found) > 1


@pytest.mark.parametrize("policy", ["greedy", "adaptive"])
@pytest.mark.parametrize(
    ("model", "run_in"),
    [(Padded, "thread"), (AsyncPadded, "loop"), pytest.param(Padded, "process", marks=pytest.mark.slow)],
)
def test_texts_of_like_length_share_a_batch(model: Any, run_in: Any, policy: Any) -> None:
    """With `length=` a batch is made of texts of about the same length, in workers of any kind."""
    stage = Stage(model, max_batch_size=8, length=len, policy=policy, run_in=run_in)
    with Service(stage).run() as s:
        if policy == "adaptive":
            for texts in (["a" * 3] * 8, ["a" * 90] * 8, ["a" * 40] * 3):
                list(s.stream(texts))  # to learn from
                list(s.stream(texts[:2]))
        check_alike(outcomes(s), others=8 if policy == "adaptive" else 2)  # which may try plain order first


def test_a_later_stage_reads_the_length_off_the_result_of_the_one_before() -> None:
    """A later stage's `length=` gets what the stage before has made of the item."""
    stages = [
        Stage(Cut, max_batch_size=32, run_in="thread"),
        Stage(Count, max_batch_size=8, length=len, policy="greedy", run_in="thread"),
    ]
    with Service(*stages).run() as s:
        check_alike(outcomes(s))


def test_an_item_is_opened_once() -> None:
    """An item is opened once for its length and its key together."""
    opened: list[str] = []

    def length(x: list[str]) -> int:
        opened.append("length")
        return len(x)

    def key(x: list[str]) -> str:
        opened.append("key")
        return x[0]

    with Service(Stage(Count, max_batch_size=8, length=length, key=key, run_in="thread")).run() as s:
        assert s.predict(["a", "b"]) == (1, 2)
    assert opened == ["length", "key"]


def no_length(x: str) -> int:
    """The length of a text, but of one it cannot tell."""
    if x == "bad":
        raise KeyError("tokens")
    return len(x)


def test_an_item_without_a_length_fails_alone() -> None:
    """An item of which `length=` cannot tell the length fails alone, before it joins the queue."""
    with Service(Stage(Padded, max_batch_size=8, length=no_length, run_in="thread")).run() as s:
        with pytest.raises(carpool.ModelError, match="length= of stage Padded raised KeyError: 'tokens'"):
            s.predict("bad")
        assert s.predict("good") == (1, 4)
        got = list(s.stream(["one", "bad", "three"], return_exceptions=True))
        assert [isinstance(each, carpool.ModelError) for each in got] == [False, True, False]


def test_a_length_is_a_whole_number() -> None:
    """What `length=` returns must be a whole number, and the error says so."""
    with (
        Service(Stage(Padded, max_batch_size=8, length=lambda x: 1.5, run_in="thread")).run() as s,
        pytest.raises(carpool.ModelError, match=r"length= of stage Padded returned 1\.5"),
    ):
        s.predict("x")


def test_max_padded_size_bounds_count_times_longest() -> None:
    """No call's count times its longest is above `max_padded_size`, unless it has one item."""
    for policy in ("greedy", "adaptive", "static"):
        stage = Stage(Padded, max_batch_size=16, length=len, max_padded_size=180, policy=policy, run_in="thread")
        with Service(stage).run() as s:
            for _ in range(1 if policy == "static" else 2):  # which learns nothing
                found = outcomes(s)
                assert all(n == 1 or n * longest <= 180 for n, longest in found), policy


def test_callers_of_a_batch_function_share_calls_of_like_length() -> None:
    """With `length=` the callers of a function in threads share calls of about the same length."""

    @carpool.batch(max_batch_size=8, length=len, policy="greedy")
    def padded(texts: list[str]) -> list[tuple[int, int]]:
        return Padded().predict(texts)

    class Asks:
        predict = staticmethod(padded)

    check_alike(outcomes(Asks))
    assert len(padded.many(TEXTS)) == len(TEXTS)


def test_tasks_share_calls_of_like_length() -> None:
    """With `length=` so do tasks, and one whose length cannot be told gets the exception itself."""

    @carpool.batch(max_batch_size=8, length=no_length, policy="greedy")
    async def padded(texts: list[str]) -> list[tuple[int, int]]:
        return await AsyncPadded().predict(texts)

    async def ask() -> list[Any]:
        with pytest.raises(KeyError, match="tokens"):
            await padded("bad")
        return (await asyncio.gather(*[padded(text) for text in [LONG, *TEXTS]]))[1:]

    check_alike(asyncio.run(ask()))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"length": len}, "length is for stages that take batches"),
        ({"max_batch_size": 4, "length": 3}, "length must be a function of an item"),
        ({"max_batch_size": 4, "length": len, "size": len}, "length and size both say what an item costs"),
        ({"max_batch_size": 4, "max_padded_size": 4}, "max_padded_size is for items that have lengths"),
        ({"max_batch_size": 4, "allowed_lengths": [4]}, "allowed_lengths is for items that have lengths"),
        ({"max_batch_size": 4, "length": len, "max_padded_size": 0}, "max_padded_size must be a whole number"),
        ({"max_batch_size": 4, "length": len, "allowed_lengths": [8, 4]}, "allowed_lengths must rise"),
        ({"max_batch_size": 4, "length": len, "allowed_lengths": "8"}, "allowed_lengths must be a list"),
        ({"max_batch_size": 4, "key": 3}, "key must be a function of an item"),
        ({"max_batch_size": 4, "key": "header:"}, "key must name a field"),
        ({"key": "tenant"}, "key is for stages that take batches"),
        ({"max_batch_size": 4, "max_workers_per_key": 1}, "max_workers_per_key is for stages with keys"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], why: str) -> None:
    """A setting about lengths or keys that is wrong is refused where the stage is declared."""
    model: Any = Padded if "max_batch_size" in settings else len
    with pytest.raises((TypeError, ValueError), match=why):
        Stage(model, run_in="thread", **settings)
