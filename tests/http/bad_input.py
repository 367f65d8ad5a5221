"""What is wrong with requests to protocols, by protocol: each named case, and the right status.

A case that a protocol cannot have, such as a binary tail where everything is JSON, is named with
the reason, so that nothing is left out by oversight.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.support.http.front import post

LINES = "Content-Type: application/x-ndjson"
FORM = "Content-Type: multipart/form-data; boundary=XX"
NPY = "Content-Type: application/x-npy"
CSV = "Content-Type: text/csv"
GZIP = "Content-Encoding: gzip"

TEN_GB = 10_000_000_000
LARGEST_BODY = 2**20

CASES = (
    "wrong shapes",
    "wrong dtypes",
    "short binary tails",
    "lengths that overflow",
    "unknown outputs",
    "a form of many parts",
    "a compressed bomb",
    "a .npy file of objects",
    "10 GB declared",
    "a tensor of 10 GB declared",
    "nested too deep",
)


class Bad(NamedTuple):
    """A bad request.

    Attributes:
        data: Its bytes.
        status: The only right one.
    """

    data: bytes
    status: int


Cases = dict[str, list[Bad] | str]
"""By the name of a case, the requests that are such, or why the protocol cannot have any."""


def saved(array: Any) -> bytes:
    """The .npy file of an array."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


OBJECTS = saved(np.array([{}, 1], object))
DEEP = b"[" * 100_000


def part(content: bytes, times: int = 1) -> bytes:
    """A form of parts with this content."""
    head = b'--XX\r\nContent-Disposition: form-data; name="n"\r\n\r\n'
    return (head + content + b"\r\n") * times + b"--XX--\r\n"


FORM_OF_MANY_PARTS = part(b"1", 10_000)


def bomb(megabytes: int) -> bytes:
    """So many megabytes of spaces in gzip; all are the same block, which is compressed once."""
    spaces, packer = b" " * 10**6, zlib.compressobj(1, wbits=-15)
    block = packer.compress(spaces) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = 0
    for _ in range(megabytes):
        checksum = zlib.crc32(spaces, checksum)
    tail = b"\x03\0" + struct.pack("<II", checksum, megabytes * len(spaces))
    return b"\x1f\x8b\x08" + bytes(6) + b"\xff" + block * megabytes + tail


BOMB = bomb(100)


def npy_header(text: str) -> bytes:
    """The beginning of a .npy file whose header says this."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def at(path: str, *headers: str) -> Callable[..., Bad]:
    """What makes bad requests to an address, of bytes or of what goes as JSON."""

    def bad(body: Any, status: int, *more: str) -> Bad:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Bad(post(data, path, *headers, *more), status)

    return bad


def declared(path: str, *headers: str) -> list[Bad]:
    """A body of 10 GB, of which nothing comes."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {TEN_GB}", *headers]
    return [Bad("\r\n".join([*lines, "", ""]).encode(), 413)]


def of_json(path: str) -> Cases:
    """The cases that are the same wherever a body is JSON."""
    bad = at(path)
    return {
        "a form of many parts": [bad(FORM_OF_MANY_PARTS, 400, FORM), bad(FORM_OF_MANY_PARTS, 400)],
        "a compressed bomb": [bad(BOMB, 413, GZIP), bad(BOMB, 400)],
        "a .npy file of objects": [bad(OBJECTS, 400, NPY), bad(OBJECTS, 400)],
        "10 GB declared": declared(path),
        "nested too deep": [bad(DEEP, 400), bad(b'{"input": ' + DEEP, 400), bad(b'{"instances": ' + DEEP, 400)],
        "short binary tails": "everything is JSON",
        "a tensor of 10 GB declared": "nothing declares its length but the body",
    }


def _infer(inputs: list[dict[str, Any]], tail: bytes = b"", **more: Any) -> Bad:
    """A request of the Open Inference Protocol; with a tail it is binary."""
    body = json.dumps({"inputs": inputs, **more}).encode()
    path, length = "/v2/models/rows/infer", f"Inference-Header-Content-Length: {len(body)}"
    return Bad(post(body + tail, path, *([length] if tail else [])), 400)


X = {"name": "input", "datatype": "FP32", "shape": [1, 2]}
_TAIL = {**X, "parameters": {"binary_data_size": 8}}
_HUGE = {"parameters": {"binary_data_size": TEN_GB}}
_INFER = "/v2/models/rows/infer"

