"""Requests of the Open Inference Protocol, and what binary answers consist of."""

from __future__ import annotations

import json
from typing import Any

from tests.support.http.served import Answer, ask, posted


def tensor(name: str, datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def infer(port: int, model: str, *inputs: dict[str, Any], **more: Any) -> tuple[int, Any]:
    return posted(port, f"/v2/models/{model}/infer", {"inputs": list(inputs), **more})


def binary(port: int, model: str, inputs: list[tuple[dict[str, Any], bytes]], **more: Any) -> Answer:
    """Ask with binary tensors."""
    described = [{**head, "parameters": {"binary_data_size": len(data)}} for head, data in inputs]
    head = json.dumps({"inputs": described, **more}).encode()
    body = head + b"".join(data for _, data in inputs)
    return ask(port, f"/v2/models/{model}/infer", body, f"Inference-Header-Content-Length: {len(head)}")


def parted(answer: Answer) -> tuple[Any, bytes]:
    """The JSON of a binary answer, and what follows it."""
    length = int(answer.headers["inference-header-content-length"])
    return json.loads(answer.body[:length]), answer.body[length:]
