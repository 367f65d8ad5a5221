"""One virtual environment for each peer, outside the repository.  python -m bench.peers.install [PEER ...]

They lie in ~/.cache/carpool-bench, or where CARPOOL_BENCH_ENVS says. `requirements/` holds the exact versions
of everything; `--newest` asks the package index for the latest instead and writes them down there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "mosec": ["mosec"],
    "litserve": ["litserve"],
    "bentoml": ["bentoml"],
    "ray": ["ray[serve]"],
    "mpservice": ["mpservice", "numpy"],
    "bare_echo": ["httptools", "uvloop"],
    "batched": ["batched"],
    "async_batcher": ["async-batcher"],
}
REQUIREMENTS = Path(__file__).parent / "requirements"
# None of them needs torch today. Should one want it, this CPU build is there first and pip leaves it alone.
TORCH = "torch==2.13.0"


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment."""
    root = os.environ.get("CARPOOL_BENCH_ENVS") or Path.home() / ".cache" / "carpool-bench"
    return Path(root) / peer / "bin" / "python"


def versions(peer: str) -> dict[str, str]:
    """Versions of the packages that PACKAGES names, as they are installed; empty without an environment."""
    python = python_of(peer)
    if not python.exists():
        return {}
    names = [package.partition("[")[0] for package in PACKAGES[peer]]
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=False)
    return dict(zip(names, found.stdout.split(), strict=False))


def install(peer: str, *, newest: bool = False) -> None:
    """Make the environment, or bring one that is there to the versions wanted."""
    python = python_of(peer)
    pinned = REQUIREMENTS / f"{peer}.txt"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if pinned.exists() and not newest:
        subprocess.run([*pip, "install", "--quiet", "--requirement", str(pinned)], check=True)
        return
    if wants_torch(pip, PACKAGES[peer]):
        subprocess.run([*pip, "install", "--quiet", TORCH], check=True)
    subprocess.run([*pip, "install", "--quiet", "--upgrade", *PACKAGES[peer]], check=True)
    freeze = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True)
    pinned.write_text(freeze.stdout)


def wants_torch(pip: list[str], packages: list[str]) -> bool:
    plan = subprocess.run(
        [*pip, "install", "--dry-run", "--upgrade", *packages], check=True, capture_output=True, text=True
    )
    return " torch-" in plan.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PACKAGES)}; none: all")
    parser.add_argument("--newest", action="store_true", help="latest versions, written to requirements/")
    arguments = parser.parse_args()
    if unknown := set(arguments.peers) - set(PACKAGES):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PACKAGES)}")
    for peer in arguments.peers or PACKAGES:
        install(peer, newest=arguments.newest)
        print(peer, *(f"{name} {version}" for name, version in versions(peer).items()), flush=True)


if __name__ == "__main__":
    main()
