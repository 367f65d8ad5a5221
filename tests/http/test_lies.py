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
from hypothesis import given
from hypothesis import strategies as st

from carpool.http.app import App
from carpool.http.compression import readable_codings
from carpool.http.protocols import BUILT_IN
from carpool.http.protocols.instances import Vertex
from tests.http.lies import CONTENT_TYPES, LIES, MODELS, MOST_BYTES, SOUND, Lie, codings, services
from tests.support.http.net import RunningServer, serving
from tests.support.http.served import ask, fetched
from tests.support.peaks import forget_peaks, peak_of
from tests.support.properties import PROPERTY
from tests.support.waiting import PATIENCE_S

MOST_MEMORY = 96 * 2**20
"""How much more memory the server and its workers may take for one of these bodies: a list in
eight values a byte, at most. What is claimed takes gigabytes."""

MOST_CPU_S = 3.0
"""How much time of a processor they may take; each takes some hundredths of a second."""

BAD_RESULT = b"a result that does not fit its declaration"
"""What is said of a model whose answer cannot be written in the form that was asked for."""

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
        assert ask(running.port, "/models/polar/predict", [{"a": 1}]).status == 200
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
    assert len(lie.data) <= MOST_BYTES
    status, body = answered_within_little(server, path, kind, coding, lie)
    assert status in (200, 400, 413, 415, 422) or BAD_RESULT in body, (status, body[:500])
    assert len(body) <= 10 * MOST_BYTES


def answered_within_little(server: RunningServer, path: str, kind: str, coding: str, lie: Lie) -> tuple[int, bytes]:
    """The status and body of the answer, which took little memory and work; nobody else notices."""
    headers = dict(header.split(": ", 1) for header in (CONTENT_TYPES.get(kind, f"Content-Type: {kind}"), *lie.headers))
    if coding:
        headers["Content-Encoding"] = coding
    gc.collect(0)
    before, began = forget_peaks([])["self"], time.process_time()
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
        connection.request("POST", path.format(lie.model), lie.data, headers)
        response = connection.getresponse()
        body = response.read()
    assert time.process_time() - began < MOST_CPU_S
    assert peak_of("self") - before < MOST_MEMORY
    assert json.loads(ask(server.port, "/models/double/predict", 2).body) == 4
    return response.status, body


HUGE_NUMBERS = [-1, 0, 1, 127, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63 - 1]


@st.composite
def lying(draw: st.DrawFn) -> tuple[str, str, Lie]:
    """A sound body with some of its numbers replaced, some bytes changed, or a piece of it repeated."""
    path, kind, lie = draw(st.sampled_from(SOUND))
    data = bytearray(lie.data)
    for _ in range(draw(st.integers(1, 3))):
        at, number = draw(st.integers(0, len(data))), draw(st.sampled_from(HUGE_NUMBERS))
        how = draw(st.integers(0, 3))
        if how == 0:  # a number that is written out
            found = draw(st.sampled_from([*re.finditer(rb"[0-9]+", data)] or [None]))
            if found is not None:
                data[found.start() : found.end()] = str(number).encode()
        elif how == 1:  # a number in binary, of which formats have them aligned
            n = draw(st.sampled_from((2, 4, 8)))
            data[at // n * n : at // n * n + n] = (number % 2 ** (8 * n)).to_bytes(n, "little")
        elif how == 2:
            data[at:at] = data[at : at + draw(st.integers(1, 30))] * draw(st.sampled_from((1, 10, 1000)))
        else:
            data[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return path, kind, lie._replace(body=bytes(data))


@PROPERTY
@given(lying())
def test_noise_takes_little(server: RunningServer, sent: tuple[str, str, Lie]) -> None:
    """Whatever sizes a body claims, it is answered or refused with a status that says so, and takes
    little memory and work.
    """
    path, kind, lie = sent
    status, body = answered_within_little(server, path, kind, "", lie)
    assert status in (200, 400, 404, 413, 415, 422) or BAD_RESULT in body, (status, body[:500])
