"""Frames: what is sent is received, whatever the pieces, and neither side copies what is large."""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.wire import frame as wire
from carpool.engine.wire import payload
from carpool.engine.wire.frame import MAX_ITEMS, Frame, FrameError, FrameKind, FrameReader, encode
from carpool.engine.wire.payload import LARGE, SCALARS, Buffer, Payload, dump, pack_scalars, size_of
from tests.effort import share
from tests.support.frames import FRAMES, data_of, header, plain, receive
from tests.support.properties import PROPERTY


@pytest.fixture(params=[(LARGE, wire.SCRATCH_BYTES), (LARGE, 64), (8, 64), (1, 48)], ids=str)
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where on a buffer is large, and the scratch: so small that even short frames take every way in."""
    large, scratch = request.param
    monkeypatch.setattr(wire, "LARGE", large)
    monkeypatch.setattr(wire, "SCRATCH_BYTES", scratch)


# -- pieces


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_a_frame_is_the_same_wherever_it_is_cut_in_two(frame: Frame) -> None:
    """Every kind of frame, cut anywhere, comes out whole, and nothing before its last byte."""
    data = data_of(frame)
    for cut in range(len(data)):
        reader = FrameReader()
        early = receive(reader, data[:cut])
        assert early == []
        assert plain(receive(reader, data[cut:])) == plain([frame])


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_a_frame_may_come_byte_by_byte(frame: Frame) -> None:
    """A frame that comes byte by byte comes out whole."""
    data = data_of(frame)

    assert plain(receive(FrameReader(), data, range(len(data)))) == plain([frame])


@pytest.mark.usefixtures("_sizes")
def test_frames_in_a_row_are_the_same_wherever_they_are_cut() -> None:
    """Frames in one stream that is cut in two at any place come out once and in order."""
    frames = list(FRAMES.values())
    data = data_of(*frames)
    for cut in Random(0).sample(range(len(data)), share(len(data))):  # the quick run leaves most of them out
        assert plain(receive(FrameReader(), data, [cut])) == plain(frames)


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("step", [2, 3, 7, 47, 48, 49, 63, 64, 65, 100])
def test_frames_in_a_row_come_in_small_reads(step: int) -> None:
    """Frames in one stream come out once and in order with reads of any one size."""
    frames = list(FRAMES.values()) * 2
    data = data_of(*frames)

    assert plain(receive(FrameReader(), data, range(0, len(data), step))) == plain(frames)


def test_every_frame_comes_out_with_its_last_byte() -> None:
    """A frame does not wait for what comes after it."""
    frames = list(FRAMES.values())
    ends = list(accumulate(len(data_of(frame)) for frame in frames))
    reader = FrameReader()
    data = data_of(*frames)

    got = [receive(reader, data[begin:end]) for begin, end in pairwise([0, *ends])]

    assert [plain(some) for some in got] == [plain([frame]) for frame in frames]


buffers = st.binary(max_size=100)
payloads = st.one_of(buffers, buffers, st.lists(buffers, min_size=2, max_size=4))
scalars = st.one_of(st.floats(), st.integers(-(2**63), 2**64 - 1), st.text(max_size=99), st.booleans(), st.none())
seconds = st.floats(allow_nan=False)
ids = st.integers(0, 2**64 - 1)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    """Any frame."""
    kind = draw(st.sampled_from(FrameKind))
    items = draw(st.lists(payloads, max_size=6))
    if kind in (FrameKind.BATCH, FrameKind.REPLY) and draw(st.booleans()):
        items = draw(st.lists(scalars, min_size=2, max_size=6))
    n = len(items)
    frame = Frame(
        kind,
        draw(ids),
        draw(st.lists(ids, min_size=n, max_size=n)),
        draw(st.binary(min_size=n, max_size=n)),
        payloads=items,
        waited_s=draw(seconds),
    )
    if kind in (FrameKind.SETUP, FrameKind.BATCH, FrameKind.ORDER):
        frame.made_at = draw(seconds)
    else:
        frame.busy_s = draw(seconds)
    if kind in (FrameKind.BATCH, FrameKind.ORDER):
        frame.accepts = draw(st.binary(min_size=n, max_size=n))
        frame.deadlines = draw(st.lists(seconds, min_size=n, max_size=n))
    return frame


@PROPERTY
@given(st.data(), st.sampled_from([1, 20, 100, LARGE]), st.sampled_from([48, 100, 1000, wire.SCRATCH_BYTES]))
def test_any_frames_in_any_pieces(data: st.DataObject, large: int, scratch: int) -> None:
    """Whatever frames are sent in whatever pieces come out in order, whatever counts as large and
    however small the scratch is.
    """
    sent = data.draw(st.lists(frames(), min_size=1, max_size=5))
    message = data_of(*sent)
    cuts = data.draw(st.lists(st.integers(0, len(message)), max_size=20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "LARGE", large)
        patch.setattr(wire, "SCRATCH_BYTES", scratch)

        reader = FrameReader()

        assert plain(receive(reader, message, cuts)) == plain(sent)
        assert reader.idle


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes of which no two stretches are alike."""
    return np.random.default_rng(seed).bytes(nbytes)


