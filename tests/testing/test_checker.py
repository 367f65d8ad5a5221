"""The soak's checker on made-up journals: what is sound passes, and each kind of fault is found.

Each test writes what clients and workers would have written, with one thing wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos import checker
from bench.chaos.checker import Findings, check
from bench.chaos.journal import GONE, RESET, SILENCE, Journal

SHA, OTHER = "a" * 64, "b" * 64


class Ledger:
    """Journals in the making; times are given in seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._clients: list[str] = []
        self._workers: dict[int, list[str]] = {}

    def asked(self, id: str, when: float, kind: str = "ok", timeout_s: float = 2.0) -> None:
        self._clients.append(f"I {id} {when} {kind} {timeout_s} {SHA}")

    def ended(self, id: str, when: float, status: str = "200", echo: str | None = None, sha: str = SHA) -> None:
        good = status == "200"
        self._clients.append(f"O {id} {when} {status} {(echo or id) if good else '-'} {sha if good else '-'}")

    def unasked(self, when: float) -> None:
        self._clients.append(f"X {when}")

    def fault(self, when: float, what: str, pid: int = 0) -> None:
        self._clients.append(f"F {when} {what} {pid}")

    def ran(self, pid: int, when: float, *ids: str, end: str | None = "E") -> None:
        """A call of 10 ms; `end` is E for an answer, R for a raise, None for a call that never ended."""
        lines = self._workers.setdefault(pid, [])
        call = sum(line.startswith("B") for line in lines) + 1
        lines.append(f"B {call} {when} {' '.join(ids)}")
        if end:
            lines.append(f"{end} {call} {when + 0.01}")

    def exchange(self, id: str, when: float, pid: int = 7) -> None:
        """A request as it should be."""
        self.asked(id, when)
        self.ran(pid, when + 0.1, id)
        self.ended(id, when + 0.2)

    def check(self, **settings: int) -> Findings:
        (self.folder / "client-1.log").write_text("".join(f"{line}\n" for line in self._clients))
        for pid, lines in self._workers.items():
            (self.folder / f"worker-{pid}-1.log").write_text("".join(f"{line}\n" for line in lines))
        return check(self.folder, **settings)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def wrongs(findings: Findings) -> dict[str, int]:
    return dict(findings.wrongs.counts)


def id_of(n: int) -> str:
    return f"{n:032x}"


# -- what is sound


def test_a_sound_ledger_passes(ledger: Ledger) -> None:
    """A ledger of answers, a crash with a second run, a split after a raise and a client that left
    has nothing wrong in it.
    """
    for n in range(5):
        ledger.exchange(id_of(n), float(n))
    ledger.asked("crashed", 6.0)
    ledger.ran(8, 6.1, "crashed", end=None)
    ledger.fault(6.15, "kill", 8)
    ledger.ran(9, 6.5, "crashed")
    ledger.ended("crashed", 6.6)
    ledger.asked("mate", 7.0)
    ledger.asked("bad", 7.0, kind="raise")
    ledger.ran(9, 7.1, "mate", "bad", end="R")
    ledger.ran(9, 7.2, "mate")
    ledger.ran(9, 7.3, "bad", end="R")
    ledger.ended("mate", 7.4)
    ledger.ended("bad", 7.4, "500")
    ledger.asked("left", 8.0, kind="gone")
    ledger.ended("left", 8.1, GONE)

    findings = ledger.check()

    assert wrongs(findings) == {}
    assert findings.requests == 9
    assert findings.statuses() == {"200": 7, "500": 1, GONE: 1}
    assert (findings.killed_in_call, findings.run_twice) == (1, 1)
    assert findings.after_kill_s == [pytest.approx(0.45)]
    assert findings.latency_s(0.5) == pytest.approx(0.2, abs=0.001)


