"""The frame of a reply to one item, read from the bytes of one read. Sans-IO.

Fast path of `frame.FrameReader` for a caller that waits for nothing else: the same reply, see
tests/wire/test_single.py. Whatever is not one whole, small and plain frame is left to the reader.
"""

from __future__ import annotations

import struct
from math import inf
from typing import Final, NamedTuple

from carpool.wire.frame import MAGIC, VERSION, FrameKind
from carpool.wire.payload import LARGE

_REPLY = struct.Struct("<3sBBBxxIIQQddQBI")
"""The header and the table of a reply with one item in one buffer; see `frame.py`."""

_HEAD_BYTES: Final = _REPLY.size
_EXPECTED: Final = (VERSION, FrameKind.REPLY.value, 0, 1, 1)


class SingleReply(NamedTuple):
    """A worker's answer to a batch of one item, which has not failed.

    Attributes:
        payload: The result.
        busy_s: How long the worker spent on it.
        waited_s: How long the worker had waited before.
    """

    payload: bytes
    busy_s: float
    waited_s: float


def open_reply(data: bytes, batch: int, id: int) -> SingleReply | None:
    """Return the answer if `data` is the one frame that answers this batch, else None.

    Args:
        data: All that was read.
        batch: The id of the batch.
        id: Of its only request.
    """
    if not _HEAD_BYTES < len(data) < LARGE:
        return None
    magic, version, kind, block, items, buffers, of_batch, length, busy_s, waited_s, of_id, outcome, n = (
        _REPLY.unpack_from(data)
    )
    if (
        magic != MAGIC
        or (version, kind, block, items, buffers) != _EXPECTED
        or of_batch != batch
        or of_id != id
        or outcome
        or not length == n == len(data) - _HEAD_BYTES
        or not (0.0 <= busy_s < inf and 0.0 <= waited_s < inf)
    ):
        return None
    return SingleReply(data[_HEAD_BYTES:], busy_s, waited_s)
