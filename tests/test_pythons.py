"""What CI and `make` install: an environment for each Python, and the lowest versions that pyproject.toml allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import ROOT
from bench.tools import pythons
from bench.tools.lowest import lowest, project

OF_MAKE = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "TESTS"}
"""What a `make` that runs these tests hands down to another one."""

OWN = "{}.{}".format(*sys.version_info)


def test_each_package_of_the_tests_has_a_lowest_version() -> None:
    """All that `carpool[dev]` needs, of its extras too, is installed at the lowest version that is allowed."""
    found = lowest(project(), "dev")

    names = [each.partition("==")[0] for each in found]
    assert len(set(names)) == len(names)
    assert {"msgspec", "httptools", "cyclopts", "numpy", "pandas", "pytest"} <= set(names)
    assert not any(each.startswith("carpool") for each in found)


PACKAGE: dict[str, Any] = {
    "name": "ours",
    "dependencies": ["one>=1.2,<6"],
    "optional-dependencies": {
        "dev": ["ours[extra,more]", "two[http]>=3; python_version < '3.14'"],
        "extra": ["three>=0.1rc1", "one>=1.2,<6"],
        "more": ["ours[extra]", "four>=4 ; sys_platform != 'win32'"],
        "loose": ["five"],
    },
}


def test_a_lowest_version_keeps_where_it_holds() -> None:
    """Extras of extras count, markers stay, and a requirement without a lowest version is refused."""
    assert lowest(PACKAGE, "dev") == [
        "four==4; sys_platform != 'win32'",
        "one==1.2",
        "three==0.1rc1",
        "two==3; python_version < '3.14'",
    ]
    with pytest.raises(ValueError, match="five names no lowest version"):
        lowest(PACKAGE, "loose")


def test_the_oldest_python_is_the_one_that_is_required() -> None:
    """The classifiers name the versions from the required one on."""
    assert project()["requires-python"] == f">={pythons.versions()[0]}"


def fake(path: Path, says: str) -> Path:
    """A program in the place of an interpreter, which prints this."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_is_found_where_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter is found on the search path, or else among those of pyenv, the latest one; one
    that does not start, as pyenv's stand-ins do, is passed over.
    """
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert pythons.found("3.99") is None
    fake(tmp_path / "bin" / "python3.99", "pyenv: python3.99: command not found")
    assert pythons.found("3.99") is None
    for patch in (2, 10, 9):
        fake(tmp_path / "pyenv" / "versions" / f"3.99.{patch}" / "bin" / "python3.99", "3.99")
    latest = tmp_path / "pyenv" / "versions" / "3.99.10" / "bin" / "python3.99"
    assert pythons.found("3.99") == str(latest)
    on_path = fake(tmp_path / "bin" / "python3.99", "3.99")
    assert pythons.found("3.99") == str(on_path)


def test_what_is_newer_than_this_one_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The newest Python is printed only if it is newer than the one that asks; that there is no
    oldest one is an error.
    """
    there: set[str] = set()
    monkeypatch.setattr(pythons, "versions", lambda: ["3.0", OWN, "3.98", "3.99"])
    monkeypatch.setattr(pythons, "found", lambda version: f"/{version}" if version in there else None)
    for newcomer, printed in (("", ""), (OWN, ""), ("3.98", "/3.98"), ("3.99", "/3.99")):
        there.add(newcomer)
        pythons.main(["newest"])
        assert capsys.readouterr().out == f"{printed}\n"
    with pytest.raises(SystemExit, match=r"no Python 3\.0 on this machine: install python3\.0"):
        pythons.main(["oldest"])
    there.add("3.0")
    pythons.main(["oldest"])
    assert capsys.readouterr().out == "/3.0\n"


def test_each_python_has_an_environment_of_its_own() -> None:
    """`make test` uses `.venv`, and with another PYTHON an environment that has its version in its name."""

    def commands(*settings: str) -> str:
        command = ["make", "--dry-run", "--always-make", "--no-print-directory", "test", *settings]
        env = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout

    assert ".venv/bin/python -m pytest -n 3" in commands()
    assert f".venv-{OWN}{sys.abiflags}/bin/python -m pytest" in commands(f"PYTHON={sys.executable}")
    assert commands("TESTS=tests/engine/hints tests/engine/wire").endswith(
        "--dist worksteal tests/engine/hints tests/engine/wire\n"
    )
    assert commands("PYTHON=no-such-python") == ""
