"""Models for the tests of worker processes. At module level, where workers can find them."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import carpool
from carpool.engine.wire.frame import Frame, FrameKind, encode


def double(x: Any) -> Any:
    return 2 * x


def scale(xs: list[float], factor: float = 2.0) -> list[float]:
    return [factor * x for x in xs]


def lengths(texts: list[str]) -> list[list[int]]:
    """Each gets the lengths of all in its batch."""
    return [[len(text) for text in texts] for _ in texts]


def spell(n: int) -> str:
    """A word of so many letters."""
    return "x" * n


def hold_the_gil(seconds: float) -> None:
    """Wait in C, for a lock that this thread has already: no other thread runs, and no signal ends it early."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    until = time.time() + seconds
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9)))


class RefusesWhatIsDue(carpool.Greedy):
    """A policy that takes only requests without an SLO."""

    def decide(self, view: carpool.policy.View) -> carpool.policy.Decision:
        due = [request for request in view.queue if request.due < float("inf")]
        return carpool.policy.Decision(drop=due) if due else super().decide(view)


class Trainee(carpool.Greedy):
    """A policy that keeps what a warm-up teaches."""

    def __init__(self) -> None:
        super().__init__()
        self.lessons: list[tuple[int, int, float]] = []

    def learn(self, now: float, done: carpool.policy.DoneBatch) -> None:
        if done.is_warm_up and not done.longest:
            self.lessons.append((done.n, done.size, done.busy_s))


class NamesItsThread(carpool.Greedy):
    """A policy that explains only where it is asked."""

    def explain(self, now: float) -> dict[str, Any]:
        return {"thread": threading.current_thread().name}


class Callable:
    """A callable object is a model too."""

    def __call__(self, x: int) -> int:
        return x + 100


class Affine(carpool.Model):
    """Takes its parameters from `kwargs=`, has every hook, and notes its life in a file."""

    def __init__(self, slope: float = 1.0, shift: float = 0.0, diary: str | None = None) -> None:
        self.slope, self.shift, self.diary = slope, shift, diary

    def setup(self) -> None:
        self._note("setup")

    def preprocess(self, x: float) -> float:
        return x + 0.5

    def predict(self, xs: list[float]) -> list[float]:
        return [self.slope * x + self.shift for x in xs]

    def postprocess(self, y: float, x: float) -> dict[str, float]:
        return {"x": x, "y": y}

    def teardown(self) -> None:
        self._note("teardown")

    def _note(self, event: str) -> None:
        if self.diary:
            with Path(self.diary).open("a") as diary:
                diary.write(f"{event} {os.getpid()}\n")


class Pid(carpool.Model):
    """Says who answers, and where it runs; sleeps on demand."""

    def predict(self, seconds: float) -> dict[str, Any]:
        time.sleep(seconds)
        return {
            "pid": os.getpid(),
            "cores": sorted(os.sched_getaffinity(0)),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "flavour": os.environ.get("FLAVOUR"),
        }


class Talks(carpool.Model):
    """A model that prints, logs and warns."""

    def setup(self) -> None:
        print("hello from setup")

    def predict(self, text: str) -> str:
        print(f"printed {text}")
        print(f"complained {text}", file=sys.stderr)
        logging.getLogger("user").warning("logged %s", text)
        os.write(1, b"from C\n")
        return text


