"""What most properties are tried with. Only tests import this: before, it is not known how much the run tries."""

from __future__ import annotations

import os

from hypothesis import settings

from tests.effort import examples

_FUZZ_EXAMPLES = os.environ.get("FUZZ_EXAMPLES")

PROPERTY = examples(200, derandomize=True)
"""The same 200 examples in each run, or the `share` of them; for `make fuzz` many more, and other ones each time."""
if _FUZZ_EXAMPLES is not None:
    PROPERTY = settings(PROPERTY, max_examples=int(_FUZZ_EXAMPLES), derandomize=False)
