"""Frames on the socket between the coordinator and a worker: a batch of items as bytes, and back. Sans-IO.

    header   magic "cpl", version, kind, what block the items are, if any, counts, batch id, body length, two times
             (48 bytes, little endian)
    table    ids u64; in a batch deadlines f64 and accepts u8; formats u8; lengths of the buffers u32; and, where
             not every item has just one, how many buffers each has u32
    body     the buffers, one after the other

Items that are arrays of one shape and dtype are one block: two buffers, which are their common head and the elements of
all (`arrays.py`), and no counts in the table. So are plain scalars in a batch or a reply: one buffer (`scalars.py`).

A whole batch is one frame, so one write and one read each way. The reader hands out the memory to receive into
(`get_buffer`) and is told how much came (`received`), as in `asyncio.BufferedProtocol`; a blocking socket uses it just
as well. Buffers of `LARGE` bytes or more are received straight into memory of their own; the small ones of a frame are
copied out once. Nothing is allocated before the header has been checked against the limits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from typing import Final

from carpool.wire.arrays import LONGEST_HEAD, Block, block_of
from carpool.wire.memory import Memory
from carpool.wire.payload import LARGE, Buffer, Payload, parts_of, size_of
from carpool.wire.scalars import Scalars, are_scalars, pack, unpack

MAGIC: Final = b"cpl"
VERSION: Final = 1
MAX_FRAME_BYTES: Final = 2**30
MAX_ITEMS: Final = 2**16
MAX_BUFFERS: Final = 2**18
SCRATCH_BYTES: Final = 256 * 1024

_HEADER = struct.Struct("<3sBBBxxIIQQdd")

# What block the items of a frame are.
_NO_BLOCK: Final = 0
_ARRAYS: Final = 1
_SCALARS: Final = 2
_EACH: Final[tuple[int, Sequence[Buffer]]] = (_NO_BLOCK, ())


class FrameKind(IntEnum):
    """What a frame is for."""

    SETUP = 1  # coordinator -> worker: what to run; one item
    STATE = 2  # worker -> coordinator: loading, warming, ready; one item, and with ready the warm-up's timings
    FAILED = 3  # worker -> coordinator: could not load; one item with the reason
    BATCH = 4  # coordinator -> worker: run these
    CALL = 5  # worker -> coordinator: user code was entered once more for this batch; no items
    REPLY = 6  # worker -> coordinator: results; `formats` hold their outcomes
    TROUBLE = 7  # worker -> coordinator: what happened to a batch besides its results, before them; one item


_KINDS: dict[int, FrameKind] = {kind.value: kind for kind in FrameKind}
_HAVE_SCALARS = frozenset({FrameKind.BATCH, FrameKind.REPLY})


class FrameError(Exception):
    """The bytes are no frame of ours, or one beyond the limits. The connection is of no use any more."""


@dataclass(slots=True)
class Frame:
    """One message.

    Attributes:
        kind: what it is for.
        batch: the batch it belongs to, 0 if none.
        ids: the items' request ids; the other per-item sequences are in the same order.
        formats: a byte per item: in a batch how it is encoded, in a reply its outcome.
        accepts: in a batch, a byte per item: how the caller wants the result encoded.
        deadlines: in a batch, when nobody waits for the item any more.
        payloads: the items.
        busy_s: in a reply, seconds spent on the batch.
        waited_s: in a reply, seconds the worker had waited for the batch.
        dropped: there was no memory to receive the payloads, which have been read and thrown away.
        causes: in a reply that crosses no process, the exceptions for which items failed, by place; it is not encoded.
    """

    kind: FrameKind
    batch: int = 0
    ids: Sequence[int] = ()
    formats: bytes = b""
    accepts: bytes = b""
    deadlines: Sequence[float] = ()
    payloads: Sequence[Payload] = ()
    busy_s: float = 0.0
    waited_s: float = 0.0
    dropped: bool = False
    causes: dict[int, BaseException] | None = None


@lru_cache(maxsize=4096)
def _table(kind: FrameKind, items: int, buffers: int, has_counts: bool) -> struct.Struct:
    routed = f"{items}d{items}s" if kind == FrameKind.BATCH else ""
    counts = f"{items}I" if has_counts else ""
    return struct.Struct(f"<{items}Q{items}s{buffers}I{routed}{counts}")


def encode(frame: Frame) -> list[Buffer]:
    """The frame as buffers to be written one after the other; payload buffers are not copied.

    Raises:
        FrameError: it is larger than `MAX_FRAME_BYTES`, its items' parts are not equally many, or an item is no buffer.
    """
    kind, n = frame.kind, len(frame.ids)
    counts: Sequence[int]
    parts: Sequence[Buffer]
    payloads = frame.payloads
    is_none = n < 2 or (type(payloads) is list and payloads and type(payloads[0]) is bytes)
    block, parts = _EACH if is_none else _joined(payloads)
    if block:
        counts, has_counts = range(len(payloads)), False
    else:
        counts, parts = parts_of(payloads)
        has_counts = n != len(parts)
    m = len(parts)
    if (
        not n == len(counts) == len(frame.formats)
        or (kind == FrameKind.BATCH and not n == len(frame.accepts) == len(frame.deadlines))
        or (not block and parts is not payloads and 0 in counts)
    ):
        raise FrameError(
            f"{n} ids, {len(counts)} payloads of {m} buffers, {len(frame.formats)} formats,"
            f" {len(frame.accepts)} accepts and {len(frame.deadlines)} deadlines do not match"
        )
    lengths = [part.nbytes if type(part) is memoryview else len(part) for part in parts]
    length = sum(lengths)
    if length > MAX_FRAME_BYTES or n > MAX_ITEMS or m > MAX_BUFFERS:
        raise FrameError(
            f"a message of {n} items, {m} buffers and {length} bytes is over the limit of"
            f" {MAX_ITEMS} items, {MAX_BUFFERS} buffers and {MAX_FRAME_BYTES} bytes"
        )
    header = _HEADER.pack(MAGIC, VERSION, kind, block, n, m, frame.batch, length, frame.busy_s, frame.waited_s)
    routed = (*frame.deadlines, frame.accepts) if kind == FrameKind.BATCH else ()
    table = _table(kind, n, m, has_counts).pack(
        *frame.ids, frame.formats, *lengths, *routed, *(counts if has_counts else ())
    )
    return [header + table, *parts]


def _joined(payloads: Sequence[Payload]) -> tuple[int, Sequence[Buffer]]:
    """What block the payloads are, and its buffers."""
    if type(payloads) is Block or (payloads and type(payloads[0]) is list):
        block = block_of(payloads, MAX_FRAME_BYTES)
        if block is not None:
            return _ARRAYS, [block.head, block.elements]
    elif are_scalars(payloads):
        return _SCALARS, [pack(payloads)]
    return _EACH


def in_pieces(frame: Frame) -> list[Frame]:
    """The frame's items in as few frames as their order and the limits allow, each with the same batch.

    An item that is over the limits by itself has a frame of its own. The times are those of all; the last one has them.
    """
    pieces: list[Frame] = []
    begin = nbytes = buffers = 0
    for i, payload in enumerate(frame.payloads):
        size = size_of(payload)
        count = len(payload) if type(payload) is list else 1
        full = nbytes + size > MAX_FRAME_BYTES or buffers + count > MAX_BUFFERS or i - begin == MAX_ITEMS
        if full and i > begin:
            pieces.append(_piece(frame, begin, i))
            begin, nbytes, buffers = i, 0, 0
        nbytes += size
        buffers += count
    last = _piece(frame, begin, len(frame.ids))
    last.busy_s, last.waited_s = frame.busy_s, frame.waited_s
    return [*pieces, last]


def _piece(frame: Frame, begin: int, end: int) -> Frame:
    return Frame(
        frame.kind,
        frame.batch,
        frame.ids[begin:end],
        frame.formats[begin:end],
        frame.accepts[begin:end],
        frame.deadlines[begin:end],
        frame.payloads[begin:end],
    )


class FrameReader:
    """Turns received bytes into frames, whatever the pieces they come in."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._memory = Memory()
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = 0  # first byte in the scratch that has not been used
        self._end = 0  # behind the last received byte in the scratch
        self._body: _Body | _Dropped | None = None  # the frame whose body is being received

    @property
    def idle(self) -> bool:
        """Whether no frame is half received."""
        return self._body is None and self._start == self._end

    def get_buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        if type(self._body) is _Body and self._body.wants_own_memory:
            return self._body.rest
        if self._end == 0:
            return self._view
        if self._end == len(self._scratch):
            self._make_room()
        return self._view[self._end :]

    def received(self, n: int) -> list[Frame]:
        """`n` bytes have come into the buffer handed out last; returns the frames that they completed.

        Raises:
            FrameError: the bytes are no frame, or one over the limits.
        """
        body = self._body
        if type(body) is _Body and body.wants_own_memory:
            try:
                body.advance(n)
            except MemoryError:
                self._body = _Dropped(body.header, body.missing)
        else:
            self._end += n
        frames: list[Frame] = []
        while self._start < self._end or self._body is not None:
            frame = self._open() if self._body is None else self._fill(self._body)
            if frame is None:
                if self._body is None or self._start == self._end:
                    break
                continue
            frames.append(frame)
        if self._start == self._end:
            self._start = self._end = 0
        return frames

    def _fill(self, body: _Body | _Dropped) -> Frame | None:
        """Go on with a body; the frame once it is complete."""
        missing = body.missing
        try:
            body.fill(self._view[self._start : self._end])
        except MemoryError:
            self._start += missing - body.missing
            self._body = _Dropped(body.header, body.missing)
            return self._fill(self._body)
        self._start += missing - body.missing
        if not body.complete:
            return None
        self._body = None
        return body.frame

    def _open(self) -> Frame | None:
        """Read header and table once they are there in full, and the body if it is small and there as well."""
        at, have = self._start, self._end - self._start
        if have < _HEADER.size:
            return None
        magic, version, kind, block, n, m, batch, length, busy_s, waited_s = _HEADER.unpack_from(self._scratch, at)
        if magic != MAGIC or version != VERSION or kind not in _KINDS or block > _SCALARS:
            raise FrameError(f"no carpool frame of version {VERSION}: {magic!r}, version {version}, kind {kind}")
        if block and not (m == 2 <= n if block == _ARRAYS else m == 1 < n and kind in _HAVE_SCALARS):
            raise FrameError(f"a block of {n} items in {m} buffers of a frame of kind {kind}")
        if n > MAX_ITEMS or m > MAX_BUFFERS or length > self._max_bytes:
            raise FrameError(f"a frame of {n} items, {m} buffers and {length} bytes is over the limit")
        has_counts = n != m and not block
        table = _table(_KINDS[kind], n, m, has_counts)
        need = _HEADER.size + table.size
        if have < need:
            if need > len(self._scratch) - at:
                self._make_room(need)
            return None
        fields = table.unpack_from(self._scratch, at + _HEADER.size)
        lengths = fields[n + 1 : n + 1 + m]
        counts = fields[len(fields) - n :] if has_counts else ()
        if sum(lengths) != length or (has_counts and (sum(counts) != m or 0 in counts)):
            raise FrameError("the frame's table does not add up to its length")
        if block == _ARRAYS and not (lengths[0] <= LONGEST_HEAD and lengths[1] % n == 0):
            raise FrameError(f"a block of {n} items in buffers of {lengths[0]} and {lengths[1]} bytes")
        frame = Frame(_KINDS[kind], batch, list(fields[:n]), fields[n], busy_s=busy_s, waited_s=waited_s)
        if kind == FrameKind.BATCH:
            frame.deadlines, frame.accepts = fields[n + 1 + m : 2 * n + 1 + m], fields[2 * n + 1 + m]
        self._start = at = at + need
        if have - need < length or length >= LARGE:
            try:
                self._body = _Body(frame, counts, lengths, self._memory, block)
            except MemoryError:
                self._body = _Dropped(frame, length)
            return self._fill(self._body)
        parts = _split(self._view[at : at + length], lengths)
        frame.payloads = _block(block, parts, n) if block else _group(parts, counts)
        self._start = at + length
        return frame

    def _make_room(self, need: int = 0) -> None:
        """Move what is unread to the front of the scratch; grow it where one table needs more."""
        unread = bytes(self._view[self._start : self._end])
        if need > len(self._scratch):
            self._scratch = bytearray(need + SCRATCH_BYTES)
            self._view = memoryview(self._scratch)
        self._scratch[: len(unread)] = unread
        self._start, self._end = 0, len(unread)


