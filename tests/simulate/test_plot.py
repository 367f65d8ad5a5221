"""Pictures: what kinds are written, and that every report is in them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


def draw(*args: Any, **more: Any) -> None:
    """Import matplotlib only where a picture is drawn: each process that collects the tests would wait a second."""
    from carpool.simulate import plot

    plot.draw(*args, **more)


@dataclass
class Figures:
    """A report as far as pictures look at it."""

    policy: str
    load: float | None
    goodput: float = 100.0
    mean_s: float = 0.01
    p99_s: float = 0.02
    batch_sizes: dict[int, int] = field(default_factory=lambda: {4: 3, 8: 1})
    length_p99_s: dict[int, float] = field(default_factory=dict)


REPORTS = [Figures(policy, load) for policy in ("adaptive", "static:10ms", "<mine>") for load in (0.5, 0.9, 1.2)]


def test_a_png_is_a_png(tmp_path: Path) -> None:
    """A PNG has the first bytes of one."""
    draw(tmp_path / "a.png", REPORTS, slo_s=0.06)

    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("reports", [REPORTS, REPORTS[1::3]], ids=["many loads", "one load"])
def test_an_svg_is_valid_and_the_same_each_time(tmp_path: Path, reports: list[Figures]) -> None:
    """An SVG is valid, is the same each time, so that a picture in the repository changes only with
    its figures, and has its words as text.
    """
    draw(tmp_path / "a.svg", reports, slo_s=0.06, title="a & b")
    draw(tmp_path / "b.svg", reports, slo_s=0.06, title="a & b")

    written = (tmp_path / "a.svg").read_text()
    words = "".join(ET.fromstring(written).itertext())
    assert written == (tmp_path / "b.svg").read_text()
    assert all(word in words for word in ("a & b", "adaptive", "static:10ms", "<mine>", "SLO"))


def test_a_closed_loop_has_no_load(tmp_path: Path) -> None:
    """A run of a closed loop, which has no load, is drawn as what it is."""
    draw(tmp_path / "a.svg", [Figures("greedy", None), Figures("cork", None)])

    words = "".join(ET.fromstring((tmp_path / "a.svg").read_text()).itertext())
    assert "closed loop" in words and "of capacity" not in words


def test_requests_with_lengths_have_a_panel_of_their_own(tmp_path: Path) -> None:
    """Where requests have lengths, a panel shows p99 by length at the highest load up to 1, and
    where they have none there is no such panel.
    """
    by_length = {8: 0.01, 64: 0.04}
    draw(tmp_path / "a.svg", [Figures("adaptive", load, length_p99_s=by_length) for load in (0.5, 0.9, 1.2)])
    draw(tmp_path / "b.svg", REPORTS)

    with_lengths, without = ("".join(ET.parse(tmp_path / name).getroot().itertext()) for name in ("a.svg", "b.svg"))
    assert "p99 by length at 0.9 of capacity" in with_lengths
    assert "by length" not in without


def test_a_page_stands_alone_and_has_the_figures(tmp_path: Path) -> None:
    """A page has the picture inside, fetches nothing, escapes names, and takes seeds of one policy
    and load together.
    """
    other_seeds = [Figures("adaptive", 0.5, goodput=200.0), Figures("adaptive", 0.5, goodput=600.0)]
    draw(tmp_path / "a.html", [*REPORTS, *other_seeds], title="Load & goodput")

    page = (tmp_path / "a.html").read_text()
    assert "<title>Load &amp; goodput</title>" in page and "<svg" in page
    assert "<td>adaptive</td><td>0.5</td><td>300.0</td><td>10.00</td><td>20.00</td>" in page
    assert page.count("<td>&lt;mine&gt;</td>") == 3
    assert "src=" not in page and "<link" not in page


def test_other_kinds_of_file_are_an_error(tmp_path: Path) -> None:
    """Another kind of picture file is an error that names those that there are."""
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg, \.html"):
        draw(tmp_path / "a.jpg", REPORTS)


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    """If there is nothing to draw that is an error, and no empty file is left."""
    with pytest.raises(ValueError, match="no reports"):
        draw(tmp_path / "a.svg", [])
    assert not (tmp_path / "a.svg").exists()


def test_no_two_policies_look_alike() -> None:
    """No two policies are drawn alike, also several of one kind and those of users."""
    from carpool.simulate.plot import STYLES, style

    policies = [*STYLES, "static:5ms", "static:20ms", "mine", "yours"]

    styles = [style(policy, policies) for policy in policies]

    assert len({colour for colour, _ in styles}) == len({mark for _, mark in styles}) == len(policies)
    assert styles[: len(STYLES)] == list(STYLES.values())
