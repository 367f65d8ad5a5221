"""Out of memory: which exceptions mean it, and how the failed call's memory is released before the
next call.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Sequence

# in `torch` or, before 2.5, `torch.cuda`; recognised without importing it
_TORCH_ERROR = "OutOfMemoryError"
_LONGEST_CHAIN = 10

OomErrors = Sequence[type[BaseException] | str]
"""Exception classes, or their full names, where importing them here would load a framework."""


def names_of(oom_errors: OomErrors) -> tuple[str, ...]:
    """Return the full names of exception classes: they can travel to a worker and be recognised
    without an import.

    Raises:
        TypeError: One of them is neither an exception class nor a full name.
    """
    names = []
    if isinstance(oom_errors, str) or not isinstance(oom_errors, Sequence):
        raise TypeError(f"oom_errors must be a sequence of exception classes or their full names, not {oom_errors!r}")
    for error in oom_errors:
        if isinstance(error, type) and issubclass(error, BaseException):
            names.append(_name_of(error))
        elif isinstance(error, str) and "." in error:
            names.append(error)
        else:
            raise TypeError(
                "each of oom_errors must be an exception class or its full name, such as 'package.Error',"
                f" not {error!r}"
            )
    return tuple(names)


def is_out_of_memory(error: BaseException, names: Sequence[str] = ()) -> bool:
    """Report whether `error` means out of memory: a MemoryError, torch's error on a GPU, or one of
    `names`.
    """
    # nothing of the exception itself is called or read: it may be a trap
    if issubclass(type(error), MemoryError):
        return True
    for kind in type(error).__mro__:
        module = kind.__module__
        if kind.__name__ == _TORCH_ERROR and isinstance(module, str) and module.partition(".")[0] == "torch":
            return True
        if names and _name_of(kind) in names:
            return True
    return False


def release_memory(error: BaseException) -> None:
    """Release what a failed call holds: the variables of its frames, and the GPU memory that torch
    has cached.

    This raises nothing, whatever the exception's attributes or torch do.
    """
    with contextlib.suppress(BaseException):
        link: BaseException | None = error
        for _ in range(_LONGEST_CHAIN):
            if link is None:
                break
            traceback.clear_frames(link.__traceback__)
            link = link.__context__ if link.__cause__ is None else link.__cause__
    gc.collect(1)  # recent reference cycles only: a full collection would take long
    with contextlib.suppress(BaseException):
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            cuda.empty_cache()


def _name_of(kind: type) -> str:
    """Return the full name of a class; one of the main program has the same name in workers."""
    module = kind.__module__
    return f"{'__main__' if module == '__mp_main__' else module}.{kind.__qualname__}"
