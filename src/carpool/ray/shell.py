"""The program of the actor of a worker: it connects to its service, and is the worker then.

Ray places the actor, gives it its process and its environment, and ends it with its coordinator.
Its constructor loads nothing. It has one call, `live`, which runs on the main thread, as models
expect (signals, torch), and returns when the worker has ended.
"""

from __future__ import annotations

import os
import pickle
import socket
from typing import NamedTuple

import ray

from carpool.engine.wire.frame import Frame
from carpool.engine.wire.handshake import Hello
from carpool.engine.worker import program, remote
from carpool.engine.worker.address import JoinAddress, Tls
from carpool.engine.worker.place import VISIBLE_DEVICES
from carpool.engine.worker.program import Setup
from carpool.engine.worker.serve import FindModel
from carpool.errors import StartupError
from carpool.version import __version__


class WayHome(NamedTuple):
    """How an actor reaches its service.

    Attributes:
        host: The address of the coordinator's node.
        path: The Unix socket of its gate, for actors on the same node.
        node: The id of the coordinator's node.
        ticket: Which token is the actor's.
    """

    host: str
    port: int
    path: str
    node: str
    service: str
    stage: str
    ticket: str
    token: bytes


class Shell:
    """The actor of one worker.

    Args:
        name: The worker's, which Ray shows before each line that it prints.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def live(self, home: WayHome) -> str:
        """Be the worker until its service ends the connection; return why it ended, for the log.

        Raises:
            StartupError: The service is another version of carpool, or cannot be reached.
        """
        try:
            sock = self._connected(home)
        except remote.Refused as error:
            raise StartupError(str(error)) from None
        except OSError as error:
            raise StartupError(
                f"worker {self._name} cannot reach its service at {home.host}:{home.port} from its node: {error}. Nodes"
                " of the cluster must be able to connect to the coordinator's; ports= of carpool.ray.Cluster chooses"
                " among which ports it takes one"
            ) from error
        remote.live(sock, _read_setup, leaves_on_signals=False)
        return "its connection has ended"

    def _connected(self, home: WayHome) -> socket.socket:
        here = ray.get_runtime_context()
        device = ",".join(map(str, ray.get_gpu_ids())) or os.environ.get(VISIBLE_DEVICES, "")
        me = Hello(
            __version__,
            home.service,
            home.stage,
            home.ticket,
            socket.gethostname(),
            os.getpid(),
            device,
            here.get_node_id(),
            here.get_actor_id() or "",
        )
        if me.node == home.node and os.path.exists(home.path):
            return remote.admitted(remote.Way(JoinAddress(path=home.path), home.token), me)
        address = JoinAddress(host=home.host, port=home.port)
        return remote.admitted(remote.Way(address, home.token, ray_tls(), ray.util.get_node_ip_address()), me)


def ray_tls() -> Tls | None:
    """Return the files with which Ray encrypts on this node; None if it does not."""
    if os.environ.get("RAY_USE_TLS", "0") != "1":
        return None
    certificate, key = os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"]
    return Tls(certificate, key, os.environ["RAY_TLS_CA_CERT"], checks_name=False)  # as Ray itself does


def _read_setup(frame: Frame) -> tuple[Setup, FindModel]:
    """Return the setup that the service sends, and the finder of the model on this node."""
    setup: Setup = pickle.loads(frame.payloads[0])  # type: ignore[arg-type]
    program.extend(setup.program)
    return setup, lambda: program.unpack_model(setup.program, setup.model)