def test_the_real_journal_is_understood(tmp_path: Path) -> None:
    """The checker reads what `Journal` writes."""
    journal = Journal(tmp_path / "client-1.log")
    journal.asked("x", "ok", 2.0, SHA)
    journal.ended("x", "200", "y", SHA)
    journal.unasked()
    journal.fault("poison")
    journal.close()

    findings = check(tmp_path)

    assert wrongs(findings) == {"crossed": 1, "duplicated": 1}
    assert findings.faults == {"poison": 1}


def test_a_line_that_was_cut_short_is_no_line(ledger: Ledger, tmp_path: Path) -> None:
    """The half line that a process leaves when it is killed while writing is not read."""
    ledger.exchange(id_of(1), 1.0)
    ledger.check()
    with (tmp_path / "worker-7-1.log").open("a") as file:
        file.write("B 2 1.5 never-asked-for")

    assert wrongs(check(tmp_path)) == {}


# -- what the clients see


def test_a_request_that_never_ended_is_lost(ledger: Ledger) -> None:
    """A request that was asked and has no end is reported as lost."""
    ledger.exchange("a", 1.0)
    ledger.asked("b", 2.0)

    assert wrongs(ledger.check()) == {"lost": 1}


@pytest.mark.parametrize("status", [RESET, SILENCE])
def test_an_end_without_an_answer_is_lost(ledger: Ledger, status: str) -> None:
    """A request that ended without an answer, by a closed connection or a client that gave up, is
    reported as lost.
    """
    ledger.asked("a", 1.0)
    ledger.ended("a", 1.5, status)

    assert wrongs(ledger.check()) == {"lost": 1}


def test_a_close_is_an_answer_to_too_large_a_body(ledger: Ledger) -> None:
    """A connection that is closed on too large a body counts as an answer, since HTTP allows it."""
    ledger.asked("a", 1.0, kind="oversize")
    ledger.ended("a", 1.5, RESET)

    assert wrongs(ledger.check()) == {}


def test_anothers_id_is_crossed(ledger: Ledger) -> None:
    """If two answers are swapped, both are reported as crossed."""
    for id, echo in (("a", "b"), ("b", "a")):
        ledger.asked(id, 1.0)
        ledger.ended(id, 1.1, echo=echo)

    assert wrongs(ledger.check()) == {"crossed": 2}


def test_a_wrong_hash_is_crossed(ledger: Ledger) -> None:
    """An answer with the right id that was computed from other data is reported as crossed."""
    ledger.asked("a", 1.0)
    ledger.ended("a", 1.1, sha=OTHER)

    assert wrongs(ledger.check()) == {"crossed": 1}


def test_two_ends_are_a_duplicate(ledger: Ledger) -> None:
    """A request with two ends is reported as a duplicate, whatever the second one says."""
    ledger.exchange("a", 1.0)
    ledger.ended("a", 1.3, "503")

    assert wrongs(ledger.check()) == {"duplicated": 1}


def test_an_answer_that_nobody_waited_for_is_a_duplicate(ledger: Ledger) -> None:
    """Bytes on a connection with nothing under way are reported as a duplicate."""
    ledger.unasked(1.0)

    assert wrongs(ledger.check()) == {"duplicated": 1}


@pytest.mark.parametrize(("took_s", "late"), [(2.9, 0), (3.1, 1)])
@pytest.mark.parametrize("status", ["200", "504"])
def test_more_than_a_second_after_the_deadline_is_late(ledger: Ledger, took_s: float, late: int, status: str) -> None:
    """An answer more than a second after the deadline is reported as late, good or not."""
    ledger.asked("a", 1.0, timeout_s=2.0)
    ledger.ended("a", 1.0 + took_s, status)

    assert wrongs(ledger.check()).get("late", 0) == late


# -- what the workers say


def test_a_run_without_a_request_is_a_ghost(ledger: Ledger) -> None:
    """A run of a request that nobody has sent is reported as a ghost."""
    ledger.ran(7, 1.0, "made-up")

    assert wrongs(ledger.check()) == {"ghost": 1}


