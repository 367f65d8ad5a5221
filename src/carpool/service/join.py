"""Where workers that come by themselves join a service, and how they prove that they may."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool.engine.drive.gate import Gate, Invitation
from carpool.engine.drive.worker_pool import WorkerPool
from carpool.engine.logger import logger
from carpool.engine.wire.handshake import Hello
from carpool.engine.worker.address import JoinAddress, Tls, parse_address
from carpool.errors import StartupError
from carpool.service.checks import seconds
from carpool.service.declaration import Declaration
from carpool.version import __version__

_LEAST_SILENCE_S = 2.0
_LEAST_TOKEN = 16
_NO_TOKEN = b"a Unix socket that only its owner can open"

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, init=False)
class Join:
    """Where workers join a service by themselves, and how they prove that they may.

    Whoever knows the token can run code in the service and in its workers, since Python objects go
    to and fro as pickles. So keep it like a password, and use TLS on networks that others are on.

    Args:
        address: "HOST:PORT", where port 0 takes a free one, or the path of a Unix socket, which
            only its owner can open.
        token_file: A file with the token, in its first line, of at least 16 characters
            (`openssl rand -hex 32`). A Unix socket can do without.
        certificate: A file with the certificate of the service, for TLS.
        key: A file with the key of that, if it is not in the same file.
        authority: A file with certificates of those who vouch for the workers' certificates. If it
            is given, a worker without one is not let in.
        silence_s: A worker is lost if its machine has acknowledged nothing for this many seconds;
            one that is busy is not silent.

    Raises:
        ValueError: There is no such address, or an argument is missing or out of range.
        OSError: A file cannot be read.
    """

    address: JoinAddress
    token: bytes
    tls: Tls | None
    silence_s: float

    def __init__(
        self,
        address: str,
        *,
        token_file: PathLike | None = None,
        certificate: PathLike | None = None,
        key: PathLike | None = None,
        authority: PathLike | None = None,
        silence_s: float = 5.0,
    ) -> None:
        where = parse_address(address)
        if certificate is None and (key or authority):
            raise ValueError("key and authority are for TLS, which needs the certificate of the service, too")
        if certificate is not None and where.path:
            raise ValueError("TLS is for networks: leave the certificate out for a Unix socket")
        if seconds("silence_s", silence_s) < _LEAST_SILENCE_S:
            raise ValueError(f"silence_s must be at least {_LEAST_SILENCE_S:g} seconds, not {silence_s!r}")
        tls = None if certificate is None else Tls(certificate, key, authority)
        values = {"address": where, "token": token_of(where, token_file), "tls": tls, "silence_s": float(silence_s)}
        for field, value in values.items():
            object.__setattr__(self, field, value)
        if tls is not None:
            tls.for_service()  # a bad file raises now

    def __repr__(self) -> str:
        return f"<Join {self.address}>"


def token_of(address: JoinAddress, token_file: PathLike | None) -> bytes:
    """Return the token for an address.

    Raises:
        ValueError: There is none, or it is too short.
        OSError: The file cannot be read.
    """
    if token_file is None:
        if address.path:
            return _NO_TOKEN
        raise ValueError(
            f"{address} can be reached by others, so name a file with a token that both sides know, of at least"
            f" {_LEAST_TOKEN} characters: openssl rand -hex 32 > FILE"
        )
    token = Path(token_file).read_bytes().split(b"\n", 1)[0].strip()
    if len(token) < _LEAST_TOKEN:
        raise ValueError(
            f"the token in {os.fspath(token_file)} must have at least {_LEAST_TOKEN} characters, not {len(token)}:"
            " openssl rand -hex 32 > FILE"
        )
    return token


def join_of(service: Declaration, join: Any) -> Join | None:
    """Return where the workers of a service join; None if none do.

    Raises:
        ValueError: Nothing is said and a stage needs it, or something is and no stage does.
        TypeError: It is of the wrong kind.
    """
    joining = [stage.name for stage in service.stages if stage.join]
    if join is None:
        waiting = [stage.name for stage in service.stages if not stage.least_workers]
        if waiting:
            raise ValueError(
                f"stage {waiting[0]} has no workers but those that join, so say where: join= takes a path, or"
                ' carpool.Join("HOST:PORT", token_file=...); on the command line it is --join'
            )
        return None
    if not joining:
        raise ValueError(f"no stage of {service.name} lets workers join: give one of them join=True, or leave out join")
    if isinstance(join, str | os.PathLike):
        return Join(os.fspath(join))
    if not isinstance(join, Join):
        raise TypeError(f"join must be an address or a carpool.Join, not {join!r}")
    return join


def joins_of(services: Sequence[Declaration], join: Any) -> list[Join | None]:
    """Return for each of several services where its workers join.

    Raises:
        ValueError: See `join_of`; or the workers of several services would join at one address.
        TypeError: It is of the wrong kind.
    """
    joining = [service for service in services if any(stage.join for stage in service.stages)]
    if join is not None and len(joining) > 1:
        names = ", ".join(service.name for service in joining)
        raise ValueError(f"workers of several services would join at one address ({names}): serve them apart")
    if join is not None and not joining:
        return [join_of(services[0], join)]  # which says what is wrong
    return [join_of(service, join if service in joining else None) for service in services]


def open_gate(join: Join, service: Declaration, pools: Sequence[WorkerPool]) -> tuple[Gate, JoinAddress]:
    """Open the gate of a service on the running loop; return it and its address.

    Raises:
        StartupError: The address cannot be listened on.
    """
    by_name = {stage.name: pool for stage, pool in zip(service.stages, pools, strict=True) if stage.join}

    def refusal(hello: Hello) -> str:
        """Return why a worker cannot join; empty if it can."""
        if hello.version != __version__:
            return (
                f"the service has carpool {__version__} and the worker {hello.version}: install the same version for"
                " both"
            )
        if hello.service != service.name:
            return f"the service is {service.name}, not {hello.service}"
        if hello.stage not in by_name:
            names = ", ".join(by_name)
            return f"service {service.name} lets no worker join a stage {hello.stage}; it does for {names}"
        return by_name[hello.stage].why_not_admitted()

    gate = Gate(join.tls, join.silence_s, service.name)
    gate.invitations[""] = Invitation(join.token, refusal, lambda sock, hello: by_name[hello.stage].admit(sock, hello))
    try:
        address = gate.listen(join.address)
    except OSError as error:
        raise StartupError(f"workers cannot join at {join.address}: {error.strerror or error}") from error
    about = {"model": service.name, "address": str(address)}
    logger.info("workers can join %s at %s", " and ".join(by_name), address, extra=about)
    return gate, address
