"""The settings of one run of a service, which `run`, `run_async` and `start` of `Service` take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from carpool.engine.drive.output import LineSink, print_line
from carpool.service.checks import at_least, check_callable, when_full_waits
from carpool.service.declaration import Declaration
from carpool.service.elsewhere import Elsewhere, elsewhere_of
from carpool.service.join import Join, join_of


class RunSettingsByName(TypedDict, total=False):
    """The settings as users write them; `Service.run_async` says what each is."""

    journal_size: int
    output: LineSink
    when_full: Literal["wait", "refuse"]
    join: str | Join | None
    on: Literal["ray"] | Elsewhere | None


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings once they have been checked.

    Attributes:
        journal_size: How many events are remembered for `story`.
        output: Called with each line that a worker prints.
        waits: Whether requests wait while the queue is full, instead of being refused.
        join: Where workers join that come by themselves; None if none can.
        on: Where worker processes run; None for this machine.
    """

    journal_size: int
    output: LineSink
    waits: bool
    join: Join | None
    on: Elsewhere | None


def run_settings_of(service: Declaration, settings: RunSettingsByName) -> RunSettings:
    """Check the settings of a run of a service, and fill in those that were left out.

    Raises:
        ValueError: One of them is out of range, or does not fit the service.
        TypeError: One of them is of the wrong kind, or there is no such setting.
        ImportError: `on="ray"`, and Ray is not installed.
    """
    known = RunSettingsByName.__optional_keys__
    for name in settings:
        if name not in known:
            raise TypeError(f"a run of a service has no setting {name!r}; there are {', '.join(sorted(known))}")
    output = settings.get("output", print_line)
    check_callable("output", output, "a worker's name, whether it is an error, and a line")
    return RunSettings(
        output=output,
        waits=when_full_waits(settings.get("when_full", "wait")),
        join=join_of(service, settings.get("join")),
        on=elsewhere_of(settings.get("on")),
        journal_size=at_least("journal_size", settings.get("journal_size", 0), 0),
    )
