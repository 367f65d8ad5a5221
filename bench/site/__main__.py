"""Builds the site into build/site, strictly, and follows all links of the result.

`--links` prints the links that lead to other sites, a line for each address with the pages that
have it; `--check` follows the links of a site that is there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from typing import Final

from bench import ROOT
from bench.site.sources import assemble
from bench.site.walk import SITE, external, faults

CONFIG: Final = ROOT / "zensical.toml"


def build() -> list[str]:
    """Build the site, and return what is wrong with it."""
    assemble()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(CONFIG)]
    plain = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=plain, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    told = re.sub(r"\x1b\[[\d;]*m", "", done.stdout).split("\nTraceback")[0]
    print(told)
    warned = [line for line in told.splitlines() if line.startswith("griffe: ")]
    return [*warned, *(["the build failed"] if done.returncode else [*faults(SITE), *_as_declared()])]


def _as_declared() -> list[str]:
    """Return the pages that show a setting as the code declares it, not as callers give it."""
    pages = sorted((SITE / "reference").glob("*.html"))
    shown = [page.name for page in pages if re.search(r"\b[Ss]etting<", page.read_text())]
    return [f"{name}: a Setting of a declaration" for name in shown]


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.site", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--links", action="store_true", help="print the links to other sites, and build nothing")
    parser.add_argument("--check", action="store_true", help="follow the links of the site that is there")
    given = parser.parse_args()
    if given.links:
        for address, pages in sorted(external(SITE).items()):
            print(f"{address}  {' '.join(sorted(pages))}")
        return 0
    found = faults(SITE) if given.check else build()
    for each in found:
        print(each, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
