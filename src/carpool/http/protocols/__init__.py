"""The protocols of other servers that carpool speaks, one file each; docs/protocols.md describes
them. `base.py` says what a protocol is.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

from carpool.http.protocols.base import HttpProtocol
from carpool.http.protocols.instances import KServeV1, Vertex
from carpool.http.protocols.oip import OpenInference
from carpool.http.protocols.openai_api import OpenAI
from carpool.http.protocols.rerank import Rerank
from carpool.http.protocols.sagemaker import SageMaker

BUILT_IN: Final[dict[str, type[HttpProtocol]]] = {
    kind.name: kind for kind in (Vertex, OpenInference, KServeV1, SageMaker, OpenAI, Rerank)
}
"""The protocols of carpool's own, by name; of two with one address the first one gets it."""


def protocols_named(protocols: Sequence[str | HttpProtocol] | None) -> list[HttpProtocol]:
    """Return protocols.

    Args:
        protocols: Names of `BUILT_IN`, `module:attribute` for one of the user's own, or protocols;
            None for all of `BUILT_IN`.

    Raises:
        ValueError: There is no protocol of a name.
        TypeError: Something else is no protocol.
    """
    if protocols is None:
        return [kind() for kind in BUILT_IN.values()]
    if isinstance(protocols, str):
        raise TypeError(f"protocols must be a list of protocols, such as [{protocols!r}], not a text")
    return [_named(each) if isinstance(each, str) else _checked(each, "protocols has") for each in protocols]


def _named(name: str) -> HttpProtocol:
    if name in BUILT_IN:
        return BUILT_IN[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"there is no protocol {name!r}: choose among {', '.join(BUILT_IN)}, or write module:attribute for one of"
            " your own"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the protocol {name!r} cannot be imported: {error}") from error
    return _checked(found, f"{name} is")


def _checked(found: Any, what: str) -> HttpProtocol:
    protocol = found() if isinstance(found, type) else found
    if not isinstance(protocol, HttpProtocol):
        raise TypeError(
            f"{what} {found!r}, which is no protocol: derive it from carpool.http.protocols.base.HttpProtocol"
        )
    return protocol
