"""The models of the random programs: they answer each item with its own token, and do what it says besides."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

import carpool
from carpool import Model, Policy
from carpool.engine.policy import Greedy

SLOW_S = 0.02
HANG_S = 2.0

INSIDE = ("again", "round", "close", "stats")

here: Any = None
"""The run whose models these are, for those that call their own service; None in a worker process."""


class Boom(Exception):
    """An exception of the user's own."""


class Mute(Exception):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("fuzz: no text")


_MAKERS: dict[str, Callable[[], BaseException]] = {
    "Exception": lambda: Boom("fuzz"),
    "StopIteration": lambda: StopIteration("fuzz"),
    "StopAsyncIteration": lambda: StopAsyncIteration("fuzz"),
    "GeneratorExit": lambda: GeneratorExit("fuzz"),
    "CancelledError": lambda: asyncio.CancelledError("fuzz"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("fuzz"),
    "SystemExit": lambda: SystemExit("fuzz"),
    "MemoryError": lambda: MemoryError("fuzz"),
    "RecursionError": lambda: RecursionError("fuzz"),
    "Mute": Mute,
}


def make(kind: str) -> BaseException:
    """An exception of one of the kinds."""
    return _MAKERS[kind]()


def throw(kind: str) -> NoReturn:
    """Raise one of the kinds."""
    raise make(kind)


class Sent(NamedTuple):
    """An item on its way through the stages; what comes out of the last one has passed them all.

    Attributes:
        token: The caller's own.
        do, kind, at: see `program.Item`.
        passed: How many stages it has passed.
        cargo: What can be written to, full of its token; see `taken`.
    """

    token: int
    do: str = ""
    kind: str = ""
    at: int = 0
    passed: int = 0
    cargo: Any = None

    @property
    def order(self) -> str:
        """What the present stage is to do."""
        return self.do if self.at == self.passed else ""


# -- cargo: models write over that of their items, and answer with the same memory again and again


class Taken(NamedTuple):
    """What is left of a cargo that a model has written over."""

    is_list: bool
    n: int


_mine = threading.local()  # the memory that the models of a thread answer with

LOST = -1
"""The token of an answer whose item had a cargo that was not its own."""


def new_cargo(kind: str, token: int) -> Any:
    """A cargo of a kind: "list", "array" or "large"; None for ""."""
    if not kind:
        return None
    return [token, token] if kind == "list" else _full(10_000 if kind == "large" else 3, token)


def _full(n: int, token: int) -> Any:
    return np.full(n, token)


def holds(cargo: Any, token: int) -> bool:
    """Whether nobody has written into a cargo."""
    if cargo is None:
        return True
    return set(cargo) == {token} if type(cargo) is list else bool((cargo == token).all())


def overwrite(cargo: Any, token: int) -> None:
    """Fill a cargo with something else."""
    cargo[:] = [token] * len(cargo) if type(cargo) is list else token


def taken(x: Any) -> Any:
    """An item whose cargo has been looked at and written over, so that whoever gets it again sees that."""
    x = sent(x)
    if type(x) is not Sent or x.cargo is None or type(x.cargo) is Taken:
        return x
    if not holds(x.cargo, x.token):
        if not x.token:
            raise RuntimeError("an example was given again after it was written over")
        x = x._replace(token=LOST)
    overwrite(x.cargo, LOST)
    return x._replace(cargo=Taken(type(x.cargo) is list, len(x.cargo)))


def loaded(x: Any, place: int) -> Any:
    """An item or answer with a cargo, in the memory that this thread uses for all at this place."""
    if type(x) is not Sent or type(x.cargo) is not Taken:
        return x
    memory = _mine.__dict__.setdefault((place, x.cargo), [0] * x.cargo.n if x.cargo.is_list else _full(x.cargo.n, 0))
    overwrite(memory, x.token)
    return x._replace(cargo=memory)


# -- graphs: what stands before, and between, the stages that obey


def n_items(token: int) -> int:
    """How long the list is that an item becomes."""
    return token % 4


def ends_early(token: int) -> bool:
    """Whether an item is answered at once."""
    return token % 3 == 0


def branch_of(token: int, n: int) -> int:
    """Which of so many branches an item takes; none of them if it is the number of these."""
    return token % (n + 1)


def spread(x: Any) -> Any:
    """The list that an item becomes; each has a cargo of its own."""
    return [x._replace(cargo=copy.copy(x.cargo)) for _ in range(n_items(x.token))]


def early(x: Any) -> Any:
    """An item, or the answer to it."""
    return carpool.Done(x) if ends_early(x.token) else x


class Branch:
    """Chooses one of `n` branches, or none."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, x: Any) -> str:
        return str(branch_of(x.token, self.n))


class Stubborn:
    """Cannot be pickled, or what it is pickled as cannot be read, and says so by an exception of the given kind.

    It looks like a `Sent` to those who take it as it is.
    """

    def __init__(self, sent: Sent, when: str) -> None:
        self._sent, self._when = sent, when

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._sent, name)

    def __reduce__(self) -> Any:
        if self._when == "load":
            return throw, (self._sent.kind,)
        throw(self._sent.kind)


def sent(x: Any) -> Any:
    """An item as the models know it: from an app it comes as JSON."""
    return Sent(*x) if type(x) is list else x


def size(x: Any) -> int:
    """How much of a batch an item takes up."""
    x = sent(x)
    if x.order == "size":
        throw(x.kind)
    return 1 + x.token % 3


def length(x: Any) -> int:
    """How long an item is."""
    x = sent(x)
    if x.order == "size":
        throw(x.kind)
    return 1 + x.token % 5


def key(x: Any) -> str:
    """What items of a batch have in common."""
    x = sent(x)
    if x.order == "size":
        throw(x.kind)
    return str(x.token % 3)


class Wicked(Greedy):
    """A policy that raises after a few calls.

    Args:
        kind: Of the exception.
        patience: Calls before that.
    """

    def __init__(self, kind: str, patience: int = 5) -> None:
        super().__init__()
        self.kind, self.patience = kind, patience

    def decide(self, *arguments: Any) -> Any:
        self.patience -= 1
        if self.patience < 0:
            throw(self.kind)
        return super().decide(*arguments)


def policy(text: str | None) -> Policy | str | None:
    """The policy that a program's word for it means."""
    if text is not None and text.startswith("raises "):
        return Wicked(text.removeprefix("raises "))
    if text == "few":
        return carpool.Static(max_queued_batches=1)
    if text == "idle":
        return carpool.Static(from_idle=True)
    return text


# -- what predict does


def _obey(x: Any) -> None:
    """What is done at once, in threads, tasks and processes alike."""
    order = x.order
    if order == "raise":
        throw(x.kind)
    if order == "die" and here is None:
        os.kill(os.getpid(), signal.SIGKILL)


def _results(xs: list[Any]) -> list[Any]:
    results = [_result(x, place) for place, x in enumerate(xs)]
    return results[1:] if any(x.order == "short" for x in xs) else results


def _result(x: Any, place: int = 0) -> Any:
    if x.order == "return":
        return make(x.kind)
    passed = loaded(Sent(x.token, x.do, x.kind, x.at, x.passed + 1, x.cargo), place)
    return Stubborn(passed, "load") if x.order == "load" else passed


def predict(xs: list[Any]) -> list[Any]:
    """A plain function over a batch."""
    xs = list(map(taken, xs))
    for x in xs:
        order = x.order
        if order:
            if order in ("slow", "hang"):
                time.sleep(SLOW_S if order == "slow" else HANG_S)
            elif order in INSIDE and here is not None:
                here.from_inside(order)
            _obey(x)
    return _results(xs)


async def predict_async(xs: list[Any]) -> list[Any]:
    """The same as a coroutine function."""
    xs = list(map(taken, xs))
    for x in xs:
        order = x.order
        if order:
            if order in ("slow", "hang"):
                await asyncio.sleep(SLOW_S if order == "slow" else HANG_S)
            elif order in INSIDE and here is not None:
                await here.from_inside_async(order)
            _obey(x)
        else:
            await asyncio.sleep(0)
    return _results(xs)


def predict_one(x: Any) -> Any:
    """A plain function of one item."""
    return predict([x])[0]


async def predict_one_async(x: Any) -> Any:
    """The same as a coroutine function."""
    return (await predict_async([x]))[0]


class _Hooked(Model):
    """A class with all hooks.

    Args:
        batched: Whether `predict` takes a list.
        setup_raises, teardown_raises: kinds of exceptions.
    """

    def __init__(self, batched: bool = True, setup_raises: str = "", teardown_raises: str = "") -> None:
        self.batched, self.setup_raises, self.teardown_raises = batched, setup_raises, teardown_raises

    def preprocess(self, x: Any) -> Any:
        x = taken(x)
        if x.order == "pre":
            throw(x.kind)
        return loaded(x, -1)

    def postprocess(self, y: Any) -> Any:
        if y.do == "post" and y.at == y.passed - 1:
            throw(y.kind)
        return loaded(taken(y), -2)


class Hooked(_Hooked):
    """A model with plain hooks."""

    def setup(self) -> None:
        if self.setup_raises:
            throw(self.setup_raises)

    def teardown(self) -> None:
        if self.teardown_raises:
            throw(self.teardown_raises)

    def predict(self, xs: Any) -> Any:
        return predict(xs) if self.batched else predict_one(xs)


class HookedAsync(_Hooked):
    """A model with asynchronous hooks."""

    async def setup(self) -> None:
        await asyncio.sleep(0)
        if self.setup_raises:
            throw(self.setup_raises)

    async def teardown(self) -> None:
        if self.teardown_raises:
            throw(self.teardown_raises)

    async def predict(self, xs: Any) -> Any:
        return await (predict_async(xs) if self.batched else predict_one_async(xs))


# -- models that answer in parts: a part is a `Sent` whose `passed` is its number, and the last one the answer's


def n_parts(token: int) -> int:
    """How many parts the answer to an item has before its last one, which is the answer."""
    return token % 7


class _Running:
    """A stream: its item, and how many parts it has had."""

    def __init__(self, x: Any, said: int = 0) -> None:
        self.x, self.said = taken(x), said

    def next(self, place: int = 0) -> Any:
        """The next part, or what stands in its place; with a cargo, in the same memory again and again."""
        x, self.said = self.x, self.said + 1
        if self.said > n_parts(x.token):
            return carpool.Last(_result(x, place))
        if x.cargo is None:
            return ("part", x.token, self.said)
        part = _mine.__dict__.setdefault(place, [])
        part[:] = "part", x.token, self.said
        return part


def _due(states: list[Any]) -> list[Any]:
    """The items that do what they do besides in this step."""
    return [state.x for state in states if state.said == n_parts(state.x.token) // 2]


def _parts(states: list[Any], due: list[Any]) -> list[Any]:
    parts = [state.next(place) for place, state in enumerate(states)]
    return parts[1:] if any(x.order == "short" for x in due) else parts


class _Parted(_Hooked):
    def postprocess(self, y: Any) -> Any:
        return y if type(y) in (tuple, list) else super().postprocess(y)

    def collect(self, parts: list[Any]) -> Any:
        *first, last = parts
        assert len(first) == n_parts(last.token), parts
        assert [each[2] for each in first] == list(range(1, len(parts))), parts
        return last


class Steps(_Parted):
    """Steps, of which each part says whose it is and the how manieth."""

    def start(self, xs: list[Any]) -> list[Any]:
        return [_Running(x) for x in xs]

    def step(self, states: list[Any]) -> list[Any]:
        due = _due(states)
        if due:
            predict(due)  # what they are to do besides
        return _parts(states, due)

    def stop(self, state: Any) -> None:
        state.x = None  # a second step or stop of it would show


class StepsResuming(Steps):
    """The same, and they go on elsewhere."""

    def resume(self, xs: list[Any], parts: list[list[Any]]) -> list[Any]:
        for x, said in zip(xs, parts, strict=True):
            assert list(map(tuple, said)) == [("part", x.token, i + 1) for i in range(len(said))], said
            for part in said:
                if type(part) is list:
                    part.clear()
        return [_Running(x, len(said)) for x, said in zip(xs, parts, strict=True)]


class Generating(_Parted):
    """A generator for each item."""

    def predict(self, x: Any) -> Any:
        state = _Running(x)
        for i in range(n_parts(x.token) + 1):
            if i == n_parts(x.token) // 2:
                predict([x])
            part = state.next()
            yield part.value if type(part) is carpool.Last else part


class StepsAsync(Steps):
    """Steps that are `async def`."""

    async def step(self, states: list[Any]) -> list[Any]:  # type: ignore[override]
        due = _due(states)
        if due:
            await predict_async(due)
        return _parts(states, due)


class StepsResumingAsync(StepsAsync, StepsResuming):
    """The same, and they go on elsewhere."""


class GeneratingAsync(_Parted):
    """An asynchronous generator for each item."""

    async def predict(self, x: Any) -> Any:
        state = _Running(x)
        for i in range(n_parts(x.token) + 1):
            if i == n_parts(x.token) // 2:
                await predict_async([x])
            part = state.next()
            yield part.value if type(part) is carpool.Last else part


PARTED = {
    "steps": (Steps, StepsAsync),
    "resuming": (StepsResuming, StepsResumingAsync),
    "generator": (Generating, GeneratingAsync),
}
"""By the word of a program: the model, and that for a loop."""


_EXAMPLE = Sent(0, cargo=[0, 0])


def with_examples(model: type, examples: str) -> type:
    """The class with examples; it is always the same one, so that it can be found by name in a worker process."""
    if not examples:
        return model
    name = f"{model.__name__}_{examples}"
    if name not in globals():
        bad = {} if examples == "good" else {"do": "raise", "kind": examples}
        globals()[name] = type(
            name, (model,), {"examples": (_EXAMPLE, _EXAMPLE._replace(**bad)), "__module__": __name__}
        )
    return globals()[name]


for _model in (Hooked, HookedAsync):
    for _examples in ("good", *_MAKERS):
        with_examples(_model, _examples)


# -- functions over merged rows: each row is a `Sent`


def merged(rows: list[Any]) -> list[Any]:
    """A plain function over rows, of which each caller brings some."""
    return predict(rows)


def doubled(rows: Any) -> Any:
    """A plain function over arrays."""
    return 2 * rows


async def doubled_async(rows: Any) -> Any:
    """The same as a coroutine function."""
    await asyncio.sleep(0)
    return 2 * rows


async def merged_async(rows: list[Any]) -> list[Any]:
    """The same as a coroutine function."""
    return await predict_async(rows)
