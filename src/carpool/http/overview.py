"""The page at `/`, for people who look at a server for the first time: what is where."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from carpool.http.codec import as_json
from carpool.http.openapi import examples_of
from carpool.http.protocol_lists import ShownRoute, lines_of
from carpool.version import __version__

if TYPE_CHECKING:
    from carpool.http.endpoint import Endpoint

_LONGEST_EXAMPLE = 200  # characters; a longer one is no line to type


def overview(endpoints: Sequence[Endpoint], pages: Sequence[str], of_protocols: Sequence[ShownRoute] = ()) -> str:
    """Return the page.

    Args:
        endpoints: what the app serves.
        pages: the addresses of the app's own pages.
        of_protocols: the addresses of protocols.
    """
    lines = [*_lines(endpoints), f"GET {' '.join(pages)}", *lines_of(of_protocols)]
    return "\n".join([f"carpool {__version__}", "", *lines, ""])


def _lines(endpoints: Sequence[Endpoint]) -> Iterator[str]:
    """Yield the lines about the models."""
    for endpoint in endpoints:
        yield f"{endpoint.name}: {' -> '.join(stage.name for stage in endpoint.service.stages)}"
        for address in endpoint.addresses:
            yield f"  POST {address.path}{'  (a list of items)' if address.is_list else ''}"
        item = next((as_json(example).decode() for example in examples_of(endpoint.service)), None)
        if item is not None and len(item) <= _LONGEST_EXAMPLE:
            yield f"  curl --json {shlex.quote(item)} http://HOST:PORT{endpoint.addresses[0].path}"
        yield ""
