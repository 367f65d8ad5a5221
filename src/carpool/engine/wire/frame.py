"""Frames on the socket between a service and a worker: batches of items as bytes. Sans-IO.

    header   magic "cpl", version, kind of frame, kind of block, number of items, number of buffers,
             batch id, length of the body, two times (48 bytes, little endian): of a setup, a batch
             or an order when it was made, of others how long the worker was busy; how long the
             worker had waited
    table    ids u64; formats u8; lengths of the buffers u32; in a batch or an order deadlines f64
             and accepts u8; and, unless each item has exactly one buffer, how many buffers each
             has u32
    body     the buffers, one after the other

Items that are arrays of one shape and dtype form a block of two buffers, which are their common
head and the elements of all of them (`arrays.py`), with no counts in the table. Plain scalars in a
batch or a reply form a block of one buffer (`payload.py`); those behind the first item of a report
on a step, which has a buffer of its own, form a block of a second one.

The reader hands out the memory to receive into (`get_buffer`) and takes the number of bytes that
came (`received`), as in `asyncio.BufferedProtocol`; a blocking socket can use it as well. Buffers
of `LARGE` bytes or more are received straight into memory of their own; the small ones of a frame
are copied out once. Nothing is allocated before the header has been checked against the limits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from math import inf
from typing import Final

import msgspec

from carpool.engine.fast_paths import fast_path
from carpool.engine.wire.arrays import LONGEST_HEAD, Block, block_of
from carpool.engine.wire.payload import (
    LARGE,
    SCALARS,
    Buffer,
    Memory,
    Payload,
    Scalars,
    are_scalars,
    pack_scalars,
    parts_of,
    size_of,
    uncleared,
    unpack_scalars,
)

MAGIC: Final = b"cpl"
VERSION: Final = 1
MAX_FRAME_BYTES: Final = 2**30
MAX_METRICS_BYTES: Final = 2**20  # a frame of metrics is kept as long as its worker lives
MAX_ITEMS: Final = 2**16
MAX_BUFFERS: Final = 2**18
SCRATCH_BYTES: Final = 256 * 1024

_HEADER = struct.Struct("<3sBBBxxIIQQdd")

# The tables of a batch (kind 4) and of a reply (kind 6) with one item in one buffer, as most lone
# calls have them.
_TABLE_OF_ONE = {kind: struct.Struct(table) for kind, table in ((4, "<Q1sId1s"), (6, "<Q1sI"))}

# The kinds of blocks that the items of a frame can form.
_NO_BLOCK: Final = 0
_ARRAYS: Final = 1
_SCALARS: Final = 2
_SCALARS_BEHIND: Final = 3  # the first item
_NOT_A_BLOCK: Final[tuple[int, Sequence[Buffer]]] = (_NO_BLOCK, ())


class FrameKind(IntEnum):
    SETUP = 1  # service -> worker: what to run; one item
    STATE = 2  # worker -> service: loading, warming or ready, and then the warm-up's timings
    FAILED = 3  # worker -> service: the model could not be loaded; one item with the reason
    BATCH = 4  # service -> worker: items to run
    CALL = 5  # worker -> service: the model is called once more for this batch; no items
    REPLY = 6  # worker -> service: results; `formats` holds their outcomes
    TROUBLE = 7  # worker -> service: what else happened to a batch, sent before its results
    ORDER = 8  # service -> worker: who joins its running set, leaves it or pauses (`order.py`)
    PARTS = 9  # worker -> service: what a step has made; `formats` says of each whether more comes
    METRICS = 10  # worker -> service: the metrics of its model's own (`own_metrics.py`); one item


# The header and the table of a reply with one item in one buffer, which begins like any other such
# reply.
_GOOD_REPLY = struct.Struct("<16sQQddQBI")
_GOOD_REPLY_BEGINS = _HEADER.pack(MAGIC, VERSION, FrameKind.REPLY, _NO_BLOCK, 1, 1, 0, 0, 0.0, 0.0)[:16]

_KINDS: dict[int, FrameKind] = {kind.value: kind for kind in FrameKind}
_HAVE_SCALARS = frozenset({FrameKind.BATCH, FrameKind.REPLY})
_ROUTED = frozenset({FrameKind.BATCH, FrameKind.ORDER})
"""Frames whose items have a deadline, and an encoding in which their callers want the results."""
_TIMED = _ROUTED | {FrameKind.SETUP}
"""Frames that say when they were made."""


class FrameError(Exception):
    """The bytes are not a frame of carpool's, or one over the limits: the connection is lost."""


