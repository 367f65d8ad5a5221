"""Random graphs under faults, in threads, tasks and processes: every caller gets exactly one answer, its own, and
nothing is left behind. In virtual time the worlds of `tests/engine/core` do the same, with more kinds of faults.
"""

from __future__ import annotations

import asyncio
import tempfile
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.graphs.asking import ask_a_graph

EXAMPLES = {"thread": 12, "loop": 12, "process": 5}


@pytest.mark.parametrize("run_in", ["thread", "loop", "process"])
def test_every_caller_gets_its_own_answer(run_in: str) -> None:
    @examples(EXAMPLES[run_in])
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(ask_a_graph(Random(seed), run_in, folder if run_in == "process" and seed % 2 else ""))

    check()
