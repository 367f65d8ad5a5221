"""Models that return and raise what they must not: one clear error for the right callers, and the worker goes on."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections import UserList
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest

from carpool import InvalidRequest, Model, ModelError, ValidationError
from carpool.engine.call.results import run_now
from carpool.engine.hints import schema
from carpool.engine.observe.log import JsonLines, TextLines
from carpool.engine.wire import outcome
from carpool.engine.wire.frame import Frame, encode
from carpool.engine.wire.outcome import FailureReport, Outcome
from carpool.engine.wire.payload import JSON, MSGPACK, OBJECT, RAW, load
from carpool.engine.worker.serve import serve
from tests.effort import slow_where
from tests.engine.worker.link import Link, batch, live, setup_of

GOOD = 8  # the id of the batch after the wrong one


def wrong(how: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A model that does with a batch that has the item "wrong" what it is told; others are returned."""
    return lambda xs: how(xs) if "wrong" in xs else xs


def answered(how: Callable[[list[Any]], Any], accept: int = OBJECT, **changes: Any) -> list[tuple[int, Any]]:
    """Outcome and result or report of three items, of which the second is wrong. The batch after it must be served."""
    first, second = batch(7, "a", "wrong", "c"), batch(GOOD, "d")
    first.accepts = bytes([accept] * 3)
    link = Link(first, second)
    live(link, wrong(how), **{"warm_up": (), "isolate_errors": False, **changes})
    reply, good = link.sent[-2:]
    assert (reply.batch_id, good.batch_id) == (7, GOOD)
    assert [load(payload) for payload in good.payloads] == ["d"]
    assert sum(len(bytes(part)) for part in encode(reply)) < 100_000  # type: ignore[arg-type]
    return [
        (f, outcome.read_report(p) if f else (load(p) if accept == OBJECT else p))
        for f, p in zip(reply.formats, reply.payloads, strict=True)
    ]


# -- what it returns


@pytest.mark.fault("F38", "F39")
@pytest.mark.parametrize(
    "returned",
    [
        *([], ["x"], ["x"] * 2, ["x"] * 4, ("x",), range(2), np.ones((4, 2)), np.ones(2), np.float64(1), np.array(3)),
        *(None, 3, 1.5, True, "abc", b"abc", bytearray(3), {1, 2, 3}, {1: 1, 2: 2, 3: 3}, object(), Model, len),
        *(iter("abc"), (x for x in "abc"), map(str, "abc"), itertools.count(), itertools.repeat("x")),
        *(ValueError("returned"), NotImplemented, ...),
    ],
    ids=lambda value: f"{type(value).__name__} {value!r:.12}",
)
def test_what_is_not_a_sequence_of_three_results(returned: Any) -> None:
    """If `predict` does not return a sequence of three results the whole batch gets 500
    `bad_result`, with what was needed and what came; at once, also where there is no end.
    """
    started = time.monotonic()
    answers = answered(lambda xs: returned)

    assert [o for o, _ in answers] == [Outcome.BAD_RESULT] * 3
    assert answers[0][1].message.startswith("a call with 3 items must return ")
    assert time.monotonic() - started < 5


def test_an_async_generator_and_a_coroutine_are_no_results() -> None:
    """An async generator or a coroutine from a plain model, which would have to be awaited, is no
    result.
    """

    async def generates() -> Any:
        yield 1

    async def sleeps() -> Any:
        await asyncio.sleep(0)

    assert {o for o, _ in answered(lambda xs: generates())} == {Outcome.BAD_RESULT}
    answers = answered(lambda xs: sleeps())
    assert {o for o, _ in answers} == {Outcome.MODEL_ERROR}
    assert 'run_in="loop"' in answers[0][1].message


@pytest.mark.fault("F37")
def test_exceptions_in_place_of_results_fail_their_items_only() -> None:
    """Exceptions in the place of results fail their own items, and the others are answered. None is
    a result like any other.
    """
    answers = answered(lambda xs: [None, ValueError("not this one"), 3])
    assert answers[0] == (Outcome.OK, None)
    assert answers[2] == (Outcome.OK, 3)
    assert (answers[1][0], answers[1][1].message) == (Outcome.MODEL_ERROR, "ValueError: not this one")

    answers = answered(lambda xs: [ValidationError("no cat"), 2, KeyboardInterrupt()])
    assert [o for o, _ in answers] == [Outcome.INVALID_ITEM, Outcome.OK, Outcome.MODEL_ERROR]


