"""The workloads by which rules of composition are compared, and others that are drawn.

Batches of at most 32 cost a fixed time and a time that grows with what is padded. Costs are noisy,
with a coefficient of variation of 0.2, and one batch of 200 stalls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import log, sqrt
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Literal

from bench.tools.dice import log_uniform
from carpool.simulate.costs import Cost, cost_of
from carpool.simulate.features import lengths_of, sample_of

Kind = Literal["closed", "open", "slo"]
KINDS: tuple[Kind, ...] = ("closed", "open", "slo")
LIMIT = 32
NOISE = "+noisy:sigma=0.198,stall_share=0.005,stall_factor=5"
REQUESTS = 6000  # that plain order serves in a run
SETTLING = 0.1  # of a run does not count
CLOSED = ((16, 1), (64, 1), (256, 1), (64, 2), (256, 4))
"""Clients and workers."""
OPEN = ((0.4, 1, 1), (0.7, 1, 1), (0.9, 1, 1), (0.7, 8, 1), (0.7, 1, 2), (0.7, 1, 4))
"""Load as a share of plain order's capacity, mean size of a burst, and workers."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One traffic to serve.

    Attributes:
        name: Short and unique.
        kind: `closed`, `open`, or `slo` where requests have one.
        settings: What `carpool.simulate.run` takes.
    """

    name: str
    kind: Kind
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Source:
    """Lengths that requests have.

    Attributes:
        name: Short.
        spec: As the simulator has it.
        scale: The length of which a request takes 0.6 ms, once a batch is under way.
    """

    name: str
    spec: str
    scale: float


def load(kind: Kind, trace: Path | None, pattern: str = "") -> list[Workload]:
    """The workloads of a kind whose names match; those of the trace only if there is one."""
    wanted = re.compile(pattern)
    return [w for source in _sources(trace) for w in _of(kind, source) if wanted.search(w.name)]


def case() -> Workload:
    """Return one closed loop of 64 clients on one worker, whose costs have no noise."""
    lengths, cost = _lognormal(14, 1, 512), "padded:a=2ms,b=20us"
    duration_s = REQUESTS / _plain_rate(cost, lengths, LIMIT)
    settings: dict[str, Any] = {"cost": cost, "lengths": lengths, "max_batch_size": LIMIT, "workers": 1, "slo_s": None}
    settings |= {"arrivals": _clients(64), "duration_s": duration_s, "settle_s": SETTLING * duration_s}
    return Workload("64 clients, exact costs", "closed", settings)


def draw(count: int, seed_text: str) -> list[Workload]:
    """So many workloads that nobody has tuned for; the same text gives the same."""
    return [_random(f"R{i}", Random(f"{seed_text}/{i}")) for i in range(count)]


def _sources(trace: Path | None) -> list[_Source]:
    made = [_Source(f"cv{cv:g}", _lognormal(14, cv, 512), 30) for cv in (0.5, 1, 2)]
    made.append(_Source("bimodal", "bimodal:short=10,long=200,long_share=0.1", 30))
    if trace is not None:
        spec = f"file:{trace},column=ContextTokens"
        made.append(_Source("azure", spec, 1.5 * fmean(sample_of(lengths_of(spec)))))
    return made


def _lognormal(median: float, cv: float, most: int) -> str:
    return f"lognormal:input={median:g},input_sigma={sqrt(log(1 + cv * cv)):.4f},most_input={most}"


def _cost(source: _Source, kind: str) -> str:
    """Seconds of a batch: most of it padding, a third of that beside a long setup, or attention."""
    each_us = 600 / source.scale
    match kind:
        case "padded":
            return f"padded:a=2ms,b={each_us:.6g}us"
        case "setup":
            return f"padded:a=12ms,b={each_us / 3:.6g}us"
        case _:
            return f"padded:a=2ms,b={each_us / 2:.6g}us,c={each_us / 4 / source.scale:.6g}us"


def _of(kind: Kind, source: _Source) -> Iterator[Workload]:
    for cost in ("padded",) if kind == "slo" else ("padded", "setup", "square"):
        made = {"closed": _closed, "open": _open, "slo": _slo}[kind]
        for name, settings in made(source, _cost(source, cost), is_main=cost == "padded"):
            plain = _plain_rate(_cost(source, cost), source.spec, LIMIT) * settings["workers"]
            common = {"cost": _cost(source, cost) + NOISE, "lengths": source.spec, "max_batch_size": LIMIT}
            times = {"duration_s": REQUESTS / plain, "settle_s": SETTLING * REQUESTS / plain}
            settings = {**times, "slo_s": None, **common, **settings}
            yield Workload(f"{source.name} {cost} {name}", kind, settings)


def _closed(source: _Source, cost: str, *, is_main: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    for clients, workers in CLOSED if is_main else ((64, 1),):
        yield f"N{clients} W{workers}", {"arrivals": _clients(clients), "workers": workers}


def _open(source: _Source, cost: str, *, is_main: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    plain = _plain_rate(cost, source.spec, LIMIT)
    for share, burst, workers in OPEN if is_main else ((0.7, 1, 1),):
        rate = share * plain * workers
        yield f"load {share} burst {burst} W{workers}", {"arrivals": _arrivals(rate, burst), "workers": workers}


def _slo(source: _Source, cost: str, *, is_main: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """SLOs of two and four full batches of plain order, loads up to twice what can be served."""
    plain, composed = _plain_rate(cost, source.spec, LIMIT), _composed_rate(cost, source.spec, LIMIT)
    for batches in (2, 4):
        slo_s = batches * LIMIT / plain
        for share, of, workers in (
            (1.2, plain, 1),
            (0.8, composed, 1),
            (1.2, composed, 1),
            (2, composed, 1),
            (1.2, composed, 2),
        ):
            given = {"arrivals": _arrivals(share * of * workers, 1), "workers": workers, "slo_s": slo_s}
            yield f"SLO {batches} load {share * of / composed:.2f} W{workers}", given
        yield f"SLO {batches} N64", {"arrivals": _clients(64), "workers": 1, "slo_s": slo_s}


def _clients(count: int) -> str:
    """Clients that ask again at once, or 20 ms after a refusal."""
    return f"closed:clients={count},think=0s,think=fixed,backoff=20ms"


def _arrivals(rate: float, burst: float) -> str:
    return f"poisson:rate={rate:.6g}" if burst == 1 else f"bursts:rate={rate:.6g},mean_burst={burst}"


@cache
def _plain_rate(cost: str, lengths: str, limit: int) -> float:
    """Requests per second of full batches in order of arrival."""
    seconds, drawn, dice = cost_of(cost), sample_of(lengths_of(lengths)), Random(5)
    return limit / fmean(seconds(limit, max(dice.choices(drawn, k=limit))) for _ in range(400))


@cache
def _composed_rate(cost: str, lengths: str, limit: int) -> float:
    """Requests per second if four batches' worth are sorted at a time, and cut in the best way."""
    drawn, dice = sample_of(lengths_of(lengths)), Random(5)
    total_s = sum(_least_seconds(cost_of(cost), sorted(dice.choices(drawn, k=4 * limit)), limit) for _ in range(8))
    return 8 * 4 * limit / total_s


