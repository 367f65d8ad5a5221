"""`carpool config`: shows the settings that a server would have, and where each is from."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from cyclopts import Parameter

from carpool.cli.sources import chosen_by, fail, find_service, sources, values
from carpool.engine.policy.base import name_of
from carpool.service.overrides import OF_A_SERVICE, OF_A_STAGE, as_written, changed
from carpool.service.settings import NAMES, ServerOptions


def show_config(
    *targets: str,
    settings: Annotated[ServerOptions | None, Parameter(name="*")] = None,
    config: str | None = None,
    changes: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
) -> None:
    """Show the settings that carpool serve would have here, and where each is from.

    The lines can stand in carpool.toml.

    Parameters
    ----------
    targets:
        Services, as module:attribute, whose own settings are shown, too.
    config:
        The file with settings, in the place of carpool.toml.
    changes:
        See carpool serve.
    """
    values_of: dict[str, Any] = {**chosen_by(settings)}
    found = sources.read(config, changes)
    try:
        services = changed([find_service(name) for name in targets], values(found.services), values(found.stages))
    except (ValueError, TypeError) as error:
        if targets:
            fail(sources.placed(found, error))
        services = []
    rows = [(name, values_of[name], sources.of(name)) for name in NAMES]
    for kind, changes_of, names in (
        ("services", found.services, {service.name: service for service in services}),
        ("stages", found.stages, {stage.name: stage for service in services for stage in service.stages}),
    ):
        for name in {**names, **changes_of}:
            of_one = changes_of.get(name, {})
            for setting in OF_A_SERVICE if kind == "services" else OF_A_STAGE:
                key = f"{kind}.{_key(name)}.{setting}"
                if setting in of_one:
                    rows.append((key, of_one[setting].value, of_one[setting].source))
                elif name in names:
                    rows.append((key, as_written(names[name], setting), "code"))
    width = max(len(name) for name, _, _ in rows)
    for name, value, source in rows:
        try:
            print(f"{name:<{width}} = {_in_toml(value)}  # {source}")
        except TypeError:
            print(f"# {name} is {name_of(value)}, which only code can say")
    for doubt in found.doubts:
        print(f"# {doubt}")


def _in_toml(value: Any) -> str:
    """Return a value as TOML has it. Raises TypeError if it cannot be written."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_in_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(key)} = {_in_toml(each)}' for key, each in value.items())}}}"
    raise TypeError(f"a {type(value).__name__} cannot be written in TOML")


def _key(name: str) -> str:
    """Return a name as TOML has it as a key."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _in_toml(name)
