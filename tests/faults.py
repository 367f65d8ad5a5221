"""The register of faults: each fault that a test makes happen, and how.

A test names its faults with `@pytest.mark.fault("F1")`; `python -m tests.pages` writes docs/faults.md from this table
and these markers. Commits and comments refer to the numbers, so they stay when tests move.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final, NamedTuple

TESTS: Final = Path(__file__).parent


class Fault(NamedTuple):
    """One fault, or several that the same tests make: its numbers, how it is made, and what else looks for it."""

    numbers: str
    fault: str
    how: str
    also: str = ""


FAULTS: Final[dict[str, tuple[Fault, ...]]] = {
    "Workers that die": (
        Fault(
            "F1",
            "SIGKILL in a call",
            "the model kills its process; `kill -9` from outside under load; fault points",
            "the soak",
        ),
        Fault("F2", "SIGKILL of an idle worker", "`kill -9`"),
        Fault(
            "F3",
            "SIGKILL with half of a request read",
            "the worker is stopped, 4 MB are sent to its half-megabyte socket, then `kill -9`",
        ),
        Fault("F4", "SIGKILL with half of the reply sent", "fault point `worker.mid_send`", "the soak"),
        Fault("F5", "SIGKILL after the reply", "fault point `worker.after_send`"),
        Fault("F6", "SIGSEGV, SIGABRT, SIGILL, SIGBUS", "null pointer, `os.abort()`, signals"),
        Fault("F7", "all workers die at once", "`kill -9` of all, of two stages; and while the loop looks elsewhere"),
        Fault("F8", "random kills all the time", "nemesis; four kills under load", "the soak"),
        Fault("F9", "death in the second run, too", "the item kills each worker"),
    ),
    "Workers that hang": (
        Fault("F10", "hang in Python", "`time.sleep(600)`", "the soak"),
        Fault("F11", "hang in C with the GIL held", "`ctypes.PyDLL(None).usleep`"),
        Fault("F12", "SIGSTOP of a worker, for ever or with SIGCONT", "`kill -STOP`", "the soak"),
        Fault("F13", "one slow worker", "fault point"),
        Fault("F14", "a request that kills its worker", "the item says so", "the soak"),
    ),
    "Models that do not load": (
        Fault("F15", "a load that raises, exits, is interrupted, leaves or crashes", "`setup` variants"),
        Fault("F16", "a load that fails twice, then works", "a file counts"),
        Fault("F17", "death right after ready, always", "`kill -9` of each as it becomes ready"),
    ),
    "Starting, stopping, signals": (
        Fault("F18", "SIGKILL of the parent: idle, in a call, GIL held, with grandchildren", "`kill -9`"),
        Fault("F19", "SIGKILL of the parent while a model loads", "`kill -9`"),
        Fault("F20", "started from a thread that ends", "a thread"),
        Fault("F21", "SIGTERM under load", "eight keep-alive clients", "the soak"),
        Fault("F22", "SIGTERM with a hung call", "`time.sleep(600)`"),
        Fault("F23", "SIGTERM while a model loads", "a load that never ends"),
        Fault("F24", "Ctrl-C or SIGTERM for every process; twice", "`kill` to server, workers and guard"),
        Fault("F25", "slow load", "a load that never ends"),
        Fault("F26", "load that holds the GIL", "`ctypes.PyDLL(None).usleep` for longer than all limits"),
        Fault("F27", "a bad example", "an example that raises"),
        Fault("F28", "the port is in use; foreign sockets", "a second server", "there are no socket files"),
    ),
    "Overload and memory": (
        Fault(
            "F29", "overload", "three times the capacity, in virtual time and for real", "`bench/reality/overload.py`"
        ),
        Fault("F30", "bytes in queues and in flight", "large bodies"),
        Fault("F31", "out of memory", "MemoryError and its relatives; a worker that the kernel ends is F1"),
        Fault("F32", "a deadline shorter than the queue", "short time-outs", "the soak"),
    ),
    "Callers that leave": (
        Fault("F33", "a client resets its connection before its turn", "RST", "the soak"),
        Fault("F34", "a client or task leaves while its batch runs", "RST, `cancel` at any moment"),
        Fault("F35", "a client closes its own side and waits", "FIN"),
    ),
    "Items, results and exceptions": (
        Fault("F36", "one undecodable item in a batch", "bad bodies among good ones"),
        Fault(
            "F37", "items that are returned as failed", "exceptions in the list", "`tests/contract/test_contract.py`"
        ),
        Fault("F38, F39", "the wrong number or kind of results", "models"),
        Fault("F40", "results that cannot be encoded", "models"),
        Fault(
            "F41", "results in the wrong order", "cannot be seen by a server", "documented: the order is the model's"
        ),
        Fault("F42, F43", "exceptions of every kind, SystemExit, KeyboardInterrupt", "models"),
    ),
    "Models with bad habits": (
        Fault("F44", "`os._exit(0)`", "the model"),
        Fault(
            "F45",
            "bad habits: chdir, signal handlers, logging.shutdown, recursion limit, gc off, stdout closed",
            "the model",
        ),
        Fault("F46", "all descriptors closed", "`os.closerange(0, 1024)`"),
        Fault("F47", "threads and children left behind; a fork that returns", "the model"),
        Fault("F48", "an answer after the deadline", "slow model"),
    ),
    "Workers that break the protocol": (
        Fault(
            "F49",
            "doubled, unknown, foreign ids in a reply",
            "a model that takes over its worker's socket, a stub worker",
        ),
        Fault("F50", "frames that are not frames", "hostile workers, noise (`make fuzz`), every cut"),
        Fault("F51", "a worker that floods", "the model writes replies into its socket without end"),
    ),
    "The program and its surroundings": (
        Fault("F52", "closing with callers inside", "`close`"),
        Fault("F53", "fork in the program", "`os.fork`"),
        Fault("F54", "no file descriptors", "`prlimit` of a running server, and a worker killed meanwhile"),
        Fault(
            "F55, F56",
            "`/tmp` or `/dev/shm` full",
            "not used while serving: the soak's leak check finds no file",
            "the soak",
        ),
        Fault("F57", "logs to a full disk, a closed pipe, a pipe without a reader", "`/dev/full`, pipes"),
        Fault("F58", "limits on files and processes", "`prlimit`"),
        Fault("F59", "the wall clock jumps", "it is never asked: a test reads every import of the parts that decide"),
        Fault(
            "F60", "the server is stopped and continued; then all of its processes are", "`kill -STOP`, `kill -CONT`"
        ),
    ),
    "HTTP": (
        Fault(
            "F61",
            "a route that raises, examples that cannot be shown, an ASGI server that raises",
            "exceptions of every kind, over our own server and over ASGI",
        ),
        Fault("F62", "a `size=`, its number or a type of its items that raises anything", "exceptions of every kind"),
        Fault(
            "F63",
            "a header that takes long to read",
            "every regular expression in the source is found and given more and more of what it likes",
        ),
        Fault(
            "F64",
            "heads without bodies, bodies without ends, bodies that trickle while the memory is full",
            "held connections, real and on a clock that jumps",
        ),
        Fault("F65", "a body larger than the memory for all bodies", "a small account"),
        Fault("F66", "a large answer that is read slowly, or not at all", "a client that takes a little at a time"),
        Fault("F67", "thousands of pipelined requests behind a slow one", "9,000 in one piece"),
        Fault("F68", "lengths of thousands of digits, addresses as for a proxy", "requests"),
        Fault("F69", "deep JSON and msgpack in a program that has raised the recursion limit", "megabytes of `[`"),
        Fault(
            "F70",
            "slow heads and bodies, half-closed and broken uploads, noise",
            "hundreds of connections; a good client's p99 beside each",
        ),
    ),
    "Code that is not ours, and calls that cross": (
        Fault(
            "F71",
            "code that is not ours raises, at every place of the table in [foreign-code.md](foreign-code.md)",
            "each place, each driver and each way into it, ten kinds",
        ),
        Fault(
            "F72",
            "lives that end as calls begin: `close` by many at once, against calls and streams, while "
            "starting, in a fork, on another loop, in the loop's own thread",
            "every order of a few callers and closers; real threads, tasks, forks and loops",
            "random programs",
        ),
        Fault("F73", "a policy that raises, in any of its calls", "eight calls, seven kinds, at every point of a run"),
        Fault("F74", "a loop that is blocked by user code", "a policy that sleeps"),
        Fault(
            "F75",
            "an input that fills one buffer again and again, or is cancelled",
            "lists and arrays of several sizes, in both kinds of streams",
        ),
        Fault("F76", "merged callers change one another's values", "each library, merged and alone, bit by bit"),
        Fault("F77", "settings and types that cannot work", "each by name"),
    ),
    "Calls, batches and handles": (
        Fault("F78", "a call that is slow and does not hang", "with and without `max_batch_time_s`"),
        Fault(
            "F79",
            "closing, while a policy holds a batch back for more requests",
            "each policy; threads, tasks, services, SIGTERM",
        ),
        Fault("F80", "many bad items among good ones", "1 to 100 % of them, simulated and counted"),
        Fault(
            "F81",
            "batches, results and `kwargs` too large for one message; no memory for one",
            "small limits, and MemoryError",
        ),
        Fault("F82", "functions that wait for each other", "f calls g, which calls f, in threads and tasks"),
        Fault("F83", "a log whose handlers raise", "every kind"),
        Fault("F84", "a program without standard descriptors", "0, 1, 2 closed"),
        Fault(
            "F85",
            "handles that are dropped without `close`",
            "in every thread, under our own locks, in a fork, on loops that go on, stand still, end and have ended",
        ),
    ),
}


def marked() -> dict[str, list[str]]:
    """Return the files of tests that make each fault, by its number, from the markers in the sources."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.fault(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for number in _numbers(node):
                    files = found.setdefault(number, [])
                    if (name := str(path.relative_to(TESTS.parent))) not in files:
                        files.append(name)
    return found


def _numbers(test: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the numbers in the markers of one test."""
    return [
        argument.value
        for each in test.decorator_list
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.fault"
        for argument in each.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]


def numbers(fault: Fault) -> list[str]:
    """Return the numbers of a row."""
    return re.findall(r"F\d+", fault.numbers)
