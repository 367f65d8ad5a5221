"""Values and errors of user code on their way out of it: copies, reports of failed items, and where
results go.

A value that user code may still change is copied before the next call of it, which may fill the
same memory again. What a model's hooks hand to each other never leaves its worker and may be
anything, such as a document that takes its whole vocabulary along where it is pickled. There only
plain data is copied: containers, arrays, tensors and records.

A stage may stand at several places of a graph. Those that differ for its workers, in what becomes
of a result, are a `Spot` each. Each item comes with the number of its spot, beside the encoding
that its caller wants.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Final

import msgspec

from carpool.engine import details
from carpool.engine.call.results import UNCHANGING, Failed, Miscount, as_it_is
from carpool.engine.details import Detail
from carpool.engine.foreign import as_model_error, named_text_of, text_of
from carpool.engine.http_response import HTTPError, check_refusal
from carpool.engine.parts import Last
from carpool.engine.turns import Done, To
from carpool.engine.wire.outcome import FailureReport, Outcome, pack_report, with_cause
from carpool.engine.wire.payload import LARGE, Memory, detach, dump, dumps, load, own_tensor
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidRequest, ModelError, ValidationError

_local = threading.local()  # the memory of each thread's copies


def own(value: Any, handed_on: bool = False) -> Any:
    """Return a copy of `value` that shares nothing with it that can change.

    What is no plain data is copied as it would be on its way to another process, or else as
    `copy.deepcopy` does it; what cannot be copied in any way is returned as it is. So is an
    exception, with its traceback, but its arguments and attributes are copies from then on.

    Args:
        handed_on: Whether it only goes from one hook of a model to the next. Then what is no plain
            data is returned as it is.
    """
    kind = type(value)
    if kind in UNCHANGING:
        return value
    if issubclass(kind, BaseException):
        _own_arguments(value)
        return value
    try:
        return _copied(value, as_it_is if handed_on else _as_if_sent, {})
    except BaseException:  # copying runs the user's code
        return value if handed_on else _deep_copy(value)


def own_part(part: Any, handed_on: bool = False) -> Any:
    """Return a copy of what a model has put in the place of a part; see `own`."""
    return Last(own(part.value, handed_on)) if type(part) is Last else own(part, handed_on)


def _copied(value: Any, other: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Return a copy of `value`: `other` copies what is no plain data, and `memo` has, by ids, the
    copies of objects that stand in it more than once.
    """
    kind = type(value)
    if kind in UNCHANGING or _is_number(kind):
        return value
    if id(value) in memo:
        return memo[id(value)]
    made: Any
    if kind is list or kind is dict:
        made = memo[id(value)] = value.copy()
        if not UNCHANGING.issuperset(map(type, value if kind is list else value.values())):
            for key, each in enumerate(value) if kind is list else value.items():
                made[key] = _copied(each, other, memo)
        return made
    if issubclass(kind, tuple):
        made = tuple.__new__(kind, [_copied(each, other, memo) for each in value])
    elif kind is set or kind is bytearray:
        made = value.copy()
    elif kind is memoryview:
        made = memoryview(value.tobytes())
    elif _is_array(kind, value):
        made = value.copy()
        made.flags.writeable = value.flags.writeable
    elif _is_tensor(kind):
        made = own_tensor(sys.modules["torch"], value)
    elif (names := _fields(kind)) is not None:
        made = memo[id(value)] = copy.copy(value)
        put = msgspec.structs.force_setattr if issubclass(kind, msgspec.Struct) else object.__setattr__
        for name in names:
            put(made, name, _copied(getattr(value, name), other, memo))
    else:
        made = other(value)
    memo[id(value)] = made
    return made


def _fields(kind: type) -> Sequence[str] | None:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


