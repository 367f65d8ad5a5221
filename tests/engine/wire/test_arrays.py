"""Small arrays as their elements, and many as one block: beside what pickle makes of each."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.engine.wire import arrays
from carpool.engine.wire.arrays import Block, block_of, block_of_rows, read_head
from carpool.engine.wire.frame import MAX_FRAME_BYTES, Frame, FrameKind, FrameReader, encode, in_pieces
from carpool.engine.wire.payload import LARGE, Payload, dump, load, size_of
from tests.support.frames import data_of, receive
from tests.support.properties import PROPERTY

Array = np.ndarray[Any, Any]
DTYPES = ["?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "F", "D"]
OTHER_DTYPES = [">i4", ">f8", "g", "G", "S3", "U2", "M8[ns]", "m8[D]", "V4", "i4,f8", "O"]


def seen(array: Array) -> tuple[Any, ...]:
    """All that a program can tell of an array."""
    flags = array.flags
    layout = flags.c_contiguous, flags.f_contiguous, flags.writeable, flags.aligned
    elements = array.tolist() if array.dtype.hasobject else array.tobytes()
    return type(array), array.dtype, array.shape, layout, elements


def block_sent(values: list[Array]) -> Any:
    """The payloads of a frame with these items, as they are received."""
    n = len(values)
    frame = Frame(FrameKind.REPLY, 1, list(range(n)), bytes(n), payloads=[dump(value) for value in values])
    (received,) = receive(FrameReader(), data_of(frame))
    return received.payloads


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def views(draw: st.DrawFn, dtypes: list[str] = DTYPES + OTHER_DTYPES) -> Array:
    """Arrays of any dtype, sliced with any step, with their axes in any order, to be written to or not."""
    shape, seed = draw(shapes), draw(st.integers(0, 1000))
    made = np.random.default_rng(seed).integers(0, 100, shape)
    array: Array = np.asarray(made).astype(draw(st.sampled_from(dtypes)))
    array = array[(..., *[slice(None, None, draw(st.sampled_from([1, 1, 1, 2, -1]))) for _ in shape])]
    array = array.transpose(draw(st.permutations(range(len(shape)))))
    array.flags.writeable = draw(st.booleans())
    return array


@PROPERTY
@given(views())
@example(np.array([-0.0, np.nan, np.inf]))
@example(np.float32([[1.0]]))
@example(np.broadcast_to(np.int16(3), (2, 3)))
def test_an_array_comes_back_as_out_of_a_pickle(array: Array) -> None:
    """An array comes back as out of a pickle: type, dtype, shape, order, elements to the last bit,
    and whether it may be written to.
    """
    assert seen(load(dump(array))) == seen(pickle.loads(pickle.dumps(array, 5)))


@PROPERTY
@given(st.lists(views(DTYPES[:3]), min_size=2, max_size=4), st.booleans())
def test_a_batch_comes_back_as_out_of_pickles(values: list[Array], alike: bool) -> None:
    """A batch of arrays comes back as out of pickles, whether they are alike or not."""
    if alike:
        values = [values[0], values[0][...], *[value.copy() for value in values[:1]]]
    payloads = block_sent(values)

    assert [seen(load(payload)) for payload in payloads] == [seen(pickle.loads(pickle.dumps(v, 5))) for v in values]


@PROPERTY
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(2, 5), st.sampled_from(DTYPES))
def test_a_block_is_the_stacked_array(shape: list[int], n: int, dtype: str) -> None:
    """A block is one array of all items, in which each is a row."""
    values = [np.random.default_rng(i).integers(0, 2, shape).astype(dtype) for i in range(n)]
    block = block_sent(values)

    assert type(block) is Block
    assert seen(block.array()) == seen(np.stack(values))


SUBCLASSED = np.ma.masked_array([1.0, 2.0], mask=[False, True])


@pytest.mark.parametrize(
    "array",
    [
        *[np.ones(4).astype(dtype) for dtype in OTHER_DTYPES],
        np.array(3.5),
        np.zeros((0, 3)),
        np.asfortranarray(np.ones((2, 3))),
        np.ones((2, 3, 4)).transpose(1, 0, 2),
        SUBCLASSED,
        np.ones(2, dtype=np.dtype("f8", metadata={"unit": "m"})),
        np.ones(LARGE, dtype=np.uint8),
    ],
    ids=[*OTHER_DTYPES, "no axes", "no elements", "columns first", "another order", "subclass", "metadata", "large"],
)
def test_what_a_head_cannot_say_is_pickled(array: Array) -> None:
    """An array that a head cannot describe is pickled, and so it is in a batch."""
    payload = dump(array)
    head = payload[0] if isinstance(payload, list) else payload
    assert bytes(head[:1]) == b"\x80"  # type: ignore[index]
    assert type(block_sent([array, array])) is list


def test_an_array_out_of_a_pickle_is_taken_for_what_it_is() -> None:
    """An array out of a pickle, whose dtype is equal to numpy's but not the same object, is packed
    as others are.
    """
    array = pickle.loads(pickle.dumps(np.arange(3, dtype=np.int32), 2))
    array = array.view(np.dtype(np.int32).newbyteorder("<" if sys.byteorder == "little" else ">"))

    assert isinstance(dump(array), list)
    assert seen(load(dump(array))) == seen(np.arange(3, dtype=np.int32))


def test_long_and_long_long_are_not_alike() -> None:
    """Arrays of long and of long long are equal to numpy, but are not put together: an item must
    come back as it was, whatever is in its batch.
    """
    payloads = block_sent([np.ones(2, "l"), np.ones(2, "q")])

    assert [load(payload).dtype.char for payload in payloads] == ["l", "q"]  # type: ignore[attr-defined]


def test_what_is_packed_does_not_change() -> None:
    """A caller may fill its array anew once it has called: what is packed does not change."""
    array = np.zeros(4)
    payload = dump(array)
    array[:] = 7

    assert load(payload).tolist() == [0.0] * 4  # type: ignore[attr-defined]


def test_who_reads_an_item_twice_gets_two_arrays() -> None:
    """Whoever reads an item twice gets two arrays: a `size=` function reads it before the model
    does, and may write to it.
    """
    payload = dump(np.zeros(4))
    first: Any = load(payload)
    first[:] = 7

    assert load(payload).tolist() == [0.0] * 4  # type: ignore[attr-defined]


# -- blocks


def test_a_block_is_two_buffers() -> None:
    """A block of however many arrays is two buffers, a head and all elements in a row."""
    values = [np.full(LARGE // 50, i, np.float32) for i in range(50)]
    frame = Frame(FrameKind.REPLY, 1, list(range(50)), bytes(50), payloads=[dump(value) for value in values])

    first, head, elements = encode(frame)

    assert bytes(elements) == np.stack(values).tobytes()
    assert len(head) == 8
    assert len(first) == 48 + 9 * 50 + 2 * 4


def test_a_large_block_is_opened_where_it_was_received() -> None:
    """A large block is opened where it was received, without a copy, and may be written to."""
    block = block_sent([np.full(LARGE // 16, i, np.float64) for i in range(4)])
    array = block.array()

    assert np.shares_memory(array, np.frombuffer(block.elements, np.uint8))
    assert array.flags.writeable


def test_an_array_of_a_block_does_not_keep_the_block() -> None:
    """An array out of a block is bytes of its own, and does not keep the block alive."""
    payloads = block_sent([np.full(LARGE // 16, i, np.float64) for i in range(4)]).separate()

    assert [type(elements) for _, elements in payloads] == [bytes] * 4
    assert [len(elements) for _, elements in payloads] == [LARGE // 2] * 4


def test_what_may_not_be_written_to_may_not_be_as_a_block() -> None:
    """Arrays that may not be written to make a block that may not be either; those of both kinds
    are not put together.
    """
    fixed, free = np.ones(3), np.ones(3)
    fixed.flags.writeable = False

    assert not block_sent([fixed, fixed]).array().flags.writeable
    assert type(block_sent([fixed, free])) is list


def test_rows_are_packed_like_arrays() -> None:
    """The rows of a result are packed as one block at once, the same as if each had been packed."""
    whole = np.arange(12, dtype=np.int16).reshape(4, 3)
    block = block_of_rows(whole)

    assert block is not None
    assert list(block) == [dump(row) for row in whole]
    for other in (np.arange(3), whole.T, whole.astype(">i2"), np.zeros((0, 3)), np.ma.masked_array(whole), [[1]]):
        assert block_of_rows(other) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_copied_are_the_same(dtype: str) -> None:
    """A block that shares the array's memory travels as the same bytes as a copy of the rows, whatever its dtype."""
    whole = np.arange(24).reshape(2, 3, 4).astype(dtype)
    blocks = [block_of_rows(whole, copy=copy) for copy in (True, False)]
    sent = [data_of(Frame(FrameKind.REPLY, 1, [1, 2], bytes(2), payloads=block or ())) for block in blocks]

    assert sent[0] == sent[1]
    assert blocks[1] is not None and np.shares_memory(np.frombuffer(blocks[1].elements, np.uint8), whole)


