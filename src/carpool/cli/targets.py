"""Finds the service that a command names as module:attribute."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from carpool.cli.exits import FAILED, fail
from carpool.service import named
from carpool.service.named import BrokenModule, NotFound, service_named
from carpool.service.service import Service


def find_service(target: str) -> Service:
    """Return the service at `module:attribute`, or exit with an error that says what is there."""
    add_current_folder()
    try:
        return service_named(target)
    except BrokenModule as error:
        fail(str(error), FAILED, traceback=_from_module_on(error.error))
    except NotFound as error:
        fail(str(error))


def _from_module_on(error: BaseException) -> str:
    """Return the traceback of an import, without the frames that are not the user's."""
    ours = (named.__file__, importlib.__file__, "<frozen importlib")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frames)))


def add_current_folder() -> None:
    """Let modules be found in the current folder, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
