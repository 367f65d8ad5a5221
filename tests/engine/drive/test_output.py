"""What workers print comes line by line, and of a line that is written over and over its last state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from carpool.engine.drive import process
from carpool.engine.drive.process import OutputLines
from tests.support.output import Output


def printed(*chunks: bytes, at: Callable[[int], float] = lambda i: 0.0) -> list[str]:
    """The lines of a worker whose output comes in these chunks, each at its time."""

    async def run() -> list[str]:
        read, write = os.pipe()
        sink = Output()
        lines = OutputLines(os.fdopen(read, "rb", buffering=0), "w/0", True, sink)
        for i, chunk in enumerate(chunks):
            lines._loop = asyncio.get_running_loop()
            asyncio.get_running_loop().time = lambda i=i: at(i)  # type: ignore[method-assign, misc]
            os.write(write, chunk)
            lines._readable()
        del asyncio.get_running_loop().time  # type: ignore[method-assign]
        os.close(write)
        lines.close()
        return sink.texts

    return asyncio.run(run())


BAR = [b"\rLoading:   0%|", *[b"\rLoading: %3d%%|#####" % (n % 100) for n in range(1, 500)], b"\rLoading: 100%|done"]


@pytest.mark.parametrize("size", [1, 7, 20, 100_000])
@pytest.mark.parametrize("is_written", ["tqdm", "pip"])
def test_a_progress_bar_is_one_line(size: int, is_written: str) -> None:
    """Of a bar only the last state comes, in whatever pieces it is received, and lines around it
    are whole.
    """
    bar = b"".join(BAR) if is_written == "tqdm" else b"".join([state[1:] + b"\r" for state in BAR])
    data = b"before\r\n" + bar + b"\nafter\n"
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    assert printed(*chunks) == ["before", "Loading: 100%|done", "after"]


def test_a_bar_that_takes_long_shows_a_state_now_and_then() -> None:
    """While a bar goes on, a state of it comes every ten seconds, and the last one at its end."""
    told = printed(*BAR, b"\n", at=lambda i: i / 10)  # it takes 50 s
    assert told == ["Loading:  99%|#####"] * 5 + ["Loading: 100%|done"]


def test_what_is_left_when_the_worker_ends_is_passed_on() -> None:
    """The last line comes without its newline, too, and lines without end come in pieces."""
    assert printed(b"\r 10%", b"\r 20%") == [" 20%"]
    assert printed(b" 10%\r", b" 20%\r") == [" 20%"]
    assert printed(b"no newline") == ["no newline"]
    assert [len(line) for line in printed(b"x" * (process._LONGEST_LINE + 1), b"y")] == [process._LONGEST_LINE + 1, 1]
    assert printed(b"\r\n\n\r\r\n") == ["", "", ""]
