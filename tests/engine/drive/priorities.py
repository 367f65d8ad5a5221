"""A program that adds a worker to a service and prints the priorities of both, and its model.

Its arguments: whether the second worker is to have a lower priority while it loads, a file to write
to, and the patience in seconds; `kill` at the end has the second worker kill the first meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import carpool


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


class Nice(carpool.Model):
    """Notes its priority while it loads, and that of all its threads and of a child when asked."""

    def __init__(self, first: str, is_lowered: bool, kills: bool, patience_s: float) -> None:
        self.first, self.is_lowered, self.kills, self.patience_s = first, is_lowered, kills, patience_s

    def setup(self) -> None:
        usual = os.getpriority(os.PRIO_PROCESS, os.getppid())
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        if carpool.worker_index() == 0:
            with open(self.first, "w") as file:
                file.write(str(os.getpid()))
        elif self.is_lowered:  # at once after the start, unless the machine stands still
            self.wait_until(lambda: nice() > usual)
        self.loading = self.hurried = nice()
        self.child = subprocess.Popen(["sleep", "1000"])
        if self.kills and carpool.worker_index() == 1:
            with open(self.first) as file:
                os.kill(int(file.read()), signal.SIGKILL)
            self.wait_until(lambda: nice() == usual)
            self.hurried = nice()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + self.patience_s
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)

    def predict(self, seconds: float) -> dict[str, Any]:
        time.sleep(seconds)
        ids = [*map(int, os.listdir("/proc/self/task")), self.child.pid]
        serving = {os.getpriority(os.PRIO_PROCESS, each) for each in ids}
        return {
            "worker": carpool.worker_index(),
            "loading": self.loading,
            "hurried": self.hurried,
            "serving": sorted(serving),
            "ids": len(ids),
        }

    def teardown(self) -> None:
        self.child.kill()


def main() -> None:
    is_lowered, first, patience_s, *more = sys.argv[1:]
    kwargs = {
        "first": first,
        "is_lowered": is_lowered == "True",
        "kills": more == ["kill"],
        "patience_s": float(patience_s),
    }
    with carpool.Service(carpool.Stage(Nice, kwargs=kwargs)).run() as service:
        answers = [service.predict(0.0)]
        service.scale("Nice", 2)
        end = time.monotonic() + float(patience_s)
        while len(answers) < 2 and time.monotonic() < end:
            answers += [each for each in service.stream([0.05] * 8) if each["worker"] == 1][:1]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
