"""Bodies of up to 100 kB that claim to be much larger, by what reads them: an address and a content
type, or a content coding.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
import zlib
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from carpool import Model, Service, Stage
from carpool.frames import Pandas, Polars
from carpool.http.compression import _zstd
from carpool.openai import Chat, Completion
from tests.http.bad_input import FORM, GZIP, NPY, npy_header, part, saved
from tests.support.http.served import Anything, Double, Frame, Named, Pair, Rows, flip, shout

MOST_BYTES = 150_000
LONG = "x" * 50_000
HUGE = 2**32 - 1


class Lie(NamedTuple):
    """A body that claims to be large.

    Attributes:
        what: What it claims.
        model: At which it is sent; empty where the address names none.
        body: Its bytes, what makes them, or what goes as JSON.
        headers: Besides its content type.
    """

    what: str
    model: str
    body: Any
    headers: tuple[str, ...] = ()

    @property
    def data(self) -> bytes:
        """The body as bytes."""
        body = self.body() if callable(self.body) else self.body
        return body if isinstance(body, bytes) else json.dumps(body).encode()


class Words(Model):
    """Lists of texts, as they came."""

    def predict(self, items: list[list[str]]) -> list[list[str]]:
        return items


class Records(Model):
    """The numbers of records."""

    def predict(self, items: list[Pair]) -> list[float]:
        return [sum(item["numbers"]) for item in items]


class Pictures(Model):
    """The size of a dataclass with an array in it."""

    def predict(self, items: list[Frame]) -> list[int]:
        return [item.pixels.size for item in items]


class Grids(Model):
    """Arrays of any dtype in lists."""

    def predict(self, items: list[list[NDArray[Any]]]) -> list[int]:
        return [len(item) for item in items]


class Embed(Model):
    """Vectors of texts."""

    def predict(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text))] for text in texts]


class Parrot(Model):
    """Says the last message again."""

    def predict(self, chats: list[Chat]) -> list[str]:
        return ["".join([message.text for message in chat.messages[-1:]]) for chat in chats]


class MyCompletion(Completion, kw_only=True):
    """A completion with a further parameter."""

    bias: dict[str, float] = {}  # noqa: RUF012


class Author(Model):
    """Goes on."""

    def predict(self, items: list[MyCompletion]) -> list[str]:
        return ["y" for _ in items]


class Score(Model):
    """Scores of pairs of texts."""

    def predict(self, pairs: list[tuple[str, str]]) -> list[float]:
        return [1.0 for _ in pairs]


class Table(Pandas):
    """Any columns."""

    def predict(self, frame: pd.DataFrame) -> list[float]:
        return [1.0] * len(frame)


class Texts(Pandas):
    """A column of texts."""

    columns = {"a": "str"}  # noqa: RUF012

    def predict(self, frame: pd.DataFrame) -> list[float]:
        return [1.0] * len(frame)


class Polar(Polars):
    """Any columns, of the other library."""

    def predict(self, frame: Any) -> list[float]:
        return [1.0] * len(frame)


MODELS: dict[str, Any] = {
    "double": Double,
    "any": Anything,
    "rows": Rows,
    "named": Named,
    "shout": shout,
    "flip": flip,
    "words": Words,
    "records": Records,
    "pictures": Pictures,
    "grids": Grids,
    "embed": Embed,
    "parrot": Parrot,
    "author": Author,
    "score": Score,
    "table": Table,
    "texts": Texts,
    "polar": Polar,
}


def services() -> list[Service]:
    """All models, each with a thread as its worker, so that all memory is this process's."""
    return [
        Service(Stage(model, max_batch_size=8 if isinstance(model, type) else None, run_in="thread"), name=name)
        for name, model in MODELS.items()
    ]


# -- what several formats can claim

ONE_LONG_TEXT = [LONG, *(["y"] * 12_000)]
UNLIKE_RECORDS = [{f"c{i}": 1} for i in range(4000)]
MANY = [1] * 40_000
COLUMNS_WITH_A_LONG_NAME = {LONG: [1] * 1000}