OIP: Cases = {
    **of_json(_INFER),
    "wrong shapes": [
        _infer([{**X, "shape": [2, 2], "data": [1, 2, 3]}]),
        _infer([{**X, "shape": [2, 2], "data": [[1, 2], [3]]}]),
        _infer([{**X, "shape": [-1, 2], "data": [1, 2]}]),
        _infer([{**X, "shape": [], "data": [1]}]),
        _infer([{**_TAIL, "shape": [3, 1]}], b"12345678"),
    ],
    "wrong dtypes": [
        _infer([{**X, "datatype": "FP64", "data": [1, 2]}]),
        _infer([{**X, "datatype": "FP31", "data": [1, 2]}]),
        _infer([{**X, "data": ["a", "b"]}]),
        _infer([{**_TAIL, "datatype": "INT32"}], b"12345678"),
    ],
    "short binary tails": [
        _infer([_TAIL], b"1234567"),
        _infer([_TAIL, {**_TAIL, "name": "b"}], b"123456789012"),
        _infer([{**X, "datatype": "BYTES", "parameters": {"binary_data_size": 6}}], b"\x05\0\0\0ab"),
    ],
    "lengths that overflow": [
        _infer([{**X, "shape": [2**40, 2**40], "data": [1]}]),
        _infer([{**_TAIL, "shape": [2**32, 2**32]}], b"12345678"),
        _infer([{**_TAIL, "shape": [2**70]}], b"12345678"),
        _infer([{**X, "parameters": {"binary_data_size": 2**64 + 8}}], b"12345678"),
        at(_INFER)(b"{}", 400, f"Inference-Header-Content-Length: {2**64}"),
    ],
    "unknown outputs": [_infer([{**X, "data": [1, 2]}], outputs=[{"name": "z"}])],
    "a tensor of 10 GB declared": [
        _infer([{**X, "shape": [1, TEN_GB // 4], "data": [1]}]),
        _infer([{**X, **_HUGE, "shape": [1, TEN_GB // 4]}], b"12345678"),
    ],
}

_V1 = "/v1/models/double:predict"
_bad_v1 = at(_V1)
KSERVE_V1: Cases = {
    **of_json(_V1),
    "wrong shapes": [
        _bad_v1({"instances": [[1, 2]]}, 400),
        _bad_v1({"instances": 1}, 400),
        _bad_v1({"inputs": {"a": [1], "b": []}}, 400),
    ],
    "wrong dtypes": [_bad_v1({"instances": ["a"]}, 400), _bad_v1({"instances": [1, None]}, 400)],
    "lengths that overflow": [
        _bad_v1(b'{"instances": [1e999]}', 400),
        at("/v1/models/rows:predict")(b'{"instances": [[1e999]]}', 400),
        at("/v1/models/rows:predict")(b'{"instances": [{"b64": 1e999}]}', 400),
        _bad_v1({"instances": [1] * 20_000}, 413),
    ],
    "unknown outputs": [_bad_v1({"signature_name": "z", "instances": [1]}, 400)],
}

_bad_invocation = at("/invocations")
SAGEMAKER: Cases = {
    **of_json("/invocations"),
    "wrong shapes": [
        _bad_invocation({"dataframe_split": {"columns": ["a"], "data": [[1, 2]]}}, 400),
        _bad_invocation({"instances": [[1, 2]]}, 400),
        _bad_invocation(b"1,2\n", 400, CSV),
    ],
    "wrong dtypes": [_bad_invocation({"instances": ["a"]}, 400), _bad_invocation(b"a\nmany\n", 400, CSV)],
    "lengths that overflow": [_bad_invocation(b"[1e999]", 400), _bad_invocation({"inputs": [1] * 20_000}, 413)],
    "unknown outputs": [_bad_invocation({"instances": [1], "params": {"outputs": ["z"]}}, 400)],
    "a form of many parts": [_bad_invocation(FORM_OF_MANY_PARTS, 415, FORM)],
    "a .npy file of objects": [_bad_invocation(OBJECTS, 415, NPY)],
}

_VERTEX = "/vertex/predict"
_bad_vertex = at(_VERTEX)
VERTEX: Cases = {
    **of_json(_VERTEX),
    "wrong shapes": [_bad_vertex({"instances": [[1, 2]]}, 400), _bad_vertex({"instances": 1}, 400)],
    "wrong dtypes": [_bad_vertex({"instances": ["a"]}, 400)],
    "lengths that overflow": [
        _bad_vertex(b'{"instances": [1e999]}', 400),
        _bad_vertex({"instances": [1] * 20_000}, 413),
    ],
    "unknown outputs": [_bad_vertex({"instances": [1], "parameters": {"outputs": ["z"]}}, 400)],
}

_EMBED, _CHAT = "/v1/embeddings", "/v1/chat/completions"
_bad_embedding, _bad_chat = at(_EMBED), at(_CHAT)
_MESSAGES = [{"role": "user", "content": "a"}]
OPENAI: Cases = {
    **of_json(_EMBED),
    "wrong shapes": [
        _bad_embedding({"model": "embed", "input": [["a"]]}, 400),
        _bad_embedding({"model": "embed", "input": {}}, 400),
        _bad_chat({"model": "parrot", "messages": "a"}, 400),
    ],
    "wrong dtypes": [
        _bad_embedding({"model": "embed", "input": 3}, 400),
        _bad_embedding({"model": "embed", "input": "a", "encoding_format": "hex"}, 400),
        _bad_chat({"model": "parrot", "messages": _MESSAGES, "stream": "yes"}, 400),
    ],
    "lengths that overflow": [
        _bad_embedding(b'{"model": "embed", "input": "a", "dimensions": 1e999}', 400),
        _bad_embedding({"model": "embed", "input": "a", "dimensions": 2**70}, 400),
        _bad_embedding({"model": "embed", "input": ["a"] * 20_000}, 413),
        _bad_chat(b'{"model": "parrot", "messages": [], "max_tokens": 1e999}', 400),
        _bad_chat({"model": "parrot", "messages": _MESSAGES, "n": 2**40}, 400),
    ],
    "unknown outputs": [_bad_chat({"model": "parrot", "messages": _MESSAGES, "modalities": ["audio"]}, 400)],
    "10 GB declared": [*declared(_EMBED), *declared(_CHAT)],
}

_RERANK = "/v1/rerank"
_bad_rerank = at(_RERANK)
RERANK: Cases = {
    **of_json(_RERANK),
    "wrong shapes": [
        _bad_rerank({"query": "a", "documents": [["b"]]}, 400),
        _bad_rerank({"query": ["a"], "documents": ["b"]}, 400),
    ],
    "wrong dtypes": [_bad_rerank({"query": 1, "documents": ["b"]}, 400)],
    "lengths that overflow": [
        _bad_rerank(b'{"query": "a", "documents": ["b"], "top_n": 1e999}', 400),
        _bad_rerank({"query": "a", "documents": ["b"] * 20_000}, 413),
    ],
    "unknown outputs": "the answer has one form",
}

_bad_item, _bad_row = at("/models/double/predict"), at("/models/rows/predict")
NATIVE: Cases = {
    **of_json("/models/double/predict"),
    "wrong shapes": [
        _bad_item([1, 2], 422),
        _bad_row([[1, 2], [3]], 422),
    ],
    "wrong dtypes": [_bad_item("a", 422), _bad_row(["a"], 422), _bad_row(saved(np.ones(3)), 422, NPY)],
    "short binary tails": [
        _bad_row(saved(np.ones(3, np.float32))[:-1], 400, NPY),
        _bad_row(saved(np.ones(3, np.float32)) + b"1", 400, NPY),
    ],
    "lengths that overflow": [
        _bad_item(b"1e999", 422),
        _bad_row(npy_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**40}, {2**40})}}"), 400, NPY),
        _bad_row(npy_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**70},)}}"), 400, NPY),
        _bad_row(b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100, 400, NPY),
    ],
    "unknown outputs": "a model has one result",
    "a form of many parts": [_bad_item(FORM_OF_MANY_PARTS, 413, FORM), _bad_item(FORM_OF_MANY_PARTS, 400)],
    "nested too deep": [_bad_item(DEEP, 422), _bad_item(part(DEEP), 422, FORM)],
    "a .npy file of objects": [_bad_row(OBJECTS, 400, NPY), _bad_item(OBJECTS, 400)],
    "a tensor of 10 GB declared": [
        _bad_row(
            npy_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({TEN_GB // 4},)}}") + b"1234", 400, NPY
        )
    ],
}

PROTOCOLS: dict[str, Cases] = {
    "native": NATIVE,
    "oip": OIP,
    "kserve-v1": KSERVE_V1,
    "sagemaker": SAGEMAKER,
    "vertex": VERTEX,
    "openai": OPENAI,
    "rerank": RERANK,
}
