"""One cluster of three local nodes for the whole run, with folders of its own.

These tests need Ray (`make test-ray`), and are skipped where it is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.on_ray.local import local_cluster


def pytest_itemcollected(item: pytest.Item) -> None:
    """All tests of this folder are `ray`, and so none of those that `make test` runs."""
    item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head and two nodes on one machine, to which this process is connected."""
    pytest.importorskip("ray")
    with local_cluster({f"127.0.0.{number}": {"num_cpus": 4} for number in (3, 4)}, num_cpus=4) as local:
        yield local
