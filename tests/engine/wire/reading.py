"""Frames as bytes, and bytes as frames: what the tests of quick and slow ways compare."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from carpool.engine.wire.frame import MAX_FRAME_BYTES, Frame, FrameError, FrameReader, encode

IDS = st.integers(0, 2**64 - 1)
BYTES = st.integers(0, 255).map(lambda byte: bytes([byte]))


def written(frame: Frame) -> bytes | None:
    """A frame's bytes; None if it is refused."""
    try:
        return b"".join(encode(frame))
    except FrameError:
        return None


def read(data: bytes, cuts: list[int], max_bytes: int = MAX_FRAME_BYTES) -> Any:
    """The frames in these bytes, which come in pieces, or what is said of them."""
    reader, found, begin = FrameReader(max_bytes), [], 0
    for end in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        while begin < end:
            buffer = reader.get_buffer()
            n = min(end - begin, len(buffer))
            buffer[:n] = data[begin : begin + n]
            begin += n
            try:
                found += reader.received(n)
            except FrameError as error:
                return str(error)
    return [(frame, [type(part) for part in frame.payloads]) for frame in found], reader.idle