def packed_claims(model: str) -> list[Lie]:
    """Heads of msgpack with lengths of gigabytes."""
    heads = {"items": b"\xdd", "members": b"\xdf", "bytes": b"\xc6", "characters": b"\xdb"}
    claims = [Lie(f"{HUGE} {what}", model, head + b"\xff" * 4 + b"\x01" * 100) for what, head in heads.items()]
    inside = b"\x91" * 900 + b"\xdd\xff\xff\xff\xff"
    return [
        *claims,
        Lie(f"{HUGE} bytes of an extension", model, b"\xc9\xff\xff\xff\xff\1a"),
        Lie("deep", model, inside),
    ]


def arrow(table: Any, **options: Any) -> bytes:
    """A table as a stream."""
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return out.getvalue()


def column(values: Any, **options: Any) -> bytes:
    """A stream of a table of one column."""
    return arrow(pa.table({"a": values}), **options)


def shared_by_columns(n: int = 600, rows: int = 5000) -> bytes:
    """A stream of columns that are all the same bytes, of which none is compressed."""
    whole = arrow(pa.table({f"c{i}": np.zeros(rows) for i in range(n)}))
    schema, batch = (bytes(message.metadata) for message in pa.ipc.MessageReader.open_stream(whole))
    first = struct.pack("<qqqq", 0, 0, 0, 8 * rows)  # the buffers of a column: none for nulls, and its numbers
    begin, _, rest = batch.partition(first)
    batch = begin + first * n + rest[len(first) * (n - 1) :]
    batch = batch.replace(struct.pack("<q", n * 8 * rows), struct.pack("<q", 8 * rows))
    heads = [struct.pack("<iI", -1, len(each)) for each in (schema, batch, b"")]
    return b"".join([heads[0], schema, heads[1], batch, bytes(8 * rows), heads[2]])


def with_length(stream: bytes, old: int, new: int) -> bytes:
    """A stream with a number of 8 bytes changed wherever it stands."""
    return stream.replace(struct.pack("<q", old), struct.pack("<q", new))


def csv_of(*rows: list[str]) -> bytes:
    """Rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


WIDE = ",".join(f"c{i}" for i in range(4000)).encode()

TABLES = [
    Lie("rows of nulls", "table", column(pa.nulls(2**23))),
    Lie("rows without columns", "table", with_length(arrow(pa.table({"a": [1] * 77}).select([])), 77, 2**50)),
    Lie("a long column of few bytes", "table", with_length(column(pa.array([7] * 77)), 77, 2**50)),
    *(
        Lie(f"columns compressed by {codec}", "table", column(np.zeros(2**21), compression=codec))
        for codec in ("zstd", "lz4")
    ),
    Lie(
        "a buffer of 2**50 bytes when it is expanded",
        "table",
        with_length(column(np.zeros(2**14), compression="zstd"), 2**17, 2**50),
    ),
    Lie("columns that share their bytes", "table", shared_by_columns()),
    Lie("lists of nulls", "table", column(pa.ListArray.from_arrays([0, 2**30], pa.nulls(2**30)))),
    Lie("empty structs", "table", column(pa.array([{}] * 77, pa.struct([])))),
    Lie(
        "lists of no items",
        "table",
        column(pa.array([[1] * 77], pa.list_(pa.int8(), 77))).replace(b"M\0\0\0", bytes(4)),
    ),
    Lie(
        "references to a long text",
        "texts",
        column(pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int8)), pa.array(["x" * 30_000]))),
    ),
    Lie(
        "texts that share their bytes",
        "texts",
        column(
            pa.Array.from_buffers(
                pa.string_view(),
                2000,
                [None, pa.py_buffer(struct.pack("<i4sii", 60_000, b"xxxx", 0, 0) * 2000), pa.py_buffer(b"x" * 60_000)],
            )
        ),
    ),
    Lie(
        "lists that share their items",
        "table",
        column(pa.ListViewArray.from_arrays(np.zeros(2000, "i4"), np.full(2000, 5000, "i4"), pa.array(np.zeros(5000)))),
    ),
    Lie("runs", "table", column(pa.RunEndEncodedArray.from_arrays(pa.array([2**27], pa.int32()), pa.array([1.0])))),
]

SHEETS = [
    Lie("a name again and again", "table", b",".join([b"a"] * 25_000) + b"\n" + b",".join([b"1"] * 25_000)),
    Lie("a name, in a header that begins late", "table", b' \r"\n",' + b",".join([b"a"] * 40_000) + b"\r1\r"),
    Lie("short rows of a wide table", "table", WIDE + b"\r" + b"1\r" * 30_000),
    Lie("short rows and odd quotes", "table", WIDE + b"\n" + b'1"1\n' * 15_000),
    Lie("a row that is wider than its header", "table", b"a\r" + b"1," * 20_000 + b"\r" + b"1\r" * 20_000),
    Lie("a wide table", "table", WIDE + b"\n" + b",".join([b"1"] * 4000) + b"\n"),
    Lie("a number of many digits", "table", b"a\n" + b"9" * 100_000 + b"\n"),
]


def tensor(shape: list[int], datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    """A tensor, as JSON."""
    return {"name": "input", "shape": shape, "datatype": datatype, **more}


def infer(*inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A request with tensors."""
    return {"inputs": list(inputs), **more}


