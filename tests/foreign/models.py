"""Models whose items say where they raise, and what. A worker of any kind can import them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from carpool import Model
from tests.support.kinds import KINDS, fail


def good(n: int) -> dict[str, Any]:
    """An item that is answered with ten times `n`."""
    return {"n": n}


def bad(at: str, kind: str) -> dict[str, Any]:
    """An item for which something raises."""
    return {"n": 0, "at": at, "kind": kind}


def trips(x: Any, at: str) -> bool:
    """Whether the item is to fail at this place."""
    return type(x) is dict and x.get("at") == at


def trip(x: Any, at: str) -> None:
    """Raise here, if the item says so."""
    if trips(x, at):
        fail(x["kind"])


class Thing:
    """An object with a method of the user's that raises when it is pickled, or read again."""

    def __init__(self, at: str, kind: str) -> None:
        self.at, self.kind = at, kind

    def __reduce__(self) -> Any:
        if self.at == "__reduce__":
            fail(self.kind)
        return Thing, ("", self.kind), {"at": self.at}

    def __setstate__(self, state: dict[str, str]) -> None:
        fail(self.kind)


class Prickly(Exception):
    """An exception with a method of the user's that raises when it is pickled, or read again."""

    def __init__(self, at: str, kind: str) -> None:
        super().__init__("planned")
        self.at, self.kind = at, kind

    def __reduce__(self) -> Any:
        if self.at == "__reduce__":
            fail(self.kind)
        return Prickly, ("", self.kind), {"at": self.at}

    def __setstate__(self, state: Any) -> None:
        fail(self.kind)


class Spiny:
    """An object all of whose methods raise, but for those that pickle it."""

    def __init__(self, kind: str) -> None:
        object.__setattr__(self, "kind", kind)

    def __reduce__(self) -> Any:
        return Spiny, (object.__getattribute__(self, "kind"),)

    def _prick(self, *args: Any) -> Any:
        fail(object.__getattribute__(self, "kind"))

    __eq__ = __ne__ = __hash__ = __bool__ = __len__ = __iter__ = __repr__ = __str__ = _prick  # type: ignore[assignment]
    __index__ = __int__ = __lt__ = __contains__ = __getitem__ = __setattr__ = _prick  # type: ignore[assignment]
    nbytes = size = property(_prick)


class Number:
    """What a size function should not return."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __index__(self) -> int:
        fail(self.kind)

    def __repr__(self) -> str:
        fail(self.kind)


class Wordless:
    """Another one: no number, and it cannot be shown either."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        fail(self.kind)


class Results(Sequence[Any]):
    """A sequence of the user's own that raises when it is looked at."""

    def __init__(self, at: str, kind: str, n: int) -> None:
        self.at, self.kind, self.n = at, kind, n

    def __len__(self) -> int:
        if self.at == "__len__":
            fail(self.kind)
        return self.n

    def __iter__(self) -> Iterator[Any]:
        fail(self.kind)

    def __getitem__(self, i: Any) -> Any:
        fail(self.kind)


class Array:
    """Something like an array, which comes apart when its numbers are asked for."""

    ndim = 1

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def tolist(self) -> list[Any]:
        fail(self.kind)


RESULTS: dict[str, Callable[[str, int], Any]] = {
    "__len__ of the results": lambda kind, n: Results("__len__", kind, n),
    "__iter__ of the results": lambda kind, n: Results("__iter__", kind, n),
    "tolist of the results": lambda kind, n: Array(kind),
}


class _Hooks(Model):
    def preprocess(self, x: Any) -> Any:
        trip(x, "preprocess")
        return x

    def postprocess(self, y: Any) -> Any:
        trip(y, "postprocess")
        if trips(y, "a result between stages, written"):
            return Thing("__reduce__", y["kind"])
        if trips(y, "a result between stages, read"):
            return Thing("__setstate__", y["kind"])
        return y


class Hooks(_Hooks):
    """The first of two stages: passes on what it gets."""

    def predict(self, xs: list[Any]) -> Any:
        return passed_on(xs)


class AsyncHooks(_Hooks):
    """The same model for a loop."""

    async def predict(self, xs: list[Any]) -> Any:
        if any(trips(x, "sleep") for x in xs):
            await asyncio.sleep(0.02)
            return xs
        return passed_on(xs)


def passed_on(xs: list[Any]) -> Any:
    """What the first stage makes of an item."""
    for x in xs:
        trip(x, "predict")
        if type(x) is dict and x.get("at") in RESULTS:
            return RESULTS[x["at"]](x["kind"], len(xs))
        if trips(x, "print"):
            print(x["line"], flush=True)
        if trips(x, "sleep"):
            time.sleep(0.02)
    return xs


def last(xs: list[Any]) -> list[Any]:
    """The model of the second stage."""
    return [answer_to(x) for x in xs]


async def last_async(xs: list[Any]) -> list[Any]:
    """The model of the second stage for a loop."""
    return [answer_to(x) for x in xs]


