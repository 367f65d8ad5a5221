"""What is no frame is refused as soon as that can be seen, and before anything of its size is allocated."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.engine.wire import frame as wire
from carpool.engine.wire.frame import (
    MAX_BUFFERS,
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    FrameError,
    FrameKind,
    FrameReader,
    encode,
)
from carpool.engine.wire.payload import LARGE
from tests.support.frames import FRAMES, HOSTILE, data_of, header, plain, receive
from tests.support.peaks import forget_peaks, peak_of
from tests.support.properties import PROPERTY


def whole(data: bytes) -> list[int]:
    return []


def byte_by_byte(data: bytes) -> list[int]:
    return list(range(len(data)))


@pytest.mark.fault("F50")
@pytest.mark.parametrize("cuts", [whole, byte_by_byte])
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_it_is_refused_with_the_byte_that_shows_it(data: bytes, cuts: Callable[[bytes], list[int]]) -> None:
    """What is no frame is refused as soon as its header or table is there in full, and not a byte
    of a body later, also in pieces.
    """
    assert receive(FrameReader(), data[:-1], cuts(data)[:-1]) == []

    with pytest.raises(FrameError):
        receive(FrameReader(), data, cuts(data))


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_it_is_refused_behind_a_sound_frame_and_with_more_to_come(data: bytes) -> None:
    """What is no frame is refused wherever in the stream it comes, and whatever follows."""
    reader = FrameReader()
    assert plain(receive(reader, data_of(FRAMES["batch"]))) == plain([FRAMES["batch"]])

    with pytest.raises(FrameError):
        receive(reader, data_of(FRAMES["reply"]) + data + b"x" * LARGE)


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_nothing_is_allocated_for_it(data: bytes) -> None:
    """Refusing what is no frame takes a few kilobytes, whatever size it speaks of."""
    reader = FrameReader()

    assert most_allocated(reader, data) < 50_000


def most_allocated(reader: FrameReader, data: bytes) -> int:
    """Bytes allocated at the most while `data` is received and refused."""
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            receive(reader, data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_longest_table_takes_a_few_megabytes() -> None:
    """The room for a table is bounded: as many items and buffers as are allowed take a few
    megabytes.
    """
    data = header(kind=FrameKind.BATCH, items=MAX_ITEMS, buffers=MAX_BUFFERS, length=MAX_FRAME_BYTES)
    reader = FrameReader()
    receive(reader, data)

    assert 2_000_000 < len(reader.get_buffer()) < 4_000_000


def test_memory_is_filled_by_what_comes_and_not_by_what_is_announced() -> None:
    """Buffers of a gigabyte in all, small ones and large ones, take no memory before their bytes
    come.
    """
    small = LARGE - 1
    n = MAX_FRAME_BYTES // small
    data = header(items=1, buffers=n, length=n * small) + struct.pack(f"<QB{n}II", 1, 0, *[small] * n, n)
    large = header(items=1, buffers=1, length=MAX_FRAME_BYTES) + struct.pack("<QBI", 1, 0, MAX_FRAME_BYTES)
    readers = [FrameReader(), FrameReader()]
    before = forget_peaks([])["self"]
    assert receive(readers[0], data) == receive(readers[1], large) == []
    assert [reader.opening for reader in readers] == [FrameKind.REPLY] * 2
    assert peak_of("self") - before < 32 * 2**20


def test_a_length_at_the_limit_is_no_fault() -> None:
    """A reader takes what `encode` writes, up to the limit of length, and may be told to take less."""
    assert receive(FrameReader(), header(items=1, buffers=1, length=MAX_FRAME_BYTES)) == []

    assert receive(FrameReader(100), header(items=1, buffers=1, length=100)) == []
    with pytest.raises(FrameError, match="101 bytes is over the limit"):
        receive(FrameReader(100), header(items=1, buffers=1, length=101))


def test_counts_at_the_limit_are_no_fault() -> None:
    """Frames with exactly as many items and buffers as are allowed are taken."""
    assert receive(FrameReader(), header(items=MAX_ITEMS, buffers=MAX_BUFFERS)) == []


@pytest.mark.fault("F50")
@PROPERTY
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
@example(b"cpl" + bytes(60), [])
def test_noise_is_refused_or_not_yet_a_frame(data: bytes, cuts: list[int]) -> None:
    """Random bytes are an error of ours from the 48th byte on, silence before, and nothing else."""
    reader = FrameReader()
    if len(data) < 48:
        assert receive(reader, data, [cut for cut in cuts if cut < len(data)]) == []
    else:
        with pytest.raises(FrameError):
            receive(reader, data, [cut for cut in cuts if cut < len(data)])


small = st.integers(0, 4)
numbers = st.one_of(small, small, small, st.integers(0, 2**32 - 1))


@PROPERTY
@given(st.sampled_from(FrameKind), numbers, numbers, numbers, st.lists(numbers, max_size=20), st.binary(max_size=50))
def test_noise_behind_a_header_is_refused_or_means_what_it_says(
    kind: FrameKind, items: int, buffers: int, length: int, table: list[int], rest: bytes
) -> None:
    """Any bytes behind a header of ours with any counts are frames that encode to those bytes
    again, or our error.
    """
    data = header(kind=kind, items=items, buffers=buffers, length=length)
    data += struct.pack(f"<{len(table)}I", *table) + rest

    assert_honest(data)


@pytest.mark.fault("F50")
@PROPERTY
@given(st.data())
def test_a_damaged_frame_is_refused_or_means_what_it_says(data: st.DataObject) -> None:
    """Sound frames with bytes changed, put in or left out are never another error than ours, and
    never a frame that was not sent.
    """
    damaged = bytearray(data_of(*data.draw(st.lists(st.sampled_from([*FRAMES.values()]), min_size=1, max_size=3))))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))

    assert_honest(bytes(damaged))


def assert_honest(data: bytes) -> None:
    """Whatever the reader accepts says again what was received, byte for byte; else it raises our error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "LARGE", 16)
        patch.setattr(wire, "SCRATCH_BYTES", 64)
        reader = FrameReader(max_bytes=10_000)
        at = 0
        try:
            for end in range(1, len(data) + 1):
                for frame in receive(reader, data[end - 1 : end]):
                    assert b"".join(encode(frame)) == without_padding(data[at:end])
                    at = end
        except FrameError:
            return
        assert reader.idle == (at == len(data))


def without_padding(data: bytes) -> bytes:
    """A frame's bytes with zeros for those that say nothing."""
    return data[:6] + bytes(2) + data[8:]
