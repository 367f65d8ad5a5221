"""Clients of a carpool server: `carpool.Client` for threads, `carpool.AsyncClient` for tasks."""

from __future__ import annotations

try:
    from carpool.client.aio import AsyncClient
    from carpool.client.sync import Client
except ModuleNotFoundError as error:
    if (error.name or "").startswith("carpool"):
        raise
    text = f"clients need a package that is missing ({error.name}): pip install 'carpool[client]'"
    raise ImportError(text, name=error.name) from None

__all__ = ["AsyncClient", "Client"]
