"""The parts that commands share: where their input is from, and how they end.

Settings come from flags, the environment and the file with settings, a service from the name
module:attribute, and the address and key of a server from the settings that it would have here. A
command that cannot be carried out ends with one line and an exit status.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from cyclopts import App as Cli
from cyclopts import CycloptsError, Token, UnknownOptionError
from cyclopts.argument import ArgumentCollection

from carpool.cli.settings_file import Config, as_texts, placed, read
from carpool.engine.logger import logger
from carpool.engine.observe import log
from carpool.service import named
from carpool.service.named import BrokenModule, NotFound, service_named
from carpool.service.overrides import OF_A_SERVICE, OF_A_STAGE
from carpool.service.service import Service
from carpool.service.settings import LISTS, NAMES, ServerSettings, with_defaults

WITH_SETTINGS: Final = ("serve", "config")
"""The commands that have the settings of a server, of its services and of their stages."""


class Sources:
    """Gives commands the settings of the environment and the file, unless a flag says them."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}
        self._places: dict[str, str] = {}

    def __call__(self, app: Cli, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in what no flag says; this is what cyclopts calls."""
        if not commands or commands[0] not in WITH_SETTINGS:
            return
        by_name = {
            argument.name.removeprefix("--").replace("-", "_"): argument for argument in arguments if argument.names
        }
        path = next((token.value for token in by_name["config"].tokens), None)
        found = self.read(path, ())
        for name in NAMES:
            argument = by_name[name]
            if argument.tokens:
                self._of[name] = "flag"
            elif name in found.settings:
                value, self._places[name], self._of[name] = found.settings[name]
                place = self._places[name]
                texts = list(as_texts(value))
                if name in LISTS and not isinstance(value, list):
                    texts = [text for text in str(value).split(",") if text]
                for i, text in enumerate(texts):
                    argument.append(Token(keyword=place, value=text, source=self._of[name], index=i))

    def read(self, path: str | None, changes: tuple[str, ...]) -> Config:
        """Read the environment and the file, or exit with an error."""
        try:
            return read(os.environ, Path.cwd(), path, changes)
        except ValueError as error:
            fail(str(error))

    def of(self, name: str) -> str:
        """Return where the value of a setting is from."""
        return self._of.get(name, "default")

    def place(self, name: str) -> str:
        """Return how the user writes a setting of the server, or would."""
        return self._places.get(name, "--" + name.replace("_", "-"))

    def placed(self, config: Config, error: Exception) -> str:
        """Return an error about a setting with where the user has written that setting."""
        text = placed(config, str(error))
        name = text.partition(" ")[0]
        return f"{self._places[name]}: {text}" if name in self._places else text


def chosen_by(options: Any) -> ServerSettings:
    """Return the settings of a server, of its flags as a `ServerOptions`; None for no flag."""
    return with_defaults(cast(ServerSettings, {} if options is None else vars(options)))


sources = Sources()
"""Those of this process, whose command line is read once."""

FAILED: Final = 1
USAGE_ERROR: Final = 2


def fail(text: str, status: int = USAGE_ERROR, *, traceback: str = "") -> NoReturn:
    """Exit with an error in one line, for a command that cannot be carried out.

    Where the log is JSON, the line is, too, with the traceback in it.

    Args:
        text: What is wrong, and what to change.
        status: The exit status.
        traceback: That of the user's code, if it has raised; it is shown before the text.
    """
    if log.is_json():
        told = f"{text}\n{traceback}".rstrip()
        logger.critical("%s", told, extra={"code": "startup_failed"})
    log.flush()  # lines that are still on their way come first
    if not log.is_json():
        print(f"{traceback}carpool: {text}", file=sys.stderr)
    raise SystemExit(status) from None


def in_words(error: CycloptsError) -> str:
    """Return what is wrong, and what to write instead."""
    return " ".join(_as_setting(error)) or " ".join(str(error).split())


def _as_setting(error: CycloptsError) -> tuple[str, ...]:
    """Return what an option is that is a setting of a stage or service, and how to write it.

    Who comes from another server looks for `--workers`. For any other mistake it is empty.
    """
    if not isinstance(error, UnknownOptionError) or (error.command_chain or ("",))[0] not in WITH_SETTINGS:
        return ()
    option = (error.token.keyword or error.token.value).partition("=")[0]
    setting = option.removeprefix("--").replace("-", "_")
    for name in (setting, f"{setting}_s"):
        if name in OF_A_STAGE:
            return f"{option} is a setting of a stage; write", f"--set stages.NAME.{name}=VALUE"
        if name in OF_A_SERVICE:
            return f"{option} is a setting of a service; write", f"--set services.NAME.{name}=VALUE"
    return ()


def find_service(target: str) -> Service:
    """Return the service at `module:attribute`, or exit with an error that says what is there."""
    add_current_folder()
    try:
        return service_named(target)
    except BrokenModule as error:
        fail(str(error), FAILED, traceback=_from_module_on(error.error))
    except NotFound as error:
        fail(str(error))


def _from_module_on(error: BaseException) -> str:
    """Return the traceback of an import, without the frames that are not the user's."""
    ours = (named.__file__, importlib.__file__, "<frozen importlib")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frames)))


def add_current_folder() -> None:
    """Let modules be found in the current folder, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # to listen on, and to ask


def server_key(key_file: Path | None) -> str:
    """Return the key in a file, or the one in CARPOOL_KEY; empty without either. Raises OSError."""
    return os.environ.get("CARPOOL_KEY", "") if key_file is None else key_file.read_text().strip()


def server_url(url: str | None, *, admin: bool = True) -> str:
    """Return the address of the server to ask; by default the one that the settings here give it.

    Args:
        url: What the command was given; None for nothing.
        admin: Whether to prefer its address for orders and pages of its operators.
    """
    if url is not None:
        return url
    found = {name: each.value for name, each in sources.read(None, ()).settings.items()}
    if admin and (address := found.get("admin_address")):
        return str(address) if str(address).startswith("unix:") else f"http://{address}"
    if path := found.get("socket"):
        return f"unix:{path}"
    host = str(found.get("host", "")).strip("[]")
    host = _ANY.get(host, host)
    scheme = "https" if found.get("tls_cert") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{found.get('port', 8000)}"
