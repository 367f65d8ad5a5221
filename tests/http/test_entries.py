"""Results and errors side by side: no result looks like an error, whatever it is."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.wire.payload import JSON, MSGPACK
from carpool.http import entries
from tests.support.properties import PROPERTY
from tests.support.signs import SIGNS, result_of

ENCODE = {JSON: msgspec.json.encode, MSGPACK: msgspec.msgpack.encode}
DECODE = {JSON: msgspec.json.decode, MSGPACK: msgspec.msgpack.decode}


values = st.recursive(
    st.none() | st.integers(-5, 5) | st.sampled_from(["", "\n", "error", "result", "[DONE]", "\u2028"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["error", "result", "part", "end"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@PROPERTY
@given(value=values, format=st.sampled_from([JSON, MSGPACK]))
def test_each_result_is_found_in_its_entry(value: Any, format: int) -> None:
    """Who reads an entry as the docs say has the result back, and never takes it for an error."""
    entry = entries.of_result(ENCODE[format](value), format)
    assert result_of(DECODE[format](entry)) == value
    if format == JSON:
        assert not entries.is_error(entry) and b"\n" not in entry
        assert msgspec.json.decode(entries.result_in(entry)) == value


@PROPERTY
@given(several=st.lists(values, max_size=5))
def test_lines_are_those_of_single_results(several: list[Any]) -> None:
    """Results that are written together are those that would have been written one by one."""
    results = [msgspec.json.encode(value) for value in several]
    assert entries.of_results(results) == b"".join(entries.of_result(result) + b"\n" for result in results)


@pytest.mark.parametrize("value", SIGNS, ids=repr)
@pytest.mark.parametrize(
    "write",
    [
        lambda value: json.dumps(value).encode(),
        lambda value: json.dumps(value, indent=1).encode(),
        lambda value: b"\r\n " + json.dumps(value, ensure_ascii=False, indent="\t").encode() + b"\n\n",
        lambda value: json.dumps(value).replace("error", "\\u0065rror").encode(),
    ],
    ids=["spaced", "indented", "with line ends around", "with escapes in keys"],
)
def test_what_a_model_writes_itself_is_one_line(value: Any, write: Any) -> None:
    """A body in any layout becomes an entry on one line that reads as the same value."""
    entry = entries.of_result(entries.value_in(write(value), JSON))
    assert result_of(json.loads(entry)) == json.loads(write(value))
    assert not {b"\n", b"\r"} & {entry[i : i + 1] for i in range(len(entry))} and not entries.is_error(entry)


@pytest.mark.parametrize("body", [b"", b" ", b"1,2", b"1\n2", b"{", b'{"error":', b'"\xff"', b"[" * 5000, b"NaN"])
def test_what_is_not_one_value_of_json_is_refused(body: bytes) -> None:
    """It would shift all answers after it."""
    with pytest.raises(ValueError, match=r"not one value|utf-8"):
        entries.value_in(body, JSON)


@pytest.mark.parametrize("body", [b"", b"\x01\x02", b"\x91", b"\xc1"])
def test_what_is_not_one_value_of_msgpack_is_refused(body: bytes) -> None:
    """It would shift all answers after it."""
    with pytest.raises(ValueError, match="not one value"):
        entries.value_in(body, MSGPACK)


def test_an_error_is_an_error() -> None:
    """Errors of ours are read as such; what cannot be read is none."""
    assert entries.is_error(entries.of_error({"code": "x"}))
    assert not entries.is_error(b'{"error":') and not entries.is_error(b'{"error":1,"label":2}')