def binary(what: str, model: str, shape: list[int], datatype: str, data: bytes) -> Lie:
    """A request with a binary tensor."""
    body = json.dumps(infer(tensor(shape, datatype, parameters={"binary_data_size": len(data)}))).encode()
    return Lie(what, model, body + data, (f"Inference-Header-Content-Length: {len(body)}",))


_SHAPES: list[tuple[list[int], str]] = [
    ([2**40, 0], "any"),
    ([6_000_000, 0], "rows"),
    ([5, 2**40, 0], "any"),
    ([0, 2**47, 2**47], "any"),
    ([2**30], "shout"),
    ([2**62, 2**62], "any"),
    ([2] * 40_000, "any"),
    ([10**3000] * 10, "any"),
]
_OIP_JSON = [
    *(Lie(f"a shape of {str(shape)[:20]}", model, infer(tensor(shape, data=[]))) for shape, model in _SHAPES),
    Lie("texts of 2**30 rows", "shout", infer(tensor([2**30], "BYTES", data=[]))),
    Lie("numbers that are texts", "rows", infer(tensor([1, len(ONE_LONG_TEXT)], data=ONE_LONG_TEXT))),
    Lie("texts beside a long one", "words", infer(tensor([1, len(ONE_LONG_TEXT)], "BYTES", data=ONE_LONG_TEXT))),
    Lie(
        "an answer again and again",
        "any",
        infer(tensor([1, 9000], data=[1] * 9000), outputs=[{"name": "output"}] * 3000),
    ),
    Lie("many tensors", "any", infer(*[tensor([1024, 0], data=[])] * 1000)),
    Lie("a row in each byte", "double", infer(tensor([40_000], data=MANY))),
]
_OIP_BINARY = [
    binary("2**30 texts in no bytes", "shout", [2**30], "BYTES", b""),
    binary("rows of nothing", "any", [2**40, 0], "FP32", b""),
    binary("lists in lists", "any", [1, 100_000, *[1] * 30], "UINT8", bytes(100_000)),
    binary("a text of 4 GB", "shout", [1], "BYTES", b"\xff\xff\xff\xff" + b"x" * 100),
    binary("empty texts", "shout", [25_000], "BYTES", bytes(100_000)),
    Lie("a row in each byte", "double", bytes(100_000), ("Inference-Header-Content-Length: 0",)),
]
_INSTANCES = [
    Lie("many instances", "double", {"instances": MANY}),
    Lie("empty instances", "any", b'{"instances": [' + b"[]," * 30_000 + b"[]]}"),
    Lie("deep instances", "any", b'{"instances": ' + b"[" * 100_000),
    Lie("many rows", "table", {"instances": UNLIKE_RECORDS}),
]
_INPUTS = [
    Lie("a list of inputs", "double", {"inputs": MANY}),
    Lie("columns of inputs", "any", {"inputs": {"a": MANY}}),
    Lie("a name once in each row", "any", {"inputs": COLUMNS_WITH_A_LONG_NAME}),
    Lie("a name once in each row of a table", "table", {"inputs": COLUMNS_WITH_A_LONG_NAME}),
]


