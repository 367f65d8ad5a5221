"""A cluster of several nodes on this machine, with folders of its own."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.sources import ROOT

HEAD = "127.0.0.2"
"""The address of the head. Ray takes 127.0.0.1 for whatever other address the machine has."""

_STORE = {"object_store_memory": 80 * 2**20}


@contextlib.contextmanager
def local_cluster(nodes: Mapping[str, Mapping[str, Any]], **head: Any) -> Iterator[Any]:
    """A head and further nodes, to which this process is connected.

    Args:
        nodes: By address, what further nodes have.
        head: What the head has.
    """
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        # Ray writes a token and the address of the "current" cluster there, which others would follow.
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("HOME", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        first = {"node_ip_address": HEAD, "include_dashboard": False, **_STORE, **head}
        local = Cluster(initialize_head=True, head_node_args=first)
        try:
            for address, has in nodes.items():
                local.add_node(node_ip_address=address, **_STORE, **has)
            local.wait_for_nodes()
            patch.setenv("RAY_ADDRESS", local.address)
            ray.init(address=local.address, logging_level="ERROR", log_to_driver=False, _node_ip_address=HEAD)
            try:
                yield local
            finally:
                ray.shutdown()
        finally:
            local.shutdown()
