"""The commands for a running server: `carpool reload`, `scale`, `services add` and `remove`, and
`health`.

Those that change it send an order to its admin routes (`http/admin.py`) and wait until it has been
carried out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from cyclopts import App as Cli
from cyclopts import Parameter

from carpool.cli.sources import FAILED, NoAnswer, PlainAnswer, fail, send, server_key, server_url
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
    """Send an order, and return the answer; exit if it was not carried out."""
    url = server_url(url)
    try:
        answer = send(url, "POST", path, key=server_key(key_file), order=order, timeout_s=_LONGEST_S)
        if answer.status == _OK:
            found: dict[str, Any] = answer.json
            return found
    except (NoAnswer, ValueError) as error:
        fail(
            f"no carpool server answers at {url} ({error}): say where it listens, such as http://127.0.0.1:8000", FAILED
        )
    except OSError as error:
        fail(str(error), FAILED)
    fail(_message_of(answer), FAILED)


def _message_of(answer: PlainAnswer) -> str:
    try:
        return str(answer.json["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {answer.status}"


def _print_workers(answer: dict[str, Any], done: str) -> None:
    for service, stages in answer["workers"].items():
        counts = ", ".join(f"{stage} has {_workers(n)}" for stage, n in stages.items())
        print(f"{service} {done}: {counts}")


def _workers(n: int, kind: str = "") -> str:
    return f"{n} {kind}worker{'' if n == 1 else 's'}"


_UNAUTHORIZED = 401
_MISSING = 404
_ABOUT_OTHERS = "not ready: "
_ADVICE = {
    _UNAUTHORIZED: "it needs a key: set CARPOOL_KEY, give --key-file, or serve with --open-readyz",
    _MISSING: "there is no carpool server: say where it listens",
    421: "it does not answer to this name: use one that its --allow-host has",
}
_ADVICE_ABOUT_A_MODEL = {
    _UNAUTHORIZED: "it needs a key: set CARPOOL_KEY, or give --key-file",
    _MISSING: "it has no such model, or is no carpool server",
}


def health(
    url: str | None = None,
    *,
    model: str | None = None,
    live: Annotated[bool, Parameter(negative=())] = False,
    key_file: Path | None = None,
    timeout_s: float = 8.0,
) -> None:
    """Ask a server whether it is ready, for HEALTHCHECK and other probes that run a command.

    The exit status is 0 if some model would answer, and 1 if none would. One line says which; where
    it is 0, there is another line for each model that would not answer.

    Example: carpool health unix:/run/carpool/admin.sock

    Parameters
    ----------
    url:
        Where the server is, or its admin address, which may be unix:PATH. By default it is where
        carpool serve would listen here, see carpool config.
    model:
        Ask whether this model would answer, whatever becomes of the others.
    live:
        Ask only whether the process is up, which needs no key: for whatever ends those that fail.
    key_file:
        A file with an API key, if the server needs one; CARPOOL_KEY may have it instead.
    timeout_s:
        For how long the server may be silent. It may try an example first, for up to 5 s.
    """
    if live and model is not None:
        fail("--live is about the process: leave --model out, or --live")
    wanted, path = _question(model, live=live)
    url = server_url(url, admin=False)
    try:
        key = server_key(key_file)
        answer = send(url, "GET", path, key=key, timeout_s=timeout_s)
    except NoAnswer as error:
        fail(f"{url} does not answer: {error}", FAILED)
    except OSError as error:
        fail(str(error), FAILED)
    if answer.status != _OK:
        print(f"{url} is not {wanted}: {_why(answer, model, has_key=key != '')}")
        raise SystemExit(FAILED)
    print(f"{url} is {wanted}")
    for line in answer.body.decode(errors="replace").splitlines():
        if line.startswith(_ABOUT_OTHERS):
            print(line)


def _question(model: str | None, *, live: bool) -> tuple[str, str]:
    if live:
        return "live", "/livez"
    if model is None:
        return "ready", "/readyz"
    return f"ready for {model}", f"/models/{quote(model, safe='')}/ready"


def _why(answer: PlainAnswer, model: str | None, *, has_key: bool) -> str:
    """Return why a server is not ready: its own reason, if it is one of ours."""
    if answer.status == _UNAUTHORIZED and has_key:
        return "it does not know the key that CARPOOL_KEY or --key-file has"
    advice = _ADVICE if model is None else {**_ADVICE, **_ADVICE_ABOUT_A_MODEL}
    if answer.status in advice:
        return advice[answer.status]
    try:
        error = answer.json["error"]
        return "; ".join(error.get("models", {}).values()) or str(error["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"it answers {answer.status}"