class Liar(list[Any]):
    """Says three, and has no end; cut, it is nothing at all."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return itertools.count()

    def __getitem__(self, i: Any) -> Any:
        return None


class Short(list[Any]):
    def __len__(self) -> int:
        return 3


class RaisesInLen(UserList[Any]):
    def __len__(self) -> int:
        raise SystemExit(3)


class RaisesInIter(UserList[Any]):
    def __iter__(self) -> Any:
        raise GeneratorExit

    __getitem__ = __iter__


class RaisesInAwait:
    def __await__(self) -> Any:
        raise KeyboardInterrupt


class Tensor:
    """A result that looks like a tensor and is none."""

    ndim = 1

    def tolist(self) -> Any:
        return Liar()


class Evasive:
    """A result that raises whatever it is asked."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)


@pytest.mark.parametrize(
    "kind",
    [Liar, lambda: Short("a"), lambda: RaisesInLen("abc"), lambda: RaisesInIter("abc"), RaisesInAwait, Tensor, Evasive],
    ids=["liar", "short", "len", "iter", "await", "tensor", "evasive"],
)
@pytest.mark.parametrize("isolate", [True, False], ids=["isolated", "as a whole"])
def test_a_result_that_raises_or_lies_fails_its_batch_or_item(kind: Callable[[], Any], isolate: bool) -> None:
    """If the length, the end or the `__await__` of a result raises or lies, its batch or item
    fails, and the worker goes on.
    """
    answers = answered(lambda xs: kind(), isolate_errors=isolate)
    assert answers[1][0] in (Outcome.MODEL_ERROR, Outcome.BAD_RESULT)


class NoClass:
    """Raises when it is asked for its class, as `isinstance` does."""

    __class__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return NoClass.new, ()

    @staticmethod
    def new() -> str:
        return "new"


class NotToBeHashed(type):
    def __eq__(cls, other: object) -> bool:
        raise SystemExit

    __hash__ = None  # type: ignore[assignment]


class OfAnOddType(metaclass=NotToBeHashed):
    pass


def test_results_whose_class_is_a_trap() -> None:
    """A result that answers wrongly when it is asked for its class is one like any other; one whose
    class cannot even be hashed fails its batch, in the end.
    """
    answers = answered(lambda xs: ["x", NoClass(), "z"])
    assert [a for o, a in answers] == ["x", "new", "z"]
    answers = answered(lambda xs: ["x", OfAnOddType(), "z"])
    assert {o for o, _ in answers} == {Outcome.MODEL_ERROR}


class Shrunk(bytes):
    """Says that it is shorter than it is."""

    def __len__(self) -> int:
        return 1


def test_raw_bytes_are_as_long_as_they_are() -> None:
    """Raw bytes are written as long as they are: what a user's class says of its length does not
    break the protocol.
    """
    answers = answered(lambda xs: [b"x", Shrunk(b"abc"), memoryview(b"z")], RAW)
    assert [(o, bytes(a)) for o, a in answers] == [(Outcome.OK, b"x"), (Outcome.OK, b"abc"), (Outcome.OK, b"z")]


def far_too_deep() -> list[Any]:
    """A list that is nested deeper than any version of Python can follow on a stack of 8 MiB."""
    inner: list[Any] = []
    for _ in range(10**6):
        inner = [inner]
    return inner


