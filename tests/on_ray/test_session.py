"""What a session knows of the cluster's room, with numbers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")
from carpool.ray.session import has_free


@pytest.mark.parametrize(
    ("needs", "has_room"),
    [
        ({"num_cpus": 1}, True),
        ({"num_cpus": 4}, True),
        ({"num_cpus": 5}, False),
        ({"num_cpus": 0}, True),
        ({"num_gpus": 0.5}, True),
        ({"num_gpus": 2}, False),
        ({"num_cpus": 1, "resources": {"spare": 1}}, False),
        ({"memory": 10}, True),
        ({"memory": 1000}, False),
        ({"num_cpus": 1, "scheduling_strategy": "SPREAD"}, True),
    ],
)
def test_room(needs: dict[str, Any], has_room: bool) -> None:
    """A cluster has room for a worker if all that it needs is free, on whatever nodes."""
    assert has_free(needs, {"CPU": 4.0, "GPU": 1.0, "memory": 100.0, "node:127.0.0.1": 1.0}) is has_room
