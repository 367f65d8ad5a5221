"""How much a piece of work takes, in steps of the interpreter: the same on a busy machine as on an idle one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def opcodes(work: Callable[[], object]) -> int:
    """Return how many bytecodes of Python this thread runs while `work` does.

    What C code does is not counted, but for the Python functions that it calls.
    """
    n = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal n
        n += event == "opcode"
        return count

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count

    before = sys.gettrace()
    assert threading.current_thread() is threading.main_thread()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    return n