large_sizes = st.sampled_from([0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE, wire.SCRATCH_BYTES, 300_001])


@PROPERTY
@given(st.data(), st.lists(st.lists(large_sizes, min_size=1, max_size=4), min_size=1, max_size=4))
def test_large_buffers_in_any_pieces(data: st.DataObject, sizes: list[list[int]]) -> None:
    """Small and large buffers, side by side in an item and in neighbouring frames, come out whole
    in whatever pieces.
    """
    items = [[pattern(n, seed=10 * i + k) for k, n in enumerate(row)] for i, row in enumerate(sizes)]
    sent = [
        Frame(FrameKind.REPLY, i, [i, 0], b"\0\1", payloads=[item if len(item) > 1 else item[0], b"small"])
        for i, item in enumerate(items)
    ]
    message = data_of(*sent)
    cuts = data.draw(st.lists(st.integers(0, len(message)), max_size=12))

    assert plain(receive(FrameReader(), message, cuts)) == plain(sent)


def test_large_buffers_cut_beside_every_border() -> None:
    """Frames with large buffers come out whole when cut at the ends of header, table and each
    buffer, one byte before and one after.
    """
    row = [b"head", pattern(LARGE), b"", pattern(LARGE - 1, 1), pattern(2 * LARGE + 1, 2), b"tail"]
    frame = Frame(FrameKind.BATCH, 3, [1, 2], b"\0\0", b"\1\1", [1.0, 2.0], [row, pattern(LARGE, 3)])
    sent = [frame, FRAMES["batch"], frame]
    message = data_of(*sent)
    borders = accumulate(len(part) for part in [header(), *encode(frame)[0:1], *row, frame.payloads[1]])
    for border in [48, *borders, len(data_of(frame))]:
        for cut in (border - 1, border, border + 1):
            assert plain(receive(FrameReader(), message, [cut, cut + 1])) == plain(sent)


# -- memory


def test_a_large_buffer_is_received_into_its_own_memory() -> None:
    """The space handed out is the payload itself, exactly as long as what is missing, so nothing is copied."""
    item = pattern(2 * LARGE)
    reader = FrameReader()
    message = data_of(Frame(FrameKind.REPLY, 1, [1], b"\0", payloads=[item]))
    receive(reader, message[: -2 * LARGE + 10])

    space = reader.get_buffer()
    (frame,) = receive(reader, message[-2 * LARGE + 10 :])

    assert len(space) == 2 * LARGE - 10
    assert frame.payloads[0] is space.obj


