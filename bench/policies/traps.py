"""The traps that Adaptive was seen in: states that outlasted their cause, each as a small scenario.

They were found with `python -m bench policies.recover`, and shrunk to round figures where that was
possible. Each is a service, what happens to it, and the goodput from 5 s after the end of that on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.policies.disturbed import Scenario, World
from carpool.engine.policy import Greedy, Policy
from carpool.simulate.costs import Affine, Knee

Maker = Callable[[Scenario], Policy]
"""Returns a new policy for a scenario."""

_COMPILED = Affine(8e-3, 0.25e-3)
_OVERLAPPING = Scenario(
    Affine(7e-3, 0.08e-3),
    128,
    workers=2,
    hop_s=0.5e-3,
    hop_item_s=0.1e-3,
    runs_ahead=True,
    rho=1.2,
    slo_s=0.15,
)


@dataclass(frozen=True, slots=True)
class Trap:
    """One trap.

    Attributes:
        name: Short and unique.
        text: What happens in it, and what goes wrong.
        scenario: The service.
        kind: What disturbs it; None for nothing.
        dice: How many seeds are tried; the worst counts.
        least: The least goodput that is right, as a share of that which it is set beside.
        beside_greedy: Whether that is Greedy's under the same disturbance, not that of a calm run.
        span: When the disturbance begins and ends; None for the usual time of its kind.
        after_s: From how long after its end on to look; None for the usual time.
        window_s: For how long; None for the usual time.
    """

    name: str
    text: str
    scenario: Scenario
    kind: str | None
    dice: int = 2
    least: float = 0.95
    beside_greedy: bool = False
    span: tuple[float, float] | None = None
    after_s: float | None = None
    window_s: float | None = None

    def figure(self, make: Maker) -> float:
        """Return the goodput as a share of that which it is set beside; the least of all dice."""
        usual: Maker = (lambda scenario: Greedy(scenario.limit)) if self.beside_greedy else make
        kind = self.kind if self.beside_greedy else None
        return min(self._good(make, self.kind, i) / self._good(usual, kind, i) for i in range(self.dice))

    def _good(self, make: Maker, kind: str | None, dice: int) -> float:
        """Return the goodput of one run, in the window of the trap's own kind."""
        scenario, window_s = self.scenario, self.window_s or self.scenario.window_s
        begin = scenario.settled_at(self.kind)
        if self.after_s is not None:
            begin = (self.span or scenario.span(self.kind))[1] + self.after_s
        world = World(scenario, make(scenario), kind, f"{self.name}/{dice}", self.span)
        return world.play(begin + window_s).figures(begin, window_s).good


