"""Serves services over HTTP: `App` runs under `carpool serve` or any ASGI server, and
`install_error_handlers` has our errors answered alike in apps of other frameworks.
"""

from __future__ import annotations

from carpool.http.app import App
from carpool.http.error_answers import install_error_handlers

__all__ = ["App", "install_error_handlers"]
