"""The model that every server of the soak runs: it first writes down what it is given.

An item is `{"id", "kind", "data"}`; its answer `{"id", "sha", "pid", "call", "n"}`: whose it is,
the SHA-256 of `data`, and who computed it in which call with how many. Kinds other than "ok" ask
for a fault. Standard library only, because it runs in the environment of each server.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import time
from typing import Any

FOLDER_VARIABLE = "CHAOS_FOLDER"
CALL_S, ITEM_S = 0.004, 0.0001  # what a call and each of its items take

Item = dict[str, Any]


class Witness:
    """One worker process's model and its journal.

    The journal is a file of its own, a line per event: `B call time id id ...` as a call begins, `E
    call time` when it has answered and `R call time` when it has raised. A line is one write, so
    what was written before a SIGKILL stays. Beside it lies a byte that is 1 while a call runs,
    which the nemesis watches.
    """

    def __init__(self, folder: str | None = None) -> None:
        folder = folder or os.environ[FOLDER_VARIABLE]
        self.pid = os.getpid()
        name = f"{self.pid}-{time.monotonic_ns()}"
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
        self._journal = os.open(os.path.join(folder, f"worker-{name}.log"), flags, 0o600)
        with open(os.path.join(folder, f"busy-{name}"), "w+b") as file:
            file.write(b"\0")
            file.flush()
            self._busy = mmap.mmap(file.fileno(), 1)
        self._call = 0

    def answer(self, items: list[Item]) -> list[Item]:
        """Answer a batch, in its order; or raise, hang or die where an item asks for it."""
        self._call += 1
        self._write("B", *[str(item["id"]) for item in items])
        self._busy[0] = 1
        event = "R"
        try:
            answers = [self._one(item, len(items)) for item in items]
            time.sleep(CALL_S + ITEM_S * len(items))
            event = "E"
            return answers
        finally:
            self._busy[0] = 0
            self._write(event)

    def _one(self, item: Item, n: int) -> Item:
        match item["kind"]:
            case "raise":
                raise ValueError("an item that cannot be computed")
            case "poison":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(60)
        sha = hashlib.sha256(item["data"].encode()).hexdigest()
        return {"id": item["id"], "sha": sha, "pid": self.pid, "call": self._call, "n": n}

    def _write(self, event: str, *ids: str) -> None:
        os.write(self._journal, f"{' '.join([event, str(self._call), f'{time.monotonic():.6f}', *ids])}\n".encode())
