"""The version of carpool, and the address of its documentation; any module can read them."""

from typing import Final

__version__ = "1.0.0rc1"

SITE_URL: Final = ""
"""The address of the documentation's site, without a `/` at its end; empty while there is none."""


def page(path: str) -> str:
    """Return the address of a page of the documentation; empty while the site has none."""
    return f"{SITE_URL}/{path}" if SITE_URL else ""
