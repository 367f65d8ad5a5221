"""A side of `bench gpu` in a process of its own: the bare loop, or carpool in a program.

    python -m bench.gpu.side {offline|program} TASK SECONDS FOLDER

`offline` finds the best batch and writes what it answers to the first items into FOLDER, so that
all others can be compared with it. The figures are printed as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu import meter
from bench.gpu.meter import Counts
from bench.gpu.tasks import TASKS, Runner, Task

COMPARED = 16
"""The first items, whose answers are compared between all sides."""
ITEMS = 1024
"""As many different items are asked, again and again."""
Figures = dict[str, Any]


def answers_file(folder: Path) -> Path:
    return folder / "answers.npy"


def are_like(answers: Any, right: np.ndarray[Any, Any]) -> bool:
    """Whether answers are those of the bare loop, up to the rounding of bfloat16."""
    found = np.asarray(answers, dtype=np.float32)
    if found.shape != right.shape or not np.isfinite(found).all():
        return False
    return bool(np.linalg.norm(found - right) < 0.1 * np.linalg.norm(right))


def some_items(task: Task) -> list[np.ndarray[Any, Any]]:
    made = [task.item(n) for n in range(min(ITEMS, 256 if task.name == "resnet" else ITEMS))]
    return (made * (ITEMS // len(made)))[:ITEMS]


def offline(task: Task, seconds: float, folder: Path) -> Figures:
    """The bare loop with each size of batch; texts are sorted by length."""
    runner = Runner(task)
    items = some_items(task)
    np.save(answers_file(folder), runner.call(items[:COMPARED]))
    if task.by_length:
        items.sort(key=len)
    found = []
    for size in task.batches:
        batches = [items[i : i + size] for i in range(0, len(items) - size + 1, size)]
        for batch in batches[:: max(1, len(batches) // 4)]:
            runner.call(batch)  # a first call of a shape chooses kernels
        before, began = Counts(**asdict(runner.meter.counts)), time.perf_counter()
        until = began + seconds / len(task.batches)
        # Whole rounds only, where items differ: a part of one would be the short texts.
        while time.perf_counter() < until:
            for batch in batches:
                runner.call(batch)
                if not task.by_length and time.perf_counter() > until:
                    break
        took = time.perf_counter() - began
        counts = runner.meter.counts - before
        found.append({"batch": size, "items_per_s": counts.items / took, "seconds": took, "counts": asdict(counts)})
    best = max(found, key=lambda each: each["items_per_s"])
    resident = _resident(runner, items[: best["batch"]]) if not task.by_length else None
    return {**best, "sizes": found, "resident_items_per_s": resident}


def _resident(runner: Runner, items: list[np.ndarray[Any, Any]]) -> float:
    """Items per second where the batch lies on the device and answers stay there."""
    torch = runner.torch
    there = torch.from_numpy(np.stack(items)).to(runner.device)
    with torch.inference_mode():
        for wanted in (2, 20):
            began = time.perf_counter()
            for _ in range(wanted):
                runner.network(there)
            if runner.is_card:
                torch.cuda.synchronize()
            took = time.perf_counter() - began
    return wanted * len(items) / took


def program(task: Task, seconds: float, folder: Path) -> Figures:
    """carpool in a program: a stream of the items, and 64 and 256 callers in threads."""
    from bench.gpu.services import SERVICES

    items, right = some_items(task), np.load(answers_file(folder))
    meters = Path(folder, "meters")
    found: Figures = {}
    with SERVICES[task.name].run() as s:
        answers = np.stack(list(s.stream(items[:COMPARED])))
        if not are_like(answers, right):
            raise SystemExit("carpool's answers are not those of the bare loop")

        def stream(until: float) -> Iterator[float]:
            def endless() -> Iterator[Any]:
                for item in itertools.cycle(items):
                    if time.perf_counter() > until:
                        return
                    yield item

            for _ in s.stream(endless()):
                yield 0.0

        found["stream"] = _measured(s, meters, seconds, lambda until: list(stream(until)))
        for callers in (64, 256):
            ask = _asking(s.predict, items, callers)
            found[f"{callers} threads"] = _measured(s, meters, seconds, ask)
    return found


def _asking(predict: Callable[[Any], Any], items: list[Any], callers: int) -> Callable[[float], list[float]]:
    """Return a function that has threads ask until a time; it returns the seconds of all calls."""

    def ask(until: float) -> list[float]:
        taken: list[list[float]] = [[] for _ in range(callers)]

        def caller(number: int) -> None:
            for item in itertools.islice(itertools.cycle(items), number, None, 7):
                began = time.perf_counter()
                if began > until:
                    return
                predict(item)
                taken[number].append(time.perf_counter() - began)

        threads = [threading.Thread(target=caller, args=(number,)) for number in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [seconds for each in taken for seconds in each]

    return ask


def _measured(s: Any, meters: Path, seconds: float, ask: Callable[[float], list[float]]) -> Figures:
    """Ask for a third of the time to warm up, and then for all of it."""
    ask(time.perf_counter() + seconds / 3)
    before, cpu_before, stage_before = meter.read(meters), time.process_time(), s.stats().stages[0]
    began = time.perf_counter()
    taken = sorted(ask(began + seconds))
    took = time.perf_counter() - began
    counts, stage = meter.read(meters) - before, s.stats().stages[0]
    calls = stage.batches - stage_before.batches
    busy_s = stage.mean_compute_s * stage.batches - stage_before.mean_compute_s * stage_before.batches
    return {
        "items_per_s": counts.items / took,
        "seconds": took,
        "p50_s": taken[len(taken) // 2] or None,
        "p99_s": taken[int(0.99 * len(taken))] or None,
        "front_cpu_s": time.process_time() - cpu_before,
        "counts": asdict(counts),
        "worker_batch_s": busy_s / calls if calls else None,
    }


def main() -> None:
    side, name, seconds, folder = sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])
    measure = {"offline": offline, "program": program}[side]
    print(json.dumps(measure(TASKS[name], seconds, folder)))


if __name__ == "__main__":
    main()
