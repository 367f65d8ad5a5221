"""Compresses answers for clients that accept it, where the server is told to."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

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
        from_bytes: The size of the smallest answer that is compressed.

    Raises:
        ValueError: There is no such coding, or none that this installation has.
    """

    def __init__(self, codings: Sequence[str], from_bytes: int) -> None:
        self._from_bytes = from_bytes
        self._encoders = [(coding.encode(), _encoder(coding)) for coding in codings]

    def compressed(self, response: HttpResponse, accepted: bytes) -> HttpResponse:
        """Return an answer in the best coding that its client accepts, or as it is.

        Args:
            response: The answer.
            accepted: The client's `Accept-Encoding`; empty if it has sent none.
        """
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
    """Return what a setting such as `zstd,gzip` asks for, or None. Raises ValueError."""
    codings = [coding.strip() for coding in setting.split(",") if coding.strip()]
    return Compression(codings, from_bytes) if codings else None


def _wanted(accepted: bytes) -> frozenset[bytes]:
    """Return the codings that a header accepts."""
    entries = [entry.strip().lower() for entry in accepted.split(b",")]
    return frozenset(entry.partition(b";")[0].strip() for entry in entries if entry and not _UNWANTED.search(entry))


def _encoder(coding: str) -> Encoder:
    """Return what compresses. Raises ValueError."""
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