def _asked_again(lies: list[Lie], model: str) -> list[Lie]:
    """Those that go to a model, at an address that names none."""
    return [lie._replace(model="") for lie in lies if lie.model == model]


def _by_both_libraries(lies: list[Lie]) -> list[Lie]:
    return [*lies, *(lie._replace(model="polar") for lie in lies)]


_MESSAGES = [{"role": "user", "content": "x" * 90_000}]
_JSON, _MSGPACK, _RAW = "application/json", "application/msgpack", "application/octet-stream"
_LINES = "application/x-ndjson"
_PREDICT, _INFER = "/models/{}/predict", "/v2/models/{}/infer"

LIES: dict[tuple[str, str], list[Lie] | str] = {
    (_PREDICT, _JSON): [
        Lie("numbers that are texts", "rows", ONE_LONG_TEXT),
        Lie("numbers inside that are texts", "grids", [ONE_LONG_TEXT]),
        Lie("texts as an array", "words", ONE_LONG_TEXT, ("Accept: application/x-npy",)),
        *_by_both_libraries([Lie("records of different columns", "table", UNLIKE_RECORDS)]),
        *_by_both_libraries([Lie("a wide record", "table", [{f"c{i}": 1 for i in range(8000)}])]),
        Lie("empty lists", "any", [[]] * 25_000),
        Lie("deep lists", "any", b"[" * 100_000),
        Lie("a number of many digits", "double", b"9" * 100_000),
        Lie("a number with a large exponent", "double", b"1e999999999"),
    ],
    (_PREDICT, _MSGPACK): [
        *(lie for model in ("double", "any", "rows", "flip", "table") for lie in packed_claims(model)),
        Lie("numbers that are texts", "rows", msgspec.msgpack.encode(ONE_LONG_TEXT)),
        Lie("records of different columns", "table", msgspec.msgpack.encode(UNLIKE_RECORDS)),
    ],
    (_PREDICT, _RAW): "the body is the item",
    (_PREDICT, "text/plain"): "the body is the item",
    (_PREDICT, "application/x-npy"): [
        Lie("rows of nothing", "rows", saved(np.empty((6_000_000, 0), np.float32)), ("Accept: application/json",)),
        *(
            Lie(
                f"a shape of {shape[:20]}",
                "any",
                npy_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}"),
                ("Accept: application/json",),
            )
            for shape in (f"(1, {2**40}, 0)", f"(0, {2**47}, {2**47})", f"({2**62}, {2**62})", f"({'9' * 3000},)")
        ),
        Lie(
            "lists in lists",
            "any",
            saved(np.zeros((1, 100_000, *[1] * 29), np.uint8)),
            ("Accept: application/json",),
        ),
        Lie("items of 99 bytes", "any", npy_header("{'descr': '<f99', 'fortran_order': False, 'shape': (1,)}")),
        Lie("a header of 4 GB", "rows", b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100),
    ],
    (_PREDICT, "multipart/form-data"): [
        Lie("many parts", "double", part(b"1", 1000)),
        Lie("a long header", "double", b"--XX\r\n" + b"a: " + b"x" * 90_000 + b"\r\n\r\n1\r\n--XX--\r\n"),
        Lie("many headers", "double", b"--XX\r\n" + b"a: b\r\n" * 15_000 + b"\r\n1\r\n--XX--\r\n"),
        Lie("boundaries that are none", "double", b"--XX\r\n\r\n" + b"\r\n--X" * 15_000),
        Lie("line ends", "double", b"--XX\r\n\r\n" + b"\r" * 90_000),
        Lie("a deep list", "any", part(b"[" * 90_000)),
    ],
    (_PREDICT, "text/csv"): _by_both_libraries(SHEETS),
    (_PREDICT, "application/vnd.apache.arrow.stream"): _by_both_libraries(TABLES),
    (_PREDICT, _LINES): [Lie("a line in two bytes", "double", b"1\n" * 10_000)],
    (_PREDICT + "/many", _JSON): [
        Lie("many items", "double", MANY),
        Lie("empty items", "any", [[]] * 25_000),
        Lie("deep items", "any", b"[" * 100_000),
    ],
    (_PREDICT + "/many", _MSGPACK): [*packed_claims("double"), *packed_claims("any")],
    ("/vertex/predict", _JSON): _asked_again(_INSTANCES, "double"),
    (_INFER, _JSON): _OIP_JSON,
    (_INFER, _RAW): _OIP_BINARY,
    ("/v2/repository/index", _JSON): [
        Lie("deep", "", b"[" * 100_000),
        Lie("many members", "", {f"{i}": 1 for i in range(9000)}),
    ],
    ("/v1/models/{}:predict", _JSON): [*_INSTANCES, *_INPUTS],
    ("/invocations", _JSON): [
        *_asked_again(_INSTANCES, "double"),
        *_asked_again(_INPUTS, "double"),
        Lie("many rows", "", {"dataframe_split": {"columns": ["a"], "data": [[1]] * 25_000}}),
        Lie("many records", "", {"dataframe_records": MANY}),
        Lie("a name once in each row", "", {"dataframe_split": {"columns": [LONG], "data": [[1]] * 1000}}),
    ],
    ("/invocations", "text/csv"): [
        Lie("many lines", "", b"1\n" * 50_000),
        Lie("many fields", "", b"1," * 50_000),
        Lie("a field over many lines", "", b'"' + b"\n" * 100_000),
    ],
    ("/invocations", _MSGPACK): packed_claims(""),
    ("/v1/embeddings", _JSON): [
        Lie("many inputs", "", {"model": "embed", "input": [""] * 25_000}),
        Lie("many lists of tokens", "", {"model": "embed", "input": [[1]] * 20_000}),
    ],
    ("/v1/completions", _JSON): [
        Lie("prompts times n", "", {"model": "author", "n": 128, "prompt": [""] * 20_000}),
        Lie("a prompt times n", "", {"model": "author", "n": 128, "prompt": "x" * 90_000}),
        Lie(
            "parameters once for each prompt",
            "",
            {"model": "author", "prompt": [""] * 1000, "bias": {f"{i}": 1 for i in range(5000)}},
        ),
        Lie(
            "unknown parameters once for each prompt",
            "",
            {"model": "author", "prompt": [""] * 1000, **{f"{i}": 1 for i in range(5000)}},
        ),
    ],
    ("/v1/chat/completions", _JSON): [
        Lie("a chat times n", "", {"model": "parrot", "n": 128, "messages": _MESSAGES}),
        Lie("a chat times n, each with a seed", "", {"model": "parrot", "n": 128, "seed": 1, "messages": _MESSAGES}),
        Lie("long stops", "", {"model": "parrot", "stop": ["x" * 45_000 + "y"], "messages": _MESSAGES}),
        Lie("many messages", "", {"model": "parrot", "messages": [{"role": "a"}] * 6000}),
    ],
    ("/v1/rerank", _JSON): [
        Lie("many documents", "", {"model": "score", "query": "a", "documents": [""] * 25_000}),
        Lie("a query once for each document", "", {"model": "score", "query": LONG, "documents": [""] * 1000}),
        Lie("a query once for each text", "", {"model": "score", "query": LONG, "texts": [""] * 1000}),
    ],
}
"""By an address, with `{}` for the model, and a content type; or why nothing can be claimed there."""

