"""Check that another implementation of the frame protocol does what `wire/frame.py` does.

It must write the same bytes, read them in whatever pieces they arrive, and refuse bytes that are
not a frame. For this there are frames of every shape here, and bytes that are almost frames.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, Protocol

from carpool.engine.wire.frame import (
    MAGIC,
    MAX_BUFFERS,
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    MAX_METRICS_BYTES,
    VERSION,
    Frame,
    FrameError,
    FrameKind,
    encode,
)
from carpool.engine.wire.payload import LARGE, SCALARS, Buffer, Payload

# The header as the docstring of wire/frame.py describes it.
_HEADER = struct.Struct("<3s B B B 2x I I Q Q d d")

PAIR = b"\1\1f\1\2\0\0\0"
"""The head of a writable array of two float32, see `wire/arrays.py`."""

FRAMES = {
    "setup": Frame(FrameKind.SETUP, ids=[0], formats=b"\0", payloads=[b"what to run"]),
    "state": Frame(FrameKind.STATE, ids=[0], formats=b"\0", payloads=[b"ready"]),
    "failed": Frame(FrameKind.FAILED, ids=[0], formats=b"\0", payloads=[b"why"]),
    "batch": Frame(
        FrameKind.BATCH, 7, [1, 2, 3], b"\0\1\2", b"\2\1\0", [1.5, inf, -0.25], [b"first", b"", b"the third item"]
    ),
    "batch of one": Frame(FrameKind.BATCH, 2**64 - 1, [2**64 - 1], b"\xff", b"\xff", [0.0], [b"x"]),
    "batch of none": Frame(FrameKind.BATCH, 1),
    "batch with several buffers": Frame(
        FrameKind.BATCH, 8, [5, 6], b"\0\0", b"\1\1", [2.0, 3.0], [[b"head", b"a" * 70, b""], b"only one"]
    ),
    "call": Frame(FrameKind.CALL, 9),
    "reply": Frame(FrameKind.REPLY, 7, [3, 1], b"\0\3", payloads=[b"result", b"report"], busy_s=0.125, waited_s=1e-9),
    "reply of nothing but empty items": Frame(FrameKind.REPLY, 7, [3, 1, 2], bytes(3), payloads=[b"", b"", b""]),
    "reply with an empty head": Frame(FrameKind.REPLY, 7, [4], b"\0", payloads=[[b"", b"b" * 40]]),
    "reply with several buffers": Frame(
        FrameKind.REPLY,
        8,
        [1, 2, 3, 4],
        bytes(4),
        payloads=[b"", [b"", b""], b"c" * 30, [b"d", b"e" * 90, b"f", b"g" * 8]],
    ),
    "batch of arrays": Frame(
        *(FrameKind.BATCH, 8, [5, 6, 4], bytes(3), b"\1\1\1", [2.0, 3.0, 4.0]), [[PAIR, b"%08d" % i] for i in range(3)]
    ),
    "reply of two arrays": Frame(FrameKind.REPLY, 8, [5, 6], bytes(2), payloads=[[PAIR, b"a" * 8], [PAIR, b"b" * 8]]),
    "reply of arrays and others": Frame(
        *(FrameKind.REPLY, 8, [5, 6, 4], bytes(3)), payloads=[[PAIR, b"a" * 8], b"other", [PAIR[:-4], b"b" * 8]]
    ),
    "batch of scalars": Frame(
        *(FrameKind.BATCH, 8, [5, 6, 4, 7, 9], bytes(5), bytes(5), [2.0, 3.0, 4.0, 5.0, 6.0]),
        [0.5, -7, "text", True, None],
    ),
    "reply of two scalars": Frame(FrameKind.REPLY, 8, [5, 6], bytes(2), payloads=[-0.0, inf]),
    "reply of many scalars": Frame(FrameKind.REPLY, 8, range(20), bytes(20), payloads=[i / 7 for i in range(20)]),
    "order": Frame(
        *(FrameKind.ORDER, 3, [0, 5, 6], b"\0\0\1", b"\0\x40\1", [inf, 1.5, inf]),
        [b"who leaves", [b"an item", b"its first part", b"the second"], b"an item"],
    ),
    "parts": Frame(
        *(FrameKind.PARTS, 3, [0, 5, 6, 7], b"\0\0\x20\3"),
        payloads=[b"what was done", b"a part", [b"a part", b"what is kept of it"], b"why it failed"],
        waited_s=0.5,
    ),
    "metrics": Frame(FrameKind.METRICS, ids=[0], formats=b"\0", payloads=[b"what a model has counted"]),
    "reply of many": Frame(
        FrameKind.REPLY, 8, range(40), bytes(40), payloads=[bytes([i]) * (i % 7) for i in range(40)]
    ),
}


class Reader(Protocol):
    """What turns received bytes into frames, as `wire.frame.FrameReader` does."""

    @property
    def idle(self) -> bool:
        """Whether no part of a frame is waiting for the rest of it."""

    def get_buffer(self) -> memoryview:
        """Return the memory into which the next bytes must be written; it is never empty."""

    def received(self, n: int) -> list[Frame]:
        """Take note of `n` bytes in this memory, and return the frames that they complete.

        Raises:
            FrameError: The bytes are not a frame.
        """


Encode = Callable[[Frame], Sequence[Buffer]]


class WireError(AssertionError):
    """An implementation breaks the protocol; the text says with which frame."""


def check_wire(encode: Encode, new_reader: Callable[[], Reader], *, examples: int = 300, seed: int = 0) -> None:
    """Check an implementation of the frame protocol.

    Frames of every kind must be written with the same bytes as `carpool.engine.wire.frame` writes.
    The reader must return the same frame wherever its bytes are cut, and return it with its last
    byte. Bytes that are not a frame must raise `FrameError` at the first byte that shows it, alone
    or behind a good frame.

    Args:
        encode: Writes a frame as buffers.
        new_reader: Makes a reader.
        examples: How many random frames to try, and how many damaged ones.
        seed: The seed of the first of these.

    Raises:
        WireError: The implementation breaks the protocol; the text says with which frame.
    """
    for name, frame in FRAMES.items():
        _check_frame(name, frame, encode, new_reader)
    _check_row(list(FRAMES.values()), new_reader)
    for name, data in HOSTILE.items():
        _check_hostile(name, data, new_reader)
    for number in range(seed, seed + examples):
        dice = random.Random(number)
        name = f"random frame (seed {number})"
        _check_frame(name, _random_frame(dice), encode, new_reader, cuts=dice.choices(range(1000), k=5))
        _check_damaged(f"damaged frame (seed {number})", dice, encode, new_reader)


# -- frames and the pieces in which their bytes arrive


def data_of(*frames: Frame) -> bytes:
    """Return the frames as they go over the socket."""
    return b"".join([bytes(part) for frame in frames for part in encode(frame)])


def header(
    magic: bytes = MAGIC,
    version: int = VERSION,
    kind: int = FrameKind.REPLY,
    items: int = 0,
    buffers: int = 0,
    batch: int = 0,
    length: int = 0,
    first: float = 0.0,
    waited_s: float = 0.0,
    block: int = 0,
) -> bytes:
    """Return a header with these fields, which need not make sense."""
    return _HEADER.pack(magic, version, kind, block, items, buffers, batch, length, first, waited_s)


def receive(reader: Reader, data: bytes, cuts: Iterable[int] = ()) -> list[Frame]:
    """Return what the reader makes of `data` when no read goes across one of the `cuts`."""
    frames: list[Frame] = []
    at = 0
    for end in [*sorted(cuts), len(data)]:
        while at < end:
            space = reader.get_buffer()
            if not len(space):
                raise WireError("the reader offers no memory for the next bytes")
            n = min(len(space), end - at)
            space[:n] = data[at : at + n]
            frames += reader.received(n)
            at += n
    return frames


def plain(frames: Iterable[Frame]) -> list[tuple[Any, ...]]:
    """Return the content of frames as plain values, whatever types the frames hold it in."""
    return [
        (
            frame.kind,
            frame.batch_id,
            list(frame.ids),
            bytes(frame.formats),
            bytes(frame.accepts),
            list(frame.deadlines),
            [_plain(payload) for payload in frame.payloads],
            frame.made_at,
            frame.busy_s,
            frame.waited_s,
        )
        for frame in frames
    ]


def _plain(payload: Payload) -> bytes | list[bytes] | tuple[type, str]:
    if type(payload) in SCALARS:
        return type(payload), repr(payload)
    return [bytes(part) for part in payload] if isinstance(payload, list) else bytes(payload)  # type: ignore[arg-type]


# -- bytes that are not a frame


def reply(lengths: list[int], counts: list[int], length: int | None = None, *, items: int | None = None) -> bytes:
    """Return the header and the table of a reply with these numbers, which need not make sense.

    Args:
        lengths: The lengths of the buffers, in bytes.
        counts: How many buffers each item has.
        length: The length of all buffers; their sum if not given.
        items: How many items there are; as many as `counts` if not given.
    """
    n, m = len(counts) if items is None else items, len(lengths)
    return (
        header(items=n, buffers=m, length=sum(lengths) if length is None else length)
        + bytes(9 * n)
        + struct.pack(f"<{m}I{len(counts)}I", *lengths, *counts)
    )


BAD_HEADERS = {
    "another magic": header(magic=b"cpm"),
    "no magic": header(magic=b"\0\0\0"),
    "upper case": header(magic=b"CPL"),
    "something else altogether": b"GET / HTTP/1.1\r\nHost: localhost:8000\r\nAccept: */*\r\n\r\n"[:48],
    "zeros": bytes(48),
    "ones": b"\xff" * 48,
    "version before ours": header(version=VERSION - 1),
    "version after ours": header(version=VERSION + 1),
    "kind 0": header(kind=0),
    "kind after the last": header(kind=max(FrameKind) + 1),
    "kind 255": header(kind=255),
    "one item too many": header(items=MAX_ITEMS + 1, buffers=MAX_ITEMS + 1),
    "items beyond measure": header(items=2**32 - 1, buffers=1),
    "one buffer too many": header(items=1, buffers=MAX_BUFFERS + 1),
    "buffers beyond measure": header(items=1, buffers=2**32 - 1),
    "one byte too many": header(items=1, buffers=1, length=MAX_FRAME_BYTES + 1),
    "metrics beyond measure": header(kind=FrameKind.METRICS, items=1, buffers=1, length=MAX_METRICS_BYTES + 1),
    "bytes beyond measure": header(items=1, buffers=1, length=2**64 - 1),
    "too many of everything": header(items=2**32 - 1, buffers=2**32 - 1, length=2**64 - 1),
}
BAD_TABLES = {
    "a byte more than its buffers": reply([4], [], 5, items=1),
    "a byte less than its buffers": reply([5], [], 4, items=1),
    "bytes without a buffer": header(items=0, buffers=0, length=1),
    "a large buffer in a short frame": reply([MAX_FRAME_BYTES], [], 10, items=1),
    "large buffers in a short frame": reply([2**32 - 1] * 100, [100], 10),
    "lengths that are right but for an overflow": reply([2**31, 2**31, 10], [3], 10),
    "a large frame of small buffers": reply([1, 2], [], MAX_FRAME_BYTES, items=2),
    "an item without a buffer": reply([], [0]),
    "an item without a buffer beside one with two": reply([1, 1, 1], [0, 3]),
    "items without buffers": reply([1], [0, 1, 0]),
    "a buffer without an item": reply([1], []),
    "a buffer that no item has": reply([1, 1, 1], [1, 1]),
    "an item with buffers that do not come": reply([1, 1, 1], [2, 2]),
    "buffers beyond measure in an item": reply([1, 1, 1], [2**32 - 1, 4]),
}


def block(head: bytes, elements: bytes, items: int = 2) -> bytes:
    """Return a reply of arrays in one block; head and elements need not make sense."""
    lengths = (len(head), len(elements))
    start = header(items=items, buffers=2, length=sum(lengths), block=1)
    return start + bytes(9 * items) + struct.pack("<2I", *lengths) + head + elements


BAD_BLOCKS = {
    "a block that is none that we know": header(items=2, buffers=2, block=3),
    "a block of no items": header(items=0, buffers=2, block=1),
    "a block of one buffer": header(items=2, buffers=1, block=1),
    "a block of three buffers": header(items=2, buffers=3, block=1),
    "a block that cannot be divided among its items": block(PAIR, b"x" * 15)[:-23],
    "a block with an endless head": block(b"\1\1f\xff" + bytes(4 * 255), b"x" * 16)[: -16 - 4 * 256],
    "a block with too few elements": block(PAIR, b"x" * 14),
    "a block with too many elements": block(PAIR, b"x" * 18),
    "a block without elements": block(b"\1\1f\1\0\0\0\0", b""),
    "a block of nothing": block(PAIR, b""),
    "a block without a head": block(b"", b"x" * 16),
    "a block with half a head": block(PAIR[:-1], b"x" * 16),
    "a block without axes": block(b"\1\1f\0", b"x" * 8),
    "a block with an axis too many": block(b"\1\1f\2\2\0\0\0", b"x" * 16),
    "a block of pickles": block(b"\x80\5N.", b"x" * 16),
    "a block of objects": block(b"\1\1O\1\2\0\0\0", b"x" * 32),
    "a block of text": block(b"\1\1U\1\2\0\0\0", b"x" * 16),
    "a block of records": block(b"\1\1V\1\2\0\0\0", b"x" * 16),
    "a block that may be written to twice": block(b"\1\2f\1\2\0\0\0", b"x" * 16),
    "a block of shapes beyond measure": block(b"\1\1f\x20" + b"\xff" * 128, b"x" * 16),
}


def scalars(data: bytes, items: int = 2) -> bytes:
    """Make a reply whose block of scalars holds these bytes."""
    start = header(items=items, buffers=1, length=len(data), block=2)
    return start + bytes(9 * items) + struct.pack("<I", len(data)) + data


BAD_SCALARS = {
    "no scalars": header(items=0, buffers=1, block=2),
    "one scalar as a block": header(items=1, buffers=1, block=2),
    "scalars in two buffers": header(items=2, buffers=2, block=2),
    "scalars in no buffer": header(items=2, buffers=0, block=2),
    **{
        f"scalars as a {kind.name}": header(kind=kind, items=2, buffers=1, block=2)
        for kind in FrameKind
        if kind not in (4, 6)
    },
    "scalars that are nothing": scalars(b""),
    "a scalar too few": scalars(b"\x91\x01"),
    "a scalar too many": scalars(b"\x93\x01\x02\x03"),
    "scalars that do not come": scalars(b"\x92\x01"),
    "scalars and something else": scalars(b"\x92\x01\x02\x03"),
    "scalars beyond measure": scalars(b"\xdd\xff\xff\xff\xff\x01\x02"),
    "scalars that are a scalar": scalars(b"\x07"),
    "scalars that are an object": scalars(b"\x82\x01\x02\x03\x04"),
    "scalars that are a pickle": scalars(b"\x80\x05K\x01."),
    "a list among scalars": scalars(b"\x92\x01\x90"),
    "a list beyond measure among scalars": scalars(b"\x92\x01\xdd\xff\xff\xff\xff"),
    "an object among scalars": scalars(b"\x92\x01\x80"),
    "bytes among scalars": scalars(b"\x92\x01\xc4\x01x"),
    "a time among scalars": scalars(b"\x92\x01\xd6\xff\x00\x00\x00\x00"),
    "an extension among scalars": scalars(b"\x92\x01\xd4\x05x"),
    "half a character among scalars": scalars(b"\x92\x01\xa1\xc3"),
    "half of a surrogate pair among scalars": scalars(b"\x92\x01\xa3\xed\xa0\xbd"),
    "a text among scalars that does not come": scalars(b"\x92\x01\xdb\xff\xff\xff\xff"),
    "a number among scalars that is longer than it needs to be": scalars(b"\x92\x01\xcc\x01"),
    "a short float among scalars": scalars(b"\x92\x01\xca\x00\x00\x00\x00"),
    "nothing that msgpack has among scalars": scalars(b"\x92\x01\xc1"),
}
HOSTILE = BAD_HEADERS | BAD_TABLES | BAD_BLOCKS | BAD_SCALARS
"""Bytes of which the last one shows that they are not a frame."""


# -- the checks


def _check_frame(
    name: str, frame: Frame, encode: Encode, new_reader: Callable[[], Reader], cuts: Sequence[int] | None = None
) -> None:
    """Check that a frame is written as here, and read when cut in two: anywhere, or at `cuts`."""
    data = data_of(frame)
    _require(b"".join(bytes(part) for part in encode(frame)) == data, f"{name} is written differently")
    for cut in range(len(data)) if cuts is None else [cut % len(data) for cut in cuts]:
        reader = new_reader()
        _require(_read(reader, data[:cut], name) == [], f"{name} comes out before its last byte")
        _require(
            plain(_read(reader, data[cut:], name)) == plain([frame]), f"{name}, cut at byte {cut}, is read wrongly"
        )
        _require(reader.idle, f"something is left over after {name}")


def _check_row(frames: list[Frame], new_reader: Callable[[], Reader]) -> None:
    """Check that frames in one stream are read, byte by byte and at once."""
    data = data_of(*frames)
    for cuts in (range(len(data)), ()):
        _require(plain(_read(new_reader(), data, "a row", cuts)) == plain(frames), "frames in a row are read wrongly")


def _check_hostile(name: str, data: bytes, new_reader: Callable[[], Reader]) -> None:
    """Check that bytes which are not a frame are refused with their last byte."""
    for before in (b"", data_of(FRAMES["batch"])):
        reader = new_reader()
        _read(reader, before + data[:-1], f"{name}, but for its last byte,")
        try:
            receive(reader, data[-1:] + b"x" * LARGE)
        except FrameError:
            continue
        raise WireError(f"{name} is taken for a frame")


def _check_damaged(name: str, dice: random.Random, encode: Encode, new_reader: Callable[[], Reader]) -> None:
    """Check that frames with changed, added or missing bytes are refused, or read as they are."""
    damaged = bytearray(data_of(*dice.choices([*FRAMES.values()], k=dice.randint(1, 3))))
    for _ in range(dice.randint(1, 3)):
        at = dice.randint(0, len(damaged))
        damaged[at : at + dice.randint(0, 2)] = dice.randbytes(dice.randint(0, 2))
    reader, at = new_reader(), 0
    try:
        for end in range(1, len(damaged) + 1):
            for frame in receive(reader, bytes(damaged[end - 1 : end])):
                written = b"".join(bytes(part) for part in encode(frame))
                _require(
                    written == _without_padding(bytes(damaged[at:end])), f"{name} is read as another frame than it is"
                )
                at = end
    except FrameError:
        pass


def _without_padding(data: bytes) -> bytes:
    """Return the bytes of a frame, with zeros for those that mean nothing."""
    return data[:6] + bytes(2) + data[8:]


def _random_frame(dice: random.Random) -> Frame:
    """Draw a frame of any kind, with items of one or several buffers."""
    kind, n = dice.choice(list(FrameKind)), dice.randint(0, 6)
    have_scalars = n > 1 and kind in (FrameKind.BATCH, FrameKind.REPLY)
    like = dice.choices([_random_payload, _random_array, _random_scalar], [6, 2, have_scalars])[0]
    frame = Frame(
        kind,
        dice.getrandbits(64),
        [dice.getrandbits(64) for _ in range(n)],
        dice.randbytes(n),
        payloads=[like(dice) for _ in range(n)],
        waited_s=dice.expovariate(1),
    )
    if kind in (FrameKind.SETUP, FrameKind.BATCH, FrameKind.ORDER):
        frame.made_at = dice.random()
    else:
        frame.busy_s = dice.random()
    if kind in (FrameKind.BATCH, FrameKind.ORDER):
        frame.accepts = dice.randbytes(n)
        frame.deadlines = [dice.choice([inf, dice.random()]) for _ in range(n)]
    return frame


def _random_payload(dice: random.Random) -> Payload:
    parts: list[Buffer] = [dice.randbytes(dice.choice([0, 1, 30, 200])) for _ in range(dice.choice([1, 1, 2, 4]))]
    return parts if len(parts) > 1 else parts[0]


def _random_array(dice: random.Random) -> Payload:
    return [PAIR, dice.randbytes(8)]


def _random_scalar(dice: random.Random) -> Payload:
    return dice.choice([dice.random(), inf, dice.getrandbits(64), -dice.getrandbits(63), "x" * 40, "", True, None])


def _read(reader: Reader, data: bytes, name: str, cuts: Iterable[int] = ()) -> list[Frame]:
    try:
        return receive(reader, data, cuts)
    except FrameError as error:
        raise WireError(f"{name} is refused: {error}") from None


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise WireError(text)
