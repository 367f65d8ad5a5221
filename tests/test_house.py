"""The program that measures the house counts what it says."""

from __future__ import annotations

import pytest

from tests import house


def test_lines_of_code_have_no_comments_and_no_docstrings() -> None:
    """A statement over several lines counts with each of them."""
    docs, head = '"""Words."""', "def f(\n    x: int,\n) -> str:"
    text = f"{docs}\n\nimport os  # so\n\n# more\n\n\n{head}\n    {docs}\n    return (\n        str(x)\n    )\n"
    assert house.lines_of_code(text) == 7


def test_a_figure_over_its_budget_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status says so, and the line of the figure."""
    monkeypatch.setattr("sys.argv", ["house"])
    monkeypatch.setattr(house, "figures", lambda: dict(house.BUDGET))
    assert house.main() == 0
    monkeypatch.setattr(house, "figures", lambda: {**house.BUDGET, "files": house.BUDGET["files"] + 1})
    assert house.main() == 1
    assert "files" in capsys.readouterr().out.partition("EXCEEDED")[0].rpartition("\n")[2]


def test_a_base_with_two_subclasses_is_none_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceptions and protocols do not count."""
    found = [
        ("A", []), ("B", ["A"]), ("C", []), ("D", ["C"]), ("E", ["C"]), ("Odd", ["ValueError"]), ("Odder", ["Odd"]),
        ("Shape", ["Protocol"]), ("Round", ["Shape"]),
    ]  # fmt: skip
    monkeypatch.setattr(house, "classes", lambda: iter(found))
    assert house.single_bases() == {"A": "B"}
