"""Compresses answers for clients that accept it, and expands request bodies, where settings say so.

Bodies are expanded within the limit of bodies, and within a ratio. A small body may expand to a
thousand times its size, so a server reads compressed bodies only if its user says so.
"""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from carpool.engine.allowance import MOST_EXPANDED, Allowance
from carpool.errors import InvalidRequest
from carpool.http.codec import too_large
from carpool.http.exchange import HttpResponse

_COMPRESSIBLE = re.compile(
    rb"text/.*|application/(json|.*\+json|msgpack|x-msgpack|vnd\.msgpack|x-ndjson|javascript).*|image/svg.*"
)
_UNWANTED = re.compile(rb";\s*q\s*=\s*0(\.0*)?\s*$")
_LEVEL = 1  # of small answers the loop does it, and all connections wait for it
_GZIP = 16 + zlib.MAX_WBITS
_VARY = (b"vary", b"accept-encoding")

Encoder = Callable[[Any], bytes]


class Compression:
    """Compresses answers.

    Args:
        codings: `zstd` and `gzip`, those that may be used in the order of preference.

    Raises:
        ValueError: There is no such coding, or none that this installation has.
    """

    def __init__(self, codings: Sequence[str], from_bytes: int) -> None:
        self._from_bytes = from_bytes
        self._encoders = [(coding.encode(), _encoder(coding)) for coding in codings]

    def compressed(self, response: HttpResponse, accepted: bytes) -> HttpResponse:
        """Return an answer in the best coding that its client accepts, or as it is."""
        body, headers = response.body, response.headers
        if len(body) < self._from_bytes or not _COMPRESSIBLE.fullmatch(response.content_type):
            return response
        if any(header == _VARY or header[0] == b"content-encoding" for header in headers):  # it has been here
            return response
        wanted = _wanted(accepted)
        for coding, encode in self._encoders:
            if coding in wanted or (b"*" in wanted):
                smaller = encode(body)
                if len(smaller) < len(body):
                    headers += ((b"content-encoding", coding), _VARY)
                    return response._replace(body=smaller, headers=headers)
        return response._replace(headers=(*headers, _VARY))


def new_compression(setting: str, from_bytes: int) -> Compression | None:
    """Return the compression of a setting such as `zstd,gzip`, or None. Raises ValueError."""
    codings = [coding.strip() for coding in setting.split(",") if coding.strip()]
    return Compression(codings, from_bytes) if codings else None


def _wanted(accepted: bytes) -> frozenset[bytes]:
    entries = [entry.strip().lower() for entry in accepted.split(b",")]
    return frozenset(entry.partition(b";")[0].strip() for entry in entries if entry and not _UNWANTED.search(entry))


def _encoder(coding: str) -> Encoder:
    if coding == "gzip":
        return _gzip
    if coding == "zstd":
        try:
            import zstandard
        except ImportError:
            raise ValueError("compress=zstd needs the package zstandard: pip install 'carpool[compress]'") from None
        compress: Encoder = zstandard.ZstdCompressor(level=_LEVEL).compress
        return compress
    raise ValueError(f"compress must be zstd, gzip or zstd,gzip, not {coding!r}")


def _gzip(body: Any) -> bytes:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    return packer.compress(body) + packer.flush()


_WINDOW_BITS: Final = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_WINDOW_LOG: Final = 23  # 8 MiB: a frame says how much memory reading it takes, and HTTP allows that (RFC 9659)
_ZSTD_MODULES: Final = ("compression.zstd", "backports.zstd")  # of Python from 3.14 on, and for those before


def _zstd() -> Any:
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
