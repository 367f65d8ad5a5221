"""The parts that commands share: where their input is from, and how they end.

A service comes from the name module:attribute, the address and key of a server from the settings
that it would have here. A command that cannot be carried out ends with one line and an exit status.

A flag counts before the environment, the environment before the file, and the file before what the
code says.
"""

from __future__ import annotations

import http.client
import importlib
import json
import os
import re
import socket
import sys
import tomllib
import traceback
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, cast

from cyclopts import App as Cli
from cyclopts import CycloptsError, Token, UnknownOptionError
from cyclopts.argument import ArgumentCollection

from carpool.engine.logger import logger
from carpool.engine.observe import log
from carpool.service import overrides
from carpool.service.overrides import OF_A_SERVICE, OF_A_STAGE, BrokenModule, NotFound, nearest, service_named
from carpool.service.service import Service
from carpool.service.settings import LISTS, MAY_BE_EMPTY, NAMES, ServerSettings, with_defaults

WITH_SETTINGS: Final = ("serve", "config")
"""The commands that have the settings of a server, of its services and of their stages."""


class Sources:
    """Gives commands the settings of the environment and the file, unless a flag says them."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}
        self._places: dict[str, str] = {}

    def __call__(self, app: Cli, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in the settings that no flag gives; cyclopts calls this."""
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
    return with_defaults(cast(ServerSettings, {} if options is None else vars(options)))


sources = Sources()
"""Those of this process, whose command line is read once."""

FAILED: Final = 1
USAGE_ERROR: Final = 2


def fail(text: str, status: int = USAGE_ERROR, *, traceback: str = "") -> NoReturn:
    """Exit with an error in one line, as JSON where the log is: the mistake, and its remedy;
    `traceback` is that of the user's code.
    """
    if log.is_json():
        line = f"{text}\n{traceback}".rstrip()
        logger.critical("%s", line, extra={"code": "startup_failed"})
    log.flush()  # lines that are still on their way come first
    if not log.is_json():
        print(f"{traceback}carpool: {text}", file=sys.stderr)
    raise SystemExit(status) from None


def in_words(error: CycloptsError) -> str:
    text = " ".join(_as_setting(error)) or " ".join(str(error).split())
    if "--" in text:  # it names what to write
        return text
    return f"{text.rstrip('., ')}; see {' '.join(('carpool', *(error.command_chain or ())))} --help"


