"""`check_wire` on our own frames, and on implementations with one thing wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from carpool.engine.wire.frame import MAX_FRAME_BYTES, Frame, FrameError, FrameKind, FrameReader, encode
from carpool.engine.wire.payload import Buffer
from tests.support.frames import WireError, check_wire


def test_ours_is_sound() -> None:
    """Our own wire format passes its check: all frames, all cuts, and all that is no frame."""
    check_wire(encode, FrameReader)


def swaps_ids(frame: Frame) -> Sequence[Buffer]:
    """Writes the ids the other way round."""
    return encode(replace(frame, ids=frame.ids[::-1]))


class Eager(FrameReader):
    """Hands out a frame before all of it is there."""

    def received(self, n: int) -> list[Frame]:
        return super().received(n) or ([] if self.idle else [Frame(FrameKind.REPLY)])


class Forgets(FrameReader):
    """Only the first frame of each read."""

    def received(self, n: int) -> list[Frame]:
        return super().received(n)[:1]


class Trusts(FrameReader):
    """Waits for what it was promised, however much that is."""

    def received(self, n: int) -> list[Frame]:
        try:
            return super().received(n)
        except FrameError:
            return []


class Misreads(FrameReader):
    """Says that no worker was ever busy."""

    def received(self, n: int) -> list[Frame]:
        frames = super().received(n)
        for frame in frames:
            frame.busy_s = 0.0
        return frames


class Timid(FrameReader):
    """A reader that refuses what is allowed."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(100)


@pytest.mark.parametrize(
    ("write", "reader", "why"),
    [
        (swaps_ids, FrameReader, "is written differently"),
        (encode, Eager, "before its last byte"),
        (encode, Forgets, "in a row"),
        (encode, Trusts, "is taken for a frame"),
        (encode, Misreads, "is read wrongly"),
        (encode, Timid, "is refused"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_broken_is_found(write: object, reader: type[FrameReader], why: str) -> None:
    """A wire format that is broken is found, and the frame is named."""
    with pytest.raises(WireError, match=why):
        check_wire(write, reader)  # type: ignore[arg-type]
