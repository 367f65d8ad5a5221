"""`check_steps` lets a right model pass, and finds each fault that a cache can have."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import carpool
from carpool.testing import StepsError, check_steps

VOCABULARY, WIDTH, LONGEST, ROWS = 61, 12, 64, 4
Item = tuple[list[int], int]
"""Token ids, and how many to add."""

_draw = np.random.default_rng(3).normal
TOKENS, PLACES = _draw(size=(VOCABULARY, WIDTH)), _draw(size=(LONGEST, WIDTH))
KEYS, VALUES, HEAD = _draw(size=(WIDTH, WIDTH)), _draw(size=(WIDTH, WIDTH)), _draw(size=(WIDTH, VOCABULARY))


@dataclass(eq=False)
class Sequence:
    """The state of one stream."""

    row: int
    last: int
    left: int


class Decoder(carpool.Model):
    """One layer of attention with a KV cache of rows, of which the first ones run."""

    masks = True

    def setup(self) -> None:
        self.keys, self.values = np.zeros((2, ROWS, LONGEST, WIDTH))
        self.length = np.zeros(ROWS, int)
        self.running: list[Sequence] = []

    def start(self, xs: list[Item]) -> list[Sequence]:
        return [self.begin(ids, most) for ids, most in xs]

    def resume(self, xs: list[Item], parts: list[list[int]]) -> list[Sequence]:
        return [self.begin(ids + said, most - len(said)) for (ids, most), said in zip(xs, parts, strict=True)]

    def begin(self, ids: list[int], left: int) -> Sequence:
        sequence = Sequence(len(self.running), ids[-1], left)
        self.running.append(sequence)
        self.clear(sequence.row)
        for id in ids[:-1]:
            self.forward([sequence.row], [id])
        return sequence

    def clear(self, row: int) -> None:
        self.length[row] = 0

    def forward(self, rows: list[int], ids: list[int]) -> list[int]:
        at = self.length[rows]
        x = TOKENS[ids] + PLACES[at]
        self.keys[rows, at], self.values[rows, at] = x @ KEYS, x @ VALUES
        seen = int(at.max()) + 1
        score = np.einsum("nd,ntd->nt", x, self.keys[rows, :seen])
        if self.masks:
            score = np.where(np.arange(seen)[None, :] > at[:, None], -np.inf, score)
        weight = np.exp(score - score.max(-1, keepdims=True))
        mixed = np.einsum("nt,ntd->nd", weight / weight.sum(-1, keepdims=True), self.values[rows, :seen])
        self.length[rows] += 1
        return ((x + mixed) @ HEAD).argmax(-1).tolist()  # type: ignore[no-any-return]

    def step(self, states: list[Sequence]) -> list[Any]:
        tokens = self.forward([each.row for each in states], [each.last for each in states])
        for each, token in zip(states, tokens, strict=True):
            each.last, each.left = token, each.left - 1
        return [each.last if each.left else carpool.Last(each.last) for each in states]

    def stop(self, state: Sequence) -> None:
        last = self.running.pop()
        if last is not state:
            self.move(last, state.row)

    def move(self, last: Sequence, row: int) -> None:
        self.keys[row], self.values[row] = self.keys[last.row], self.values[last.row]
        self.length[row] = self.length[last.row]
        last.row, self.running[row] = row, last


class RowNotMoved(Decoder):
    def move(self, last: Sequence, row: int) -> None:
        self.length[row] = self.length[last.row]
        last.row, self.running[row] = row, last


class LengthNotReset(Decoder):
    def clear(self, row: int) -> None:
        pass


class ResumesOnePartShort(Decoder):
    def resume(self, xs: list[Item], parts: list[list[int]]) -> list[Sequence]:
        return super().resume(xs, [said[:-1] for said in parts])


class NoMask(Decoder):
    masks = False


class LeaverNotTold(Decoder):
    """Frees a row when its answer is complete, so one that is left keeps it."""

    def stop(self, state: Sequence) -> None:
        if not state.left:
            super().stop(state)


class ForgetsParts(Decoder):
    def resume(self, xs: list[Item], parts: list[list[int]]) -> list[Sequence]:
        return self.start(xs)


class SharedTokens(carpool.Model):
    """Holds as many tokens as its limit says, of all streams together; each is counted by `size=`."""

    most = 60

    def setup(self) -> None:
        self.held: dict[int, list[int]] = {}

    def start(self, xs: list[Item]) -> list[list[int]]:
        return [self.hold([*ids, most]) for ids, most in xs]

    def hold(self, state: list[int]) -> list[int]:
        self.held[id(state)] = state
        return state

    def step(self, states: list[list[int]]) -> list[Any]:
        for state in states:
            left = state.pop()
            state += [(state[-1] * 7 + len(state)) % 50, left - 1]
        if sum(len(state) - 1 for state in self.held.values()) > self.most:
            raise MemoryError("no page is free")
        return [state[-2] if state[-1] else carpool.Last(state[-2]) for state in states]

    def stop(self, state: list[int]) -> None:
        del self.held[id(state)]


def items(n: int = 8) -> list[Item]:
    dice = np.random.default_rng(1)
    return [
        (dice.integers(VOCABULARY, size=dice.integers(1, 20)).tolist(), int(dice.integers(2, 25))) for _ in range(n)
    ]


XS = items()


@pytest.mark.parametrize("seed", range(2))
def test_a_right_model_passes(seed: int) -> None:
    """A decoder whose cache is right gives each stream in company what it gets alone."""
    check_steps(Decoder, XS, seed=seed, max_batch_size=ROWS)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (RowNotMoved, r"item \d \(.*\), part \d+ is \d+ in company, where alone it is \d+"),
        (LengthNotReset, r"part \d+ is \d+ in company, where alone it is \d+|raised IndexError"),
        (ResumesOnePartShort, r"is \d+ in company, where alone .* resumed in (one|the other) worker"),
        (NoMask, r"part \d+ is \d+ in company, where alone it is \d+"),
        (LeaverNotTold, r"raised IndexError: index 4 is out of bounds"),
        (ForgetsParts, r"is \d+ in company, where alone .* resumed in (one|the other) worker"),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_each_fault_of_a_cache_is_found(model: type[Decoder], told: str, seed: int) -> None:
    """A cache that is kept wrongly is found with every seed, and the error says how it showed."""
    with pytest.raises(StepsError, match=told) as caught:
        check_steps(model, XS, seed=seed, max_batch_size=ROWS)
    assert f"(seed {seed})" in str(caught.value)


def test_a_size_that_does_not_count_all_is_found() -> None:
    """A `size` that leaves out the tokens which streams add lets memory run out; the right one does
    not.
    """
    check_steps(SharedTokens, XS, max_batch_size=60, size=lambda x: len(x[0]) + x[1], max_rows=8)
    with pytest.raises(StepsError, match=r"step raised MemoryError: no page is free, called for \d+ streams"):
        check_steps(SharedTokens, XS, max_batch_size=60, size=lambda x: len(x[0]), max_rows=8)


def test_a_failure_names_item_part_values_and_seed_and_is_repeated_by_it() -> None:
    """The same seed gives the same error, and what it says is true."""
    told = []
    for _ in range(2):
        with pytest.raises(StepsError) as caught:
            check_steps(RowNotMoved, XS, seed=5, max_batch_size=ROWS)
        told.append(str(caught.value))
    assert told[0] == told[1]
    match = re.search(r"item (\d) .*part (\d+) is (\d+) in company, where alone it is (\d+)\. It was started", told[0])
    assert match is not None
    at, number, was, should = map(int, match.groups())
    model = Decoder()
    model.setup()
    states = model.start([XS[at]])
    alone = [model.step(states)[0] for _ in range(number + 1)]
    last = alone[-1].value if isinstance(alone[-1], carpool.Last) else alone[-1]
    assert last == should != was
    assert told[0].endswith("(seed 5)")


class Counting(carpool.Model):
    """Counts; what is asked of the model besides is in subclasses."""

    def start(self, xs: list[int]) -> list[list[int]]:
        return [[x, 0] for x in xs]

    def step(self, states: list[list[int]]) -> list[Any]:
        for state in states:
            state[1] += 1
        return [self.part(x, i, len(states)) for x, i in states]

    def part(self, x: int, i: int, company: int) -> Any:
        return carpool.Last(i) if i == x else i

    def stop(self, state: list[int]) -> None:
        pass


class EndsEarlyInCompany(Counting):
    def part(self, x: int, i: int, company: int) -> Any:
        return carpool.Last(i) if i == x or (i > 2 and company > 2) else i


class EndsLateInCompany(Counting):
    def part(self, x: int, i: int, company: int) -> Any:
        return super().part(x + 2 * (company > 2), i, company) if i <= x else carpool.Last(i)


class FailsInCompany(Counting):
    def part(self, x: int, i: int, company: int) -> Any:
        return ValueError("crowded") if company > 2 else super().part(x, i, company)


class FallsSilentInCompany(Counting):
    def step(self, states: list[list[int]]) -> list[Any]:
        parts = super().step(states)
        silent = [len(states) > 2 or state[0] < 0 for state in states]
        for state, falls_silent in zip(states, silent, strict=True):
            state[0] = -1 if falls_silent else state[0]
        return [None if falls_silent else part for part, falls_silent in zip(parts, silent, strict=True)]


class WrongLength(Counting):
    def step(self, states: list[list[int]]) -> list[Any]:
        return super().step(states)[:2]


class StopRaises(Counting):
    def stop(self, state: list[int]) -> None:
        if state[1] < state[0]:
            raise KeyError("row")


class Draws(Counting):
    def part(self, x: int, i: int, company: int) -> Any:
        drawn = np.random.default_rng().integers(2**60).item()
        return carpool.Last(drawn) if i == x else drawn


class RaisesAlways(Counting):
    def step(self, states: list[list[int]]) -> list[Any]:
        raise RuntimeError("no weights")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (EndsEarlyInCompany, "part 3 does not come in company, where the answer has ended, and alone it is 4"),
        (EndsLateInCompany, r"part \d is \d in company, where alone the answer has ended"),
        (FailsInCompany, r"does not come in company, where the answer fails with ValueError: crowded, and alone it is"),
        (FallsSilentInCompany, r"part \d does not come in company, in 1000 steps"),
        (
            WrongLength,
            r"fails with Miscount: step of \d streams must return \d parts, None for each that has made none",
        ),
        (StopRaises, r"stop raised KeyError: 'row', called for 1 stream"),
        (Draws, "Alone it gets other parts each time: draw what is random from a generator that the item seeds"),
        (RaisesAlways, r"item 0 \(4\) fails alone: step raised RuntimeError: no weights"),
    ],
)
def test_whatever_differs_is_told(model: type[Counting], told: str) -> None:
    """Ends, failures, silence and what methods raise are compared, too."""
    with pytest.raises(StepsError, match=told):
        check_steps(model, [4, 5, 6, 7])


class Hooks(Counting):
    """Has every hook, and a failure that is its item's own."""

    torn_down = 0

    async def setup(self) -> None:
        await asyncio.sleep(0)
        self.is_set_up = True

    def preprocess(self, x: str) -> int:
        return int(x)

    def postprocess(self, part: int, x: int) -> str:
        assert self.is_set_up
        return f"{part} of {x}"

    def part(self, x: int, i: int, company: int) -> Any:
        if i == x == 5:
            return ValueError("five fails")
        return None if i % 3 == 1 else carpool.END if i > x else i

    async def resume(self, xs: list[int], parts: list[list[int]]) -> list[list[int]]:
        return [[x, said[-1]] for x, said in zip(xs, parts, strict=True)]

    def teardown(self) -> None:
        type(self).torn_down += 1


