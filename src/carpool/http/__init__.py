"""Serves services over HTTP: `App` runs under `carpool serve` or any ASGI server."""

from __future__ import annotations

from carpool.http.app import App

__all__ = ["App"]