class Unwritable:
    """A result that raises when it is pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.fault("F40")
@slow_where(lambda result, accept: result is far_too_deep and accept != OBJECT)
@pytest.mark.parametrize("accept", [OBJECT, JSON, MSGPACK])
@pytest.mark.parametrize(
    "result",
    [
        *(lambda: 1, (x for x in "abc"), sys, sys._getframe(), far_too_deep),
        *(Unwritable(ValueError("no")), Unwritable(SystemExit(0)), Unwritable(KeyboardInterrupt())),
        *(Unwritable(RecursionError()), Unwritable(MemoryError())),
    ],
    ids=lambda value: f"{type(value).__name__} {type(getattr(value, 'error', None)).__name__}",
)
def test_a_result_that_cannot_be_encoded_fails_alone(result: Any, accept: int) -> None:
    """A result that cannot be encoded fails alone, whatever the encoder raises; its neighbours are
    answered, and the worker goes on.
    """
    if result is far_too_deep:
        result = far_too_deep()
    answers = answered(lambda xs: ["x", result, "z"], accept)

    assert [o for o, _ in answers][::2] == [Outcome.OK] * 2
    assert answers[1][0] in (Outcome.MODEL_ERROR, Outcome.BAD_RESULT)


@pytest.mark.parametrize("result", [float("nan"), float("inf"), "\ud800", {1: 2, (3,): 4}, object(), 10**400])
def test_a_result_that_is_no_json_fails_alone_or_is_written(result: Any) -> None:
    """A result that JSON cannot express is its item's error, or is written so that it can be read."""
    answers = answered(lambda xs: ["x", result, "z"], JSON)

    assert [a for o, a in answers][::2] == [b'"x"', b'"z"']
    if answers[1][0] == Outcome.OK:
        msgspec.json.decode(answers[1][1])


# -- what it raises