class Frame(msgspec.Struct):
    """One message.

    Attributes:
        batch_id: The id of the batch it belongs to; 0 if it belongs to none. Of orders and parts,
            the number of the order.
        ids: The items' request ids; the other per-item sequences are in the same order.
        formats: A byte for each item: in a batch or an order its encoding, in a reply its outcome,
            and of a part whether more comes.
        accepts: In a batch or an order, a byte for each item: the encoding in which the caller
            wants the result.
        deadlines: In a batch or an order, the time for each item after which nobody waits for it.
        made_at: Of a setup, a batch or an order, when it was made, by the clock of the service,
            which its deadlines are by, too.
        busy_s: In a reply, seconds that the worker spent on the batch.
        waited_s: In a reply, seconds that the worker had waited for the batch.
        no_memory: Whether the payloads have been thrown away because there was no memory to receive
            them.
        causes: In a reply within one process, the exceptions for which items failed, by position;
            not encoded.
    """

    kind: FrameKind
    batch_id: int = 0
    ids: Sequence[int] = ()
    formats: bytes = b""
    accepts: bytes = b""
    deadlines: Sequence[float] = ()
    payloads: Sequence[Payload] = ()
    made_at: float = 0.0
    busy_s: float = 0.0
    waited_s: float = 0.0
    no_memory: bool = False
    causes: dict[int, BaseException] | None = None


_MANY: Final = 4  # buffers
_MOST_CUT: Final = 256  # buffers, since what cuts them takes 32 bytes for each


@lru_cache(maxsize=4096)
def _table(kind: FrameKind, items: int, buffers: int, has_counts: bool) -> struct.Struct:
    routed = f"{items}d{items}s" if kind in _ROUTED else ""
    counts = f"{items}I" if has_counts else ""
    return struct.Struct(f"<{items}Q{items}s{buffers}I{routed}{counts}")


@lru_cache(maxsize=64)
def _cut(length: int, n: int) -> struct.Struct:
    """Return what cuts `n` buffers of one length out of their memory, in one call."""
    return struct.Struct(f"{length}s" * n)


def encode(frame: Frame) -> list[Buffer]:
    """Return the frame as buffers to be written one after the other; only small payload buffers are
    copied.

    The special shapes come first: scalars of a batch or a reply, one item in one buffer, a report
    on a step, items of one buffer of bytes each, a block.

    Raises:
        FrameError: It is over a limit, its per-item sequences differ in length, or an item is not a
            buffer.
    """
    payloads = frame.payloads
    if type(payloads) is Scalars:
        together = _encode_scalars(frame, payloads)
        if together is not None:
            return [together]
    kind, n = frame.kind, len(frame.ids)
    counts: Sequence[int]
    buffers: Sequence[Buffer]
    if n == 1 == len(payloads):
        one = _encode_one(frame, payloads[0])
        if one is not None:
            return [one]
    are_bytes = False
    if n < 2:
        block, buffers = _NOT_A_BLOCK
    elif kind == FrameKind.PARTS:
        block, buffers = _as_block_behind(payloads)
    elif type(payloads) is list and payloads and type(payloads[0]) is bytes:
        block, buffers = _NOT_A_BLOCK
        if are_bytes := set(map(type, payloads)) == {bytes}:
            buffers = payloads
    else:
        block, buffers = _as_block(payloads)
    if are_bytes or block:
        counts, has_counts = range(len(payloads)), False
    else:
        counts, buffers = parts_of(payloads)
        has_counts = n != len(buffers)
    m = len(buffers)
    if (
        not n == len(counts) == len(frame.formats)
        or (kind in _ROUTED and not n == len(frame.accepts) == len(frame.deadlines))
        or (not block and buffers is not payloads and 0 in counts)
    ):
        raise FrameError(
            f"the parts of a message do not match: {n} ids, {len(counts)} payloads of {m} buffers,"
            f" {len(frame.formats)} formats, {len(frame.accepts)} accepts and {len(frame.deadlines)} deadlines"
        )
    if not are_bytes and (m < _MANY or memoryview in map(type, buffers)):
        lengths = [buffer.nbytes if type(buffer) is memoryview else len(buffer) for buffer in buffers]
    else:
        lengths = list(map(len, buffers))
    length = sum(lengths)
    most = MAX_METRICS_BYTES if kind == FrameKind.METRICS else MAX_FRAME_BYTES
    if length > most or n > MAX_ITEMS or m > MAX_BUFFERS:
        raise _over_limit(n, m, length, most)
    first = frame.made_at if kind in _TIMED else frame.busy_s
    header = _HEADER.pack(MAGIC, VERSION, kind, block, n, m, frame.batch_id, length, first, frame.waited_s)
    routed = (*frame.deadlines, frame.accepts) if kind in _ROUTED else ()
    table = _table(kind, n, m, has_counts).pack(
        *frame.ids, frame.formats, *lengths, *routed, *(counts if has_counts else ())
    )
    if length < LARGE:
        return [b"".join((header, table, *buffers))]  # to copy little is quicker than to write several buffers
    return [header + table, *buffers]


