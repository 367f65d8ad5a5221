"""Serves services over HTTP: `App` runs under `carpool serve` or any ASGI server. In apps of other
frameworks `install_error_handlers` has our errors, and `stream_response` parts, answered alike.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from carpool.http.app import App
from carpool.http.error_answers import install_error_handlers

if TYPE_CHECKING:
    from carpool.http.own_routes import stream_response

__all__ = ["App", "install_error_handlers", "stream_response"]


def __dir__() -> list[str]:
    """Return the names for users, which completion then offers, without the modules."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import what needs Starlette, which is there where it is of use, at its first use."""
    if name == "stream_response":
        return importlib.import_module("carpool.http.own_routes").stream_response
    raise AttributeError(f"module 'carpool.http' has no attribute {name!r}")
