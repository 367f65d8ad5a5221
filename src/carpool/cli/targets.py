"""Finds the service that a command names as module:attribute."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from carpool.cli.exits import FAILED, fail
from carpool.service.service import Service


def find_service(target: str) -> Service:
    """Return the service at `module:attribute`, or exit with an error that says what is there."""
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        fail(f"{target!r} does not name a service: write module:attribute, for example program:service")
    add_current_folder()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            _end_for_import(module_name, error)
        hint = " (write the name of the module, not that of its file)" if Path(module_name).suffix == ".py" else ""
        fail(f"there is no module {error.name!r} in {os.getcwd()} or on the Python path{hint}")
    except Exception as error:
        _end_for_import(module_name, error)
    found: Any = getattr(module, attribute, None)
    if isinstance(found, Service):
        return found
    services = [name for name, value in vars(module).items() if isinstance(value, Service)]
    known = f"it has {', '.join(services)}" if services else "it has no carpool.Service"
    if found is None:
        fail(f"module {module_name!r} has no attribute {attribute!r}; {known}")
    fail(f"{target} is a {type(found).__name__}, not a carpool.Service; {known}")


def _end_for_import(module_name: str, error: Exception) -> NoReturn:
    """Exit because a module raised when it was imported, with its traceback from the module on."""
    ours = (__file__, importlib.__file__, "<frozen importlib")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    print("".join(traceback.format_exception(error.with_traceback(frames))), end="", file=sys.stderr)
    print(f"carpool: module {module_name!r} cannot be imported", file=sys.stderr)
    raise SystemExit(FAILED)


def add_current_folder() -> None:
    """Let modules be found in the current folder, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