def test_a_second_run_of_what_was_answered_is_a_ghost(ledger: Ledger) -> None:
    """A second run of what was answered, with nothing gone wrong, is reported as a ghost."""
    ledger.exchange("a", 1.0)
    ledger.ran(7, 1.5, "a")

    assert wrongs(ledger.check()) == {"ghost": 1}


def test_a_second_run_while_the_first_worker_lives_is_a_ghost(ledger: Ledger) -> None:
    """A second run while the first worker goes on with other requests, and so was not dead, is
    reported as a ghost.
    """
    ledger.exchange("a", 1.0, pid=7)
    ledger.ran(8, 1.5, "a")
    ledger.exchange("b", 2.0, pid=7)

    assert wrongs(ledger.check()) == {"ghost": 1}


@pytest.mark.parametrize(("goes_on_at", "ghosts"), [(2.2, 0), (9.0, 1)])
def test_a_worker_that_hangs_may_go_on_for_a_moment(ledger: Ledger, goes_on_at: float, ghosts: int) -> None:
    """A worker that was given up may go on for a moment until it is killed; one that is still there
    much later was not given up, and the second run is a ghost.
    """
    ledger.asked("a", 1.0, timeout_s=10.0)
    ledger.ran(7, 1.1, "a", end="R")
    ledger.ran(7, 2.13, "a")  # it was stopped, and is awake again
    ledger.ran(8, 2.15, "a")
    ledger.ended("a", 2.2)
    ledger.asked("b", 0.5, timeout_s=20.0)
    ledger.ran(7, goes_on_at, "b")
    ledger.ended("b", 10.0)

    assert wrongs(ledger.check()).get("ghost", 0) == ghosts


def test_a_third_run_is_a_ghost(ledger: Ledger) -> None:
    """A third run is reported as a ghost, even though two workers have died with the request."""
    ledger.asked("a", 1.0)
    for pid, when in ((7, 1.1), (8, 1.2), (9, 1.3)):
        ledger.ran(pid, when, "a", end=None if pid < 9 else "E")
    ledger.ended("a", 1.5)

    assert wrongs(ledger.check()) == {"ghost": 1}


def test_at_most_once_allows_no_second_run(ledger: Ledger) -> None:
    """For a server that promises never to run anything again, a second run is reported."""
    ledger.asked("a", 1.0)
    ledger.ran(7, 1.1, "a", end=None)
    ledger.ran(8, 1.2, "a")
    ledger.ended("a", 1.5)

    assert wrongs(ledger.check(most_runs=2)) == {}
    assert wrongs(ledger.check(most_runs=1)) == {"ghost": 1}


def test_a_kill_counts_only_in_the_middle_of_a_call(ledger: Ledger) -> None:
    """A kill counts only in the middle of a call, and not for idle workers or for processes that
    had the same number long before.
    """
    ledger.exchange("a", 1.0, pid=7)
    ledger.fault(2.0, "kill", 7)
    ledger.asked("b", 100.0)
    ledger.ran(8, 100.1, "b", end=None)
    ledger.ended("b", 101.0, "503")
    ledger.fault(3.0, "kill", 8)

    findings = ledger.check()

    assert findings.faults == {"kill": 2}
    assert findings.killed_in_call == 0


# -- large ledgers


def test_in_parts_the_same_is_found(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that is too large for memory is read once per part of the ids, with the same
    findings.
    """
    for n in range(200):
        ledger.exchange(id_of(n), float(n))
    ledger.ended(id_of(3), 500.0)
    ledger.asked(id_of(1000), 500.0)
    ledger.ran(7, 501.0, id_of(5))
    ledger.ran(7, 501.0, id_of(2000))
    whole = ledger.check()
    monkeypatch.setattr(checker, "SHARD", 10)
    parts = ledger.check()

    assert wrongs(whole) == wrongs(parts) == {"duplicated": 1, "lost": 1, "ghost": 2}
    assert whole.ended == parts.ended
    assert whole.latencies == parts.latencies
