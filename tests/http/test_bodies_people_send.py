"""Forms, .npy files and compressed bodies."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from carpool import Service, Stage
from carpool.http import converted
from carpool.http.app import App
from carpool.http.compression import expanded, readable_codings
from carpool.http.converted import array_in, as_npy
from tests.support.http.both_fronts import ask, both_fronts
from tests.support.http.models import Echo
from tests.support.http.served import Double, Rows, flip, shout

FORM = "Content-Type: multipart/form-data; boundary=XX"
NPY = "Content-Type: application/x-npy"


@dataclass
class Upload:
    """Attributes:
    picture: a file.
    scale: a number.
    tags: several.
    """

    picture: bytes
    scale: float = 1.0
    tags: list[str] | None = None


def sized(upload: Upload) -> list[Any]:
    """A model of forms."""
    return [len(upload.picture), upload.scale, upload.tags]


def services() -> list[Service]:
    return [
        Service(Stage(model, max_batch_size=8 if isinstance(model, type) else None, run_in="thread"), name=name)
        for name, model in (
            ("double", Double),
            ("rows", Rows),
            ("flip", flip),
            ("shout", shout),
            ("sized", sized),
            ("echo", Echo),
        )
    ]


@pytest.fixture(scope="module")
def doors() -> Iterator[Any]:
    with both_fronts(App(*services(), max_body_bytes=2_000_000, accept_compressed=True)) as both:
        yield both


def part(name: str, content: bytes, more: str = "") -> bytes:
    return f'--XX\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"


END = b"--XX--\r\n"


# -- forms


def test_a_file_is_an_item_of_bytes(port: int) -> None:
    """A form with one file is what the model of bytes takes; a field with a text is one of texts."""
    pytest.importorskip("python_multipart")
    answer = ask(port, "/models/flip/predict", part("f", b"\xff\r\nab", '; filename="a.bin"') + END, FORM)
    assert (answer.status, json.loads(answer.body)) == (200, "YmEKDf8=")
    assert json.loads(ask(port, "/models/shout/predict", part("t", "é".encode()) + END, FORM).body) == "É"
    assert json.loads(ask(port, "/models/double/predict", part("n", b"2.5") + END, FORM).body) == 5.0


def test_what_a_browser_sends_beside_a_file(port: int) -> None:
    """A button or a token of a page beside the only file is passed over; of several files none is chosen."""
    pytest.importorskip("python_multipart")
    file, button = part("f", b"ab", '; filename="a.bin"'), part("send", b"go")
    assert json.loads(ask(port, "/models/flip/predict", button + file + END, FORM).body) == "YmE="
    assert json.loads(ask(port, "/models/shout/predict", file + button + END, FORM).body) == "AB"
    for parts in (file + file, button + button):
        refused = ask(port, "/models/flip/predict", parts + END, FORM)
        assert refused.status == 422 and "one file" in json.loads(refused.body)["error"]["message"]


def test_fields_are_those_of_the_item(port: int) -> None:
    """The fields of a form are the fields of an item, of the types that its hints name."""
    pytest.importorskip("python_multipart")
    body = part("picture", b"abc", '; filename="a.png"') + part("scale", b"2")
    assert json.loads(ask(port, "/models/sized/predict", body + END, FORM).body) == [3, 2.0, None]
    listed = ask(port, "/models/sized/predict", body + part("tags", b'["a", "b"]') + END, FORM)
    assert json.loads(listed.body) == [3, 2.0, ["a", "b"]]


BAD_FORMS: list[tuple[str, bytes, str, int]] = [
    ("no boundary in the type", b"", "Content-Type: multipart/form-data", 400),
    ("an empty body", b"", FORM, 400),
    ("no end", part("n", b"1"), FORM, 400),
    ("another boundary", part("n", b"1") + END, "Content-Type: multipart/form-data; boundary=YY", 400),
    ("no name", b"--XX\r\nContent-Disposition: form-data\r\n\r\n1\r\n" + END, FORM, 400),
    ("no headers", b"--XX\r\n\r\n1\r\n" + END, FORM, 400),
    ("several parts for one item", part("a", b"1") + part("b", b"2") + END, FORM, 422),
    ("too many parts", part("n", b"1") * 1000 + END, FORM, 413),
    ("endless headers", b"--XX\r\nX-A: " + b"a" * 50_000 + b"\r\n\r\n1\r\n" + END, FORM, 400),
    ("a field that does not fit", part("n", b"many") + END, FORM, 422),
    ("no UTF-8", part("n", b"\xff") + END, FORM, 422),
]


@pytest.mark.parametrize(("what", "body", "kind", "status"), BAD_FORMS, ids=[each[0] for each in BAD_FORMS])
def test_bad_forms(ours: int, what: str, body: bytes, kind: str, status: int) -> None:
    """A form that is none, or too much of one, is refused, and the next request is served."""
    pytest.importorskip("python_multipart")
    answer = ask(ours, "/models/double/predict", body, kind)
    assert answer.status == status, answer.body
    assert ask(ours, "/models/double/predict", 2).body == b"4.0"


def test_bad_fields(ours: int) -> None:
    """A field twice, or one that items do not have, does not fit."""
    pytest.importorskip("python_multipart")
    for body in (part("picture", b"a") * 2, part("picture", b"a") + part("colour", b"b"), part("scale", b"1")):
        assert ask(ours, "/models/sized/predict", body + END, FORM).status == 422


def test_a_form_that_needs_the_extra_names_it(ours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package that reads forms is not installed, the refusal of a form names the extra."""
    monkeypatch.setattr(converted, "can_read_forms", lambda: False)
    refused = ask(ours, "/models/flip/predict", part("f", b"ab", '; filename="a.bin"') + END, FORM)
    assert refused.status == 415 and "carpool[forms]" in json.loads(refused.body)["error"]["message"]


