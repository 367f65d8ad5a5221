"""Scalars as payloads, and many as one block: beside what pickle makes of each."""

from __future__ import annotations

import enum
import pickle
import struct
from datetime import UTC
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.engine.wire.frame import Frame, FrameKind, FrameReader
from carpool.engine.wire.payload import (
    LARGE,
    SCALARS,
    Scalars,
    are_scalars,
    as_scalars,
    dump,
    load,
    pack_scalars,
    unpack_scalars,
)
from tests.support.frames import data_of, receive
from tests.support.properties import PROPERTY

surrogates = st.text(st.characters(categories=["Cs", "L"]), max_size=5)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.text(st.characters(codec="ascii")),
    st.text(),
    surrogates,
)
EDGES = [
    *(0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 3**5000),
    *(0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 5e-324, 1.0, True, False, None),
    *("", "\0", "abc", "\x7f", "\x80", "é", "\U0001f697", "\ud83d", "\ude97", "x" * 31, "x" * (LARGE - 1), "x" * LARGE),
    struct.unpack("<d", b"\1\0\0\0\0\0\xf8\x7f")[0],  # a NaN that says more
]


class Colour(enum.IntEnum):
    """An integer by name."""

    RED = 1


class Name(str):
    """A text that is more than a text."""


DERIVED = [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("x"), Colour.RED, Name("x")]


def seen(value: Any) -> tuple[Any, ...]:
    """All that a program can tell of it."""
    bits = struct.pack("<d", value) if type(value) is float else None
    return type(value), bits or value


def across(values: list[Any], kind: FrameKind = FrameKind.REPLY) -> list[Any]:
    """The values of a batch as the other process gets them."""
    n = len(values)
    frame = Frame(kind, 1, list(range(n)), bytes(n), payloads=[dump(value) for value in values])
    if kind == FrameKind.BATCH:
        frame.accepts, frame.deadlines = bytes(n), [0.0] * n
    (received,) = receive(FrameReader(), data_of(frame))
    return [load(payload) for payload in received.payloads]


@PROPERTY
@given(st.lists(scalars, min_size=1, max_size=5), st.sampled_from([FrameKind.BATCH, FrameKind.REPLY]))
def test_scalars_come_back_as_out_of_pickles(values: list[Any], kind: FrameKind) -> None:
    """Type and value, to the last bit of a float, whether they are one block or not."""
    expected = [seen(pickle.loads(pickle.dumps(value, 5))) for value in values]

    assert [seen(value) for value in across(values, kind)] == expected


@pytest.mark.parametrize("edge", [*EDGES, *DERIVED], ids=lambda edge: f"{type(edge).__name__} {edge!r:.20}")
@pytest.mark.parametrize("others", [[], [0.5], [True], ["text"], [1], [b"other"]], ids=str)
def test_each_edge_comes_back_in_any_company(edge: Any, others: list[Any]) -> None:
    """Also what only looks like a scalar, which is pickled."""
    for values in ([edge, *others], [*others, edge], [edge, edge, *others]):
        expected = [seen(pickle.loads(pickle.dumps(value, 5))) for value in values]
        assert [seen(value) for value in across(values)] == expected


@PROPERTY
@given(st.lists(scalars, min_size=1, max_size=6))
def test_a_list_of_results_is_payloads_as_if_each_were_dumped(values: list[Any]) -> None:
    """What a worker sees at a glance is what looking at each would have told."""
    together = as_scalars(values, set(map(type, values)))
    each = [dump(value) for value in values]

    if together is not None:
        assert type(together) is Scalars
        assert [seen(value) for value in together] == [seen(payload) for payload in each]
        assert together is not values
    elif len(set(map(type, values))) == 1:
        assert not are_scalars(each)


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{type(edge).__name__} {edge!r:.20}")
def test_an_edge_among_results_is_a_payload_as_if_it_were_dumped(edge: Any) -> None:
    """One that `dump` packs keeps all of them from going as they are."""
    together = as_scalars([edge, edge], {type(edge)})

    assert (together is not None) == (dump(edge) is edge)


@pytest.mark.parametrize("derived", DERIVED, ids=lambda value: type(value).__name__)
def test_what_is_derived_from_a_scalar_is_none(derived: Any) -> None:
    """It would come back as something else."""
    assert as_scalars([derived, derived], {type(derived)}) is None
    assert not are_scalars([derived])
    assert not are_scalars([0.5, derived])
    assert type(dump(derived)) is bytes


def test_scalars_are_one_block() -> None:
    """One buffer, read in one go."""
    frame = Frame(FrameKind.REPLY, 1, [1, 2, 3], bytes(3), payloads=[0.5, 7, "x"])
    (received,) = receive(FrameReader(), data_of(frame))

    assert type(received.payloads) is Scalars
    assert data_of(frame).endswith(pack_scalars([0.5, 7, "x"]))


@pytest.mark.parametrize(
    ("payloads", "are"), [([], False), ([1, 2.0], True), ([b"1", 2.0], False), ([1, b"2"], False), ([[b""], 1], False)]
)
def test_only_scalars_are_scalars(payloads: list[Any], are: bool) -> None:
    """In whatever place something else is."""
    assert are_scalars(payloads) == are


@PROPERTY
@given(st.binary(max_size=20), st.integers(0, 5))
@example(b"\x92\x01\xca\0\0\0\0", 2)
@example(b"\x91\xdd\xff\xff\xff\xff", 1)
def test_noise_is_refused_or_means_what_it_says(data: bytes, count: int) -> None:
    """ValueError, or so many scalars, of which the bytes are just what would be written."""
    try:
        read = unpack_scalars(data, count)
    except ValueError:
        return
    assert len(read) == count
    assert set(map(type, read)) <= SCALARS
    assert pack_scalars(read) == data


nested = st.recursive(
    st.one_of(
        scalars.filter(lambda x: type(x) not in (str, int)), st.binary(max_size=3), st.datetimes(timezones=st.just(UTC))
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text("ab", max_size=2), inner, max_size=3)),
    max_leaves=5,
)


@PROPERTY
@given(st.lists(nested, min_size=1, max_size=4))
def test_whatever_msgpack_can_say_only_scalars_are_taken(values: list[Any]) -> None:
    """A worker that is not ours may put anything into an array."""
    data = msgspec.msgpack.encode(values)
    if set(map(type, values)) <= SCALARS:
        assert [seen(value) for value in unpack_scalars(data, len(values))] == [seen(value) for value in values]
    else:
        with pytest.raises(ValueError, match=r"."):
            unpack_scalars(data, len(values))
