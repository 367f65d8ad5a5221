"""The worker that `carpool worker` runs: one of a stage of a service that runs somewhere else."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading

import msgspec

from carpool.engine.wire.frame import Frame
from carpool.engine.wire.handshake import Hello
from carpool.engine.worker import program, remote
from carpool.engine.worker.main import end_soon
from carpool.engine.worker.place import VISIBLE_DEVICES
from carpool.engine.worker.program import DUMP_SIGNAL, Program, Setup
from carpool.engine.worker.serve import FindModel
from carpool.errors import StartupError
from carpool.service.declaration import Declaration, adapters_of
from carpool.service.places import spots_of
from carpool.service.stage import Stage
from carpool.version import __version__


def stage_to_join(service: Declaration, name: str | None) -> Stage:
    """Return the stage of a service that a worker is to join.

    Raises:
        ValueError: There is no such stage, or there are several.
    """
    joining = [stage for stage in service.stages if stage.join]
    if name is None and len(joining) == 1:
        return joining[0]
    for stage in joining:
        if stage.name == name:
            return stage
    names = ", ".join(stage.name for stage in joining)
    if not joining:
        raise ValueError(f"no stage of {service.name} lets workers join: give one of them join=True")
    if name is None:
        raise ValueError(f"several stages of {service.name} let workers join: choose one with --stage ({names})")
    raise ValueError(f"{service.name} lets no worker join a stage {name}: choose one of {names} with --stage")


def work(service: Declaration, stage: Stage, way: remote.Way, wait_s: float) -> None:
    """Join a service as a worker, and return when it has ended or this worker has left.

    Args:
        wait_s: How long to try while nothing listens there.

    Raises:
        OSError: It cannot be reached, or its certificate is not trusted.
        HandshakeError: What listens there is not the service, or does not take the token.
        Refused: The service does not admit this worker.
        StartupError: The model cannot be loaded here.
    """
    device = os.environ.get(VISIBLE_DEVICES, "")
    me = Hello(__version__, service.name, stage.name, host=socket.gethostname(), pid=os.getpid(), device=device)
    sock = remote.admitted(way, me, wait_s)
    own = Program([*sys.path], os.getcwd(), None, None)  # the main program is the command line, not the service's
    program.restore(own)
    adapters = adapters_of(service.routes) if stage is service.graph[0] else []
    spots = spots_of(service.graph, service.gives)[0][[each is stage for each in service.stages].index(True)]

    def read_setup(frame: Frame) -> tuple[Setup, FindModel]:
        """Return the setup that the service sends, and the finder of the model, which is here."""
        sent = msgspec.msgpack.decode(frame.payloads[0], type=Setup)  # type: ignore[arg-type]
        setup = msgspec.structs.replace(sent, program=own)
        return setup, lambda: (stage.model, stage.kwargs, adapters, spots)

    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    failure = remote.live(sock, read_setup, leaves_on_signals=True)
    threading.Thread(target=end_soon, name="carpool-end", daemon=True).start()  # threads of the model may go on
    if failure is not None:
        raise StartupError(f"{failure.message}\n{failure.traceback}".rstrip())
