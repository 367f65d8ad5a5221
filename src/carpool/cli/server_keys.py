"""The address and the API key with which commands ask a server."""

from __future__ import annotations

import os
from pathlib import Path

from carpool.cli.sources import sources

_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # to listen on, and to ask


def server_key(key_file: Path | None) -> str:
    """Return the key in a file, or the one in CARPOOL_KEY; empty without either. Raises OSError."""
    return os.environ.get("CARPOOL_KEY", "") if key_file is None else key_file.read_text().strip()


def server_url(url: str | None, *, admin: bool = True) -> str:
    """Return the address of the server to ask; by default the one that the settings here give it.

    Args:
        url: What the command was given; None for nothing.
        admin: Whether to prefer its address for orders and pages of its operators.
    """
    if url is not None:
        return url
    found = {name: each.value for name, each in sources.read(None, ()).settings.items()}
    if admin and (address := found.get("admin_address")):
        return str(address) if str(address).startswith("unix:") else f"http://{address}"
    if path := found.get("socket"):
        return f"unix:{path}"
    host = str(found.get("host", "")).strip("[]")
    host = _ANY.get(host, host)
    scheme = "https" if found.get("tls_cert") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{found.get('port', 8000)}"