class Prints(carpool.Model):
    """As many bytes as it is asked for."""

    def predict(self, n: int) -> int:
        for _ in range(n // 1000):
            print("x" * 999)
        return n


class RaisesInSetup(carpool.Model):
    def setup(self) -> None:
        raise FileNotFoundError("the weights are missing")

    def predict(self, x: Any) -> Any:
        return x


class DiesInSetup(carpool.Model):
    def setup(self) -> None:
        os._exit(3)

    def predict(self, x: Any) -> Any:
        return x


class SleepsInSetup(carpool.Model):
    def setup(self) -> None:
        time.sleep(60)

    def predict(self, x: Any) -> Any:
        return x


class BadExample(carpool.Model):
    examples = (1,)

    def predict(self, x: int) -> float:
        return 1 / (x - 1)


class CountsWarmUp(carpool.Model):
    """Answers with the sizes of the batches it had before its first real one."""

    examples = (7, 8, 9)

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def predict(self, xs: list[int]) -> list[list[int]]:
        seen = list(self.sizes)
        self.sizes.append(len(xs))
        return [seen for _ in xs]


class Dies(carpool.Model):
    """Dies with the item "die", every time; answers others after a while."""

    def predict(self, xs: list[Any]) -> list[Any]:
        time.sleep(0.02)
        if "die" in xs:
            os.kill(os.getpid(), 9)
        return [[x, os.getpid()] for x in xs]


class LastWords(carpool.Model):
    """Dies with the item "die", with half a line on its lips."""

    def predict(self, xs: list[Any]) -> list[Any]:
        if "die" in xs:
            print("last words", end="", flush=True)
            os._exit(3)
        return xs


class StopsTheClock(carpool.Model):
    """Replaces the clock of its process."""

    def setup(self) -> None:
        time.monotonic = lambda: 1e15

    def predict(self, xs: list[Any]) -> list[Any]:
        return xs


class DiesOnce(carpool.Model):
    """Dies at the first call of all, as the file it is given tells."""

    def __init__(self, diary: str) -> None:
        self.diary = Path(diary)

    def predict(self, xs: list[int]) -> list[int]:
        if not self.diary.exists():
            self.diary.write_text("died")
            os.kill(os.getpid(), 9)
        return [2 * x for x in xs]


class HangsOnce(carpool.Model):
    """Hangs at the first call of all and writes down who does; later calls answer who runs them."""

    def __init__(self, diary: str) -> None:
        self.diary = Path(diary)

    def predict(self, xs: list[int]) -> list[int]:
        if not self.diary.exists():
            self.diary.write_text(str(os.getpid()))
            time.sleep(600)
        return [os.getpid() for _ in xs]


class DiesAtOnce(carpool.Model):
    """Ready, but no call ever comes back."""

    def predict(self, x: Any) -> Any:
        os._exit(7)


class Lengths(carpool.Model):
    def predict(self, xs: list[bytes]) -> list[int]:
        return [len(x) for x in xs]


class Slow(carpool.Model):
    def predict(self, xs: list[float]) -> list[int]:
        time.sleep(max(xs))
        return [os.getpid() for _ in xs]


class SlowAsync(carpool.Model):
    async def predict(self, xs: list[float]) -> list[int]:
        import asyncio  # here, since most workers that import these models have no use for it

        await asyncio.sleep(max(xs))
        return [os.getpid() for _ in xs]


class HoldsTheGil(carpool.Model):
    """Sleeps without letting any other thread of its process run."""

    def predict(self, seconds: float) -> float:
        hold_the_gil(seconds)
        return seconds


class HasChildren(carpool.Model):
    """Starts a child of its own where it is told to, says both pids, and holds the GIL."""

    def __init__(self, pids: str, when: str) -> None:
        self.pids, self.when = Path(pids), when

    def setup(self) -> None:
        if self.when == "setup":
            self._go()

    def predict(self, x: Any) -> Any:
        self._go()
        return x

    def _go(self) -> None:
        child = subprocess.Popen(["sleep", "600"])
        self.pids.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
        self.pids.with_suffix(".part").rename(self.pids)
        hold_the_gil(600.0)


class LoadsSlowly(carpool.Model):
    """Notes when its loading begins and ends, and waits in between."""

    def __init__(self, diary: str, seconds: float) -> None:
        self.diary, self.seconds = Path(diary), seconds

    def setup(self) -> None:
        self._note("+")
        time.sleep(self.seconds)
        self._note("-")

    def predict(self, xs: list[float]) -> list[float]:
        time.sleep(max(xs))
        return xs

    def _note(self, sign: str) -> None:
        with self.diary.open("a") as diary:
            diary.write(sign)


class Misbehaves(carpool.Model):
    """Does to its own process what the item says; "pid" answers with who runs it."""

    def predict(self, how: str) -> Any:
        if how == "exit":
            os._exit(0)
        elif how == "fork":
            os.fork()
        elif how == "fds":
            os.closerange(0, 1024)
        elif how == "stdout":
            os.close(1)
            sys.stdout.close()
        elif how == "prints":
            print("to nobody")
        elif how == "thread":
            threading.Thread(target=time.sleep, args=(600,), name="left-behind").start()
        elif how == "child":
            return [os.getpid(), subprocess.Popen(["sleep", "600"]).pid]
        elif how == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif how == "habits":
            os.chdir("/")
            sys.setrecursionlimit(200)
            gc.disable()
            logging.shutdown()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_IGN)
        elif how == "floods":
            sock = socket.socket(fileno=os.dup(int(sys.argv[1])))
            reply = b"".join(encode(Frame(FrameKind.REPLY, 1, ids=[1], formats=b"\0", payloads=[b"x" * 65_000])))
            while True:
                sock.sendall(reply)
        elif how in CRASHES:
            CRASHES[how]()
        return os.getpid()


