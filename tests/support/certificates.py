"""Certificates for tests, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

OPENSSL = shutil.which("openssl")


class Pair(NamedTuple):
    """A certificate and its private key."""

    cert: Path
    key: Path


def self_signed(folder: Path, name: str, *, host: str = "localhost") -> Pair:
    """A certificate that is its own root."""
    assert OPENSSL is not None
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    command = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(pair.key), "-out", str(pair.cert), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", f"subjectAltName=DNS:{host},IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return pair
