"""What is in the reply of a worker: checked before the driver is told, and its errors taken out.

Workers of other machines may send anything, so each function raises FrameError for what cannot be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from carpool.engine.core.batch import Batch
from carpool.engine.request import Request
from carpool.engine.wire import outcome
from carpool.engine.wire.frame import Frame, FrameError
from carpool.engine.wire.outcome import Outcome, unpack_response
from carpool.engine.wire.payload import OBJECTS, Payload, Scalars

T = TypeVar("T")

_OUTCOMES = frozenset(Outcome)
_NO_ERROR = frozenset({Outcome.OK, Outcome.RESPONSE})


def check_ids(ids: Sequence[int], owed: Sequence[int]) -> None:
    """Raise FrameError if a reply is for other requests than those that are owed."""
    if not ids or len(set(ids)) < len(ids):
        raise FrameError("a reply that answers nothing, or a request twice")
    foreign = set(ids).difference(owed)
    if foreign:
        raise FrameError(f"a reply to request {min(foreign)}, which is not in the batch")


def check_takers(ids: Sequence[int], batch: Batch) -> None:
    """Raise FrameError if a scalar is for a caller that takes bytes."""
    if OBJECTS.issuperset([request.accept for request in batch.requests]):
        return
    accepts = {id: request.accept for id, request in zip(batch.ids, batch.requests, strict=True)}
    if not OBJECTS.issuperset([accepts[id] for id in ids]):
        raise FrameError("a scalar for a caller that takes bytes")


def errors_of(frame: Frame, batch: Batch, is_last: bool) -> dict[int, Exception] | None:
    """Return the errors in a reply, by position, and unpack its responses. Raises FrameError.

    Args:
        frame: The reply.
        batch: What it answers.
        is_last: Whether it comes from the last stage, which alone may respond to a client.
    """
    if max(frame.formats) not in _OUTCOMES:
        raise FrameError(f"a reply with outcome {max(frame.formats)}")
    if type(frame.payloads) is Scalars:
        raise FrameError("a failure or a response that is reported as a scalar")
    if Outcome.RESPONSE in frame.formats:
        if not is_last:
            raise FrameError("a response from a stage that is not the last")
        _unpack_responses(frame, batch)
    failed = [i for i, what in enumerate(frame.formats) if what not in _NO_ERROR]
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