@fast_path("frames_of_one")
def _encode_one(frame: Frame, payload: Payload) -> bytes | None:
    """Return the frame of one small item as bytes; None if it takes more than one buffer.

    Fast path of the rest of `encode`: the same bytes, see tests/engine/wire/test_single.py.
    """
    kind: type = type(payload)
    if kind in SCALARS:
        payload = pack_scalars(payload)
    elif kind is not bytes:
        return None
    length = len(payload)  # type: ignore[arg-type]
    table = _TABLE_OF_ONE.get(frame.kind)
    if table is None or length >= LARGE or length > MAX_FRAME_BYTES or len(frame.formats) != 1:
        return None
    is_reply = frame.kind == FrameKind.REPLY
    first = frame.busy_s if is_reply else frame.made_at
    header = _HEADER.pack(*(MAGIC, VERSION, frame.kind, _NO_BLOCK, 1, 1, frame.batch_id, length, first, frame.waited_s))
    if is_reply:
        return header + table.pack(frame.ids[0], frame.formats, length) + payload  # type: ignore[operator]
    if not len(frame.deadlines) == 1 == len(frame.accepts):
        return None
    return header + table.pack(frame.ids[0], frame.formats, length, frame.deadlines[0], frame.accepts) + payload  # type: ignore[operator]


def open_reply(data: bytes, id: int) -> tuple[bytes, float, float] | None:
    """Return the result, `busy_s` and `waited_s` if `data` is the whole frame of a good answer to a
    batch of one request; None for anything else.

    A part of the fast path `lent_worker`: the same reply as that of `FrameReader`, see
    tests/engine/wire/test_single.py.
    """
    length = len(data) - _GOOD_REPLY.size
    if not 0 < length < LARGE - _GOOD_REPLY.size:
        return None
    begins, of_batch, in_all, busy_s, waited_s, of_id, outcome, n = _GOOD_REPLY.unpack_from(data)
    if begins != _GOOD_REPLY_BEGINS or outcome or not of_batch == of_id == id or not length == n == in_all:
        return None
    if not (0.0 <= busy_s < inf and 0.0 <= waited_s < inf):
        return None
    return data[_GOOD_REPLY.size :], busy_s, waited_s


@fast_path("frames_of_scalars")
def _encode_scalars(frame: Frame, payloads: Scalars) -> bytes | None:
    """Return a reply that is one small block of scalars as bytes; None if it is another frame.

    Fast path of the rest of `encode`: the same bytes, see tests/engine/wire/test_scalar_frames.py.
    """
    kind, ids, formats = frame.kind, frame.ids, frame.formats
    n = len(ids)
    if kind != FrameKind.REPLY or not 1 < n == len(payloads) == len(formats) <= MAX_ITEMS:
        return None
    body = pack_scalars(payloads)
    length = len(body)
    if length >= LARGE or length > MAX_FRAME_BYTES:
        return None
    header = _HEADER.pack(MAGIC, VERSION, kind, _SCALARS, n, 1, frame.batch_id, length, frame.busy_s, frame.waited_s)
    return header + _table(kind, n, 1, False).pack(*ids, formats, length) + body


