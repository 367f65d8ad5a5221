"""Runs the command line as `python -m carpool`."""

from __future__ import annotations

from carpool.cli import main

if __name__ == "__main__":
    main()