CONTENT_TYPES = {"multipart/form-data": FORM}
"""The header of a content type that has parameters."""


def _bombs(compress: Any) -> list[Lie]:
    return [
        Lie("20 MB of spaces", "double", lambda: compress(b" " * 20_000_000)),
        Lie("20 MB of digits", "double", lambda: compress(b"1" * 20_000_000)),
    ]


def codings() -> dict[str, list[Lie]]:
    """By a content coding."""
    found = {
        "gzip": _bombs(lambda data: gzip.compress(data, 1)),
        "deflate": _bombs(lambda data: zlib.compress(data, 1)),
    }
    zstd = _zstd()
    if zstd is not None:
        wide = {zstd.CompressionParameter.window_log: 27}
        found["zstd"] = [
            *_bombs(zstd.compress),
            Lie("a window of 128 MiB", "double", zstd.compress(b" " * 2**20, options=wide)),
        ]
    return found


__all__ = ["CONTENT_TYPES", "GZIP", "LIES", "MODELS", "MOST_BYTES", "NPY", "Lie", "codings", "services"]


# -- sound bodies, for noise

_KINDS_OF_COLUMNS = {
    "numbers": [1.5, None],
    "words": ["a", "bc"],
    "lists": [[1], [2, 3]],
    "records": [{"x": 1}, {"x": 2}],
    "nulls": [None, None],
    "pairs": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int8())),
    "pixels": pa.array([[1, 2], [3, 4]], pa.list_(pa.uint8(), 2)),
    "views": pa.array(["a" * 20, "b"]).cast(pa.string_view()),
    "references": pa.array(["a", "b"]).dictionary_encode(),
    "truths": [True, False],
}

