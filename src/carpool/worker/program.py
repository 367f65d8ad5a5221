"""The user's program in a worker: what must be the same there so that the model is found.

A model travels as a reference (pickle: module and name), so the worker needs the parent's import path, and for models
of `__main__` the parent's main file. The file is run in the worker under the name `__mp_main__`, as multiprocessing
does, so that what stands under `if __name__ == "__main__":` is left out; both sides know the module by both names.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import runpy
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from carpool.errors import ModelError
from carpool.foreign import as_model_error
from carpool.model import AnyModel, name_of
from carpool.wire.payload import Buffer

_MAIN = "__mp_main__"
_NEEDS_MAIN = (
    "the item is of a class that is defined in the main program: put the class into a module and import it from there."
    " Until then workers need the main program"
)
_NOT_AT_THE_TOP = (
    "the item is of a class that a worker does not find in the main program: define it at the top level of a module."
    " Reading it"
)

in_worker = False
"""True in a worker process; a service must not be started there."""

_main_is_here = False  # `sys.modules` does not tell: multiprocessing puts the worker's own program there


class Program(msgspec.Struct, frozen=True):
    """Where the parent finds its modules."""

    path: list[str]
    folder: str
    main_name: str | None  # as in `python -m main_name`
    main_file: str | None


def describe() -> Program:
    """This process's program, for its workers."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    main_name = None if spec is None or spec.name == "__main__" else spec.name
    main_file = getattr(main, "__file__", None)
    path = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
    return Program(path, os.getcwd(), main_name, os.path.abspath(main_file) if main_file else None)


def pack_model(model: AnyModel, kwargs: Mapping[str, Any]) -> bytes:
    """The model's reference and its arguments as bytes.

    Raises:
        TypeError: a worker could not find it; the text says what to do.
    """
    name = name_of(model)
    main = sys.modules["__main__"]
    if _module_of(model) == "__main__" and not getattr(main, "__file__", None):
        raise TypeError(
            f"{name} was typed into a notebook or a prompt, where worker processes cannot find it:"
            " put it into a module and import it from there"
        )
    sys.modules.setdefault(_MAIN, main)  # results may be of the main program's classes
    try:
        return pickle.dumps((model, dict(kwargs)), 5)
    except Exception as error:
        raise TypeError(
            f"{name} cannot be sent to a worker process ({error}): define it at the top level of a module, and give"
            " it plain kwargs; whatever is heavy belongs into setup"
        ) from error


def restore(program: Program) -> None:
    """In a worker: make this process find what the parent finds."""
    global in_worker
    in_worker = True
    sys.path[:] = program.path
    with contextlib.suppress(OSError):  # the folder is gone; imports by absolute path still work
        os.chdir(program.folder)


def unpack_model(program: Program, packed: bytes) -> tuple[AnyModel, dict[str, Any]]:
    """In a worker: import the model. Raises whatever importing it raises."""
    if _names_main(packed):
        _import_main(program)
    model, kwargs = pickle.loads(packed)
    return model, kwargs


class MainProgram:
    """In a worker: the parent's main file, for items whose classes are defined there. It is run once at most.

    Args:
        program: the parent's; None where the worker lives in the parent's process and has its main program.
    """

    def __init__(self, program: Program | None) -> None:
        self._program = program
        self._refusal: ModelError | None = None

    def read_again(self, load: Callable[[Any], Any], item: Buffer | list[Buffer], error: BaseException) -> Any:
        """Read an item once more that could not be read, with the main file at hand if that may be the reason.

        Args:
            load: reads an item.
            item: the item, as `payload.dump` made it.
            error: what reading it raised.

        Raises:
            ModelError: the main file cannot be imported here, or has no such class; the text says what to do.
            BaseException: `error`, where it has to do with something else.
        """
        if self._program is None or not _names_main(item[0] if isinstance(item, list) else item):
            raise error
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if not _main_is_here:
            try:
                _import_main(self._program)
            except BaseException as reason:
                self._refusal = as_model_error(reason, f"{_NEEDS_MAIN}, and importing that")
                raise self._refusal from None
        try:
            return load(item)
        except (AttributeError, ModuleNotFoundError) as reason:
            raise as_model_error(reason, _NOT_AT_THE_TOP) from reason


def _names_main(packed: Buffer) -> bool:
    """Whether a pickle may hold something that the main program defines."""
    packed = bytes(packed)
    return b"__main__" in packed or _MAIN.encode() in packed


def _import_main(program: Program) -> None:
    global _main_is_here
    main = types.ModuleType(_MAIN)
    if program.main_name is not None:
        content = runpy.run_module(program.main_name, run_name=_MAIN, alter_sys=True)
    elif program.main_file is not None:
        content = runpy.run_path(program.main_file, run_name=_MAIN)
    else:
        raise ImportError("the parent's main program has no file")
    main.__dict__.update(content)
    sys.modules["__main__"] = sys.modules[_MAIN] = main
    _main_is_here = True


def _module_of(model: Any) -> str | None:
    while hasattr(model, "func"):
        model = model.func
    module: str | None = getattr(model, "__module__", None)
    return module
