"""Where settings come from besides flags: the environment, and a file in TOML.

A flag counts before the environment, the environment before the file, and the file before what the
code says.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from carpool.service.overrides import nearest
from carpool.service.settings import NAMES, ServerSettings

FILE = "carpool.toml"
_PROJECT = "pyproject.toml"
_PREFIX = "CARPOOL_"
_TABLES = ("services", "stages")
_NOT_SETTINGS = frozenset({"api_keys", "worker", "workers", "config", "set", "key", "metrics_folder"})
_NEXT_CHANGE = re.compile(r"(?<!\s)\s++(?=(?:services|stages)\.[^=]{1,200}=)")
_MAY_BE_EMPTY = frozenset(field.name for field in fields(ServerSettings) if field.default in ("", ()))
_LINKS = ("service_", "port_")  # Kubernetes tells each pod of the services, and one may be called carpool


class Found(NamedTuple):
    """A value of a setting.

    Attributes:
        value: As it is in TOML, or text.
        place: How the user has written the setting there, for errors.
        source: Where it is from.
    """

    value: Any
    place: str
    source: str


class Config(NamedTuple):
    """What the environment and the file say.

    Attributes:
        settings: Values of the server's settings.
        services: Values by setting, by the name of a service.
        stages: Values by setting, by the name of a stage.
        doubts: Variables of the environment that mean nothing, in words.
    """

    settings: dict[str, Found]
    services: dict[str, dict[str, Found]]
    stages: dict[str, dict[str, Found]]
    doubts: list[str]


def read(environ: Mapping[str, str], folder: Path, path: str | None = None, sets: Iterable[str] = ()) -> Config:
    """Read the settings of the environment and the file.

    Args:
        environ: The environment.
        folder: Where a file is looked for.
        path: The file, if it is named.
        sets: Changes of services and stages that were given as flags, such as
            `stages.Digits.workers=4`.

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
    """Return the values of services or stages, without where they are from."""
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
    """Return the name and the settings of the file, if there is one. Raises ValueError."""
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
    """Return a file of TOML. Raises ValueError."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from None


def _read_tables(config: Config, kind: str, tables: Any, file: str) -> None:
    """Read the settings of services or stages. Raises ValueError."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError(f"{kind} in {file} must be tables, such as [{kind}.NAME]")
    for name, table in tables.items():
        for key, value in table.items():
            found = Found(value, f"{kind}.{name}.{key} in {file}", file)
            getattr(config, kind).setdefault(name, {})[key.replace("-", "_")] = found


def _read_environment(config: Config, environ: Mapping[str, str]) -> None:
    """Read the variables that begin with CARPOOL_. Raises ValueError."""
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
        elif not value and name not in _MAY_BE_EMPTY:
            raise ValueError(f"{variable} is empty: give it a value, or remove it from the environment")
        else:
            config.settings[name] = Found(value, variable, "environment")


def _read_set(config: Config, text: str, source: str) -> None:
    """Read one change of a service or stage. Raises ValueError."""
    name, equals, value = text.partition("=")
    parts = name.split(".")
    if not equals or len(parts) < len(("kind", "name", "setting")) or parts[0] not in _TABLES:
        raise ValueError(f"{source} has {text!r}: write stages.NAME.SETTING=VALUE or services.NAME.SETTING=VALUE")
    kind, of, setting = parts[0], ".".join(parts[1:-1]), parts[-1].replace("-", "_")
    getattr(config, kind).setdefault(of, {})[setting] = Found(_as_toml(value), f"{source} {name}", source)


def _as_toml(text: str) -> Any:
    """Return the value that a text is in TOML; the text itself if it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def as_texts(value: Any) -> Iterator[str]:
    """Yield a value of the file, or each of a list, as it would be written behind a flag.

    In the environment the entries of a list have commas between them.
    """
    if isinstance(value, list):
        yield from map(str, value)
    elif isinstance(value, bool):
        yield str(value).lower()
    else:
        yield str(value)