SOUND: list[tuple[str, str, Lie]] = [
    *(
        (_PREDICT, "application/vnd.apache.arrow.stream", Lie(name, "table", column(values)))
        for name, values in _KINDS_OF_COLUMNS.items()
    ),
    (
        _PREDICT,
        "application/vnd.apache.arrow.stream",
        Lie("all", "table", arrow(pa.table(_KINDS_OF_COLUMNS), compression="zstd")),
    ),
    (_PREDICT, "text/csv", Lie("rows", "table", csv_of(["a", "b"], ["1", "x"], ["2", 'y"z']))),
    (_PREDICT, "text/csv", Lie("old rows", "texts", b'a,b\r1,"x\r"\r2,3\r')),
    (_PREDICT, _JSON, Lie("records", "table", [{"a": 1, "b": "x"}, {"a": 2}])),
    (_PREDICT, _JSON, Lie("an array", "rows", [1, 2, 3])),
    (_PREDICT, _MSGPACK, Lie("records", "table", msgspec.msgpack.encode([{"a": 1, "b": "x"}, {"a": 2}]))),
    (_PREDICT, _MSGPACK, Lie("an array", "rows", msgspec.msgpack.encode([1, 2, 3]))),
    (_PREDICT, "application/x-npy", Lie("an array", "any", saved(np.ones((2, 3), np.float32)))),
    (_PREDICT + "/many", _JSON, Lie("items", "double", [1, 2, 3])),
    (_PREDICT + "/many", _MSGPACK, Lie("items", "double", msgspec.msgpack.encode([1, 2, 3]))),
    (_INFER, _JSON, Lie("rows", "any", infer(tensor([2, 2], data=[1, 2, 3, 4]), outputs=[{"name": "output"}]))),
    (_INFER, _JSON, Lie("texts", "shout", infer(tensor([2], "BYTES", data=["a", "b"])))),
    (_INFER, _RAW, binary("numbers", "any", [2, 2], "FP32", bytes(16))),
    (_INFER, _RAW, binary("texts", "shout", [2], "BYTES", b"\x01\0\0\0a\x01\0\0\0b")),
    ("/v1/models/{}:predict", _JSON, Lie("instances", "any", {"instances": [1, [2], {"b64": "YQ=="}]})),
    ("/v1/models/{}:predict", _JSON, Lie("columns", "any", {"inputs": {"a": [1, 2], "b": [3, 4]}})),
    ("/invocations", _JSON, Lie("rows", "", {"dataframe_split": {"columns": ["a"], "data": [[1], [2]]}})),
    ("/invocations", "text/csv", Lie("rows", "", b"a\n1\n2\n")),
    ("/v1/embeddings", _JSON, Lie("texts", "", {"model": "embed", "input": ["a", "b"], "dimensions": 1})),
    (
        "/v1/completions",
        _JSON,
        Lie("prompts", "", {"model": "author", "prompt": ["a", "b"], "n": 2, "seed": 3, "stop": ["c"]}),
    ),
    (
        "/v1/chat/completions",
        _JSON,
        Lie("a chat", "", {"model": "parrot", "messages": _MESSAGES[:0], "n": 2, "max_tokens": 3}),
    ),
    (
        "/v1/rerank",
        _JSON,
        Lie("documents", "", {"model": "score", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ),
]
"""Bodies that say what they are: addresses and content types as in `LIES`."""
