"""What threads, tasks and exceptions look like to those who read a finding."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
import types
from typing import Any


def stacks() -> str:
    """The stacks of all threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        found.append(f"-- thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "".join(found)


def tasks(loop: asyncio.AbstractEventLoop) -> str:
    """The tasks of a loop, with their stacks."""
    found = []
    for task in asyncio.all_tasks(loop):
        frames = "".join(f"    {frame.f_code.co_filename}:{frame.f_lineno}\n" for frame in task.get_stack())
        found.append(f"-- task {task!r:.300}\n{frames}")
    return "".join(found)


def place(thread: int, task: asyncio.Task[Any] | None) -> str:
    """Where a call of a thread, or of a task in it, is in carpool's own code, innermost."""
    codes = _awaited(task) if task is not None else []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    for code in codes:
        if os.sep + "carpool" + os.sep in code.co_filename:
            return f"{os.path.basename(code.co_filename)}:{code.co_name}"
    return "?"


def _awaited(task: asyncio.Task[Any]) -> list[types.CodeType]:
    """The code that a task is in, innermost first."""
    found = []
    awaiting: Any = task.get_coro()
    while awaiting is not None:
        code = getattr(awaiting, "cr_code", None) or getattr(awaiting, "ag_code", None)
        if code is not None:
            found.append(code)
        awaiting = getattr(awaiting, "cr_await", None) or getattr(awaiting, "ag_await", None)
    return found[::-1]


def current_task() -> asyncio.Task[Any] | None:
    """The task that runs in this thread."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def raised_at(error: BaseException) -> str:
    """The file and function in which an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].name}" if frames else "?"


def line_of(error: BaseException) -> str:
    """The text of an exception in one line."""
    try:
        return str(error)[:200].replace("\n", " ")
    except BaseException:
        return "(no text)"


def told(error: BaseException) -> str:
    """The traceback of an exception as text."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:
        return f"{type(error).__name__} (cannot be told)\n" + "".join(traceback.format_tb(error.__traceback__))