class TwoArguments(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class QuitsInStr(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")

    __reduce_ex__ = None  # type: ignore[assignment]


class TrapInside(Exception):
    @property
    def code(self) -> Any:
        raise RuntimeError("no code")

    __cause__ = property(lambda self: 1 / 0)  # type: ignore[assignment]


class MuteValidation(ValidationError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class HalfModelError(ModelError):
    def __init__(self) -> None:
        pass


class OddModelError(ModelError):
    def __init__(self) -> None:
        super().__init__("odd")
        self.type_name = self.traceback = 5  # type: ignore[assignment]


class Own(BaseException):
    pass


class NoClassEither(Exception):
    __class__ = property(lambda self: 1 / 0)  # type: ignore[assignment]


class Pretends(Exception):
    __class__ = KeyboardInterrupt  # type: ignore[assignment]


class OutOfMemoryAndTraps(MemoryError):
    __cause__ = __context__ = __traceback__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise SystemExit


class OddText(str):
    def __getitem__(self, i: Any) -> Any:
        raise SystemExit

    def encode(self, *more: Any) -> Any:
        raise SystemExit


class SaysOddly(Exception):
    def __str__(self) -> str:
        return OddText("odd")


class OddTextsOfAModelError(ModelError):
    def __init__(self) -> None:
        super().__init__("odd", type_name=OddText("x"), traceback=OddText("y"))

    def __str__(self) -> str:
        return OddText("odd")


def too_deep(depth: int = 0) -> int:
    return too_deep(depth + 1) + 1


def chained() -> None:
    try:
        raise KeyError("first")
    except KeyError as error:
        raise ValueError("second") from error


def circle() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    raise one


def raiser(error: BaseException | type[BaseException]) -> Callable[[list[Any]], Any]:
    def how(xs: list[Any]) -> Any:
        raise error

    return how


RAISED: dict[str, Callable[[list[Any]], Any]] = {
    "ValueError": raiser(ValueError("plain")),
    "a class": raiser(ValueError),
    "two arguments": raiser(TwoArguments(1, 2)),
    "no text": raiser(Mute()),
    "quits when asked for its text": raiser(QuitsInStr()),
    "not to be pickled": raiser(Unpicklable("x")),
    "attributes that raise": raiser(TrapInside()),
    "a validation error without text": raiser(MuteValidation("x")),
    "a model error that is not made up": raiser(HalfModelError()),
    "a model error of odd things": raiser(OddModelError()),
    "100 MB": lambda xs: raiser(ValueError("x" * 100_000_000))(xs),
    "100 MB of lines": lambda xs: raiser(ValueError("x\n" * 50_000_000))(xs),
    "ANSI and CRLF": raiser(ValueError("\x1b[31mred\x1b[0m\r\nSet-Cookie: a=b\r\n")),
    "half a pair": raiser(ValueError("\ud800")),
    "bytes": raiser(ValueError(b"\xff\xfe")),
    "a group": raiser(ExceptionGroup("several", [ValueError(i) for i in range(1000)])),
    "a group of groups": raiser(ExceptionGroup("a", [ExceptionGroup("b", [ExceptionGroup("c", [Mute()])])])),
    "RecursionError": lambda xs: too_deep(),
    "a chain": lambda xs: chained(),
    "a circle": lambda xs: circle(),
    "SystemExit": raiser(SystemExit(0)),
    "SystemExit without code": raiser(SystemExit),
    "KeyboardInterrupt": raiser(KeyboardInterrupt()),
    "CancelledError": raiser(asyncio.CancelledError()),
    "GeneratorExit": raiser(GeneratorExit()),
    "StopIteration": raiser(StopIteration(3)),
    "StopAsyncIteration": raiser(StopAsyncIteration()),
    "a BaseException of its own": raiser(Own("x")),
    "MemoryError": raiser(MemoryError()),
    "AssertionError": raiser(AssertionError()),
    "a bad request": raiser(InvalidRequest("x")),
    "a class that raises": raiser(NoClassEither("x")),
    "a class that is not its own": raiser(Pretends("x")),
    "out of memory, and full of traps": raiser(OutOfMemoryAndTraps()),
    "a text of an odd class": raiser(SaysOddly()),
    "a model error of odd texts": raiser(OddTextsOfAModelError()),
    "a model error without text": raiser(ModelError("")),
}
CLIENT_S_FAULT = {"a bad request": Outcome.INVALID}


@pytest.mark.fault("F42", "F43")
@slow_where(lambda name: name == "100 MB of lines")
@pytest.mark.parametrize("isolate", [True, False], ids=["isolated", "as a whole"])
@pytest.mark.parametrize("name", RAISED)
def test_whatever_it_raises_is_one_error_for_the_right_callers(name: str, isolate: bool) -> None:
    """Whatever `predict` raises is one error with bounded, readable text for the guilty item, or
    without isolation for its batch; and the worker goes on.
    """
    answers = answered(RAISED[name], isolate_errors=isolate, retry_on_oom=isolate)
    expected = CLIENT_S_FAULT.get(name, Outcome.MODEL_ERROR)

    assert [o for o, _ in answers] == ([Outcome.OK, expected, Outcome.OK] if isolate else [expected] * 3)
    report = answers[1][1]
    assert isinstance(report, FailureReport)
    assert report.message
    assert len(report.message) <= 2048
    assert len(report.traceback) <= 16 * 1024
    (report.message + report.traceback).encode()


def test_an_error_without_text_is_told_by_its_name() -> None:
    """An error without text, such as a failed `assert` or an empty MemoryError, is told by its
    name.
    """
    for name in ("AssertionError", "MemoryError", "KeyboardInterrupt", "CancelledError"):
        assert answered(RAISED[name])[1][1].message == name


def test_the_traceback_is_not_lost_behind_an_endless_message() -> None:
    """An endless message is cut, so that the lines of code in the traceback are still there."""
    report = answered(RAISED["100 MB"])[1][1]

    assert "raise error" in report.traceback
    assert report.message == ("ValueError: " + "x" * 2048)[:2048]


def test_the_traceback_of_a_part_begins_in_the_user_s_code() -> None:
    """The traceback of a part of a batch begins in the user's code, not in ours which has run the
    batch in parts.
    """
    report = answered(RAISED["ValueError"], isolate_errors=True)[1][1]

    first = report.traceback.splitlines()[1]
    assert first.startswith(f'  File "{__file__}"')


def test_the_model_error_that_a_model_raises_is_told_as_it_is() -> None:
    """A `ModelError` that a model raises is told with its text and name as they are; what is no
    text is made one.
    """
    report = answered(RAISED["a model error of odd things"])[1][1]
    assert (report.message, report.type_name, report.traceback) == ("odd", "5", "5")


# -- hooks and validators


class Hooks(Model):
    """A model with a hook that raises for one item."""

    def __init__(self, hook: str, error: BaseException) -> None:
        self.hook, self.error = hook, error

    def _check(self, hook: str, x: Any) -> Any:
        if hook == self.hook and x == "wrong":
            raise self.error
        return x

    def preprocess(self, x: str) -> str:
        return str(self._check("preprocess", x))

    def predict(self, xs: list[str]) -> list[str]:
        return xs

    def postprocess(self, y: str) -> str:
        return str(self._check("postprocess", y))


@pytest.mark.parametrize("error", [Mute(), SystemExit(1), MemoryError(), Own()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
def test_a_hook_that_raises_fails_its_item(hook: str, error: BaseException) -> None:
    """Whatever a hook raises fails its item."""
    link = Link(batch(7, "a", "wrong", "c"), batch(GOOD, "d"))
    run_now(serve(link, setup_of(warm_up=()), lambda: (Hooks, {"hook": hook, "error": error}, (), ())))

    assert list(link.sent[-2].formats) == [Outcome.OK, Outcome.MODEL_ERROR, Outcome.OK]
    assert load(link.sent[-1].payloads[0]) == "d"


def json_batch(*bodies: bytes) -> Frame:
    n = len(bodies)
    frame = batch(7, *range(n))
    frame.formats, frame.accepts, frame.payloads = bytes([JSON] * n), bytes([JSON] * n), list(bodies)
    return frame


class Plus(Model):
    def predict(self, xs: list[Annotated[int, msgspec.Meta(ge=0)]]) -> list[int]:
        return [x + 1 for x in xs]


@pytest.mark.fault("F36")
def test_items_that_cannot_be_read_fail_alone_among_32() -> None:
    """Four of 32 items with bad syntax, wrong types or values, or nothing at all fail alone; 28
    others are answered, in their places.
    """
    bodies = [b"%d" % i for i in range(32)]
    bodies[3], bodies[7], bodies[20], bodies[31] = b"1 2", b'"x"', b"-1", b""
    link = Link(json_batch(*bodies))
    live(link, Plus, warm_up=())
    reply = link.sent[-1]

    bad = {i: f for i, f in enumerate(reply.formats) if f}
    assert bad == {3: Outcome.INVALID, 7: Outcome.INVALID_ITEM, 20: Outcome.INVALID_ITEM, 31: Outcome.INVALID}
    assert all(reply.payloads[i] == b"%d" % (i + 1) for i in range(32) if i not in bad)


class Picky:
    """A type with a validator, which is the user's code and raises what it likes."""

    error: BaseException = ValueError()

    def __init__(self, x: int) -> None:
        if x == 1:
            raise self.error


class TakesPicky(Model):
    def predict(self, xs: list[Picky]) -> list[str]:
        return ["fine" for _ in xs]


@pytest.mark.parametrize("error", [ValueError("no"), Mute(), SystemExit(), Own()], ids=lambda e: type(e).__name__)
def test_a_validator_that_raises_fails_its_item(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a user's type raises when an item is read, no neighbour notices."""
    monkeypatch.setattr(Picky, "error", error)
    monkeypatch.setattr(
        schema, "json_reader", lambda kind: lambda body: Picky(msgspec.json.decode(body)) if kind is Picky else None
    )
    link = Link(json_batch(b"0", b"1", b"2"))
    live(link, TakesPicky, warm_up=())

    formats = list(link.sent[-1].formats)
    assert formats[1] != Outcome.OK
    assert formats[::2] == [Outcome.OK] * 2


# -- logs


def record(message: str) -> Any:
    return logging.LogRecord("carpool", logging.ERROR, "", 0, "%s", (message,), None)


def test_text_from_a_model_cannot_write_log_lines_or_into_the_terminal() -> None:
    """Of text from a model control characters are shown, further lines are set off, and what is
    endless is cut.
    """
    text = TextLines().format(record("\x1b[2J\r\n12:00:00 error: forged\x07"))
    assert text.endswith("error: \\x1b[2J\\x0d\n    12:00:00 error: forged\\x07")

    line = JsonLines().format(record("\x1b[2J\r\nforged"))
    assert "\n" not in line
    assert msgspec.json.decode(line)["message"] == "\\x1b[2J\\x0d\nforged"

    assert len(TextLines().format(record("x" * 10**7))) < 20_000
