"""The commands that change a running server: `carpool reload`, `scale`, and `services add` and
`remove`.

They send an order to its admin routes (`http/admin.py`) and wait until it has been carried out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App as Cli
from cyclopts import Parameter

from carpool.cli.exits import FAILED, fail
from carpool.cli.plain_request import NoAnswer, PlainAnswer, send
from carpool.cli.server_keys import server_key, server_url
from carpool.service.overrides import workers_in

_OK = 200
_LONGEST_S = 3600.0  # models may take long to load


def reload(
    url: str | None = None,
    *,
    service: str | None = None,
    rolling: Annotated[bool | None, Parameter(negative=())] = None,
    grace_s: float = 30.0,
    key_file: Path | None = None,
) -> None:
    """Have a running server load its models anew, without losing a request.

    New workers are started beside the old ones, load the code and the weights that are there now,
    and run their examples. Then they take over. If a new worker fails, the old ones stay, and the
    exit status is 1. It is the same as SIGHUP to the server.

    Example: carpool reload http://127.0.0.1:8000

    Parameters
    ----------
    url:
        Where the server listens, or its admin address, which may be unix:PATH. It takes orders from
        its own machine only. By default it is where carpool serve would listen here, see carpool
        config.
    service:
        The name of a service; all of the server's, if not given.
    rolling:
        Replace one worker at a time, each old one going before the new one is started, because
        there is no memory for both.
    grace_s:
        How long answers in parts may go on in old workers.
    key_file:
        A file with an API key, if the server needs one; CARPOOL_KEY may have it instead.
    """
    order = {"service": service, "rolling": rolling, "grace_s": grace_s}
    answer = _send(url, "/admin/reload", order, key_file)
    _print_workers(answer, "reloaded")
    for name, stages in answer.get("joined", {}).items():
        if service in (None, name):
            counts = ", ".join(f"{stage} has {_workers(n, 'joined ')}" for stage, n in stages.items())
            print(f"{name}: {counts} with the old model: restart them where they run")


def scale(
    stage: str,
    workers: str,
    /,
    url: str | None = None,
    *,
    service: str | None = None,
    grace_s: float = 30.0,
    key_file: Path | None = None,
) -> None:
    """Change the number of workers of a stage of a running server, without losing a request.

    Example: carpool scale Digits 4

    Example: carpool scale Digits 1-8 http://127.0.0.1:8000

    Parameters
    ----------
    stage:
        The name of the stage.
    workers:
        How many workers it is to have. With 1-8 the number follows the load from now on.
    service:
        The name of the service, where the server has several.
    grace_s:
        How long answers in parts may go on in workers that go.
    url:
        Where the server listens, or its admin address, which may be unix:PATH. It takes orders from
        its own machine only. By default it is where carpool serve would listen here, see carpool
        config.
    key_file:
        A file with an API key, if the server needs one; CARPOOL_KEY may have it instead.
    """
    wanted = workers_in(workers)
    if wanted is None:
        fail(f"workers must be a number such as 4, or a range such as 1-8, not {workers!r}")
    order = {"stage": stage, "workers": wanted, "service": service, "grace_s": grace_s}
    _print_workers(_send(url, "/admin/scale", order, key_file), "scaled")


services = Cli(name="services", help="Add services to a running server, and remove them.")


@services.command
def add(target: str, /, url: str | None = None, *, key_file: Path | None = None) -> None:
    """Have a running server serve one more service.

    It is loaded and runs its examples before the first request can reach it. If that fails, the
    server goes on as before, and the exit status is 1. It answers at /models/NAME/predict, and at
    /predict if no other service does.

    Example: carpool services add program:other

    Parameters
    ----------
    target:
        The service, as module:attribute, where the server finds modules: in its folder, for
        example. A module that the server has read already is not read again.
    url:
        Where the server listens, or its admin address, which may be unix:PATH. It takes orders from
        its own machine only. By default it is where carpool serve would listen here, see carpool
        config.
    key_file:
        A file with an API key, if the server needs one; CARPOOL_KEY may have it instead.
    """
    _print_workers(_send(url, "/admin/services/add", {"target": target}, key_file), "is served")


@services.command
def remove(name: str, /, url: str | None = None, *, key_file: Path | None = None) -> None:
    """Have a running server serve a service no more.

    New requests for it get 404, and those inside are answered before its workers end.

    Example: carpool services remove other

    Parameters
    ----------
    name:
        The name of the service.
    url:
        Where the server listens, or its admin address, which may be unix:PATH. It takes orders from
        its own machine only. By default it is where carpool serve would listen here, see carpool
        config.
    key_file:
        A file with an API key, if the server needs one; CARPOOL_KEY may have it instead.
    """
    _print_workers(_send(url, "/admin/services/remove", {"service": name}, key_file), "is served")


def _send(url: str | None, path: str, order: dict[str, Any], key_file: Path | None) -> dict[str, Any]:
    """Send an order, and return what the server answers; exit if it was not carried out."""
    url = server_url(url)
    try:
        answer = send(url, "POST", path, key=server_key(key_file), order=order, timeout_s=_LONGEST_S)
        if answer.status == _OK:
            told: dict[str, Any] = answer.json
            return told
    except (NoAnswer, ValueError) as error:
        fail(
            f"no carpool server answers at {url} ({error}): say where it listens, such as http://127.0.0.1:8000", FAILED
        )
    except OSError as error:
        fail(str(error), FAILED)
    fail(_message_of(answer), FAILED)


def _message_of(answer: PlainAnswer) -> str:
    """Return what the server says is wrong."""
    try:
        return str(answer.json["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {answer.status}"


def _print_workers(answer: dict[str, Any], done: str) -> None:
    """Print how many workers there are now."""
    for service, stages in answer["workers"].items():
        counts = ", ".join(f"{stage} has {_workers(n)}" for stage, n in stages.items())
        print(f"{service} {done}: {counts}")


def _workers(n: int, kind: str = "") -> str:
    return f"{n} {kind}worker{'' if n == 1 else 's'}"
