"""Type checkers see `A -> B`: mypy and pyright over a file of assertions, and over mistakes that they must find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import slow_where

FILE = Path(__file__).parent / "typing" / "batched.py"
CHECKERS = {
    "mypy": [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"],
    "pyright": [sys.executable, "-m", "basedpyright", "--level", "error", "--pythonpath", sys.executable],
}
MISTAKES = """
length(3)
wrong: str = length("a")
Translator().translate(b"a")
length.many("a", "b")
carpool.batch(max_batch_size="many")
"""


def check(checker: str, file: Path) -> tuple[int, str]:
    done = subprocess.run([*CHECKERS[checker], str(file)], capture_output=True, text=True, cwd=file.parent, timeout=110)
    return done.returncode, done.stdout + done.stderr


@slow_where(lambda checker: checker == "mypy")
@pytest.mark.parametrize("checker", CHECKERS)
def test_types_of_batched_functions(checker: str) -> None:
    """In mypy and pyright every `assert_type` of the file holds."""
    code, text = check(checker, FILE)

    assert code == 0, text


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_mistakes_are_found(checker: str, tmp_path: Path) -> None:
    """Each of the lines that are wrong is reported, so the test above is able to fail."""
    source = FILE.read_text()
    wrong = tmp_path / "wrong.py"
    wrong.write_text(source + MISTAKES)
    _, text = check(checker, wrong)

    first = source.count("\n") + 2
    for line in range(first, first + MISTAKES.strip().count("\n") + 1):
        assert f"wrong.py:{line}:" in text, text
