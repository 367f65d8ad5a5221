"""What a soak has found: a verdict, a table for people, and rows for the table in the docs."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.chaos.checker import Findings
from bench.chaos.soak import Outcome, healthy_shares
from bench.chaos.targets import Target
from bench.tools.docs import DOCS

MUST_NOT = ("lost", "crossed", "duplicated", "late", "ghost")
LEAST_GOOD, MOST_REFUSED = 0.999, 0.01


@dataclass(frozen=True, slots=True)
class Row:
    """One soak in figures."""

    name: str
    version: str
    settings: str
    seed: int
    seconds: float
    requests: int
    killed_in_call: int
    faults: dict[str, int]
    wrongs: dict[str, int]
    good: float
    refused: float
    not_good: dict[str, int]
    p50_s: float
    p99_s: float
    worst_after_kill_s: float | None
    run_twice: int
    leaks: list[str]
    metrics: list[str]
    healthy: bool
    exit_code: int | None

    def failures(self) -> list[str]:
        """Why the soak has failed; empty if it has not."""
        found = [f"{self.wrongs[what]} {what}" for what in MUST_NOT if self.wrongs.get(what)]
        if self.good < LEAST_GOOD:
            found.append(f"only {self.good:.3%} of the ordinary requests got a 200, not {LEAST_GOOD:.1%}")
        if self.refused > MOST_REFUSED:
            found.append(f"{self.refused:.2%} of the ordinary requests were refused with 429")
        found += [f"leaked {text}" for text in self.leaks]
        found += [f"/metrics: {text}" for text in self.metrics]
        if not self.healthy:
            found.append("no healthy answer at the end")
        if self.exit_code not in (0, -signal.SIGTERM):
            found.append(f"the server ended with {self.exit_code}")
        return found


def row_of(target: Target, seed: int, outcome: Outcome) -> Row:
    """The figures of a soak."""
    findings: Findings = outcome.findings
    good, refused = healthy_shares(findings)
    ordinary = Counter(findings.ended.get("ok", Counter()))
    del ordinary["200"]
    return Row(
        name=target.name,
        version=target.version,
        settings=target.settings,
        seed=seed,
        seconds=outcome.seconds,
        requests=findings.requests,
        killed_in_call=findings.killed_in_call,
        faults=dict(sorted(findings.faults.items())),
        wrongs={what: findings.wrongs.counts[what] for what in MUST_NOT},
        good=good,
        refused=refused,
        not_good=dict(ordinary.most_common()),
        p50_s=findings.latency_s(0.5),
        p99_s=findings.latency_s(0.99),
        worst_after_kill_s=findings.after_kill_s[-1] if findings.after_kill_s else None,
        run_twice=findings.run_twice,
        leaks=outcome.leaks,
        metrics=outcome.metrics,
        healthy=outcome.healthy,
        exit_code=outcome.exit_code,
    )


_LINES = (
    ("version", lambda r: r.version),
    ("minutes, seed", lambda r: f"{r.seconds / 60:.1f}, {r.seed}"),
    ("requests", lambda r: f"{r.requests:,}"),
    ("workers killed in the middle of a call", lambda r: f"{r.killed_in_call:,}"),
    ("all faults", lambda r: f"{sum(r.faults.values()):,}"),
    ("**lost**: never answered", lambda r: f"{r.wrongs['lost']:,}"),
    ("**crossed**: another's answer", lambda r: f"{r.wrongs['crossed']:,}"),
    ("**duplicated**", lambda r: f"{r.wrongs['duplicated']:,}"),
    ("**late**: over a second after the deadline", lambda r: f"{r.wrongs['late']:,}"),
    ("**ghosts**: run again for no reason", lambda r: f"{r.wrongs['ghost']:,}"),
    ("ordinary requests answered 200", lambda r: f"{r.good:.3%}"),
    ("the others", lambda r: ", ".join(f"{n:,} × {status}" for status, n in r.not_good.items()) or "none"),
    ("p50, p99 of the good ones", lambda r: f"{r.p50_s * 1000:.0f} ms, {r.p99_s * 1000:.0f} ms"),
    ("run once more after a crash", lambda r: f"{r.run_twice:,}"),
    (
        "longest from a kill to the answer of a request in that call",
        lambda r: "-" if r.worst_after_kill_s is None else f"{r.worst_after_kill_s:.2f} s",
    ),
    ("leaked", lambda r: "; ".join(r.leaks) or "nothing"),
    ("a healthy answer at the end", lambda r: "yes" if r.healthy else "no"),
    ("exit code after SIGTERM", lambda r: str(r.exit_code)),
)


def table(rows: list[Row]) -> str:
    """The soaks side by side, in Markdown."""
    lines = [["", *[row.name for row in rows]], ["---"] * (len(rows) + 1)]
    lines += [[what, *[say(row) for row in rows]] for what, say in _LINES]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(row: Row, outcome: Outcome) -> str:
    """One soak for a terminal."""
    width = max(len(what) for what, _ in _LINES)
    lines = [f"{what.replace('**', ''):{width}}  {say(row)}" for what, say in _LINES]
    lines.append(f"{'faults':{width}}  " + ", ".join(f"{n} {what}" for what, n in row.faults.items()))
    for kind, statuses in sorted(outcome.findings.ended.items()):
        lines.append(f"{kind:{width}}  " + ", ".join(f"{n:,} × {status}" for status, n in statuses.most_common()))
    lines += outcome.findings.wrongs.examples
    return "\n".join(lines)


# -- into the docs

ORDER = ("carpool", "mosec", "litserve")
_FIGURES = Path(__file__).with_name("figures.json")
_PAGE = DOCS / "testing.md"
_BEGIN, _END = "<!-- soak: written by make chaos DOCS=1 -->\n", "<!-- end of soak -->"


def write_docs(row: Row) -> None:
    """Put a soak into the table of docs/testing.md, beside the last ones of the other servers."""
    kept = (
        {name: Row(**figures) for name, figures in json.loads(_FIGURES.read_text()).items()}
        if _FIGURES.exists()
        else {}
    )
    kept[row.name] = row
    _FIGURES.write_text(json.dumps({name: asdict(kept[name]) for name in ORDER if name in kept}, indent=1) + "\n")
    rows = [kept[name] for name in ORDER if name in kept]
    page = _PAGE.read_text()
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    settings = "\n".join(f"* {row.name} {row.version}: {row.settings}." for row in rows)
    _PAGE.write_text(f"{before}{_BEGIN}\n{table(rows)}\n\n{settings}\n\n{_END}{after}")
