"""Bodies that claim to be huge: whatever reads them counts before it makes anything, so that memory
and work stay in proportion to the bytes that came.
"""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection

import pytest

from carpool.http.app import App
from carpool.http.compressed import readable_codings
from carpool.http.protocols import BUILT_IN
from carpool.http.protocols.vertex import Vertex
from tests.http.lies import CONTENT_TYPES, LIES, MODELS, MOST_BYTES, Lie, codings, services
from tests.support.http.net import RunningServer, serving
from tests.support.http.served import ask, fetched
from tests.support.peaks import forget_peaks, peak_of
from tests.support.waiting import PATIENCE_S

MOST_MEMORY = 96 * 2**20
"""How much more memory the server and its workers may take for one of these bodies: a list in
eight values a byte, at most. What is claimed takes gigabytes."""

MOST_CPU_S = 3.0
"""How much time of a processor they may take; each takes some hundredths of a second."""

CODINGS = codings()
CASES = [
    *((path, kind, "", lie) for (path, kind), lies in LIES.items() if not isinstance(lies, str) for lie in lies),
    *(("/models/{}/predict", "application/json", coding, lie) for coding, lies in CODINGS.items() for lie in lies),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    environ = {"AIP_HEALTH_ROUTE": "/vertex/health", "AIP_PREDICT_ROUTE": "/vertex/predict"}
    protocols = [Vertex(environ), *(name for name in BUILT_IN if name != "vertex")]
    with serving(App(*services(), protocols=protocols, accept_compressed=True)) as running:
        # what is loaded with the first table and tensor is no part of the measurement
        assert ask(running.port, "/models/table/predict", [{"a": 1}]).status == 200
        tensor = {"name": "input", "shape": [1, 1], "datatype": "FP32", "data": [1]}
        assert ask(running.port, "/v2/models/rows/infer", {"inputs": [tensor]}).status == 200
        yield running


def test_each_reader_is_among_them(server: RunningServer) -> None:
    """Each address that takes a body, with each content type, and each coding has bodies that lie,
    or says why none can.
    """
    _, document = fetched(server.port, "/openapi.json")
    found = {
        (generic(path), kind)
        for path, methods in document["paths"].items()
        for kind in methods.get("post", {}).get("requestBody", {}).get("content", ())
    }
    for endpoint in server.app.endpoints:
        for address in endpoint.addresses:
            found |= {(generic(address.path), kind) for kind in address.formats._others_read}
    assert found == LIES.keys()
    assert CODINGS.keys() == set(readable_codings())
    assert all(LIES.values())


def generic(path: str) -> str:
    """An address with `{}` for the model."""
    path = re.sub(rf"(?<=/)({'|'.join(MODELS)})(?=[:/]|$)", "{}", path, count=1)
    return re.sub("^/predict", "/models/{}/predict", path)  # the address of the first model


@pytest.mark.parametrize(
    ("path", "kind", "coding", "lie"),
    CASES,
    ids=[f"{coding or kind} at {path}: {lie.what}" for path, kind, coding, lie in CASES],
)
def test_it_takes_little(server: RunningServer, path: str, kind: str, coding: str, lie: Lie) -> None:
    """A small body that claims to be huge is refused, or is answered by little; either way it takes
    little memory and little work, and the next request is served.
    """
    data = lie.data
    assert len(data) <= MOST_BYTES or coding
    headers = dict(header.split(": ", 1) for header in (CONTENT_TYPES.get(kind, f"Content-Type: {kind}"), *lie.headers))
    if coding:
        headers["Content-Encoding"] = coding
    gc.collect()
    before, began = forget_peaks([])["self"], time.process_time()
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
        connection.request("POST", path.format(lie.model), data, headers)
        response = connection.getresponse()
        body = response.read()
    took_s, taken = time.process_time() - began, peak_of("self") - before
    assert response.status in (200, 400, 413, 415, 422) or b"bad_result" in body, (response.status, body[:500])
    assert len(body) <= 10 * MOST_BYTES
    assert took_s < MOST_CPU_S
    assert taken < MOST_MEMORY
    assert json.loads(ask(server.port, "/models/double/predict", 2).body) == 4
