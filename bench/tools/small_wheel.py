"""Compresses the files of a wheel once more, with zopfli: the same format, a twenty-fifth smaller.

`python -m bench.tools.small_wheel dist/*.whl` replaces each wheel. Names, contents, times and modes
stay, so RECORD holds. Any reader of zip files reads the result, which depends on the wheel alone.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from unittest import mock

from zopfli.zlib import compress

_HEAD_BYTES: Final = 2
_TAIL_BYTES: Final = 4
"""What zlib puts around a deflated stream, and zip files do without."""


class _Deflater:
    """The part of `zlib.compressobj` that zipfile uses."""

    def __init__(self) -> None:
        self._given = bytearray()

    def compress(self, data: bytes) -> bytes:
        self._given += data
        return b""

    def flush(self) -> bytes:
        framed: bytes = compress(bytes(self._given), numiterations=15)
        return framed[_HEAD_BYTES:-_TAIL_BYTES]


def _deflater(*_: object) -> _Deflater:
    """Take the place of `zipfile._get_compressor`; there is no public way to bring a compressor."""
    return _Deflater()


def smaller(wheel: bytes) -> bytes:
    """Return the wheel with the same files in the same order, compressed by zopfli."""
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(wheel)) as given,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as written,
        mock.patch.object(zipfile, "_get_compressor", _deflater),
    ):
        for each in given.infolist():
            info = zipfile.ZipInfo(each.filename, each.date_time)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = each.external_attr
            written.writestr(info, given.read(each))
    return made.getvalue()


def main(arguments: Sequence[str]) -> None:
    """Replace each wheel that is named by its smaller one, and print both sizes."""
    for name in arguments:
        path = Path(name)
        before = path.read_bytes()
        after = smaller(before)
        path.write_bytes(after)
        print(f"{path.name}: {len(before):,} bytes, {len(after):,} with zopfli")


if __name__ == "__main__":
    main(sys.argv[1:])
