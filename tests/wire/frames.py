"""Frames of every shape, and the pieces in which their bytes arrive."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from hypothesis import settings

from carpool.wire.frame import MAGIC, VERSION, Frame, FrameReader, Kind, encode
from carpool.wire.payload import Payload

PROPERTY = settings(max_examples=200, deadline=None, derandomize=True)

# the header as frame.py's docstring describes it
_HEADER = struct.Struct("<3s B B 3x I I Q Q d d")

INFINITY = float("inf")
FRAMES = {
    "setup": Frame(Kind.SETUP, ids=[0], formats=b"\0", payloads=[b"what to run"]),
    "state": Frame(Kind.STATE, ids=[0], formats=b"\0", payloads=[b"ready"]),
    "failed": Frame(Kind.FAILED, ids=[0], formats=b"\0", payloads=[b"why"]),
    "batch": Frame(
        Kind.BATCH, 7, [1, 2, 3], b"\0\1\2", b"\2\1\0", [1.5, INFINITY, -0.25], [b"first", b"", b"the third item"]
    ),
    "batch of one": Frame(Kind.BATCH, 2**64 - 1, [2**64 - 1], b"\xff", b"\xff", [0.0], [b"x"]),
    "batch of none": Frame(Kind.BATCH, 1),
    "batch with several buffers": Frame(
        Kind.BATCH, 8, [5, 6], b"\0\0", b"\1\1", [2.0, 3.0], [[b"head", b"a" * 70, b""], b"only one"]
    ),
    "call": Frame(Kind.CALL, 9),
    "reply": Frame(Kind.REPLY, 7, [3, 1], b"\0\3", payloads=[b"result", b"report"], busy_s=0.125, waited_s=1e-9),
    "reply of nothing but empty items": Frame(Kind.REPLY, 7, [3, 1, 2], bytes(3), payloads=[b"", b"", b""]),
    "reply with an empty head": Frame(Kind.REPLY, 7, [4], b"\0", payloads=[[b"", b"b" * 40]]),
    "reply with several buffers": Frame(
        Kind.REPLY, 8, [1, 2, 3, 4], bytes(4), payloads=[b"", [b"", b""], b"c" * 30, [b"d", b"e" * 90, b"f", b"g" * 8]]
    ),
    "reply of many": Frame(Kind.REPLY, 8, range(40), bytes(40), payloads=[bytes([i]) * (i % 7) for i in range(40)]),
}


def data_of(*frames: Frame) -> bytes:
    """The frames as they go over the socket."""
    return b"".join([bytes(part) for frame in frames for part in encode(frame)])


def header(
    magic: bytes = MAGIC,
    version: int = VERSION,
    kind: int = Kind.REPLY,
    items: int = 0,
    buffers: int = 0,
    batch: int = 0,
    length: int = 0,
    busy_s: float = 0.0,
    waited_s: float = 0.0,
) -> bytes:
    """A header, written by hand."""
    return _HEADER.pack(magic, version, kind, items, buffers, batch, length, busy_s, waited_s)


def receive(reader: FrameReader, data: bytes, cuts: Iterable[int] = ()) -> list[Frame]:
    """What the reader makes of `data` when no read goes across one of the `cuts`."""
    frames: list[Frame] = []
    at = 0
    for end in [*sorted(cuts), len(data)]:
        while at < end:
            space = reader.get_buffer()
            assert len(space) > 0
            n = min(len(space), end - at)
            space[:n] = data[at : at + n]
            frames += reader.received(n)
            at += n
    return frames


def plain(frames: Iterable[Frame]) -> list[tuple[Any, ...]]:
    """All that frames say, whatever the types that carry it."""
    return [
        (
            frame.kind,
            frame.batch,
            list(frame.ids),
            bytes(frame.formats),
            bytes(frame.accepts),
            list(frame.deadlines),
            [_plain(payload) for payload in frame.payloads],
            frame.busy_s,
            frame.waited_s,
        )
        for frame in frames
    ]


def _plain(payload: Payload) -> bytes | list[bytes]:
    return [bytes(part) for part in payload] if isinstance(payload, list) else bytes(payload)