def _least_seconds(cost: Cost, lengths: Sequence[int], limit: int) -> float:
    """The least seconds of all batches into which sorted requests can be cut."""
    best = [0.0]
    for end, longest in enumerate(lengths, 1):
        best.append(min(best[begin] + cost(end - begin, longest) for begin in range(max(0, end - limit), end)))
    return best[-1]


def _random(name: str, dice: Random) -> Workload:
    """A workload of which all is drawn."""
    limit, workers = dice.choice([8, 16, 32, 64]), dice.choice([1, 1, 1, 2, 4])
    median = log_uniform(dice, 8, 200)
    lengths = _lognormal(median, log_uniform(dice, 0.3, 2.5), int(median * log_uniform(dice, 8, 64)))
    if dice.random() < 0.3:
        long = median * log_uniform(dice, 4, 30)
        lengths = f"bimodal:short={median:.4g},long={long:.4g},long_share={dice.uniform(0.02, 0.4):.3f}"
    each_us = log_uniform(dice, 100, 3000) / median
    cost = f"padded:a={log_uniform(dice, 0.5, 20):.4g}ms,b={each_us:.4g}us"
    if dice.random() < 0.4:
        cost += f",c={each_us / median * log_uniform(dice, 0.02, 0.5):.4g}us"
    plain, composed = _plain_rate(cost, lengths, limit), _composed_rate(cost, lengths, limit)
    settings: dict[str, Any] = {"lengths": lengths, "max_batch_size": limit, "workers": workers, "slo_s": None}
    duration_s = REQUESTS / plain / workers
    settings |= {"cost": cost + dice.choice(["", NOISE]), "duration_s": duration_s, "settle_s": SETTLING * duration_s}
    kind = dice.choice(KINDS)
    if kind == "closed":
        settings["arrivals"] = _clients(round(limit * workers * log_uniform(dice, 0.5, 8)))
    else:
        rate = plain * dice.uniform(0.3, 0.95) if kind == "open" else composed * dice.uniform(0.6, 2)
        settings["arrivals"] = _arrivals(rate * workers, dice.choice([1, 1, round(dice.uniform(2, 16), 1)]))
    if kind == "slo":
        settings["slo_s"] = log_uniform(dice, 1.5, 8) * limit / plain
    return Workload(f"{name} {kind}", kind, settings)
