"""Reads all journals of a soak and says what was wrong. One pass over each, in bounded memory.

Exactly one answer, its own, in time:

* lost: asked and never ended, or ended without an answer although the client waited;
* crossed: an answer with another request's id, or a hash that is not that of the request's data;
* duplicated: ended twice, or an answer that nobody had asked for;
* late: more than a second after its deadline;
* ghost: run twice although nothing had gone wrong, more than twice, or never asked for. A call that
  raises may be split and run again by the same worker; another worker may run a request again once
  the first one is dead, or hangs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from bench.chaos.journal import GONE, RESET, SILENCE
from bench.chaos.limits import HANG_S

GRACE_S = 1.0
GIVEN_UP_S = 3.0  # until then a worker that hangs has been killed
TICK_S = 0.05
KILL_S = 20.0  # longest that a call may have been running when its worker was killed
NO_ANSWER = (RESET, SILENCE)
ANSWER_OPTIONAL = ("oversize", "gone")  # a server may close such a connection without a word, as HTTP allows
SHARD = 2_000_000  # requests that are held in memory at a time
_LINE = 150  # bytes of journal per request, roughly
_EXAMPLES = 5
DURATION_STEP_S = 0.0005

Kind = str
Status = str


@dataclass(slots=True)
class Wrongs:
    """How often each thing went wrong, and a few cases of it."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, what: str, text: str) -> None:
        """One more."""
        self.counts[what] += 1
        if self.counts[what] <= _EXAMPLES:
            self.examples.append(f"{what}: {text}")


