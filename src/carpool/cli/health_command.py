"""`carpool health`: asks a server whether it is ready, for probes that run a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from cyclopts import Parameter

from carpool.cli.exits import FAILED, fail
from carpool.cli.plain_request import NoAnswer, PlainAnswer, send
from carpool.cli.server_keys import server_key, server_url

_OK = 200
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
    """Return what a server is to be, and the path at which it says whether it is."""
    if live:
        return "live", "/livez"
    if model is None:
        return "ready", "/readyz"
    return f"ready for {model}", f"/models/{quote(model, safe='')}/ready"


def _why(answer: PlainAnswer, model: str | None, *, has_key: bool) -> str:
    """Return why a server is not ready: what it says itself, if it is one of ours."""
    if answer.status == _UNAUTHORIZED and has_key:
        return "it does not know the key that CARPOOL_KEY or --key-file has"
    advice = _ADVICE if model is None else {**_ADVICE, **_ADVICE_ABOUT_A_MODEL}
    if answer.status in advice:
        return advice[answer.status]
    try:
        told = answer.json["error"]
        return "; ".join(told.get("models", {}).values()) or str(told["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"it answers {answer.status}"
