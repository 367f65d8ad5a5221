"""A Ray cluster on this machine, the nodes of which the nemesis kills and silences.

It wants a network namespace of its own (`unshare --net --pid --fork --mount-proc --kill-child`, as
`make chaos TARGET=ray` has it): there, rules drop all packets from and to a node, which is what a
machine without power looks like.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import PYTHONPATH

HEAD = "127.0.0.2"
NODES = 3
CPUS = 4.0  # of a node: two nodes have room for all workers
DARK_S = 12.0  # more than carpool waits for a silent machine
BURIED_S = 25.0  # by then Ray has found that a killed node is dead
_STORE = {"object_store_memory": 80 * 2**20}


class Nodes:
    """The nodes besides the head.

    Args:
        cluster: Of Ray's `cluster_utils`, with its head.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._numbers = itertools.count(3)
        self._nodes: dict[str, Any] = {}  # by address, those at which no fault is being made
        self._rules = itertools.count(1)
        self._lock = threading.Lock()
        self._dead = 0
        self._buried: list[tuple[float, Any]] = []  # killed nodes, and when what is left of them is ended
        for _ in range(NODES):
            self._add()
        cluster.wait_for_nodes()

    def kill(self, dice: random.Random, begins: Callable[[], None]) -> None:
        """Kill the raylet of a node; `mend` adds another node in its place.

        Args:
            dice: Chooses the node.
            begins: Called just before, unless there is only one node left that is well.

        Raises:
            LookupError: There is only one.
        """
        address, node = self._taken(dice)
        begins()
        os.kill(raylet_at(address), signal.SIGKILL)
        with self._lock:
            self._dead += 1
            self._buried.append((time.monotonic() + BURIED_S, node))

    def mend(self) -> None:
        """Add nodes in place of killed ones, and end what is left of those; in the main thread."""
        while self._dead:
            self._add()
            self._dead -= 1
        while self._buried and self._buried[0][0] < time.monotonic():
            with contextlib.suppress(Exception):  # it has ended by itself
                self._cluster.remove_node(self._buried.pop(0)[1])

    def silence(self, dice: random.Random, begins: Callable[[], None]) -> None:
        """Drop all packets from and to a node for a while; see `kill`."""
        address, node = self._taken(dice)
        begins()
        with self._lock:
            numbers = next(self._rules), next(self._rules)
        for number, way in zip(numbers, ("from", "to"), strict=True):
            ip(f"rule add pref {number} {way} {address} blackhole")
        time.sleep(DARK_S)
        for number in numbers:
            ip(f"rule del pref {number}")
        with self._lock:
            self._nodes[address] = node

    def _taken(self, dice: random.Random) -> tuple[str, Any]:
        """Take a node out of those that are well; at least one is left."""
        with self._lock:
            if len(self._nodes) < 2:
                raise LookupError("there is only one node left")
            address = dice.choice(sorted(self._nodes))
            return address, self._nodes.pop(address)

    def _add(self) -> None:
        address = f"127.0.0.{next(self._numbers)}"
        node = self._cluster.add_node(num_cpus=CPUS, node_ip_address=address, **_STORE)
        with self._lock:
            self._nodes[address] = node


@contextlib.contextmanager
def cluster(folder: Path, env: dict[str, str]) -> Iterator[tuple[Nodes, dict[str, str]]]:
    """A cluster with its nodes, and what the environment of a program that uses it has besides.

    Args:
        folder: For Ray's files.
        env: What the environment of the cluster's workers has besides.

    Raises:
        LookupError: This process may not drop packets.
    """
    from ray.cluster_utils import Cluster

    try:
        # The table of local addresses gives way to rules that drop packets.
        for command in ("link set lo up", "rule add pref 30000 lookup local", "rule del pref 0"):
            ip(command)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LookupError(f"packets cannot be dropped here ({error}): make chaos TARGET=ray, as root") from None
    own = {**env, "RAY_TMPDIR": str(folder), "HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.update(own, PYTHONPATH=PYTHONPATH)
    head = {"num_cpus": 0, "node_ip_address": HEAD, "include_dashboard": False, **_STORE}
    local = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield Nodes(local), {**own, "RAY_ADDRESS": local.address}
    finally:
        local.shutdown()


def raylet_at(address: str) -> int:
    """The process of a node's raylet. Raises LookupError."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            arguments = path.read_text().split("\0")
            if arguments[0].endswith("/raylet") and any(each.endswith(f"address={address}") for each in arguments):
                return int(path.parent.name)
    raise LookupError(f"there is no raylet at {address}")


def ip(command: str) -> None:
    """Change the network of this namespace. Raises OSError or CalledProcessError."""
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)
