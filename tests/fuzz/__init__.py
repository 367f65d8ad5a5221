"""Random programs over the public API, with one rule: every call returns, with its own answer or a documented error,
and nothing is left behind.

    python -m tests.fuzz --steps 200000 --jobs 2

Read `program` (what a program is), `draw` (how one is made up), `run` (how it is run and watched), `actors` (how steps
are taken), `verdict` (what they may answer) and `leftovers` (what must be gone afterwards), in this order.
"""