# -- .npy


def saved(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["?", "<f4", ">f4", "<f8", "<i2", ">u4", "<c8", "f2"])
def test_arrays_go_there_and_back(dtype: str) -> None:
    """What numpy saves is read, and what is written numpy loads; dtype, order and shape are kept."""
    for array in (np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.zeros((0, 3)), np.array(3)):
        array = array.astype(dtype)
        read = array_in(saved(array))
        assert read.dtype == array.dtype.newbyteorder("=") and (read == array).all() and read.shape == array.shape
        loaded = np.load(io.BytesIO(as_npy(array)), allow_pickle=False)
        assert loaded.dtype == array.dtype and (loaded == array).all() and loaded.shape == array.shape


def test_a_model_of_arrays_takes_and_gives_npy(port: int) -> None:
    """A body that is an array is answered with one, or with JSON if the client asks for it."""
    body = saved(np.ones(3, np.float32))
    answer = ask(port, "/models/rows/predict", body, NPY)
    assert answer.headers["content-type"] == "application/x-npy"
    assert np.load(io.BytesIO(answer.body)).tolist() == [2, 2, 2]
    assert json.loads(ask(port, "/models/rows/predict", body, NPY, "Accept: application/json").body) == [2, 2, 2]
    answer = ask(port, "/models/rows/predict", [1, 2], "Accept: application/x-npy")
    assert np.load(io.BytesIO(answer.body)).tolist() == [2, 4]
    large = saved(np.ones(400_000, np.float32))
    assert np.load(io.BytesIO(ask(port, "/models/rows/predict", large, NPY).body)).sum() == 800_000


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


BAD_ARRAYS: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("no magic", b"hello, world, hello"),
    ("only magic", b"\x93NUMPY\x01\x00"),
    ("objects", saved(np.array([{}, 1], object))),
    ("texts", saved(np.array(["a"]))),
    ("dates", saved(np.array(["2020-01-01"], "datetime64[D]"))),
    ("records", saved(np.zeros(1, [("a", "f4")]))),
    ("a short tail", saved(np.ones(3, np.float32))[:-1]),
    ("a long tail", saved(np.ones(3, np.float32)) + b"1"),
    ("10 GB declared", header("{'descr': '<f4', 'fortran_order': False, 'shape': (2500000000,)}") + b"1234"),
    ("lengths that overflow", header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**40}, {2**40})}}")),
    ("a negative length", header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}")),
    ("a bool as length", header("{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}") + b"1234"),
    ("many axes", header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'1,' * 40})}}") + b"1234"),
    ("code", header("{'descr': '<f4', 'fortran_order': False, 'shape': (__import__('os').getpid(),)}")),
    ("a header that is no dict", header("[1]")),
    ("a header that is nested", header("[" * 3000)),
    ("further keys", header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}") + b"1234"),
    ("a long header", b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100),
]


