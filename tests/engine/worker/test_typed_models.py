"""Models of programs without a file: notebooks, prompts, `python -c`, `python < file`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import dataclasses
    import sys
    import carpool

    FACTOR = 3

    @dataclasses.dataclass
    class Item:
        x: float

    @dataclasses.dataclass
    class Answer:
        y: float

    def helped(x):
        return FACTOR * x

    class Typed(carpool.Model):
        examples = (Item(1.0),)

        def __init__(self, more):
            self.more = more

        def setup(self):
            print("set up")

        def predict(self, items: list[Item]) -> list[Answer]:
            print("asked")
            return [Answer(self.more(helped(item.x))) for item in items]

    def triple(answer: Answer) -> Answer:
        return Answer(helped(answer.y))

    service = carpool.Service(
        carpool.Stage(Typed, max_batch_size=4, kwargs={"more": lambda x: x + 1}), carpool.Stage(triple)
    )
    with service.run() as s:
        answer = s.predict(Item(2.0))
        print(answer, type(answer) is Answer)
"""
NO_CLOUDPICKLE = """
    import importlib.util
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name == "cloudpickle" else found(name, *more)
"""


def run(how: str, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that has no file: `-c`, or from standard input."""
    text = textwrap.dedent(text)
    arguments, given = (["-c", text], "") if how == "-c" else (["-"][: how == "-"], text)
    command = [sys.executable, *arguments]
    return subprocess.run(command, input=given, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("how", ["-c", "<"])
def test_a_typed_model_runs_in_processes(how: str, tmp_path: Path) -> None:
    """A model that has no file goes to its workers by value, with the functions, classes and kwargs
    that it uses, and items and results find their classes on both sides.
    """
    done = run(how, PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Answer(y=21.0) True" in done.stdout.splitlines()


def test_the_warm_up_prints_nothing(tmp_path: Path) -> None:
    """What a worker process prints in its warm-up is not shown; what it prints before and after
    that is.
    """
    done = run("-c", PROGRAM, tmp_path)
    assert done.stdout.splitlines().count("[Typed/0] asked") == 1
    assert "[Typed/0] set up" in done.stdout


def test_the_warm_up_is_in_the_log_at_debug(tmp_path: Path) -> None:
    """Whoever logs at DEBUG sees what the warm-up printed."""
    done = run("-c", "import logging\nlogging.basicConfig(level=10)\n" + textwrap.dedent(PROGRAM), tmp_path)
    assert "stage Typed printed in its warm-up: asked" in done.stderr


def test_a_warm_up_that_fails_shows_what_it_printed(tmp_path: Path) -> None:
    """If an example fails, what was printed until then is shown."""
    failing = PROGRAM.replace('print("asked")', 'print("the shape is wrong"); 1 / 0')
    done = run("-c", failing, tmp_path)
    assert "StartupError" in done.stderr
    assert "[Typed/0] the shape is wrong" in done.stdout


def test_without_cloudpickle_the_error_says_what_to_do(tmp_path: Path) -> None:
    """Without cloudpickle the error names the two ways on."""
    done = run("-c", textwrap.dedent(NO_CLOUDPICKLE) + textwrap.dedent(PROGRAM), tmp_path)
    assert done.returncode == 1
    assert "TypeError: Typed" in done.stderr
    assert 'run_in="thread"' in done.stderr
    assert "pip install 'carpool[notebook]'" in done.stderr


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "import threading; lock = threading.Lock()\nclass Model:\n    def predict(self, x): return lock",
            "cannot pickle",
        ),
        (
            "import msgspec\nclass S(msgspec.Struct):\n    x: int\ndef Model(x: S) -> int: return x.x",
            "S is a msgspec.Struct, which has no copy by value: use a dataclass",
        ),
    ],
)
def test_what_has_no_copy_is_refused(line: str, told: str, tmp_path: Path) -> None:
    """What cannot go by value is refused in the parent, with what to do."""
    done = run("-c", f"import carpool\n{line}\ncarpool.Service(Model).start()", tmp_path)
    assert done.returncode == 1
    assert told in done.stderr
    assert 'or run it in this process (run_in="thread")' in done.stderr


def test_an_unknown_class_is_named(tmp_path: Path) -> None:
    """An item of a typed class that no hint of the model names fails alone, and the error says what to do."""
    program = """
        import carpool
        class Item: pass
        def length(x): return 1
        with carpool.Service(length).run() as s:
            s.predict(Item())
    """
    done = run("-c", program, tmp_path)
    assert "ModelError" in done.stderr
    assert "name it in the hints of the model" in done.stderr