def test_what_small_items_hold_is_only_their_own() -> None:
    """A small item is bytes of its own: keeping it does not keep its batch, and the next frame does not change it."""
    reader = FrameReader()
    first = FRAMES["reply of many"]
    kept = receive(reader, data_of(first))

    receive(reader, data_of(FRAMES["batch"], FRAMES["reply with several buffers"]))

    assert plain(kept) == plain([first])
    assert {type(payload) for payload in kept[0].payloads} == {bytes}


@PROPERTY
@given(length=st.integers(0, 9), n=st.sampled_from([1, 3, 4, 5, 256, 257]), odd=st.integers(0, 1))
def test_buffers_of_one_length_are_cut_like_others(length: int, n: int, odd: int) -> None:
    """What small items hold is the same, whether or not all of them are of one length."""
    parts = [bytes([65 + i % 26]) * length for i in range(n - 1)] + [b"x" * (length + odd)]
    reply = Frame(FrameKind.REPLY, 1, list(range(n)), bytes(n), payloads=parts)

    assert receive(FrameReader(), data_of(reply))[0].payloads == parts


def test_a_large_buffer_that_is_kept_is_not_received_into_again() -> None:
    """Any number of frames with buffers of the same size: each keeps its own content as long as it is held."""
    reader = FrameReader()
    sent = [Frame(FrameKind.REPLY, i, [i], b"\0", payloads=[pattern(LARGE, i)]) for i in range(30)]

    kept = [frame for one in sent for frame in receive(reader, data_of(one))]

    assert plain(kept) == plain(sent)


@pytest.mark.skipif(not payload._COUNTS_ARE_EXACT, reason="without the GIL nothing is used again")
def test_a_large_buffer_that_was_dropped_is_received_into_again() -> None:
    """The space for the next one still has the old bytes in it, so it has not been allocated anew."""
    reader = FrameReader()
    message = data_of(Frame(FrameKind.REPLY, 1, [1], b"\0", payloads=[b"x" * LARGE]))
    receive(reader, message)

    receive(reader, message[:-LARGE])

    assert reader.get_buffer() == b"x" * LARGE


@pytest.mark.parametrize(
    "payload", [bytes(LARGE), bytearray(LARGE), memoryview(bytes(LARGE)), np.arange(9000).data], ids=type
)
def test_a_large_payload_is_written_from_where_it_lies(payload: Any) -> None:
    """Encoding adds one buffer in front and hands on the payload's own."""
    first, *others = encode(Frame(FrameKind.REPLY, 1, [1, 2], b"\0\0", payloads=[payload, [b"head", payload]]))

    assert isinstance(first, bytes)
    assert [id(part) for part in others[::2]] == [id(payload)] * 2


@pytest.mark.parametrize("payload", [b"bytes", bytearray(b"array"), memoryview(b"view"), np.arange(9).data], ids=type)
def test_small_payloads_are_written_together(payload: Any) -> None:
    """A frame of a few small payloads is one buffer, which is written with one call."""
    (whole,) = encode(Frame(FrameKind.REPLY, 1, [1, 2], b"\0\0", payloads=[payload, [b"head", payload]]))

    assert whole.endswith(bytes(payload) + b"head" + bytes(payload))  # type: ignore[union-attr]


def test_buffers_of_wide_elements_count_in_bytes() -> None:
    """A buffer counts with its bytes, also if it is a view of wider elements."""
    array = np.arange(5, dtype=np.float64)

    (frame,) = receive(FrameReader(), data_of(Frame(FrameKind.REPLY, 1, [1], b"\0", payloads=[array.data])))

    assert frame.payloads == [array.tobytes()]


def test_an_idle_reader_has_all_its_room() -> None:
    """However much it has received before, a reader offers all its room, so that the next frame
    takes no more reads than the first.
    """
    reader = FrameReader()
    room = len(reader.get_buffer())

    receive(reader, data_of(*FRAMES.values()), [100, 1000])

    assert len(reader.get_buffer()) == room == wire.SCRATCH_BYTES


