"""How deep bodies may be nested: told before they are read, since a raised recursion limit leaves no other guard."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.hints import nesting, schema
from carpool.engine.hints.nesting import MOST_LEVELS, is_deep_json, is_deep_msgpack

FILLER = [[1, {"a": [2.5, None, '[[{"\\', b"\x91\xdd"]}]] * (MOST_LEVELS // 2)


def nested(depth: int, inside: Any = 1) -> Any:
    """Lists and objects in turns, so many around `inside`, with something behind each."""
    value = inside
    for level in range(depth):
        value = [value, "]"] if level % 2 else {"k[": value, "z}": "\\"}
    return value


@pytest.mark.parametrize("kind", ["json", "msgpack"])
@pytest.mark.parametrize("inside", [1, FILLER], ids=["little", "much"])
def test_the_border(kind: str, inside: Any) -> None:
    """A value with exactly the allowed levels is shallow, and one with one more is deep, whatever
    strings and neighbours look like.
    """
    encode = getattr(msgspec, kind).encode
    is_deep = getattr(nesting, f"is_deep_{kind}")
    own = 4 if inside is FILLER else 0

    with raised_limit():
        assert not is_deep(encode(nested(MOST_LEVELS - own, inside)))
        assert is_deep(encode(nested(MOST_LEVELS - own + 1, inside)))


class raised_limit:
    """The recursion limit of a program that goes deep; only this test's own values need it."""

    def __enter__(self) -> None:
        self._before = sys.getrecursionlimit()
        sys.setrecursionlimit(5000)

    def __exit__(self, *exc: object) -> None:
        sys.setrecursionlimit(self._before)


def depth_of(value: Any) -> int:
    """Levels of lists and dictionaries."""
    if not isinstance(value, list | dict):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


TEXTS = st.text(st.sampled_from('[]{}"\\ab'), max_size=6)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-(2**63), 2**63), st.floats(allow_nan=False), st.none(), st.binary(max_size=40)),
    lambda inside: st.lists(inside, min_size=1, max_size=20) | st.dictionaries(TEXTS, inside, min_size=1, max_size=20),
    max_leaves=60,
)


@given(VALUES, st.integers(0, 6))
def test_any_value(value: Any, most: int) -> None:
    """For any value the scan says of its depth what a recursive look says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "MOST_LEVELS", most)
        assert is_deep_msgpack(msgspec.msgpack.encode(value)) == (depth_of(value) > most)
        assert is_deep_json(msgspec.json.encode(value)) == (depth_of(value) > most)


@given(st.binary(max_size=300))
def test_any_bytes(body: bytes) -> None:
    """The scan gives an answer for random bytes, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "MOST_LEVELS", 2)
        assert is_deep_msgpack(body) in (True, False)
        assert is_deep_json(body) in (True, False)


def test_strings_and_broken_bodies_do_not_count() -> None:
    """Brackets in strings are text, whatever is escaped there, and what follows an error is never
    read.
    """
    many = b"[" * (MOST_LEVELS + 1)

    assert is_deep_json(many)
    assert is_deep_json(b'["a\\\\",' + many)
    assert not is_deep_json(b'"' + many)
    assert not is_deep_json(b'"\\"' + many + b'"')
    assert not is_deep_json(b"[]" * MOST_LEVELS * 2)
    assert not is_deep_msgpack(b"\xc4\xff" + b"\x91" * 255 + b"\x90" * MOST_LEVELS)
    assert is_deep_msgpack(b"\xdd\xff\xff\xff\xff" * (MOST_LEVELS + 1))


def test_small_bodies_and_usual_limits_cost_a_comparison() -> None:
    """A body that is too short to be deep is not scanned, nor is any while the interpreter itself
    is on guard.
    """
    asked = []
    read = nesting.bounded(len, lambda body: bool(asked.append(body)))  # type: ignore[func-returns-value]

    assert read(b"[" * MOST_LEVELS) == MOST_LEVELS
    assert read(b"[" * 10 * MOST_LEVELS) == 10 * MOST_LEVELS
    assert asked == []
    with raised_limit():
        read(b"[" * MOST_LEVELS)
        assert asked == []
        read(b"[" * (MOST_LEVELS + 1))
    assert len(asked) == 1


DEEP = """
import sys
sys.setrecursionlimit(10**6)
from carpool.engine.hints import schema
from carpool.errors import InvalidRequest
from carpool.engine.request import Request
from carpool.service.weigh import Weigher
from carpool.engine.wire.payload import JSON, MSGPACK

weigher = Weigher(len, "stage s", object)
def weigh(body, format):
    try:
        weigher.weigh_encoded(Request(body, 60.0), body, format)
    except InvalidRequest as error:
        print(error.status, error)

for format, body in ((JSON, b"[" * 2**21), (JSON, b'{"a":' * 2**19), (MSGPACK, b"\\x91" * 2**21)):
    weigh(body, format)
"""


@pytest.mark.fault("F69")
def test_a_program_with_a_raised_recursion_limit_is_not_ended() -> None:
    """Regression: two megabytes of `[` were a segmentation fault where `sys.setrecursionlimit` had been raised."""
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "400 the JSON is nested too deeply",
        "400 the JSON is nested too deeply",
        "400 the msgpack is nested too deeply",
    ]


@pytest.mark.parametrize(("kind", "body"), [("json", b"[" * 10**5), ("msgpack", b"\x91" * 10**5)])
def test_the_usual_limit_is_a_guard(kind: str, body: bytes) -> None:
    """With the usual recursion limit the interpreter refuses the same bodies by itself."""
    with pytest.raises(RecursionError) as caught:
        getattr(schema, f"{kind}_reader")(Any)(body)

    assert str(schema.as_our_error(caught.value, kind)) == f"the {kind} is nested too deeply"


def test_a_batch_is_looked_over_only_where_the_recursion_limit_has_been_raised() -> None:
    """A batch is scanned for depth only where the recursion limit has been raised, for which its
    readers ask once.
    """
    reader = schema.json_reader(Any)
    with raised_limit():
        assert nesting.for_now(reader) is reader
    plain = nesting.for_now(reader)
    assert plain is not reader and plain(b"[1]") == [1] and nesting.for_now(bytes) is bytes
    with pytest.raises(RecursionError):
        plain(b"[" * 10**5)
