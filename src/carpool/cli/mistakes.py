"""What users are told of a command line that is not right."""

from __future__ import annotations

from cyclopts import CycloptsError, UnknownOptionError

from carpool.cli.sources import WITH_SETTINGS
from carpool.service.overrides import OF_A_SERVICE, OF_A_STAGE


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
