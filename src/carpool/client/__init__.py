"""Clients of a carpool server, imported at their first use: `carpool score` needs neither."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carpool.client.aio import AsyncClient
    from carpool.client.sync import Client

__all__ = ["AsyncClient", "Client"]

_MODULES = {"AsyncClient": "carpool.client.aio", "Client": "carpool.client.sync"}


def __getattr__(name: str) -> Any:
    """Import a client; raises ImportError where a package that it needs is missing."""
    if name not in _MODULES:
        raise AttributeError(f"module 'carpool.client' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("carpool"):
            raise
        text = f"clients need a package that is missing ({error.name}): pip install 'carpool[client]'"
        raise ImportError(text, name=error.name) from None
