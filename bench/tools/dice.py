"""Numbers for scenarios that are drawn at random."""

from __future__ import annotations

from math import exp, log
from random import Random


def log_uniform(dice: Random, low: float, high: float) -> float:
    """Draw a number whose logarithm is spread evenly."""
    return exp(dice.uniform(log(low), log(high)))


def four_digits(number: float) -> float:
    """Four digits, so that a scenario can be read and typed."""
    return float(f"{number:.4g}")
