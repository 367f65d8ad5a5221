"""What the frames of a running set hold: orders to its worker, and the parts that its steps make.

An ORDER's first item says who leaves, who pauses and who goes on; each other item is a stream that
joins. One that has had parts already, from a worker that was lost, brings them as further buffers
behind those of its item. PARTS has one frame for a step, however many streams it has: its first
item says what was done, each other item is a part or the end of a stream. Both carry the number of
an order as their batch: their own, and the last one that was followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from carpool.engine.core import running_set
from carpool.engine.core.running_set import GO_ON
from carpool.engine.wire.frame import Frame, FrameError, FrameKind, group
from carpool.engine.wire.outcome import Outcome
from carpool.engine.wire.payload import Buffer, Payload, parts_of

T = TypeVar("T")

# What a byte of a PARTS frame says of a stream. Other values are an `Outcome` with which it failed.
MORE: Final = running_set.MORE
LAST: Final = running_set.LAST
END: Final = running_set.END
BACK: Final = running_set.BACK

_KINDS = frozenset({MORE, LAST, END, BACK, *Outcome})
# What the caller of a stream takes, in the high bits of `accepts`.
TAKES_WHOLE: Final = 0x00  # the whole answer, once it is there
TAKES_PARTS: Final = 0x40  # parts as they are made
TAKES_BOTH: Final = 0x80  # parts as they are made, and with the end the whole answer
_TAKES: Final = TAKES_PARTS | TAKES_BOTH


class Joining(NamedTuple):
    """A stream that joins a running set.

    Attributes:
        id: Its request's.
        takes: What the caller takes: `TAKES_WHOLE`, `TAKES_PARTS` or `TAKES_BOTH`.
        deadline: The time after which nobody waits for it.
        parts: Those that it has had already, as the model gave them.
    """

    id: int
    format: int
    accept: int
    takes: int
    deadline: float
    item: Payload
    parts: Sequence[Payload] = ()


class StepTiming(msgspec.Struct, array_like=True, frozen=True):
    """The least seconds of a step of so many examples in the warm-up, and of starting them."""

    rows: int
    step_s: float
    start_s: float


class OrderHead(msgspec.Struct, array_like=True, frozen=True):
    """What a worker is to do before its next step, besides letting streams join.

    Attributes:
        leave: Ids of streams whose callers have gone.
        pause: Ids of streams that keep their states, but are not stepped for now.
        resume: Ids of paused streams that go on.
        stop_when: After which steps to wait for the next order: `GO_ON`, `ON_LEAVING` or
            `EVERY_STEP` of `core/running_set.py`.
        buffers: For each stream that joins, how many buffers its item has, and each of its parts;
            empty if none has had parts.
        is_whole: Whether it is the last message of an order that is too large for one.
    """

    leave: list[int] = []
    pause: list[int] = []
    resume: list[int] = []
    stop_when: int = GO_ON
    buffers: list[list[int]] = []
    is_whole: bool = True


class ReportHead(msgspec.Struct, array_like=True, frozen=True):
    """What a worker has done since its last report.

    Attributes:
        stopped: Whether it does nothing more until the next order.
        started: How many streams were started or resumed.
        start_s: Seconds that this took, with reading the order and `preprocess`.
        stepped: How many streams were stepped.
        step_s: Seconds that this took, with all else since the last report but starting and
            waiting.
        buffers: Empty if parts are kept as their callers get them, or not at all; else for each
            stream of the frame how many buffers are the caller's, with those to be kept behind
            them.
    """

    stopped: bool = False
    started: int = 0
    start_s: float = 0.0
    stepped: int = 0
    step_s: float = 0.0
    buffers: list[int] = []


_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(OrderHead).decode
_decode_report = msgspec.msgpack.Decoder(ReportHead).decode


def order_frame(number: int, order: OrderHead, joining: Sequence[Joining]) -> Frame:
    """Return an order as a frame, its `buffers` filled in; each order of a worker has a higher
    number.
    """
    payloads: list[Payload] = [each.item for each in joining]
    if any(each.parts for each in joining):
        in_buffers = [[parts_of([payload])[1] for payload in (each.item, *each.parts)] for each in joining]
        order = msgspec.structs.replace(order, buffers=[[len(part) for part in parts] for parts in in_buffers])
        payloads = [[buffer for part in parts for buffer in part] for parts in in_buffers]
    return Frame(
        FrameKind.ORDER,
        number,
        [0, *[each.id for each in joining]],
        bytes([0, *[each.format for each in joining]]),
        bytes([0, *[each.accept | each.takes for each in joining]]),
        [inf, *[each.deadline for each in joining]],
        [_encode(order), *payloads],
    )


def read_order(frame: Frame) -> tuple[OrderHead, list[Joining]]:
    """Return an order, and the streams that join. Raises FrameError if it contradicts itself."""
    order = _head(frame, FrameKind.ORDER, _decode_order)
    if len(set(frame.ids)) < len(frame.ids):
        raise FrameError("an order in which a stream joins twice")
    payloads = frame.payloads
    n = len(frame.ids) - 1
    if order.buffers and len(order.buffers) != n:
        raise FrameError(f"an order with the buffers of {len(order.buffers)} streams for {n} that join")
    joining = []
    for i in range(1, n + 1):
        accept = frame.accepts[i]
        item, parts = payloads[i], []
        if order.buffers:
            item, *parts = _apart(item, order.buffers[i - 1])
        routed = frame.ids[i], frame.formats[i], accept & ~_TAKES, accept & _TAKES, frame.deadlines[i]
        joining.append(Joining(*routed, item, parts))
    return order, joining


def parts_frame(
    number: int, report: ReportHead, ids: Sequence[int], kinds: Sequence[int], payloads: Sequence[Payload]
) -> Frame:
    """Return a report as a frame.

    Args:
        number: That of the last order that was followed.
        ids: The streams of which there is something to say.
        kinds: For each `MORE`, `LAST`, `END`, `BACK` or an `Outcome`.
        payloads: For each the part, or the report of its failure; of an end nothing, or the whole
            answer.
    """
    return Frame(FrameKind.PARTS, number, [0, *ids], bytes([0, *kinds]), payloads=[_encode(report), *payloads])


def with_kept(part: Payload, kept: Payload) -> tuple[list[Buffer], int]:
    """Return a part with what is to be kept of it behind it, and how many buffers are its own."""
    buffers = parts_of([part])[1]
    return [*buffers, *parts_of([kept])[1]], len(buffers)


def read_report(frame: Frame) -> ReportHead:
    """Return what the first item of a PARTS frame says, once the whole frame has been checked;
    raises FrameError.
    """
    report = _head(frame, FrameKind.PARTS, _decode_report)
    if not _KINDS.issuperset(frame.formats):
        raise FrameError(f"a part of kind {max(frame.formats)}")
    if not (0.0 <= report.start_s < inf and 0.0 <= report.step_s < inf) or min(report.started, report.stepped) < 0:
        raise FrameError(f"a report that cannot be: {report}")
    if report.buffers and len(report.buffers) != len(frame.ids) - 1:
        raise FrameError(f"a report with the buffers of {len(report.buffers)} parts for {len(frame.ids) - 1}")
    return report


def split_kept(payload: Payload, n: int) -> tuple[Payload, Payload]:
    """Return a part as its caller gets it, in `n` buffers, and what is to be kept of it. Raises
    FrameError.
    """
    if type(payload) is not list or n == len(payload):
        return payload, payload
    part, kept = _apart(payload, [n, len(payload) - n])
    return part, kept


def _head(frame: Frame, kind: FrameKind, decode: Callable[[Any], T]) -> T:
    if frame.kind != kind or not frame.payloads or frame.ids[0] != 0:
        raise FrameError(f"a {frame.kind.name} frame instead of {kind.name}, or one without a first item")
    try:
        return decode(frame.payloads[0])
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as error:
        raise FrameError(f"the first item of a {kind.name} frame cannot be read: {error}") from None


def _apart(payload: Payload, counts: Sequence[int]) -> Sequence[Payload]:
    """Return the payloads that lie behind each other in one, by their numbers of buffers; raises
    FrameError.
    """
    buffers = parts_of([payload])[1]
    if not counts or min(counts) < 1 or sum(counts) != len(buffers):
        raise FrameError(f"{len(buffers)} buffers cannot be divided into {counts}")
    return group(buffers, counts)
