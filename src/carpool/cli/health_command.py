"""`carpool health`: asks a server whether it is ready, for probes that run a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from carpool.cli.exits import FAILED, fail
from carpool.cli.server_keys import server_key
from carpool.plain_request import NoAnswer, PlainAnswer, send

_OK = 200
_UNAUTHORIZED = 401
_ADVICE = {
    _UNAUTHORIZED: "it needs a key: set CARPOOL_KEY, give --key-file, or serve with --open-readyz",
    404: "there is no carpool server: say where it listens",
    421: "it does not answer to this name: use one that its --allow-host has",
}


def health(
    url: str = "http://127.0.0.1:8000",
    *,
    live: Annotated[bool, Parameter(negative=())] = False,
    key_file: Path | None = None,
    timeout_s: float = 8.0,
) -> None:
    """Ask a server whether it is ready, for HEALTHCHECK and other probes that run a command.

    It prints one line. The exit status is 0 if the server is ready, and 1 if it is not.

    Example: carpool health unix:/run/carpool/admin.sock

    Parameters
    ----------
    url:
        Where the server is, or its admin address, which may be unix:PATH.
    live:
        Ask only whether the process is up, which needs no key: for whatever ends those that fail.
    key_file:
        A file with an API key, if the server needs one; CARPOOL_KEY may have it instead.
    timeout_s:
        For how long the server may be silent. It may try an example first, for up to 5 s.
    """
    path = "/livez" if live else "/readyz"
    try:
        key = server_key(key_file)
        answer = send(url, "GET", path, key=key, timeout_s=timeout_s)
    except NoAnswer as error:
        fail(f"{url} does not answer: {error}", FAILED)
    except OSError as error:
        fail(str(error), FAILED)
    wanted = "live" if live else "ready"
    if answer.status != _OK:
        print(f"{url} is not {wanted}: {_why(answer, has_key=key != '')}")
        raise SystemExit(FAILED)
    print(f"{url} is {wanted}")


def _why(answer: PlainAnswer, *, has_key: bool) -> str:
    """Return why a server is not ready: what it says itself, if it is one of ours."""
    if answer.status == _UNAUTHORIZED and has_key:
        return "it does not know the key that CARPOOL_KEY or --key-file has"
    if answer.status in _ADVICE:
        return _ADVICE[answer.status]
    try:
        told = answer.json["error"]
        return "; ".join(told.get("models", {}).values()) or str(told["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"it answers {answer.status}"
