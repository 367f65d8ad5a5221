"""The page at `/`, for people who look at a server for the first time: what is where."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from carpool.http.addresses import ready_path
from carpool.http.codec import as_json
from carpool.http.openapi import examples_of
from carpool.http.protocol_lists import ShownRoute, lines_of
from carpool.version import __version__

if TYPE_CHECKING:
    from carpool.http.endpoint import Endpoint
    from carpool.service.service import Service

_LONGEST_EXAMPLE = 200  # characters; a longer one is no line to type
_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
_SAMPLES: Final = {float: "1.0", int: "1", str: '"text"', bool: "true"}
_EVENTS: Final = "-N -H 'Accept: text/event-stream' "
_KEY: Final = '-H "Authorization: Bearer $CARPOOL_KEY" '


def overview(
    endpoints: Sequence[Endpoint],
    pages: Sequence[str],
    of_protocols: Sequence[ShownRoute] = (),
    *,
    host: bytes = b"",
    root_path: str = "",
    is_tls: bool = False,
    needs_key: bool = False,
) -> str:
    """Return the page.

    Args:
        endpoints: What the app serves.
        pages: The addresses of the app's own pages.
        of_protocols: The addresses of protocols.
        host: Under which name and port the client has asked; empty if it has not said.
        root_path: What a proxy puts before each path.
        is_tls: Whether the server speaks TLS.
        needs_key: Whether clients have to send a key.
    """
    found = host.decode("latin-1")
    base = f"{'https://' if is_tls else ''}{found if _HOST.fullmatch(found) else 'HOST:PORT'}{root_path}"
    lines = list(_lines(endpoints, base, _KEY if needs_key else ""))
    lines += [f"GET {' '.join(pages)}", *lines_of(of_protocols)]
    return "\n".join([f"carpool {__version__}", "", *lines, ""])


def _lines(endpoints: Sequence[Endpoint], base: str, key: str) -> Iterator[str]:
    """Yield the lines about the models."""
    for endpoint in endpoints:
        yield f"{endpoint.name}: {' -> '.join(stage.name for stage in endpoint.service.stages)}"
        formats = endpoint.formats
        for address in endpoint.addresses:
            if not address.formats.is_open:
                continue
            yield f"  POST {address.path}{'  (a list of items)' if address.is_list else ''}"
        yield f"  GET {ready_path(endpoint.name)}"
        url, body = f"{base}{endpoint.addresses[0].path}", _body(endpoint.service, formats.readable)
        yield f"  curl {key}{body} {url}"
        if endpoint.service.gives.in_parts and not formats.owns_output:
            yield f"  curl {key}{_EVENTS}{body} {url}"
        yield ""


def _body(service: Service, readable: Sequence[str]) -> str:
    """Return the options of curl that send an item: an example, or one of the type, or a file.

    Args:
        service: Gets it.
        readable: The content types that it reads.
    """
    item = next((as_json(example).decode() for example in examples_of(service)), None)
    takes = service.takes.input_type
    if "application/json" not in readable:
        return f"-H {shlex.quote(f'Content-Type: {readable[0]}')} --data-binary @FILE"
    if takes is bytes:
        return "-H 'Content-Type: application/octet-stream' --data-binary @FILE"
    if item is None:
        item = _SAMPLES.get(takes) if isinstance(takes, type) else None
    if item is None or len(item) > _LONGEST_EXAMPLE:
        return "--json @item.json"
    return f"--json {shlex.quote(item)}"
