"""The program that looks for states which a policy does not leave: it finds one, and no more."""

from __future__ import annotations

from math import inf

import pytest

from bench.policies import recover
from bench.policies.disturbed import KINDS, Figures, Scenario, World
from bench.policies.recover import Pair, draw, verdict
from bench.policies.traps import TRAPS
from carpool.engine.policy import Decision, DoneBatch, Greedy, View
from carpool.simulate.costs import Affine

CHEAP = ["--seed", "smoke", "--case", "23"]  # 32 clients of a model of 20 ms, for which full batches pay


class OnceBurned(Greedy):
    """Makes batches of one for good after a batch has taken eight times as long as another."""

    shortest_s = inf
    is_burned = False

    def learn(self, now: float, done: DoneBatch) -> None:
        self.shortest_s = min(self.shortest_s, done.busy_s)
        self.is_burned |= done.busy_s > 8 * self.shortest_s

    def decide(self, view: View) -> Decision:
        if not self.is_burned:
            return super().decide(view)
        return Decision(take=1, reason="burned") if view.free and len(view.queue) else Decision()


def found(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    """The exit status of a run of the program, and its lines."""
    status = recover.main([*CHEAP, "--repeat", "1", *words])
    return status, capsys.readouterr().out.splitlines()


def test_a_policy_that_does_not_recover_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that stays at batches of one once batches were slow is a finding, which is printed
    with the command that repeats it, and counted by kind in the last line; the exit status is 1.
    """
    policy = f"{__name__}:{OnceBurned.__name__}"

    status, lines = found(capsys, "--only", "slow,nothing", "--policy", policy)

    assert status == 1
    assert lines[0].startswith("FINDING, slow: Affine(")
    assert lines[2] == f"  python -m bench.policies.recover --seed smoke --case 23 --only slow --policy {policy}"
    assert lines[-1] == "1 findings in 2 pairs (nothing 0 of 1, slow 1 of 1)"


def test_a_policy_that_learns_nothing_recovers(capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy has no state that it could not leave, so there is no finding, and the exit status is
    0.
    """
    assert found(capsys, "--only", "slow,freeze", "--policy", "greedy") == (
        0,
        ["0 findings in 2 pairs (freeze 0 of 1, slow 0 of 1)"],
    )


def test_what_cannot_be_run_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A policy or a kind that does not exist is refused before anything is run, with its name."""
    for words, complaint in (
        (("--policy", "greedier"), "greedier"),
        (("--policy", "carpool.policy:Greedier"), "Greedier"),
        (("--only", "sloow"), "unknown: sloow; choose from nothing, start"),
    ):
        with pytest.raises(SystemExit):
            found(capsys, *words)
        assert complaint in capsys.readouterr().err


def test_help_has_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """The help says what each kind of disturbance does."""
    with pytest.raises(SystemExit):
        recover.main(["--help"])

    told = capsys.readouterr().out
    assert all(f"  {kind:<14}{what}" in told for kind, what in KINDS.items())


def test_cases_follow_from_their_seed_alone() -> None:
    """The same text draws the same cases and another one others."""
    drawn = [draw(f"abc/{case}") for case in range(30)]

    assert [draw(f"abc/{case}") for case in range(30)] == drawn
    assert [draw(f"abd/{case}") for case in range(30)] != drawn


@pytest.mark.parametrize("kind", KINDS)
def test_each_disturbance_ends(kind: str) -> None:
    """Each kind changes what is answered while it lasts, and nothing any more once all should be as
    before: the same traffic is then answered as fast. The two controls change next to nothing.
    """
    scenario = Scenario(Affine(40e-3, 1e-3), 8, workers=2, hop_s=1e-3, rho=0.4)
    (begin, end), settled_at = scenario.span(kind), scenario.settled_at(kind)
    calm, other = (World(scenario, Greedy(8), which, kind).play(settled_at + 2.0) for which in (None, kind))

    meanwhile = [world.figures(begin, max(0.5, end - begin)) for world in (calm, other)]
    later = [world.figures(settled_at, 2.0) for world in (calm, other)]

    assert (meanwhile[0] == meanwhile[1]) == (kind in ("nothing", "start"))
    assert tuple(later[1]) == pytest.approx(tuple(later[0]), rel=0.2)


def test_a_verdict_needs_more_than_one_bad_run() -> None:
    """A finding is what most dice show, or what two show by far; one bad run of five is none, and
    neither is what calm runs do by themselves.
    """
    calm = Figures(100.0, 100.0, 0.01, 8.0)
    fine, low, late = Pair(calm, calm), Pair(calm, calm._replace(good=60.0)), Pair(calm, calm._replace(mean_s=0.03))

    assert verdict([low, fine, fine, fine, fine]) == ""
    assert verdict([low, late, fine, fine, fine]) == "BY CHANCE, 2 of 5"
    assert verdict([low, low, low, low, fine]) == "FINDING"
    assert verdict([late] * 5) == "FINDING"
    assert verdict([low, low, Pair(low.other, low.other), fine, fine]) == ""


def test_traps_are_named_and_end() -> None:
    """Each trap has a name of its own and says what happens; its disturbance is one of the kinds."""
    assert len({trap.name for trap in TRAPS}) == len(TRAPS)
    for trap in TRAPS:
        assert trap.text.endswith(".")
        assert trap.kind is None or trap.kind in KINDS


def test_a_trap_returns_what_is_left_of_the_goodput() -> None:
    """The figure of a trap is the goodput after it over that of a calm run: about 1 for Greedy."""
    assert TRAPS[0].figure(lambda scenario: Greedy(scenario.limit)) == pytest.approx(1.0, abs=0.05)