class _Body:
    """A frame's buffers while they are being received: runs of small ones together, large ones each by itself."""

    __slots__ = (
        *("_at", "_block", "_counts", "_lengths", "_memory", "_parts", "_run", "_shared"),
        *("header", "missing", "rest"),
    )

    def __init__(self, frame: Frame, counts: Sequence[int], lengths: Sequence[int], memory: Memory, block: int) -> None:
        self.header = frame
        self._block = block
        self.missing = sum(lengths)  # bytes
        self._memory = memory
        self._counts = counts
        self._lengths = lengths
        self._parts: list[Buffer] = []
        self._at = 0  # the first buffer that has not been begun
        self._run: Sequence[int] = ()  # lengths of the small buffers that share the present piece of memory
        self._shared = memoryview(b"")
        self.rest = memoryview(b"")  # what is still to be filled of the present piece
        self._begin()

    @property
    def complete(self) -> bool:
        return not self.rest and self._at == len(self._lengths)

    @property
    def frame(self) -> Frame:
        """The frame, once it is complete. Raises FrameError if its block is none."""
        header, parts, block = self.header, self._parts, self._block
        try:
            header.payloads = _block(block, parts, len(header.ids)) if block else _group(parts, self._counts)
        except MemoryError:
            header.dropped = True
        return header

    @property
    def wants_own_memory(self) -> bool:
        """Whether so much is missing that receiving straight into place beats the way through the scratch."""
        return len(self.rest) >= LARGE

    def fill(self, data: memoryview) -> None:
        """Copy received bytes into place, as many as belong here."""
        used = 0
        while self.rest and used < len(data):
            n = min(len(self.rest), len(data) - used)
            self.rest[:n] = data[used : used + n]
            used += n
            self.advance(n)

    def advance(self, n: int) -> None:
        """`n` bytes are in place. Raises MemoryError if there is none for those that follow."""
        self.missing -= n
        self.rest = self.rest[n:]
        if not self.rest:
            self._begin()

    def _begin(self) -> None:
        """Close the piece that has been filled and begin the next one that is not empty."""
        lengths = self._lengths
        while True:
            if self._run:
                self._parts += _split(self._shared, self._run)
                self._run = ()
            if self._at == len(lengths):
                return
            first = self._at
            if lengths[first] >= LARGE:
                own = self._memory.buffer(lengths[first])
                self._at += 1
                self._parts.append(own)
                self.rest = memoryview(own)
                return
            while self._at < len(lengths) and lengths[self._at] < LARGE:
                self._at += 1
            self._run = lengths[first : self._at]
            self.rest = self._shared = memoryview(bytearray(sum(self._run)))
            if self.rest:
                return