def test_a_short_rest_takes_no_read_of_its_own() -> None:
    """Where little of a frame is missing, a read has room for what follows it, too."""
    reader = FrameReader()
    frame = Frame(FrameKind.REPLY, 1, [1], b"\0", payloads=[b"x" * 2 * LARGE])
    receive(reader, data_of(frame)[:-10])

    assert len(reader.get_buffer()) > 10 + len(data_of(FRAMES["reply"]))
    assert plain(receive(reader, b"x" * 10 + data_of(FRAMES["reply"]))) == plain([frame, FRAMES["reply"]])


# -- what it says


def test_the_bytes_are_those_of_the_description() -> None:
    """A frame is written as the header, table and body that the description spells out."""
    frame = Frame(
        FrameKind.BATCH, 77, [10, 11], b"\1\2", b"\3\0", [4.0, 5.0], [[b"ab", b""], b"c"], made_at=6.0, waited_s=7.0
    )
    expected = (
        header(kind=4, items=2, buffers=3, batch=77, length=3, first=6.0, waited_s=7.0)
        + struct.pack("<QQ", 10, 11)
        + b"\1\2"
        + struct.pack("<III", 2, 0, 1)
        + struct.pack("<dd", 4.0, 5.0)
        + b"\3\0"
        + struct.pack("<II", 2, 1)
        + b"abc"
    )

    assert data_of(frame) == expected
    assert header()[:5] == b"cpl\x01\x06" and len(header()) == 48


def test_an_item_of_one_buffer_is_that_buffer() -> None:
    """A list of a single buffer arrives as the buffer: there is one way to say it."""
    (frame,) = receive(FrameReader(), data_of(Frame(FrameKind.REPLY, 1, [1], b"\0", payloads=[[b"alone"]])))

    assert frame.payloads == [b"alone"]


def test_a_table_may_be_larger_than_the_scratch() -> None:
    """A table of as many items as a frame may have is read behind a frame that is still in the
    scratch.
    """
    many = Frame(
        FrameKind.BATCH, 1, range(MAX_ITEMS), bytes(MAX_ITEMS), bytes(MAX_ITEMS), [1.0] * MAX_ITEMS, [b""] * MAX_ITEMS
    )
    many.payloads[-1] = b"last"
    sent = [FRAMES["batch"], many, FRAMES["reply"]]
    message = data_of(*sent)

    assert len(message) > 2 * wire.SCRATCH_BYTES
    assert plain(receive(FrameReader(), message)) == plain(sent)
    assert plain(receive(FrameReader(), message, range(0, len(message), 99_991))) == plain(sent)


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_a_reader_is_idle_only_between_frames(frame: Frame) -> None:
    """A reader is idle only between frames, not from a frame's first byte to its last."""
    reader = FrameReader()
    seen = [reader.idle]
    data = data_of(frame)
    for at in range(len(data)):
        receive(reader, data[at : at + 1])
        seen.append(reader.idle)

    assert seen == [True, *[False] * (len(data) - 1), True]


# -- what is not sent


@pytest.mark.parametrize(
    "frame",
    [
        Frame(FrameKind.REPLY, 1, [1, 2], b"\0\0", payloads=[b"one"]),
        Frame(FrameKind.REPLY, 1, [1], b"\0", payloads=[b"one", b"two"]),
        Frame(FrameKind.REPLY, 1, [1, 2], b"\0", payloads=[b"one", b"two"]),
        Frame(FrameKind.REPLY, 1, [1], b"\0\0", payloads=[b"one"]),
        Frame(FrameKind.BATCH, 1, [1], b"\0", b"", [1.0], [b"one"]),
        Frame(FrameKind.BATCH, 1, [1], b"\0", b"\0\0", [1.0], [b"one"]),
        Frame(FrameKind.BATCH, 1, [1], b"\0", b"\0", [], [b"one"]),
        Frame(FrameKind.BATCH, 1, [1], b"\0", b"\0", [1.0, 2.0], [b"one"]),
        Frame(FrameKind.REPLY, 1, [1], b"\0", payloads=[[]]),
        Frame(FrameKind.REPLY, 1, [1, 2], b"\0\0", payloads=[[], [b"one", b"two"]]),
    ],
    ids=[
        "too few payloads",
        "too many payloads",
        "too few formats",
        "too many formats",
        "too few accepts",
        "too many accepts",
        "too few deadlines",
        "too many deadlines",
        "no buffer",
        "no buffer, made up for by the next item",
    ],
)
def test_a_frame_whose_parts_do_not_match_is_not_sent(frame: Frame) -> None:
    """A frame in which an item lacks an id, a format or a buffer, or in a batch a deadline or what
    is accepted, is not sent.
    """
    with pytest.raises(FrameError, match="ids, "):
        encode(frame)


