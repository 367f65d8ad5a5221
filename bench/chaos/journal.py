"""The clients' side of the ledger: what was asked, and what became of it, a line for each event.

    I id time kind timeout sha    a request is sent: its time-out in seconds, the SHA-256 of it
    O id time status id sha       it has ended: the HTTP status, id and hash of the answer, else -
    X time                        an answer came that nobody had asked for
    F time what pid               the nemesis has done something, to a process or (0) to none

Besides an HTTP status an end may be RESET (the connection closed without an answer), SILENCE (the
client has waited until long after the deadline) or GONE (the client has left on purpose). Times are
monotonic seconds of one machine.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

RESET, SILENCE, GONE = "reset", "silence", "gone"
NOTHING = "-"


class Journal:
    """A journal of one client process. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=2**16)
        self._lock = threading.Lock()

    def asked(self, id: str, kind: str, timeout_s: float, sha: str) -> None:
        """A request is sent now."""
        self._write(f"I {id} {time.monotonic():.6f} {kind} {timeout_s:g} {sha}\n")

    def ended(self, id: str, status: str, echo: str = NOTHING, sha: str = NOTHING) -> None:
        """It has ended now."""
        self._write(f"O {id} {time.monotonic():.6f} {status} {echo} {sha}\n")

    def unasked(self) -> None:
        """An answer too many."""
        self._write(f"X {time.monotonic():.6f}\n")

    def fault(self, what: str, pid: int = 0) -> None:
        """The nemesis acts now."""
        self._write(f"F {time.monotonic():.6f} {what} {pid}\n")

    def close(self) -> None:
        """Write out what is left."""
        self._file.close()

    def _write(self, line: str) -> None:
        with self._lock:
            self._file.write(line)
