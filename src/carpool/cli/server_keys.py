"""The API key with which commands ask a server."""

from __future__ import annotations

import os
from pathlib import Path


def server_key(key_file: Path | None) -> str:
    """Return the key in a file, or the one in CARPOOL_KEY; empty without either. Raises OSError."""
    return os.environ.get("CARPOOL_KEY", "") if key_file is None else key_file.read_text().strip()
