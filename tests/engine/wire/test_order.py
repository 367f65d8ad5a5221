"""Orders and reports of running sets: what is packed is read back, and what contradicts itself is refused."""

from __future__ import annotations

import contextlib
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.wire import order as wire
from carpool.engine.wire.frame import Frame, FrameError, FrameKind, FrameReader, encode
from carpool.engine.wire.outcome import Outcome
from carpool.engine.wire.payload import dump, load
from tests.support.frames import receive

numbers = st.lists(st.integers(1, 2**63), max_size=4, unique=True)
values = st.one_of(st.integers(-(2**40), 2**40), st.text(max_size=20), st.binary(max_size=20), st.lists(st.integers()))
takes = st.sampled_from([wire.TAKES_WHOLE, wire.TAKES_PARTS, wire.TAKES_BOTH])
joinings = st.lists(
    st.tuples(
        st.integers(1, 2**63), st.integers(0, 4), st.integers(0, 36), takes, values, st.lists(values, max_size=3)
    ),
    max_size=5,
    unique_by=lambda each: each[0],
)


def over_the_socket(frame: Frame) -> Frame:
    data = b"".join(bytes(part) for part in encode(frame))
    (received,) = receive(FrameReader(), data)
    return received


@given(st.integers(1, 2**63), numbers, numbers, numbers, st.integers(0, 2), joinings, st.booleans())
def test_an_order_is_read_as_it_was_written(
    number: int,
    leave: list[int],
    pause: list[int],
    resume: list[int],
    stop: int,
    joins: list[Any],
    is_remote: bool,
) -> None:
    """An order says the same at the other end, in this process and over a socket, items and earlier
    parts included.
    """
    joining = [
        wire.Joining(id, format, accept, takes, inf, dump(item), [dump(part) for part in parts])
        for id, format, accept, takes, item, parts in joins
    ]
    frame = wire.order_frame(number, wire.OrderHead(leave, pause, resume, stop), joining)
    order, joined = wire.read_order(over_the_socket(frame) if is_remote else frame)
    assert (order.leave, order.pause, order.resume, order.stop_when) == (leave, pause, resume, stop)
    assert [each[:5] for each in joined] == [each[:5] for each in joining]
    assert [load(each.item) for each in joined] == [each[4] for each in joins]
    assert [[load(part) for part in each.parts] for each in joined] == [each[5] for each in joins]


KINDS = st.sampled_from([wire.MORE, wire.LAST, wire.END, wire.BACK, *Outcome])


@given(st.booleans(), st.lists(st.tuples(st.integers(1, 9), KINDS, values, st.none() | values), max_size=6))
def test_a_report_is_read_as_it_was_written(stopped: bool, said: list[Any]) -> None:
    """A report says the same at the other end, and what is to be kept of a part is told from it."""
    payloads: list[Any] = []
    buffers: list[int] = []
    for _, _, value, kept in said:
        packed, n = (dump(value), 0) if kept is None else wire.with_kept(dump(value), dump(kept))
        payloads.append(packed)
        buffers.append(n)
    report = wire.ReportHead(stopped, 2, 0.5, 3, 0.25, buffers)
    frame = over_the_socket(
        wire.parts_frame(7, report, [id for id, *_ in said], [kind for _, kind, *_ in said], payloads)
    )
    assert wire.read_report(frame) == report
    assert list(frame.formats[1:]) == [kind for _, kind, *_ in said]
    for payload, n, (_, _, value, kept) in zip(frame.payloads[1:], buffers, said, strict=True):
        part, raw = wire.split_kept(payload, n) if n else (payload, payload)
        assert (load(part), load(raw)) == (value, value if kept is None else kept)


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


JOINS = wire.Joining(5, 0, 0, wire.TAKES_PARTS, inf, b"item")
BAD_ORDERS = {
    "another kind": Frame(FrameKind.BATCH, 1, [0], b"\0", b"\0", [inf], [packed([])]),
    "no first item": Frame(FrameKind.ORDER, 1),
    "a first item with an id": Frame(FrameKind.ORDER, 1, [3], b"\0", b"\0", [inf], [packed([])]),
    "no msgpack": Frame(FrameKind.ORDER, 1, [0], b"\0", b"\0", [inf], [b"\xc1"]),
    "something else": Frame(FrameKind.ORDER, 1, [0], b"\0", b"\0", [inf], [packed({"leave": []})]),
    "a text for ids": Frame(FrameKind.ORDER, 1, [0], b"\0", b"\0", [inf], [packed(["ab"])]),
    "a stream twice": wire.order_frame(1, wire.OrderHead(), [JOINS, JOINS]),
    "buffers of too many": Frame(
        *(FrameKind.ORDER, 1, [0, 5], bytes(2), bytes(2), [inf, inf]), [packed([[], [], [], 0, [[1], [1]]]), b"item"]
    ),
    "buffers that are not there": Frame(
        *(FrameKind.ORDER, 1, [0, 5], bytes(2), bytes(2), [inf, inf]), [packed([[], [], [], 0, [[1, 1]]]), b"item"]
    ),
    "a part without a buffer": Frame(
        *(FrameKind.ORDER, 1, [0, 5], bytes(2), bytes(2), [inf, inf]), [packed([[], [], [], 0, [[1, 0]]]), b"item"]
    ),
}


@pytest.mark.parametrize("name", BAD_ORDERS)
def test_an_order_that_contradicts_itself_is_refused(name: str) -> None:
    """A worker reads nothing from an order that is none."""
    with pytest.raises(FrameError):
        wire.read_order(BAD_ORDERS[name])


BAD_REPORTS = {
    "no first item": Frame(FrameKind.PARTS, 1),
    "another kind": Frame(FrameKind.REPLY, 1, [0], b"\0", payloads=[packed([])]),
    "no msgpack": Frame(FrameKind.PARTS, 1, [0], b"\0", payloads=[b"\xc1"]),
    "an unknown kind of part": Frame(FrameKind.PARTS, 1, [0, 1], b"\0\xee", payloads=[packed([]), b""]),
    "time that runs backwards": wire.parts_frame(1, wire.ReportHead(step_s=-1.0), [], [], []),
    "a time that is no number": wire.parts_frame(1, wire.ReportHead(start_s=float("nan")), [], [], []),
    "less than no streams": wire.parts_frame(1, wire.ReportHead(stepped=-1), [], [], []),
    "buffers of others": wire.parts_frame(1, wire.ReportHead(buffers=[1, 1]), [1], [0], [b"x"]),
}


@pytest.mark.parametrize("name", BAD_REPORTS)
def test_a_report_that_contradicts_itself_is_refused(name: str) -> None:
    """The coordinator takes nothing from a report that is none; its worker is replaced."""
    with pytest.raises(FrameError):
        wire.read_report(BAD_REPORTS[name])


@given(st.binary(max_size=40))
def test_whatever_the_first_item_holds_is_read_or_refused(data: bytes) -> None:
    """The first item of an order or a report may hold any bytes: nothing but FrameError is raised."""
    for kind, read in ((FrameKind.ORDER, wire.read_order), (FrameKind.PARTS, wire.read_report)):
        frame = Frame(kind, 1, [0], b"\0", b"\0", [inf], [data])
        with contextlib.suppress(FrameError):
            read(frame)  # type: ignore[operator]
