"""Frames that are one small block of scalars are written and read the quick way: the same bytes and frames."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from carpool.engine.fast_paths import without
from carpool.engine.wire.frame import Frame, FrameKind
from carpool.engine.wire.payload import LARGE, Scalars
from tests.effort import examples
from tests.engine.wire.reading import BYTES, IDS, read, written

SCALARS = st.one_of(
    st.lists(st.floats(allow_nan=False), max_size=20),
    st.lists(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(0, 1), st.text(max_size=5)),
        max_size=4,
    ),
    st.sampled_from([["x" * n, "y"] for n in (LARGE - 8, LARGE - 7, LARGE - 6, LARGE - 5, LARGE)]),
)
KINDS = st.sampled_from([FrameKind.REPLY, FrameKind.REPLY, FrameKind.BATCH, FrameKind.PARTS, FrameKind.ORDER])


@st.composite
def of_scalars(draw: st.DrawFn) -> Frame:
    """A frame of scalars; now and then one of its per-item sequences is too short or too long."""
    payloads: list[Any] = draw(SCALARS)
    n = len(payloads)
    sizes = st.sampled_from([n] * 8 + [max(n - 1, 0), n + 1])
    ids = draw(st.lists(IDS, min_size=(size := draw(sizes)), max_size=size))
    formats = draw(BYTES) * draw(sizes)
    kind = draw(KINDS)
    frame = Frame(kind, draw(IDS), ids, formats, busy_s=draw(st.floats(0, 9)), waited_s=draw(st.floats(0, 9)))
    if kind in (FrameKind.BATCH, FrameKind.ORDER):
        frame.accepts, frame.deadlines = draw(BYTES) * draw(sizes), [draw(st.floats(0, 9))] * draw(sizes)
        frame.made_at = draw(st.floats(0, 9))
    frame.payloads = Scalars(payloads) if draw(st.booleans()) else payloads
    return frame


@examples(300)
@given(of_scalars())
def test_scalars_are_written_as_ever(frame: Frame) -> None:
    """A frame of scalars is written as the same bytes either way, or refused either way."""
    with without("frames_of_scalars"):
        expected = written(frame)

    assert written(frame) == expected


@examples(150)
@given(of_scalars(), of_scalars(), st.lists(st.integers(0, 10**6), max_size=3), st.integers(0, 10**6), st.binary())
def test_scalars_are_read_as_ever(first: Frame, second: Frame, cuts: list[int], at: int, noise: bytes) -> None:
    """Frames of scalars are read as the same frames either way, in whatever pieces they come, and
    are refused with the same words where some of their bytes are wrong.
    """
    data = b"".join([written(frame) or b"" for frame in (first, second)])
    at %= len(data) + 1
    for stream in (data, data[:at] + noise + data[at + len(noise) :]):
        with without("frames_of_scalars"):
            expected = repr(read(stream, cuts))  # in which NaN is NaN

        assert repr(read(stream, cuts)) == expected


def test_a_wrong_byte_is_as_wrong_as_ever() -> None:
    """Wherever a byte is wrong, the frame is read as the same one either way, or refused with the same words."""
    for kind in (FrameKind.BATCH, FrameKind.REPLY):
        data = written(Frame(kind, 7, [1, 2, 3], bytes(3), bytes(3), [9.0] * 3, Scalars([0.5, 7, "x"]), 1.0, 2.0))
        assert data is not None
        for at in range(len(data)):
            wrong = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            with without("frames_of_scalars"):
                expected = repr(read(wrong, []))  # in which NaN is NaN

            assert repr(read(wrong, [])) == expected


@examples(100)
@given(of_scalars(), st.integers(0, 200))
@example(Frame(FrameKind.REPLY, 7, [1, 2], bytes(2), payloads=[0.5, 0.5]), 18)
def test_scalars_over_the_limit_are_refused_as_ever(frame: Frame, max_bytes: int) -> None:
    """A body that is longer than the reader takes is refused with the same words either way."""
    data = written(frame) or b""
    with without("frames_of_scalars"):
        expected = read(data, [], max_bytes)

    assert read(data, [], max_bytes) == expected
