"""Services on a Ray cluster, as far as Ray is not needed to try it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import carpool
from carpool import Service, Stage
from carpool.ray.suspects import SUSPECT_S, Suspects
from tests.support import models


def test_without_ray_the_next_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ray is not installed, `on="ray"` says how to install it, before anything is started."""
    for name in [name for name in sys.modules if name.startswith("carpool.ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"Ray is missing: pip install 'carpool\[ray\]'"):
        Service(models.double).run(on="ray")
    with pytest.raises(ImportError, match="Ray is missing"):
        _ = carpool.ray.Cluster


def test_another_place_is_refused() -> None:
    """`on` is "ray", or a cluster; anything else is refused where it is said."""
    somewhere: Any = "mars"
    with pytest.raises(ValueError, match=r'on must be "ray" or a carpool\.ray\.Cluster, not .mars.'):
        Service(models.double).run(on=somewhere)


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        ({"num_gpu": 1}, "needs has no 'num_gpu': choose from num_cpus, num_gpus, memory"),
        ({"max_restarts": 1}, "needs has no 'max_restarts'"),
        (["num_gpus"], "needs must be a mapping"),
    ],
)
def test_wrong_needs(needs: Any, text: str) -> None:
    """A need that Ray does not know, or that is not the user's to say, is refused where it is declared."""
    with pytest.raises((ValueError, TypeError), match=text):
        Stage(models.double, needs=needs)


def test_needs_have_no_effect_here() -> None:
    """On one machine a stage with needs runs as it would without them."""
    with Service(Stage(models.double, needs={"num_gpus": 8})).run() as handle:
        assert handle.predict(3) == 6


def test_a_suspect_is_avoided_for_a_while() -> None:
    """A node that fell silent is avoided for some time, and then no more."""
    suspects = Suspects()
    suspects.add(10.0, "a")
    suspects.add(20.0, "b")
    alive = ["a", "b", "c"]
    assert suspects.avoided(30.0, alive) == ["a", "b"]
    assert suspects.avoided(10.0 + SUSPECT_S, alive) == ["b"]
    assert suspects.avoided(20.0 + SUSPECT_S, alive) == []


@given(st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc"), min_size=1))
def test_a_node_is_always_left(silent: set[str], alive: set[str]) -> None:
    """Where all nodes that are left fell silent none is avoided, so that a worker can be placed at all."""
    suspects = Suspects()
    for node in silent:
        suspects.add(0.0, node)
    avoided = suspects.avoided(1.0, alive)
    assert avoided == (sorted(silent) if alive - silent else [])


def test_nodes_that_are_well() -> None:
    """A node is well while it has workers, and for a while after they have ended in another way than by
    silence; a suspect is not, nor is a node of which nothing is known or that Ray holds for dead.
    """
    suspects = Suspects()
    alive = ["a", "b", "c", "d"]
    for node in ("a", "b", "c", "gone"):
        suspects.connected(node)
    assert suspects.well(0.0, alive) == ["a", "b", "c"]
    suspects.disconnected(1.0, "b")
    suspects.add(1.0, "c")
    suspects.disconnected(1.0, "c")
    assert suspects.well(2.0, alive) == ["a", "b"]
    assert suspects.well(1.0 + SUSPECT_S, alive) == ["a"]