def test_a_message_of_arrays_that_is_too_large_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of arrays that is too large goes in pieces, each a block of as many as fit."""
    monkeypatch.setattr("carpool.engine.wire.frame.MAX_FRAME_BYTES", 100)
    values = [np.full(4, i, np.float64) for i in range(7)]
    frame = Frame(FrameKind.REPLY, 1, list(range(7)), bytes(7), payloads=[dump(value) for value in values])
    stacked = [block_of_rows(np.stack(values), copy=copy) or () for copy in (True, False)]
    rows = [Frame(FrameKind.REPLY, 1, list(range(7)), bytes(7), payloads=block) for block in stacked]
    for whole in (frame, *rows):
        pieces = in_pieces(whole)
        back = [payload for piece in pieces for payload in receive(FrameReader(), data_of(piece))[0].payloads]

        assert [len(piece.ids) for piece in pieces] == [2, 2, 2, 1]
        assert [load(payload).tolist() for payload in back] == [value.tolist() for value in values]  # type: ignore[attr-defined]


def test_an_array_counts_with_its_elements_and_its_head() -> None:
    """While it waits an array counts with its elements and its head."""
    assert size_of(dump(np.zeros((4, 8)))) == 4 * 8 * 8 + 12


# -- what is no block


@PROPERTY
@given(st.binary(max_size=40))
@example(b"\1\1f\1\2\0\0\0")
@example(b"\1\1f\x21" + bytes(4 * 33))
def test_a_head_is_refused_or_means_what_it_says(head: bytes) -> None:
    """A head of noise is a ValueError, or is read as something that would be written the same."""
    try:
        char, shape, writable, nbytes = read_head(head)
    except ValueError:
        return
    assert nbytes == np.dtype(char).itemsize * np.prod([1, *shape], dtype=object)
    if nbytes < LARGE:
        array = np.zeros(shape, char)
        array.flags.writeable = writable
        assert arrays.head_of(array, shape) == head


@PROPERTY
@given(st.lists(st.one_of(st.binary(max_size=9), st.lists(st.binary(max_size=9), max_size=3)), max_size=3))
@example([[b"\1\1f\1\2\0\0\0", b"x" * 8, b""], [b"\1\1f\1\2\0\0\0", b"x" * 8]])
@example([[b"\1\1f\1\2\0\0\0", b"x" * 7], [b"\1\1f\1\2\0\0\0", b"x" * 9]])
@example([[b"\1\1f\1\2\0\0\0", b"x" * 7], [b"\1\1f\1\2\0\0\0", b"x" * 7]])
@example([[b"\1", b"x" * 8], [b"\1", b"x" * 8]])
def test_payloads_that_are_no_arrays_are_no_block(payloads: list[Any]) -> None:
    """Payloads of a hostile worker that are no arrays are not made a block for the next stage."""
    block = block_of(payloads, MAX_FRAME_BYTES)

    assert block is None or list(block) == payloads


@pytest.mark.parametrize(
    "payload", [[b"\1"], [b"\1\1f\1\2\0\0\0"], [b"\1\1f\1\2\0\0\0", b"xx"], [b"\1\1f\1\2\0\0\0", b"x" * 8, b""]]
)
def test_an_array_that_is_none_cannot_be_opened(payload: Payload) -> None:
    """If an array cannot be opened, its caller hears of it."""
    with pytest.raises((ValueError, TypeError)):
        load(payload)


def test_numpy_is_loaded_for_an_array_only() -> None:
    """A program without numpy packs and opens what it has without loading that."""
    script = (
        "import sys; from carpool.engine.wire.payload import dump, load\n"
        "load(dump([1, (2, 3)])); dump(object); assert 'numpy' not in sys.modules\n"
        "assert load([b'\\1\\1f\\1\\1\\0\\0\\0', bytes(4)]).tolist() == [0.0]\n"
        "import numpy; assert len(dump(numpy.ones(3))) == 2"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
