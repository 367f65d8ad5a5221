"""Requests that a predict endpoint will get one day, and what each may be answered with.

Made after the published faults of HTTP servers and model servers. Every entry is the bytes and the statuses that are
right for them, or `DROP` where the connection may also be ended without a word. `SECRET` marks what must never come
back.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass

from tests.support.http.front import chunked, get, post

SECRET = "kqzx"
DROP = 0


@dataclass(frozen=True)
class Bad:
    """Attributes:
    data: the bytes; statuses: which are right.
    closes: whether the connection must end.
    """

    data: bytes
    statuses: tuple[int, ...]
    closes: bool = True


def bad(data: bytes, *statuses: int) -> Bad:
    """Refused, and the connection ends."""
    return Bad(data, statuses)


def fair(data: bytes, *statuses: int) -> Bad:
    """Sound HTTP: the connection goes on."""
    return Bad(data, statuses, closes=False)


def item(body: bytes, *statuses: int, path: str = "/predict", kind: str = "application/json") -> Bad:
    """A body that cannot be an item."""
    return Bad(post(body, path, f"Content-Type: {kind}"), statuses, closes=False)


def echo(body: bytes, *statuses: int, kind: str = "application/json") -> Bad:
    """A body for the model that takes anything."""
    return item(body, *statuses, path="/models/echo/predict", kind=kind)


def packed(body: bytes, *statuses: int) -> Bad:
    """msgpack for the model that takes anything."""
    return echo(body, *statuses, kind="application/msgpack")


def framed(*lines: str, body: bytes = b"") -> bytes:
    """A POST with these header lines behind its Host."""
    return "\r\n".join(["POST /predict HTTP/1.1", "Host: test", *lines, "", ""]).encode("latin-1") + body


def with_length(length: str) -> bytes:
    """A POST of five bytes that says it has another length."""
    return framed(f"Content-Length: {length}", body=b"12345")


def coded(coding: str) -> bytes:
    """A chunked POST that names its coding in its own way."""
    return framed(f"Transfer-Encoding: {coding}", body=b"1\r\n1\r\n0\r\n\r\n")


def in_chunks(raw: bytes) -> bytes:
    """A POST with this chunked body, as it is."""
    return framed("Transfer-Encoding: chunked", body=raw)


class _Canary:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return open, ("/tmp/carpool-canary",)  # what would happen if somebody unpickled it is seen to be absent


CANARY = pickle.dumps(_Canary())

_NO_ADDRESSES = [
    *("/nowhere", "/predict/", "//predict", "/./predict", "/x/../predict", "/%2e%2e/predict", "/predict%00"),
    *("/%2fpredict", "/Predict", "/models", "/models/", "/models/scale", "/models//predict", "/predict;x", "/livez/"),
]
_NO_TYPES = [
    *("application/x-pickle", "application/octet-stream+pickle", "application/vnd.bentoml+pickle"),
    *("application/x-python-serialize", "text/html", "application/json; charset=utf-16", "multipart/mixed"),
    *("application/x-www-form-urlencoded", "application/octet-stream", "json", "/", ";", SECRET * 2048),
    *("application/jsonx", "application/x+json+pickle", "\xfc/\xfc"),
]
_NO_JSON = [
    *(b"{", b"[1,]", b"{'a':1}", b"nul", b"{}x", b"1 2", b"\xef\xbb\xbf1", b"[", b'"', b"01", b"+1", b".5", b"//1"),
    *(b"NaN", b"Infinity", b"-Infinity", b'{"a" 1}', "1".encode("utf-16"), "[1]".encode("utf-32"), b"\x00"),
]

FRAMING = {
    "garbage": bad(b"GARBAGE\r\n\r\n", 400),
    "a million empty lines": bad(b"\r\n" * 10**6, 400, 431, DROP),
    "TLS": bad(bytes.fromhex("16030100a5010000a10303") + b"\x01" * 154, 400, DROP),
    "HTTP/2 preface": bad(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, 505),
    "bare line feeds": bad(b"POST /predict HTTP/1.1\nHost: a\nContent-Length: 1\n\n1", 400),
    "HTTP/1.2": bad(post(b"1", version="1.2"), 400, 505),
    "HTTP/2.0": bad(post(b"1", version="2.0"), 400, 505),
    "HTTP/9": bad(post(b"1", version="9"), 400, 505),
    "FTP": bad(post(b"1").replace(b"HTTP/1.1", b"FTP/1.1"), 400),
    "HTTP/0.9": bad(b"GET /livez\r\n\r\n", 400, 505),
    "tab in the request line": bad(b"GET\t/livez HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "NUL in the address": bad(get("/li\x00vez"), 400),
    "space in the address": bad(get("/li vez"), 400),
    # a server has to take an address with scheme and host as it takes the path alone (RFC 9112, 3.2.2)
    "absolute address": fair(get("http://evil/predict"), 405),
    "absolute address without a path": fair(get("http://evil?x"), 200),
    "absolute address of another kind": bad(get("ftp://evil/predict"), 400),
    "absolute address without a host": bad(get("http:///predict"), 400),
    "absolute address with a name": bad(get("http://me@evil/livez"), 400),
    "absolute address without a host line": bad(get("http://evil/livez").replace(b"Host: test\r\n", b""), 400),
    "absolute address with a bad host line": bad(get("http://evil/livez").replace(b"Host: test", b"Host: a/b"), 400),
    "authority as address": bad(get("evil:80"), 400),
    "asterisk for another method": bad(get("*"), 400),
    "asterisk and more": bad(get("*?x", method="OPTIONS"), 400),
    "relative address": bad(get("foo/bar"), 400),
    "length and chunked": bad(framed("Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    "chunked and length": bad(framed("Transfer-Encoding: chunked", "Content-Length: 5", body=b"0\r\n\r\n"), 400),
    "two lengths": bad(framed("Content-Length: 5", "Content-Length: 6", body=b"12345"), 400),
    "the same length twice": bad(framed("Content-Length: 5", "Content-Length: 5", body=b"12345"), 400),
    **{
        f"length {length!r}": bad(with_length(length), 400, 413)
        for length in (
            "5, 5",
            "-1",
            "+5",
            "0_1",
            "0x10",
            "5 1",
            "1" + "0" * 30,
            "\u0663".encode().decode("latin-1"),
            "",
            "5.0",
        )
    },
    **{f"length of {n} digits": bad(with_length("5".zfill(n)), 400) for n in (21, 4300, 4301, 30_000)},
    "a length of 2^62": bad(with_length(str(2**62)), 413),
    **{
        f"coding {coding}": bad(coded(coding), 400, 501)
        for coding in ("gzip, chunked", "chunked, chunked", "identity", "xchunked", "chunked, gzip", "\x0bchunked", "")
    },
    "two codings": bad(framed("Transfer-Encoding: chunked", "Transfer-Encoding: identity", body=b"0\r\n\r\n"), 400),
    "chunked in HTTP/1.0": bad(coded("chunked").replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
    **{
        f"chunk size {size!r}": bad(in_chunks(size + b"\r\n12345\r\n0\r\n\r\n"), 400, 413)
        for size in (b"-5", b"+5", b"0x5", b"5_0", b"5 ", b"", b"f" * 17, b"5\n5")
    },
    "chunk without its end": bad(in_chunks(b"1\r\n123\r\n0\r\n\r\n"), 400),
    "bare line feed behind a chunk size": bad(in_chunks(b"1\n1\r\n0\r\n\r\n"), 400),
    "bare line feed behind a chunk": bad(in_chunks(b"1\r\n1\n0\r\n\r\n"), 400),
    "chunk extension of a megabyte": bad(in_chunks(b"1;x=" + b"y" * 2**20 + b"\r\n1\r\n0\r\n\r\n"), 400, 413, 431),
    "a hundred thousand chunks": bad(in_chunks(b"1\r\n1\r\n" * 10**5 + b"0\r\n\r\n"), 400, 413),
    **{
        f"trailer {trailer.partition(':')[0]}": bad(chunked(b"1", trailers=(trailer,)), 400)
        for trailer in ("Content-Length: 1", "Host: evil", "Transfer-Encoding: chunked")
    },
    "trailers of a megabyte": bad(chunked(b"1", trailers=("X: " + "y" * 2**20,)), 400, 431),
    "many trailers": bad(chunked(b"1", trailers=("X: y",) * 100), 400, 431),
    "folded header": bad(framed("X: a", " b", "Content-Length: 1", body=b"1"), 400),
    "space before the colon": bad(framed("X : a", "Content-Length: 1", body=b"1"), 400),
    "no colon": bad(framed("X", "Content-Length: 1", body=b"1"), 400),
    "no name": bad(framed(": a", "Content-Length: 1", body=b"1"), 400),
    "CR in a value": bad(framed("X: a\rb", "Content-Length: 1", body=b"1"), 400),
    "NUL in a value": bad(framed("X: a\x00b", "Content-Length: 1", body=b"1"), 400),
    "BEL in a value": bad(framed("X: a\x07b", "Content-Length: 1", body=b"1"), 400),
    "non-ASCII name": bad(framed("\xfc: a", "Content-Length: 1", body=b"1"), 400),
    "two hosts": bad(framed("Host: test", "Content-Length: 1", body=b"1"), 400),
    "no host": bad(b"GET /livez HTTP/1.1\r\n\r\n", 400),
    **{
        f"host {host[:9]!r}": bad(get().replace(b"Host: test", f"Host: {host}".encode()), 400, 431)
        for host in ("a/b", "a@b", "a b", "a, b", "x" * 2**20)
    },
    "another request in a short body": bad(
        framed("Content-Length: 1", body=b"1POST /evil HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n"), 200, 400
    ),
}

LIMITS = {
    "address of 9 KiB": bad(get("/livez?" + SECRET * (9 * 256)), 414),
    "65 headers": bad(get("/livez", *["X: y"] * 64), 431),
    "headers of 33 KiB": bad(get("/livez", *[f"X: {SECRET * 256}"] * 33), 431),
    "one header of 33 KiB": bad(get("/livez", "X: " + SECRET * (33 * 256)), 431),
    "a hundred thousand cookies": bad(get("/livez", "Cookie: " + "; ".join(["a=b"] * 10**5)), 431),
    "body over the limit": bad(post(b"x" * (2**20 + 1)), 413),
    "chunked body over the limit": bad(chunked(*[b"x" * 1024] * 1025), 413),
    "body over the limit, expected": bad(framed("Expect: 100-continue", f"Content-Length: {2**20 + 1}"), 413),
    "another expectation": bad(framed("Expect: x", "Content-Length: 1", body=b"1"), 417),
    "two gigabytes for nobody": bad(framed(f"Content-Length: {2**31}").replace(b"/predict", b"/nowhere"), 404, 413),
}

ROUTES = {
    "GET predict": fair(get("/predict"), 405),
    **{f"{m} predict": fair(get("/predict", method=m), 405) for m in ("PUT", "DELETE", "PATCH", "HEAD", "TRACE")},
    "TRACE": fair(get("/livez", method="TRACE"), 405),
    "CONNECT": bad(get("evil:80", method="CONNECT"), 400, 405, 501),
    "a long method": bad(get("/livez", method="A" * 1024), 400, 405),
    "lower-case method": bad(post(b"1").replace(b"POST", b"post"), 400, 405),
    "POST livez": bad(post(b"1", "/livez"), 405),
    **{f"address {path!r}": fair(get(path), 404) for path in _NO_ADDRESSES},
    **{
        f"model {name[:12]!r}": fair(get(f"/models/{name}/predict"), 404)
        for name in ("../m", "..\\m", "m/subdir", "%20", "%09", ".", "m%0d%0aX:%20y", SECRET * 75)
    },
    "a model with a quoted letter": fair(get("/models/%73cale/predict"), 405),
    "model with a space": bad(get("/models/ /predict"), 400),
    "model with a line break": bad(get("/models/m\r\nX: y/predict"), 400, 505),
    "post to a model that is not there": bad(post(b"1", f"/models/{SECRET}/predict"), 404),
}

MEDIA = {
    **{f"type {kind[:30]}": bad(post(CANARY, "/predict", f"Content-Type: {kind}"), 415) for kind in _NO_TYPES},
    **{
        f"encoding {coding}": bad(post(b"1", "/predict", f"Content-Encoding: {coding}"), 415)
        for coding in ("br", "gzip", "zstd", "gzip, gzip", "deflate", SECRET)
    },
}

JSON = {
    "empty": item(b"", 400),
    **{f"broken {body!r}": echo(body, 400) for body in _NO_JSON},
    "control character in a string": echo(b'"a\x01b"', 400),
    "half a surrogate pair": echo(b'"\\ud800"', 400, 422),
    "depth of 100,000": echo(b"[" * 10**5, 400),
    "depth of 100,000, closed": echo(b"[" * 10**5 + b"]" * 10**5, 400),
    "depth of 100,000 in objects": echo(b'{"a":' * 10**5, 400),
    "a number too large": echo(b"1e400", 400, 422),
    "a number of 5,000 digits": echo(b"9" * 5000, 400, 422),
    **{
        f"no number: {body[:20]!r}": item(body, 422)
        for body in (b'"1"', b"true", b"null", b"[1]", b"{}", f'"{SECRET}"'.encode(), f'{{"{SECRET}":1}}'.encode())
    },
    "a missing field": item(b"{}", 422, path="/models/gated/predict"),
    "a wrong field": item(b'{"value": "1"}', 422, path="/models/gated/predict"),
    "a string where an object should be": item(b'"__class__"', 422, path="/models/gated/predict"),
}

INVALID_UTF8 = {
    f"invalid UTF-8 {body!r}": echo(b'"' + body + b'"', 400) for body in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80")
}

MSGPACK = {
    "empty": packed(b"", 400),
    "truncated": packed(b"\x92\x01", 400),
    "trailing": packed(b"\x01\x01", 400),
    **{
        f"claims 2^32-1: {kind:02x}": packed(bytes([kind]) + b"\xff" * 4, 400)
        for kind in (0xDD, 0xDF, 0xC6, 0xDB, 0xC9)
    },
    "depth of 100,000": packed(b"\x91" * 10**5, 400),
    "never used": packed(b"\xc1", 400),
    "extension": packed(b"\xd4\x01\x00", 200, 400, 422, 500),
    "timestamp out of range": packed(b"\xc7\x0c\xff" + struct.pack(">Iq", 2**32 - 1, -(2**63)), 400, 422),
    "an unhashable key": packed(b"\x81\x80\x01", 400, 422),
    "msgpack-numpy with a pickle": packed(
        b"\x83\xa2nd\xc3\xa4kind\xa1O\xa4data\xc4" + bytes([len(CANARY)]) + CANARY, 200, 400, 422
    ),
    "a wrong type": item(b"\xa11", 422, kind="application/msgpack"),
    "JSON that says it is msgpack": packed(b'{"a": 1}', 400),
}

HEADERS = {
    **{
        f"time-out {value!r}": bad(post(b"1", "/predict", f"X-Request-Timeout-Ms: {value}"), 400)
        for value in ("0", "-1", "nan", "abc", "", "1_000", "0x10", "1 2", "\xb2", "-inf", SECRET)
    },
    **{
        f"priority {value!r}": bad(post(b"1", "/predict", f"X-Request-Priority: {value}"), 400)
        for value in ("abc", "", "101", "-101", "1.5", "1_0", "\xb2", "+", "9" * 5000, SECRET)
    },
}

ALL = {
    f"{name}: {case}": value
    for name, group in (
        ("framing", FRAMING),
        ("limits", LIMITS),
        ("routes", ROUTES),
        ("media", MEDIA),
        ("json", JSON),
        ("utf-8", INVALID_UTF8),
        ("msgpack", MSGPACK),
        ("headers", HEADERS),
    )
    for case, value in group.items()
}