@fast_path("blocks", declined=_NOT_A_BLOCK)
def _as_block(payloads: Sequence[Payload]) -> tuple[int, Sequence[Buffer]]:
    """Return the payloads as a block: its kind, and its buffers; no block if they are not alike.

    Fast path of `parts_of` and, at the other end, of reading items one by one: the same items, see
    tests/engine/wire/test_blocks.py.
    """
    if type(payloads) is Block or (payloads and type(payloads[0]) is list):
        block = block_of(payloads, MAX_FRAME_BYTES)
        if block is not None:
            return _ARRAYS, [block.head, block.elements]
    elif are_scalars(payloads):
        return _SCALARS, [pack_scalars(payloads)]
    return _NOT_A_BLOCK


@fast_path("parts_of_scalars", declined=_NOT_A_BLOCK)
def _as_block_behind(payloads: Sequence[Payload]) -> tuple[int, Sequence[Buffer]]:
    """Return the payloads behind the first one as a block of scalars; no block if they are not.

    Fast path of `parts_of` and, at the other end, of reading parts one by one: the same parts, see
    tests/engine/wire/test_blocks.py.
    """
    if len(payloads) > 1 and type(payloads[1]) in SCALARS and type(payloads[0]) is bytes:
        values = payloads[1:]
        if SCALARS.issuperset(map(type, values)):
            return _SCALARS_BEHIND, [payloads[0], pack_scalars(values)]
    return _NOT_A_BLOCK


def _over_limit(items: int, buffers: int, nbytes: int, max_bytes: int) -> FrameError:
    return FrameError(
        f"a message of {items} items, {buffers} buffers and {nbytes} bytes is over the limit of"
        f" {MAX_ITEMS} items, {MAX_BUFFERS} buffers and {max_bytes} bytes"
    )


def in_pieces(frame: Frame) -> list[Frame]:
    """Return the frame's items in as few frames as their order and the limits allow, all with the
    same batch.

    An item that is over the limits by itself has a frame of its own. The times are those of the
    whole frame; the last piece has them.
    """
    pieces: list[Frame] = []
    begin = nbytes = buffers = 0
    for i, payload in enumerate(frame.payloads):
        size = size_of(payload)
        count = len(payload) if type(payload) is list else 1
        is_full = nbytes + size > MAX_FRAME_BYTES or buffers + count > MAX_BUFFERS or i - begin == MAX_ITEMS
        if is_full and i > begin:
            pieces.append(_piece(frame, begin, i))
            begin, nbytes, buffers = i, 0, 0
        nbytes += size
        buffers += count
    last = _piece(frame, begin, len(frame.ids))
    last.made_at, last.busy_s, last.waited_s = frame.made_at, frame.busy_s, frame.waited_s
    return [*pieces, last]


def _piece(frame: Frame, begin: int, end: int) -> Frame:
    return Frame(
        frame.kind,
        frame.batch_id,
        frame.ids[begin:end],
        frame.formats[begin:end],
        frame.accepts[begin:end],
        frame.deadlines[begin:end],
        frame.payloads[begin:end],
    )