TRAPS = (
    Trap(
        "compile, 2 workers",
        "The first call of each size on each worker takes 20 times as long for 2 s. Sizes that were slow on both"
        " workers are believed to be slow for good, and batches are small.",
        Scenario(_COMPILED, 8, workers=2, clients=8),
        "compile",
    ),
    Trap(
        "compile, 4 workers, 16 clients",
        "The same with four workers, few clients that think, and a limit that they do not reach.",
        Scenario(_COMPILED, 64, workers=4, clients=16, think_s=1e-3),
        "compile",
    ),
    Trap(
        "compile, 4 workers, 64 clients",
        "The same with four times as many clients.",
        Scenario(_COMPILED, 64, workers=4, clients=64, think_s=1e-3),
        "compile",
    ),
    Trap(
        "slow start",
        "All batches of the first second take 20 times as long. The first one, of a single request, is never"
        " measured again; so small batches seem to be as dear as large ones, and batches are far beyond the knee.",
        Scenario(Knee(2.5e-3, 0.35e-3, 16, 3e-3), 64, clients=256),
        "warm-up",
    ),
    Trap(
        "fast for a while",
        "All batches take a tenth for 3 s. The sizes that were not run meanwhile are off by as much afterwards, and"
        " are not measured again.",
        Scenario(Affine(8e-3, 0.05e-3), 64, clients=128, think_s=10e-3),
        "fast",
    ),
    Trap(
        "overload of its own, frozen",
        "The front stands still for 300 ms, three times. A backlog counts as an overload, in which no batch goes"
        " ahead; as the way is a third of a batch, what was served well before is an overload from then on.",
        _OVERLAPPING,
        "freeze",
    ),
    Trap("overload of its own, noise", "The same, after 3 s in which batches scatter.", _OVERLAPPING, "noise", 3),
    Trap("overload of its own, errors", "The same, after 3 s in which all batches fail.", _OVERLAPPING, "errors"),
    Trap(
        "way that seems to grow, open traffic",
        "Nothing happens. Most of the way is taken to grow with the batch, so batches are small, and while all are"
        " of one size nothing shows that it does not grow as much.",
        Scenario(
            Affine(4.454332374915466e-4, 1.3223799238030288e-4),
            64,
            sigma=0.02,
            hop_s=0.6338e-3,
            hop_item_s=0.1e-3,
            runs_ahead=True,
            rho=0.95,
            slo_s=49.69e-3,
        ),
        None,
        6,
        beside_greedy=True,
    ),
    Trap(
        "larger than what waits",
        "First calls of each size are slow. Batches of 16 are believed to be, and none goes, as 24 clients come in"
        " two groups of 12.",
        Scenario(
            Knee(3.0657e-3, 0.1437e-3, 4, 0.2874e-3),
            16,
            hop_s=0.23e-3,
            hop_item_s=0.02e-3,
            clients=24,
            think_s=0.0,
            timeout_s=0.5,
        ),
        "warm-up",
    ),
    Trap(
        "way that is hidden",
        "Nothing happens. The way counts as time of the workers, though batches go ahead; so the capacity is believed"
        " to be too small, and what could be served in time is refused.",
        Scenario(
            Knee(5.006e-3, 2.173e-6, 32, 4.346e-6),
            128,
            sigma=0.1,
            workers=3,
            hop_s=0.23e-3,
            hop_item_s=0.1e-3,
            runs_ahead=True,
            clients=1536,
            think_s=5.56e-3,
            slo_s=87.25e-3,
        ),
        None,
        beside_greedy=True,
    ),
    Trap(
        "large ones slow for seconds",
        "Batches above 2 take five times as long for 3 s. Those of 8 are believed to be slow after that, and smaller"
        " ones serve a tenth less.",
        Scenario(Affine(10e-3, 5e-3), 8, sigma=0.02, clients=16, think_s=15e-3),
        "large slow",
    ),
    Trap(
        "only one size",
        "The first batch of each size takes twenty times as long for 2 s. All that wait since then go in batches of"
        " 64, beyond a knee, of which nothing shows that it is one.",
        Scenario(
            Knee(1e-3, 0.15e-3, 32, 1.2e-3), 64, sigma=0.02, hop_s=0.2e-3, hop_item_s=0.1e-3, runs_ahead=True, rho=0.4
        ),
        "compile",
        least=0.98,
    ),
    Trap(
        "a knee amid noise",
        "All batches take ten times as long for 3 s, at half of the load that can be served. The backlog goes in"
        " batches beyond the knee, and amid noise smaller ones are taken for as dear as a line says.",
        Scenario(Knee(0.95e-3, 0.28e-3, 16, 2.24e-3), 32, sigma=0.3, workers=3, rho=0.5, slo_s=0.132),
        "slow",
    ),
    Trap(
        "small ones slow for seconds",
        "Batches up to 50 take as long as five of 100 for 3 s. Three workers in a closed loop that is too much for them"
        " stay with batches beyond the knee.",
        Scenario(
            Knee(1.23e-3, 0.117e-3, 50, 0.93e-3),
            100,
            sigma=0.02,
            workers=3,
            clients=600,
            think_s=7.36e-3,
            slo_s=76e-3,
        ),
        "small slow",
        least=0.9,
    ),
    Trap(
        "way that was noisy",
        "A trivial model, of which the way scatters for the first half second. All of the way is taken to grow with"
        " the batch, and batches of one request are never refuted.",
        Scenario(
            Affine(8e-6, 0.15e-6),
            64,
            sigma=0.3,
            hop_s=0.1e-3,
            hop_item_s=0.02e-3,
            runs_ahead=True,
            clients=64,
            think_s=0.6e-3,
            is_fast=True,
        ),
        "hop stalls",
        18,  # one in eight was at 0.4
        least=0.5,
        beside_greedy=True,
        span=(0.0, 0.5),
        after_s=0.2,
        window_s=0.3,
    ),
)


def show(make: Maker) -> int:
    """Print the figure of each trap under a policy, and return how many are below what is right."""
    width, failed = max(len(trap.name) for trap in TRAPS), 0
    for trap in TRAPS:
        figure = trap.figure(make)
        failed += figure < trap.least
        beside = "Greedy" if trap.beside_greedy else "the calm run"
        what = "passed" if figure >= trap.least else "FAILED"
        print(f"{trap.name:<{width}}  {what}  {figure:.2f} of {beside}, right is {trap.least:.2f}", flush=True)
    print(f"{failed} of {len(TRAPS)} traps are not left")
    return failed
