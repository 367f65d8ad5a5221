"""The setup of a worker, which it gets before it loads its model (pickled): how to call it, and all
that must be the same there for it to be found.

A model travels as a reference (pickle: module and name), so the worker needs the parent's import
path, and for models of `__main__` the parent's main file. The worker runs that file under the name
`__mp_main__`, as multiprocessing does, so that the code under `if __name__ == "__main__":` is
skipped; on both sides the module has both names.

What is defined in a main program without such a file (a notebook, a prompt, `python -c`, standard
input) goes to a worker by value, written by cloudpickle if that is installed, and the worker's
`__main__` then holds the classes that came.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import runpy
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from carpool.engine.foreign import as_model_error
from carpool.engine.wire.payload import Buffer
from carpool.engine.worker.own import Spot, choosers
from carpool.engine.worker.place import Cores
from carpool.errors import ModelError, StartupError
from carpool.model import Adapter, AnyModel, name_of

_MAIN = "__mp_main__"
_NEEDS_MAIN = (
    "the item's class is defined in the main program: put the class into a module and import it from there."
    " Until then workers need the main program"
)
_NOT_AT_THE_TOP = (
    "a worker cannot find the item's class in the main program: define it at the top level of a module."
    " Reading the item"
)
_WHERE_TYPED = "was typed into a notebook or at a prompt, or read from standard input"
_NOT_TYPED_HERE = (
    "the parent's main program has no file: put the class into a module and import it from there, or name it in the"
    " hints of the model, so that it goes to the workers with the model"
)

in_worker = False
"""Whether this is a worker process, in which no service may be started."""

# `sys.modules` does not show it: multiprocessing puts the worker's own program there
_main_is_here = False


NO_FOLDER = "the current folder has been deleted, and workers start in it: change to one that exists"


class Program(msgspec.Struct, frozen=True):
    """Where the parent finds its modules.

    Attributes:
        path: Its `sys.path`, with absolute entries.
        main_name: The name of its main module, as in `python -m main_name`; None if it has none.
        main_file: The file of its main module; None if it has none that can be run again.
    """

    path: list[str]
    folder: str
    main_name: str | None
    main_file: str | None


def describe() -> Program:
    """Return where this process finds its modules, for its workers.

    Raises:
        StartupError: The working directory has been deleted.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    main_name = None if spec is None or spec.name == "__main__" else spec.name
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise StartupError(NO_FOLDER) from None
    path = [os.path.abspath(entry or folder) for entry in sys.path]
    return Program(path, folder, main_name, _main_file())


def pack_model(
    model: AnyModel,
    kwargs: Mapping[str, Any],
    adapters: Sequence[Adapter] = (),
    spots: Sequence[Spot] = (),
    *,
    has_main: bool = True,
) -> bytes:
    """Return references to the model, its arguments, the adapters of its addresses and what becomes
    of its results as bytes.

    What has been typed goes by value, and so does what is defined in the main program's file where
    workers do not have that (`has_main`).

    Raises:
        TypeError: A worker could not find the model; the text says what to do.
    """
    main = sys.modules["__main__"]
    sys.modules.setdefault(_MAIN, main)  # the main program may define classes of results
    main_is_there = has_main and _main_file() is not None
    is_typed = not main_is_there and (
        _module_of(model) == "__main__"
        or any(_is_of_main(value) for value in (*kwargs.values(), *adapters, *choosers(spots)))
    )
    try:
        if not is_typed:
            packed = pickle.dumps((model, dict(kwargs), [*adapters], _with_packed_types(spots), []), 5)
            is_typed = not main_is_there and _names_main(packed)
            if not is_typed:
                return packed
        return _pack_by_value(model, kwargs, adapters, spots)
    except _NoCloudpickle:
        raise TypeError(
            f"{name_of(model)}, or what is in its kwargs, {_WHERE_TYPED}, where worker processes cannot find it:"
            ' run it in this process (run_in="thread"), put it into a module and import it from there, or let it be'
            " sent by value: pip install 'carpool[notebook]'"
        ) from None
    except Exception as error:
        what_to_do = (
            f"it {_WHERE_TYPED}, so it is sent by value, with all that it refers to: load whatever is heavy or cannot"
            ' be copied in setup, or run it in this process (run_in="thread")'
            if is_typed
            else "define it at the top level of a module, and give it plain kwargs; load whatever is heavy in setup"
        )
        what = name_of(model) + (", or an adapter of its routes," if adapters else "")
        what += ", or choose= of the Route behind it," if any(choosers(spots)) else ""
        raise TypeError(f"{what} cannot be sent to a worker process ({error}): {what_to_do}") from error


def restore(program: Program) -> None:
    """Make this worker process find the modules that the parent finds."""
    global in_worker
    in_worker = True
    sys.path[:] = program.path
    # the folder is gone, but imports by absolute path still work
    with contextlib.suppress(OSError):
        os.chdir(program.folder)


def extend(program: Program) -> None:
    """Make this worker process, which may be on another machine, find the modules of the parent.

    Folders of the parent that are here, too, come after those that this process has already.
    """
    global in_worker
    in_worker = True
    sys.path += [entry for entry in program.path if entry not in sys.path and os.path.exists(entry)]


def unpack_model(program: Program, packed: bytes) -> tuple[AnyModel, dict[str, Any], list[Adapter], tuple[Spot, ...]]:
    """Import the model in a worker, the adapters, and all that its `spots` refer to. Raises
    whatever importing them raises.
    """
    if _names_main(packed) and (program.main_name or program.main_file):
        _import_main(program)
    model, kwargs, adapters, spots, typed = pickle.loads(packed)
    if typed:
        _take_for_main(typed)
    return model, kwargs, adapters, spots