class FrameReader:
    """Turns received bytes into frames, whose bodies are at most `max_bytes` long."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._memory = Memory()
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = 0  # the first unread byte in the scratch
        self._end = 0  # the end of the received bytes in the scratch
        self._body: _Body | None = None  # the frame whose body is being received

    @property
    def idle(self) -> bool:
        return self._body is None and self._start == self._end

    @property
    def opening(self) -> FrameKind | None:
        return None if self._body is None else self._body.header.kind

    def get_buffer(self) -> memoryview:
        """Return the memory where the next bytes belong; it is never empty."""
        body = self._body
        if body is not None and body.wants_own_memory:
            return body.rest
        if self._end == 0:
            return self._view
        if self._end == len(self._scratch):
            self._make_room()
        return self._view[self._end :]

    def received(self, n: int) -> list[Frame]:
        """Take note of `n` bytes in the last buffer, and return the frames that they completed.

        Raises:
            FrameError: The bytes are not a frame, or one over the limits.
        """
        body = self._body
        frames: list[Frame] = []
        if body is None:
            self._end += n
            frame = self._open()
            if frame is not None:
                frames.append(frame)
                if self._start == self._end:
                    self._start = self._end = 0
                    return frames
            elif self._body is None:
                return frames
        elif body.wants_own_memory:
            body.advance(n)
        else:
            self._end += n
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

    def _fill(self, body: _Body) -> Frame | None:
        missing = body.missing
        body.fill(self._view[self._start : self._end])
        self._start += missing - body.missing
        if body.missing:
            return None
        self._body = None
        return body.frame

    def _open(self) -> Frame | None:
        """Read header and table once they are complete, and the body too if it is small and
        complete.

        Returns:
            The frame if it is complete; None if more bytes are needed.
        """
        at, have = self._start, self._end - self._start
        if have < _HEADER.size:
            return None
        magic, version, kind, block, n, m, batch, length, first, waited_s = _HEADER.unpack_from(self._scratch, at)
        if magic != MAGIC or version != VERSION or kind not in _KINDS or block > _SCALARS_BEHIND:
            raise FrameError(
                f"the bytes are not a carpool frame of version {VERSION}: they begin with {magic!r}, version {version},"
                f" kind {kind}, block {block}"
            )
        if block == _SCALARS and kind in _HAVE_SCALARS and m == 1 < n <= MAX_ITEMS and length < LARGE:
            frame = self._open_scalars(_KINDS[kind], n, batch, length, first, waited_s)
            if frame is not None:
                return frame
        if block and not _can_be_block(kind, block, n, m):
            raise FrameError(f"a frame of kind {kind} cannot have a block of {n} items in {m} buffers")
        most = MAX_METRICS_BYTES if kind == FrameKind.METRICS else self._max_bytes
        if n > MAX_ITEMS or m > MAX_BUFFERS or length > most:
            raise _over_limit(n, m, length, most)
        if n == 1 == m and length < LARGE and not block:
            frame = self._open_one(kind, batch, length, first, waited_s)
            if frame is not None:
                return frame
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
            raise FrameError("the lengths in a frame's table do not add up to the length of its body")
        if block == _ARRAYS and not (lengths[0] <= LONGEST_HEAD and lengths[1] % n == 0):
            raise FrameError(f"{n} arrays cannot lie in buffers of {lengths[0]} and {lengths[1]} bytes")
        frame = Frame(_KINDS[kind], batch, list(fields[:n]), fields[n], waited_s=waited_s)
        if kind in _TIMED:
            frame.made_at = first
        else:
            frame.busy_s = first
        if kind in _ROUTED:
            frame.deadlines, frame.accepts = fields[n + 1 + m : 2 * n + 1 + m], fields[2 * n + 1 + m]
        self._start = at = at + need
        if have - need < length or length >= LARGE:
            self._body = _Body(frame, counts, lengths, self._memory, block)
            return self._fill(self._body)
        parts = _split(self._view[at : at + length], lengths)
        frame.payloads = _open_block(block, parts, n) if block else group(parts, counts)
        self._start = at + length
        return frame

    @fast_path("frames_of_one")
    def _open_one(self, kind: int, batch: int, length: int, first: float, waited_s: float) -> Frame | None:
        """Read the frame of one item in one buffer; None if it is not complete, or not plain.

        Fast path of the rest of `_open`: the same frame, see tests/engine/wire/test_single.py.
        """
        table, at = _TABLE_OF_ONE.get(kind), self._start + _HEADER.size
        if table is None or self._end - at < table.size + length:
            return None
        id, formats, n, *routed = table.unpack_from(self._scratch, at)
        if n != length:
            return None
        at += table.size
        self._start = at + length
        frame = Frame(_KINDS[kind], batch, [id], formats)
        frame.payloads = [bytes(self._view[at : at + length])]
        frame.waited_s = waited_s
        if routed:
            deadline, frame.accepts = routed
            frame.deadlines, frame.made_at = (deadline,), first
        else:
            frame.busy_s = first
        return frame

    @fast_path("frames_of_scalars")
    def _open_scalars(
        self, kind: FrameKind, n: int, batch: int, length: int, first: float, waited_s: float
    ) -> Frame | None:
        """Read the frame of a small block of scalars; None if it is not complete, or not in order.

        Fast path of the rest of `_open`: the same frame (tests/engine/wire/test_scalar_frames.py).
        """
        table, at = _table(kind, n, 1, False), self._start + _HEADER.size
        body = at + table.size
        if self._end - body < length or length > self._max_bytes:
            return None
        fields = table.unpack_from(self._scratch, at)
        if fields[n + 1] != length:
            return None
        try:
            payloads = unpack_scalars(bytes(self._view[body : body + length]), n)
        except ValueError:
            return None
        self._start = body + length
        ids, formats = list(fields[:n]), fields[n]
        if kind == FrameKind.BATCH:
            return Frame(kind, batch, ids, formats, fields[-1], fields[n + 2 : -1], payloads, first, 0.0, waited_s)
        return Frame(kind, batch, ids, formats, b"", (), payloads, 0.0, first, waited_s)

    def _make_room(self, need: int = 0) -> None:
        unread = bytes(self._view[self._start : self._end])
        if need > len(self._scratch):
            self._scratch = bytearray(need + SCRATCH_BYTES)
            self._view = memoryview(self._scratch)
        self._scratch[: len(unread)] = unread
        self._start, self._end = 0, len(unread)


class _Body:
    """A frame's buffers while they are being received: small ones in runs, large ones each by
    itself.
    """

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
        self._at = 0  # the first buffer that no byte has been received for
        self._run: Sequence[int] = ()  # lengths of the small buffers in the present piece of memory
        self._shared = memoryview(b"")
        self.rest = memoryview(b"")  # the part of the present piece that is still to be filled
        self._begin()

    @property
    def frame(self) -> Frame:
        header, parts, block = self.header, self._parts, self._block
        if header.no_memory:
            return header
        try:
            header.payloads = _open_block(block, parts, len(header.ids)) if block else group(parts, self._counts)
        except MemoryError:
            header.no_memory = True
        return header

    @property
    def wants_own_memory(self) -> bool:
        """Report whether receiving straight into place is faster than through the scratch, as much
        is missing.
        """
        return len(self.rest) >= LARGE

    def fill(self, data: memoryview) -> None:
        if self.header.no_memory:
            self.missing -= min(self.missing, len(data))
            return
        used = 0
        while self.rest and used < len(data):
            n = min(len(self.rest), len(data) - used)
            self.rest[:n] = data[used : used + n]
            used += n
            self.advance(n)

    def advance(self, n: int) -> None:
        self.missing -= n
        self.rest = self.rest[n:]
        if not self.rest:
            self._begin()

    def _begin(self) -> None:
        try:
            self._begin_piece()
        except MemoryError:
            self.header.no_memory = True
            self._parts, self.rest, self._shared = [], memoryview(b""), memoryview(b"")

    def _begin_piece(self) -> None:
        """Begin the next piece that is not empty. Raises MemoryError."""
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
            self.rest = self._shared = memoryview(uncleared(None, sum(self._run)))
            if self.rest:
                return


def _split(shared: bytes | memoryview, lengths: Sequence[int]) -> list[Buffer]:
    """Return the small buffers in `shared`, each as bytes of its own.

    Many of one length are cut in one call, which takes a tenth of the time: the same buffers, see
    tests/engine/wire/test_frame.py.
    """
    n = len(lengths)
    if n < 2:
        return [bytes(shared)] * n
    if _MANY <= n <= _MOST_CUT and lengths.count(lengths[0]) == n:
        return list(_cut(lengths[0], n).unpack(shared))
    return list(struct.Struct("%ds" * n % tuple(lengths)).unpack(shared))


def _can_be_block(kind: int, block: int, n: int, m: int) -> bool:
    if block == _SCALARS:
        return m == 1 < n and kind in _HAVE_SCALARS
    return m == 2 <= n and (block == _ARRAYS or kind == FrameKind.PARTS)


def _open_block(block: int, parts: list[Buffer], n: int) -> Sequence[Payload]:
    """Return the payloads of the items in a block. Raises FrameError if it is none."""
    try:
        if block == _SCALARS_BEHIND:
            return [parts[0], *unpack_scalars(parts[1], n - 1)]
        return unpack_scalars(parts[0], n) if block == _SCALARS else Block(parts[0], parts[1], n)
    except ValueError as error:
        raise FrameError(f"a block of {n} items cannot be read: {error}") from None


def group(parts: list[Buffer], counts: Sequence[int]) -> Sequence[Payload]:
    """Return the payload of each item: its buffer, or a list if it has several. No counts mean one
    each.
    """
    if not counts:
        return parts
    payloads: list[Payload] = []
    at = 0
    for count in counts:
        payloads.append(parts[at] if count == 1 else parts[at : at + count])
        at += count
    return payloads
