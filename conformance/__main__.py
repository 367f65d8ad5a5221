"""Runs clients that others wrote against a carpool server, and writes a table of it into the docs.

    python -m conformance [CLIENT ...] [--docs]

Each client has a virtual environment of its own under `$CARPOOL_CONFORMANCE`, else
`~/.cache/carpool-conformance`, since their pins clash. `--docs` writes the table into
docs/clients.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CLIENTS = {
    "triton": ("tritonclient[http]", "numpy"),
    "openai": ("openai", "numpy"),
    "kserve": ("kserve",),
    "mlflow": ("mlflow-skinny", "pandas", "requests", "scipy"),
    "schemathesis": ("schemathesis",),
}
PROGRAMS = {name: name if name == "triton" else f"{name}_client" for name in CLIENTS}
MODELS = ["rows", "scale", "addsub", "echo", "texts", "binary", "embed", "words", "parrot", "busy"]
MARKS = ("<!-- conformance -->\n", "<!-- /conformance -->\n")


def python_of(name: str) -> Path:
    """Return the Python of a client's environment, which is made if it is not there."""
    home = Path(os.environ.get("CARPOOL_CONFORMANCE") or Path.home() / ".cache" / "carpool-conformance") / name
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *CLIENTS[name]]
        subprocess.run(install, check=True)
    return python


@contextmanager
def served(targets: list[str], folder: Path) -> Iterator[str]:
    """Serve models from a folder, and yield where."""
    command = [sys.executable, "-m", "carpool", "serve", *targets, "--port", "0", "--log", "json"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"ready on (http://[^\"]+?)\"", line):
                yield found[1]
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.communicate()


def run(name: str, url: str) -> dict[str, Any]:
    """Run a client's program, and return what it has found."""
    program = ROOT / "conformance" / "clients" / f"{PROGRAMS[name]}.py"
    with tempfile.TemporaryDirectory() as folder:  # some leave files where they run
        command = [python_of(name), program, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise SystemExit(f"{name} did not run:\n{done.stdout}\n{done.stderr}")
    found: dict[str, Any] = json.loads(lines[-1])
    for each in found["calls"]:
        if not each["ok"]:
            print(f"{name}: {each['call']}: {each['why']}", file=sys.stderr)
    return found


def snippets(page: str) -> dict[str, str]:
    """Return the snippets of docs/clients.md, by the client that they are for."""
    return dict(re.findall(r"<!-- (?:client|shell): (\w+) -->\n```\w+\n(.*?)```", page, re.DOTALL))


def at(url: str, snippet: str) -> str:
    """Return a snippet that asks another address."""
    host, port = url.removeprefix("http://").split(":")
    return snippet.replace('"localhost", 8000', f'"{host}", {port}').replace("localhost:8000", f"{host}:{port}")


@contextmanager
def served_by_the_page(page: str) -> Iterator[str]:
    """Serve the models of docs/clients.md, as it says."""
    (program,) = re.findall(r"```python\n(# models\.py\n.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"^carpool (serve models:.*)$", page, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models.py").write_text(program)
        with served(command.split()[1:], Path(folder)) as url:
            yield url


def run_snippet(name: str, page: str, url: str) -> dict[str, Any]:
    """Run the snippet of a client, and return what became of it as one of its calls."""
    snippet = at(url, snippets(page)[name])
    done = subprocess.run([python_of(name), "-c", snippet], capture_output=True, text=True, timeout=120)
    return {"call": "the snippet above", "ok": done.returncode == 0, "why": done.stderr[-300:]}


def table(found: list[dict[str, Any]]) -> str:
    """Return the table of the docs."""
    rows = ["| client | version | calls | passed |", "|---|---|---|---|"]
    for each in found:
        calls = ", ".join(call["call"] for call in each["calls"])
        passed = sum(call["ok"] for call in each["calls"])
        rows.append(f"| `{each['client']}` | {each['version']} | {calls} | {passed} of {len(each['calls'])} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or list(CLIENTS)
    with served([f"conformance.models:{name}" for name in MODELS], ROOT) as url:
        found = [run(name, url) for name in names]
    page = (ROOT / "docs" / "clients.md").read_text()
    with served_by_the_page(page) as url:
        for name, each in zip(names, found, strict=True):
            if name in snippets(page):
                each["calls"].append(run_snippet(name, page, url))
    text = table(found)
    print(text)
    if "--docs" in sys.argv:
        page = ROOT / "docs" / "clients.md"
        before, _, rest = page.read_text().partition(MARKS[0])
        page.write_text(before + MARKS[0] + text + MARKS[1] + rest.partition(MARKS[1])[2])
    sys.exit(not all(call["ok"] for each in found for call in each["calls"]))


if __name__ == "__main__":
    main()
