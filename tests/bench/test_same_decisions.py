"""The bench that sets two trees beside each other, decision by decision."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import ROOT
from bench.policies.same_decisions import Case, Tree, all_cases, common, compare, copied, unpacked
from carpool.engine.policy import BY_NAME, STEPS_BY_NAME

HERE = Tree("here", ROOT / "src")


def cases(pattern: str, *policies: str) -> list[Case]:
    """A hundredth of the cases whose names match."""
    return [case.shortened(0.01) for case in all_cases(pattern, policies)]


def changed(folder: Path, line: str) -> Tree:
    """A copy of our sources, with one more line where policies get their names."""
    sources = copied(ROOT / "src", folder / "src")
    maker = sources / "carpool" / "engine" / "policy" / "maker.py"
    maker.write_text(f"{maker.read_text()}\n{line}\n")
    return Tree("there", sources)


def test_equal_trees_decide_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two copies of one tree make the same decisions, and each case has some."""
    some = cases("^P fixed r0.10, greedy|scene keys, aimd|^noisy steps tiny 60, paced", "greedy", "aimd", "paced")

    assert compare(some, HERE, changed(tmp_path, ""), jobs=2) == 0

    assert len(some) == 3
    assert all(ours["count"] > 0 for ours in HERE.ask(some))
    assert "3 cases" in capsys.readouterr().out


def test_a_changed_policy_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that decides otherwise is named with the first decision that differs, whether it
    forms batches or running sets; the others do not differ.
    """
    lines = ('BY_NAME["aimd"] = BY_NAME["greedy"]', 'STEPS_BY_NAME["paced"] = STEPS_BY_NAME["greedy"]')
    some = cases("^P fixed r0.30, |^steps chat 10, ", "aimd", "greedy", "paced")

    assert compare(some, HERE, changed(tmp_path, "\n".join(lines)), jobs=2) == 2

    printed = capsys.readouterr().out
    differ = [line for line in printed.splitlines() if line.endswith(": differs")]
    assert differ == ["P fixed r0.30, aimd: differs", "steps chat 10, paced: differs"]
    for tree in ("here", "there"):
        assert printed.count(f" of the {tree}: 0.") == 2


def test_a_policy_of_one_tree_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that only one of the trees has cannot differ."""
    some = cases("^P fixed r0.10, ", "cork", "greedy")

    found = common(some, HERE, changed(tmp_path, 'del BY_NAME["cork"]'))

    assert [case.policy for case in found] == ["greedy"]
    assert "cork (run) is in one of the trees only" in capsys.readouterr().err


def test_all_policies_meet_all_workloads() -> None:
    """Each policy with a name takes part in each of the 119 workloads and in each scene; each policy
    of steps in each load of steps.
    """
    found = all_cases("", list(dict.fromkeys([*BY_NAME, *STEPS_BY_NAME])))

    assert len({case.name for case in found}) == len(found)
    for how, policies in (("run", BY_NAME), ("run_steps", STEPS_BY_NAME)):
        by_name = {name: {case.name for case in found if case.how == how and case.policy == name} for name in policies}
        assert len({len(names) for names in by_name.values()}) == 1
        assert all(by_name.values())
    assert sum(case.policy == "cork" and not case.name.startswith("scene") for case in found) == 119


def test_a_revision_is_unpacked_as_it_is_in_git(tmp_path: Path) -> None:
    """The sources of a revision lie in a folder of their own; a revision that does not exist is an
    error that names it.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git repository")
    assert (unpacked("HEAD", tmp_path) / "carpool" / "__init__.py").exists()
    with pytest.raises(SystemExit, match="no revision 'nonsense'"):
        unpacked("nonsense", tmp_path)