CRASHES = {
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGABRT": os.abort,
    "SIGBUS": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "SIGILL": lambda: os.kill(os.getpid(), signal.SIGILL),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class LoadsAfterFailures(carpool.Model):
    """Loads at first; then the next `n` loads fail, and those after them work. Notes when each began."""

    def __init__(self, diary: str, n: int) -> None:
        self.diary, self.n = Path(diary), n

    def setup(self) -> None:
        with self.diary.open("a") as diary:
            diary.write(f"{time.monotonic()}\n")
        loads = len(self.diary.read_text().split())
        if 1 < loads <= 1 + self.n:
            raise FileNotFoundError("the weights are missing")

    def predict(self, x: Any) -> Any:
        return os.getpid()


class LoadsInC(carpool.Model):
    """A model that holds the GIL while it loads."""

    def setup(self) -> None:
        hold_the_gil(2.5)

    def predict(self, x: Any) -> Any:
        return os.getpid()


class EndsInSetup(carpool.Model):
    """Its `setup` does not come to its end."""

    def __init__(self, how: str) -> None:
        self.how = how

    def setup(self) -> None:
        if self.how == "raises":
            raise FileNotFoundError("the weights are missing")
        if self.how == "exits":
            sys.exit("no licence")
        elif self.how == "interrupts":
            raise KeyboardInterrupt
        elif self.how == "leaves":
            os._exit(3)
        CRASHES["SIGSEGV"]()

    def predict(self, x: Any) -> Any:
        return x


class Wrong(carpool.Model):
    """Returns what a batch call must not return, as the first item says."""

    def predict(self, xs: list[str]) -> Any:
        import numpy as np  # here, so that the workers of all other models start in half the time

        n = len(xs)
        returned: dict[str, Any] = {
            "few": ["x"] * (n - 1),
            "many": ["x"] * (n + 1),
            "none": None,
            "text": "x" * n,
            "dict": dict.fromkeys(range(n)),
            "generator": (x for x in xs),
            "scalar": np.float64(1.0),
            "tuple": tuple(xs),
            "array": np.arange(n),
            "matrix": np.ones((n, 3)),
        }
        return returned[xs[0]]


class Raises(carpool.Model):
    """A model that raises in unpleasant ways."""

    def predict(self, how: str) -> str:
        if how == "exit":
            sys.exit(1)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "mute":
            raise _Mute
        if how == "long":
            raise ValueError("x" * 10_000_000)
        if how == "two arguments":
            raise _TwoArguments("a", "b")
        if how == "unpicklable":
            return lambda: None  # type: ignore[return-value]
        if how == "warn":
            warnings.warn("just so", stacklevel=1)
        return how


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class _TwoArguments(Exception):
    def __init__(self, a: str, b: str) -> None:
        super().__init__(a)


@dataclass
class Point:
    x: int
    y: int


class MovesPoints(carpool.Model):
    def predict(self, points: list[Point]) -> list[Point]:
        return [Point(p.x + 1, p.y) for p in points]


class Stamp(carpool.Model):
    """Writes into the array it is given: what arrives must be the item's own."""

    def predict(self, array: Any) -> Any:
        array[0] += 1
        return array


class PoisonedBatch(carpool.Model):
    """A batch with a negative number raises; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def predict(self, xs: list[int]) -> list[list[int]]:
        self.calls += 1
        if any(x < 0 for x in xs):
            raise ValueError("a negative number")
        return [[x, self.calls] for x in xs]


class Tensors(carpool.Model):
    """Returns a whole array for the batch."""

    def predict(self, xs: list[int]) -> Any:
        import numpy as np

        return np.array(xs, dtype=np.int32) * 2


class SleepsInCalls(carpool.Model):
    """Single items that take a while each."""

    def predict(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


class RaisesInPredict(carpool.Model):
    def predict(self, x: int) -> float:
        return 1 / x


class MemoryFull(Exception):
    """A framework's own exception for memory that is full."""


class Narrow(carpool.Model):
    """Runs out of memory with more than `most` items; answers with the call's size."""

    def __init__(self, most: int = 12, full: type[Exception] = MemoryError) -> None:
        self.most, self.full = most, full

    def predict(self, xs: list[int]) -> list[list[int]]:
        if len(xs) > self.most:
            raise self.full
        return [[x, len(xs)] for x in xs]


class NarrowRows(carpool.Model):
    """Runs out of memory with more than 100 rows in all; answers with their number."""

    def predict(self, xs: list[str]) -> list[int]:
        rows = sum(map(len, xs))
        if rows > 100:
            raise MemoryError
        return [rows for _ in xs]


class NarrowAsync(carpool.Model):
    """`Narrow` as `async def`, for a loop."""

    async def predict(self, xs: list[int]) -> list[list[int]]:
        if len(xs) > 12:
            raise MemoryError
        return [[x, len(xs)] for x in xs]


class Song(Exception):
    """An exception that makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, self.args


class Sings(carpool.Model):
    """Raises a `Song` once it has been asked for what is no example, and from then on."""

    examples = ("an example",)

    def __init__(self, path: str) -> None:
        self.path = path
        self.broken = False

    def predict(self, x: str) -> str:
        self.broken = self.broken or x not in self.examples
        if self.broken:
            raise Song(self.path)
        return x


class LoadsOnce(carpool.Model):
    """Loads at once, and later on only when its file is gone; the file has the id of its last process."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def setup(self) -> None:
        while self.file.exists():
            time.sleep(0.01)
        self.file.write_text(str(os.getpid()))

    def predict(self, xs: list[float]) -> list[float]:
        return xs