def _is_number(kind: type) -> bool:
    """Report whether a type is that of numpy's numbers, which cannot change."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.number)


def _is_array(kind: type, value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray) and not value.dtype.hasobject


def _is_tensor(kind: type) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and issubclass(kind, tensor)


def _as_if_sent(value: Any) -> Any:
    return load(detach(dump(value), _local.__dict__.setdefault("memory", Memory())))


def _deep_copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except BaseException:  # likewise
        return value


def _own_arguments(error: BaseException) -> None:
    """Replace what an exception holds by copies, but for large objects, which do not travel."""
    with contextlib.suppress(BaseException):  # its class may be the user's
        if not UNCHANGING.issuperset(map(type, error.args)):
            error.args = tuple(map(_small_copy, error.args))
        for name, value in list(vars(error).items()):
            vars(error)[name] = _small_copy(value)


def _small_copy(value: Any) -> Any:
    if type(value) in UNCHANGING:
        return value
    try:
        return load(dumps(value, longest=LARGE))
    except BaseException:  # it is too large, or cannot be pickled
        return value


_LONGEST_LINE = 2 * 1024  # characters of one line of a traceback
_HAVE_CAUSES = frozenset({Outcome.MODEL_ERROR, Outcome.BAD_RESULT})
_ROOM_FOR_CAUSES = 2**20  # bytes in one reply, however many items have failed
_OWN_FILES = (
    "/carpool/engine/worker/",
    "/carpool/engine/call/invoke.py",
    "/carpool/engine/call/results.py",
    "/carpool/engine/call/retry.py",
)


class Expired(DeadlineExceeded):
    """Says that an item's deadline has passed. A `DeadlineExceeded` of user code is a failure like
    any other.
    """


class FailureReports:
    """Reports the failed items of one batch.

    Attributes:
        causes: The exceptions by position, if the reply stays in this process, so that they may go
            with it as they are; else None.
    """

    def __init__(self, same_process: bool) -> None:
        self.causes: dict[int, BaseException] | None = {} if same_process else None
        self._reports: dict[Failed, _PackedReports] = {}  # items may share a failure
        self._room = _ROOM_FOR_CAUSES

    def report(self, position: int, failed: Failed) -> tuple[Outcome, bytes]:
        if failed not in self._reports:
            self._reports[failed] = self._pack(failed.error)
        outcome, body, body_with_cause = self._reports[failed]
        if self.causes is not None:
            cause = _cause_of(failed.error) if outcome in _HAVE_CAUSES else None
            if cause is not None:
                self.causes[position] = cause
        elif len(body_with_cause) <= self._room:
            self._room -= len(body_with_cause)
            body = body_with_cause
        return outcome, body

    def _pack(self, error: BaseException) -> _PackedReports:
        outcome, report = outcome_of(error)
        body = pack_report(report)
        cause = _cause_of(error) if outcome in _HAVE_CAUSES else None
        if cause is None:
            return outcome, body, body
        if self.causes is not None:
            _cut_own_frames(cause)
            own(cause)
            return outcome, body, body
        return outcome, body, pack_report(with_cause(report, cause))


_PackedReports = tuple[Outcome, bytes, bytes]
"""The outcome of a failure, and its report without and with the exception itself."""


def outcome_of(error: BaseException) -> tuple[Outcome, FailureReport]:
    """Return what became of an item that failed with `error`, and the report of it.

    The report is nothing but text, whatever the exception's methods and attributes do.
    """
    try:
        return _outcome_of(error)
    except BaseException:
        return Outcome.MODEL_ERROR, FailureReport(named_text_of(error), type(error).__name__, describe(error))


def _outcome_of(error: BaseException) -> tuple[Outcome, FailureReport]:
    if isinstance(error, Expired):
        return Outcome.EXPIRED, FailureReport(str(error))
    if isinstance(error, ModelError):
        outcome = Outcome.BAD_RESULT if error.code == "bad_result" else Outcome.MODEL_ERROR
        return outcome, FailureReport(text_of(error), str(error.type_name), str(error.traceback))
    if isinstance(error, ValidationError):
        return Outcome.INVALID_ITEM, FailureReport(str(error) or text_of(error), details=_details_of(error))
    if isinstance(error, HTTPError):
        headers = tuple(error.headers)
        check_refusal(error.status, error.code, headers)
        refusal = int(error.status), error.code, headers
        return Outcome.REFUSED, FailureReport(text_of(error), type(error).__name__, refusal=refusal)
    if isinstance(error, InvalidRequest):
        too_large = (413, "too_large", ()) if error.status == 413 else None
        return Outcome.INVALID, FailureReport(str(error) or text_of(error), refusal=too_large)
    return Outcome.MODEL_ERROR, FailureReport(named_text_of(error), type(error).__name__, describe(error))


def _details_of(error: ValidationError) -> list[Detail]:
    try:
        return details.sanitized(error.details)
    except BaseException:
        return []


def _cause_of(error: BaseException) -> BaseException | None:
    """Return what the caller's `ModelError` is caused by: the exception; for a ModelError, that
    error's own cause.
    """
    return error.__cause__ if type(error) in (ModelError, Miscount) else error  # a subclass of a user's is a cause


def _users_part(error: BaseException) -> TracebackType | None:
    tb = error.__traceback__
    while tb is not None and _is_own(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


def _is_own(filename: str) -> bool:
    return any(part in filename for part in _OWN_FILES)


def _cut_own_frames(error: BaseException) -> None:
    """Cut our own frames off an exception's traceback: they are of no use to the user, and they
    hold the batch.
    """
    with contextlib.suppress(BaseException):
        BaseException.with_traceback(error, _users_part(error))


def clear_own_frames(errors: Iterable[BaseException]) -> None:
    """Empty our own frames through which exceptions have come, once the call has ended.

    The user's frames, which they called, still refer to them; they hold the batch, and the
    exceptions themselves.
    """
    for error in {id(each): each for each in errors}.values():
        # RuntimeError: the frame still runs, as the call was made from it
        with contextlib.suppress(BaseException):
            tb = _users_part(error)
            frame = None if tb is None else tb.tb_frame.f_back
            while frame is not None:
                if _is_own(frame.f_code.co_filename):
                    frame.clear()
                frame = frame.f_back


def describe(error: BaseException) -> str:
    """Return the traceback as text, from the user's first frame on; endless lines are cut."""
    try:
        tb = _users_part(error)
        lines = traceback.TracebackException(type(error), error, tb, compact=True).format()
        return "".join([line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}...\n" for line in lines])
    except BaseException:
        return f"{type(error).__name__} (its traceback could not be read)\n"


SPOTS: Final = 16
"""How many spots a stage may have. In a message an item's spot times this is added to the byte that
says how its caller wants the result."""


class Goes(Enum):
    """The fate of a result."""

    ON = "on"  # another stage gets it, or a join
    LIST = "list"  # it is a list whose items go on one by one
    ANSWER = "answer"  # it is the answer
    PART = "part"  # it is a part of the answer, which a join makes


def chosen(choose: Callable[[Any], str], item: object, known: str) -> str:
    """Return the name that a `choose=` of the user's returns for an item; `known` are all names.

    Raises:
        CarpoolError: It raises; what is no error of ours becomes a `ModelError`.
    """
    try:
        return choose(item)
    except CarpoolError:
        raise
    except BaseException as error:
        raise as_model_error(error, f"choose= of the Route to {known}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """The ways on from a place, of which each result takes one.

    Attributes:
        choose: Names the way for a result; None if results name it themselves, as `To`.
        by_name: For each name the position of the way among all those of the place, or further ways
            of which one is taken.
    """

    choose: Callable[[Any], str] | None
    by_name: Mapping[str, Ways | int]

    def find(self, name: object, item: object) -> int:
        """Return the position of the way of a result; `name` is what it names, None if it names
        none.

        Raises:
            CarpoolError: There is no such way, or `choose` raises.
        """
        if name is None:
            if self.choose is None:
                raise self._unknown("no branch was named: return To(branch, item), or give Route a choose=")
            name = chosen(self.choose, item, ", ".join(map(repr, self.by_name)))
        try:
            way = self.by_name[name]  # type: ignore[index]
        except (KeyError, TypeError):
            raise self._unknown(f"there is no branch {name!r:.80}") from None
        return way.find(None, item) if type(way) is Ways else way  # type: ignore[return-value]

    def _unknown(self, text: str) -> ModelError:
        return ModelError(f"{text}; there are {', '.join(map(repr, self.by_name))}", code="bad_result")


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """What becomes of the results at some places of a stage.

    Attributes:
        goes: Of each way on; there is one, unless a `Route` follows.
        ways: How a result takes one of several; None if no `Route` follows.
        answer: The type of the service's answers.
        no_early: Why no result may be the answer by itself; empty if it may.
    """

    goes: tuple[Goes, ...]
    ways: Ways | None = None
    answer: Any = Any
    no_early: str = ""

    def turn(self, result: Any) -> tuple[Goes | None, int, Any]:
        """Return what becomes of a result, the position of its way, and the result without what
        says so. Of an early answer there is no way, and the first is None.
        """
        kind = type(result)
        if kind is Failed:
            return Goes.ON, 0, result
        if kind is Done:
            if self.no_early:
                return Goes.ON, 0, Failed(ModelError(self.no_early, code="bad_result"))
            return None, 0, result.answer
        name = None
        if kind is To:
            name, result = result.branch, result.item
            if self.ways is None:
                text = f"a result names {name!r:.80} as its branch, and no Route follows"
                return Goes.ON, 0, Failed(ModelError(text, code="bad_result"))
        if self.ways is None:
            return self.goes[0], 0, result
        try:
            way = self.ways.find(name, result)
        except BaseException as error:
            return Goes.ON, 0, Failed(error)
        return self.goes[way], way, result


def choosers(spots: Sequence[Spot]) -> list[Callable[[Any], str]]:
    found, ways = [], [spot.ways for spot in spots if spot.ways is not None]
    while ways:
        each = ways.pop()
        ways += [inner for inner in each.by_name.values() if isinstance(inner, Ways)]
        if each.choose is not None:
            found.append(each.choose)
    return found


ON: Final = Spot((Goes.ON,))
ANSWER: Final = Spot((Goes.ANSWER,))
