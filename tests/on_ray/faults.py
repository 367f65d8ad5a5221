"""Every fault of a node, made to happen on a cluster of its own under load: `python -m tests.on_ray.faults`.

It runs in a network and a process namespace of its own (`unshare --net --pid --mount-proc`), so that
a node can fall silent as a machine does that has lost its power, and nothing is left of it. For each
fault it prints a line of JSON: how many requests were answered after it, the errors of the others,
and how long the longest one took.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import carpool
from carpool import Service, Stage
from tests.on_ray.local import HEAD, local_cluster
from tests.on_ray.models import Place
from tests.support.pressing import Callers
from tests.support.processes import alive, children
from tests.support.waiting import wait_until

SILENCE_S = 3.0
HANG_S = SILENCE_S + 1  # so that silence is noticed as such
PATIENCE_S = 90.0  # longer than Ray takes to find that a node is dead
SOON_S = 40.0  # sooner than Ray finds that a node is silent
ADDRESSES = [f"127.0.0.{number}" for number in range(3, 9)]

WELL = set(ADDRESSES)
"""The nodes to which nothing has happened yet."""


def main() -> None:
    # The table of local addresses gives way to rules that drop packets.
    for command in ("link set lo up", "rule add pref 100 lookup local", "rule del pref 0"):
        ip(command)
    needs = {"resources": {"spare": 1}}
    stage = Stage(Place, max_batch_size=4, workers=2, policy="greedy", max_batch_time_s=HANG_S, needs=needs)
    place = carpool.ray.Cluster(silence_s=SILENCE_S)
    one_worker = {"num_cpus": 1, "resources": {"spare": 1}}
    with (
        local_cluster(dict.fromkeys(ADDRESSES, one_worker), num_cpus=1),
        Service(stage, name="place").run(on=place) as handle,
        Callers(handle, lambda answer: (answer["pid"], answer["x"]), n=32) as callers,
    ):
        addresses = addresses_of_nodes()
        told: dict[str, Any] = {"raylet": killed_raylet, "silent": silent_node, "frozen": frozen_node}
        for name, happen in told.items():
            callers.go_on(200)
            victim = handle.predict(0)["node"]
            callers.longest_s, before = 0.0, callers.answers
            WELL.discard(addresses[victim])
            happen(addresses[victim])
            wait_until(lambda victim=victim: is_replaced(handle, victim), PATIENCE_S)
            callers.go_on(200)
            tell(name, callers, before)
        callers.longest_s, before = 0.0, callers.answers
        successors_on_a_silent_node(handle, addresses)
        callers.go_on(200)
        tell("unheard", callers, before)
        callers.longest_s, before = 0.0, callers.answers
        os.kill(pid_of("gcs_server"), signal.SIGKILL)
        threading.Event().wait(5)
        callers.go_on(200)
        tell("head", callers, before)
        os._exit(0)  # what is left ends with the namespace; Ray would wait for its head for a minute


def addresses_of_nodes() -> dict[str, str]:
    """The addresses of the nodes, by their ids."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def is_replaced(handle: Any, node: str) -> bool:
    """Whether all workers are ready, and none of them is on the node."""
    stage = handle.stats().stages[0]
    hellos = handle._inner.driver.stats.stages[0].elsewhere.values()
    return stage.workers.get("ready", 0) == 2 and all(hello.node != node for hello in hellos)


def killed_raylet(address: str) -> None:
    """Kill the program of Ray that stands for a node."""
    os.kill(pid_of("raylet", address), signal.SIGKILL)


def silent_node(address: str, first_rule: int = 1) -> None:
    """Drop all packets from and to a node."""
    ip(f"rule add pref {first_rule} to {address} blackhole")
    ip(f"rule add pref {first_rule + 1} from {address} blackhole")


def successors_on_a_silent_node(handle: Any, addresses: dict[str, str]) -> None:
    """Silence a node that has no worker, and so is no suspect, and kill workers: Ray may place successors there."""
    taken = {hello.node for hello in handle._inner.driver.stats.stages[0].elsewhere.values()}
    unknown = [address for node, address in addresses.items() if node not in taken and address in WELL]
    silent_node(unknown[0], first_rule=3)
    for _ in range(4):
        lost = handle.stats().stages[0].restarts
        pid = handle.predict(0)["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not alive(pid))
        # until its loss is noticed it counts as ready, and who kills the next one then may hit the same requests again
        wait_until(lambda lost=lost: handle.stats().stages[0].restarts > lost, SOON_S)
        wait_until(lambda: handle.stats().stages[0].workers.get("ready", 0) == 2, SOON_S)


def frozen_node(address: str) -> None:
    """Stop all processes of a node, while the machine's kernel goes on acknowledging for them."""
    raylet = pid_of("raylet", address)
    for pid in [*children(raylet), raylet]:
        os.kill(pid, signal.SIGSTOP)


def pid_of(program: str, address: str = HEAD) -> int:
    """The process of one of Ray's programs on a node."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        arguments = path.read_text().split("\0")
        if arguments[0].endswith(f"/{program}") and any(each.endswith(f"address={address}") for each in arguments):
            return int(path.parent.name)
    raise LookupError(f"there is no {program} at {address}")


def tell(fault: str, callers: Callers, before: int) -> None:
    errors = [repr(error) for error in callers.errors[:5]]
    outcome = {"answers": callers.answers - before, "errors": errors, "longest_s": callers.longest_s}
    print(json.dumps({"fault": fault, **outcome}), flush=True)


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


if __name__ == "__main__":
    main()