class PackedType:
    """A type that is imported only when it is needed: mostly it is that of another stage."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed


def _with_packed_types(spots: Sequence[Spot]) -> tuple[Spot, ...]:
    found = []
    for spot in spots:
        try:
            packed: Any = PackedType(pickle.dumps(spot.answer, 5))
        except Exception:  # it cannot be found there
            packed = Any
        found.append(replace(spot, answer=packed))
    return tuple(found)


def unpack_type(kind: Any) -> Any:
    """Return the type of a spot's answers. Raises whatever importing it raises."""
    return pickle.loads(kind.packed) if type(kind) is PackedType else kind


class MainProgram:
    """The parent's main file in a worker, for items whose classes are defined there. It is run at
    most once.

    Args:
        program: The parent's program; None if the worker lives in the parent's process and shares
            its main program.
    """

    def __init__(self, program: Program | None) -> None:
        self._program = program
        self._refusal: ModelError | None = None

    def read_again(self, load: Callable[[Any], Any], item: Buffer | list[Buffer], error: BaseException) -> Any:
        """Read an item, as `payload.dump` made it, again that could not be read, after running the
        main file if that may be what was missing.

        Raises:
            ModelError: The main file cannot be imported here, or has no such class; the text says
                what to do.
            BaseException: `error`, if it has another reason.
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
        raise ImportError(_NOT_TYPED_HERE)
    main.__dict__.update(content)
    sys.modules["__main__"] = sys.modules[_MAIN] = main
    _main_is_here = True


def _take_for_main(typed: list[type]) -> None:
    """Let items and results find the classes that came with the model, which were typed in."""
    main = types.ModuleType(_MAIN)
    main.__dict__.update({each.__name__: each for each in typed})
    sys.modules["__main__"] = sys.modules[_MAIN] = main


class _NoCloudpickle(Exception):
    """What has been typed cannot be sent, since cloudpickle is not installed."""


def _pack_by_value(
    model: AnyModel, kwargs: Mapping[str, Any], adapters: Sequence[Adapter], spots: Sequence[Spot]
) -> bytes:
    """Return the same as a pickle that holds all that was typed in, and a list of the classes among
    it. Plain pickle reads it. Raises whatever writing it raises.
    """
    cloudpickle = _cloudpickle()
    typed: list[type] = []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc,name-defined]  # it has no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type) and obj.__module__ == "__main__":
                if issubclass(obj, msgspec.Struct):
                    raise TypeError(f"{obj.__name__} is a msgspec.Struct, which has no copy by value: use a dataclass")
                typed.append(obj)
            return super().reducer_override(obj)

    packed = io.BytesIO()
    Pickler(packed, 5).dump(
        (model, dict(kwargs), [*adapters], _with_packed_types(spots), typed)
    )  # the list is written last, when it is full
    return packed.getvalue()


def _cloudpickle() -> Any:
    """Return cloudpickle, or the one that Ray has. Raises _NoCloudpickle."""
    if importlib.util.find_spec("cloudpickle") is not None:
        return importlib.import_module("cloudpickle")
    if "ray" in sys.modules:
        return importlib.import_module("ray.cloudpickle")
    raise _NoCloudpickle


def _main_file() -> str | None:
    file = getattr(sys.modules["__main__"], "__file__", None)  # "<stdin>" is none
    return os.path.abspath(file) if file and os.path.exists(file) else None


def _is_of_main(value: Any) -> bool:
    return (
        getattr(value if isinstance(value, type | types.FunctionType) else type(value), "__module__", "") == "__main__"
    )


def _module_of(model: Any) -> str | None:
    while hasattr(model, "func"):
        model = model.func
    module: str | None = getattr(model, "__module__", None)
    return module


DUMP_SIGNAL = signal.SIGQUIT
"""Makes a worker write the stacks of all its threads to stderr, whatever it is doing; the same
signal as a JVM's.
"""


def process_name(stage: str, place: int) -> str:
    return f"carpool {stage}/{place}"


LEAVING: Final = b"leaving"
"""The state that a worker reports which has come by itself and is about to go."""

NOWHERE = Program([], "", None, None)
"""For workers that come by themselves, and have the program already."""


class Setup(msgspec.Struct, frozen=True):
    """A worker's stage, its place in it, and how to call the model.

    Attributes:
        program: Where the parent finds its modules.
        model: The packed model, see `pack_model`.
        oom_errors: Full names of exceptions that mean out of memory, see `retry.Retrier`.
        log_level: The parent's log level if its program has set up logging, else None.
        warm_up_shapes: Calls with one example over and over that are run and timed, too: the
            example's position, and how often it is in the call.
        most_examples: How many examples of a model that answers in parts may run together.
        sends_metrics: Whether the worker sends the metrics of its model's own over its connection.
    """

    program: Program
    model: bytes
    stage: str
    place: int
    batched: bool
    allowed_batch_sizes: tuple[int, ...] | None
    warm_up: tuple[int, ...]
    is_first: bool
    is_last: bool
    isolate_errors: bool
    retry_on_oom: bool
    oom_errors: tuple[str, ...] | None
    cores: Cores | None
    log_level: int | None
    most_examples: int = 1
    warm_up_shapes: tuple[tuple[int, int], ...] = ()
    sends_metrics: bool = False