@pytest.mark.parametrize(("what", "body"), BAD_ARRAYS, ids=[each[0] for each in BAD_ARRAYS])
def test_bad_arrays(ours: int, what: str, body: bytes) -> None:
    """What is no plain array is a 400, and nothing is allocated for what is only declared."""
    tracemalloc.start()
    answer = ask(ours, "/models/rows/predict", body, NPY)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.status == 400 and peak < 20_000_000, answer.body
    assert ask(ours, "/models/rows/predict", [1]).status == 200


def test_arrays_that_do_not_fit(ours: int) -> None:
    """Another dtype than the model's is 422, and a model that takes no arrays 415."""
    assert ask(ours, "/models/rows/predict", saved(np.ones(3)), NPY).status == 422
    assert ask(ours, "/models/double/predict", saved(np.ones(3)), NPY).status == 415
    assert ask(ours, "/models/shout/predict", "a", "Accept: application/x-npy").status == 500


# -- compressed bodies

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
try:
    from backports import zstd

    COMPRESS["zstd"] = zstd.compress
except ImportError:
    pass


@pytest.mark.parametrize("coding", COMPRESS)
def test_compressed_bodies_are_expanded(port: int, coding: str) -> None:
    """A compressed body is what it was before, at each address."""
    said = f"Content-Encoding: {coding}"
    data = COMPRESS[coding](b"[1.0, 2.0]" + b" " * 5000)
    assert json.loads(ask(port, "/predict/many", data, said).body) == [2.0, 4.0]
    assert json.loads(ask(port, "/predict", COMPRESS[coding](b"4"), said).body) == 8.0
    body = COMPRESS[coding](b'{"instances": [1]}')
    assert json.loads(ask(port, "/v1/models/double:predict", body, said).body) == {"predictions": [2.0]}


@pytest.mark.parametrize("coding", COMPRESS)
def test_bombs_are_refused(ours: int, coding: str) -> None:
    """A body that expands beyond the limit, or too much for its size, is refused before it is there."""
    said = f"Content-Encoding: {coding}"
    data = COMPRESS[coding](b"1" + b" " * 100_000_000)
    tracemalloc.start()
    answer = ask(ours, "/predict", data, said)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.status == 413 and peak < 20_000_000
    assert ask(ours, "/predict", COMPRESS[coding](b"1" + b" " * 1_500_000), said).status == 413
    for wrong in (b"", b"rubbish", COMPRESS[coding](b"1234")[:-1], COMPRESS[coding](b"1") + b"more"):
        assert ask(ours, "/predict", wrong, said).status == 400
    assert ask(ours, "/predict", 1).status == 200


def test_other_codings_are_not_read(port: int) -> None:
    """A coding that nobody knows is 415, and so is each of them where the user has not said so."""
    assert ask(port, "/predict", b"1", "Content-Encoding: br").status == 415
    lines = "Content-Type: application/x-ndjson"
    assert ask(port, "/predict", gzip.compress(b"1"), "Content-Encoding: gzip", lines).status == 415
    assert set(COMPRESS) <= set(readable_codings())
    with both_fronts(App(services()[0])) as both:
        for door in both:
            assert ask(door.port, "/predict", gzip.compress(b"1"), "Content-Encoding: gzip").status == 415


def test_a_body_of_the_largest_size_is_expanded() -> None:
    """The limit is that of the expanded body."""
    assert expanded(gzip.compress(b"a" * 1000), b"gzip", 1000) == b"a" * 1000
    with pytest.raises(Exception, match="larger than 999 bytes"):
        expanded(gzip.compress(b"a" * 1000), b"gzip", 999)
