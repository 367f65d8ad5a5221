"""Compressed request bodies: expanded within the limit of bodies, and within a ratio.

A small body may expand to a thousand times its size, so a server reads compressed bodies only if
its user says so.
"""

from __future__ import annotations

import importlib
import zlib
from typing import Any, Final

from carpool.engine.allowance import MOST_EXPANDED, Allowance
from carpool.errors import InvalidRequest
from carpool.http.codec import too_large

_WINDOW_BITS: Final = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_WINDOW_LOG: Final = 23  # 8 MiB: a frame says how much memory reading it takes, and HTTP allows that (RFC 9659)
_ZSTD_MODULES: Final = ("compression.zstd", "backports.zstd")  # of Python from 3.14 on, and for those before


def _zstd() -> Any:
    """Return the module that reads zstd; None if there is none."""
    for name in _ZSTD_MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def readable_codings() -> list[str]:
    """Return the codings that can be read here, as `Content-Encoding` names them."""
    return [*(coding.decode() for coding in _WINDOW_BITS), *(["zstd"] if _zstd() is not None else [])]


def check_coding(coding: bytes) -> None:
    """Raise `InvalidRequest` (415) unless bodies in a coding can be read."""
    known = readable_codings()
    if coding.decode("latin-1") not in known:
        text = f"bodies with this Content-Encoding are not read; {', '.join(known)} are"
        raise InvalidRequest(text, status=415, code="unsupported_media_type")


def expanded(body: bytes | bytearray, coding: bytes, limit: int) -> bytes:
    """Return a body as it was before it was compressed.

    Args:
        body: The compressed body.
        coding: In which way.
        limit: Bytes of the largest body.

    Raises:
        InvalidRequest: It is malformed (400), or too large, or expands too much (413).
    """
    most = min(limit, Allowance(len(body), limit=limit).nbytes)
    try:
        data, is_whole, has_more = _expanded_zstd(body, most) if coding == b"zstd" else _zlib(body, coding, most)
    except Exception as error:
        raise InvalidRequest(f"the body is not valid {coding.decode('latin-1')}: {error}") from None
    if len(data) > most:
        if most < limit:
            text = f"the body expands to more than {MOST_EXPANDED} times its size"
            raise InvalidRequest(text, status=413, code="too_large")
        raise too_large(limit)
    if not is_whole or has_more:
        raise InvalidRequest(f"the body is not valid {coding.decode('latin-1')}: it ends too early or too late")
    return data


def _zlib(body: bytes | bytearray, coding: bytes, most: int) -> tuple[bytes, bool, bool]:
    expander = zlib.decompressobj(_WINDOW_BITS[coding])
    data = expander.decompress(body, most + 1)
    return data, expander.eof, bool(expander.unused_data)


def _expanded_zstd(body: bytes | bytearray, most: int) -> tuple[bytes, bool, bool]:
    zstd = _zstd()
    expander = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
    data: bytes = expander.decompress(body, most + 1)
    return data, expander.eof, bool(expander.unused_data)
