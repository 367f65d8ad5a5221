"""`carpool config`: shows the settings that a server would have, and where each is from."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from carpool.cli.exits import fail
from carpool.cli.sources import sources
from carpool.cli.targets import find_service
from carpool.config import values
from carpool.service.overrides import OF_A_SERVICE, OF_A_STAGE, changed
from carpool.settings import NAMES, ServerSettings


def show_config(
    *targets: str,
    settings: Annotated[ServerSettings | None, Parameter(name="*")] = None,
    config: str | None = None,
    changes: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
) -> None:
    """Show the settings that carpool serve would have here, and where each is from.

    Parameters
    ----------
    targets:
        Services, as module:attribute, whose own settings are shown, too.
    config:
        The file with settings, in the place of carpool.toml.
    changes:
        See carpool serve.
    """
    chosen = settings or ServerSettings()
    found = sources.read(config, changes)
    try:
        services = changed([find_service(name) for name in targets], values(found.services), values(found.stages))
    except (ValueError, TypeError) as error:
        if targets:
            fail(str(error))
        services = []
    rows = [(name, getattr(chosen, name), sources.of(name)) for name in NAMES]
    for kind, changes_of, names in (
        ("services", found.services, {service.name: service for service in services}),
        ("stages", found.stages, {stage.name: stage for service in services for stage in service.stages}),
    ):
        for name in {**names, **changes_of}:
            of_one = changes_of.get(name, {})
            for setting in OF_A_SERVICE if kind == "services" else OF_A_STAGE:
                if setting in of_one:
                    rows.append((f"{kind}.{name}.{setting}", of_one[setting].value, of_one[setting].source))
                elif name in names:
                    rows.append((f"{kind}.{name}.{setting}", getattr(names[name], setting), "code"))
    width = max(len(name) for name, _, _ in rows)
    for name, value, source in rows:
        print(f"{name:<{width}}  {_shown(value)}  # {source}")
    for doubt in found.doubts:
        print(f"# {doubt}")


def _shown(value: Any) -> str:
    """Return a value as TOML has it, or nearly so."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(_shown(each) for each in value)}]"
    return '"none"' if value is None else f'"{value}"' if isinstance(value, str) else str(value)