def _as_setting(error: CycloptsError) -> tuple[str, ...]:
    """Return the meaning of an option that is a setting of a stage or service, and its form.

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
    """Return the service at `module:attribute`, or exit with an error that names those that are
    there.
    """
    add_current_folder()
    try:
        return service_named(target)
    except BrokenModule as error:
        fail(str(error), FAILED, traceback=_from_module_on(error.error))
    except NotFound as error:
        fail(str(error))


def _from_module_on(error: BaseException) -> str:
    """Return the traceback of an import, without the frames that are not the user's."""
    ours = (overrides.__file__, importlib.__file__, "<frozen importlib")
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
    """Return the address of the server to ask: `url`, or that which the settings here give it;
    `admin` prefers its address for operators.
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


_UNIX = "unix:"


class NoAnswer(Exception):
    """No server answers there; the text says why."""


class PlainAnswer(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def send(
    url: str, method: str, path: str, *, key: str = "", order: dict[str, Any] | None = None, timeout_s: float
) -> PlainAnswer:
    """Send a request, and return its answer.

    Args:
        url: Where the server is, such as `http://127.0.0.1:8000` or `unix:PATH`.
        key: An API key; empty if the server needs none.
        order: The body, which is sent as JSON.
        timeout_s: For how long the server may be silent.

    Raises:
        NoAnswer: The URL makes no sense, or no server answers there.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = None if order is None else json.dumps(order)
    if body is not None:
        headers["Content-Type"] = "application/json"
    connection, root = _connection(url, timeout_s)
    try:
        connection.request(method, root + path, body, headers)
        answer = connection.getresponse()
        return PlainAnswer(answer.status, answer.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswer(getattr(error, "strerror", None) or str(error) or type(error).__name__) from None
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    """Return a connection to a server, and the prefix of the paths there. Raises NoAnswer."""
    if url.startswith(_UNIX):
        return _UnixConnection(url.removeprefix(_UNIX), timeout_s), ""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        return kind(parts.hostname or "", parts.port, timeout=timeout_s), parts.path.rstrip("/")
    except ValueError as error:
        raise NoAnswer(f"that is no address of a server: {error}") from None


FILE = "carpool.toml"
_PROJECT = "pyproject.toml"
_PREFIX = "CARPOOL_"
_TABLES = ("services", "stages")
_NOT_SETTINGS = frozenset({"api_keys", "worker", "workers", "config", "set", "key", "metrics_folder"})
_NEXT_CHANGE = re.compile(r"(?<!\s)\s++(?=(?:services|stages)\.[^=]{1,200}=)")
_LINKS = ("service_", "port_")  # variables that Kubernetes sets for each service, one of which may be called carpool


class Found(NamedTuple):
    """A value of a setting, as it is in TOML, or text; how the user has written the setting at its
    place, for errors; and its source.
    """

    value: Any
    place: str
    source: str


class Config(NamedTuple):
    """The settings of the environment and the file.

    Attributes:
        services: Values by setting, by the name of a service.
        stages: Values by setting, by the name of a stage.
        doubts: Variables of the environment that mean nothing, in words.
    """

    settings: dict[str, Found]
    services: dict[str, dict[str, Found]]
    stages: dict[str, dict[str, Found]]
    doubts: list[str]


def read(environ: Mapping[str, str], folder: Path, path: str | None = None, sets: Iterable[str] = ()) -> Config:
    """Read the settings of the environment and the file, which is looked for in `folder` unless a
    `path` is given.

    Args:
        sets: Flags for services and stages, such as `stages.Digits.workers=4`.

    Raises:
        ValueError: Something cannot be understood; the text names the place.
    """
    config = Config({}, {}, {}, [])
    _read_file(config, folder, path or environ.get(f"{_PREFIX}CONFIG"))
    _read_environment(config, environ)
    in_environment = [text for text in _NEXT_CHANGE.split(environ.get(f"{_PREFIX}SET", "").strip()) if text]
    for source, texts in ((f"{_PREFIX}SET", in_environment), ("--set", sets)):
        for text in texts:
            _read_set(config, text, source)
    return config


def placed(config: Config, text: str) -> str:
    """Return an error about a service or stage with where the user has written the setting."""
    for kind in _TABLES:
        for name, of_one in getattr(config, kind).items():
            for setting, found in of_one.items():
                begin = f"{kind}.{name}.{setting}: "
                if text.startswith(begin):
                    return f"{found.place}: {text.removeprefix(begin)}"
    return text


def values(found: Mapping[str, Mapping[str, Found]]) -> dict[str, dict[str, Any]]:
    return {name: {setting: each.value for setting, each in of_one.items()} for name, of_one in found.items()}


def _read_file(config: Config, folder: Path, path: str | None) -> None:
    """Read `carpool.toml`, or the table `tool.carpool` of `pyproject.toml`. Raises ValueError."""
    file, table = _table(folder, path)
    if file is None:
        return
    for key, value in table.items():
        if key in _TABLES:
            _read_tables(config, key, value, file)
            continue
        name = key.replace("-", "_")
        if name not in NAMES:
            raise ValueError(f"{file} has {key!r}, which is no setting{nearest(name, {*NAMES, *_TABLES})}")
        config.settings[name] = Found(value, f"{key} in {file}", file)


def _table(folder: Path, path: str | None) -> tuple[str | None, dict[str, Any]]:
    if path is not None:
        whole = _parsed(Path(path))
        return path, whole.get("tool", {}).get("carpool", {}) if Path(path).name == _PROJECT else whole
    if (folder / FILE).exists():
        return FILE, _parsed(folder / FILE)
    if (folder / _PROJECT).exists():
        table = _parsed(folder / _PROJECT).get("tool", {}).get("carpool")
        if table is not None:
            return f"[tool.carpool] of {_PROJECT}", table
    return None, {}


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from None


def _read_tables(config: Config, kind: str, tables: Any, file: str) -> None:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError(f"{kind} in {file} must be tables, such as [{kind}.NAME]")
    for name, table in tables.items():
        for key, value in table.items():
            found = Found(value, f"{kind}.{name}.{key} in {file}", file)
            getattr(config, kind).setdefault(name, {})[key.replace("-", "_")] = found


def _read_environment(config: Config, environ: Mapping[str, str]) -> None:
    for variable, value in sorted(environ.items()):
        name = variable.removeprefix(_PREFIX).lower()
        if not variable.startswith(_PREFIX) or name in _NOT_SETTINGS:
            continue
        if name == "api_keys_file":
            name = "api_keys"
        if name.startswith(_LINKS) or (name == "port" and value.startswith("tcp://")):
            continue
        if name not in NAMES:
            config.doubts.append(f"{variable} in the environment is no setting{nearest(name, set(NAMES))}")
        elif not value and name not in MAY_BE_EMPTY:
            raise ValueError(f"{variable} is empty: give it a value, or remove it from the environment")
        else:
            config.settings[name] = Found(value, variable, "environment")


def _read_set(config: Config, text: str, source: str) -> None:
    name, equals, value = text.partition("=")
    parts = name.split(".")
    if not equals or len(parts) < len(("kind", "name", "setting")) or parts[0] not in _TABLES:
        raise ValueError(f"{source} has {text!r}: write stages.NAME.SETTING=VALUE or services.NAME.SETTING=VALUE")
    kind, of, setting = parts[0], ".".join(parts[1:-1]), parts[-1].replace("-", "_")
    getattr(config, kind).setdefault(of, {})[setting] = Found(_as_toml(value), f"{source} {name}", source)


def _as_toml(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def as_texts(value: Any) -> Iterator[str]:
    """Yield a value of the file, or each of a list, as it would be written behind a flag."""
    if isinstance(value, list):
        yield from map(str, value)
    elif isinstance(value, bool):
        yield str(value).lower()
    else:
        yield str(value)
