"""The key and the certificate of servers that need one; they last as long as this process."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

KEY = "a-key-for-measuring-0123456789"


@cache
def key_file() -> Path:
    """The file that holds the key."""
    path = _folder() / "keys"
    path.write_text(f"bench:{KEY}\n")
    path.chmod(0o600)
    return path


@cache
def certificate() -> tuple[Path, Path]:
    """A certificate that is its own root, and its private key, of an elliptic curve."""
    cert, key = _folder() / "cert.pem", _folder() / "key.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    about = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", "-x509", "-nodes", *curve, *about, *files], check=True, capture_output=True)
    return cert, key


@cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="cb-secrets-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
