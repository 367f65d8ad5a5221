"""A process that runs programs: it reads one from each line of its input and writes a line of findings for each.

Programs run in a process of their own because they may hang it or kill it; `Runner` is the other side of it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from tests.fuzz import mutants, program
from tests.fuzz.leftovers import warm_up
from tests.fuzz.program import Program
from tests.fuzz.run import GRACE_S, Finding, Run

_ROOT = Path(__file__).parents[2]
_SILENT_S = 100.0
"""A process that has not run one program by then hangs as a whole, its watch included."""


class Runner:
    """The other side of such a process, which is started when it is needed and again when it has to be.

    Args:
        grace_s: What a call may take beyond its time-out.
        mutant: Which promise of carpool is broken there, see `mutants`.
    """

    def __init__(self, grace_s: float = GRACE_S, mutant: str = "") -> None:
        self._grace_s, self._mutant = grace_s, mutant
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: IO[bytes]
        self._errors: IO[bytes]

    def run(self, made: Program) -> list[Finding]:
        """Run a program in the other process."""
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(repr(made).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return self._lost("ended before a program")
        if not select.select([self._replies], [], [], _SILENT_S)[0]:
            process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            return self._lost("hangs as a whole")
        line = self._replies.readline()
        if not line:
            return self._lost("died")
        reply = json.loads(line)
        findings = [Finding(**finding) for finding in reply["findings"]]
        if reply["worn"] or any(finding.poisoned for finding in findings):
            self.close()
        return findings

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()
            self._replies.close()
            self._errors.close()

    def _start(self) -> subprocess.Popen[bytes]:
        read, write = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the process lives
        command = [sys.executable, "-m", "tests.fuzz.runner", str(write), str(self._grace_s), self._mutant]
        self._process = process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._errors, stderr=self._errors, pass_fds=[write], cwd=_ROOT
        )
        os.close(write)
        self._replies = open(read, "rb")  # noqa: SIM115
        return process

    def _lost(self, what: str) -> list[Finding]:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        self._errors.seek(0)
        text = f"exit status {self._process.poll()}\n{self._errors.read().decode(errors='replace')[-20_000:]}"
        self.close()
        return [Finding("process", f"the process {what}", text, poisoned=True)]


def serve(replies: IO[Any], grace_s: float) -> None:
    """Run the programs of standard input."""
    for line in sys.stdin:
        made = eval(line, dict(vars(program)))
        run = Run(made, grace_s)
        findings = [vars(finding) for finding in run.go()]
        replies.write(json.dumps({"findings": findings, "worn": run.worn}) + "\n")
        replies.flush()


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warm_up()
    gc.freeze()  # each program ends with a collection
    mutants.apply(sys.argv[3])
    os.set_inheritable(int(sys.argv[1]), False)
    serve(os.fdopen(int(sys.argv[1]), "w"), float(sys.argv[2]))