@pytest.mark.parametrize(("limit", "least"), [("MAX_FRAME_BYTES", 11), ("MAX_ITEMS", 2), ("MAX_BUFFERS", 4)])
def test_a_frame_at_a_limit_is_sent_and_one_beyond_is_not(
    monkeypatch: pytest.MonkeyPatch, limit: str, least: int
) -> None:
    """A frame at a limit of bytes, items or buffers is sent and taken by the other side, and one
    beyond it is not sent.
    """
    frame = Frame(FrameKind.REPLY, 1, [1, 2], b"\0\0", payloads=[[b"12345", b"", b"6"], b"78901"])

    monkeypatch.setattr(wire, limit, least)
    assert plain(receive(FrameReader(wire.MAX_FRAME_BYTES), data_of(frame))) == plain([frame])

    monkeypatch.setattr(wire, limit, least - 1)
    with pytest.raises(FrameError, match="a message of 2 items, 4 buffers and 11 bytes is over the limit"):
        encode(frame)


# -- too much


@PROPERTY
@given(st.lists(st.one_of(scalars, payloads), min_size=1, max_size=40), st.integers(1, 200))
def test_scalars_go_in_pieces_too(items: list[Any], limit: int) -> None:
    """A piece of several items is never too long, whatever they are; what arrives is what was there."""
    items = [
        dump(item) if type(item) is str else item for item in items
    ]  # as `size_of` is about those that `dump` makes
    n = len(items)
    frame = Frame(FrameKind.REPLY, 7, list(range(n)), bytes(n), payloads=items)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_FRAME_BYTES", limit)
        pieces = wire.in_pieces(frame)
        for piece in pieces:
            if len(piece.ids) > 1:
                encode(piece)
    back = [payload for piece in pieces for payload in receive(FrameReader(), data_of(piece))[0].payloads]
    assert [seen(payload) for payload in back] == [seen(item) for item in items]


def seen(payload: Payload) -> bytes | list[Buffer]:
    """What a payload says, packed or not."""
    return pack_scalars(payload) if type(payload) in SCALARS else payload  # type: ignore[return-value]


def test_the_longest_blocks_of_scalars_are_no_longer_than_they_count() -> None:
    """The head of the array is counted with its items, however many they are; else a piece could be too long."""
    for n in (2, 15, 16, 65_535, MAX_ITEMS):
        for scalar in (0.5, 2**64 - 1, -(2**63), "", "x" * 31, "x" * 32, "x" * 256, *["x" * (LARGE - 1)] * (n < 20)):
            assert len(pack_scalars([scalar] * n)) <= n * size_of(scalar)


