"""A sink for what workers print."""

from __future__ import annotations


class Output:
    """A line sink that remembers.

    Attributes:
        lines: The worker's name, whether it was stderr, and the line.
    """

    def __init__(self) -> None:
        self.lines: list[tuple[str, bool, str]] = []

    def __call__(self, worker: str, is_error: bool, line: str) -> None:
        self.lines.append((worker, is_error, line))

    @property
    def texts(self) -> list[str]:
        return [line for _, _, line in self.lines]
