"""What users are told of a command line that is not right."""

from __future__ import annotations

from typing import Any

from cyclopts import CycloptsError, CycloptsPanel, UnknownOptionError

from carpool.service.overrides import OF_A_SERVICE, OF_A_STAGE


def in_a_panel(error: CycloptsError) -> Any:
    """Return what is shown of an error in a terminal."""
    return CycloptsPanel(_as_setting(error) or error)


def in_words(error: CycloptsError) -> str:
    """Return what is wrong, and what to write instead."""
    return _as_setting(error) or str(error)


def _as_setting(error: CycloptsError) -> str:
    """Return how to write an option that is a setting of a stage or service; "" if it is none.

    Who comes from another server looks for `--workers`.
    """
    if not isinstance(error, UnknownOptionError):
        return ""
    option = (error.token.keyword or error.token.value).partition("=")[0]
    setting = option.removeprefix("--").replace("-", "_")
    for name in (setting, f"{setting}_s"):
        if name in OF_A_STAGE:
            return f"{option} is a setting of a stage: write --set stages.NAME.{name}=VALUE."
        if name in OF_A_SERVICE:
            return f"{option} is a setting of a service: write --set services.NAME.{name}=VALUE."
    return ""
