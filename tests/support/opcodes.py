"""How much a piece of work takes, in steps of the interpreter: the same on a busy machine as on an idle one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

_TOOL: Final = 4  # of the six that may monitor at a time; none of the first four is free for all


def opcodes(work: Callable[[], object]) -> int:
    """Return how many bytecodes of Python this thread runs while `work` does.

    What C code does is not counted, but for the Python functions that it calls.
    """
    if sys.version_info >= (3, 12):  # there a trace function misses the bytecodes of code that it has not seen before
        return _monitored(work)
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


def _monitored(work: Callable[[], object]) -> int:
    """Return the same by the events of PEP 669."""
    assert sys.version_info >= (3, 12)
    n, me, ident = 0, threading.get_ident(), threading.get_ident
    monitoring, instruction = sys.monitoring, sys.monitoring.events.INSTRUCTION

    def count(code: CodeType, offset: int) -> None:
        nonlocal n
        n += ident() == me

    monitoring.use_tool_id(_TOOL, "opcodes")
    monitoring.register_callback(_TOOL, instruction, count)
    try:
        monitoring.set_events(_TOOL, instruction)
        work()
    finally:
        monitoring.set_events(_TOOL, 0)
        monitoring.register_callback(_TOOL, instruction, None)
        monitoring.free_tool_id(_TOOL)
    return n
