"""Items that are written as one block are read as the items that they would be without a block."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.fast_paths import without
from carpool.engine.wire.frame import Frame, FrameKind, FrameReader
from carpool.engine.wire.payload import dump, load
from tests.support.frames import data_of, receive
from tests.support.properties import PROPERTY
from tests.support.values import seen

scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3))
arrays = st.builds(
    lambda n, dtype, start: np.arange(start, start + n).astype(dtype),
    st.integers(1, 2),
    st.sampled_from(["f4", "i8"]),
    st.integers(0, 9),
)
batches = st.one_of(
    st.lists(scalars, min_size=1, max_size=6),
    st.lists(arrays, min_size=1, max_size=6),
    st.lists(st.one_of(scalars, arrays, st.binary(max_size=3)), min_size=1, max_size=6),
)


@PROPERTY
@given(batches, st.sampled_from([FrameKind.BATCH, FrameKind.REPLY]))
def test_a_block_holds_the_items_of_a_frame_without_one(values: list[object], kind: FrameKind) -> None:
    """A frame with a block is read as the same items as the frame that has none."""
    n = len(values)
    frame = Frame(kind, 1, list(range(n)), bytes(n), payloads=[dump(value) for value in values])
    if kind == FrameKind.BATCH:
        frame.accepts, frame.deadlines = bytes(n), [0.0] * n

    (with_block,) = receive(FrameReader(), data_of(frame))
    with without("blocks"):
        data = data_of(frame)
    (plain,) = receive(FrameReader(), data)
    assert [seen(load(p)) for p in with_block.payloads] == [seen(load(p)) for p in plain.payloads]


@PROPERTY
@given(st.one_of(st.lists(scalars, max_size=6), batches), st.integers(1, 200))
def test_parts_in_a_block_are_those_of_a_report_without_one(values: list[object], most: int) -> None:
    """A report with a block is read as the same parts as one that has none, in whatever pieces it comes."""
    n = 1 + len(values)
    frame = Frame(FrameKind.PARTS, 1, list(range(n)), bytes(n), payloads=[b"head", *map(dump, values)])
    with without("parts_of_scalars"):
        data = data_of(frame)
    (plain,) = receive(FrameReader(), data)
    data, reader = data_of(frame), FrameReader()
    (with_block,) = [got for at in range(0, len(data), most) for got in receive(reader, data[at : at + most])]
    assert [seen(load(p)) for p in with_block.payloads[1:]] == [seen(load(p)) for p in plain.payloads[1:]]
    assert with_block.payloads[0] == plain.payloads[0] == b"head"


def test_parts_that_are_scalars_are_two_buffers() -> None:
    """However many tokens a step makes, its report is the head and one array."""
    frame = Frame(FrameKind.PARTS, 1, list(range(33)), bytes(33), payloads=[b"head", *range(32)])
    assert len(data_of(frame)) < len(
        data_of(Frame(FrameKind.PARTS, 1, frame.ids, frame.formats, payloads=[b"head"] * 33))
    )
    (read,) = receive(FrameReader(), data_of(frame))
    assert read.payloads == [b"head", *range(32)]
