"""The package as users get it: its wheel, installed into fresh environments, and its text for an index."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import carpool
from bench.tools import pythons
from bench.tools.lowest import project
from bench.tools.small_wheel import main as make_smaller
from tests.support.console import shown_programs

ROOT = Path(__file__).parent.parent
MOST_BYTES = 1_000_000
"""Of the wheel that `make dist` makes."""

LARGE = {"hf": "torch and transformers", "ray": "Ray"}
"""Extras of which a test only looks whether pip finds all packages."""

USES = {
    "serve": "import carpool.cli",
    "client": "carpool.Client('http://127.0.0.1:1')",
    "metrics": "carpool.collector",
    "compress": "import carpool.http.compression, zstandard",
    "otel": "import carpool.http.observer, opentelemetry.sdk",
    "simulate": "import carpool.simulate, matplotlib",
    "notebook": "import cloudpickle",
    "frames": "import carpool.frames; carpool.frames.Pandas, carpool.frames.Polars; import pandas, polars",
    "forms": "import carpool.http, python_multipart",
    "parquet": "import carpool.client.score, pyarrow.parquet",
    "examples": "import carpool.examples.digits, sklearn",
}
"""What works with an extra."""

EXTRAS = set(project()["optional-dependencies"]) - {"dev", "sim", "embeddings"}
"""Those for users; `sim` is another name of `simulate`, and `embeddings` is for an example."""


def test_each_extra_is_tried() -> None:
    """Each extra has an import that needs it, or is one of the large ones."""
    assert {*USES, *LARGE} == EXTRAS


def test_the_versions_that_classifiers_name_are_those_of_the_table() -> None:
    """CONTRIBUTING has a table of Pythons with the last run of each, and the classifiers name these."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (3\.\d+)\.\d+ \| (\d{4}-\d\d-\d\d) \|", text, re.MULTILINE)

    assert [version for version, _ in rows] == pythons.versions()


def test_a_smaller_wheel_has_the_same_files(tmp_path: Path) -> None:
    """Names, contents, times and modes stay, also of an empty file; two runs make the same bytes, which are fewer."""
    given = tmp_path / "given.whl"
    texts = {"a.py": (ROOT / "tests/test_package.py").read_bytes(), "py.typed": b"", "RECORD": b"a.py,,\n"}
    with zipfile.ZipFile(given, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            info = zipfile.ZipInfo(name, (2020, 2, 2, 0, 0, 0))
            info.external_attr = 0o100640 << 16
            archive.writestr(info, text, zipfile.ZIP_DEFLATED)
    before = given.read_bytes()
    again = tmp_path / "again.whl"
    again.write_bytes(before)
    make_smaller([str(given), str(again)])

    assert given.read_bytes() == again.read_bytes()
    assert given.stat().st_size < len(before)
    with zipfile.ZipFile(given) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == texts
        kept = {(each.date_time, each.external_attr, each.compress_type) for each in archive.infolist()}
    assert kept == {((2020, 2, 2, 0, 0, 0), 0o100640 << 16, zipfile.ZIP_DEFLATED)}


# -- what only a built wheel shows


def run(*command: str | Path, folder: Path) -> str:
    """The output of a command, which must end well; nothing of the repository is on its path."""
    done = subprocess.run(
        [str(each) for each in command],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **_index()},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _index() -> dict[str, str]:
    """The settings of pip that the machine has."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the working tree, as `make dist` makes it."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, folder=folder)
    (found,) = folder.glob("*.whl")
    make_smaller([str(found)])
    return found


def environment(folder: Path) -> Path:
    """The interpreter of a fresh environment."""
    run(sys.executable, "-m", "venv", folder / "env", folder=folder)
    return folder / "env" / "bin" / "python"


@pytest.mark.slow
def test_the_wheel_is_small_and_has_no_tests(wheel: Path) -> None:
    """The wheel has its version from the source, holds carpool alone, and nothing of the tests."""
    names = zipfile.ZipFile(wheel).namelist()

    assert wheel.name == f"carpool-{carpool.__version__}-py3-none-any.whl"
    assert {name.partition("/")[0] for name in names} == {"carpool", f"carpool-{carpool.__version__}.dist-info"}
    assert [name for name in names if "test_" in name or "/tests/" in name or "conftest" in name] == []
    assert {"carpool/py.typed", "carpool/http/pages/docs.js"} <= set(names)
    assert wheel.stat().st_size <= MOST_BYTES


@pytest.mark.slow
def test_the_text_for_an_index_stands_alone(wheel: Path) -> None:
    """The text has no relative link and no picture, and is the README otherwise."""
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
    message = message_from_bytes(archive.read(name))
    text = str(message.get_payload())

    assert message["Description-Content-Type"] == "text/markdown"
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")] == []
    assert "![" not in text and "Simulated requests answered" not in text
    assert "## In thirty seconds" in text and "one call for [1, 2, 3, 4, 5, 6, 7]" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("extra", ["", *USES])
def test_a_fresh_environment_runs_the_first_programs(extra: str, wheel: Path, tmp_path: Path) -> None:
    """The wheel, without extras and with each, brings what its users need: the programs of README and start page
    print what is shown, and what an extra is for works.
    """
    python = environment(tmp_path)
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", wanted, folder=tmp_path)
    for name, program, output in shown_programs(
        "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/README.md"))
    ):
        (tmp_path / name).write_text(program)
        assert run(python, "-W", "error", name, folder=tmp_path).splitlines()[-1] == output.splitlines()[-1]
    if extra:
        run(python, "-c", f"import carpool; {USES[extra]}", folder=tmp_path)
    else:
        assert run(python, "-m", "pip", "list", "--format=freeze", folder=tmp_path).count("==") <= 4
    if extra == "serve":
        assert "port" in run(tmp_path / "env" / "bin" / "carpool", "config", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("extra", LARGE)
def test_packages_of_a_large_extra_are_found(extra: str, wheel: Path, tmp_path: Path) -> None:
    """Pip finds versions of all packages of the extra that go together."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed")
    run(*pip, f"{wheel}[{extra}]", folder=tmp_path)