@dataclass(slots=True)
class Findings:
    """What the journals say.

    Attributes:
        wrongs: What must not have happened; empty if all is well.
        ended: Requests by kind and status.
        faults: What the nemesis did, by name.
        killed_in_call: Workers that its SIGKILL hit in the middle of a call.
        run_twice: Requests that a second worker ran after the first had died.
        latencies: Seconds from sending to answer of good answers to ordinary requests, in steps of
            half a millisecond.
        after_kill_s: Seconds from a SIGKILL to the answer, for every request that was in the killed
            call, rising.
    """

    wrongs: Wrongs = field(default_factory=Wrongs)
    ended: dict[Kind, Counter[Status]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    killed_in_call: int = 0
    run_twice: int = 0
    latencies: Counter[int] = field(default_factory=Counter)
    after_kill_s: list[float] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """All that were asked."""
        return sum(count.total() for count in self.ended.values())

    def statuses(self) -> Counter[Status]:
        """Of all kinds together."""
        return sum(self.ended.values(), Counter())

    def latency_s(self, share: float) -> float:
        """The time within which this share of the ordinary requests were answered well."""
        left = share * self.latencies.total()
        for step in sorted(self.latencies):
            left -= self.latencies[step]
            if left <= 0:
                return (step + 1) * DURATION_STEP_S
        return float("nan")


def check(folder: Path, *, most_runs: int = 2) -> Findings:
    """Check the journals in a folder.

    Args:
        folder: With `client-*.log` and `worker-*.log`.
        most_runs: How many workers may run one request: 2, or 1 where nothing is ever run again.
    """
    findings = Findings()
    clients = sorted(folder.glob("client-*.log"))
    workers = [_read_worker(path) for path in sorted(folder.glob("worker-*.log"))]
    kills = _read_faults(clients, findings)
    killed = _killed_calls(workers, kills, findings)
    nbytes = sum(path.stat().st_size for path in clients)
    shards = 1 + nbytes // (SHARD * _LINE)
    for shard in range(shards):
        asked = _check_answers(clients, shard, shards, killed, findings)
        _check_runs(workers, asked, shard, shards, most_runs, findings)
    findings.after_kill_s.sort()
    return findings


# -- what the clients say


def _read_faults(clients: Iterable[Path], findings: Findings) -> dict[int, list[float]]:
    """Counts what the nemesis did; returns when it killed which process."""
    kills: dict[int, list[float]] = {}
    for path in clients:
        for line in _lines(path):
            if line[0] == "F":
                _, when, what, pid = line
                findings.faults[what] += 1
                if what == "kill":
                    kills.setdefault(int(pid), []).append(float(when))
            elif line[0] == "X":
                findings.wrongs.add("duplicated", f"an answer that nobody had asked for, {path.name} at {line[1]}")
    return kills


def _check_answers(
    clients: Iterable[Path], shard: int, shards: int, killed: dict[str, float], findings: Findings
) -> set[str]:
    """Match what was asked with what became of it; returns the ids that were asked."""
    wrongs = findings.wrongs
    asked: set[str] = set()
    for path in clients:
        waiting: dict[str, list[str]] = {}
        for line in _lines(path):
            if line[0] not in "IO" or not _is_in(line[1], shard, shards):
                continue
            id = line[1]
            if line[0] == "I":
                if id in asked:
                    raise ValueError(f"{path}: two requests with the id {id}")
                asked.add(id)
                waiting[id] = line
            elif id in waiting:
                _check_answer(waiting.pop(id), line, killed, findings)
            else:
                wrongs.add("duplicated", f"{id} ended twice, the second time with {line[3]}")
        for id, line in waiting.items():
            wrongs.add("lost", f"{id}, asked at {line[2]}, never ended")
            findings.ended.setdefault(line[3], Counter())["none"] += 1
    return asked


def _check_answer(ask: list[str], end: list[str], killed: dict[str, float], findings: Findings) -> None:
    _, id, sent, kind, timeout_s, sha = ask
    _, _, when, status, echo, echo_sha = end
    took_s = float(when) - float(sent)
    findings.ended.setdefault(kind, Counter())[status] += 1
    wrongs = findings.wrongs
    if status in NO_ANSWER and kind not in ANSWER_OPTIONAL:
        wrongs.add("lost", f"{id} ({kind}), {status} {took_s:.3f} s after it was asked")
    if status == "200" and (echo != id or echo_sha != sha):
        whose = "its hash is wrong" if echo == id else f"it is the answer of {echo}"
        wrongs.add("crossed", f"{id} ({kind}): {whose}")
    if status not in (*NO_ANSWER, GONE) and took_s > float(timeout_s) + GRACE_S:
        wrongs.add("late", f"{id} ({kind}), {status} after {took_s:.3f} s of {timeout_s} s")
    if status == "200" and kind == "ok":
        findings.latencies[int(took_s / DURATION_STEP_S)] += 1
    if id in killed and status not in (*NO_ANSWER, GONE):
        findings.after_kill_s.append(float(when) - killed[id])


# -- what the workers say


@dataclass(slots=True)
class Worker:
    """What a worker's journal tells besides its lines.

    Attributes:
        path: Of the journal.
        pid: Its process.
        begins: When each of its calls began.
        open_call: The ids of the call that has neither answered nor raised; none if there is no
            such call.
    """

    path: Path
    pid: int
    begins: list[float]
    open_call: list[str]


def _read_worker(path: Path) -> Worker:
    begins = []
    open_call: list[str] = []
    for line in _lines(path):
        if line[0] == "B":
            begins.append(float(line[2]))
            open_call = line[3:]
        else:
            open_call = []
    return Worker(path, int(path.name.split("-")[1]), begins, open_call)


def _killed_calls(workers: Iterable[Worker], kills: dict[int, list[float]], findings: Findings) -> dict[str, float]:
    """The requests that were in a call when the nemesis killed its worker, and when that was."""
    killed: dict[str, float] = {}
    for worker in workers:
        if worker.open_call:
            # A number may be used again, so the kill must have come while this worker was in it.
            whens = [when for when in kills.get(worker.pid, ()) if 0 <= when - worker.begins[-1] < KILL_S]
            if whens:
                findings.killed_in_call += 1
                killed |= dict.fromkeys(worker.open_call, whens[0])
    return killed


def _check_runs(
    workers: list[Worker], asked: set[str], shard: int, shards: int, most_runs: int, findings: Findings
) -> None:
    """Find what was run although it should not have been."""
    wrongs = findings.wrongs
    runs: dict[str, list[tuple[int, float]]] = {}  # by id: which workers, and when first
    for number, worker in enumerate(workers):
        settled: set[str] = set()  # what this worker has run without a raise
        calls: dict[str, list[str]] = {}
        for line in _lines(worker.path):
            ids = [id for id in line[3:] if _is_in(id, shard, shards)]
            if line[0] == "E":
                settled.update(calls.pop(line[1], ()))
            elif line[0] == "B":
                calls[line[1]] = ids
                for id in ids:
                    if id in settled:
                        wrongs.add("ghost", f"{id} was run again by worker {worker.pid} although it had been answered")
                    if id not in asked:
                        wrongs.add("ghost", f"{id} was run by worker {worker.pid} and never asked for")
                    before = runs.setdefault(id, [])
                    if not before or before[-1][0] != number:
                        before.append((number, float(line[2])))
    for id, before in runs.items():
        if len(before) > 1:
            _check_reruns(id, before, workers, most_runs, findings)


def _check_reruns(
    id: str, runs: list[tuple[int, float]], workers: list[Worker], most_runs: int, findings: Findings
) -> None:
    """Several workers ran a request: at most so many may, each once the one before was dead."""
    runs.sort(key=lambda run: run[1])
    findings.run_twice += 1
    if len(runs) > most_runs:
        findings.wrongs.add("ghost", f"{id} was run by {len(runs)} workers")
    for (number, _), (_, begin) in pairwise(runs):
        if _is_alive(workers[number].begins, begin):
            text = f"{id} was run by a second worker while {workers[number].pid} was alive"
            findings.wrongs.add("ghost", text)


def _is_alive(begins: list[float], when: float) -> bool:
    """Whether a worker goes on at `when` although it was not hanging.

    One that hangs is given up at its limit. Its batch goes to another, while it may still begin a
    call or two: it is woken to say where it hangs, and then killed.
    """
    i = bisect_left(begins, when)
    if i == len(begins):
        return False
    recent = [begin for begin in begins[:i] if begin > when - GIVEN_UP_S - HANG_S]
    hung = any(later - earlier >= HANG_S - TICK_S for earlier, later in pairwise([*recent, when]))
    return not hung or begins[-1] > when + GIVEN_UP_S


# -- files


def _lines(path: Path) -> Iterator[list[str]]:
    """The lines in parts; the last one is left out if it was cut short."""
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield line.split()


def _is_in(id: str, shard: int, shards: int) -> bool:
    return shards == 1 or int(id[-4:], 16) % shards == shard


def answered(findings: Findings, kinds: Iterable[Kind]) -> tuple[int, int]:
    """How many requests of these kinds got a 200, of how many."""
    counts: Counter[Status] = sum((findings.ended.get(kind, Counter()) for kind in kinds), Counter())
    return counts["200"], counts.total()
