"""Finds a service by its name as module:attribute, as commands and orders of operators have it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from carpool.service.service import Service


class NotFound(ValueError):
    """There is no such service; the text says what there is."""


class BrokenModule(ValueError):
    """A module raised when it was imported.

    Attributes:
        error: What it raised.
    """

    def __init__(self, module_name: str, error: BaseException) -> None:
        super().__init__(f"module {module_name!r} cannot be imported")
        self.error = error


def service_named(target: str) -> Service:
    """Return the service at `module:attribute`; its module is imported if it has not been yet.

    Raises:
        NotFound: There is none.
        BrokenModule: The module, or one that it imports, raised.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        module_name = "program" if colon or not target else target.removesuffix(".py").replace("/", ".")
        raise NotFound(f"{target!r} does not name a service: write module:attribute, for example {module_name}:service")
    if module_name.startswith((".", "/")):
        path = Path(module_name)
        there = "write" if path.parent == Path() else f"go to its folder (cd {path.parent}) and write"
        name = path.name.strip(".").removesuffix(".py") or "program"
        raise NotFound(f"{module_name!r} is a path, and modules have names: {there} {name}:{attribute}")
    importlib.invalidate_caches()  # its file may have been written a moment ago
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise BrokenModule(module_name, error) from error
        hint = " (write the name of the module, not that of its file)" if Path(module_name).suffix == ".py" else ""
        raise NotFound(f"there is no module {error.name!r} in {os.getcwd()} or on the Python path{hint}") from None
    except Exception as error:
        raise BrokenModule(module_name, error) from error
    found: Any = getattr(module, attribute, None)
    if isinstance(found, Service):
        return found
    services = [name for name, value in vars(module).items() if isinstance(value, Service)]
    known = f"it has {', '.join(services) or 'no carpool.Service: write service = carpool.Service(...)'}"
    if found is None:
        raise NotFound(f"module {module_name!r} has no attribute {attribute!r}; {known}")
    raise NotFound(f"{target} is of type {type(found).__name__}, not a carpool.Service; {known}")
