"""What is in the reply of a worker: checked before the driver is told, and its errors taken out.

Workers of other machines may send anything, so each function raises FrameError for what cannot be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from carpool.engine.core.batch import DONE_EARLY, Batch
from carpool.engine.core.graph import JOIN, Node
from carpool.engine.request import Request
from carpool.engine.wire import outcome
from carpool.engine.wire.frame import Frame, FrameError
from carpool.engine.wire.outcome import WAY, Outcome, unpack_response
from carpool.engine.wire.payload import OBJECTS, Payload, Scalars

T = TypeVar("T")

_OUTCOMES = frozenset(Outcome)
_NO_ERROR = frozenset({Outcome.OK, Outcome.RESPONSE, Outcome.DONE})
_HAVE_RESULTS = frozenset({Outcome.OK, Outcome.DONE, WAY})


def check_ids(ids: Sequence[int], owed: Sequence[int]) -> None:
    """Raise FrameError if a reply is for other requests than those that are owed."""
    if not ids or len(set(ids)) < len(ids):
        raise FrameError("a reply that answers nothing, or a request twice")
    foreign = set(ids).difference(owed)
    if foreign:
        raise FrameError(f"a reply to request {min(foreign)}, which is not in the batch")


def check_takers(frame: Frame, batch: Batch) -> None:
    """Raise FrameError if a scalar is for a caller that takes bytes."""
    if OBJECTS.issuperset([request.accept for request in batch.requests]):
        return
    takers = dict(zip(batch.ids, batch.requests, strict=True))
    for id, what in zip(frame.ids, frame.formats, strict=True):
        if takers[id].accept not in OBJECTS and _ends(takers[id], what):
            raise FrameError("a scalar for a caller that takes bytes")


def _ends(request: Request, what: int) -> bool:
    """Report whether a result of a request's node is for its caller."""
    node: Node = request.node
    if what == Outcome.DONE or type(node) is not Node:
        return what == Outcome.DONE
    if what < WAY:
        return node.ends
    after = node.ways[what - WAY].after
    return after is None or (after is JOIN and node.block is not None and node.block.ends)


def turns_of(frame: Frame, batch: Batch) -> dict[int, object] | None:
    """Return where results go that say so themselves, by position; None if none does.

    From then on the outcomes of these are those of any result. Raises FrameError.
    """
    outcomes = frame.formats
    if max(outcomes) < Outcome.DONE and Outcome.RESPONSE not in outcomes:
        return None
    turns: dict[int, object] = {}
    requests = dict(zip(batch.ids, batch.requests, strict=True))
    for i, (id, what) in enumerate(zip(frame.ids, outcomes, strict=True)):
        node = requests[id].node
        if what == Outcome.DONE:
            turns[i] = DONE_EARLY
        elif what >= WAY and type(node) is Node:  # else its caller has gone
            if what - WAY >= len(node.ways):
                raise FrameError(f"a result takes way {what - WAY} of {len(node.ways)}")
            turns[i] = node.ways[what - WAY]
        elif what == Outcome.RESPONSE and type(node) is Node and not node.is_last:
            turns[i] = DONE_EARLY  # only an early answer may be one
    if type(frame.payloads) is Scalars and not _HAVE_RESULTS.issuperset([min(each, WAY) for each in outcomes]):
        raise FrameError("a failure or a response that is reported as a scalar")
    return turns or None


def errors_of(frame: Frame, batch: Batch) -> dict[int, Exception] | None:
    """Return the errors in a reply, by position, and unpack its responses. Raises FrameError.

    Args:
        frame: The reply.
        batch: What it answers.
    """
    outcomes = frame.formats
    unknown = {each for each in outcomes if each < WAY} - _OUTCOMES
    if unknown:
        raise FrameError(f"a reply with outcome {max(unknown)}")
    if _HAVE_RESULTS.issuperset([min(each, WAY) for each in outcomes]):
        return None
    if type(frame.payloads) is Scalars:
        raise FrameError("a failure or a response that is reported as a scalar")
    if Outcome.RESPONSE in outcomes:
        _unpack_responses(frame, batch)
    failed = [i for i, what in enumerate(frame.formats) if what not in _NO_ERROR and what < WAY]
    causes, frame.causes = frame.causes or {}, None  # the worker keeps its reply until it has the next one
    errors: dict[int, Exception] = {
        i: outcome.unpack_error(frame.formats[i], frame.payloads[i], causes.get(i)) for i in failed
    }
    return errors or None


def _unpack_responses(frame: Frame, batch: Batch) -> None:
    """Put the responses of a model's own in place of their payloads. Raises FrameError."""
    requests = dict(zip(batch.ids, batch.requests, strict=True))
    answers: list[Any] = list(frame.payloads)
    for i, what in enumerate(frame.formats):
        if what == Outcome.RESPONSE:
            answers[i] = unpacked_response(answers[i], requests[frame.ids[i]])
    frame.payloads = answers


def unpacked_response(payload: Payload, request: Request | None) -> object:
    """Return a response of the model's own; no request is given if that has left. Raises
    FrameError.
    """
    if request is not None and request.accept in OBJECTS:
        raise FrameError("a response to a caller that speaks no HTTP")
    try:
        return unpack_response(payload)
    except ValueError as error:
        raise FrameError(str(error)) from error


def decoded(payload: Payload, kind: type[T]) -> T:
    """Return what a worker has packed. Raises FrameError."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as error:
        raise FrameError(f"it cannot be read: {error}") from error
