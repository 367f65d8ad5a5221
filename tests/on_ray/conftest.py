"""One cluster of three local nodes for the whole run, with folders of its own.

These tests need Ray (`make test-ray`), and are skipped where it is not installed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are `ray`, and so none of those that `make test` runs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head and two nodes on one machine, to which this process is connected."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        # Ray writes a token and the address of the "current" cluster there, which others would follow.
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("HOME", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        # Ray takes 127.0.0.1 for whatever other address the machine has, so none of the nodes has that.
        small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        local = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "node_ip_address": "127.0.0.2", **small})
        try:
            for number in (3, 4):
                local.add_node(num_cpus=4, node_ip_address=f"127.0.0.{number}", object_store_memory=80 * 2**20)
            local.wait_for_nodes()
            patch.setenv("RAY_ADDRESS", local.address)
            ray.init(address=local.address, logging_level="ERROR", log_to_driver=False, _node_ip_address="127.0.0.2")
            try:
                yield local
            finally:
                ray.shutdown()
        finally:
            local.shutdown()