class _Dropped:
    """What is still to come of a frame for whose payloads there is no memory."""

    __slots__ = ("header", "missing")

    def __init__(self, frame: Frame, missing: int) -> None:
        self.header = frame
        self.missing = missing

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def frame(self) -> Frame:
        """The frame without its payloads, once they have been read."""
        self.header.payloads = ()
        self.header.dropped = True
        return self.header

    def fill(self, data: memoryview) -> None:
        """Pass over received bytes, as many as belong here."""
        self.missing -= min(self.missing, len(data))


def _split(shared: bytes | memoryview, lengths: Sequence[int]) -> list[Buffer]:
    """The small buffers that lie one after the other in `shared`, each as bytes of its own."""
    whole = bytes(shared)
    ends = list(accumulate(lengths))
    return [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _block(block: int, parts: list[Buffer], n: int) -> Block | Scalars:
    """The items' payloads where they are one block. Raises FrameError if they are not."""
    try:
        return unpack(parts[0], n) if block == _SCALARS else Block(parts[0], parts[1], n)
    except ValueError as error:
        raise FrameError(f"a block that is none: {error}") from None


def _group(parts: list[Buffer], counts: Sequence[int]) -> Sequence[Payload]:
    """The items' payloads: one buffer, or the list of an item's several. No counts: each has just one."""
    if not counts:
        return parts
    payloads: list[Payload] = []
    at = 0
    for count in counts:
        payloads.append(parts[at] if count == 1 else parts[at : at + count])
        at += count
    return payloads
