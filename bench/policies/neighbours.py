"""Random neighbours of the workloads in which a rival has been ahead of ours, and of busy ones.

Each kind has the trait that made a rival win; all else is drawn. The same text draws the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from random import Random
from typing import Any

from bench.policies.workloads import Workload
from bench.tools.dice import four_digits, log_uniform
from carpool.simulate import capacity
from carpool.simulate.costs import cost_of

BATCHES = 250  # of the largest size that could be served during a run
ANSWERS = 8000  # that a run has about, where calls are short


def draw(count: int, text: str) -> list[Workload]:
    """Draw so many workloads, of each kind in turn."""
    kinds = list(KINDS)
    return [_drawn(kinds[i % len(kinds)], Random(f"{text}/{i}"), f"{text}/{i}") for i in range(count)]


def _drawn(kind: str, dice: Random, name: str) -> Workload:
    settings = {"workers": 1, "slo_s": None, **KINDS[kind](dice)}
    return Workload(f"N {kind} {name}", settings)


def _overload(dice: Random) -> dict[str, Any]:
    """More comes than can be served, and the SLO is some ten batches long."""
    limit = dice.choice((16, 32, 64, 128))
    cost = _curve(dice, limit)
    full_s = cost_of(cost)(limit)
    arrivals = f"poisson:rho={dice.uniform(1.1, 1.5):.3f}"
    if dice.random() < 0.3:
        dwell_ms = full_s * 1e3 * dice.uniform(20, 60)
        arrivals = f"mmpp:rho={dice.uniform(0.9, 1.1):.3f}/1.5,mean_dwell={dwell_ms:.4g}ms/{dwell_ms:.4g}ms"
    return {
        "cost": cost + _noise(dice),
        "max_batch_size": limit,
        "arrivals": arrivals,
        "slo_s": four_digits(dice.uniform(7, 14) * full_s),
        "duration_s": four_digits(2 * BATCHES * full_s),
    }


def _knee(dice: Random) -> dict[str, Any]:
    """The SLO is shorter than the largest batch, and batches of a good size are well within it."""
    limit = dice.choice((32, 64, 128))
    knee = limit // dice.choice((2, 3, 4))
    a = log_uniform(dice, 2, 20)
    b = a / knee * dice.uniform(0.3, 1.5)
    extra = dice.uniform(1.5, 6) * b
    curve = f"knee:a={a:.4g}ms,b={b:.4g}ms,knee={knee},extra={extra:.4g}ms"
    seconds = cost_of(curve)
    good_s, full_s = seconds(knee), seconds(limit)
    return {
        "cost": curve + _noise(dice),
        "max_batch_size": limit,
        "arrivals": f"poisson:rho={dice.uniform(0.6, 1.3):.3f}",
        "slo_s": four_digits(dice.uniform(1.2 * good_s, max(1.4 * good_s, 0.95 * full_s))),
        "duration_s": four_digits(2 * BATCHES * good_s),
    }


def _noise_loop(dice: Random) -> dict[str, Any]:
    """Clients wait for their answers, and calls are noisy."""
    limit = dice.choice((32, 64, 128))
    curve = _curve(dice, limit)
    full_s = cost_of(curve)(limit)
    think_ms = 1e3 * full_s * log_uniform(dice, 0.01, 0.5)
    kind = dice.choice(("uniform", "exponential"))
    arrivals = f"closed:clients={round(limit * dice.uniform(0.4, 1.6))},think={think_ms:.4g}ms,think={kind}"
    return {
        "cost": f"{curve}+noisy:sigma={dice.uniform(0.1, 0.35):.3f}",
        "max_batch_size": limit,
        "arrivals": f"{arrivals},backoff={full_s * 1e3:.4g}ms",
        "slo_s": None if dice.random() < 0.4 else four_digits(dice.uniform(2, 6) * full_s),
        "duration_s": four_digits(BATCHES * full_s),
    }


def _ahead(dice: Random) -> dict[str, Any]:
    """Batches go ahead behind a way that takes time for each item."""
    limit = dice.choice((8, 16, 32, 64, 100))
    a_ms = log_uniform(dice, 0.1, 8)
    curve = f"affine:a={a_ms:.4g}ms,b={a_ms * log_uniform(dice, 0.02, 4):.4g}ms"
    item_s = 1e-3 * log_uniform(dice, 0.1, 6)
    clients = round(limit * log_uniform(dice, 0.5, 4)) + 1
    think = dice.choice(("think=0s", "think=1ms,think=exponential"))
    rate = min(capacity(curve, limit), 1.0 / item_s)
    return {
        "cost": curve,
        "max_batch_size": limit,
        "arrivals": f"closed:clients={clients},{think}",
        "hop_s": four_digits(1e-3 * log_uniform(dice, 0.1, 1.5)),
        "hop_item_s": four_digits(item_s),
        "runs_ahead": True,
        "duration_s": four_digits(min(20.0, max(2.0, ANSWERS / rate))),
    }


def _busy(dice: Random) -> dict[str, Any]:
    """Calls are short, and the coordinator has as much to do as its workers."""
    request_us, batch_us = log_uniform(dice, 6, 24), log_uniform(dice, 30, 120)
    coordinator = f"{request_us:.3g}us,{batch_us:.3g}us,way={log_uniform(dice, 15, 200):.3g}us"
    if dice.random() < 0.4:
        coordinator += ",slice=3ms,pause=2ms,stall_share=0.3%,stall=2ms"
    a_us = log_uniform(dice, 10, 1000)
    limit = dice.choice((16, 32, 64, 128))
    noise = f"noisy:sigma={dice.uniform(0.05, 0.3):.2f}"
    return {
        "cost": f"affine:a={a_us:.4g}us,b={a_us * log_uniform(dice, 0.01, 0.2):.4g}us+{noise}",
        "max_batch_size": limit,
        "arrivals": f"closed:clients={round(log_uniform(dice, 1, 4 * limit))},think={log_uniform(dice, 15, 300):.3g}us",
        "workers": dice.choice((1, 1, 2)),
        "coordinator": coordinator,
        "runs_ahead": True,
        "duration_s": 1.0,
    }


KINDS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "overload": _overload,
    "knee": _knee,
    "noise": _noise_loop,
    "ahead": _ahead,
    "busy": _busy,
}
"""What draws the settings of a workload of each kind."""


def _curve(dice: Random, limit: int) -> str:
    """Draw a cost whose largest batch is the most efficient one."""
    a_ms = log_uniform(dice, 1, 20)
    item_ms = a_ms * log_uniform(dice, 0.01, 1)
    match dice.choice(("affine", "affine", "tile", "sqrt")):
        case "affine":
            return f"affine:a={a_ms:.4g}ms,b={item_ms:.4g}ms"
        case "tile":
            width = ceil(limit / dice.choice((2, 4, 8)))
            return f"tile:a={a_ms:.4g}ms,step={item_ms * width:.4g}ms,width={width}"
        case _:
            return f"sqrt:c={a_ms:.4g}ms"


def _noise(dice: Random) -> str:
    return f"+noisy:sigma={dice.uniform(0.02, 0.15):.3f}" if dice.random() < 0.5 else ""