@pytest.mark.fault("F81")
@PROPERTY
@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=20), st.integers(1, 100))
def test_pieces_are_the_frame_s_items_within_the_limits(sizes: list[list[int]], limit: int) -> None:
    """Pieces are the frame's items in their order, as few as the limits allow; one that is over the
    limit by itself has a piece of its own.
    """
    n = len(sizes)
    payloads: list[Any] = [[bytes(size) for size in parts] if len(parts) > 1 else bytes(parts[0]) for parts in sizes]
    frame = Frame(
        *(FrameKind.BATCH, 7, list(range(n)), bytes(range(n)), bytes(reversed(range(n))), [1.5 * i for i in range(n)]),
        *(payloads, 1.0, 2.0, 3.0),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_FRAME_BYTES", limit)
        pieces = wire.in_pieces(frame)
        for piece in pieces:
            if len(piece.ids) > 1 or sum(sizes[piece.ids[0]]) <= limit:
                encode(piece)
    assert [id for piece in pieces for id in piece.ids] == frame.ids
    for name in ("formats", "accepts"):
        assert b"".join(getattr(piece, name) for piece in pieces) == getattr(frame, name)
    for name in ("deadlines", "payloads"):
        assert [x for piece in pieces for x in getattr(piece, name)] == getattr(frame, name)
    for one, other in pairwise(pieces):
        assert sum(map(sum, [sizes[id] for id in one.ids])) + sum(sizes[other.ids[0]]) > limit
    assert {(piece.kind, piece.batch_id) for piece in pieces} == {(FrameKind.BATCH, 7)}
    assert [piece.made_at for piece in pieces] == [0.0] * (len(pieces) - 1) + [1.0]
    assert [piece.busy_s for piece in pieces] == [0.0] * (len(pieces) - 1) + [2.0]
    assert [piece.waited_s for piece in pieces] == [0.0] * (len(pieces) - 1) + [3.0]


@pytest.mark.fault("F81")
@PROPERTY
@given(st.data(), st.sampled_from([48, 64, 300]), st.integers(1, 7), st.integers(0, 7))
def test_payloads_for_which_there_is_no_memory_are_read_and_dropped(
    data: st.DataObject, scratch: int, fails_from: int, fails_to: int
) -> None:
    """If memory runs out at any buffer that frame comes with its last byte and says so, and all
    others are whole.
    """
    payloads: list[Any] = [bytes([i + 1]) * size for i, size in enumerate((3, 100, 20, 0, 90, 5))]
    frames = [
        Frame(FrameKind.REPLY, batch, list(range(6)), bytes(6), payloads=payloads, busy_s=1.0, waited_s=2.0)
        for batch in (1, 2, 3)
    ]
    stream = data_of(*frames)
    cuts = data.draw(st.sets(st.integers(0, len(stream)), max_size=40))
    asked = 0

    class Full:
        """Has none for some of the buffers."""

        def buffer(self, nbytes: int) -> bytearray:
            nonlocal asked
            asked += 1
            if fails_from <= asked <= fails_to:
                raise MemoryError
            return bytearray(nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "LARGE", 64)
        patch.setattr(wire, "SCRATCH_BYTES", scratch)
        reader = FrameReader()
        reader._memory = Full()  # type: ignore[assignment]
        came = receive(reader, stream, sorted(cuts))

    assert [(frame.batch_id, list(frame.ids), frame.busy_s) for frame in came] == [
        (b, [*range(6)], 1.0) for b in (1, 2, 3)
    ]
    whole = [frame for frame in came if not frame.no_memory]
    assert plain(whole) == plain([frames[frame.batch_id - 1] for frame in whole])
    assert all(frame.payloads == () for frame in came if frame.no_memory)
    assert any(frame.no_memory for frame in came) == (fails_from <= min(fails_to, asked))
    assert reader.idle


def test_scalars_for_which_there_is_no_memory_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that came in full and cannot be opened: its frame says so, and the next one is whole."""

    def none_left(data: bytes, count: int) -> None:
        raise MemoryError

    frame = Frame(FrameKind.REPLY, 7, [1, 2], bytes(2), payloads=["x" * 60_000, "y" * 60_000])
    reader = FrameReader()
    with monkeypatch.context() as patch:
        patch.setattr(wire, "unpack_scalars", none_left)
        (dropped,) = receive(reader, data_of(frame))

    assert (dropped.no_memory, dropped.payloads, dropped.ids) == (True, (), [1, 2])
    assert plain(receive(reader, data_of(frame))) == plain([frame])
