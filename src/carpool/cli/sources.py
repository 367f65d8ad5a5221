"""Where commands have their settings from: flags, the environment and the file with settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cyclopts import App as Cli
from cyclopts import Token
from cyclopts.argument import ArgumentCollection

from carpool.cli.exits import fail
from carpool.cli.settings_file import Config, as_texts, placed, read
from carpool.service.settings import LISTS, NAMES

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


sources = Sources()
"""Those of this process, whose command line is read once."""
