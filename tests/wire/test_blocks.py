"""A batch that is written as one block is read as the items that it would be without a block."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from carpool.testing.wire import data_of, receive
from carpool.wire import frame as wire
from carpool.wire.frame import Frame, FrameKind, FrameReader
from carpool.wire.payload import dump, load
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
    with mock.patch.object(wire, "_as_block", return_value=wire._NOT_A_BLOCK):
        data = data_of(frame)
    (without,) = receive(FrameReader(), data)
    assert [seen(load(p)) for p in with_block.payloads] == [seen(load(p)) for p in without.payloads]