def test_hooks_are_called_as_in_a_worker() -> None:
    """`setup`, `preprocess`, `postprocess` and `teardown` are called, `async` methods awaited, and a
    part may be None, an exception or an end.
    """
    check_steps(Hooks, ["4", "5", "6", "30"])
    assert Hooks.torn_down == 6  # one for each item alone, and two in company

    async def within_a_loop() -> None:
        check_steps(Hooks, ["4"], streams=5)

    asyncio.run(within_a_loop())


class Endless(Counting):
    def part(self, x: int, i: int, company: int) -> Any:
        return i


class Arrays(Counting):
    """Its parts are arrays that it goes on to change."""

    def step(self, states: list[Any]) -> list[Any]:
        for state in states:
            state[0] += 0.5
        return [state[0] if state[0][0] < 8 else carpool.Last(state[0]) for state in states]

    def start(self, xs: list[float]) -> list[Any]:
        return [[np.full(3, x)] for x in xs]


class NearlyArrays(Arrays):
    def step(self, states: list[Any]) -> list[Any]:
        parts = super().step(states)
        return [carpool.Last(p.value + 1e-9) if type(p) is carpool.Last else p + len(states) * 1e-9 for p in parts]


def test_answers_without_an_end_are_left() -> None:
    """An answer that never ends is compared as far as `most_parts`."""
    check_steps(Endless, [1, 2], most_parts=20, streams=40)


def test_parts_are_compared_as_they_were_when_they_came() -> None:
    """Arrays are compared by all elements, even if the model changes them later; rounding is allowed
    where `equal` says so.
    """
    check_steps(Arrays, [1.0, 2.0, 5.0])
    with pytest.raises(StepsError, match="part 0 is array"):
        check_steps(NearlyArrays, [1.0, 2.0, 5.0])
    check_steps(NearlyArrays, [1.0, 2.0, 5.0], equal=np.allclose)


class Whole(carpool.Model):
    def predict(self, x: int) -> int:
        return x


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (lambda: check_steps(Whole, [1]), TypeError, "Whole is not a model of steps"),
        (lambda: check_steps(Counting, []), ValueError, "at least one item"),
        (
            lambda: check_steps(Counting, [1, 9], size=lambda x: x, max_batch_size=8),
            ValueError,
            "item 1 has size 9, more than max_batch_size=8",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(call: Callable[[], None], kind: type[Exception], told: str) -> None:
    """Other models, no items and items that are too large are refused with what to change."""
    with pytest.raises(kind, match=told):
        call()
