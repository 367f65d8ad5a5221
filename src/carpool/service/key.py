"""What requests of a stage must have in common to share a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from carpool.model import Traits
from carpool.service.checks import check_callable, check_is_for_batches

Key = Callable[[Any], Any] | str
"""What requests must have in common to share a batch: a function of an item, the name of a field of
it, or `header:` and the name of an HTTP header."""

_HEADER = "header:"


def header_of(key: Any) -> bytes | None:
    """Return the name, in lower case, of the header that a `key=` reads; None if it reads none."""
    if not isinstance(key, str) or not key.startswith(_HEADER):
        return None
    return key.removeprefix(_HEADER).strip().lower().encode("latin-1")


def check_key(key: Any, max_batch_size: int | None, traits: Traits) -> None:
    """Check what requests must have in common. Raises ValueError or TypeError."""
    if not isinstance(key, str):
        check_callable("key", key, "an item")
    elif not key.removeprefix(_HEADER):
        raise ValueError(f'key must name a field of the items, or a header as in "header:X-Adapter", not {key!r}')
    elif header_of(key) is not None:
        if max_batch_size is None or traits.in_parts:
            raise ValueError("key is for stages that take whole batches: give max_batch_size, or leave it out")
        return
    check_is_for_batches("key", max_batch_size, traits)