def answer_to(x: Any) -> Any:
    """The answer that an item should have."""
    trip(x, "predict of a later stage")
    if trips(x, "a result, written"):
        return Thing("__reduce__", x["kind"])
    if trips(x, "a result, read"):
        return Thing("__setstate__", x["kind"])
    for method in ("__reduce__", "__setstate__"):
        if trips(x, f"{method} of an exception"):
            raise Prickly(method, x["kind"])
    if type(x) is not dict:
        return "unharmed"
    return 10 * x["n"]


def weigh(x: Any) -> Any:
    """`size=` of the first stage."""
    return _weighed(x, "first")


def weigh_later(x: Any) -> Any:
    """`size=` of the second one."""
    return _weighed(x, "later")


def _weighed(x: Any, stage: str) -> Any:
    trip(x, f"size= of the {stage} stage")
    if trips(x, f"__index__ at the {stage} stage"):
        return Number(x["kind"])
    if trips(x, f"__repr__ at the {stage} stage"):
        return Wordless(x["kind"])
    return 1


# -- formats of its own


class _Custom(Model):
    accepts = ("text/lines",)
    produces = "text/lines"

    def decode(self, bodies: list[bytes]) -> list[Any]:
        xs = [json.loads(body) for body in bodies]
        for x in xs:
            trip(x, "decode")
        return xs

    def encode(self, results: list[Any]) -> list[bytes]:
        for x in results:
            trip(x, "encode")
        return [b"%d" % (10 * x["n"]) for x in results]


class Custom(_Custom):
    """Reads and writes a format of its own."""

    def predict(self, xs: list[Any]) -> list[Any]:
        return xs


class AsyncCustom(_Custom):
    """The same model for a loop."""

    async def predict(self, xs: list[Any]) -> list[Any]:
        return xs


# -- a worker's beginning and end


class _Life(Model):
    def __init__(self, at: str, kind: str) -> None:
        self.at, self.kind = at, kind
        self._trip("constructor")

    def _trip(self, at: str) -> None:
        if self.at == at:
            fail(self.kind)

    def setup(self) -> None:
        self._trip("setup")

    def teardown(self) -> None:
        self._trip("teardown")


class Life(_Life):
    """A model that raises as it begins or ends."""

    def predict(self, xs: list[Any]) -> list[Any]:
        return [10 * x["n"] for x in xs]


class AsyncLife(_Life):
    """The same model for a loop."""

    async def predict(self, xs: list[Any]) -> list[Any]:
        return [10 * x["n"] for x in xs]


EXAMPLES: dict[str, type[Model]] = {}
"""Models whose example fails, by kind."""

ASYNC_EXAMPLES: dict[str, type[Model]] = {}


def _declare_examples() -> None:
    for i, kind in enumerate(KINDS):
        plain: Any = type(f"Example{i}", (Hooks,), {"examples": (bad("predict", kind),), "__module__": __name__})
        asynchronous: Any = type(
            f"AsyncExample{i}", (AsyncHooks,), {"examples": (bad("predict", kind),), "__module__": __name__}
        )
        globals()[plain.__name__], globals()[asynchronous.__name__] = plain, asynchronous
        EXAMPLES[kind], ASYNC_EXAMPLES[kind] = plain, asynchronous


_declare_examples()


def slow(xs: list[Any]) -> list[Any]:
    """Takes so long that others come meanwhile."""
    time.sleep(0.02)
    return [10 * x["n"] for x in xs]


def hangs(xs: list[Any]) -> list[Any]:
    """A model that takes too long for item 0."""
    if any(x["n"] == 0 for x in xs):
        time.sleep(2.0)
    return [10 * x["n"] for x in xs]


async def hangs_async(xs: list[Any]) -> list[Any]:
    """The same model for a loop."""
    if any(x["n"] == 0 for x in xs):
        await asyncio.sleep(2.0)
    return [10 * x["n"] for x in xs]


class PassOn(_Life):
    """A model that gives back its items."""

    def predict(self, xs: list[Any]) -> list[Any]:
        return xs


class Anything(Model):
    """Takes whatever there is, and says how many."""

    def predict(self, xs: list[Any]) -> list[int]:
        return [1 for _ in xs]


class AsyncAnything(Model):
    """The same model for a loop."""

    async def predict(self, xs: list[Any]) -> list[int]:
        return [1 for _ in xs]


class Unshowable:
    """An example that can be called with, but neither be written as JSON nor pickled."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        fail(self.kind)

    def tolist(self) -> Any:
        fail(self.kind)

    model_dump = tolist


async def slow_async(xs: list[Any]) -> list[Any]:
    """The same model for a loop."""
    await asyncio.sleep(0.02)
    return [10 * x["n"] for x in xs]


class Warm(Model):
    """A model with an example that runs."""

    examples = ({"n": 1},)

    def predict(self, xs: list[Any]) -> list[Any]:
        return [10 * x["n"] for x in xs]


class AsyncWarm(Model):
    """The same model for a loop."""

    examples = ({"n": 1},)

    async def predict(self, xs: list[Any]) -> list[Any]:
        return [10 * x["n"] for x in xs]
