"""Which exceptions mean that memory has run out, without importing whoever raises them."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from carpool.engine.call.retry import is_out_of_memory, names_of, release_memory


def error_class(name: str, module: str, base: type[Exception] = RuntimeError) -> type[Exception]:
    return type(name, (base,), {"__module__": module})


class Mine(Exception):
    """A user's own exception."""


class Derived(Mine):
    """An exception derived from the user's own."""


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    "kind",
    [
        MemoryError,
        error_class("ArrayMemoryError", "numpy._core._exceptions", MemoryError),
        error_class("OutOfMemoryError", "torch"),
        error_class("OutOfMemoryError", "torch.cuda"),
        error_class("Mine", "user", error_class("OutOfMemoryError", "torch")),
    ],
    ids=lambda kind: f"{kind.__module__}.{kind.__name__}",
)
def test_what_means_out_of_memory(kind: type[Exception]) -> None:
    """Out of memory are Python's, numpy's and torch's old and new errors, and what derives from
    them.
    """
    before = "torch" in sys.modules
    assert is_out_of_memory(kind())
    assert ("torch" in sys.modules) == before


def test_numpy_s_own() -> None:
    """numpy's error for an array that it cannot have counts as out of memory."""
    with pytest.raises(MemoryError) as caught:
        np.empty(2**60, dtype=np.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "kind",
    [
        RuntimeError,
        ValueError,
        Mine,
        error_class("OutOfMemoryError", "torchvision"),
        error_class("OutOfMemoryError", "mine"),
        error_class("Other", "torch"),
    ],
    ids=lambda kind: f"{kind.__module__}.{kind.__name__}",
)
def test_what_does_not(kind: type[Exception]) -> None:
    """Other errors do not count as out of memory, also those of the same name."""
    assert not is_out_of_memory(kind())


def test_users_list_their_own() -> None:
    """Users list their own errors by class or by full name, and classes derived from these count as
    well.
    """
    for listed in (Mine, f"{__name__}.Mine"):
        names = names_of([listed])
        assert names == (f"{__name__}.Mine",)
        assert is_out_of_memory(Mine(), names)
        assert is_out_of_memory(Derived(), names)
        assert not is_out_of_memory(ValueError(), names)


def test_what_a_program_defines_itself_is_known_in_its_workers() -> None:
    """An error that the program itself defines is known in its workers, where the main module has
    another name.
    """
    assert is_out_of_memory(error_class("Full", "__mp_main__")(), names_of([error_class("Full", "__main__")]))


@pytest.mark.parametrize("wrong", [[int], ["Full"], [ValueError()], "a.B", ValueError, [None]])
def test_what_cannot_be_listed(wrong: Any) -> None:
    """What cannot be listed as an error is refused, with what would do."""
    with pytest.raises(TypeError, match="oom_errors"):
        names_of(wrong)


class Cuda(types.SimpleNamespace):
    def __init__(self, initialized: bool) -> None:
        self.emptied = 0
        self.initialized = initialized

    def is_initialized(self) -> bool:
        return self.initialized

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.mark.parametrize("initialized", [True, False])
def test_torch_gives_its_cache_back_only_where_it_is_in_use(initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is asked to give its cache back only where it is in use: before the first use of a GPU
    `empty_cache` would start that.
    """
    cuda = Cuda(initialized)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    release_memory(MemoryError())
    assert cuda.emptied == initialized


def test_what_all_frames_of_a_chain_hold_is_let_go() -> None:
    """The frames of an exception and of those that led to it let go of what they hold."""

    def inner(held: list[int]) -> None:
        raise KeyError

    def outer(held: list[int]) -> None:
        try:
            inner(held)
        except KeyError as error:
            raise MemoryError from error

    held = [1]

    def references() -> int:
        return sys.getrefcount(held)  # at one place: newer versions do not count all that a function has itself

    before = references()
    try:
        outer(held)
    except MemoryError as error:
        assert references() > before
        release_memory(error)
        assert references() == before
