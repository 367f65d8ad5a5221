"""Values that look like what marks an error, an end or a header somewhere."""

from __future__ import annotations

from typing import Any

SIGNS: tuple[Any, ...] = (
    {"error": {"code": "none", "message": "all is well", "status": 500}},
    {"error": {"code": "none", "is_last": True}},
    {"error": 0.5},
    {"error": None},
    {"error": 0.5, "label": 3},
    {"label": 3, "error": 0.5},
    {"result": 5},
    {"result": {"error": 1}},
    {"result": {"result": {"error": {}}}},
    {"part": 1},
    {"parts": 1},
    {"end": {"parts": 1}},
    "[DONE]",
    "",
    " ",
    "\n",
    "event: end\ndata: {}\n\n",
    "a\r\nb\u2028c\u2029d\x85",
    None,
    [],
    {},
    ["a", "b"],
    0,
)
