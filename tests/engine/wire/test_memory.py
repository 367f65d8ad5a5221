"""Memory that is used again: never while anybody could still see it, and never more than a bounded amount."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.wire import payload as module
from carpool.engine.wire.payload import Memory, dump, load
from tests.support.properties import PROPERTY

MIB = 2**20

COUNTED = pytest.mark.skipif(not module._COUNTS_ARE_EXACT, reason="without the GIL nothing is used again")


@pytest.fixture(autouse=True, scope="module")
def cleared() -> Iterator[None]:
    """Fresh memory is cleared here, since what lies in it otherwise may be our own mark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "uncleared", lambda _, nbytes: bytearray(nbytes))
        yield


def is_used_before(buffer: bytearray) -> bool:
    """Whether it has been handed out before: a fresh one is all zeros, and we leave our mark."""
    used = buffer[0] != 0
    buffer[0] = 1
    return used


@COUNTED
def test_a_released_buffer_is_used_again() -> None:
    """A released buffer is used again once nobody refers to it."""
    memory = Memory()

    assert [is_used_before(memory.buffer(1000)) for _ in range(3)] == [False, True, True]


def loaded_array(buffer: bytearray) -> Any:
    """An array as a worker gets it: out of a payload whose large buffer is `buffer`."""
    head, _ = dump(np.zeros(len(buffer), np.uint8))
    return load([head, buffer])


HOLDERS: dict[str, Callable[[bytearray], Any]] = {
    "itself": lambda buffer: buffer,
    "a view": memoryview,
    "a part of a view": lambda buffer: memoryview(buffer)[5:6],
    "an empty part of a view": lambda buffer: memoryview(buffer)[5:5],
    "a cast view": lambda buffer: memoryview(buffer).cast("d"),
    "an array": lambda buffer: np.frombuffer(buffer, np.uint8),
    "a row of an array": lambda buffer: np.frombuffer(buffer, np.float64).reshape(10, -1)[3],
    "an element's view": lambda buffer: np.frombuffer(buffer, np.uint8)[7:8].reshape(()),
    "a loaded array": loaded_array,
    "an iterator": iter,
    "a method": lambda buffer: buffer.find,
    "a container": lambda buffer: {"deep": [(buffer,)]},
    "a function": lambda buffer: lambda: buffer,
}


@COUNTED
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_held_buffer_is_not_handed_out_again(hold: Callable[[bytearray], Any]) -> None:
    """A buffer that is held, however indirectly, is not handed out again until the holder is gone."""
    nbytes = 80_000
    memory = Memory()
    buffer = memory.buffer(nbytes)
    buffer[:] = b"\x07" * nbytes
    holder = hold(buffer)
    del buffer

    others = [memory.buffer(nbytes) for _ in range(3)]
    assert [is_used_before(other) for other in others] == [False] * 3
    del others

    del holder
    again = [memory.buffer(nbytes) for _ in range(4)]
    assert sorted(other[1] for other in again) == [0, 0, 0, 7]


@COUNTED
def test_buffers_of_other_sizes_are_left_alone() -> None:
    """A buffer is used again only for exactly its size."""
    memory = Memory()
    for nbytes in (1000, 1001, 999, 1000):
        assert len(memory.buffer(nbytes)) == nbytes

    assert is_used_before(memory.buffer(1001)) is False
    assert is_used_before(memory.buffer(1001)) is True


steps = st.one_of(
    st.tuples(st.just("take"), st.sampled_from([8, 16, 24, 400, 5000])),
    st.tuples(st.just("take"), st.sampled_from([8, 16])),
    st.tuples(st.just("drop"), st.integers(0, 100)),
    st.tuples(st.just("drop"), st.integers(0, 100)),
    st.tuples(st.just("drop but for a view"), st.integers(0, 100)),
)


@PROPERTY
@given(st.lists(steps, max_size=60))
def test_nobody_sees_a_buffer_change_that_he_holds(script: list[tuple[str, int]]) -> None:
    """For any script of taking, dropping and keeping only a part, what is held keeps its content,
    in bounded memory.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_KEPT", 3)
        patch.setattr(module, "_MOST_KEPT_BYTES", 1000)
        memory = Memory()
        held: list[tuple[int, Any]] = []  # what was written into it, and who holds it
        for stamp, (step, argument) in enumerate(script, start=1):
            if step == "take":
                buffer = memory.buffer(argument)
                assert len(buffer) == argument
                buffer[:] = bytes([stamp]) * argument
                held.append((stamp, buffer))
                del buffer
            elif held:
                old, holder = held.pop(argument % len(held))
                if step == "drop but for a view":
                    held.append((old, memoryview(holder)[-1:]))
                del holder
            assert all(set(bytes(holder)) == {stamp} for stamp, holder in held)
            assert len(memory._kept) <= 3
            assert memory._kept_bytes == sum(map(len, memory._kept)) <= 1000


def kept_by(memory: Memory, sizes: list[int]) -> int:
    """Bytes that stay allocated after buffers of these sizes have been in use together and were released."""
    tracemalloc.start()
    try:
        buffers = [memory.buffer(nbytes) for nbytes in sizes]
        assert tracemalloc.get_traced_memory()[0] >= sum(sizes)
        del buffers
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@COUNTED
def test_the_bytes_kept_are_bounded() -> None:
    """At most 128 MiB of unused buffers are kept, and nearly all of that is made use of."""
    assert 120 * MIB <= kept_by(Memory(), [8 * MIB] * 20) < 129 * MIB


@COUNTED
def test_the_number_kept_is_bounded() -> None:
    """At most 32 unused buffers are kept, so that looking for one takes no time."""
    kept = kept_by(Memory(), [100_000 + i for i in range(50)])

    assert 31 * 100_000 < kept < 33 * 100_000


@COUNTED
def test_a_buffer_over_the_bound_is_not_kept() -> None:
    """A buffer that is over the bound is handed out all the same, is not kept, and does not push
    out the others.
    """
    memory = Memory()
    is_used_before(memory.buffer(1000))

    assert kept_by(memory, [128 * MIB + 1]) < MIB
    assert is_used_before(memory.buffer(1000)) is True


@COUNTED
def test_the_one_unused_longest_makes_room() -> None:
    """Sizes that come once push out neither the latest ones nor one that is in use again and again."""
    memory = Memory()
    is_used_before(memory.buffer(1000))
    for nbytes in range(2000, 2060):
        assert is_used_before(memory.buffer(nbytes)) is False
        assert is_used_before(memory.buffer(1000)) is True

    assert is_used_before(memory.buffer(2059)) is True
    assert is_used_before(memory.buffer(2029)) is True
    assert is_used_before(memory.buffer(2028)) is False


def test_nothing_is_used_again_where_references_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the GIL a count of references proves nothing, so every buffer is fresh, and none is kept."""
    monkeypatch.setattr(module, "_COUNTS_ARE_EXACT", False)
    memory = Memory()

    assert [is_used_before(memory.buffer(1000)) for _ in range(3)] == [False] * 3
    ours, given = bytearray(1000), memory.buffer(1000)
    assert sys.getrefcount(given) == sys.getrefcount(ours)
